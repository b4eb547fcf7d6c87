"""What a reference is, and that the file system is asked once."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers.hubserver import Hub

import gptkit
from gptkit.converter.outline import outline
from gptkit.converter.resolve import SAMPLES_DIR, identify, located, resolve
from gptkit.converter.tree import write_spec
from gptkit.errors import InvalidInput


@contextmanager
def asked_of(folder: Path) -> Iterator[Counter[str]]:
    """What the file system is asked of a folder ("") and of its files, but for opening them."""
    found: Counter[str] = Counter()

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def ask(path: Any = ".", *args: Any, **options: Any) -> Any:
            if not isinstance(path, int):
                here = Path(os.fspath(path)).absolute()
                if here.is_relative_to(folder):
                    found[str(here.relative_to(folder)).removeprefix(".")] += 1
            return real(path, *args, **options)

        return ask

    with pytest.MonkeyPatch.context() as patch:
        for name in ("stat", "lstat", "scandir", "listdir", "access"):
            patch.setattr(os, name, counted(getattr(os, name)))
        yield found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("folders")
    gptkit.open_checkpoint("sample:gpt2")  # so that everything is imported
    for name, to in (("own", "local"), ("again", "hf"), ("single.gguf", "gguf"), ("inside", "gguf")):
        gptkit.convert("sample:llama", root / name, to)
    for path in (root / "own", root / "inside", root / "single.gguf"):
        gptkit.open_checkpoint(path)
    return root


def test_opening_a_sample_asks_its_folder_once(folders: Path) -> None:
    with asked_of(SAMPLES_DIR / "llama") as found:
        gptkit.open_checkpoint("sample:llama")
    assert found[""] == 1
    assert max(found.values()) == 1 and found.total() <= 3


@pytest.mark.parametrize(("name", "most"), [("own", 4), ("again", 3), ("inside", 3)])
def test_opening_a_folder_asks_it_once(folders: Path, name: str, most: int) -> None:
    with asked_of(folders / name) as found:
        gptkit.open_checkpoint(folders / name)
    assert found[""] == 1 and found.total() <= most, found


@pytest.mark.parametrize("name", ["own", "again", "inside"])
def test_the_tree_of_a_folder_asks_it_once(folders: Path, name: str) -> None:
    with asked_of(folders / name) as found:
        outline(str(folders / name))
    assert found[""] == 1, found


def test_what_was_identified_is_asked_no_more(folders: Path) -> None:
    known = identify(str(folders / "again"))
    with asked_of(folders / "again") as found:
        assert identify(known) is known and resolve(known) is known
        assert outline(known).path == gptkit.open_checkpoint(known).path == folders / "again"
    assert found[""] == 0, found


def test_what_references_are(folders: Path, hub: Hub) -> None:
    spec = outline("sample:llama").spec
    tree = write_spec(spec, folders / "tree.json")
    for text, kind, form, source in (
        ("sample:llama", "sample", "hf", "config.json"),
        (str(folders / "own"), "path", "local", "gptkit.json"),
        (str(folders / "own" / "gptkit.json"), "path", "local", "gptkit.json"),
        (str(folders / "again"), "path", "hf", "config.json"),
        (str(folders / "again" / "model.safetensors"), "path", "hf", "config.json"),
        (str(folders / "single.gguf"), "path", "gguf", "single.gguf"),
        (str(folders / "inside"), "path", "gguf", next((folders / "inside").glob("*.gguf")).name),
        (str(tree), "path", "tree", "tree.json"),
    ):
        found = identify(text)
        assert (found.kind, found.format, found.source and found.source.name) == (kind, form, source), text
        assert found.path is not None and located(found.path).format == form
    for text, expected in (
        ("gpt2", ("preset", "openai-community/gpt2", None, None)),
        ("gpt3-175b", ("preset", None, None, None)),
        ("gpt2@main", ("hub", "openai-community/gpt2", "main", None)),
        ("org/name@v1", ("hub", "org/name", "v1", None)),
        ("hf://org/name", ("hub", "org/name", None, None)),
        ("hf://org/name@v1/sub/x.gguf", ("hub file", "org/name", "v1", "sub/x.gguf")),
    ):
        found = identify(text)
        assert (found.kind, found.repo, found.revision, found.file) == expected
        assert found.path is None and found.format is None
    assert hub.asked == []


def test_a_file_of_the_hub_has_a_tree_and_no_weights_here(hub: Hub) -> None:
    for revision in ("", "@main"):
        with pytest.raises(InvalidInput, match=r"no such file or folder: hf://org/name.*x\.gguf") as error:
            gptkit.open_checkpoint(f"hf://org/name{revision}/x.gguf")
        assert "for a GGUF there, hf://org/name/x.gguf (gptkit params can read it)" in str(error.value)
    assert hub.asked == []
