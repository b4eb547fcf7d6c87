"""Decide which files of a folder belong to a checkpoint, which of them are copied with its weights, and which are the
user's.

There are three kinds of files in a checkpoint's folder. gptkit reads and writes weights, their index and the
descriptions of the model. It copies companions, such as the tokenizer, the chat templates or a licence, into every
folder to which it writes the model. All other files are the user's own and stay where they are.
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
"""The names of the files of tokenizers, chat templates and generation settings, as shell patterns."""
UNLISTED = (*(name for name in TOKEN_FILES if "*" not in name), "LICENSE")
"""The names to request one by one from a hub that does not list a repository's files."""

_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".npz", ".npy", ".distcp", ".gguf", ".ggml", ".h5", ".msgpack"),
    *(".ot", ".onnx", ".onnx_data", ".tflite", ".pb", ".keras", ".nemo", ".mlmodel", ".index.json", ".metadata"),
)
"""The suffixes of weight files and their indexes."""
TRAINING_STATE = ("optim", "extra_state", "rng", "random_states", "scheduler", "scaler", "training_args", "sampler")
"""The prefixes of files with training state, which are not part of the model."""
_DESCRIPTIONS = (CONFIG, LOCAL_CONFIG, MANIFEST, JOURNAL, ADAPTER_CONFIG)
"""Files about the model and its weights. gptkit writes new ones for every output, instead of copying them."""
_OF_THE_SOURCE = (
    *_DESCRIPTIONS,
    "params.json",
    "quantize_config.json",
    "quant_config.json",
    "trainer_state.json",
    "tokens.json",
)
_CODE = (".py", ".pyc", ".ipynb", ".so", ".dll", ".sh", ".bat", ".exe", ".js", ".pkl", ".pickle", ".joblib", ".dill")
"""The suffixes of files that are code or may run code; these are never copied."""
_TEXTS = (".jinja", ".model", ".spm", ".tiktoken", ".vocab", ".bpe", ".codes")
"""The suffixes of files that belong only to tokenizers and chat templates."""
_SUBJECTS = re.compile(r"token|vocab|merges|template|processor|generation|config|modules|bpe|spm|piece|prompt|special")
"""Words by which a .json or .txt file is recognised as a companion: it is about a model's inputs or outputs."""
_LICENCES = ("LICENSE", "LICENCE", "NOTICE", "COPYING")
MOST_BYTES = 2**28
"""The largest size of a companion in bytes. Tokenizers are smaller."""


class Companion(NamedTuple):
    """A file that is copied with the weights."""

    name: str  # the path relative to the checkpoint's folder, with `/`
    path: Path

    def read_bytes(self) -> bytes:
        return self.path.read_bytes()


def is_weights(name: str) -> bool:
    """Return whether a file of this name has weights or is an index of weights."""
    last = name.rpartition("/")[2].lower()
    return last.endswith(_WEIGHTS) and not last.startswith(TRAINING_STATE)


def is_licence(name: str) -> bool:
    """Return whether a file of this name is a licence."""
    return name.rpartition("/")[2].upper().startswith(_LICENCES)


def travelling(names: Iterable[str]) -> list[str]:
    """Return the files of a folder that are copied with its weights, sorted. Paths in subfolders have a `/`.

    These are the tokenizer's files, chat templates and other texts about the model's inputs and outputs
    (`generation_config.json`, `preprocessor_config.json`, a sentence encoder's `1_Pooling/config.json`), and licences.
    Code, training state, hidden files and descriptions of the source's weights are not copied. A file of a subfolder is
    copied unless the subfolder has weights, a tokenizer, code or folders, because then it is another checkpoint.
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
    """Return the files of a folder that are copied with its weights, sorted by name.

    Links out of the folder (except to the blobs of the hub's cache) and files larger than `MOST_BYTES` are not copied.
    Raises InvalidInput if the folder cannot be read.
    """
    try:
        paths = {path.relative_to(folder).as_posix(): path for path in _within(folder)}
    except OSError as error:
        raise InvalidInput(f"cannot read {folder}: {error.strerror}") from error
    home = folder.resolve()
    blobs = home.parent.parent / "blobs"
    return [Companion(name, paths[name]) for name in travelling(paths) if _is_own(paths[name], home, blobs)]


def _within(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and its subfolders.

    A folder inside a subfolder is not read. One made-up path stands for it, so that `travelling` knows of the folder.
    """
    for path in folder.iterdir():
        if not path.is_dir():
            yield path
        elif not path.is_symlink() and not path.name.startswith("."):
            for inner in path.iterdir():
                yield inner / "_" if inner.is_dir() else inner  # marks its subfolder as another checkpoint


def _is_own(path: Path, home: Path, blobs: Path) -> bool:
    target = path.resolve()
    own = target.is_relative_to(home) or target.parent == blobs
    return own and target.is_file() and target.stat().st_size <= MOST_BYTES


def is_tokenizers(name: str) -> bool:
    """Return whether a file of this name belongs to a tokenizer (`TOKEN_FILES`) and is not code."""
    return any(fnmatchcase(name, pattern) for pattern in TOKEN_FILES) and not name.lower().endswith(_CODE)


def is_checkpoints(name: str) -> bool:
    """Return whether a file is part of the checkpoint in its folder, so that another checkpoint replaces it.

    These are the files that loaders look for: weights and indexes, descriptions, the tokenizer, chat templates. All
    others, such as notes, licences and files in subfolders, are the user's.
    """
    if "/" in name:
        return name.endswith(".jinja")
    return is_weights(name) or name in _DESCRIPTIONS or name.endswith(".jinja") or is_tokenizers(name)


def free_name(name: str, taken: Iterable[str]) -> str:
    """Return a new name for a user's file whose name is taken: NAME.old, NAME.old2 and so on."""
    used = set(taken)
    names = (f"{name}.old{number if number > 1 else ''}" for number in range(1, len(used) + 2))
    return next(old for old in names if old not in used)
