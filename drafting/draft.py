"""The `draft` command: write the definition of an unknown family from a checkpoint's config.json and weight headers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Unpack

from .. import errors
from ..architectures import BY_MODEL_TYPE, named
from ..architectures.config import read_config_file
from ..converter.checkpoint import weight_headers_of
from ..converter.confinement import Confined
from ..converter.opening import Opening
from ..converter.resolve import identify, resolve
from ..display import Record
from ..errors import GptkitError, InvalidInput, UsageError, shown
from ..signatures import takes

_SECONDS = 600
"""The largest number of seconds that one draft may take. Most take about twenty."""


class Proof(NamedTuple):
    """The result of one of the four tests in `gptkit.testing`."""

    name: str
    holds: bool | None  # None if the test could not be run
    told: str  # the cases for which the test passes, or why it fails or could not be run


@dataclass(frozen=True)
class Drafted(Record):
    """A definition file that `draft` wrote for a family, and the results of its tests."""

    JSON = "path=file model_type skeleton proofs=proofs_as_json place tried kept todo"

    path: Path
    model_type: str
    skeleton: str  # the supported family on which the definition is based
    proofs: tuple[Proof, ...]  # the results of the four tests of `gptkit.testing`
    place: tuple[str, ...]  # the component where logits start to differ, and the cause, as `gptkit verify` prints them
    tried: int  # the number of drafts that were compared with transformers' class
    kept: tuple[str, ...]  # the changes to the first draft that these comparisons chose, in words
    todo: tuple[str, ...]  # open questions about the family, for the user

    @property
    def passed(self) -> bool:
        """Return whether none of the four tests failed. A test that could not be run counts as passed."""
        return all(proof.holds is not False for proof in self.proofs)

    @property
    def file(self) -> str:
        return str(self.path)

    @property
    def proofs_as_json(self) -> list[dict[str, Any]]:
        return [proof._asdict() for proof in self.proofs]


@takes(Opening)
def draft(
    reference: str | Path,
    out: str | Path,
    *,
    without: Sequence[str] = (),
    progress: Callable[[str], None] | None = None,
    **opening: Unpack[Opening],
) -> Drafted:
    """Write a definition file for a checkpoint of an unknown family, and test it as far as possible.

    Args:
        reference: a checkpoint. Only its config.json and the headers of its weights are read.
        out: the definition file, `NAME.py`, which `--plugin` imports.
        without: supported families to treat as unknown, in order to test `draft` itself.
        offline, allow_pickle: see `Opening`.
        progress: a function that receives a message about every step.

    Raises:
        UsageError: the file exists or is not called .py, or gptkit already supports the family.
        InvalidInput: there is no config.json, there are no tensors, config.json and the tensors do not match, or the
            model is no decoder.
        Offline: as in `open_checkpoint`.
    """
    path, say = Path(out), progress or (lambda _: None)
    if path.suffix != ".py":
        raise UsageError(
            f"--out must name a Python file, and {shown(path.name, 80)} is not one",
            f"--out {path.stem or 'definition'}.py",
        )
    if path.exists() or path.is_symlink():
        raise UsageError(f"{path} exists already", "Remove it, or give another name to --out.")
    if not path.parent.is_dir():
        raise UsageError(f"the folder {path.parent} does not exist", "Create it, or give another name to --out.")
    for name in without:
        named(name)
    config, shapes = _read(reference, opening)
    family = BY_MODEL_TYPE.get(config["model_type"])
    if family is not None and family.name not in without:
        raise UsageError(
            f"gptkit already supports the family {family.name}", f"gptkit load {reference} loads the checkpoint."
        )
    say("trying drafts")
    answer = _asked({"config": config, "shapes": shapes, "without": list(without)})
    with path.open("x", encoding="utf-8") as file:
        file.write(answer["text"])
    proofs = tuple(Proof(**proof) for proof in answer["proofs"])
    lists: Any = {name: tuple(answer[name]) for name in ("place", "kept", "todo")}
    return Drafted(path, config["model_type"], answer["skeleton"], proofs, tried=answer["tried"], **lists)


def _read(reference: str | Path, opening: Opening) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Return the fields of a checkpoint's config.json, and the shapes of its tensors by name."""
    identified = identify(reference)
    if identified.preset is not None or identified.kind == "hub file":
        raise InvalidInput(f"{reference} is not a checkpoint with tensors", "Give a folder, or org/name on the hub.")
    here = resolve(identified, weights=False, **opening)
    if here.format != "hf" or here.source is None:
        raise InvalidInput(
            f"{reference} has no config.json in the folder of its weights", "Give the folder that transformers loads."
        )
    if not here.source.is_file():
        raise InvalidInput(
            f"there is no config.json in {reference}",
            "Put config.json into the folder of the weights: a draft needs its fields.",
        )
    config, _ = read_config_file(here.source)
    if (
        not isinstance(config.get("model_type"), str)
        or not config["model_type"].isprintable()
        or not config["model_type"]
    ):
        raise InvalidInput("config.json has no model_type", "Add a model_type that no other family uses.")
    parts = [
        name
        for name, value in config.items()
        if name.endswith("_config") and isinstance(value, dict) and "model_type" in value
    ]
    if parts:
        raise InvalidInput(
            f"config.json describes several models ({', '.join(parts)[:80]})",
            "gptkit extract writes the language model among them as a checkpoint, if it supports the family.",
        )
    try:
        headers = weight_headers_of(here, **opening)
    except InvalidInput as error:
        if error.hint is not None:
            raise
        raise type(error)(error.message, "A draft needs the names and shapes of tensors, from headers alone.") from None
    shapes = {name: tuple(tensor.shape) for name, tensor in headers.tensors.items()}
    if not shapes:
        raise InvalidInput(
            f"there are no tensors in {reference}",
            "Put the weight files there: a draft needs the names and shapes of the tensors.",
        )
    return config, shapes


def _asked(question: dict[str, Any]) -> dict[str, Any]:
    """Run `drafting.trial` in a confined process (`converter.confinement`). Return its answer to `question`.

    Raises the error that the process reports, or GptkitError if it took too much time or memory.
    """
    reply = Confined(["-P", "-m", f"{__package__}.trial"], _SECONDS).ask(question)
    if reply is None or "error" in reply:
        reason = "it took too much time or memory" if reply is None else reply["error"]
        raise GptkitError(
            f"gptkit draft could not write a definition of this family: {reason:.200}",
            "gptkit params works without a definition: it lists the tensors by their names.",
        )
    answer: dict[str, Any] = reply["answer"]
    if "refused" in answer:
        kind, message, hint = answer["refused"]
        raise getattr(errors, kind)(message, hint)
    return answer


def lines(drafted: Drafted) -> list[str]:
    """Return the lines that the command prints about a draft."""
    output = [f"draft     {drafted.path}: the family {drafted.model_type}, made from {drafted.skeleton}"]
    marks = {True: "holds: ", False: "FAILS: ", None: "not tried: "}
    output += [f"{proof.name:<10}{marks[proof.holds]}{proof.told}" for proof in drafted.proofs]
    output += [f"          {' '.join(words.split())}" for words in drafted.place]
    if drafted.tried:
        output.append(
            f"tried     {drafted.tried} draft{'s' * (drafted.tried > 1)} against transformers' class"
            + (f", and taken: {'; '.join(drafted.kept)}" if drafted.kept else "")
        )
    output += [f"TODO      {question}" for question in drafted.todo]
    return [*output, f"use       gptkit --plugin {drafted.path} load MODEL"]
