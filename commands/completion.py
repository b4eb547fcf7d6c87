"""Completion of presets, samples, paths and values of options in the shell, without network and slow imports."""

import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

FLOATS = ("float32", "bfloat16", "float16", "float64")

_SIGNS = (":", "=")
_MODEL_FILES = (".safetensors", ".gguf", ".json", ".bin", ".pt")


def complete_model(incomplete: str) -> list[tuple[str, str]]:
    """Return pairs (completion, description) for all models whose name begins with the text, local files first."""
    from ..architectures.presets import presets
    from ..converter.resolve import SAMPLES

    wanted = incomplete.lower()
    models = [*_paths(incomplete)]
    models += [(f"sample:{name}", "comes with gptkit") for name in SAMPLES if f"sample:{name}".startswith(wanted)]
    for preset in presets().values():  # one spelling per preset: the first that matches
        fitting = [spelling for spelling in preset.known_as if spelling.lower().startswith(wanted)]
        models += [(spelling, preset.repo or "no published weights") for spelling in fitting[:1]]
    return models


def _paths(incomplete: str) -> Iterator[tuple[str, str]]:
    """Yield folders and model files whose path begins with the text, with a description.

    Hidden files match only if the text has the dot too.
    """
    folder, _, begun = incomplete.rpartition("/")
    shown = f"{folder}/" if "/" in incomplete else ""
    try:
        entries = sorted(os.scandir(Path(os.path.expanduser(shown or "."))), key=lambda entry: entry.name)  # noqa: PTH111
    except OSError:
        return  # there is no such folder
    for entry in entries:
        hidden = entry.name.startswith(".") and not begun.startswith(".")
        if entry.name.startswith(begun) and not hidden and entry.name.isprintable():
            if entry.is_dir():
                yield f"{shown}{entry.name}/", "folder"
            elif entry.name.endswith(_MODEL_FILES):
                yield f"{shown}{entry.name}", "file"


def one_of(values: Iterable[str] | Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return the completion function of an option with a fixed set of values.

    `values` may be a function that returns them, which is called only when they are needed.
    """

    def complete(incomplete: str) -> list[str]:
        known = values() if callable(values) else values
        return [value for value in known if value.startswith(incomplete)]

    return complete


def forms(metavar: str) -> tuple[str, ...]:
    """Return the values that a metavar such as "mha | mqa | gqa:N" lists, without those that have a placeholder."""
    return tuple(form for form in metavar.split(" | ") if re.fullmatch(r"[a-z][a-z0-9_:-]*", form))


def complete_target(incomplete: str) -> list[str]:
    """Return the values of `--to` that begin with the text."""
    from ..architectures import ARCHITECTURES
    from ..converter.targets import targets

    families = [f"hf:{family}" for family in ARCHITECTURES]
    return one_of((*(target for target in targets() if target != "hf:FAMILY"), *families))(incomplete)


@contextmanager
def bash_words() -> Iterator[None]:
    """Join the words of the command line that bash splits, and shorten completions to the part that bash replaces.

    bash splits words at colons and equals signs: sample:g arrives as sample, : and g, and bash replaces only the g by a
    completion.
    """
    raw, place = os.environ.get("COMP_WORDS", ""), os.environ.get("COMP_CWORD", "")
    if os.environ.get("_GPTKIT_COMPLETE") != "complete_bash" or not place.isdecimal():
        yield
        return
    words = raw.split("\n" if "\n" in raw else " ")[: int(place) + 1]
    words += [""] * (int(place) + 1 - len(words))
    whole: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        if whole[1:] and (word in _SIGNS or before in _SIGNS):
            whole[-1] += word
        else:
            whole.append(word)
    os.environ["COMP_WORDS"], os.environ["COMP_CWORD"] = "\n".join(whole), str(len(whole) - 1)
    last = whole[-1].partition("=")[2] if whole[-1].startswith("-") else whole[-1]  # answers are without --option=
    prefix = last[: max(map(last.rfind, _SIGNS)) + 1] if len(whole) < len(words) else ""
    answer = io.StringIO()
    try:
        with redirect_stdout(answer):
            yield
    finally:
        sys.stdout.write("".join(line.removeprefix(prefix) for line in answer.getvalue().splitlines(keepends=True)))
