"""save: a model that a program changed, as a folder that every command takes for a checkpoint."""

import copy
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from helpers.command import call
from helpers.covering import few
from helpers.families import CONFIGS, REPRESENTATIVES, Variant, save_hf, spec_of
from helpers.trees import random_weights
from torch import Tensor, nn

import gptkit
from gptkit.architectures import ARCHITECTURES
from gptkit.converter.resolve import read_spec
from gptkit.converter.tokenizer import load_tokenizer
from gptkit.errors import CannotExpress, CheckpointError, InvalidInput, UsageError
from gptkit.modules import Decoder
from gptkit.parity.outputs import outputs_of
from gptkit.parity.probe import ProbeBatch
from gptkit.parity.sides import auto_class

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]])


def trained(model: Decoder, steps: int = 2) -> Decoder:
    """After some steps of AdamW on the next token."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        logits = outputs_of(model, ProbeBatch("", IDS[:, :-1]))
        nn.functional.cross_entropy(logits.flatten(0, 1).float(), IDS[0, 1:]).backward()
        optimizer.step()
    return model


def logits(model: Decoder) -> Tensor:
    with torch.inference_mode():
        return model(IDS)


def exit_code(*words: object) -> int:
    run = call(*words)
    return run.exit_code


@pytest.mark.exhaustive
@few(1)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_what_was_trained_comes_back(name: str, tmp_path: Path) -> None:
    """Tied and untied: the same logits, a manifest that is right, a tokenizer, and a history that tells."""
    model = trained(gptkit.load(f"sample:{name}", dtype="float32"))
    out = gptkit.save(model, tmp_path / "tuned")
    assert out == tmp_path / "tuned"
    again = gptkit.load(out)
    assert torch.equal(logits(again), logits(model))
    assert not torch.equal(logits(again), logits(gptkit.load(f"sample:{name}", dtype="float32")))
    assert exit_code("check", out) == 0
    assert exit_code("verify", out, "--no-mutations") == 0
    assert exit_code("verify", f"sample:{name}", out, "--no-mutations", "--no-damage") == 3
    assert load_tokenizer(out) is not None
    assert "".join(gptkit.generate(out, "ROMEO:\n", 5)) == "".join(gptkit.generate(model, "ROMEO:\n", 5))
    _, origin, _ = read_spec(out)
    assert origin.reference == f"sample:{name}"
    assert [record["dtype"] for record in origin.history] == ["float32"]
    assert origin.history[-1]["saved"].startswith("from memory")


@few(5)
@pytest.mark.parametrize("variant", REPRESENTATIVES.values(), ids=str)
def test_transformers_loads_what_was_trained(variant: Variant, tmp_path: Path) -> None:
    save_hf(variant.config, tmp_path / "hf")
    model = trained(gptkit.load(tmp_path / "hf", dtype="float32"))
    gptkit.save(model, tmp_path / "out", "hf")
    path = ARCHITECTURES[variant.family].reference(model.spec)[0]
    reference = auto_class(variant.config).from_pretrained(
        tmp_path / "out", dtype=torch.float32, attn_implementation=path
    )
    with torch.inference_mode():
        assert torch.equal(outputs_of(reference.eval(), ProbeBatch("", IDS)), outputs_of(model, ProbeBatch("", IDS)))
    gptkit.convert(gptkit.save(model, tmp_path / "local"), tmp_path / "by convert", "hf")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "by convert" / file).read_bytes() == (tmp_path / "out" / file).read_bytes()
    assert exit_code("check", tmp_path / "out") == 0
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["history"][-1]["saved"]


def test_the_configs_dtype_is_that_of_the_tensors(tmp_path: Path) -> None:
    model = trained(gptkit.load("sample:llama", dtype="float32"))
    for dtype, expected in ((None, "float32"), ("bfloat16", "bfloat16"), (torch.float16, "float16")):
        out = gptkit.save(model, tmp_path / str(dtype), "hf", dtype=dtype)
        assert json.loads((out / "config.json").read_text())["dtype"] == expected
        assert set(gptkit.open_checkpoint(out).dtypes.values()) == {
            {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[expected]
        }
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    assert torch.equal(logits(gptkit.load(tmp_path / "bfloat16")), logits(rounded))
    gptkit.save(rounded, tmp_path / "own")
    assert torch.equal(logits(gptkit.load(tmp_path / "own")), logits(rounded))
    with torch.no_grad():
        model.embedding.weight[0, 0] = 1e6
    with pytest.raises(CheckpointError):
        gptkit.save(model, tmp_path / "large", dtype="float16")
    assert not (tmp_path / "large").exists()


def test_unchanged_weights_are_the_same_files(tmp_path: Path) -> None:
    gptkit.save(gptkit.load("sample:falcon"), tmp_path / "out", "hf")
    source = gptkit.open_checkpoint("sample:falcon").folder
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()


def test_what_began_at_random_does_not_end_there(tmp_path: Path) -> None:
    """In history, that is: the draw is told, and that the weights are no longer it."""
    spec = tmp_path / "config.json"
    spec.write_text(json.dumps(CONFIGS["llama"]))
    model = trained(gptkit.load(spec, random=True, seed=3))
    gptkit.save(model, tmp_path / "out")
    history = read_spec(tmp_path / "out")[1].history
    assert ["random" in record for record in history] == [True, False]
    assert history[0]["seed"] == 3
    assert history[1]["saved"].startswith("from memory")
    assert torch.equal(logits(gptkit.load(tmp_path / "out")), logits(model))
    gptkit.save(model, tmp_path / "hf", "hf")
    assert exit_code("verify", tmp_path / "hf", "--no-mutations") == 0


def test_another_family_and_what_it_cannot_hold(tmp_path: Path) -> None:
    model = trained(gptkit.load("sample:llama", dtype="float32"))
    gptkit.save(model, tmp_path / "mistral", "hf:mistral")
    assert json.loads((tmp_path / "mistral" / "config.json").read_text())["model_type"] == "mistral"
    assert torch.equal(logits(gptkit.load(tmp_path / "mistral")), logits(model))
    with pytest.raises(CannotExpress):
        gptkit.save(model, tmp_path / "gpt2", "hf:gpt2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mistral"]


def test_a_tree_that_somebody_built(tmp_path: Path) -> None:
    spec = spec_of(CONFIGS["llama"])
    model = Decoder(spec).double()
    model.load_state_dict(random_weights(spec))
    gptkit.save(model, tmp_path / "local")
    assert torch.equal(logits(gptkit.load(tmp_path / "local")), logits(model))
    with pytest.raises(UsageError, match="does not know the family of this model"):
        gptkit.save(model, tmp_path / "hf", "hf")
    gptkit.save(model, tmp_path / "auto", "hf:auto")
    assert exit_code("verify", tmp_path / "auto", "--no-mutations") == 0


def test_a_folder_that_is_there_stays(tmp_path: Path) -> None:
    model = gptkit.load("sample:llama")
    out = gptkit.save(model, tmp_path / "out")
    before = (out / "model.safetensors").read_bytes()
    trained(model)
    with pytest.raises(UsageError, match="exists"):
        gptkit.save(model, out)
    assert (out / "model.safetensors").read_bytes() == before
    own = gptkit.load(out)
    gptkit.save(trained(own), out, force=True)  # over what it was loaded from, its tokenizer included
    assert torch.equal(logits(gptkit.load(out)), logits(own))
    assert load_tokenizer(out) is not None
    assert [record["saved"][:11] for record in read_spec(out)[1].history] == ["from memory"] * 2
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == ["out"]


def test_a_run_that_was_interrupted_leaves_nothing_to_go_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are others the next time: files of an earlier save are never taken over."""
    model = gptkit.load("sample:llama", dtype="float32")
    with monkeypatch.context() as patch:
        patch.setattr("gptkit.modules.save.Staging.commit", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            gptkit.save(model, tmp_path / "out", max_shard_bytes=500_000)
    assert not (tmp_path / "out").exists()
    trained(model)
    gptkit.save(model, tmp_path / "out", max_shard_bytes=500_000)
    assert torch.equal(logits(gptkit.load(tmp_path / "out")), logits(model))
    assert exit_code("check", tmp_path / "out") == 0


def test_a_module_that_is_no_tree_any_more_is_refused(tmp_path: Path) -> None:
    model = gptkit.load("sample:llama")
    with pytest.raises(UsageError, match="DataParallel"):
        gptkit.save(nn.DataParallel(model), tmp_path / "out")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="unknown format"):
        gptkit.save(model, tmp_path / "out", "gguf")
    with pytest.raises(UsageError, match="dtype"):
        gptkit.save(model, tmp_path / "out", dtype="int8")
    wrapped = copy.deepcopy(model)
    wrapped.blocks[0].attention.adapter = nn.Linear(2, 2)  # as peft leaves it
    with pytest.raises(InvalidInput, match=r"adapter.weight is not part of it"):
        gptkit.save(wrapped, tmp_path / "out")
    wider = copy.deepcopy(model)
    wider.embedding.weight = nn.Parameter(torch.zeros(600, 96))
    with pytest.raises(InvalidInput, match=r"embedding.weight has the shape \[600, 96\], expected \[512, 96\]"):
        gptkit.save(wider, tmp_path / "out")
    with torch.device("meta"):
        empty = Decoder(model.spec)
    with pytest.raises(InvalidInput, match="no values"):
        gptkit.save(empty, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_copies_know_where_they_come_from(tmp_path: Path) -> None:
    """An average of weights is a deep copy, and workers get pickles."""
    model = gptkit.load("sample:gpt2")
    for number, copied in enumerate((copy.deepcopy(model), pickle.loads(pickle.dumps(model)))):
        out = gptkit.save(copied, tmp_path / str(number))
        assert read_spec(out)[1].reference == "sample:gpt2"


def test_a_tokenizer_that_is_gone_costs_no_weights(tmp_path: Path) -> None:
    shutil.copytree(gptkit.open_checkpoint("sample:llama").folder, tmp_path / "copy")
    model = trained(gptkit.load(tmp_path / "copy"))
    shutil.rmtree(tmp_path / "copy")
    with pytest.warns(UserWarning, match="saved without its tokenizer"):
        gptkit.save(model, tmp_path / "out")
    assert torch.equal(logits(gptkit.load(tmp_path / "out")), logits(model))


def test_heads_tied_by_hand_are_stored_twice(tmp_path: Path) -> None:
    """One parameter in two places, where the tree says that there are two."""
    model = gptkit.load("sample:llama")
    model.head.weight = model.embedding.weight
    gptkit.save(model, tmp_path / "out")
    assert torch.equal(logits(gptkit.load(tmp_path / "out")), logits(model))
