"""swap: what is written, what is recorded, what is refused, and the trained samples before and after."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from helpers.covering import few
from helpers.exactness import difference
from helpers.families import CONFIGS, edited, save_hf

import gptkit
from gptkit.components import LayerNorm, RMSNorm
from gptkit.converter.manifest import check_manifest
from gptkit.converter.resolve import SAMPLES_DIR, located
from gptkit.errors import CannotExpress, CheckpointError, GptkitError, InvalidInput, SwapRefused, UsageError
from gptkit.report.surgery import swap_lines
from gptkit.surgery.swap import SwapResult


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def dtypes(folder: Path) -> dict[str, str]:
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118


@pytest.mark.exhaustive
@few(1)
@pytest.mark.parametrize("sample", ["gpt2", "bloom", "falcon"])
def test_trained_samples_from_their_files(sample: str, tmp_path: Path) -> None:
    if not (SAMPLES_DIR / sample).is_dir():
        pytest.skip(f"there is no {SAMPLES_DIR / sample}")
    model = f"sample:{sample}"
    result = gptkit.swap(model, tmp_path / "rms", norm="rmsnorm")
    assert (result.guarantee, result.dtype) == ("exact", "float64")
    assert difference(model, tmp_path / "rms", torch.float32)[0] <= 1e-4
    assert difference(model, tmp_path / "rms")[0] <= 1e-10
    naive = gptkit.swap(model, tmp_path / "naive", norm="rmsnorm", approximate=True)
    assert difference(model, tmp_path / "naive")[0] > 1
    assert naive.measured is not None and naive.measured.kl > 0.01
    verdict_alone = {"mutations": False, "bisected": False, "damaged": False}
    assert gptkit.verify(model, tmp_path / "rms", **verdict_alone).verdict == "equal"
    assert gptkit.verify(model, tmp_path / "naive", **verdict_alone).verdict == "different"
    assert gptkit.load(tmp_path / "rms").final_norm.weight.dtype == torch.float32  # to keep what was computed
    assert not check_manifest(tmp_path / "rms")
    names = {path.name for path in (tmp_path / "rms").iterdir()}
    assert {"gptkit.json", "model.safetensors", "tokenizer.json"} <= names


def test_what_is_computed_is_wide_and_the_rest_as_it_was(hf: Path, tmp_path: Path) -> None:
    for asked, stored in (("float64", "F64"), ("float32", "F32"), ("bf16", "BF16")):
        out = tmp_path / asked
        result = gptkit.swap(hf, out, norm="rmsnorm", dtype=asked)
        found = dtypes(out)
        assert set(found.values()) == {stored, "BF16"}
        for name in ("embedding.weight", "positions.weight", "head.bias", "blocks.2.feed_forward.down_proj.weight"):
            assert found[name] == stored
        for name in ("head.weight", "final_norm.weight", "blocks.0.attention.q_proj.weight"):
            assert found[name] == "BF16"
        with safetensors.safe_open(out / "model.safetensors", "pt") as file:
            q = file.get_tensor("blocks.1.attention.q_proj.weight")
        weights = safetensors.torch.load_file(hf / "model.safetensors")
        assert torch.equal(q, weights["transformer.h.1.attn.c_attn.weight"][:, :48].t())
        assert result.measured is not None
    errors = [difference(hf, tmp_path / asked)[0] for asked in ("float64", "float32", "bf16")]
    assert errors[0] < 1e-12 < errors[1] < 1e-4 < errors[2] < 0.5


def test_fp32_above_its_bound_is_refused_whatever_the_original_rounds(tmp_path: Path) -> None:
    """A stream with a large mean, which LayerNorm takes off in fp32: right in fp64, and still not called exact."""
    save_hf(CONFIGS["gpt2"], tmp_path / "hf")
    edited(tmp_path / "hf", lambda weights: weights["transformer.wte.weight"].add_(200))
    with pytest.raises(GptkitError, match=r"not exact on this checkpoint: in float32, .* at most 1e-05"):
        gptkit.swap(tmp_path / "hf", tmp_path / "out", norm="rmsnorm")
    assert not (tmp_path / "out").exists()


def test_float16_that_does_not_hold_the_values(tmp_path: Path) -> None:
    save_hf(CONFIGS["gpt2"], tmp_path / "hf")
    edited(tmp_path / "hf", lambda weights: weights["transformer.wte.weight"][3].mul_(1e6))
    with pytest.raises(CheckpointError, match="are too large for float16"):
        gptkit.swap(tmp_path / "hf", tmp_path / "out", norm="rmsnorm", dtype="float16")
    assert tree(tmp_path) == ["hf", *(f"hf/{name}" for name in tree(tmp_path / "hf"))]


def test_the_result_says_what_was_done(hf: Path, tmp_path: Path) -> None:
    result = gptkit.swap(hf, tmp_path / "rms", norm="rmsnorm")
    assert isinstance(result, SwapResult)
    assert result.target == tmp_path / "rms"
    assert result.parameters[1] - result.parameters[0] == 97 * 48 + 97 - 48 * 7
    assert gptkit.open_checkpoint(tmp_path / "rms").spec == result.spec
    assert not any(isinstance(node, LayerNorm) for _, node in result.spec.nodes())
    assert sum(isinstance(node, RMSNorm) for _, node in result.spec.nodes()) == 7
    lines = "\n".join(swap_lines(result))
    assert "exact swap" in lines and "untied" in lines and "float64" in lines
    assert all(len(line) <= 80 for line in swap_lines(result)[1:])


def test_history_and_manifest(hf: Path, tmp_path: Path) -> None:
    result = gptkit.swap(hf, tmp_path / "rms", norm="rmsnorm", dtype="float32")
    record = {
        "swap": "norm",
        "norm": "rmsnorm",
        "from": "layernorm",
        "to": "rmsnorm",
        "guarantee": "exact",
        "norms": 7,
        "dtype": "float32",
        "gptkit": gptkit.__version__,
    }
    local = json.loads((tmp_path / "rms" / "gptkit.json").read_text())
    assert local["history"] == [record]
    assert local["origin"]["family"] == "gpt2"
    assert gptkit.open_checkpoint(tmp_path / "rms").origin.history == (record,)
    (manifest_path,) = (path for path in (tmp_path / "rms").iterdir() if "manifest" in path.name)
    manifest = json.loads(manifest_path.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert manifest["swap"]["steps"] == [record]
    assert result.measured is not None
    assert manifest["swap"]["measured"] == json.loads(json.dumps(result.measured.as_json()))
    assert not check_manifest(tmp_path / "rms")
    unmeasured = gptkit.swap(hf, tmp_path / "unmeasured", norm="rmsnorm", measured=False)
    assert unmeasured.measured is None
    assert swap_lines(unmeasured)[-1] == "not measured"


@pytest.mark.exhaustive
def test_a_local_source_and_a_chain_of_history(hf: Path, tmp_path: Path) -> None:
    gptkit.convert(hf, tmp_path / "local")
    gptkit.swap(tmp_path / "local", tmp_path / "rms", norm="rmsnorm")
    gptkit.swap(hf, tmp_path / "direct", norm="rmsnorm")
    same = (tmp_path / name / "model.safetensors" for name in ("rms", "direct"))
    assert len({path.read_bytes() for path in same}) == 1
    assert gptkit.verify(hf, tmp_path / "rms").verdict == "equal"


def test_a_swap_of_a_swap_is_refused(hf: Path, tmp_path: Path) -> None:
    gptkit.swap(hf, tmp_path / "rms", norm="rmsnorm")
    for approximate in (False, True):
        with pytest.raises(SwapRefused, match="all its norms are RMSNorm"):
            gptkit.swap(tmp_path / "rms", tmp_path / "twice", norm="rmsnorm", approximate=approximate)
    assert not (tmp_path / "twice").exists()


def test_no_layernorm(tmp_path: Path) -> None:
    with pytest.raises(SwapRefused, match="no LayerNorm"):
        gptkit.swap("sample:llama", tmp_path / "out", norm="rmsnorm")
    assert tree(tmp_path) == []


def test_post_norm_is_refused_and_then_approximate(tmp_path: Path) -> None:
    save_hf(CONFIGS["bloom-post-norm"], tmp_path / "hf")
    before = tree(tmp_path)
    with pytest.raises(SwapRefused) as caught:
        gptkit.swap(tmp_path / "hf", tmp_path / "out", norm="rmsnorm")
    assert "apply_residual_connection_post_layernorm" in caught.value.message
    assert "--approximate" in str(caught.value.hint)
    assert tree(tmp_path) == before
    result = gptkit.swap(tmp_path / "hf", tmp_path / "out", norm="rmsnorm", approximate=True)
    assert result.guarantee == "approximate"
    assert result.measured is not None
    assert result.measured.maximum["float64"] == pytest.approx(difference(tmp_path / "hf", tmp_path / "out")[0])
    assert result.measured.maximum["float64"] > 0.5
    assert result.measured.kl > 0
    assert 0 < result.measured.top1 < 1
    assert result.measured.positions > 300
    assert json.loads((tmp_path / "out" / "gptkit.json").read_text())["history"][0]["guarantee"] == "approximate"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "no swap was given"),
        ({"norm": "groupnorm"}, "--norm 'groupnorm' is unknown"),
        ({"norm": ""}, "--norm '' is unknown"),
        ({"nrom": "rmsnorm"}, "unknown swap 'nrom'"),
        ({"norm": "rmsnorm", "dtype": "int8"}, "unknown dtype 'int8'"),
    ],
)
def test_calls_that_are_wrong(options: dict[str, Any], words: str, hf: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        gptkit.swap(hf, tmp_path / "out", **options)
    assert tree(tmp_path) == []


def test_an_output_that_exists(hf: Path, tmp_path: Path) -> None:
    gptkit.convert(hf, tmp_path / "out")
    before = (tmp_path / "out" / "gptkit.json").read_bytes()
    with pytest.raises(UsageError, match="exists"):
        gptkit.swap(hf, tmp_path / "out", norm="rmsnorm")
    assert (tmp_path / "out" / "gptkit.json").read_bytes() == before
    gptkit.swap(hf, tmp_path / "out", norm="rmsnorm", force=True)
    assert gptkit.open_checkpoint(tmp_path / "out").origin.history
    assert tree(tmp_path)[0] == "out" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("approximate", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_named(value: float, approximate: bool, hf: Path, tmp_path: Path) -> None:
    shutil.copytree(hf, tmp_path / "hf")
    edited(tmp_path / "hf", lambda weights: weights["transformer.h.1.mlp.c_proj.weight"][0, 0].fill_(value))
    with pytest.raises(InvalidInput, match=r"blocks.1.feed_forward.down_proj.weight (has 1|\(1) values"):
        gptkit.swap(tmp_path / "hf", tmp_path / "out", norm="rmsnorm", approximate=approximate)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["gpt2", "bloom", "falcon-7b"])
def test_a_swapped_tree_stays_local(name: str, tmp_path: Path) -> None:
    save_hf(CONFIGS[name], tmp_path / "hf")
    gptkit.swap(tmp_path / "hf", tmp_path / "rms", norm="rmsnorm", measured=False)
    before = tree(tmp_path)
    for target in ("hf", "hf:gpt2", "hf:llama", "hf:bloom"):
        with pytest.raises(CannotExpress) as caught:
            gptkit.convert(tmp_path / "rms", tmp_path / "back", target)
        assert "cannot express" in caught.value.message
        if target == "hf":
            assert "RMSNorm" in caught.value.message and "head.bias" in caught.value.message
    assert tree(tmp_path) == before
    gptkit.convert(tmp_path / "rms", tmp_path / "copy", "local")
    assert located(tmp_path / "copy").format == "local"
    for file in ("model.safetensors", "gptkit.json"):
        assert (tmp_path / "copy" / file).read_bytes() == (tmp_path / "rms" / file).read_bytes()


def test_progress_and_determinism(hf: Path, tmp_path: Path) -> None:
    told: list[int] = []
    gptkit.swap(hf, tmp_path / "a", norm="rmsnorm", progress=told.append, measured=False)
    gptkit.swap(hf, tmp_path / "b", norm="rmsnorm", measured=False)
    assert len(told) == len(dtypes(tmp_path / "a"))
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


def test_the_model_itself_is_no_output(hf: Path, tmp_path: Path) -> None:
    gptkit.convert(hf, tmp_path / "local")
    before = (tmp_path / "local" / "model.safetensors").read_bytes()
    with pytest.raises(UsageError, match="is the model itself"):
        gptkit.swap(tmp_path / "local", tmp_path / "local", norm="rmsnorm", force=True)
    assert (tmp_path / "local" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("option", ["hidden", "intermediate", "heads", "head_dim", "vocab"])
def test_sizes_that_no_model_has(option: str, hf: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at most 1,000,000"):
        gptkit.swap(hf, tmp_path / "out", **{option: "99999999"}, dry_run=True)
    assert not (tmp_path / "out").exists()


def test_a_gguf_lies_among_anything(tmp_path: Path) -> None:
    """The tokenizer in the file travels, not one that happens to lie beside it."""
    gptkit.convert("sample:llama", tmp_path / "gguf", "gguf")
    (tmp_path / "gguf" / "merges.txt").write_text("do not match")
    (file,) = (tmp_path / "gguf").glob("*.gguf")
    gptkit.swap(file, tmp_path / "out", attention="mha", measured=False)
    assert not (tmp_path / "out" / "merges.txt").exists()
    assert (tmp_path / "out" / "tokenizer.json").exists()
