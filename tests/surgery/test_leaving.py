"""Leaving again: a swapped model in a Hugging Face family's own form, loaded by transformers; or what is in the way."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from helpers.covering import few, rest_slow
from helpers.exactness import saved
from helpers.families import CONFIGS, spec_of
from helpers.generation import generate_ids

import gptkit
from gptkit.architectures import ARCHITECTURES, named
from gptkit.architectures.obstacles import Obstacle, by_layers, express
from gptkit.converter.manifest import check_manifest
from gptkit.converter.resolve import SAMPLES_DIR
from gptkit.errors import CannotExpress, GptkitError, UnknownFamily
from gptkit.parity.probe import probe
from gptkit.surgery import chain as chains
from gptkit.surgery import guarantee
from gptkit.surgery import remedies as ways
from gptkit.surgery.base import Filled, StoredModel
from gptkit.surgery.registry import Step, swap_for
from gptkit.surgery.remedies import Way, remedies, way_to, ways_from
from gptkit.surgery.swap import SwapResult

IDS = {"bos_token_id": 5, "eos_token_id": [7, 8], "pad_token_id": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("leaving")


def source(name: str, folder: Path) -> Path:
    """A random checkpoint whose config.json states ids of special tokens."""
    found = saved(name, folder)
    config = json.loads((found / "config.json").read_text())
    (found / "config.json").write_text(json.dumps({**config, **IDS}))
    return found


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def gap_to_transformers(folder: Path, dtype: torch.dtype = torch.float32) -> float:
    """The largest difference of logits, gptkit's from transformers' AutoModelForCausalLM, relative to the largest."""
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(loading.values()), loading
    ours = gptkit.load(folder, dtype=dtype)
    found = 0.0
    with torch.inference_mode():
        for batch in probe(ours.spec):
            a = batch.valid(model.eval()(batch.input_ids, attention_mask=batch.attention_mask).logits)
            b = batch.valid(ours(batch.input_ids, batch.attention_mask))
            found = max(found, ((a - b).abs().max() / b.abs().max()).item())
    return found


def left(result: SwapResult, family: str) -> Path:
    """Hold an output to what every one of Hugging Face files has to be."""
    out, config = result.target, config_of(result.target)
    assert result.family is named(family)
    assert config["model_type"] == family and config["architectures"] == [named(family).hf_class]
    assert "auto_map" not in config
    assert not (out / "gptkit.json").exists() and not check_manifest(out)
    assert gap_to_transformers(out) <= 1e-5
    stored = {str(tensor.dtype) for tensor in safetensors.torch.load_file(out / "model.safetensors").values()}
    assert f"torch.{config['dtype']}" in stored
    steps = json.loads((out / "manifest.json").read_text())["swap"]["steps"]
    assert [step["guarantee"] for step in steps] == [each.guarantee for each in result.chain.swapped]
    return out


# --- what leaves ------------------------------------------------------------------------------------------------------

LEAVING: list[tuple[str, str, str, dict[str, str]]] = [
    ("llama-2", "hf:qwen2", "qwen2", {}),
    ("llama-2", "hf:mistral", "mistral", {}),
    ("llama", "auto", "llama", {"attention": "mha"}),
    ("llama-2", "hf", "llama", {"layers": "+1"}),
    ("llama-2", "auto", "llama", {"intermediate": "80"}),
    ("llama-2", "auto", "llama", {"hidden": "60"}),
    ("llama-2", "auto", "mistral", {"hidden": "50"}),  # transformers' llama wants a multiple of its heads
    ("llama-2", "auto", "llama", {"head_dim": "16"}),
    ("llama-2", "auto", "llama", {"heads": "8"}),
    ("llama-2", "auto", "llama", {"vocab": "multiple:64"}),
    ("llama-2", "auto", "mixtral", {"mlp": "moe:2x1"}),
    ("llama-2", "hf:qwen2", "qwen2", {"rope_scaling": "yarn:4"}),
    ("llama-2", "hf:mistral", "mistral", {"rope_scaling": "llama3:8"}),
    ("gpt2", "hf", "gpt2", {"untie": ""}),
    ("gpt2", "auto", "gpt2", {"intermediate": "200"}),
    ("qwen2-no-window", "hf:llama", "llama", {"attention": "mha"}),  # which has a bias of the output too
]


@few(2)
@pytest.mark.parametrize(("name", "to", "family", "asked"), LEAVING, ids=lambda value: str(value))
def test_it_loads_in_transformers(
    name: str, to: str, family: str, asked: dict[str, str], folder: Path, tmp_path: Path
) -> None:
    out = left(gptkit.swap(source(name, folder), tmp_path / "out", to=to, **asked), family)
    assert {key: config_of(out)[key] for key in IDS} == IDS


@few(1)
@pytest.mark.parametrize("asked", [None, "float32", "bfloat16", "float16"])
def test_what_transformers_runs_is_what_was_measured(asked: str | None, tmp_path: Path) -> None:
    """With dtype="auto", as from_pretrained loads by itself: no tensor is rounded on the way in."""
    done = gptkit.swap("sample:llama", tmp_path / "out", quantize="int8", to="hf", dtype=asked, approximate=True)
    wanted = asked or "bfloat16"
    tensors = safetensors.torch.load_file(done.target / "model.safetensors")
    assert {str(tensor.dtype) for tensor in tensors.values()} == {f"torch.{wanted}"}
    assert config_of(done.target)["dtype"] == wanted
    after = transformers.AutoModelForCausalLM.from_pretrained(done.target, dtype="auto").eval()
    assert after.dtype == getattr(torch, wanted)
    before = transformers.AutoModelForCausalLM.from_pretrained(SAMPLES_DIR / "llama", dtype=torch.float32).eval()
    found = 0.0
    with torch.inference_mode():
        for batch in probe(done.spec):
            given = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
            a, b = (batch.valid(model(**given).logits) for model in (before, after.float()))
            found = max(found, (a - b).abs().max().item())
    assert done.measured is not None
    assert found == pytest.approx(done.measured.maximum["float32"], rel=1e-4)


def test_one_dtype_for_all_that_leaves_whatever_computes_it(folder: Path, tmp_path: Path) -> None:
    """Moved tensors too, and with no swap at all; what is exact stays so but for the rounding that was asked for."""
    for number, asked in enumerate(({}, {"attention": "mha"}, {"head_dim": "24"})):
        out = tmp_path / str(number)
        done = gptkit.swap(source("llama", folder), out, to="auto", dtype="bfloat16", **asked)
        stored = {str(each.dtype) for each in safetensors.torch.load_file(out / "model.safetensors").values()}
        assert (stored, config_of(out)["dtype"], done.guarantee) == ({"torch.bfloat16"}, "bfloat16", "exact")


def test_of_a_few_tensors_in_another_dtype_the_config_names_that_of_the_matrices(folder: Path, tmp_path: Path) -> None:
    """As the original did: transformers computes in it, and would take twice the memory in the wider one."""
    gptkit.convert(source("llama", folder), tmp_path / "bf16", to="hf", dtype="bfloat16")
    path = tmp_path / "bf16" / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors = {name: each.float() if "norm" in name else each for name, each in tensors.items()}
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    gptkit.swap(tmp_path / "bf16", tmp_path / "out", to="hf", attention="mha")
    assert config_of(tmp_path / "out")["dtype"] == "bfloat16"
    assert (
        safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"].dtype == torch.float32
    )


def test_gpt2_in_the_shape_of_llama(folder: Path, tmp_path: Path) -> None:
    steps = (Step("norm", "rmsnorm"), Step("mlp", "gated"), Step("drop", "head.bias"), Step("position", "rope"))
    result = gptkit.swap(source("gpt2", folder), tmp_path / "out", steps, to="auto")
    config = config_of(left(result, "llama"))
    assert config["attention_bias"] is config["mlp_bias"] is True
    assert (config["hidden_act"], config["dtype"], result.guarantee) == ("gelu_new", "float32", "retrained")
    assert not {key for key in config if key.startswith("n_") or "pdrop" in key or key == "activation_function"}
    assert {key: config[key] for key in IDS} == IDS


def test_ids_that_a_config_leaves_to_its_class(folder: Path, tmp_path: Path) -> None:
    plain = saved("llama-2", tmp_path)
    config = {key: value for key, value in config_of(plain).items() if key not in IDS}
    (plain / "config.json").write_text(json.dumps(config))
    gptkit.swap(plain, tmp_path / "out", to="hf:qwen2", measured=False)
    found = config_of(tmp_path / "out")
    assert [found[key] for key in IDS] == [1, 2, None]
    for architecture in ARCHITECTURES.values():
        usual = getattr(transformers, architecture.hf_config)()
        assert {key: getattr(usual, key, None) for key in ("bos_token_id", "eos_token_id")} == {
            "bos_token_id": architecture.token_ids.get("bos_token_id"),
            "eos_token_id": architecture.token_ids.get("eos_token_id"),
        }


@pytest.mark.exhaustive
def test_a_pruned_vocabulary_leaves_with_its_tokenizer(tmp_path: Path) -> None:
    if not (SAMPLES_DIR / "llama").is_dir():
        pytest.skip("there are no samples")
    text = "My lord, what say you to the king?"
    used = tmp_path / "tokens.txt"
    used.write_text("\n".join(map(str, range(300))))
    result = gptkit.swap("sample:llama", tmp_path / "out", vocab=f"prune:{used}", to="hf:qwen2", each_step=False)
    out = left(result, "qwen2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    ids = tokenizer(text)["input_ids"]
    assert max(ids) < result.spec.vocab_size < 512
    assert tokenizer.decode(ids) == text
    assert config_of(out)["vocab_size"] == result.spec.vocab_size
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert model.generation_config.eos_token_id == config_of(out)["eos_token_id"]
    assert model.generate(torch.tensor([ids]), max_new_tokens=3, do_sample=False).shape[0] == 1


@pytest.mark.parametrize("to", ["hf:llama", "hf:auto"])
def test_convert_of_a_swapped_folder_gives_the_same(to: str, folder: Path, tmp_path: Path) -> None:
    asked = {"norm": "rmsnorm", "mlp": "gated", "position": "rope", "drop": "head.bias"}
    gptkit.swap(source("gpt2", folder), tmp_path / "local", dtype="float32", measured=False, **asked)
    gptkit.swap(source("gpt2", folder), tmp_path / "direct", to="hf:llama", measured=False, **asked)
    gptkit.convert(tmp_path / "local", tmp_path / "hf", to)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "hf" / file).read_bytes() == (tmp_path / "direct" / file).read_bytes()


def test_convert_to_any_family_that_there_is_none_for(folder: Path, tmp_path: Path) -> None:
    gptkit.swap(source("llama-2", folder), tmp_path / "local", block="parallel", measured=False)
    with pytest.raises(CannotExpress, match=r"parallel: true, llama has false"):
        gptkit.convert(tmp_path / "local", tmp_path / "hf", "hf:auto")
    with pytest.raises(UnknownFamily, match="gptkit does not support the architecture 'gpt5'"):
        gptkit.swap(source("llama-2", folder), tmp_path / "hf", to="hf:gpt5")
    assert [path.name for path in tmp_path.iterdir()] == ["local"]


# --- what stays -------------------------------------------------------------------------------------------------------


@few(1)
@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("mistral-no-window", {"attention": "mla:full"}),
        ("mistral-no-window", {"attention": "mha", "blocks": "0"}),
        ("gpt2", {"mlp": "gated"}),
    ],
)
def test_a_tree_of_no_family_is_refused_and_stays_usable(
    name: str, asked: dict[str, str], folder: Path, tmp_path: Path
) -> None:
    original = source(name, folder)
    with pytest.raises(CannotExpress, match="no transformers architecture can express this model"):
        gptkit.swap(original, tmp_path / "out", to="auto", **asked)
    assert not (tmp_path / "out").exists()
    gptkit.swap(original, tmp_path / "out", **asked)
    assert gptkit.verify(original, tmp_path / "out").verdict in ("equal", "identical")
    model = gptkit.load(tmp_path / "out")
    assert len(generate_ids(model, [3, 4], 5)) == 5


def test_a_sample_without_a_family_generates_on_the_command_line(tmp_path: Path) -> None:
    if not (SAMPLES_DIR / "gpt2").is_dir():
        pytest.skip("there are no samples")
    gptkit.swap("sample:gpt2", tmp_path / "out", mlp="gated", measured=False)
    assert "".join(gptkit.generate(str(tmp_path / "out"), "ROMEO:", max_new_tokens=8)) == "".join(
        gptkit.generate("sample:gpt2", "ROMEO:", max_new_tokens=8)
    )


# --- what is in the way -----------------------------------------------------------------------------------------------


def refused(name: str, folder: Path, out: Path, to: str, **asked: Any) -> tuple[str, str]:
    """The message and the hint of a swap that cannot leave; both within 80 columns as the command line shows them."""
    with pytest.raises(CannotExpress) as caught:
        gptkit.swap(source(name, folder), out, to=to, **asked)
    message, hint = caught.value.message, caught.value.hint or ""
    assert all(len(line) <= 78 for line in hint.splitlines())
    assert all(len(line) <= 78 for line in message.splitlines()[1:])
    assert not out.exists()
    return message, hint


def test_the_whole_way_is_told_and_is_a_way(folder: Path, tmp_path: Path) -> None:
    message, hint = refused("gpt2", folder, tmp_path / "out", "hf:llama")
    for line in (
        "blocks.*.attention_norm: LayerNorm, llama has RMSNorm",
        "blocks.*.feed_forward: FeedForward, llama has GatedFeedForward",
        "blocks.*.attention.position: none, llama has Rotary",
        "llama has no positions (LearnedPositions)",
    ):
        assert f"  {line}\n" in f"{message}\n"
    steps = [line.split()[:2] for line in hint.splitlines() if line.startswith("  --")]
    assert steps == [["--norm", "rmsnorm"], ["--position", "rope"], ["--mlp", "gated"], ["--drop", "head.bias"]]
    assert "--norm rmsnorm    changes nothing" in hint
    assert "on the probe, and needs training" in hint and "All at once, with --as hf:llama." in hint
    asked = {option.removeprefix("--"): value for option, value in steps}
    gptkit.swap(source("gpt2", folder), tmp_path / "out", to="hf:llama", measured=False, **asked)
    assert gap_to_transformers(tmp_path / "out") <= 1e-5


def test_a_little_that_is_missing(folder: Path, tmp_path: Path) -> None:
    asked = {"norm": "rmsnorm", "mlp": "gated", "position": "rope"}
    message, hint = refused("gpt2", folder, tmp_path / "out", "auto", **asked)
    assert "no transformers architecture can express this model" in message
    assert "  llama has no head.bias" in message
    words = " ".join(hint.split())
    assert words.startswith("llama cannot express head.bias: --drop head.bias costs KL 0.")
    assert words.endswith("on the probe.")


def test_layers_that_differ_are_named(folder: Path, tmp_path: Path) -> None:
    message, hint = refused("mistral-no-window", folder, tmp_path / "out", "auto", attention="mha", blocks="0")
    assert "  blocks.1-2.attention.kv_heads: 2, mistral has 6" in message
    assert "--attention mha changes nothing." in " ".join(hint.split())


def test_what_no_swap_clears(folder: Path, tmp_path: Path) -> None:
    message, hint = refused("gpt2", folder, tmp_path / "out", "hf:bloom")
    assert "  embedding.norm: none, bloom has LayerNorm" in message
    words = " ".join(hint.split())
    assert "No swap can change embedding.norm to match bloom; --position alibi would change the rest." in words
    assert hint.endswith("gptkit's own format can hold any model: --as local")
    _, hint = refused("mistral-no-window", folder, tmp_path / "out", "auto", attention="mla:full")
    assert hint.startswith("No swap can change blocks.*.attention to match")


def test_what_a_family_refuses_is_said(folder: Path, tmp_path: Path) -> None:
    message, hint = refused("llama-2", folder, tmp_path / "out", "hf:llama", hidden="50")
    assert (
        message
        == "llama cannot express this model: transformers needs a hidden size that is divisible by the number of "
        "heads (50 and 6)"
    )
    assert hint == "gptkit's own format can hold any model: --as local"


def way(to: str, model: StoredModel) -> tuple[Way, Callable[..., Any]]:
    """The way of a model into a family, and what becomes of it by steps."""
    zero = chains._zero_in(model)
    after = ways_from(model, zero)
    return way_to(express(named(to), model.spec, zero), after), after


LEAVING = pytest.mark.parametrize("name", ["gpt2", "llama-2", "qwen3", "mixtral", "bloom", "falcon-7b", "falcon-40b"])


@LEAVING
def test_a_model_arrives_in_its_own_family(name: str, folder: Path) -> None:
    found, _ = way(CONFIGS[name]["model_type"], StoredModel(gptkit.open_checkpoint(source(name, folder))))
    assert found.arrived and not found.remedies


@few(6)
@pytest.mark.parametrize("to", rest_slow(ARCHITECTURES))
@LEAVING
def test_ways_are_ways(name: str, to: str, folder: Path) -> None:
    """Whatever way is found, the family has a config for the tree at its end, and every remedy of it is needed."""
    found, after = way(to, StoredModel(gptkit.open_checkpoint(source(name, folder))))
    if not found.arrived:
        return
    assert chains.leave(found.end.models[-1], None, f"hf:{to}")[0] is ARCHITECTURES[to]
    for remedy in found.remedies:
        rest = after(tuple(step for each in found.remedies if each != remedy for step in each))
        fewer = None if rest is None else express(ARCHITECTURES[to], rest.spec, rest.zero)
        worse = rest is not None and ways.ORDER.index(rest.guarantee) > ways.ORDER.index(found.end.guarantee)
        assert fewer is None or fewer.tree is None or worse


def proposed(name: str) -> set[tuple[str, str]]:
    """What is proposed for all that keeps a tree from any family: options and kinds of values."""
    spec, found = spec_of(CONFIGS[name]), set()
    for architecture in ARCHITECTURES.values():
        for obstacle in by_layers(express(architecture, spec).standing, len(spec.blocks)):
            for step in (step for remedy in remedies(obstacle) for step in remedy):
                swap_for(step.option, step.value)
                found.add((step.option, step.value.partition(":")[0]))
    return found


@few(1)
@pytest.mark.parametrize("name", rest_slow(CONFIGS))
def test_every_remedy_is_a_swap_that_exists(name: str) -> None:
    assert proposed(name)


def test_what_stands_between_the_oldest_families_has_remedies() -> None:
    seen = set().union(*map(proposed, ("gpt2", "falcon-7b", "bloom", "mixtral")))
    assert {("norm", "rmsnorm"), ("mlp", "gated"), ("position", "rope"), ("block", "serial"), ("mlp", "moe")} <= seen


def test_obstacles_in_words() -> None:
    found = [Obstacle(f"blocks.{layer}.parallel", True, False) for layer in (0, 1, 2, 5)]
    assert by_layers(found, 6) == [Obstacle("blocks.0-2,5.parallel", True, False)]
    assert by_layers(found, 4) == [Obstacle("blocks.*.parallel", True, False)]
    assert found[0].sentence("llama") == "blocks.0.parallel: true, llama has false"
    assert Obstacle("head.bias", True, False).sentence("llama") == "llama has no head.bias"
    assert Obstacle("head.bias", False, True).sentence("llama") == "head.bias: false, llama has true"


def test_little_is_read_of_a_large_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of it nothing but biases: what swaps make of it is told from its shapes."""
    names: list[str] = []

    class Watched(StoredModel):
        def tensor(self, name: str) -> Any:
            names.append(name)
            return super().tensor(name)

    monkeypatch.setattr(ways, "SMALL", 10)
    found, _ = way("llama", Watched(gptkit.open_checkpoint(source("bloom", folder))))
    assert found.arrived and [str(step) for step in found.steps][-1] == "--drop head.bias"
    assert all(name.endswith(".bias") for name in names)
    found, _ = way("gpt2", Watched(gptkit.open_checkpoint(source("llama-2", folder))))
    assert found.remedies


def test_a_large_model_is_told_a_way_without_what_it_costs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ways, "SMALL", 10)
    _, hint = refused("gpt2", folder, tmp_path / "out", "hf:llama")
    assert "--norm rmsnorm    changes nothing" in hint
    assert "--drop head.bias  changes logits: run it to see" in hint


# --- mistakes ---------------------------------------------------------------------------------------------------------


def test_a_remedy_that_clears_nothing_is_not_offered(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    useless = (Step("mlp", "moe:2x1"), Step("untie", ""), Step("drop", "value.bias"), Step("context", "100"))
    monkeypatch.setattr(ways, "remedies", lambda obstacle: iter([(step,) for step in useless]))
    _, hint = refused("gpt2", folder, tmp_path / "out", "hf:llama")
    assert not any(str(step) in hint for step in useless)
    assert "would change" not in hint


def with_ones(function: Callable[..., Any]) -> Callable[..., Any]:
    def broken(*args: Any) -> Any:
        found = function(*args)
        tensors = {name: Filled(each.shape, 1.0, each.like) for name, each in found.tensors.items()}
        return type(found)(found.spec, found.guarantee, tensors, found.summary, found.notes)

    return broken


@pytest.mark.parametrize("asked", [{}, {"activation": "relu"}], ids=["exact", "approximate"])
def test_a_wrong_bias_is_not_published(
    asked: dict[str, str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chains, "_into", with_ones(chains._into))
    with pytest.raises(GptkitError, match=r"not exact on this checkpoint|--as hf:qwen2 changes logits by"):
        gptkit.swap(source("llama-2", folder), tmp_path / "out", to="hf:qwen2", **asked)
    assert not (tmp_path / "out").exists()


def test_a_bias_that_is_not_zero_does_not_get_lost(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chains, "_zero_in", lambda model: lambda name: True)
    with pytest.raises(GptkitError, match="not exact on this checkpoint"):
        gptkit.swap(source("qwen2-no-window", folder), tmp_path / "out", to="hf:mistral")
    assert not (tmp_path / "out").exists()


def test_files_that_transformers_reads_otherwise_are_not_published(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarantee, "verify", lambda *args, **options: Failed())
    with pytest.raises(
        GptkitError, match=r"transformers and gptkit compute different logits for the new model \(different\)"
    ):
        gptkit.swap(source("llama-2", folder), tmp_path / "out", to="hf:mistral")
    assert not (tmp_path / "out").exists()


class Failed:
    """A verification that found a difference."""

    passed = False
    verdict = "different"
    prompts = (type("Prompt", (), {"maximum": 0.25}),)
