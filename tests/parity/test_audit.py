"""audit: what is wrong with a checkpoint is named with its tensors, and what is right is left in peace."""

import json
import random
import shutil
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from helpers.command import call
from helpers.covering import exhaustive, few
from helpers.families import CONFIGS, save_hf
from helpers.gguf_files import write_gguf
from helpers.hubserver import OLD, Hub, Repo, of_preset
from helpers.inside import asked_inside
from helpers.unknown import UNKNOWN, saved
from safetensors.torch import load_file, save_file

import gptkit
from gptkit.errors import GptkitError, InvalidInput, UnknownFamily, UntrustedInput, UsageError
from gptkit.parity.audit import audit, fix
from gptkit.parity.audits import programs
from gptkit.parity.audits.subject import Audit
from gptkit.parity.diff import diff
from gptkit.report.tree import tree_rows

Tensors = dict[str, torch.Tensor]
SAMPLES = Path(gptkit.__file__).parent / "samples"
SHARED = Path(__file__).parents[3] / "shared" / "checkpoints"
INDEX = "model.safetensors.index.json"
UP = "model.layers.1.mlp.up_proj.weight"
SHARDS = 3


def tensors() -> Tensors:
    return load_file(SAMPLES / "llama" / "model.safetensors")


def write(folder: Path, held: Tensors, sample: str = "llama") -> Path:
    """A sharded checkpoint of these tensors, with the small files of a sample."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(SAMPLES / sample, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    names, places = list(held), {}
    each = -(-len(names) // SHARDS)
    for shard in range(SHARDS):
        part = {name: held[name].contiguous() for name in names[shard * each : (shard + 1) * each]}
        file = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in held.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": places}))
    return folder


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def found(result: Audit, rule: str) -> tuple[str, ...]:
    """The tensors of a finding that there is once."""
    (finding,) = [each for each in result.findings if each.rule == rule]
    return finding.tensors


def without(*words: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        write(folder, {name: each for name, each in tensors().items() if not any(word in name for word in words)})

    return change


def with_values(name: str, values: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], object]:
    return lambda folder: write(folder, {**tensors(), name: values(tensors()[name])})


def not_a_number(values: torch.Tensor) -> torch.Tensor:
    values.view(-1)[3] = torch.nan
    return values


def truncated(folder: Path) -> None:
    file = folder / "model-00001-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def fp8(folder: Path) -> None:
    held = tensors()
    write(folder, {**held, UP: held[UP].to(torch.float8_e4m3fn), f"{UP}_scale_inv": torch.ones(1, 1)})


def config(**fields: Any) -> Callable[[Path], object]:
    return lambda folder: edit(folder / "config.json", lambda data: data.update(fields))


def index(change: Callable[[dict[str, str]], object]) -> Callable[[Path], object]:
    return lambda folder: edit(folder / INDEX, lambda data: change(data["weight_map"]))


PLANTED: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "the head is gone": (without("lm_head"), "missing-tensor", "lm_head.weight"),
    "two layers are gone": (without("layers.2.", "layers.3."), "missing-tensor", "model.layers.3.mlp.up_proj.weight"),
    "a tensor of one layer is gone": (without(UP), "missing-tensor", UP),
    "a shard is gone": (
        lambda p: (p / "model-00002-of-00003.safetensors").unlink(),
        "dangling-index",
        "model.layers.2.mlp.up_proj.weight",
    ),
    "a shard is cut": (truncated, "missing-tensor", "model.embed_tokens.weight"),
    "the index names what is not there": (
        index(lambda places: places.update({"mtp.w": "model-00001-of-00003.safetensors"})),
        "dangling-index",
        "mtp.w",
    ),
    "the index does not name what is there": (index(lambda places: places.pop(UP)), "unlisted-tensor", UP),
    "config has fewer layers": (config(num_hidden_layers=3), "config-layers", "model.layers.4.mlp.up_proj.weight"),
    "config has fewer rows": (config(vocab_size=500), "config-vocabulary", "model.embed_tokens.weight"),
    "config ties another head": (config(vocab_size=500, tie_word_embeddings=True), "config-vocabulary", ""),
    "names have a prefix": (
        lambda p: write(p, {f"module.{name}": each for name, each in tensors().items()}),
        "other-name",
        f"module.{UP}",
    ),
    "a tensor is not a number": (with_values(UP, not_a_number), "not-finite", UP),
    "a tensor is zeros": (with_values(UP, torch.zeros_like), "zero-tensor", UP),
    "a tensor is one value": (with_values(UP, torch.ones_like), "constant-tensor", UP),
    "a tensor is another layer's": (
        with_values(UP, lambda _: tensors()[UP.replace(".1.", ".2.")]),
        "repeated-tensor",
        UP,
    ),
    "a tensor is transposed": (with_values(UP, lambda each: each.T), "source-shape", UP),
    "a tensor is another": (with_values(UP, lambda each: 2 * each), "source-value", UP),
    "a tensor is narrower": (with_values(UP, lambda each: each.to(torch.float8_e5m2)), "source-dtype", UP),
    "a tensor is quantised in secret": (fp8, "config-quantisation", f"{UP}_scale_inv"),
    "a tensor came from elsewhere": (
        lambda p: write(p, {**tensors(), "value_head": torch.ones(3)}),
        "added-tensor",
        "",
    ),
    "a special id has no row": (config(eos_token_id=512), "special-token", ""),
    "the tokenizer has more tokens": (
        lambda p: edit(p / "tokenizer.json", lambda data: data["model"]["vocab"].update(more=512)),
        "tokenizer-vocabulary",
        "",
    ),
}


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_loss_is_named(case: str, tmp_path: Path) -> None:
    change, rule, tensor = PLANTED[case]
    folder = write(tmp_path / "model", tensors())
    change(folder)
    result = audit(folder, source=SAMPLES / "llama", values=True)
    assert not result.clean
    named = [name for each in result.findings if each.rule == rule for name in each.tensors]
    assert tensor in named if tensor else rule in {each.rule for each in result.findings}


@pytest.mark.parametrize("sample", ["gpt2", "llama", "bloom", "falcon"])
def test_what_is_right_is_left_in_peace(sample: str, tmp_path: Path) -> None:
    held = load_file(SAMPLES / sample / "model.safetensors")
    folder = write(tmp_path / "sharded", held, sample)
    gptkit.convert(f"sample:{sample}", tmp_path / "local")
    gptkit.convert(tmp_path / "local", tmp_path / "back", to="hf")
    for each in (SAMPLES / sample, folder, tmp_path / "back"):
        result = audit(each, source=f"sample:{sample}", values=True)
        assert not result.findings, result.findings
        assert result.tensors == len(held)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the trained checkpoints are not here")
@pytest.mark.parametrize("name", ["capp-gpt2", "stories260K-llama"])
def test_checkpoints_of_others_are_clean(name: str) -> None:
    assert audit(SHARED / name, values=True).clean


def test_what_loses_nothing_is_mended(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", {f"module.{name}": each for name, each in tensors().items()})
    edit(folder / INDEX, lambda data: data["weight_map"].pop(f"module.{UP}"))
    mended = fix(folder, tmp_path / "mended", source="sample:llama", values=True)
    assert mended.clean
    assert diff(tmp_path / "mended", "sample:llama", rank=False).same_bytes
    assert len(list((tmp_path / "mended").glob("*.safetensors"))) == SHARDS
    with pytest.raises(UsageError, match="exists"):
        fix(folder, tmp_path / "mended")
    truncated(folder)
    with pytest.raises(InvalidInput, match="Nothing was written"):
        fix(folder, tmp_path / "never")
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("sharded", [True, False])
def test_missing_tensors_are_copied_from_the_source(sharded: bool, tmp_path: Path) -> None:
    lost = (UP, "lm_head.weight")
    rest = {name: each for name, each in tensors().items() if name not in lost}
    folder = write(tmp_path / "model", rest)
    if not sharded:
        shutil.rmtree(folder)
        shutil.copytree(SAMPLES / "llama", folder)
        save_file(rest, folder / "model.safetensors", metadata={"format": "pt"})
    before = audit(folder, source="sample:llama")
    (finding,) = before.findings
    assert (finding.rule, set(finding.tensors), set(before.in_source)) == ("missing-tensor", set(lost), set(lost))
    assert "sample:llama has them with the required shape" in finding.message
    assert fix(folder, tmp_path / "never").findings[0].rule == "not-fixed"
    mended = fix(folder, tmp_path / "mended", source="sample:llama", values=True)
    assert mended.clean
    assert [(each.rule, set(each.tensors)) for each in mended.findings] == [("taken-from-source", set(lost))]
    assert "2 tensors were missing and were copied from sample:llama" in mended.findings[0].message
    assert diff(tmp_path / "mended", "sample:llama", rank=False).same_bytes
    assert (tmp_path / "mended" / "model.safetensors").exists() != sharded
    gptkit.load(tmp_path / "mended")


def test_a_tensor_of_another_shape_is_not_copied_from_the_source(tmp_path: Path) -> None:
    held = tensors()
    folder = write(
        tmp_path / "model", {name: each for name, each in held.items() if name not in (UP, "lm_head.weight")}
    )
    source = write(tmp_path / "source", {**held, UP: held[UP][:-1]})
    (finding,) = (each for each in audit(folder, source=source).findings if each.severity == "error")
    assert f"{source} has 1 of them with the required shape" in finding.message
    told = call("audit", folder, "--fix", tmp_path / "out", "--source", source)
    assert told.exit_code == 3
    assert "cannot repair missing-tensor" in " ".join(told.stdout.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("field", "wrong", "rule"),
    [
        ("vocab_size", 500, "config-vocabulary"),
        ("intermediate_size", 200, "shape"),
        ("hidden_size", 48, "shape"),
        ("num_key_value_heads", 3, "shape"),
        ("num_key_value_heads", 4, "config"),  # gptkit refuses 6 heads with 4 key-value heads
        ("head_dim", 12, "shape"),
        ("num_hidden_layers", 3, "config-layers"),
        ("num_hidden_layers", 7, "missing-tensor"),
    ],
)
def test_the_field_that_contradicts_the_shapes_is_named_and_restored(
    field: str, wrong: int, rule: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "model", tensors())
    right = json.loads((folder / "config.json").read_text())
    config(**{field: wrong})(folder)
    (finding,) = (each for each in audit(folder).findings if each.rule != "tokenizer-vocabulary")
    assert finding.rule == rule
    assert f"Set {field} to {right[field]} instead of {wrong} in config.json" in finding.remedy
    assert fix(folder, tmp_path / "out").findings[0].rule == "not-fixed"
    (finding,) = (each for each in audit(folder, source="sample:llama").findings if each.rule == rule)
    assert f"Restore the value of {field} in sample:llama, {right[field]}: run this command" in finding.remedy
    mended = fix(folder, tmp_path / "out", source="sample:llama", values=True)
    (note,) = mended.findings
    assert (note.rule, note.severity) == ("restored-field", "note")
    assert note.message == f"config.json: {field} {wrong} → {right[field]}, as in sample:llama"
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == right
    assert diff(tmp_path / "out", "sample:llama", rank=False).same_bytes
    gptkit.load(tmp_path / "out")


def test_the_field_of_a_fused_projection_is_named(tmp_path: Path) -> None:
    """Its rows are no multiple of the number of key-value heads."""
    save_hf(CONFIGS["phi3"], tmp_path / "model")
    kv = json.loads((tmp_path / "model" / "config.json").read_text())["num_key_value_heads"]
    config(num_key_value_heads=1)(tmp_path / "model")
    (finding,) = (each for each in audit(tmp_path / "model").findings if each.rule == "shape")
    assert f"num_key_value_heads is 1, but should be {kv}" in finding.message and "qkv_proj" in finding.tensors[0]


def test_the_field_is_named_if_no_number_of_heads_divides_their_width(tmp_path: Path) -> None:
    save_hf(CONFIGS["cohere_compass_text"], tmp_path / "model")
    config(num_key_value_heads=10)(tmp_path / "model")
    (finding,) = (each for each in audit(tmp_path / "model").findings if each.rule == "config")
    assert "Set num_key_value_heads to 5 instead of 10" in finding.remedy


def test_a_field_that_the_config_lacks_is_restored(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", tensors())
    edit(folder / "config.json", lambda data: data.pop("num_key_value_heads"))
    config(tie_word_embeddings=True)(write(tmp_path / "tied", tensors()))
    for model, words in (
        (folder, "num_key_value_heads absent → 2"),
        (tmp_path / "tied", "tie_word_embeddings True → False"),
    ):
        (note,) = fix(model, tmp_path / "out", source="sample:llama", force=True).findings
        assert note.message == f"config.json: {words}, as in sample:llama"
        assert diff(tmp_path / "out", "sample:llama", rank=False).same_bytes


def test_a_config_that_no_single_field_corrects_is_left_as_it_is(tmp_path: Path) -> None:
    """Two fields are wrong, or the original has the same value: the tensors are named, and nothing is written."""
    folder = write(tmp_path / "model", tensors())
    config(vocab_size=500, intermediate_size=200)(folder)
    (first, *_) = (each for each in audit(folder, source="sample:llama").findings if each.rule == "shape")
    assert "but config.json says" in first.message and first.remedy.startswith("Correct the size in config.json")
    assert fix(folder, tmp_path / "out", source="sample:llama").findings[0].rule == "not-fixed"
    config(vocab_size=512)(folder)
    original = write(tmp_path / "original", {name: each for name, each in tensors().items() if "mlp" not in name})
    config(intermediate_size=200)(original)
    (finding,) = (each for each in audit(folder, source=original).findings if each.rule == "shape")
    assert "Set intermediate_size to 256 instead of 200" in finding.remedy
    assert fix(folder, tmp_path / "out", source=original).findings[0].rule == "not-fixed"
    assert not (tmp_path / "out").exists()


def test_layers_that_were_lost_do_not_blame_the_config(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    without("layers.4.")(folder)
    (finding,) = audit(folder).findings
    assert "Set num_hidden_layers to 4 instead of 5" in finding.remedy and "Save the model again" in finding.remedy
    (finding,) = audit(folder, source="sample:llama").findings
    assert finding.remedy.startswith("Copy them from sample:llama")
    (folder / "model-00003-of-00003.safetensors").unlink()  # the tensors of the last layers are in no file
    assert not any("num_hidden_layers" in each.remedy for each in audit(folder).findings)


def test_the_source_of_copied_tensors_must_be_local(tmp_path: Path, hub: Hub) -> None:
    whole = write(tmp_path / "whole", tensors())
    hub.repos["org/name"] = Repo({path.name: path.read_bytes() for path in whole.iterdir()})
    folder = write(tmp_path / "model", {name: each for name, each in tensors().items() if name != UP})
    with pytest.raises(InvalidInput, match=r"lacks 1 tensor of org/name, whose weights are on the hub"):
        fix(folder, tmp_path / "out", source="org/name")
    assert not (tmp_path / "out").exists()


def test_nothing_is_no_pass(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "w.safetensors")
    save_file({}, tmp_path / "none.safetensors")
    for path, source, why in (
        ("empty", None, "nothing to audit"),
        ("none.safetensors", None, "nothing to audit"),
        ("w.safetensors", SAMPLES / "llama", "no tensor in common"),
    ):
        with pytest.raises(InvalidInput, match=why):
            audit(tmp_path / path, source=source)
    assert call("audit", tmp_path / "empty").exit_code == 4
    assert call("audit", "sample:llama", "--for", "nobody").exit_code == 2


def test_the_command_says_it_to_people_and_programs(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", {name: each for name, each in tensors().items() if name != UP})
    told = call("audit", folder)
    assert told.exit_code == 3
    assert UP in told.stdout
    assert max(map(len, told.stdout.replace(str(folder), "").splitlines())) <= 80
    data = json.loads(call("audit", folder, "--json").stdout)
    assert [each["tensors"] for each in data["findings"]] == [[UP]]
    assert data["clean"] is False
    (run,) = json.loads(call("audit", folder, "--sarif").stdout)["runs"]
    (result,) = run["results"]
    (location,) = result["locations"]
    assert location["logicalLocations"] == [{"fullyQualifiedName": UP}]
    assert location["physicalLocation"]["artifactLocation"]["uri"] == f"{folder}/model.safetensors.index.json"
    again = json.loads(call("audit", folder, "--sarif").stdout)["runs"][0]["results"][0]
    assert result["partialFingerprints"] == again["partialFingerprints"] != {}
    assert {result["ruleId"]} == {rule["id"] for rule in run["tool"]["driver"]["rules"]}
    assert call("audit", "sample:llama").exit_code == 0


def test_layers_of_an_unknown_family_are_held_against_one_another(tmp_path: Path) -> None:
    held = {f"net.layers.{layer}.{part}": torch.rand(3, 2) for layer in range(8) for part in ("a", "b")}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nobody", "num_hidden_layers": 9}))
    save_file({name: each for name, each in held.items() if ".5." not in name and name != "net.layers.2.b"},
              tmp_path / "model.safetensors")  # fmt: skip
    result = audit(tmp_path)
    assert found(result, "layer-incomplete") == ("net.layers.2.b",)
    assert {each.rule for each in result.findings} == {"layer-incomplete", "layer-gap", "config-layers"}


def test_stacked_experts_are_not_lost(tmp_path: Path) -> None:
    """By names and numbers of elements where no family says how they lie."""
    listed = {f"h.0.experts.{i}.{name}.weight": torch.rand(4, 6) for i in range(3) for name in ("gate", "up")}
    save_file({**listed, "x.w": torch.ones(5)}, tmp_path / "old.safetensors")
    joined = [torch.cat([listed[f"h.0.experts.{i}.{name}.weight"] for name in ("gate", "up")]) for i in range(3)]
    save_file({"h.0.experts.gate_up": torch.stack(joined), "x.w": torch.ones(5)}, tmp_path / "new.safetensors")
    result = audit(tmp_path / "new.safetensors", source=tmp_path / "old.safetensors")
    assert result.clean
    assert found(result, "renamed-tensor") == ("h.0.experts.gate_up",)


def test_a_repository_is_held_to_itself_by_headers(tmp_path: Path, hub: Hub) -> None:
    folder = write(tmp_path / "model", tensors())
    edit(folder / INDEX, lambda data: data["weight_map"].pop(UP))
    hub.repos["org/name"] = Repo({path.name: path.read_bytes() for path in folder.iterdir()})
    assert found(audit("org/name"), "unlisted-tensor") == (UP,)
    with pytest.raises(UsageError, match="on the hub"):
        audit("org/name", values=True)


def test_of_a_repository_of_many_files_only_the_headers_are_asked_for(hub: Hub) -> None:
    """Of every shard one range of its beginning, of 141 GB 3 MB; an index that lost an entry is told all the same."""
    repo = hub.repos["org/name"] = of_preset("llama-3-70b", 30)
    result = audit("org/name")
    assert result.clean
    assert result.nbytes > 1.4e11
    ranges = [line for line in hub.asked if line.startswith("GET") and ".safetensors" in line and INDEX not in line]
    assert sorted(line.split()[3] for line in ranges) == sorted(name for name in repo.files if name.endswith("tensors"))
    assert {line.split()[4] for line in ranges} == {"bytes=0-99999"}
    assert sum(hub.sent.values()) < 4e6
    places = json.loads(repo.files[INDEX])["weight_map"]
    places.pop("model.layers.79.mlp.up_proj.weight")
    repo.files[INDEX] = json.dumps({"weight_map": places}).encode()
    repo.commit = OLD
    assert found(audit("org/name"), "unlisted-tensor") == ("model.layers.79.mlp.up_proj.weight",)


@few(1)
@pytest.mark.parametrize("kind", UNKNOWN)
def test_models_of_no_known_family_are_told_by_names(kind: str, tmp_path: Path) -> None:
    """params, show, diff, check and audit of what transformers itself saved: nothing is refused, nothing is wrong."""
    model = saved(kind, tmp_path / "model")
    if model is None:
        pytest.skip("transformers makes none of sizes cut down like this")
    held = {file: load_file(file) for file in (tmp_path / "model").glob("*.safetensors")}
    total = sum(each.numel() for file in held.values() for each in file.values())
    (counted,) = gptkit.params(tmp_path / "model")
    assert counted.named is not None
    rows = tree_rows(counted.named)
    assert counted.named.count.total == total == sum(row.number * row.copies for row in rows if not row.depth)
    assert call("show", tmp_path / "model").exit_code == call("check", tmp_path / "model").exit_code == 0
    assert diff(tmp_path / "model", tmp_path / "model").same_bytes
    shutil.copytree(tmp_path / "model", tmp_path / "other")
    file, inside = next(iter(held.items()))
    name = next(name for name, each in inside.items() if each.is_floating_point())
    save_file({**inside, name: inside[name] + 1}, tmp_path / "other" / file.name, metadata={"format": "pt"})
    changed = diff(tmp_path / "model", tmp_path / "other")
    assert [each.name for each in changed.changed] == [name]
    assert audit(tmp_path / "model").clean


GGUF_LOSSES: dict[str, tuple[Callable[[dict[str, Any], Any], object], str, tuple[str, ...]]] = {
    "nothing": (lambda held, writer: None, "", ()),
    "a tensor is gone": (
        lambda held, writer: held.pop("blk.1.ffn_up.weight"),
        "missing-tensor",
        ("blk.1.ffn_up.weight",),
    ),
    "a tensor came from elsewhere": (
        lambda held, writer: held.update({"blk.0.ffn_gate_shexp.weight": 2 * held["blk.0.ffn_gate.weight"]}),
        "extra-tensor",
        ("blk.0.ffn_gate_shexp.weight",),
    ),
    "a tensor is transposed": (
        lambda held, writer: held.update({"blk.0.ffn_up.weight": held["blk.0.ffn_up.weight"].T.copy()}),
        "shape",
        ("blk.0.ffn_up.weight",),
    ),
    "a special id has no row": (lambda held, writer: writer.add_eos_token_id(10**6), "special-token", ()),
    "the tokenizer has more tokens": (
        lambda held, writer: writer.add_token_list([str(each) for each in range(1000)]),
        "tokenizer-vocabulary",
        (),
    ),
    "a tensor is not a number": (
        lambda held, writer: held["blk.1.ffn_up.weight"].__setitem__((0, 0), float("nan")),
        "not-finite",
        ("blk.1.ffn_up.weight",),
    ),
}


@pytest.mark.parametrize("case", GGUF_LOSSES)
def test_what_a_gguf_lost_is_named(case: str, tmp_path: Path) -> None:
    """By itself, and beside the checkpoint that it was made from; what llama.cpp has no place for by its tables."""
    change, rule, named = GGUF_LOSSES[case]
    model = save_hf(CONFIGS["llama"], tmp_path / "hf")
    write_gguf(tmp_path / "model.gguf", "llama", model, change=change)
    result = audit(tmp_path / "model.gguf", values=True)
    assert [(each.rule, each.tensors) for each in result.findings] == ([(rule, named)] if rule else [])
    beside = audit(tmp_path / "model.gguf", source=tmp_path / "hf")
    assert any(each.rule == "lost-tensor" for each in beside.findings) == (case == "a tensor is gone")
    loaded = audit(tmp_path / "model.gguf", loader="llama.cpp")
    assert any(each.rule == "loader-ignores" for each in loaded.findings) == (rule == "extra-tensor")
    with pytest.raises(InvalidInput, match="--fix cannot repair"):
        fix(tmp_path / "model.gguf", tmp_path / "out")


def test_a_gguf_of_an_unknown_architecture_is_held_to_itself(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "plamo2")
    for layer in range(6):
        for name in ("attn_norm", "ffn_up") if layer != 3 else ("attn_norm",):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.full((4, 8), layer + 1.5, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert found(audit(tmp_path / "model.gguf"), "layer-incomplete") == ("blk.3.ffn_up.weight",)
    (tmp_path / "model.gguf").write_bytes((tmp_path / "model.gguf").read_bytes()[:-64])
    assert {each.rule for each in audit(tmp_path / "model.gguf").findings} == {"broken-file"}


def test_pickles_are_audited_where_they_are_allowed(tmp_path: Path) -> None:
    shutil.copytree(SAMPLES / "llama", tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    held = {name: each for name, each in tensors().items() if name != UP}
    file = tmp_path / "model" / "pytorch_model.bin"
    torch.save(held, file)
    with pytest.raises(UntrustedInput, match="pickle"):
        audit(tmp_path / "model")
    result = audit(tmp_path / "model", source="sample:llama", allow_pickle=True, values=True)
    assert found(result, "missing-tensor") == (UP,)
    assert all(each.rule != "lost-tensor" for each in result.findings)
    assert call("audit", tmp_path / "model", "--allow-pickle").exit_code == 3
    torch.save({f"module.{name}": each for name, each in tensors().items()}, file)
    assert fix(tmp_path / "model", tmp_path / "mended", source="sample:llama", allow_pickle=True).clean
    assert diff(tmp_path / "mended", "sample:llama", rank=False).same_bytes
    names = list(held)
    file.unlink()
    shards = {f"pytorch_model-0000{part}-of-00002.bin": names[part - 1 :: 2] for part in (1, 2)}
    for name, inside in shards.items():
        torch.save({each: held[each] for each in inside}, file.parent / name)
    places = {each: name for name, inside in shards.items() for each in inside if each != names[3]}
    (file.parent / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    result = audit(tmp_path / "model", allow_pickle=True)
    assert found(result, "unlisted-tensor") == (names[3],)
    (file.parent / "pytorch_model-00001-of-00002.bin").write_bytes(b"PK")
    assert "broken-file" in {each.rule for each in audit(tmp_path / "model", allow_pickle=True).findings}


def test_what_llama_cpp_makes_of_a_checkpoint_is_told_by_its_tables(tmp_path: Path) -> None:
    assert found(audit("sample:gpt2", loader="llama.cpp"), "loader-architecture") == ()
    save_hf(CONFIGS["xglm"], tmp_path / "xglm")
    refused = audit(tmp_path / "xglm", loader="llama.cpp")
    assert [each.rule for each in refused.findings] == ["loader-refuses"]
    assert saved("qwen3_next", tmp_path / "next") is not None
    file = tmp_path / "next" / "model.safetensors"
    save_file({**load_file(file), "value_head.weight": torch.ones(1, 32)}, file, metadata={"format": "pt"})
    assert "value_head.weight" in found(audit(tmp_path / "next", loader="llama.cpp"), "loader-unmapped")
    edit(tmp_path / "next" / "config.json", lambda data: data.update(model_type="opera"))
    with pytest.raises(UnknownFamily, match="'opera'"):
        audit(tmp_path / "next", loader="llama.cpp")


@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=exhaustive)])
def test_what_transformers_drops_without_a_word_is_told(
    alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Qwen3-Next with a layer that drafts tokens, saved again by transformers, which is asked in a process alone."""
    import transformers

    if not alone:
        asked_inside(monkeypatch, programs)
    assert saved("qwen3_next", tmp_path / "model") is not None
    file = tmp_path / "model" / "model.safetensors"
    drafts = {"mtp.fc.weight": torch.rand(32, 64), "mtp.norm.weight": torch.rand(32)}
    save_file({**load_file(file), **drafts}, file, metadata={"format": "pt"})
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "saved")
    before = audit(tmp_path / "model", loader="transformers")
    assert found(before, "loader-ignores") == tuple(drafts)
    assert found(audit(tmp_path / "saved", source=tmp_path / "model"), "lost-tensor") == tuple(drafts)


# --- broken files -----------------------------------------------------------------------------------------------------

SHARD = "model-00001-of-00003.safetensors"
GGUF = "model.gguf"
ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**63, 1e308, "", "../x", "/etc/passwd", "a\x00", "\ud800", "x" * 5000, [], {}, [[]] * 50),
    *("BF16", "F4", "I64", "../model-00002-of-00003.safetensors", SHARD, "model.safetensors", [2**40, 2**40], [0, 1]),
)


def broken_json(value: Any, draw: random.Random) -> Any:
    """A value with one place in it removed, doubled or of another value."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        key = draw.choice(list(value))
        rest = {name: each for name, each in value.items() if name != key}
        how = draw.random()
        if how < 0.15:
            return rest
        if how < 0.3:
            return {**value, str(draw.choice(ODD))[:60]: value[key]}
        return {**value, key: broken_json(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.8:
        at = draw.randrange(len(value))
        return [*value[:at], broken_json(value[at], draw), *value[at + draw.randrange(2) :]]
    return draw.choice(ODD)


def broken(name: str, raw: bytes, draw: random.Random) -> bytes:
    """A file's bytes with some of the first of them changed, or what they say in JSON."""
    length = struct.unpack("<Q", raw[:8])[0] if name == SHARD else 0
    text = raw[8 : 8 + length] if name == SHARD else raw
    if name != GGUF and draw.random() < 0.6:
        made = json.dumps(broken_json(json.loads(text), draw)).encode()
        return struct.pack("<Q", len(made)) + made + raw[8 + length :] if name == SHARD else made
    data = bytearray(raw)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(min(len(data), 3000))
        data[at : at + draw.randrange(4)] = draw.randbytes(draw.randrange(4))
    return bytes(data[: draw.randrange(len(data))] if draw.random() < 0.1 else data)


def listed(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("count", [60, pytest.param(20_000, marks=pytest.mark.slow)])
def test_broken_files_are_findings_or_errors(count: int, memory_path: Path) -> None:
    """Whatever of an index, a header or a config is changed: nothing but typed errors and findings, nothing is written
    but what was asked for, and never to the checkpoint itself.
    """
    held = {name: each for name, each in tensors().items() if "layers." not in name or "layers.0." in name}
    folder = write(memory_path / "model", held)
    edit(folder / "config.json", lambda data: data.update(num_hidden_layers=1))
    gptkit.convert("sample:llama", memory_path / GGUF, to="gguf")
    (folder / GGUF).write_bytes((memory_path / GGUF).read_bytes())
    (memory_path / GGUF).unlink()
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    around = {*listed(memory_path), ".out.lock", "out"}
    told: Counter[str] = Counter()
    for number in range(count):
        draw = random.Random(number)
        name = draw.choice([INDEX, "config.json", SHARD, GGUF])
        raw = broken(name, whole[name], draw)
        (folder / name).write_bytes(raw)
        try:
            if name == GGUF:
                told["found" if audit(folder / GGUF).findings else "nothing"] += 1
            else:
                told["found" if audit(folder, source="sample:llama").findings else "nothing"] += 1
                fix(folder, memory_path / "out", force=True)
                told["mended"] += 1
        except GptkitError:
            told["refused"] += 1
        except Exception as error:
            raise AssertionError(f"mutation {number}, of {name}") from error
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == {**whole, name: raw}, number
        assert listed(memory_path) <= around, number
        (folder / name).write_bytes(whole[name])
    assert all(told[kind] > count // 50 for kind in ("found", "mended", "refused")), told
