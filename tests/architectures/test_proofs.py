"""The four proofs that hold every family (docs: architecture), over every registered family and variant.

1. every field of transformers' config class is read, declared irrelevant, or refused;
2. every checkpoint element lands in exactly one place, and comes back;
3. gptkit's tree, gptkit's modules and transformers' model have the same names and shapes;
4. logits are those of transformers, to the last bit.
"""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from helpers import covering
from helpers.covering import covered, examples, few, kinds, others_slow, slow_unless_new, spread
from helpers.families import (
    CONFIGS,
    REPRESENTATIVES,
    TWO_STACKS,
    VARIANTS,
    VOCAB,
    Variant,
    checkpoint_tensors,
    continued,
    decoder_from,
    hf_config,
    modern,
    randomised_reference,
    spec_of,
    variants_of,
)

from gptkit.architectures import ARCHITECTURES, architecture_of
from gptkit.components import ModelSpec, Rotary
from gptkit.errors import CannotExpress
from gptkit.modules import Cache
from gptkit.parity.outputs import computed_rightly, outputs_of
from gptkit.parity.sides import auto_class
from gptkit.testing import (
    Probe,
    elements_land_once,
    fields_are_accounted_for,
    largest_difference,
    logits_agree,
    names_and_shapes_agree,
    probes,
    stored,
)

variants = pytest.mark.parametrize("variant", VARIANTS, ids=str)


def of_its_family(variant: Variant, *rest: Any) -> set[Any]:
    """What a case shows where `make test` leaves no family out, in fp32."""
    return {*kinds(variant), rest, *(() if torch.bfloat16 in rest else (variant.family,))}


every_family = covered("variant", by=of_its_family)


def families(test: Any) -> Any:
    """A test that `make test` has for every family too."""
    return covered("family", by=lambda family: {family})(pytest.mark.parametrize("family", ARCHITECTURES)(test))


# --- the registry itself ---------------------------------------------------------------------------------------------


@families
def test_every_family_has_variants(family):
    assert {architecture_of(variant.config).name for variant in variants_of(family)} == {family}


def test_no_variant_is_of_an_unknown_family():
    assert {variant.family for variant in VARIANTS} == set(ARCHITECTURES)


@families
def test_every_model_type_has_a_variant(family):
    tried = {variant.config["model_type"] for variant in variants_of(family)}
    assert tried == set(ARCHITECTURES[family].model_types)


# --- 1: every field of the config class ------------------------------------------------------------------------------


@families
def test_every_field_of_transformers_config_is_accounted_for(family):
    config_class = getattr(transformers, ARCHITECTURES[family].hf_config)
    theirs = {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map)
    fields_are_accounted_for(ARCHITECTURES[family], [variant.config for variant in variants_of(family)], theirs)


@families
def test_what_a_saved_config_holds_is_accounted_for(family):
    """The config class' fields are not all that config.json gets."""
    architecture = ARCHITECTURES[family]
    config = json.loads(
        getattr(transformers, architecture.hf_config)(**architecture.stated).to_json_string(use_diff=False)
    )
    _, unknown = architecture.spec_and_unknown(config)
    assert unknown == []


@families
def test_defaults_are_transformers_own(family):
    """An empty config.json means what transformers' config class means by it."""
    architecture = ARCHITECTURES[family]
    config_class = getattr(transformers, architecture.hf_config)
    full = json.loads(config_class(**architecture.stated).to_json_string(use_diff=False))
    assert architecture.usual == architecture.spec({**full, "model_type": family})


@variants
def test_a_variant_has_no_unknown_fields(variant):
    _, unknown = ARCHITECTURES[variant.family].spec_and_unknown(variant.config)
    assert unknown == []


# --- 2: every element once, and back ---------------------------------------------------------------------------------


@every_family
@variants
def test_every_element_lands_once_and_comes_back(variant):
    elements_land_once(ARCHITECTURES[variant.family], variant.config)


@variants
def test_torch_numpy_and_shapes_alone_agree(variant):
    architecture, spec = ARCHITECTURES[variant.family], spec_of(variant.config)
    for leaf in architecture.bind(spec):
        source = np.arange(np.prod(leaf.shape), dtype=np.int64).reshape(leaf.shape)
        with_numpy = leaf.to_shared(source)
        with_torch = leaf.to_shared(torch.from_numpy(source))
        without_data = leaf.to_shared(torch.empty(leaf.shape, device="meta"))
        for ours, theirs, shape in zip(with_numpy, with_torch, without_data, strict=True):
            assert np.array_equal(ours, theirs.numpy())
            assert ours.shape == tuple(theirs.shape) == tuple(shape.shape)
        assert np.array_equal(leaf.to_checkpoint(with_numpy), leaf.to_checkpoint(with_torch).numpy())
        assert tuple(leaf.to_checkpoint(without_data).shape) == leaf.shape


# --- 3: names and shapes ---------------------------------------------------------------------------------------------


def hf_shapes(config: transformers.PreTrainedConfig, drop: str | None) -> dict[str, tuple[int, ...]]:
    """transformers' own names and shapes for a config, no memory taken."""
    with torch.device("meta"):
        model = auto_class(config.to_dict()).from_config(config)
    return {name: tuple(tensor.shape) for name, tensor in checkpoint_tensors(model).items() if name != drop}


@every_family
@variants
def test_names_and_shapes_are_transformers_own(variant):
    names_and_shapes_agree(ARCHITECTURES[variant.family], variant.config, hf_shapes(hf_config(variant.config), None))


NOT_BUILT = {
    **dict.fromkeys(
        ("ministral", "hunyuan_v1_dense", "hunyuan_v1_moe"), "transformers computes with its default head_dim, of none"
    ),
    "lfm2_moe": "of its own default, layer_types null, transformers builds no model",
    "nemotron": "of its own default, num_key_value_heads null, transformers builds no model",
}


@few(8)
@pytest.mark.parametrize("family", [each for each in ARCHITECTURES if each not in NOT_BUILT])
def test_the_default_config_counts_what_transformers_counts(family):
    """The full-size defaults, where head_dim, biases and groups are the real ones."""
    architecture = ARCHITECTURES[family]
    config = getattr(transformers, architecture.hf_config)(**architecture.stated)
    spec = architecture.usual
    ours = {leaf.checkpoint: leaf.shape for leaf in architecture.bind(spec)}
    assert ours == stored(architecture, spec, hf_shapes(config, None))


# --- 4: logits -------------------------------------------------------------------------------------------------------

LENGTHS = (1, 7, 200)


WHOLE = {[*REPRESENTATIVES][place] for place in spread(len(REPRESENTATIVES), 6 if covering.quick else 10**6, 0)}
"""The families whose representatives get the whole grid: all, and some in `make test`."""


def grid(variant: Variant) -> Iterator[Probe]:
    """Every length for a family's representative; past every window and context for all. Lengths grow, because
    transformers' dynamic rope remembers the longest sequence it saw."""
    whole = variant.representative and variant.family in WHOLE
    for length in LENGTHS if whole else (7, 200):
        for batch in (1, 3) if whole else (2 if covering.quick else 3,):
            every = probes(length, batch, ("left", "right"), VOCAB)
            yield from (each for each in every if computed_rightly(ARCHITECTURES[variant.family], each))


def attention_paths(variant: Variant) -> tuple[str, ...]:
    return ARCHITECTURES[variant.family].reference(spec_of(variant.config))


NO_CACHE = {
    "openai-gpt": "transformers has no cache for it, and computes every token again",
    **{
        variant.family: "attention in both directions leaves no cache"
        for variant in VARIANTS
        if not spec_of(variant.config).causal
    },
    **{variant.family: "of two texts: tests/architectures/test_encoder_decoders.py" for variant in TWO_STACKS},
}

LOGIT_CASES = [
    pytest.param(
        *(variant, dtype, attention),
        id=f"{variant}-{str(dtype).removeprefix('torch.')}-{attention}",
        marks=() if (dtype, place) == (torch.float32, 0) else slow_unless_new(variant.name),
    )
    for variant in VARIANTS
    for dtype in (torch.float32, torch.bfloat16)
    for place, attention in enumerate(attention_paths(variant))
]


@covered("variant", "dtype", "attention", by=of_its_family)
@pytest.mark.parametrize(("variant", "dtype", "attention"), LOGIT_CASES)
def test_logits_are_transformers_to_the_bit(variant, dtype, attention):
    """All at once and, where transformers has a cache, one token at a time, which comes first: its dynamic rope
    remembers the longest sequence."""
    reference = randomised_reference(variant.config, dtype, attention)
    decoder = decoder_from(reference, variant.config, attention)
    if variant.family not in NO_CACHE:
        greedy_decode_agrees(reference, decoder, variant)
    logits_agree(reference, decoder, grid(variant))


def greedy_decode_agrees(reference, decoder, variant):
    """From a prompt shorter than the window to past it."""
    cache = Cache(decoder.spec)
    ids = next(probes(10, 1, (), VOCAB)).input_ids
    worst = []
    with torch.inference_mode():
        theirs = continued(reference, ids, None)
        ours = decoder(ids, cache=cache)
        whole = variant.representative and variant.family in WHOLE
        for _ in range(48 if whole else 12):
            worst.append(largest_difference(ours, theirs.logits))
            ids = theirs.logits[:, -1:].argmax(-1)
            theirs = continued(reference, ids, theirs.past_key_values)
            ours = decoder(ids, cache=cache)
    assert worst == [0.0] * len(worst)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("variant", REPRESENTATIVES.values(), ids=str)
def test_padded_decode_is_transformers_to_the_bit(variant, dtype):
    if variant.family in NO_CACHE:
        pytest.skip(NO_CACHE[variant.family])
    if "padding" in ARCHITECTURES[variant.family].wrong_batches:
        pytest.skip("transformers' class reads padding as tokens")
    attention = attention_paths(variant)[0]
    reference = randomised_reference(variant.config, dtype, attention, seed=2)
    decoder = decoder_from(reference, variant.config, attention)
    cache = Cache(decoder.spec)
    *_, probe = probes(12, 3, ("left",), VOCAB)
    ids, mask = probe.input_ids, probe.attention_mask
    worst, past = [], None
    with torch.inference_mode():
        for _ in range(8 if covering.quick else 16):
            outputs = continued(reference, ids, past, mask)
            ours, theirs, past = decoder(ids, mask, cache=cache), outputs.logits, outputs.past_key_values
            worst.append(largest_difference(ours[:, -1], theirs[:, -1]))
            ids = theirs[:, -1:].argmax(-1)
            mask = torch.cat([mask, mask.new_ones(3, 1)], dim=1)
    assert worst == [0.0] * len(worst)


@few(4)
@pytest.mark.parametrize("variant", REPRESENTATIVES.values(), ids=str)
def test_a_wrong_weight_shows(variant):
    """The probe is not blind: every single tensor, negated, moves the logits."""
    attention = attention_paths(variant)[0]
    reference = randomised_reference(variant.config, torch.float32, attention)
    decoder = decoder_from(reference, variant.config, attention)
    mixed = any(hasattr(block.mixer("feed_forward"), "expert") for block in decoder.spec.blocks)
    ids = next(probes(200 if mixed else 32, 1, (), VOCAB)).input_ids  # so many that every expert gets some
    blind = []
    with torch.inference_mode():
        right = outputs_of(decoder, Probe("", ids))
        for name, parameter in decoder.named_parameters():
            parameter.neg_()
            if (outputs_of(decoder, Probe("", ids)) - right).abs().max().item() < 1e-3:
                blind.append(name)
            parameter.neg_()
        assert torch.equal(outputs_of(decoder, Probe("", ids)), right)
    # Without rotation a bias on keys adds the same to all of a query's scores: the softmax does not see it.
    if not any(isinstance(node, Rotary) for node in decoder.spec.components()):
        blind = [name for name in blind if not name.endswith("k_proj.bias")]
    assert blind == []


# --- config.json there and back --------------------------------------------------------------------------------------


@every_family
@variants
def test_config_round_trip(variant):
    architecture, spec = ARCHITECTURES[variant.family], spec_of(variant.config)
    config = architecture.config_for(spec)
    assert config["model_type"] == variant.family
    assert config["architectures"] == [architecture.class_of(spec)]
    assert architecture.spec(json.loads(json.dumps(config))) == spec


def with_padding(config, variant):
    """transformers refuses a padding token past the vocabulary, and families whose default is one have tiny configs
    that say another."""
    return {**config, **{name: variant.config[name] for name in ("pad_token_id",) if name in variant.config}}


@variants
def test_transformers_reads_the_config_that_is_written(variant):
    """Old forms included: what is written is today's form, and the model transformers builds from it is the same."""
    architecture, spec = ARCHITECTURES[variant.family], spec_of(variant.config)
    written = hf_config(with_padding(architecture.config_for(spec), variant))
    tied = architecture.head if spec.tied else None
    assert hf_shapes(written, tied) == hf_shapes(hf_config(variant.config), tied)
    saved = json.loads(written.to_json_string(use_diff=False))
    if variant.family == "t5":  # its class says tied whatever it is given, and a head of its own shows in the files
        saved["tie_word_embeddings"] = spec.tied
    assert architecture.spec(saved) == spec


@variants
def test_the_config_that_is_written_computes_the_same(variant):
    """Rope scalings, windows, scales: what shapes do not show."""
    architecture, spec = ARCHITECTURES[variant.family], spec_of(variant.config)
    attention = attention_paths(variant)[0]
    before = randomised_reference(variant.config, torch.float32, attention)
    after = randomised_reference(with_padding(architecture.config_for(spec), variant), torch.float32, attention)
    after.load_state_dict(before.state_dict())
    probe = next(probes(200, 1, (), VOCAB))
    with torch.inference_mode():
        assert torch.equal(outputs_of(before, probe), outputs_of(after, probe))


def test_modern_forms_change_nothing_but_old_ones():
    changed = {name for name, config in CONFIGS.items() if modern(config) != config}
    assert changed == {name for name in CONFIGS if any(word in name for word in ("RefinedWeb", "composite", "kimi"))}


# --- what a family cannot express ------------------------------------------------------------------------------------


def refusal(target: str, spec: ModelSpec) -> str:
    with pytest.raises(CannotExpress) as caught:
        ARCHITECTURES[target].config_for(spec)
    return str(caught.value)


@pytest.mark.parametrize(
    ("source", "target", "named"),
    [
        ("llama", "bloom", ["attention_norm: RMSNorm", "feed_forward: GatedFeedForward", "embedding.norm"]),
        ("llama", "gpt2", ["attention_norm: RMSNorm", "positions"]),
        ("llama-2", "falcon", ["attention_norm: RMSNorm", "feed_forward: GatedFeedForward"]),
        ("llama", "falcon", ["attention_norm: RMSNorm", "feed_forward: GatedFeedForward", "parallel"]),
        ("gpt2", "llama", ["attention.position: none, llama has Rotary"]),
        ("bloom", "llama", ["attention.position: ALiBi, llama has Rotary"]),
        ("bloom", "gpt2", ["gelu_bloom"]),
        ("mistral", "llama", ["attention.window (16)"]),
        ("llama", "qwen2", ["output_bias"]),
        ("llama-2", "qwen2", ["qkv_bias"]),
        ("llama-2", "qwen3", ["q_norm", "k_norm"]),
        ("qwen2-no-window", "llama", ["output_bias: false, llama has true"]),
        ("qwen2-layer-types", "mistral", ["window"]),
        ("qwen3", "qwen2", ["q_norm", "qkv_bias"]),
        ("falcon-7b", "llama", ["attention_norm: LayerNorm", "parallel"]),
        ("falcon-40b", "bloom", ["parallel", "kv_heads"]),
        ("falcon-rw", "bloom", ["position"]),
        ("gpt2-by-layer", "falcon", ["positions"]),
    ],
)
def test_a_tree_of_another_family_is_refused_by_its_components(source, target, named):
    message = refusal(target, spec_of(CONFIGS[source]))
    assert [component for component in named if component not in message] == [], message


def test_a_refusal_tells_a_difference_once_for_all_layers():
    message = refusal("llama", spec_of(CONFIGS["mistral"]))
    assert message.count("window") == 1
    assert "llama has no blocks.*.attention.window (16)" in message


def test_a_tree_that_another_family_has_too_is_expressed():
    """A llama without biases is a mistral without a window."""
    spec = spec_of(CONFIGS["llama-2"])
    config = ARCHITECTURES["mistral"].config_for(spec)
    assert config["sliding_window"] is None
    assert ARCHITECTURES["mistral"].spec(config) == spec


@few(20)
@pytest.mark.parametrize("variant", others_slow(VARIANTS))
def test_any_tree_is_either_expressed_or_refused(variant):
    """Never another exception, and never a config that reads back as another tree."""
    spec = spec_of(variant.config)
    names = [*ARCHITECTURES]
    count = examples(len(names) if variant.representative else 30)
    for place in spread(len(names), count, start=VARIANTS.index(variant)):
        target = ARCHITECTURES[names[place]]
        try:
            config = target.config_for(spec)
        except CannotExpress as refused:
            assert target.name in refused.message  # noqa: PT017
            assert len(str(refused)) < 2000  # noqa: PT017
        else:
            assert target.spec(config) == spec
            target.bind(spec)
