"""Models of families that gptkit does not know, counted by the names of their tensors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.covering import few
from helpers.inside import asked_inside
from helpers.processes import at_most
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from typer.testing import CliRunner

import gptkit
from gptkit.analysis import named
from gptkit.analysis.named import Named, by_names
from gptkit.architectures import BY_MODEL_TYPE
from gptkit.cli import app
from gptkit.errors import UnknownFamily, UsageError
from gptkit.report.families import UNCOUNTED

CAUSAL = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
UNKNOWN = sorted(set(CAUSAL) - set(BY_MODEL_TYPE))
DIFFLLAMA = {"model_type": "diffllama", "vocab_size": 97, "hidden_size": 16, "intermediate_size": 24, "state_size": 4}
DIFFLLAMA |= {"num_hidden_layers": 3, "num_attention_heads": 2}
UMT5 = {"model_type": "umt5", "vocab_size": 97, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_heads": 2, "num_layers": 2}
UMT5 |= {"num_decoder_layers": 3}


def classes(kind: str) -> list[str]:
    """transformers' classes for a model type, that of causal language models first."""
    mappings = [CAUSAL, *(getattr(modeling_auto, name) for name in dir(modeling_auto) if name.endswith("_NAMES"))]
    found = [mapping[kind] for mapping in mappings if isinstance(mapping, dict) and kind in mapping]
    return list(dict.fromkeys(name if isinstance(name, str) else name[0] for name in found))


def numbers(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's answers are made in this process."""
    asked_inside(monkeypatch, named)


@few(4)
@pytest.mark.parametrize("kind", UNKNOWN)
def test_every_model_type_of_transformers_is_counted(kind: str, inside: None) -> None:
    """By the class that its own sizes begin with; those that transformers itself makes nothing of are listed."""
    try:
        config, totals = CONFIG_MAPPING[kind]().to_dict(), []
    except Exception as error:  # whatever its own checks say
        pytest.skip(f"its own config class has no sizes to begin with: {error}")
    for name in classes(kind):
        try:
            _, parameters = named.by_class({**config, "architectures": [name]}, UnknownFamily(kind))
        except UnknownFamily:
            continue
        with torch.device("meta"):
            model = getattr(transformers, name)(transformers.AutoConfig.for_model(**config))
        found = Named(kind, name, parameters)
        assert found.count.total == sum(found.count.by_component.values()) == numbers(model)
        assert sum(group.parameters for group in found.groups()) == found.count.total
        totals.append(found.count.total)
        break
    assert bool(totals) == (kind not in UNCOUNTED)


@pytest.mark.parametrize(
    ("config", "name"), [(DIFFLLAMA, "DiffLlamaForCausalLM"), (UMT5, "UMT5ForConditionalGeneration")]
)
def test_files_and_a_config_alone_are_counted_alike(
    config: dict[str, Any], name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if config is UMT5:
        request.getfixturevalue("inside")
    model = getattr(transformers, name)(transformers.AutoConfig.for_model(**config))
    model.save_pretrained(tmp_path / "files", max_shard_size=20_000)
    model.config.architectures = [name]
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict()))
    files, alone = gptkit.params(tmp_path / "files", stored=True), gptkit.params(tmp_path / "config.json")
    for (each,) in (files, alone):
        told = each.as_json(tensors=True)
        assert told["total"] == numbers(model) == sum(tensor["parameters"] for tensor in told["tensors"])
        assert told["layers"] == (3 if config is DIFFLLAMA else 5)
        assert sum(layer["total"] for layer in told["by_layer"]) < told["total"]
        assert told["active"] is told["tied"] is told["non_embedding"] is None
        assert (told["family"], told["model_type"]) == ("", config["model_type"])
        assert any("gptkit does not support the model_type" in note for note in told["notes"])
    stored = files[0].as_json()["stored"]
    assert stored["bytes"] == 4 * numbers(model)
    assert len(stored["files"]) > 1
    assert "headers" in files[0].as_json()["by_names"]
    assert name in alone[0].as_json()["by_names"]


def test_a_file_without_a_config_is_counted(tmp_path: Path) -> None:
    tensors = {f"net.blocks.{layer}.experts.{expert}.w": torch.ones(3, 5) for layer in (0, 2) for expert in range(4)}
    save_file({**tensors, "net.table": torch.ones(7, 3)}, tmp_path / "w.safetensors")
    for path in (tmp_path, tmp_path / "w.safetensors"):
        (found,) = gptkit.params(path)
        assert found.named is not None
        assert found.named.count.by_component == {"w": 120, "table": 21}
        assert [group.name for group in found.named.groups()] == ["net.blocks.{0,2}.experts.{0–3}.w", "net.table"]


NEED_A_TREE = "--flops,--memory,--dtype bf16,--explain,--gpu 24GB,--tp 2,--swap norm=rmsnorm,--html page.html"


@few(4)
@pytest.mark.parametrize("options", NEED_A_TREE.split(","))
def test_figures_that_need_a_tree_are_refused_by_the_family(
    options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"layers.0.w": torch.ones(3, 5)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(DIFFLLAMA))
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["params", ".", *options.split()])
    assert (result.exit_code, "does not support the model family 'diffllama'" in result.stderr) == (2, True)
    assert not (tmp_path / "page.html").exists()
    result = CliRunner().invoke(app, ["params", ".", "--kv", "64"])  # told of types whose fields say what layers keep
    assert (result.exit_code, "state_size may mean" in result.stderr) == (4, True)
    with pytest.raises(UsageError, match="diffllama"):
        _ = gptkit.params(tmp_path)[0].count


@pytest.mark.parametrize("options", [[], ["--by", "layer"], ["--by", "tensor"], ["--csv"], ["--json"]])
def test_it_stands_beside_models_of_families(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"layers.0.w": torch.ones(3, 5)}, tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["params", "gpt2", "model.safetensors", *options], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert "38597376" in result.stdout.replace(",", "")
    assert "15" in result.stdout
    assert "--csv" in options or "--json" in options or max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    "config",
    [{"model_type": "never-heard-of"}, {**DIFFLLAMA, "hidden_size": "wide"}, {**DIFFLLAMA, "architectures": ["os"]}],
)
def test_what_transformers_makes_nothing_of_is_refused(config: dict[str, Any], tmp_path: Path, inside: None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnknownFamily, match="transformers could not build the model"):
        gptkit.params(tmp_path)


def test_a_number_of_layers_without_bound_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**DIFFLLAMA, "num_hidden_layers": 10**8}))
    with at_most(1), pytest.raises(UnknownFamily, match="num_hidden_layers is 100,000,000"):
        gptkit.params(tmp_path)


@given(
    st.dictionaries(
        st.lists(st.sampled_from(["a", "layers", "0", "1", "12", "experts", "weight", ""]), min_size=1, max_size=7).map(
            ".".join
        ),
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
        max_size=20,
    )
)
def test_any_names_are_counted_once(tensors: dict[str, tuple[int, ...]]) -> None:
    found = Named("", "", by_names(tensors.items()))
    assert [each.name for each in found.parameters] == list(tensors)
    total = sum(each.count for each in found.parameters)
    assert found.count.total == total == sum(group.parameters for group in found.groups())
    layers = [each.layer for each in found.parameters if each.layer is not None]
    assert sorted(set(layers)) == list(range(len(found.count.by_layer)))
    assert total == sum(layer.total for layer in found.count.by_layer) + sum(found.count.outside.values())
