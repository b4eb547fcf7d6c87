"""Every mistake, made by hand in a converted checkpoint: verify fails, names the component, and finds the repair."""

import json
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.command import call
from helpers.covering import exhaustive, few, rest_slow, slow_unless_new, spread
from helpers.families import (
    CONFIGS,
    DISTINCT,
    REPRESENTATIVES,
    decoder_from,
    randomised_reference,
    save_hf,
    shallow,
    spec_of,
)
from helpers.trees import TREES, random_weights
from safetensors.torch import load_file, save_file
from torch import Tensor

from gptkit.architectures import architecture_of
from gptkit.components import (
    ALiBi,
    GatedFeedForward,
    LinearScaling,
    MixtureOfExperts,
    ModelSpec,
    Rotary,
    differences,
    from_json,
    to_json,
)
from gptkit.converter.checkpoint import open_checkpoint
from gptkit.converter.convert import convert
from gptkit.converter.manifest import MANIFEST
from gptkit.converter.publish import Staging
from gptkit.converter.resolve import SAMPLES
from gptkit.modules.positions import alibi_slopes
from gptkit.parity.bisect import MIXED, taps
from gptkit.parity.mutations import MUTATIONS, Mutant, Mutation, applicable
from gptkit.parity.probe import probe
from gptkit.parity.score import miniature, score

BY_NAME = {mutation.name: mutation for mutation in MUTATIONS}

FROM_THE_REFERENCE = {
    "rope scaling dropped": "the reference's scaling",
    "QKV bias dropped": "the reference's values of attention.q_proj.bias, attention.k_proj.bias, attention.v_proj.bias",
    "another activation": "the reference's activation",
    "window ignored": "the reference's window",
    "scores not scaled": "the reference's scale",
    "parallel block run in series": "the reference's parallel",
}
"""Mistakes that lose something: what puts it back."""
IN_TRAITS_ALONE = {"head bias dropped", "RoPE pairs of latent attention confused", "latent not normed"}
"""Mistakes that can be made in none of `DISTINCT`: `TRAITS` has families for them."""
PLACES = {
    "q and k swapped": "attention q",
    "k and v swapped": "attention k",
    "gate and up swapped": "feed-forward gate",
    "rope permute missing": "attention q",
    "rope permute done twice": "attention q",
    "RoPE turned the other way": "attention q",
    "key-value heads tiled, not repeated": "attention q",
    "query heads in other groups": "attention q",
    "norms swapped": "attention norm",
    "QKV bias dropped": "attention q",
    "eps ten times as large": "norm",
    "eps ten times as small": "norm",
    "another activation": "feed-forward activation",
    "ALiBi slopes in descending order": "attention q",
    "experts in other places": "feed-forward router",
    "an expert a token too many": "feed-forward experts",
    "weights of experts normalised or not": "feed-forward experts",
    "tied head ignored": "head",
    "head bias dropped": "head",
    "another layer's tensor": "attention output projection",
    "square matrix transposed": "attention output projection",
    "positions off by one": "positions",
    "parallel block run in series": "feed-forward norm",
}
"""Where each is first seen, as the beginning of a label; "norm" is whichever norm comes first. Others: in the mix."""
IN_CODE = {each.name for each in MUTATIONS if each.in_code}
"""Mistakes that no checkpoint can hold: `test_port` makes them in a port, and the probe has to see them."""


def _attentions(spec: ModelSpec) -> list[Any]:
    return [block.attention for block in spec.blocks]


def _rotaries(spec: ModelSpec) -> list[Rotary]:
    return [each.position for each in _attentions(spec) if isinstance(each.position, Rotary)]


def _mixtures(spec: ModelSpec) -> list[MixtureOfExperts]:
    return [b.feed_forward for b in spec.blocks if isinstance(b.mixer("feed_forward"), MixtureOfExperts)]


def _slopes_in_order(spec: ModelSpec) -> bool:
    heads = [each.heads for each in _attentions(spec) if isinstance(each.position, ALiBi)]
    return all(bool((alibi_slopes(each).diff() < 0).all()) for each in heads)


DOES_NOT_APPLY: dict[str, tuple[str, Callable[[ModelSpec], bool]]] = {
    "gate and up swapped": (
        "there is no gate",
        lambda spec: not any(isinstance(node, GatedFeedForward) for _, node in spec.nodes()),
    ),
    "experts in other places": ("there are none", lambda spec: not _mixtures(spec)),
    "an expert a token too many": (
        "there are no experts, or all are taken",
        lambda spec: all(each.top_k == each.experts for each in _mixtures(spec)),
    ),
    "weights of experts normalised or not": (
        "there are no experts, or all are taken",
        lambda spec: all(each.top_k == each.experts for each in _mixtures(spec)),
    ),
    "RoPE pairs of latent attention confused": ("none of these has it", lambda spec: True),
    "latent not normed": ("none of these has it", lambda spec: True),
    "rope permute missing": ("positions are not rotary", lambda spec: not _rotaries(spec)),
    "rope permute done twice": ("positions are not rotary", lambda spec: not _rotaries(spec)),
    "RoPE turned the other way": ("positions are not rotary", lambda spec: not _rotaries(spec)),
    **{name: ("positions are not rotary", lambda spec: not _rotaries(spec)) for name in IN_CODE},
    "bias of the choice in the weights of experts": (
        "no choice has a bias",
        lambda spec: not any(each.choice_bias for each in _mixtures(spec)),
    ),
    "wrong rope base": ("positions are not rotary", lambda spec: not _rotaries(spec)),
    "rope scaling dropped": ("there is none", lambda spec: not any(each.scaling for each in _rotaries(spec))),
    "RoPE positions divided by 2": (
        "positions are not rotary, or have a scaling that is not linear",
        lambda spec: not any(isinstance(each.scaling, LinearScaling | None) for each in _rotaries(spec)),
    ),
    **{
        name: (
            "a key-value head a query head, or one for all",
            lambda spec: all(each.kv_heads in (1, each.heads) for each in _attentions(spec)),
        )
        for name in ("query heads in other groups", "key-value heads tiled, not repeated")
    },
    "norms swapped": ("a layer has one norm", lambda spec: all(b.feed_forward_norm is None for b in spec.blocks)),
    "QKV bias dropped": ("there is none", lambda spec: not any(each.qkv_bias for each in _attentions(spec))),
    "window ignored": ("there is none", lambda spec: all(each.window is None for each in _attentions(spec))),
    "kinds of layers shifted by one": (
        "the layers are alike",
        lambda spec: len({(each.window, each.position) for each in _attentions(spec)}) == 1,
    ),
    "scores not scaled": ("the scale is 1", lambda spec: all(each.scale == 1 for each in _attentions(spec))),
    "ALiBi slopes in descending order": ("no ALiBi, or slopes that descend anyway", _slopes_in_order),
    "tied head ignored": ("the head is not tied", lambda spec: not spec.head.tied),
    "head bias dropped": ("there is none", lambda spec: not spec.head.bias),
    "square matrix transposed": (
        "the output projection is not square",
        lambda spec: all(each.heads * each.head_dim != each.hidden_size for each in _attentions(spec)),
    ),
    "positions off by one": ("positions are relative", lambda spec: spec.positions is None),
    "parallel block run in series": (
        "blocks are serial, or have one norm for both branches",
        lambda spec: all(not block.parallel or block.feed_forward_norm is None for block in spec.blocks),
    ),
}
"""The only reasons for which a mistake is not made in a family."""


def made_in(spec: ModelSpec, name: str) -> bool:
    """Whether a mistake can be made in a tree."""
    return name not in DOES_NOT_APPLY or not DOES_NOT_APPLY[name][1](spec)


def pairs() -> list[tuple[str, str]]:
    """Every mistake in every variant that it can be made in."""
    specs = {name: spec_of(shallow(CONFIGS[name])) for name in DISTINCT}
    return [
        (name, each.name)
        for name, spec in specs.items()
        for each in MUTATIONS
        if made_in(spec, each.name) and not each.in_code
    ]


def soften(file: Path) -> None:
    """Make embeddings small, as at the start of trained models: beside a variance of 0.6 an eps of 1e-7 for 1e-6 is
    twice the noise of fp32 and no more.
    """
    tensors = load_file(file)
    tables = [name for name in tensors if any(part in name for part in ("embed", "wte", "wpe")) and "norm" not in name]
    save_file(tensors | {name: tensors[name] / 8 for name in tables}, file, {"format": "pt"})


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, Path]]:
    """name -> (what transformers loads, the folder that gptkit made of it), each made once."""

    @cache
    def make(name: str) -> tuple[str, Path]:
        folder = tmp_path_factory.mktemp("converted")
        reference = name if name.startswith("sample:") else str(folder / "hf")
        if reference != name:
            save_hf(shallow(CONFIGS[name]) if name in DISTINCT else CONFIGS[name], folder / "hf")
            soften(folder / "hf" / "model.safetensors")
        convert(reference, folder / "local")
        return reference, folder / "local"

    return make


@pytest.fixture(scope="module", autouse=True)
def loaded_once() -> Iterator[None]:
    """transformers loads a reference once for all mistakes that are held against it."""
    with pytest.MonkeyPatch.context() as patch:
        original = transformers.AutoModelForCausalLM.from_pretrained
        load = cache(lambda folder, options: original(folder, **dict(options)))
        patch.setattr(
            transformers.AutoModelForCausalLM,
            "from_pretrained",
            lambda folder, **options: load(folder, tuple(sorted(options.items()))),
        )
        yield


def read_local(folder: Path) -> tuple[ModelSpec, dict[str, Tensor]]:
    """A converted folder's tree and tensors, without gptkit's own reader."""
    spec = from_json(json.loads((folder / "gptkit.json").read_text())["spec"])
    return spec, load_file(folder / "model.safetensors")


def write_wrong(right: Path, mutant: Mutant, target: Path) -> None:
    """A converted folder with another tree and other tensors, and a manifest that says so."""
    spec, weights = mutant
    record = json.loads((right / "gptkit.json").read_text())
    with Staging(target) as staging:
        for path in right.iterdir():
            if path.name not in (MANIFEST, "gptkit.json", "model.safetensors"):
                (staging.path / path.name).write_bytes(path.read_bytes())
        (staging.path / "gptkit.json").write_text(json.dumps({**record, "spec": to_json(spec)}))
        tensors = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in weights.items()}
        save_file(tensors, staging.path / "model.safetensors", {"format": "pt"})
        staging.commit({})


def place_of(mutation: Mutation, spec: ModelSpec, weights: dict[str, Tensor], mutant: Mutant) -> str:
    """Where a mistake shows first, as the beginning of what the report says."""
    label = PLACES.get(mutation.name, "attention mix")
    if label == "norm":
        label = "attention norm" if spec.embedding.norm is None else "embedding norm"
    if _mixtures(spec) and label in ("feed-forward gate", "feed-forward activation"):
        label = "feed-forward experts"  # what one of them computes is not looked at
    if not label.startswith(("attention", "feed-forward")):
        return label
    moved = {int(name.split(".")[1]) for name, each in mutant[1].items() if not torch.equal(each, weights[name])}
    moved |= {i for i, (a, b) in enumerate(zip(spec.blocks, mutant[0].blocks, strict=True)) if a != b}
    return f"layer {min(moved)} {label}"


def variant_pairs() -> Iterator[Any]:
    """Return `pairs` as parameters. For every mistake, all variants but six are slow."""
    variants: dict[str, list[str]] = {}
    for variant, mistake in pairs():
        variants.setdefault(mistake, []).append(variant)
    for mistake, names in variants.items():
        new = [name for name in names if not slow_unless_new(name)]
        kept = {new[place] for place in spread(len(new), 6, zlib.crc32(mistake.encode()))}
        for name in names:
            yield pytest.param(name, mistake, marks=[] if name in kept else [pytest.mark.slow])


def sample_pairs() -> Iterator[Any]:
    """The same for the trained samples, which take longer; one of them every time."""
    for sample in SAMPLES:
        spec = open_checkpoint(f"sample:{sample}").spec
        for mutation in MUTATIONS:
            if made_in(spec, mutation.name) and not mutation.in_code:
                marks = () if sample == "gpt2" else (pytest.mark.slow,)
                yield pytest.param(f"sample:{sample}", mutation.name, marks=marks)


@few(2)
@pytest.mark.parametrize(("checkpoint", "name"), [*variant_pairs(), *sample_pairs()])
def test_a_mistake_is_seen_placed_and_repaired(checkpoint, name, converted, tmp_path):
    reference, right = converted(checkpoint)
    spec, weights = read_local(right)
    mutation = BY_NAME[name]
    mutant = mutation.apply(spec, weights)
    assert mutant is not None
    write_wrong(right, mutant, tmp_path / "wrong")
    run = call("verify", reference, str(tmp_path / "wrong"), "--no-mutations")
    assert run.exit_code == 3, run.output
    said = " ".join(run.stdout.split())  # as one line, however wide the terminal
    place = said.split(" place ")[1].split(": the first component that differs")[0]
    assert place.startswith(place_of(mutation, spec, weights, mutant))
    causes = said.split(" cause ")[1]
    assert f"{FROM_THE_REFERENCE.get(name, mutation.repair)} restores parity" in causes
    assert causes.index("restores parity") < causes.find(" leaves ") % len(said)


TRAITS = (
    ("cohere", "RoPE pairs element 0 with d/2 instead of 1"),
    ("cohere", "logits not scaled"),
    ("cohere-normed", "heads normed all at once"),
    ("deepseek_v2-grouped", "experts chosen from all groups"),
    ("deepseek_v3", "RoPE pairs of latent attention confused"),
    ("deepseek_v3", "a sigmoid router taken for softmax"),
    ("deepseek_v3", "an expert a token too many"),
    ("deepseek_v3", "bias of the experts' choice dropped"),
    ("deepseek_v3", "experts chosen from all groups"),
    ("deepseek_v3", "latent not normed"),
    ("deepseek_v3", "latent of queries not normed"),
    ("deepseek_v3", "shared expert left out"),
    ("deepseek_v3", "weights of experts not scaled"),
    ("deepseek_v3-yarn", "scores scaled by their width alone"),
    ("gemma2", "cap on logits dropped"),
    ("gemma2", "cap on scores dropped"),
    ("gemma2", "embedding not scaled"),
    ("gemma2", "norms of sub-layers' outputs left out"),
    ("gemma2", "weight of norms taken for their factor"),
    ("gemma3_text", "kinds of layers shifted by one"),
    ("gemma3_text", "norm of keys left out"),
    ("gemma3_text", "norm of queries left out"),
    ("glm4", "RoPE on whole heads, not on a part"),
    ("gpt_neox", "RoPE on whole heads, not on a part"),
    ("gpt_neox", "bias of norms dropped"),
    ("gpt_oss", "YaRN's ramp truncated"),
    ("gpt_oss", "router bias dropped"),
    ("gpt_oss", "sinks left out"),
    ("gpt_oss", "up taken as it is, not one more"),
    ("gpt_oss-b", "gate and up not limited"),
    ("granite", "branches not scaled"),
    ("granite", "embedding not scaled"),
    ("granite", "logits not scaled"),
    ("olmo", "q, k and v not clipped"),
    ("olmo2", "norms of sub-layers' outputs left out"),
    ("opt", "rows before the first position not skipped"),
    ("opt-350m", "norms of sums left out"),
    ("phi", "head bias dropped"),
    ("phi3-long", "rope scaling dropped"),
    ("qwen3_moe", "weights of experts normalised or not"),
    ("smollm3", "kinds of layers shifted by one"),
    ("stablelm", "RoPE on whole heads, not on a part"),
)
"""What sets families apart from the first eleven, and the mistake that it invites."""


@few(1)
@pytest.mark.parametrize(("name", "mistake"), TRAITS)
def test_the_mistake_of_a_trait_is_made_seen_and_repaired(name, mistake, converted, tmp_path):
    reference, right = converted(name)
    spec, weights = read_local(right)
    found = {mutation.name: mutant for mutation, mutant in applicable(spec, weights)}
    write_wrong(right, found[mistake], tmp_path / "wrong")
    run = call("verify", reference, str(tmp_path / "wrong"), "--no-mutations")
    assert run.exit_code == 3, run.output
    assert "restores parity" in " ".join(run.stdout.split())


@exhaustive
def test_no_mistake_drops_out(converted):
    """What is made above is what `applicable` makes in the converted checkpoints, and of every kind there is."""
    read = {name: read_local(converted(name)[1]) for name in DISTINCT}
    made = {(name, each.name) for name in DISTINCT for each, _ in applicable(*read[name]) if each in MUTATIONS}
    code = {(name, each) for name in DISTINCT for each in IN_CODE if made_in(read[name][0], each)}
    assert made == set(pairs()) | code
    assert {name for _, name in pairs()} | IN_CODE | IN_TRAITS_ALONE == set(BY_NAME)
    assert {name for _, name in TRAITS} >= IN_TRAITS_ALONE
    assert set(DOES_NOT_APPLY) | set(FROM_THE_REFERENCE) <= set(BY_NAME)


def test_the_command_counts_mistakes_and_names_the_cause(converted, tmp_path):
    reference, right = converted("llama")
    mutant = BY_NAME["rope permute missing"].apply(*read_local(right))
    assert mutant is not None
    write_wrong(right, mutant, tmp_path / "wrong")
    run = call("verify", reference, str(tmp_path / "wrong"), "--json")
    assert run.exit_code == 3
    data = json.loads(run.stdout)
    assert data["divergence"]["causes"][0]["repair"] == "undoing an interleaved RoPE layout"
    assert data["divergence"]["causes"][0]["restores"] is True
    assert data["score"]["missed"] == []
    written = sum(name == "llama" for name, _ in pairs()) + len(
        IN_CODE - {"bias of the choice in the weights of experts"}
    )
    fields = {"norms before sub-layers left out", "no positions in attention", "output bias of attention dropped"}
    fields |= {"biases into the feed-forward dropped", "bias out of the feed-forward dropped"}
    fields |= {"norm of the last output left out"}
    assert len(data["score"]["caught"]) == written + len(fields)
    assert fields < set(data["score"]["caught"])


@pytest.mark.parametrize("name", sorted(set(BY_NAME) - set(FROM_THE_REFERENCE) - IN_CODE - {"tied head ignored"}))
def test_a_repair_undoes_the_mistake(name):
    """Applied to what the mistake made, nothing of it is left."""
    mutation = BY_NAME[name]
    for spec in (spec_of(shallow(CONFIGS[variant])) for variant in DISTINCT):
        if not made_in(spec, name):
            continue
        generator = torch.Generator().manual_seed(0)
        weights = {each.name: torch.randn(each.shape, generator=generator) for each in spec.parameters()}
        wrong = mutation.apply(spec, weights)
        assert wrong is not None
        mended = mutation.mend(*wrong)
        assert mended is not None
        assert all(torch.equal(mended[1][each], weights[each]) for each in weights)
        for _, a, b in differences(spec, mended[0]):
            assert a == pytest.approx(b, rel=1e-12)  # a number, times ten and divided by it


@few(3)
@pytest.mark.parametrize("family", rest_slow(REPRESENTATIVES))
def test_the_probe_catches_every_mistake_on_random_weights(family):
    config = REPRESENTATIVES[family].config
    decoder = decoder_from(randomised_reference(config, torch.float64, "eager"), config)
    weights = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
    marks = score(decoder.spec, weights, probe(decoder.spec))
    assert marks.missed == ()
    assert marks.tried >= 8


def test_a_probe_that_is_too_kind_is_told_so():
    """Eight tokens see neither a window of 16 nor, in a verdict, that anybody ignored it."""
    config = CONFIGS["mistral"]
    decoder = decoder_from(randomised_reference(config, torch.float64, "eager"), config)
    weights = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
    kind = [batch for batch in probe(decoder.spec) if batch.name == "one token"]
    assert "window ignored" in score(decoder.spec, weights, kind).missed


def test_what_is_unprobed_is_not_counted():
    config = CONFIGS["mistral"]
    decoder = decoder_from(randomised_reference(config, torch.float64, "eager"), config)
    weights = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
    short = [batch for batch in probe(decoder.spec) if batch.input_ids.shape[1] <= 64]
    marks = score(decoder.spec, weights, short, ["window ignored"])
    assert "window ignored" not in (*marks.caught, *marks.caught_random, *marks.missed)


@few(3)
@pytest.mark.parametrize("name", TREES)
def test_mistakes_in_trees_that_no_family_has_are_caught(name):
    """On themselves and on their small copies."""
    spec = TREES[name]
    weights, copy = random_weights(spec), miniature(spec, 200)
    found = {each.name for each, _ in applicable(spec, weights)}
    assert found == {each.name for each, _ in applicable(copy, random_weights(copy))}
    for mutation, (tree, changed) in applicable(spec, weights):
        assert {each.name: each.shape for each in tree.parameters()} == {n: tuple(t.shape) for n, t in changed.items()}
        assert mutation.name
    # A query's sum with what all keys share is one to the softmax, and of one expert the router says nothing.
    blind = {"experts in other places"} if name == "experts-one" else set()
    assert set(score(spec, weights, probe(spec)).missed) <= blind
    assert set(score(copy, random_weights(copy), probe(copy)).missed) <= blind


def test_every_mistake_has_a_tree_that_it_can_be_made_in():
    made = {each.name for spec in TREES.values() for each, _ in applicable(spec, random_weights(spec))}
    assert IN_TRAITS_ALONE - made == {"head bias dropped"}


OUTSIDE = ("granitemoeshared", "granitemoe_swa", "granitemoehybrid")
"""Families whose shared experts transformers adds outside the mixture's module: no module there gives the whole sum."""


@pytest.mark.parametrize("variant", REPRESENTATIVES.values(), ids=str)
def test_every_component_with_a_weight_is_looked_at(variant):
    architecture = architecture_of(variant.config)
    spec = architecture.spec(variant.config)
    watched = {tap.label for tap in taps(architecture, spec)}
    slots = {each.mixer.slot for block in spec.blocks for each in block.sublayers}
    inside = {MIXED["attention.o_proj"], *(["feed-forward experts"] if _mixtures(spec) else MIXED.values())}
    heads = {f"attention {each}" for each in "qkv"}
    inside, heads = (inside, heads) if "attention" in slots else (set(), set())
    last = {"final norm"} if spec.final_norm is not None and spec.final_norm.weights() else set()
    seen = inside - {"feed-forward experts"} if variant.family in OUTSIDE else inside
    assert {"embedding", *heads, *seen, *last} <= watched
    places = [tap.ours[0].split(".") for tap in taps(architecture, spec) if tap.layer is not None]
    assert slots <= {slot for _, _, slot, *_ in places}
    assert inside == seen or not inside <= watched
    reference = randomised_reference(variant.config, torch.float32, architecture.reference(spec)[0])
    modules = dict(reference.named_modules())
    assert all(tap.theirs[0] in modules for tap in taps(architecture, spec))
