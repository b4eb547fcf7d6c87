"""Which files of a folder belong to a checkpoint, which ones travel with its weights, and which are its user's.

Three kinds of files stand in a checkpoint's folder. Weights, their index and the descriptions of the model are read and
written by gptkit. Companions, such as the tokenizer, the chat templates or a licence, are copied to wherever the model
goes. All others are the user's own and stay where they are.
"""

import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from ..errors import InvalidInput
from .manifest import JOURNAL, MANIFEST
from .names import ADAPTER_CONFIG, CONFIG, LOCAL_CONFIG

TOKEN_FILES = (
    # the tokenizer: its one-file form with its settings, then the older forms (tokenizer.model.v3, …)
    "tokenizer.json", "tokenizer.model", "tokenizer.*", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "spiece.model", "tekken.json", "*.tiktoken",
    # ids that stand for something other than text; how the model is talked to
    "token_mappings.json", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
"""Names of the files that say how text becomes token ids and what the model is asked, as shell patterns."""
UNLISTED = (*(name for name in TOKEN_FILES if "*" not in name), "LICENSE")
"""What can be asked of a hub that does not list a repository's files."""

_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".npz", ".npy", ".distcp", ".gguf", ".ggml", ".h5", ".msgpack"),
    *(".ot", ".onnx", ".onnx_data", ".tflite", ".pb", ".keras", ".nemo", ".mlmodel", ".index.json", ".metadata"),
)
"""How files of weights and their indexes end."""
TRAINING_STATE = ("optim", "extra_state", "rng", "random_states", "scheduler", "scaler", "training_args", "sampler")
"""How the names of files begin that training programs write beside the weights: no part of the model."""
_DESCRIPTIONS = (CONFIG, LOCAL_CONFIG, MANIFEST, JOURNAL, ADAPTER_CONFIG)
"""Files that gptkit writes anew for each format, or that say how the source's own weights are stored."""
_OF_THE_SOURCE = (
    *_DESCRIPTIONS,
    "params.json",
    "quantize_config.json",
    "quant_config.json",
    "trainer_state.json",
    "tokens.json",
)
_CODE = (".py", ".pyc", ".ipynb", ".so", ".dll", ".sh", ".bat", ".exe", ".js", ".pkl", ".pickle", ".joblib", ".dill")
"""How files end that run, or may run, code: these never travel."""
_TEXTS = (".jinja", ".model", ".spm", ".tiktoken", ".vocab", ".bpe", ".codes")
"""How files end that tokenizers and templates alone have."""
_SUBJECTS = re.compile(r"token|vocab|merges|template|processor|generation|config|modules|bpe|spm|piece|prompt|special")
"""What names of .json and .txt files contain that say how a model's inputs and outputs are made."""
_LICENCES = ("LICENSE", "LICENCE", "NOTICE", "COPYING")
MOST_BYTES = 2**28
"""The largest file that is a companion; tokenizers are smaller."""


class Companion(NamedTuple):
    """A file that travels with the weights: its name within the folder, with `/`, and where it is."""

    name: str
    path: Path

    def read_bytes(self) -> bytes:
        return self.path.read_bytes()


def is_weights(name: str) -> bool:
    """Return whether a file of this name holds weights, or says where weights are."""
    last = name.rpartition("/")[2].lower()
    return last.endswith(_WEIGHTS) and not last.startswith(TRAINING_STATE)


def is_licence(name: str) -> bool:
    """Return whether a file of this name says what the weights may be used for."""
    return name.rpartition("/")[2].upper().startswith(_LICENCES)


def travelling(names: Iterable[str]) -> list[str]:
    """Return which files of a folder travel with its weights, sorted; names of nested ones have a `/`.

    Those are the tokenizer's files, chat templates and other texts about what goes into the model and comes out
    (`generation_config.json`, `preprocessor_config.json`, a sentence encoder's `1_Pooling/config.json`), and licences.
    No code travels, no training state, no hidden file, and nothing that describes the source's own weights. A file of
    a subfolder travels unless that subfolder has weights, a tokenizer, code or folders: then it is another checkpoint.
    """
    every = list(names)
    barred = {name.partition("/")[0] for name in every if "/" in name and not _may_nest(name)}
    return sorted(name for name in every if _travels(name) and not ("/" in name and name.partition("/")[0] in barred))


def _may_nest(name: str) -> bool:
    last = name.rpartition("/")[2]
    return name.count("/") == 1 and not (is_weights(last) or is_tokenizers(last) or last.lower().endswith(_CODE))


def _travels(name: str) -> bool:
    last = name.rpartition("/")[2].lower()
    hidden = any(part.startswith(".") for part in name.split("/"))
    if hidden or last.endswith((*_WEIGHTS, *_CODE)) or last.startswith((*TRAINING_STATE, "readme")):
        return False
    if "/" not in name and (last in _OF_THE_SOURCE or is_licence(name)):
        return last not in _OF_THE_SOURCE
    text = last.endswith((".json", ".txt")) and _SUBJECTS.search(last) is not None
    return text or last.endswith(_TEXTS) or is_tokenizers(name)


def companions_in(folder: Path) -> list[Companion]:
    """Return the files of a folder that travel with its weights, by name.

    A link to a file outside of the folder does not travel, but for the blobs of the hub's cache, and neither does what
    is larger than `MOST_BYTES`. Raises InvalidInput where the folder cannot be read.
    """
    try:
        paths = {path.relative_to(folder).as_posix(): path for path in _within(folder)}
    except OSError as error:
        raise InvalidInput(f"cannot read {folder}: {error.strerror}") from error
    home = folder.resolve()
    blobs = home.parent.parent / "blobs"
    return [Companion(name, paths[name]) for name in travelling(paths) if _is_own(paths[name], home, blobs)]


def _within(folder: Path) -> Iterator[Path]:
    """Everything in a folder and in the folders in it, but for the folders at its top level and hidden ones."""
    for path in folder.iterdir():
        if not path.is_dir():
            yield path
        elif not path.is_symlink() and not path.name.startswith("."):
            for inner in path.iterdir():
                yield inner / "_" if inner.is_dir() else inner  # too deep, whatever it holds


def _is_own(path: Path, home: Path, blobs: Path) -> bool:
    target = path.resolve()
    own = target.is_relative_to(home) or target.parent == blobs
    return own and target.is_file() and target.stat().st_size <= MOST_BYTES


def is_tokenizers(name: str) -> bool:
    """Return whether a file of this name is one of `TOKEN_FILES`, and no code."""
    return any(fnmatchcase(name, pattern) for pattern in TOKEN_FILES) and not name.lower().endswith(_CODE)


def is_checkpoints(name: str) -> bool:
    """Return whether a file is part of the checkpoint in its folder, so that another checkpoint replaces it.

    Those are the files that loaders look for: weights and indexes, descriptions, the tokenizer, chat templates. All
    others, such as notes, licences and what is in subfolders, are the user's.
    """
    if "/" in name:
        return name.endswith(".jinja")
    return is_weights(name) or name in _DESCRIPTIONS or name.endswith(".jinja") or is_tokenizers(name)


def free_name(name: str, taken: Iterable[str]) -> str:
    """Return the name under which a user's file is kept whose own name is taken: NAME.old, NAME.old2 and so on."""
    used = set(taken)
    names = (f"{name}.old{number if number > 1 else ''}" for number in range(1, len(used) + 2))
    return next(old for old in names if old not in used)
