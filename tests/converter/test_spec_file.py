"""A tree by itself in a .json file: written whole, read back equal, and whatever else a .json file may be is told."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.covering import examples
from helpers.families import CONFIGS, spec_of
from helpers.trees import TREES
from hypothesis import given, settings
from hypothesis import strategies as st

import gptkit
from gptkit.analysis.parameters import count
from gptkit.components import ModelSpec
from gptkit.converter import files
from gptkit.converter.outline import outline
from gptkit.converter.resolve import located, read_spec
from gptkit.converter.tree import Origin, write_spec
from gptkit.errors import ConfigError, GptkitError, InvalidInput, UsageError
from gptkit.modules.initialise import write_random

SPECS: dict[str, ModelSpec] = {**{name: spec_of(config) for name, config in CONFIGS.items()}, **TREES}


@pytest.mark.parametrize("name", SPECS)
def test_a_tree_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    path = write_spec(SPECS[name], tmp_path / "my.json")
    spec, origin, unknown = read_spec(path)
    assert (spec, origin, unknown) == (SPECS[name], Origin(), [])
    assert located(path).format == "tree"
    (counted,) = gptkit.params(path)
    assert (counted.family, counted.spec, counted.count) == ("", spec, count(spec))


def test_where_it_came_from_is_kept(tmp_path: Path) -> None:
    origin = Origin(family="gpt2", reference="gpt2", history=({"recommend": "speed"},))
    spec = spec_of(CONFIGS["gpt2"])
    assert read_spec(write_spec(spec, tmp_path / "x.json", origin=origin, dtype="bfloat16"))[1] == origin
    assert json.loads((tmp_path / "x.json").read_text())["dtype"] == "bfloat16"


def test_every_json_file_is_read_for_what_it_is(tmp_path: Path) -> None:
    """By what is in it: a config.json of a family under any name, gptkit.json of a folder, a tree."""
    (tmp_path / "small-llama.json").write_text(json.dumps(CONFIGS["llama"]))
    gptkit.convert("sample:llama", tmp_path / "local")
    sample = gptkit.open_checkpoint("sample:llama").spec
    assert read_spec(tmp_path / "small-llama.json")[0] == spec_of(CONFIGS["llama"])
    for name in ("gptkit.json", "copy.json"):
        (tmp_path / name).write_bytes((tmp_path / "local" / "gptkit.json").read_bytes())
        assert read_spec(tmp_path / name)[0] == sample
    assert read_spec(tmp_path / "local")[0] == read_spec(tmp_path / "local" / "gptkit.json")[0] == sample
    assert located(tmp_path / "local").format == "local"
    assert located(tmp_path / "small-llama.json").format == "hf"
    # Beside a folder's weights, a tree of another name is a tree and not theirs.
    write_spec(spec_of(CONFIGS["gpt2"]), tmp_path / "local" / "other.json")
    assert gptkit.open_checkpoint(tmp_path / "local").spec == sample


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "does not describe a model: it has neither a model_type"),
        ({"version": "1.0", "model": {}, "added_tokens": []}, "does not describe a model"),
        ({"model_type": "umt5", "spec": {}}, "gptkit does not support the model_type"),
        ({"spec": {}}, "has schema version None, but this gptkit reads 1"),
        ({"spec": {}, "schema_version": 2}, "has schema version 2"),
        ({"spec": {}, "schema_version": 1}, "the field origin or history is not valid"),
        ({"spec": {}, "schema_version": 1, "origin": {}}, "schema_version"),
        ({"spec": {}, "schema_version": 1, "origin": {"family": "x"}}, "gptkit does not support the architecture"),
    ],
)
def test_what_is_no_model_says_what_it_expected(content: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InvalidInput, match=message):
        read_spec(path)


def test_there_are_no_weights_to_it(tmp_path: Path) -> None:
    path = write_spec(spec_of(CONFIGS["gpt2"]), tmp_path / "some.json")
    for command in (gptkit.load, gptkit.open_checkpoint):
        with pytest.raises(InvalidInput, match="only an architecture and has no weights") as raised:
            command(path)
        assert "gptkit load --random" in str(raised.value.hint)


# --- written whole ----------------------------------------------------------------------------------------------------


def test_it_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, path = spec_of(CONFIGS["gpt2"]), tmp_path / "some.json"
    path.write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        write_spec(spec, path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files, "fsync", full)
        with pytest.raises(GptkitError, match="could not write"):
            write_spec(spec, path, force=True)
    assert path.read_text() == "mine" and list(tmp_path.iterdir()) == [path]
    assert read_spec(write_spec(spec, path, force=True))[0] == spec and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["x", "x.toml", "config.json", "gptkit.json", "absent/x.json", "folder.json"])
def test_where_it_cannot_go(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(UsageError) as raised:
        write_spec(spec_of(CONFIGS["gpt2"]), tmp_path / name, force=True)
    assert raised.value.hint and not (tmp_path / name).is_file()


# --- whatever may be in it --------------------------------------------------------------------------------------------

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)


@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(data=st.data())
def test_no_file_gives_anything_but_a_tree_or_an_error(data: st.DataObject, tmp_path_factory: Any) -> None:
    """One place of a tree's file changed: what is read is a tree that can be counted and written again, or refused."""
    name = data.draw(st.sampled_from(sorted(SPECS)))
    path = tmp_path_factory.mktemp("fuzz") / "some.json"
    write_spec(SPECS[name], path)
    content = json.loads(path.read_text())
    here: Any = content
    while True:
        keys = list(here) if isinstance(here, dict) else list(range(len(here)))
        key = data.draw(st.sampled_from(keys))
        if isinstance(here[key], dict | list) and here[key] and data.draw(st.integers(0, 5)):
            here = here[key]
            continue
        break
    if isinstance(here, dict) and data.draw(st.booleans()):
        del here[key]
    else:
        here[key] = data.draw(VALUES)
    path.write_text(json.dumps(content))
    try:
        spec, origin, _ = read_spec(path)
    except InvalidInput as error:
        told = str(error)
    else:
        told = ""
    if told:
        assert len(told) < 2000
        return
    assert count(spec).total > 0
    assert read_spec(write_spec(spec, path, origin=origin, force=True))[0] == spec


# --- what is wrong names the file as it was given ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model_type": "llama", "hidden_size": -1}, "{file}: hidden_size is -1, expected an integer"),
        ({"model_type": "llama", "num_key_value_heads": 5}, "{file}: 32 query heads are not divisible by 5"),
        (b"", "{file} is empty"),
        (b" \n", "{file} is empty"),
        (bytes(range(150, 200)), "{file} is not JSON: byte 0 is not valid UTF-8"),
    ],
)
def test_the_file_is_named(content: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    (tmp_path / "folder").mkdir()
    for file in ("neg.json", "folder/config.json"):
        (tmp_path / file).write_bytes(raw)
        with pytest.raises(ConfigError) as raised:
            gptkit.params(file)
        assert raised.value.message.startswith(message.format(file=file))
    with pytest.raises(ConfigError, match=r"config\.json") as raised:
        gptkit.params("folder")
    assert "codec" not in str(raised.value)


def test_a_tree_that_cannot_be_names_its_file(tmp_path: Path) -> None:
    path = write_spec(SPECS["llama"], tmp_path / "mine.json")
    data = json.loads(path.read_text())
    data["spec"]["hidden_size"] = -1
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError) as raised:
        gptkit.params(path)
    assert raised.value.message.startswith(f"{path}: ") and raised.value.message.count(str(path)) == 1


def test_a_tree_without_a_family_is_told_the_way_to_one(tmp_path: Path) -> None:
    path = write_spec(SPECS["bloom"], tmp_path / "mine.json")
    tree = outline(str(path))
    write_random(tree, tmp_path / "mine", seed=0)
    with pytest.raises(UsageError, match="does not know the family of this model") as raised:
        gptkit.convert(tmp_path / "mine", tmp_path / "hf", to="hf")
    assert "--to hf:auto" in str(raised.value.hint) and "llama" not in str(raised.value.hint)
    gptkit.convert(tmp_path / "mine", tmp_path / "hf", to="hf:auto")
    assert gptkit.params(tmp_path / "hf")[0].family == "bloom"
