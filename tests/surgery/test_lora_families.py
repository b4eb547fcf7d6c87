"""LoRA adapters of every family: what gptkit merges is what peft merges, whatever the layers are made of."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from helpers.covering import few, others_slow
from helpers.families import CONFIGS, VARIANTS, Variant, save_hf, shared_weights
from helpers.unknown import COMPOSITES, composite
from safetensors.torch import load_file, save_file

import gptkit
from gptkit.converter.extract import extract
from gptkit.errors import InvalidInput, SwapRefused

SMALL = {"r": 3, "lora_alpha": 7}
_INCOMPATIBLE = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
"""Model types whose out_proj peft refuses."""
_HEADS = ("lm_head", "head", "decoder", "output_projection", "embed_out")
"""Linears that may be tied to the embedding: tests/surgery/test_lora.py has those."""
NOT_MERGED = {
    "zamba2": "whose weights are shared with another module",
    **dict.fromkeys(("t5", "bart", "marian", "mbart"), "also has an encoder"),
}


def linears_of(model: Any) -> list[str]:
    """The last part of the names of a model's linears, where nothing else is called so."""
    linear = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)
    kinds: dict[str, set[bool]] = {}
    for name, module in model.named_modules():
        kinds.setdefault(name.rpartition(".")[2], set()).add(isinstance(module, linear))
    left = _HEADS + (("out_proj",) if model.config.model_type in _INCOMPATIBLE else ())
    return sorted(name for name, own in kinds.items() if own == {True} and name not in left)


def experts_of(model: Any) -> list[str]:
    """The parameters that are stacks of matrices, with their modules' names."""
    stacked = (name for name, each in model.named_parameters() if each.ndim == 3 and "conv" not in name)
    return sorted({".".join(name.split(".")[-2:]) for name in stacked if "time_mix" not in name})


def adapt(model: Any, folder: Path, **settings: Any) -> Any:
    """Save an adapter of random values, and give base and adapter back."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(model, peft.LoraConfig(**{**SMALL, **settings}))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in (each for each in adapted.parameters() if each.requires_grad):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        adapted.save_pretrained(folder)
    return adapted


def merged_by_both(config: dict[str, Any], folder: Path, adapted: Any) -> None:
    """Assert that the tensors that gptkit merges are those of peft's own merge in fp64, and not the base's."""
    old = {name: array for name, array, _ in gptkit.open_checkpoint(folder / "base").tensors()}
    gptkit.swap(folder / "base", folder / "out", merge_lora=str(folder / "adapter"), measured=False, dtype="float64")
    new = {name: array for name, array, _ in gptkit.open_checkpoint(folder / "out").tensors()}
    changed = 0
    for name, tensor in shared_weights(adapted.double().merge_and_unload(), config).items():
        np.testing.assert_allclose(new[name].astype(float), tensor.detach().numpy(), rtol=0, atol=1e-12, err_msg=name)
        changed += not np.array_equal(old[name].astype(float), new[name].astype(float))
    assert changed


@few(4)
@pytest.mark.parametrize("variant", others_slow(VARIANTS))
def test_an_adapter_of_every_linear_and_expert(variant: Variant, tmp_path: Path) -> None:
    model = save_hf(variant.config, tmp_path / "base")
    experts = experts_of(model)
    more = {"target_parameters": experts} if experts else {}
    adapted = adapt(model, tmp_path / "adapter", target_modules=linears_of(model), **more)
    if (message := NOT_MERGED.get(variant.family)) is not None:
        with pytest.raises(SwapRefused, match=message):
            gptkit.swap(tmp_path / "base", tmp_path / "out", merge_lora=str(tmp_path / "adapter"))
    else:
        merged_by_both(variant.config, tmp_path, adapted)


HYBRIDS = ("qwen3_5_text", "qwen3_next", "lfm2", "granitemoehybrid", "jamba", "nemotron_h", "recurrent_gemma")
UNLIKE = (*HYBRIDS, "gemma3n_text", "deepseek_v3")


@few(3)
@pytest.mark.parametrize("model", UNLIKE)
def test_queries_and_values_where_not_every_layer_has_them(model: str, tmp_path: Path) -> None:
    config = CONFIGS[model]
    targets = ["kv_b_proj"] if model == "deepseek_v3" else ["q_proj", "v_proj"]
    adapted = adapt(save_hf(config, tmp_path / "base"), tmp_path / "adapter", target_modules=targets)
    merged_by_both(config, tmp_path, adapted)


# --- experts ----------------------------------------------------------------------------------------------------------

STACKED = ("qwen3_moe", "mixtral", "gpt_oss", "llama4_text", "granitemoe")


@few(2)
@pytest.mark.parametrize("one", ["gate_up_proj", "down_proj", "gate.weight"])
@pytest.mark.parametrize("model", STACKED)
def test_parameters_of_experts_one_by_one(model: str, one: str, tmp_path: Path) -> None:
    """peft nests a wrapper for each parameter, and says by no name which of them an adapter is of."""
    config = CONFIGS[model]
    base = save_hf(config, tmp_path / "base")
    if not any(name.endswith(f".{one}") for name, _ in base.named_parameters()):
        one = "router.weight"
    merged_by_both(config, tmp_path, adapt(base, tmp_path / "adapter", target_modules=[], target_parameters=[one]))


def test_what_todays_peft_makes_of_targets_in_a_mixture_is_exact(tmp_path: Path) -> None:
    """It writes `target_parameters` of gate_proj, up_proj and down_proj, with a pattern for the rank of two in one."""
    base = save_hf(CONFIGS["qwen3_moe"], tmp_path / "base")
    adapted = adapt(base, tmp_path / "adapter", target_modules=["gate_proj", "up_proj", "down_proj"])
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert sorted(config["target_parameters"]) == ["down_proj", "gate_up_proj"]
    done = gptkit.swap(tmp_path / "base", tmp_path / "measured", merge_lora=str(tmp_path / "adapter"))
    assert done.guarantee == "exact"
    merged_by_both(CONFIGS["qwen3_moe"], tmp_path, adapted)


def test_an_adapter_of_each_expert_by_its_number(tmp_path: Path) -> None:
    """What peft wrote with transformers 4, which today's peft joins when it loads it."""
    config = CONFIGS["qwen3_moe"]
    base = save_hf(config, tmp_path / "base")
    adapt(base, tmp_path / "adapter", target_modules=["q_proj"])
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    stored, generator = load_file(path), torch.Generator().manual_seed(1)
    shapes = load_file(tmp_path / "base" / "model.safetensors")
    for name, weight in shapes.items():
        if ".experts." in name:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            stored[f"{module}.lora_A.weight"] = 0.3 * torch.randn(3, weight.shape[1], generator=generator)
            stored[f"{module}.lora_B.weight"] = 0.3 * torch.randn(weight.shape[0], 3, generator=generator)
    save_file(stored, path)
    config_path = tmp_path / "adapter" / "adapter_config.json"
    said = json.loads(config_path.read_text())
    said["target_modules"] = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    config_path.write_text(json.dumps(said))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
        merged_by_both(config, tmp_path, peft.PeftModel.from_pretrained(again, tmp_path / "adapter"))


# --- added tokens -----------------------------------------------------------------------------------------------------

TOKENS: dict[str, dict[str, Any]] = {
    "saved": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "saved, embedding alone": {"modules_to_save": ["embed_tokens"]},
    "rows": {"trainable_token_indices": [1, 97, 99]},
    "lora": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
}


@few(2)
@pytest.mark.parametrize("kind", TOKENS)
@pytest.mark.parametrize("model", ["llama", "llama-v5"])
def test_adapters_with_added_tokens(model: str, kind: str, tmp_path: Path) -> None:
    """peft also saves what a module was before it was trained, as `original_module` or `base_layer`."""
    save_hf(CONFIGS[model], tmp_path / "small")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype=torch.float32)
    base.resize_token_embeddings(100)
    base.save_pretrained(tmp_path / "base")
    base.name_or_path = base.config._name_or_path = str(tmp_path / "small")
    adapted = adapt(base, tmp_path / "adapter", **{"target_modules": ["q_proj"], **TOKENS[kind]}).eval()
    ids = torch.tensor([[1, 2, 97, 99, 5, 98]])
    with torch.inference_mode():
        wanted = adapted.double()(input_ids=ids).logits
        gptkit.swap(tmp_path / "base", tmp_path / "out", merge_lora=str(tmp_path / "adapter"))
        merged, base = (gptkit.load(tmp_path / name, torch.float64)(ids) for name in ("out", "base"))
    assert (merged - wanted).abs().max() < 3e-5 * wanted.abs().max()
    assert (base - wanted).abs().max() > 1e-2 * wanted.abs().max()


# --- pickles ----------------------------------------------------------------------------------------------------------


def test_an_adapter_in_a_pickle_is_read_where_it_is_allowed(tmp_path: Path) -> None:
    adapt(save_hf(CONFIGS["llama"], tmp_path / "base"), tmp_path / "adapter", target_modules=["q_proj"])
    adapter = str(tmp_path / "adapter")
    gptkit.swap(tmp_path / "base", tmp_path / "one", merge_lora=adapter)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    torch.save(load_file(path), path.with_name("adapter_model.bin"))
    path.unlink()
    gptkit.swap(tmp_path / "base", tmp_path / "two", merge_lora=adapter, allow_pickle=True)
    one, two = (gptkit.open_checkpoint(tmp_path / name).tensors() for name in ("one", "two"))
    for (name, array, _), (_, other, _) in zip(one, two, strict=True):
        np.testing.assert_array_equal(array, other, err_msg=name)


# --- models of images and text ----------------------------------------------------------------------------------------


@few(2)
@pytest.mark.parametrize("kind", COMPOSITES)
def test_an_adapter_of_a_composite_is_merged_into_its_language_model(kind: str, tmp_path: Path) -> None:
    model = composite(kind)
    model.save_pretrained(tmp_path / "whole")
    extract("text", tmp_path / "whole", tmp_path / "text")
    text = r".*(language_model|text_model).*\.q_proj"
    adapted = adapt(model, tmp_path / "adapter", target_modules=text).eval()
    done = gptkit.swap(tmp_path / "text", tmp_path / "out", merge_lora=str(tmp_path / "adapter"))
    assert done.guarantee == "exact"
    ids = torch.arange(6, 46).reshape(2, 20)
    with torch.inference_mode():
        wanted = adapted(input_ids=ids).logits
        found = gptkit.load(tmp_path / "out", torch.float32)(ids)
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()


# --- mlx-lm -----------------------------------------------------------------------------------------------------------


def mlx_adapter(folder: Path, shapes: dict[str, tuple[int, ...]], kind: str = "lora", **config: Any) -> dict[str, Any]:
    """Save random tensors as mlx-lm saves an adapter, and give them back in fp64."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(2)
    tensors = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors = {name: 2 + each.abs() if name.endswith(".m") else each for name, each in tensors.items()}
    save_file(tensors, folder / "adapters.safetensors")
    parameters = {"rank": 3, "scale": 20.0, "dropout": 0.0}
    said = {"fine_tune_type": kind, "lora_parameters": parameters, "num_layers": 2, "model": "org/base", **config}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return {name: each.double().numpy() for name, each in tensors.items()}


def merged_tensors(folder: Path, files: str = "out") -> dict[str, np.ndarray]:
    return {n: t.double().numpy() for n, t in load_file(folder / files / "model.safetensors").items()}


def merge(folder: Path, **settings: Any) -> Any:
    adapter = str(folder / "adapter")
    return gptkit.swap(folder / "base", folder / "out", merge_lora=adapter, to="hf", dtype="float64", **settings)


Q, GATE = "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.gate_proj"


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_adapter_of_mlx_is_merged_as_mlx_fuses_it(kind: str, tmp_path: Path) -> None:
    """Source: mlx-lm, LoRALinear.fuse and DoRALinear.fuse: lora_a is (in, rank), lora_b (rank, out)."""
    save_hf(CONFIGS["llama-3"], tmp_path / "base")
    old = merged_tensors(tmp_path, "base")
    shapes: dict[str, tuple[int, ...]] = {}
    for module in (Q, GATE):
        out, inputs = old[f"{module}.weight"].shape
        shapes |= {f"{module}.lora_a": (inputs, 3), f"{module}.lora_b": (3, out)}
        shapes |= {f"{module}.m": (out,)} if kind == "dora" else {}
    stored = mlx_adapter(tmp_path / "adapter", shapes, kind)
    assert merge(tmp_path).guarantee == "exact"
    new = merged_tensors(tmp_path)
    for module in (Q, GATE):
        wanted = old[f"{module}.weight"] + (20.0 * stored[f"{module}.lora_b"].T) @ stored[f"{module}.lora_a"].T
        if kind == "dora":
            wanted = (stored[f"{module}.m"] / np.linalg.norm(wanted, axis=1))[:, None] * wanted
        np.testing.assert_allclose(new[f"{module}.weight"], wanted, rtol=0, atol=1e-12)
    changed = {name for name in old if not np.array_equal(old[name], new[name])}
    assert changed == {f"{Q}.weight", f"{GATE}.weight"}


@pytest.mark.parametrize("model", ["llama-3", "llama-v5"])
def test_an_embedding_of_mlx_stays_the_head_where_it_was_tied(model: str, tmp_path: Path) -> None:
    save_hf(CONFIGS[model], tmp_path / "base")
    old, table = merged_tensors(tmp_path, "base"), "model.embed_tokens"
    tokens, hidden = old[f"{table}.weight"].shape
    shapes = {f"{table}.lora_a": (tokens, 3), f"{table}.lora_b": (3, hidden), f"{table}.m": (tokens,)}
    stored = mlx_adapter(tmp_path / "adapter", shapes, "dora")
    done = merge(tmp_path)
    wanted = old[f"{table}.weight"] + 20.0 * stored[f"{table}.lora_a"] @ stored[f"{table}.lora_b"]
    wanted = (stored[f"{table}.m"] / np.linalg.norm(wanted, axis=1))[:, None] * wanted
    new = merged_tensors(tmp_path)
    np.testing.assert_allclose(new[f"{table}.weight"], wanted, rtol=0, atol=1e-12)
    assert done.spec.tied == ("lm_head.weight" not in old)
    if "lm_head.weight" in old:
        np.testing.assert_array_equal(new["lm_head.weight"], old["lm_head.weight"])


@pytest.mark.parametrize("model", ["qwen3_moe", "mixtral"])
def test_experts_of_mlx(model: str, tmp_path: Path) -> None:
    """Source: mlx-lm, LoRASwitchLinear.fuse: lora_a is (experts, rank, in), lora_b (experts, out, rank)."""
    save_hf(CONFIGS[model], tmp_path / "base")
    old = merged_tensors(tmp_path, "base")
    own = {"qwen3_moe": ("mlp", "up_proj"), "mixtral": ("block_sparse_moe", "w3")}[model]
    names = [f"model.layers.1.{own[0]}.experts.{e}.{own[1]}.weight" for e in range(99)]
    names = [name for name in names if name in old]
    out, inputs = old[names[0]].shape
    switch = f"model.layers.1.{own[0]}.switch_mlp.up_proj"
    shapes = {f"{switch}.lora_a": (len(names), 3, inputs), f"{switch}.lora_b": (len(names), out, 3)}
    stored = mlx_adapter(tmp_path / "adapter", shapes)
    assert merge(tmp_path).guarantee == "exact"
    new = merged_tensors(tmp_path)
    assert {name for name in old if not np.array_equal(old[name], new[name])} == {*names}
    for expert, name in enumerate(names):
        delta = 20.0 * stored[f"{switch}.lora_b"][expert] @ stored[f"{switch}.lora_a"][expert]
        np.testing.assert_allclose(new[name], old[name] + delta, rtol=0, atol=1e-12)


def test_layers_that_mlx_trained_whole(tmp_path: Path) -> None:
    save_hf(CONFIGS["llama-3"], tmp_path / "base")
    name = f"{Q}.weight"
    shape = merged_tensors(tmp_path, "base")[name].shape
    stored = mlx_adapter(tmp_path / "adapter", {name: shape}, "full", lora_parameters=None)
    merge(tmp_path, measured=False)
    np.testing.assert_array_equal(merged_tensors(tmp_path)[name], stored[name])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"lora_parameters": {"rank": 3}}, "the scale in lora_parameters of .* must be a number"),
        ({"fine_tune_type": "prefix"}, "fine_tune_type 'prefix', which gptkit does not know"),
    ],
)
def test_what_is_not_understood_of_mlx_is_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_hf(CONFIGS["llama-3"], tmp_path / "base")
    out, inputs = merged_tensors(tmp_path, "base")[f"{Q}.weight"].shape
    mlx_adapter(tmp_path / "adapter", {f"{Q}.lora_a": (inputs, 3), f"{Q}.lora_b": (3, out)}, **config)
    with pytest.raises(SwapRefused, match=message):
        merge(tmp_path)


def test_an_adapter_of_mlx_is_recognised_as_one(tmp_path: Path) -> None:
    mlx_adapter(tmp_path / "adapter", {f"{Q}.lora_a": (48, 3), f"{Q}.lora_b": (3, 48)})
    with pytest.raises(InvalidInput, match="is a LoRA adapter of rank 3 for org/base") as caught:
        gptkit.open_checkpoint(tmp_path / "adapter")
    assert (caught.value.hint or "").startswith("Merge it: gptkit swap org/base OUT --merge-lora")
