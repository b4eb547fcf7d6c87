"""load: the same module from either format, in the dtype asked for, ready to run and ready to train."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.covering import few, others_slow, rest_slow
from helpers.families import CONFIGS, REPRESENTATIVES, VARIANTS, Variant, save_hf, spec_of
from helpers.generation import generate_ids
from torch import Tensor, nn

import gptkit
from gptkit.architectures import ARCHITECTURES
from gptkit.components import ModelSpec
from gptkit.errors import UsageError
from gptkit.modules.load import as_torch, build, load_checkpoint, torch_dtype
from gptkit.parity.outputs import outputs_of
from gptkit.parity.probe import ProbeBatch

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4]])


def dtypes(model: nn.Module) -> set[torch.dtype]:
    return {parameter.dtype for parameter in model.parameters()}


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_dtype_is_the_checkpoints_or_the_one_asked_for(stored: torch.dtype, tmp_path: Path) -> None:
    save_hf(CONFIGS["llama"], tmp_path / "hf", stored)
    gptkit.convert(tmp_path / "hf", tmp_path / "local")
    for folder in (tmp_path / "hf", tmp_path / "local"):
        assert dtypes(gptkit.load(folder)) == {stored}
        for asked in (torch.float64, "float64", "torch.float64", "fp64"):
            assert dtypes(gptkit.load(folder, asked)) == {torch.float64}
        assert dtypes(gptkit.load(folder, "bf16")) == {torch.bfloat16}
        wide = gptkit.load(folder, torch.float64)(IDS)
        assert wide.dtype == torch.float64
        assert torch.equal(gptkit.load(folder)(IDS).dtype == stored and wide, wide)


@pytest.mark.parametrize("config", [{"torch_dtype": "bfloat16"}, {"dtype": None, "torch_dtype": "bfloat16"}])
def test_a_dtype_stated_the_old_way(config: dict[str, Any], tmp_path: Path) -> None:
    save_hf(CONFIGS["llama"], tmp_path / "hf", torch.float32)
    path = tmp_path / "hf" / "config.json"
    rest = {key: value for key, value in json.loads(path.read_text()).items() if key != "dtype"}
    path.write_text(json.dumps({**rest, **config}))
    assert dtypes(gptkit.load(tmp_path / "hf")) == {torch.bfloat16}


def test_the_samples_dtype() -> None:
    stated = gptkit.open_checkpoint("sample:gpt2").origin.config
    assert stated is not None
    assert dtypes(gptkit.load("sample:gpt2")) == {getattr(torch, stated["dtype"])}


@pytest.mark.parametrize("dtype", ["int8", "double", "", "float8", torch.int64, torch.complex64, 32])
def test_other_dtypes(dtype: Any) -> None:
    with pytest.raises(UsageError, match="unknown dtype"):
        gptkit.load("sample:llama", dtype)


def test_dtypes_by_any_name() -> None:
    assert torch_dtype(None) == torch.float32
    assert torch_dtype(None, "BF16") == torch.bfloat16
    assert torch_dtype("Float16") == torch_dtype(torch.float16) == torch_dtype("fp16") == torch.float16


@pytest.mark.parametrize("attention", ["flash", "", "SDPA", None])
def test_other_attention(attention: Any) -> None:
    with pytest.raises(UsageError, match="must be 'sdpa' or 'eager'"):
        gptkit.load("sample:llama", attention=attention)


@pytest.mark.parametrize("device", ["cuda:77", "nowhere", "xpu:5"])
def test_other_devices(device: str) -> None:
    with pytest.raises(UsageError, match="device"):
        gptkit.load("sample:llama", device=device)


def test_attention_paths_compute_the_same_function() -> None:
    sdpa, eager = (gptkit.load("sample:llama", "float64", attention=path) for path in ("sdpa", "eager"))
    with torch.inference_mode():
        assert (sdpa(IDS) - eager(IDS)).abs().max() < 1e-11
    assert sdpa.blocks[0].attention.kernel == "sdpa"
    assert eager.blocks[0].attention.kernel == "eager"


@few(5)
@pytest.mark.parametrize("variant", others_slow(VARIANTS))
def test_local_and_hf_are_one(variant: Variant, tmp_path: Path) -> None:
    save_hf(variant.config, tmp_path / "hf")
    gptkit.convert(tmp_path / "hf", tmp_path / "local")
    checkpoint = gptkit.open_checkpoint(tmp_path / "hf")
    models = [gptkit.load(tmp_path / name) for name in ("hf", "local")]
    names = [parameter.name for parameter in checkpoint.spec.parameters()]
    shapes = [parameter.shape for parameter in checkpoint.spec.parameters()]
    for model in models:
        assert not model.training
        assert sorted(model.state_dict()) == sorted(names)
        assert [tuple(model.state_dict()[name].shape) for name in names] == shapes
    hf, local = models
    for name in names:
        assert torch.equal(hf.state_dict()[name], local.state_dict()[name])
    with torch.inference_mode():
        assert torch.equal(outputs(hf), outputs(local))


def outputs(model: nn.Module, ids: Tensor = IDS) -> Tensor:
    """Logits, of a model with an encoder with the same tokens as its source."""
    return outputs_of(model, ProbeBatch("", ids))


def step(model: nn.Module) -> None:
    """One of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss(model).backward()
    optimizer.step()


def loss(model: nn.Module) -> Tensor:
    logits = outputs(model)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())


def unseen(spec: ModelSpec, name: str) -> bool:
    """Whether it is a key's bias that adds the same to all scores of a query, which softmax does not see: no rotation,
    norm, clip or cap comes between, and no sink stands beside them.
    """
    if not name.endswith("k_proj.bias"):
        return False
    attention: Any = dict(spec.nodes())[name.removesuffix(".k_proj.bias")]
    position = getattr(attention, "position", None)
    turned = position is not None and position.turns
    fields = ("k_norm", "clip", "cap", "sinks")
    return not turned and not any(getattr(attention, field, None) for field in fields)


def idle(model: nn.Module) -> set[str]:
    """The parameters that no derivative reaches: of experts to which no token is led but the last, of which the loss
    knows nothing, what is added to scores where experts are chosen, which is no smooth function of it, routers that
    leave one expert in reach (SparseMixer) for each token, and the numbers of xIELU that are not learnt.
    """
    taken: dict[str, set[int]] = {}
    certain: dict[str, bool] = {}
    mixtures: dict[str, Any] = {path: each for path, each in model.named_modules() if hasattr(each, "route")}
    for path, mixture in mixtures.items():

        def noting(x: Tensor, path: str = path, route: Any = mixture.route) -> tuple[Tensor, Tensor]:
            weights, chosen = route(x)
            taken[path] = set(chosen.flatten().tolist())
            certain[path] = mixtures[path].spec.jitter is not None and bool((weights == 1).all())
            return weights, chosen

        mixture.route = noting
    with torch.inference_mode():
        outputs(model, IDS[:, :-1])
    found = {name for name, _ in model.named_parameters() if name.endswith((".activation.beta", ".activation.eps"))}
    for path, mixture in mixtures.items():
        del mixture.route
        rest = [f"{path}.experts.{number}." for number in set(range(mixture.spec.experts)) - taken[path]]
        own = (*rest, f"{path}.choice.", *([f"{path}.router."] if certain[path] else []))
        found |= {name for name, _ in model.named_parameters() if name.startswith(own)}
    return found


@few(4)
@pytest.mark.parametrize("family", rest_slow(ARCHITECTURES))
@pytest.mark.parametrize("used_before", [False, True], ids=["fresh", "after generating"])
def test_it_can_be_trained(family: str, used_before: bool, tmp_path: Path) -> None:
    """Fused families too, and after inference, which turns their parameters into views of one matrix."""
    config = REPRESENTATIVES[family].config
    save_hf(config, tmp_path / "hf")
    # With a bias of scores that learns torch's fast kernel computes in another order, in transformers' model too.
    attention = "sdpa" if spec_of(config).relative_bias is None else "eager"
    model = gptkit.load(tmp_path / "hf", attention=attention)
    fixed = {name for name, each in model.named_parameters() if not each.requires_grad}
    assert fixed == {f"blocks.{n}.scale.weight" for n, block in enumerate(model.spec.blocks) if block.scale is not None}
    with torch.inference_mode():
        before = outputs(model)
    if used_before and model.spec.causal:
        generate_ids(model, [1, 2], 3, start=None if model.spec.encoder is None else 0)
    assert torch.equal(outputs(model).detach(), before)
    first = loss(model).item()
    unused = idle(model) | fixed
    step(model)
    for name, parameter in model.named_parameters():
        if name in unused:
            assert parameter.grad is None or not parameter.grad.any(), name
            continue
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all()
        if not unseen(model.spec, name):
            assert parameter.grad.abs().max() > 1e-7, name
    with torch.inference_mode():
        after = outputs(model)
    assert (after - before).abs().max() > 1e-3
    for _ in range(5):
        model.zero_grad()
        step(model)
    assert loss(model).item() < first
    with torch.no_grad():
        assert torch.equal(outputs(model), outputs(model))
    fresh = gptkit.load(tmp_path / "hf", attention=attention)
    fresh.load_state_dict(model.state_dict())
    with torch.inference_mode():
        assert torch.equal(outputs(fresh), outputs(model))


@pytest.mark.parametrize("ids", [torch.tensor([1, 2]), torch.zeros(1, 0).long(), torch.zeros(1, 1, 1).long()])
def test_ids_of_another_shape(ids: Tensor) -> None:
    with pytest.raises(UsageError, match="token ids must have the shape"):
        gptkit.load("sample:gpt2")(ids)


@pytest.mark.parametrize("shape", [(2, 11), (2, 13), (1, 12), (12,), (2, 1, 12, 12)])
@pytest.mark.parametrize("sample", ["gpt2", "bloom"])
def test_masks_of_another_shape(sample: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="attention_mask must have the shape"):
        gptkit.load(f"sample:{sample}")(IDS, torch.ones(shape))


def test_what_is_trained_is_not_the_file(tmp_path: Path) -> None:
    save_hf(CONFIGS["llama"], tmp_path / "hf")
    bytes_before = (tmp_path / "hf" / "model.safetensors").read_bytes()
    model = gptkit.load(tmp_path / "hf")
    step(model)
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == bytes_before


def test_progress_counts_the_bytes() -> None:
    told: list[int] = []
    checkpoint = gptkit.open_checkpoint("sample:bloom")
    load_checkpoint(checkpoint, progress=told.append)
    assert sum(told) == sum(array.nbytes for _, array, _ in checkpoint.tensors())


def test_a_tensor_that_is_not_there_is_no_module() -> None:
    checkpoint = gptkit.open_checkpoint("sample:llama")
    with pytest.raises(AssertionError, match=r"never filled: .*embedding.weight"):
        build(checkpoint.spec, (t for t in checkpoint.tensors() if t[0] != "embedding.weight"), torch.float32)


def test_arrays_as_tensors_have_their_own_memory() -> None:
    checkpoint = gptkit.open_checkpoint("sample:llama")
    name, array, dtype = next(checkpoint.tensors())
    tensor = as_torch(array, dtype)
    tensor.zero_()
    assert array.any(), name
