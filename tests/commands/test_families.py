"""`gptkit families`: what there is, and which of the installed transformers' models there are."""

import json

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from typer.testing import CliRunner

from gptkit.architectures import ARCHITECTURES, BY_MODEL_TYPE
from gptkit.architectures.presets import presets
from gptkit.cli import app
from gptkit.report.families import UNCOUNTED, causal_types


def listed(*arguments: str) -> dict:
    result = CliRunner().invoke(app, ["families", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_transformers_own_list_is_read_from_its_source() -> None:
    """`gemma3` and others have more than one class."""
    theirs = {
        kind: name if isinstance(name, str) else name[0] for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    }
    assert causal_types() == theirs


def test_every_family_is_listed_once_oldest_first() -> None:
    found = listed()
    assert [each["family"] for each in found["families"]] == list(ARCHITECTURES)
    dates = [each["released"] for each in found["families"]]
    assert dates == sorted(dates)
    assert sum(each["presets"] for each in found["families"]) == len(presets())
    assert found["others"] == []


def test_what_is_counted_is_what_there_is() -> None:
    found = listed("--all")
    kinds = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    # BERT's and BART's classes there are others.
    decoders = {name for name, each in BY_MODEL_TYPE.items() if not each.base_class and not each.two_stacks}
    assert found["counts"] == {
        "families": len(ARCHITECTURES),
        "encoders": sum(bool(each.base_class) for each in ARCHITECTURES.values()),
        "encoder_decoders": sum(each.two_stacks for each in ARCHITECTURES.values()),
        "types": len(kinds),
        "exact": len(kinds & decoders),
        "counted": len(kinds - UNCOUNTED),
    }
    assert found["counts"]["exact"] >= 60
    assert found["counts"]["counted"] >= 150
    assert {each["model_type"] for each in found["others"]} == kinds - decoders


def test_words_choose() -> None:
    assert {each["family"] for each in listed("OLMo")["families"]} == {name for name in ARCHITECTURES if "olmo" in name}
    assert [each["family"] for each in listed("refinedweb", "model")["families"]] == ["falcon"]
    result = CliRunner().invoke(app, ["families", "nothing-of-that-name"])
    assert result.exit_code == 2
    assert "nothing-of-that-name" in result.stderr


@pytest.mark.parametrize("columns", ["80", "120"])
def test_the_table_fits_a_terminal(columns: str) -> None:
    result = CliRunner().invoke(app, ["families", "--all"], env={"COLUMNS": columns})
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= int(columns)
    assert all(name in result.stdout for name in ARCHITECTURES)
