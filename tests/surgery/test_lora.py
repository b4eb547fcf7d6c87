"""LoRA adapters merged: what the files compute is what peft computes of base and adapter, for every kind of adapter."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from helpers.covering import covered, few
from helpers.families import CONFIGS, save_hf, shared_weights
from safetensors.torch import load_file, save_file

import gptkit
from gptkit.errors import GptkitError, InvalidInput, Offline, SwapRefused, UntrustedInput
from gptkit.report.surgery import swap_lines
from gptkit.surgery.guarantee import EXACT_FP64
from gptkit.surgery.registry import Step
from gptkit.surgery.swaps import lora as module
from gptkit.surgery.swaps.adapter import Adapter

WEIGHTS = "model.safetensors"
SMALL = {"r": 3, "lora_alpha": 7}
EVERY = "all-linear"

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "fused and transposed": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "dora, fused and transposed": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "use_dora": True}),
    "every linear": ("llama", {"target_modules": EVERY, "use_rslora": True}),
    "dora": ("llama", {"target_modules": EVERY, "use_dora": True, "use_rslora": True}),
    "fused by heads": ("bloom", {"target_modules": ["query_key_value", "dense"], "use_dora": True}),
    "fused by groups": ("falcon-40b", {"target_modules": ["query_key_value", "dense_4h_to_h"]}),
    "patterns": (
        "qwen2",
        {
            "target_modules": ["q_proj", "k_proj", "down_proj"],
            "rank_pattern": {"q_proj": 5, "layers.1.mlp.down_proj": 2},
            "alpha_pattern": {"^model.layers.2.*k_proj": 31, "down_proj": 1},
        },
    ),
    "some layers": ("mistral", {"target_modules": ["v_proj", "up_proj"], "layers_to_transform": [0, 2]}),
    "all biases": ("gpt2", {"target_modules": ["c_attn"], "bias": "all"}),
    "own biases": ("llama", {"target_modules": ["q_proj", "o_proj"], "bias": "lora_only"}),
    "a bias of B": ("qwen2", {"target_modules": ["q_proj", "v_proj"], "lora_bias": True}),
    "modules saved": (
        "llama",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head", "input_layernorm"]},
    ),
    "embedding and head": ("llama", {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    "embedding, dora": ("llama", {"target_modules": ["embed_tokens"], "use_dora": True}),
    "new rows": ("llama", {"target_modules": ["q_proj"], "trainable_token_indices": [1, 5, 96]}),
    "tied: new rows": ("llama-v5", {"target_modules": ["q_proj"], "trainable_token_indices": [1, 5, 96]}),
    "tied: embedding": ("llama-v5", {"target_modules": ["q_proj", "embed_tokens"]}),
    "tied: head": ("gpt2", {"target_modules": ["c_attn", "lm_head"]}),
    "tied: head saved": ("bloom", {"target_modules": ["query_key_value"], "modules_to_save": ["lm_head"]}),
    "tied: both": ("llama-v5", {"target_modules": ["embed_tokens", "lm_head"]}),
    "tied: kept so": ("llama-v5", {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}),
    "tied: saved and kept so": (
        "llama-v5",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
}
STAYS_TIED = ("tied: new rows", "tied: kept so", "tied: saved and kept so")


def trained(model: str, folder: Path, seed: int = 0, **settings: Any) -> None:
    """A base model in `base` and an adapter in `adapter`, all that is trained of it random."""
    save_hf(CONFIGS[model], folder / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
        made = peft.get_peft_model(base, peft.LoraConfig(**{**SMALL, **settings}))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if parameter.requires_grad:
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.copy_(2 + noise.abs() if "magnitude" in name else 0.3 * noise)
        made.save_pretrained(folder / "adapter")


def with_peft(folder: Path) -> Any:
    """Base and adapter in fp64, by peft."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float64)
        return peft.PeftModel.from_pretrained(base, folder / "adapter", autocast_adapter_dtype=False).double().eval()


def logits_of_peft(folder: Path) -> np.ndarray:
    with torch.inference_mode():
        found: np.ndarray = with_peft(folder)(input_ids=INPUT).logits.numpy()
        return found


INPUT = torch.randint(0, 97, (3, 40), generator=torch.Generator().manual_seed(3))


def logits_of(folder: Path, dtype: torch.dtype = torch.float64) -> np.ndarray:
    with torch.inference_mode():
        return gptkit.load(folder, dtype)(INPUT).numpy()


def gap(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).max() / np.abs(one).max())


LOGITS = ("fused and transposed", "dora", "fused by groups", *(kind for kind in KINDS if kind.startswith("tied")))


@few(1)
@pytest.mark.parametrize("kind", LOGITS)
def test_the_merged_files_compute_what_peft_computes(kind: str, tmp_path: Path) -> None:
    model, settings = KINDS[kind]
    trained(model, tmp_path, **settings)
    result = gptkit.swap(tmp_path / "base", tmp_path / "out", merge_lora=str(tmp_path / "adapter"))
    assert result.guarantee == "exact"
    expected, found, before = logits_of_peft(tmp_path), *(logits_of(tmp_path / name) for name in ("out", "base"))
    # transformers' norms, softmax and rotary tables are fp32 inside, whatever the model's dtype.
    assert gap(expected, found) < 3e-5
    assert gap(before, found) > 1e-2
    if kind.startswith("tied"):
        assert result.spec.head.tied == (kind in STAYS_TIED)


@few(1)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("tied")])
def test_the_merged_tensors_are_those_that_peft_merges(kind: str, tmp_path: Path) -> None:
    """Sharper than logits, which such adapters let round by 2e-14 to 2e-13 as it happens: what peft's own merge makes
    of the weights in fp64.
    """
    model, settings = KINDS[kind]
    trained(model, tmp_path, **settings)
    adapter = str(tmp_path / "adapter")
    result = gptkit.swap(tmp_path / "base", tmp_path / "out", merge_lora=adapter, dtype="float64")
    assert result.guarantee == "exact"
    assert result.measured is not None and result.measured.relative["float64"] <= EXACT_FP64
    expected = shared_weights(with_peft(tmp_path).merge_and_unload(), CONFIGS[model])
    found = {name: array for name, array, _ in gptkit.open_checkpoint(tmp_path / "out").tensors()}
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name].astype(float), tensor.detach().numpy(), rtol=0, atol=1e-13)


@covered()
@pytest.mark.parametrize("to", ["local", "hf"])
@pytest.mark.parametrize("asked", [None, "float32", "bfloat16", "float64"])
@pytest.mark.parametrize("base", ["bfloat16", "float32"])
def test_a_merged_model_is_stored_as_its_base_or_as_asked(
    base: str, asked: str | None, to: str, tmp_path: Path
) -> None:
    """Hugging Face files are all of the dtype that their config.json names, in which transformers loads them."""
    trained("llama", tmp_path, target_modules=["q_proj", "v_proj"])
    gptkit.convert(tmp_path / "base", tmp_path / "own", to="hf", dtype=base)
    done = gptkit.swap(
        tmp_path / "own", tmp_path / "out", merge_lora=str(tmp_path / "adapter"), dtype=asked, to=to, measured=False
    )
    wanted = asked or base
    assert done.guarantee == "exact" and done.dtype == wanted
    tensors = {name: str(t.dtype).removeprefix("torch.") for name, t in load_file(done.target / WEIGHTS).items()}
    merged = {name for name in tensors if name.endswith(("q_proj.weight", "v_proj.weight"))}
    assert {tensors[name] for name in merged} == {wanted}
    assert {tensors[name] for name in set(tensors) - merged} == {base if to == "local" else wanted}
    told = json.loads((done.target / ("config.json" if to == "hf" else "gptkit.json")).read_text())
    if to == "hf":
        assert told["dtype"] == wanted
        model = transformers.AutoModelForCausalLM.from_pretrained(done.target, dtype="auto")
        assert {str(each.dtype) for each in model.parameters()} == {f"torch.{wanted}"}
    else:
        assert told["dtype"] == ("float32" if wanted in ("float32", "float64") else base)


def test_a_merge_into_bf16_says_what_it_is_stored_as_and_why(tmp_path: Path) -> None:
    trained("llama", tmp_path, target_modules=["q_proj"])
    gptkit.convert(tmp_path / "base", tmp_path / "own", to="hf", dtype="bfloat16")
    said = {}
    for asked in (None, "float64"):
        adapter = str(tmp_path / "adapter")
        said[asked] = swap_lines(gptkit.swap(tmp_path / "own", tmp_path / str(asked), merge_lora=adapter, dtype=asked))
    assert "stored as   bfloat16 where computed, as the source is; exact before rounding" in said[None]
    assert said[None][0].endswith(": exact swap, up to the rounding to bfloat16")
    assert said["float64"][0].endswith(": exact swap")
    assert "stored as   float64 where computed, as asked" in said["float64"]
    for lines in said.values():
        assert any(line.startswith("float32     logits base+adapter against merged: max Δ ") for line in lines)


def test_a_merged_model_is_a_checkpoint_that_transformers_loads(tmp_path: Path) -> None:
    trained("gpt2", tmp_path, target_modules=["c_attn", "c_proj"], modules_to_save=["ln_f"])
    gptkit.swap(tmp_path / "base", tmp_path / "out", merge_lora=str(tmp_path / "adapter"), dtype="float32")
    gptkit.convert(tmp_path / "out", tmp_path / "hf", to="hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64)
    with torch.inference_mode():
        found = model(INPUT).logits.numpy()
    assert gap(logits_of_peft(tmp_path), found) < 2e-6


def test_what_is_not_changed_keeps_its_bytes_and_the_record_says_what_was_merged(tmp_path: Path) -> None:
    trained("llama", tmp_path, target_modules=["v_proj"], use_dora=True, use_rslora=True)
    result = gptkit.swap(tmp_path / "base", tmp_path / "out", merge_lora=str(tmp_path / "adapter"))
    old, new = (
        {n: (a.tobytes(), d) for n, a, d in gptkit.open_checkpoint(tmp_path / f).tensors()} for f in ("base", "out")
    )
    assert {name for name in old if old[name] != new[name]} == {f"blocks.{i}.attention.v_proj.weight" for i in range(3)}
    summary = result.chain.swapped[0].summary
    assert (summary["method"], summary["modules"], len(summary["sha256"])) == ("dora+rslora", 3, 64)


def test_older_names_with_the_adapters_own(tmp_path: Path) -> None:
    """peft before 0.5 kept the adapter's name in its files."""
    trained("llama", tmp_path, target_modules=["q_proj"], modules_to_save=["lm_head"], use_dora=True)
    gptkit.swap(tmp_path / "base", tmp_path / "one", merge_lora=str(tmp_path / "adapter"))
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    renamed = {}
    for name, tensor in load_file(path).items():
        name = name.replace("lora_A.", "lora_A.default.").replace("lora_B.", "lora_B.default.")
        name = name.replace("lm_head.weight", "lm_head.modules_to_save.default.weight")
        renamed[name.replace("magnitude_vector", "magnitude_vector.default.weight")] = tensor
    save_file(renamed, path)
    gptkit.swap(tmp_path / "base", tmp_path / "two", merge_lora=str(tmp_path / "adapter"))
    one, two = (logits_of(tmp_path / name) for name in ("one", "two"))
    np.testing.assert_array_equal(one, two)


# --- refusals ---------------------------------------------------------------------------------------------------------


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    path = folder / "adapter" / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)


def refused(folder: Path, base: str = "base") -> GptkitError:
    with pytest.raises(GptkitError) as caught:
        gptkit.swap(folder / base, folder / "out", merge_lora=str(folder / "adapter"))
    assert not (folder / "out").exists()
    return caught.value


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    trained("llama", folder, target_modules=["q_proj", "v_proj"])
    save_hf({**CONFIGS["llama-3"], "num_hidden_layers": 3}, folder / "narrow")
    save_hf({**CONFIGS["llama"], "num_hidden_layers": 5}, folder / "deep")
    save_hf({**CONFIGS["llama"], "num_hidden_layers": 2}, folder / "shallow")
    save_hf(CONFIGS["gpt2"], folder / "gpt2")
    return folder


@pytest.fixture
def copy(plain: Path, tmp_path: Path) -> Path:
    shutil.copytree(plain, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "an adapter of the type 'IA3'"),
        ({"peft_type": "LOHA"}, "an adapter of the type 'LOHA'"),
        ({"peft_type": "ADALORA"}, "an adapter of the type 'ADALORA'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa', which changes the base weights"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication: it repeats layers"),
        ({"use_qalora": True}, "use_qalora"),
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens"),
        ({"r": 4}, "q_proj has rank 3, but adapter_config.json says 4"),
        ({"rank_pattern": {"(": 4}}, "'\\(' is not a valid regular expression"),
        ({"rank_pattern": {"(.*)*x": 4}}, "matching the regular expression '\\(\\.\\*\\)\\*x' takes more time"),
        ({"alpha_pattern": {"q" * 5000: 4}}, "more than 4,096 characters"),
        ({"alpha_pattern": [3]}, "alpha_pattern is \\[3\\], expected an object"),
        ({"lora_alpha": "7"}, "lora_alpha of .* is '7', expected a number"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(changes: dict[str, Any], message: str, copy: Path) -> None:
    edit(copy, **changes)
    error = refused(copy)
    assert isinstance(error, SwapRefused | InvalidInput)
    with pytest.raises(type(error), match=message):
        raise error


def test_another_base_is_refused_with_what_does_not_fit(copy: Path) -> None:
    edit(copy, base_model_name_or_path="org/the-right-one")
    narrow = refused(copy, "narrow")
    assert "does not fit this model" in narrow.message and "has the shape [120, 3]" in narrow.message
    assert narrow.hint == "The adapter was trained on org/the-right-one, according to its config."
    deep = refused(copy, "deep").message
    assert "is incomplete: its target_modules include model.layers.3.self_attn.q_proj.weight" in deep
    assert "another model" not in narrow.message + deep  # which is a guess
    assert "modules that this model does not have: model.layers.2.self_attn" in refused(copy, "shallow").message
    assert "changes 6 modules that this model does not have" in refused(copy, "gpt2").message
    result = gptkit.swap(copy / "base", copy / "out", merge_lora=str(copy / "adapter"))
    assert result.chain.notes == (
        "the adapter was trained on org/the-right-one, according to its config; this model comes from base",
    )


def test_an_adapter_with_more_tokens_than_the_model(tmp_path: Path) -> None:
    trained("llama", tmp_path, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])

    def longer(old: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {n: torch.cat([t, torch.ones(3, 48)]) if len(t) == 97 else t for n, t in old.items()}

    tensors(tmp_path, longer)
    assert (
        refused(tmp_path).hint == "The adapter has 100 tokens: first swap --vocab 100, then merge it into the result."
    )
    steps = [Step("vocab", "100"), Step("merge_lora", str(tmp_path / "adapter"))]
    result = gptkit.swap(tmp_path / "base", tmp_path / "out", steps)
    assert result.guarantee == "exact"
    found = {name: array for name, array, _ in gptkit.open_checkpoint(tmp_path / "out").tensors()}
    assert (found["head.weight"][97:] == 1).all() and len(found["head.weight"]) == 100


def test_files_that_are_missing_or_broken(copy: Path, tmp_path: Path) -> None:
    tensors(copy, lambda old: {n: t for n, t in old.items() if "layers.1.self_attn.q_proj.lora_B" not in n})
    assert "only one of lora_A and lora_B for: model.layers.1.self_attn.q_proj" in refused(copy).message
    tensors(copy, lambda old: {**old, "base_model.model.model.layers.0.mlp.ia3_l": torch.ones(3)})
    assert "tensors that are not part of LoRA: model.layers.0.mlp.ia3_l" in refused(copy).message
    shutil.move(copy / "adapter" / "adapter_model.safetensors", copy / "adapter" / "adapter_model.bin")
    error = refused(copy)
    assert isinstance(error, UntrustedInput) and "adapter_model.bin is a pickle" in error.message
    (copy / "adapter" / "adapter_model.bin").unlink()
    assert "has no adapter_model.safetensors" in refused(copy).message
    (copy / "adapter" / "adapter_config.json").unlink()
    assert "it has no adapter_config.json" in refused(copy).message
    with pytest.raises(InvalidInput, match="no such folder"):
        gptkit.swap(copy / "base", copy / "out", merge_lora=str(tmp_path / "nowhere"))
    with pytest.raises(Offline, match="org/nothing is not in the local cache"):
        gptkit.swap(copy / "base", copy / "out", merge_lora="org/nothing", offline=True)


def test_weights_that_are_not_finite(copy: Path) -> None:
    def poisoned(old: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        name = next(iter(old))
        old[name][0, 0] = float("nan")
        return old

    tensors(copy, poisoned)
    assert "are NaN or infinite" in refused(copy).message


def test_after_a_swap_that_leaves_the_family_it_is_refused(copy: Path) -> None:
    save_hf(CONFIGS["gpt2"], copy / "tree")
    steps = [Step("mlp", "gated"), Step("merge_lora", str(copy / "adapter"))]
    with pytest.raises(SwapRefused, match="the adapter has the tensor names of gpt2"):
        gptkit.swap(copy / "tree", copy / "out", steps)


# --- a wrong formula does not get through -----------------------------------------------------------------------------


def no_scale(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        module,
        "_delta",
        lambda adapter, c: adapter.read(adapter.lora[c.module].b) @ adapter.read(adapter.lora[c.module].a),
    )


def norms_of_columns(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "_norms", lambda rows: np.full(len(rows), np.sqrt((rows**2).sum(axis=0)).mean()))


def never_transposed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "_oriented", lambda change, matrix: matrix.reshape(matrix.T.shape))


def bias_unscaled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "_bias_of", lambda adapter, c: adapter.read(adapter.lora[c.bias].bias))


def embedding_not_transposed(patch: pytest.MonkeyPatch) -> None:
    right = module._delta
    patch.setattr(
        module,
        "_delta",
        lambda adapter, c: (
            right(adapter, c).T.reshape(right(adapter, c).shape)
            if adapter.lora[c.module].embedding
            else right(adapter, c)
        ),
    )


MUTATIONS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "scale forgotten": (no_scale, "every linear"),
    "dora's norm over outputs": (norms_of_columns, "dora"),
    "conv1d taken for a linear": (never_transposed, "fused and transposed"),
    "B's bias not scaled": (bias_unscaled, "a bias of B"),
    "an embedding's delta not transposed": (embedding_not_transposed, "embedding and head"),
}


@few(1)
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_formula_is_not_published(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, kind = MUTATIONS[name]
    model, settings = KINDS[kind]
    trained(model, tmp_path, **settings)
    mutate(monkeypatch)
    assert "not exact on this checkpoint" in refused(tmp_path).message


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["every linear", "patterns"])
def test_a_scale_read_wrongly_shows_against_peft(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What both sides of the measurement share it cannot see; the test against peft does."""
    model, settings = KINDS[kind]
    trained(model, tmp_path, **settings)
    monkeypatch.setattr(Adapter, "scale", lambda self, *_: self.config["lora_alpha"] / self.config["r"])
    gptkit.swap(tmp_path / "base", tmp_path / "out", merge_lora=str(tmp_path / "adapter"))
    assert gap(logits_of_peft(tmp_path), logits_of(tmp_path / "out")) > 1e-3
