"""Compare the tokenizer and the special token ids with the number of rows of the embedding."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ...components import ModelSpec
from ...converter.files import read_small
from ...converter.names import CONFIG
from ...converter.scan import FileScan
from ..surroundings import MOST_BYTES
from .subject import Finding, Subject


def check_vocabulary(subject: Subject) -> Iterator[Finding]:
    """Report token ids of the tokenizer or of special tokens that are not below the number of rows of the embedding."""
    files, rows = subject.files, rows_of(subject)
    config = files.config or {}
    if rows is None:
        return
    for name in (CONFIG, "generation_config.json"):
        try:
            data = config if name == CONFIG else _json(files.folder / name)
        except (OSError, ValueError):
            continue
        for key, value in data.items() if isinstance(data, dict) else ():
            ids = [id_ for id_ in (value if isinstance(value, list) else [value]) if type(id_) is int]
            if re.fullmatch(r"\w*_token_ids?", key) and any(id_ >= rows for id_ in ids):
                message = f"{name}: {key} is {max(ids):,}, but the embedding has {rows:,} rows"
                if subject.family is not None and subject.family.token_ids.get(key) == value:
                    message += ", because the field is missing and transformers uses its default"
                    yield Finding("special-token", "note", message)
                else:
                    yield Finding(
                        "special-token", "error", message, (), f"Set {key} in {name} to a token id below {rows}."
                    )
    tokens = tokens_of(files)
    if tokens is not None and tokens > rows:
        message = f"tokenizer.json has ids up to {tokens - 1:,}, but the embedding has {rows:,} rows"
        remedy = f"Copy the tokenizer that belongs to this model, or add rows: gptkit swap MODEL OUT --vocab {tokens}"
        yield Finding("tokenizer-vocabulary", "error", message, (), remedy)


def compare_vocabulary(subject: Subject, source: Subject, names: Sequence[str]) -> Iterator[Finding]:
    """Report that the vocabulary has another size than the source's, and whether the tokenizers' sizes differ too.

    `names` are the tensors that have another number of rows than in the source.
    """
    rows = [rows_of(side) for side in (source, subject)]
    tokens = [tokens_of(side.files) for side in (source, subject)]
    message = f"the vocabulary has {rows[1]:,} rows, but {rows[0]:,} in the original model"
    if tokens[0] is None or tokens[1] is None:
        message += (
            "; the tokenizers were not compared, because one of the folders has no tokenizer.json that gptkit can read"
        )
    elif tokens[0] == tokens[1]:
        message += f"; both tokenizers have {tokens[1]:,} tokens"
    else:
        message += f"; the tokenizer has {tokens[1]:,} tokens, but {tokens[0]:,} in the original model"
    together = None not in tokens and tokens[0] != tokens[1]
    remedy = (
        ""
        if together
        else (
            "If the additional rows are only padding, ignore this. Otherwise copy the tokenizer that belongs "
            "to this model."
        )
    )
    yield Finding("vocabulary", "note" if together else "warning", message, tuple(names), remedy)


def resized(subject: Subject, source: Subject, names: Iterable[str]) -> list[str]:
    """Return the tensors whose shapes differ from the source's only in the vocabulary size."""
    rows = [rows_of(side) for side in (source, subject)]
    if None in rows or rows[0] == rows[1]:
        return []
    tensors = []
    for name in names:
        theirs, ours = (side.files.tensors[name].shape for side in (source, subject))
        if len(theirs) == len(ours) and all(x == y or [x, y] == rows for x, y in zip(theirs, ours, strict=True)):
            tensors.append(name)
    return tensors


def rows_of(subject: Subject) -> int | None:
    """Return the size of the vocabulary according to the config."""
    if isinstance(subject.spec, ModelSpec):
        return subject.spec.vocab_size
    config = subject.files.config or {}
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    rows = text.get("vocab_size") if isinstance(text, dict) else None
    return rows if type(rows) is int else None


def tokens_of(files: FileScan) -> int | None:
    """Return the highest token id in tokenizer.json plus 1; None if gptkit cannot read the file."""
    try:
        tokenizer = _json(files.folder / "tokenizer.json")
        vocab = tokenizer["model"]["vocab"]
        ids = list(range(len(vocab))) if isinstance(vocab, list) else list(vocab.values())
        ids += [token["id"] for token in tokenizer.get("added_tokens") or ()]
        return 1 + max(id_ for id_ in ids if type(id_) is int)
    except (AttributeError, LookupError, OSError, TypeError, ValueError):
        return None


def _json(path: Path) -> Any:
    """Read a JSON file. Raises OSError, ValueError."""
    try:
        return json.loads(read_small(path, MOST_BYTES))
    except RecursionError as error:
        raise ValueError(str(error)) from error
