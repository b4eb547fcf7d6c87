"""audit and load go by one reader: what load refuses is an error, what it reads is not called broken."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.audited import audited
from helpers.command import call
from helpers.hubserver import Hub, Repo
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

import gptkit
from gptkit.errors import GptkitError, InvalidInput
from gptkit.parity.audit import audit, fix

SAMPLES = Path(gptkit.__file__).parent / "samples"
SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SINGLE = "model.safetensors"


def made(folder: Path, kind: Any = AutoModelForCausalLM, model_type: str = "llama", **fields: Any) -> Path:
    """A checkpoint of a class of transformers, with random weights."""
    config = AutoConfig.for_model(model_type, **SIZES, **fields)
    model = kind.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    held = load_file(folder / SINGLE)
    change(held)
    save_file(held, folder / SINGLE, metadata={"format": "pt"})
    return folder


def configured(folder: Path, **fields: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    return folder


def sample(folder: Path, name: str = "llama") -> Path:
    return Path(shutil.copytree(SAMPLES / name, folder))


def tied_twice(folder: Path) -> Path:
    made(folder, tie_word_embeddings=True)
    return rewritten(folder, lambda held: held.update({"lm_head.weight": held["model.embed_tokens.weight"] * 1.5}))


def under_two_names(folder: Path) -> Path:
    name = "norm.weight"
    return rewritten(sample(folder), lambda held: held.update({name: held[f"model.{name}"].clone()}))


def own_format(folder: Path) -> Path:
    gptkit.convert("sample:llama", folder)
    return rewritten(folder, lambda held: held.pop("blocks.1.feed_forward.up_proj.weight"))


def gptkit_json(folder: Path) -> Path:
    gptkit.convert("sample:llama", folder)
    data = json.loads((folder / "gptkit.json").read_text())
    data["spec"]["blocks"] = data["spec"]["blocks"][:-1]
    (folder / "gptkit.json").write_text(json.dumps(data))
    return folder


def no_config(folder: Path) -> Path:
    (sample(folder) / "config.json").unlink()
    return folder


def integers(folder: Path) -> Path:
    name = "model.norm.weight"
    return rewritten(sample(folder), lambda held: held.update({name: held[name].to(torch.int8)}))


def adapter(folder: Path) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    save_file({"base_model.model.x.lora_A.weight": torch.ones(4, 2)}, folder / "adapter_model.safetensors")
    return folder


def buffers_of_dcp(folder: Path) -> Path:
    gptkit.convert("sample:llama", folder, to="dcp")
    next(folder.glob("*.distcp")).write_bytes(b"PK")
    return folder


def npz(folder: Path) -> Path:
    sample(folder)
    held = {name: each.float().numpy() for name, each in load_file(folder / SINGLE).items()}
    (folder / SINGLE).unlink()
    np.savez(folder / "weights.npz", **{name: each for name, each in held.items() if "norm" not in name})
    return folder


REFUSED: dict[str, Callable[[Path], Path]] = {
    "a tied head with other values": tied_twice,
    "the same tensor is stored under two names": under_two_names,
    "a tensor missing in gptkit's own format": own_format,
    "a tree with fewer layers than there are tensors": gptkit_json,
    "no config.json": no_config,
    "no model_type": lambda folder: configured(sample(folder), model_type=None),
    "integers for a weight": integers,
    "a field with a wrong value": lambda folder: configured(sample(folder), num_hidden_layers="five"),
    "more layers than tensors": lambda folder: configured(sample(folder), num_hidden_layers=300),
    "a field that is refused": lambda folder: configured(sample(folder), is_encoder_decoder=True),
    "an adapter": adapter,
    "a damaged DCP folder": buffers_of_dcp,
    "an .npz without the norms": npz,
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_load_refuses_is_an_error(case: str, tmp_path: Path) -> None:
    folder = REFUSED[case](tmp_path / "model")
    with pytest.raises(GptkitError) as caught:
        gptkit.load(folder, allow_pickle=True)
    audited(folder, caught.value, allow_pickle=True)
    told = call("audit", folder, "--allow-pickle", "--values")
    assert told.exit_code in (3, 4)
    assert "Nothing found" not in told.stdout


def test_a_folder_that_load_refuses_is_not_written_again(tmp_path: Path) -> None:
    folder = tied_twice(tmp_path / "model")
    result = fix(folder, tmp_path / "out")
    assert [each.rule for each in result.findings][:2] == ["not-fixed", "tied-head"]
    assert not (tmp_path / "out").exists()
    assert call("audit", folder, "--fix", tmp_path / "out").exit_code == 3
    gptkit.convert("sample:llama", tmp_path / "own")
    with pytest.raises(InvalidInput, match="gptkit's own format"):
        fix(tmp_path / "own", tmp_path / "out")


def lightning(folder: Path, held: dict[str, torch.Tensor]) -> None:
    torch.save({"state_dict": {f"model.{name}": each for name, each in held.items()}, "epoch": 3}, folder / "last.ckpt")


def nested(folder: Path, held: dict[str, torch.Tensor]) -> None:
    dcp.save({"model": held}, checkpoint_id=folder)


def arrays(folder: Path, held: dict[str, torch.Tensor]) -> None:
    np.savez(folder / "weights.npz", **{name: each.float().numpy() for name, each in held.items()})


def wrapped(folder: Path, held: dict[str, torch.Tensor]) -> None:
    """FSDP's whole state dictionary, beside an optimizer's."""
    torch.save({f"_fsdp_wrapped_module.{name}": each for name, each in held.items()}, folder / "pytorch_model_fsdp.bin")
    torch.save({"state": {}}, folder / "optimizer.bin")


def ranks(folder: Path, held: dict[str, torch.Tensor]) -> None:
    names = list(held)
    for rank in range(2):
        part = {name: torch.chunk(held[name], 2)[rank].clone() for name in names}
        torch.save(part, folder / f"model_world_size_2_rank_{rank}.pt")


TRAINED = {"lightning": lightning, "dcp": nested, "npz": arrays, "fsdp": wrapped, "ranks": ranks}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("program", TRAINED)
def test_what_training_programs_leave_is_right(program: str, tmp_path: Path) -> None:
    """By itself and beside its source, values included; and a tensor that they lack is named."""
    for lost in ("", "model.layers.1.mlp.up_proj.weight"):
        folder = sample(tmp_path / f"model{lost}")
        held = load_file(folder / SINGLE)
        (folder / SINGLE).unlink()
        TRAINED[program](folder, {name: each for name, each in held.items() if name != lost})
        if not lost:
            gptkit.load(folder, allow_pickle=True)
        result = audit(folder, source="sample:llama", allow_pickle=True, values=program != "npz")
        wrong = [each.rule for each in result.findings if each.severity == "error"]
        assert wrong == (["missing-tensor"] if lost else []), result.findings
        assert result.tensors == len(held) - bool(lost)


@pytest.mark.parametrize("to", ["nanogpt_tanh", "local", "dcp", "gguf"])
def test_what_gptkit_writes_is_right_beside_its_source(to: str, tmp_path: Path) -> None:
    name = "gpt2" if to == "nanogpt_tanh" else "llama"
    out = tmp_path / ("out.gguf" if to == "gguf" else "out")
    gptkit.convert(f"sample:{name}", out, to=to)
    result = audit(out, source=f"sample:{name}", allow_pickle=True, values=to != "gguf")
    assert result.clean, result.findings
    assert result.tensors > 10


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_classifier_is_read_by_its_architectures(model_type: str, tied: bool, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"num_labels": 1, "pad_token_id": 0, "tie_word_embeddings": tied}
    fields |= {"bos_token_id": 0, "eos_token_id": 1} | ({} if model_type == "gpt2" else {"num_key_value_heads": 2})
    folder = made(tmp_path / "reward", AutoModelForSequenceClassification, model_type, **fields)
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    result = audit(folder)
    assert [(each.rule, each.tensors) for each in result.findings] == [("other-head", ("score.weight",))]
    told = call("load", folder)
    assert told.exit_code == 4
    assert name in told.stderr and "score.weight" in " ".join(told.stderr.split())
    assert "tie_word_embeddings" not in told.stderr
    assert call("diff", folder, folder).exit_code == 0
    rewritten(folder, lambda held: held.pop("score.weight"))
    assert [each.rule for each in audit(folder).findings if each.severity == "error"] == ["missing-tensor"]


def test_a_base_model_has_no_head(tmp_path: Path) -> None:
    folder = configured(sample(tmp_path / "base"), architectures=["LlamaModel"])
    rewritten(folder, lambda held: held.pop("lm_head.weight"))
    assert [each.rule for each in audit(folder).findings] == ["other-head"]
    configured(folder, architectures=["LlamaForCausalLM"])
    assert [each.rule for each in audit(folder).findings] == ["missing-tensor"]


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float8_e4m3fn])
def test_neither_a_dtype_nor_a_name_alone_makes_a_tensor_quantised(dtype: torch.dtype, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nobody"}))
    held = {"net.positions": torch.ones(4).to(dtype), "net.attn_scales": torch.ones(4), "net.w": torch.ones(2, 2)}
    save_file(held, tmp_path / SINGLE)
    assert audit(tmp_path).clean
    save_file({**held, "net.proj": torch.ones(2, 2).to(dtype), "net.proj_scales": torch.ones(2)}, tmp_path / SINGLE)
    (finding,) = [each for each in audit(tmp_path).findings if each.severity == "error"]
    assert (finding.rule, finding.tensors) == ("config-quantisation", ("net.proj_scales",))


def test_a_report_says_whether_values_were_read(tmp_path: Path) -> None:
    folder = rewritten(sample(tmp_path / "model"), lambda held: held["model.norm.weight"].fill_(torch.nan))
    told = call("audit", folder)
    assert told.exit_code == 0
    assert "Values were not read: NaN" in told.stdout
    assert json.loads(call("audit", folder, "--json").stdout)["values_read"] is False
    assert call("audit", folder, "--values").exit_code == 3


def test_an_index_beside_a_single_file_is_stale(tmp_path: Path) -> None:
    """Loaders read the single file alone, and so does load."""
    folder = sample(tmp_path / "model")
    places = {"weight_map": {"w": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(places))
    gptkit.load(folder)
    assert [(each.rule, each.severity) for each in audit(folder).findings] == [("stale-index", "warning")]


def test_a_tied_head_on_the_hub_is_not_compared(tmp_path: Path, hub: Hub) -> None:
    folder = tied_twice(tmp_path / "model")
    hub.repos["org/name"] = Repo({path.name: path.read_bytes() for path in folder.iterdir()})
    (finding,) = audit("org/name").findings
    assert (finding.rule, finding.severity) == ("tied-head", "note")
    assert "not compared" in finding.message
