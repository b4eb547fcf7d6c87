"""Change the vocabulary: pad it with rows of zeros, cut it to its first tokens, or prune it; tie or untie the head.

Rows of the embedding and of the head are moved unchanged, so every logit of a kept token stays the same. Comparisons
use only the kept tokens (`Promise.tokens`). A new token has a row of zeros in the head, and so a logit of 0, which is
not the least logit.

Fewer tokens need a smaller tokenizer; `converter.vocabulary` changes its files.

Untying gives the head a copy of the embedding. Tying is exact if embedding and head have the same values already.
Otherwise one matrix T replaces an embedding E and a head H. T = (E + H) / 2 minimises |T - E|² + |T - H|². On a trained
model with separate matrices (sample:llama) this costs a KL of 1.8 nats per token. H for both costs 5.3, and E for both
7.3. The two matrices have little in common, and their sum preserves both.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, overload

import numpy as np
from msgspec.structs import replace

from ...components import ModelSpec
from ...components.ranges import some_of
from ...converter.dtypes import Array
from ...converter.names import CONFIG
from ...converter.tokenizer import load_tokenizer
from ...converter.vocabulary import Vocabulary, read_vocabulary
from ...errors import InvalidInput, SwapRefused, UsageError
from ..base import Computed, Guarantee, Moved, Promise, Swapped, Tensor, differing
from ..options import VOCABULARY, Option
from ..registry import Asked, Clears, Swap

_NAMED = 4  # the number of tokens that a message names


def _tables(spec: ModelSpec) -> list[str]:
    """Return the names of the tensors that have a row or element for every token: embedding, head and head bias."""
    rows = {} if spec.head is None else spec.head.shapes()
    return ["embedding.weight", *(f"head.{name}" for name in rows if "." not in name)]


def _picked(ids: Sequence[int]) -> Callable[[Array], Array]:
    """Return a function that takes a table to its rows for these token ids, in this order."""
    return lambda table: table[np.asarray(ids)]


def _moved(spec: ModelSpec, move: Callable[[Array], Array]) -> Mapping[str, Tensor]:
    """Return embedding, head and head bias after `move` was applied to their rows."""
    return {name: Moved(name, move) for name in _tables(spec)}


def _sized(
    spec: ModelSpec,
    size: int,
    move: Callable[[Array], Array],
    tokens: tuple[Sequence[int], Sequence[int]],
    notes: Sequence[str],
    files: Mapping[str, bytes | None] | None = None,
    **summary: Any,
) -> Swapped:
    """Return the result of a swap that gives the model a vocabulary of `size` tokens.

    Args:
        spec: The old model.
        size: The new number of tokens.
        move: A function that changes the rows of a table.
        tokens: The old ids of the kept tokens, and their new ids.
        notes: Messages for the user.
        files: The tokenizer files that change, by name. None stands for a removed file.
        summary: Further entries of the output's record.
    """
    head = None if spec.head is None else replace(spec.head, vocab_size=size)
    table: Any = spec.positions
    if table is not None and table.padding is not None:
        numbers = dict(zip(*tokens, strict=True))
        if table.padding not in numbers:
            raise SwapRefused(
                f"token {table.padding} is the padding token, which this model needs to count positions, "
                "so the token must be kept"
            )
        table = replace(table, padding=numbers[table.padding])
    _without_blank(spec)
    new = replace(spec, embedding=replace(spec.embedding, vocab_size=size), head=head, positions=table)
    record = {"from": spec.vocab_size, "to": size, **summary}
    promise = Promise(tokens=(tuple(tokens[0]), tuple(tokens[1])))
    return Swapped(new, "exact", _moved(spec, move), record, tuple(notes), promise, files or {})


# --- padded or cut vocabulary -----------------------------------------------------------------------------------------


def _to_size(multiple: bool, spec: ModelSpec, asked: Asked) -> Swapped:
    """Pad the vocabulary with rows of zeros to N tokens, or cut it. With `multiple`, pad it to a multiple of N."""
    if asked.argument is not None and not multiple:
        raise UsageError(f"--vocab {asked.value!r} is unknown", "known: N, multiple:N, prune:FILE, prune-text:FILE")
    of, now = asked.number("a number of tokens"), spec.vocab_size
    size = -(-now // of) * of if multiple else of
    if size == now:
        of_tokens = f"of {now:,} tokens is a multiple of {of}" if multiple else f"has {now:,} tokens"
        raise SwapRefused(f"the vocabulary {of_tokens} already")
    if size < now:
        return _cut(spec, asked, size)
    note = (
        f"the {size - now:,} new tokens have a logit of 0 at every position until they are trained, so sampling may"
        " draw them; the logits of all other tokens are unchanged"
    )

    def with_zeros(table: Array) -> Array:
        return np.concatenate([table, np.zeros((size - now, *table.shape[1:]), table.dtype)])

    return _sized(spec, size, with_zeros, (range(now), range(now)), [note])


def _cut(spec: ModelSpec, asked: Asked, size: int) -> Swapped:
    """Keep only the first `size` tokens of the vocabulary."""
    vocabulary = _vocabulary_of(asked)
    files: Mapping[str, bytes | None] = {}
    if vocabulary is not None and max(vocabulary.tokens.values(), default=0) >= size:
        _require_within(vocabulary, size, spec.vocab_size)
        files = vocabulary.cut({i: i for i in range(size) if i in vocabulary.names})
    note = "the model has no tokenizer, so the token ids in config.json were not checked"
    notes = [] if vocabulary is not None else [note]
    return _sized(spec, size, lambda table: table[:size], (range(size), range(size)), notes, files)


def _require_within(vocabulary: Vocabulary, size: int, now: int) -> None:
    """Raise SwapRefused if the tokenizer needs more than the first `size` tokens.

    This also applies if some of the first tokens are merged from later tokens. `now` is the present number of tokens.
    """
    hint = "--vocab prune:FILE keeps chosen tokens and the tokens that they need, and renumbers them."
    needed = {i: why for i, why in vocabulary.required().items() if size <= i < now}
    if needed:
        some = some_of([f"{vocabulary.names[i]!r} ({i}: {needed[i]})" for i in sorted(needed)], _NAMED)
        least = max(needed) + 1
        reason = f"the first {size:,} tokens are not enough: the tokenizer needs {some}"
        raise SwapRefused(reason, hint if least >= now else f"Possible from {least:,} on. {hint}")
    parts = sorted(i for i in vocabulary.closed(i for i in vocabulary.names if i < size) if i >= size)
    if parts:
        some = ", ".join(f"{vocabulary.names[i]!r} ({i})" for i in parts[:_NAMED])
        message = (
            f"some of the first {size:,} tokens are merged from {len(parts):,} tokens that would be removed: {some}"
        )
        raise SwapRefused(message, hint)


# --- pruned vocabulary ------------------------------------------------------------------------------------------------


def _prune_to_list(spec: ModelSpec, asked: Asked) -> Swapped:
    """Keep the tokens that a file lists, one per line: as in the tokenizer's vocabulary, or as a token id."""
    vocabulary = _vocabulary_of(asked, needed=True)
    lines = [line for line in _read_plain(asked.argument or "").split("\n") if line]
    ids, unknown = set(), []
    for number, line in enumerate(lines, 1):
        token = line.removesuffix("\r")
        by_id = int(token) if token.isascii() and token.isdecimal() and len(token) < 10 else -1
        token_id = vocabulary.tokens.get(token, by_id if by_id in vocabulary.names else -1)
        if token_id < 0:
            unknown.append(f"{token!r:.40} (line {number:,})")
        ids.add(token_id)
    if unknown:
        hint = (
            "Write one token per line, spelled as in the tokenizer's vocabulary. For plain text, use prune-text:FILE."
        )
        raise InvalidInput(
            f"{asked.argument} contains entries that are neither a token nor an id: {some_of(unknown, _NAMED)}", hint
        )
    if not lines:
        raise InvalidInput(f"{asked.argument} is empty: it must list the tokens to keep")
    return _prune(spec, vocabulary, ids)


def _prune_to_text(spec: ModelSpec, asked: Asked) -> Swapped:
    """Keep the tokens that occur in a text file."""
    vocabulary = _vocabulary_of(asked, needed=True)
    texts = asked.texts if asked.files is None or "tokenizer.json" in asked.texts else None
    tokenizer = load_tokenizer(asked.files or Path(), texts)
    assert tokenizer is not None
    return _prune(spec, vocabulary, set(tokenizer.encode(_read_plain(asked.argument or ""))))


def _prune(spec: ModelSpec, vocabulary: Vocabulary, ids: set[int]) -> Swapped:
    """Keep the tokens `ids`, and all tokens that the tokenizer needs for them.

    They keep their order, and are numbered from 0.
    """
    stay = sorted(vocabulary.closed(ids | set(vocabulary.required())))
    if stay[-1] >= spec.vocab_size:
        raise SwapRefused(
            f"token {stay[-1]:,} of the tokenizer is {vocabulary.names[stay[-1]]!r}, but the embedding has only"
            f" {spec.vocab_size:,} rows",
            f"First give every token a row: --vocab {max(vocabulary.names) + 1}.",
        )
    if len(stay) == spec.vocab_size:
        hint = "Give a shorter list, or a text that uses fewer tokens."
        raise SwapRefused(
            f"nothing to prune: the given tokens and the tokens that they need are the whole vocabulary"
            f" ({len(stay):,})",
            hint,
        )
    files, needed = vocabulary.cut({old: new for new, old in enumerate(stay)}), len(set(stay) - ids)
    notes = [
        f"{len(stay):,} of {spec.vocab_size:,} tokens kept: the {len(ids):,} given, and {needed:,} that these need"
    ]
    lost = sorted(name for name, text in files.items() if text is None)
    if lost:
        notes.append(f"left out, because they describe the old tokens: {', '.join(lost)}")
    tokens = stay, range(len(stay))
    return _sized(spec, len(stay), _picked(stay), tokens, notes, files, asked_for=len(ids), added=needed)


def _read_plain(name: str) -> str:
    """Read a UTF-8 text file. Raises InvalidInput if that is not possible."""
    try:
        return Path(name).expanduser().read_bytes().decode()
    except OSError as error:
        raise InvalidInput(f"cannot read {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{name} is not a UTF-8 text: byte {error.start:,} is invalid") from error


@overload
def _vocabulary_of(asked: Asked) -> Vocabulary | None: ...
@overload
def _vocabulary_of(asked: Asked, needed: bool) -> Vocabulary: ...
def _vocabulary_of(asked: Asked, needed: bool = False) -> Vocabulary | None:
    """Return the vocabulary of the model's tokenizer, together with token ids that config.json mentions.

    If the model has no tokenizer, return None, or raise SwapRefused if `needed`.
    """
    config = None if asked.origin is None else asked.origin.config_text
    if CONFIG in asked.texts:
        config = asked.texts[CONFIG].decode()
    vocabulary = read_vocabulary(asked.files, asked.texts, config)
    if vocabulary is None and needed:
        hint = "--vocab N keeps the first N tokens."
        raise SwapRefused("the model has no tokenizer, so gptkit cannot tell which token each id is", hint)
    return vocabulary


_PRUNED = (
    "Needs a tokenizer. Special tokens, single characters, and tokens from which kept tokens are merged always stay."
    " Exact for the kept tokens"
)
_entry = partial(Swap, option="vocab", takes="vocabulary")
_pruned = partial(_entry, needs=_PRUNED, source="Load What You Need 2010.05609")


# --- tying and untying the head ---------------------------------------------------------------------------------------


_BOTH = ("embedding.weight", "head.weight")


def _without_blank(spec: ModelSpec) -> None:
    """Raise SwapRefused if the embedding of some token is read as zeros, whatever its row is (padding_idx)."""
    if spec.embedding.blank is not None:
        raise SwapRefused(
            f"the embedding of token {spec.embedding.blank} is always read as zeros (padding_idx), which this "
            "swap does not support"
        )


def _retied(
    spec: ModelSpec, guarantee: Guarantee, tensors: Mapping[str, Tensor], *notes: str, **summary: Any
) -> Swapped:
    """Return the result of a swap that unties a tied head, or ties an untied one.

    `notes` are messages for the user, and `summary` further entries of the output's record.
    """
    _without_blank(spec)
    tied, words = spec.tied, {True: "tied", False: "untied"}
    new = replace(spec, head=replace(spec.has_head(), tied=not tied))
    return Swapped(new, guarantee, tensors, {"from": words[tied], "to": words[not tied], **summary}, notes)


def _untie(spec: ModelSpec, asked: Asked) -> Swapped:  # noqa: ARG001
    """Untie the head: give it a copy of the embedding."""
    if not spec.has_head().tied:
        raise SwapRefused("the head is not tied: it already has a matrix of its own", "--tie ties it to the embedding.")
    return _retied(spec, "exact", {"head.weight": Moved("embedding.weight")})


def _tie(spec: ModelSpec, asked: Asked) -> Swapped:
    """Tie the head to the embedding.

    If their matrices differ, both get the mean of the two, or with --approximate the matrix of the embedding.
    """
    if spec.has_head().tied:
        raise SwapRefused("the head is tied to the embedding already", "--untie gives it a matrix of its own.")
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters()}
    table, head = (shapes[name] for name in _BOTH)
    if table != head:
        raise SwapRefused(
            f"the head is {head[0]} x {head[1]}, the embedding {table[0]} x {table[1]}: they cannot be tied"
        )
    if asked.weights.same(*_BOTH):
        # The two have the same values, and the result is stored in the wider of the two dtypes.
        return _retied(spec, "exact", {_BOTH[0]: Moved(_BOTH, lambda table, head: table)})
    differ = asked.weights.ask(lambda model: sum(differing(model, *_BOTH)), table[0], 0)
    note = f"the head and the embedding differ in {differ:,} of {table[0]:,} rows, so tying them cannot be exact: "
    if asked.approximate:
        return _retied(spec, "approximate", {}, f"{note}the embedding's matrix is kept", matrix="embedding")
    mean = Computed(lambda model: (model.wide(_BOTH[0]) + model.wide(_BOTH[1])) / 2)
    return _retied(spec, "approximate", {_BOTH[0]: mean}, f"{note}both use their mean", matrix="mean")


_tying = partial(Swap, form="", source="Press and Wolf 1608.05859")

ORDER = 20
OPTIONS = (
    Option("tie", VOCABULARY, 2, "Tie the head to the embedding, so that both use the same weights."),
    Option("untie", VOCABULARY, 3, "Untie the head from the embedding, so that the head has weights of its own."),
    Option(
        "vocab",
        VOCABULARY,
        1,
        "The new vocabulary. 32000 gives it this number of tokens, multiple:64 pads it to a multiple of 64, "
        "prune:FILE keeps only the tokens that a file lists, and prune-text:FILE those that occur in a text.",
        "N | multiple:64 | prune:FILE",
        words="multiple = multiple of; prune; prune-text",
        parts={"": ("tokens", lambda spec: {spec.vocab_size})},
    ),
)
SWAPS = (
    _tying(
        option="tie",
        apart=True,
        takes="untied head",
        gives="tied head",
        needs="Exact only if the matrices of head and embedding are equal. Otherwise both become their mean",
        exact_where="the matrices of head and embedding are equal",
        reshape=_tie,
        clears=(Clears("head.tied", theirs=True),),
    ),
    _tying(
        option="untie",
        apart=True,
        takes="tied head",
        gives="untied head",
        needs="Needs a tied head",
        reshape=_untie,
        clears=(Clears("head.tied", theirs=False),),
    ),
    _entry(
        form="multiple:N",
        takes="vocabulary size",
        gives="a multiple of N",
        needs="Needs a size that is not yet a multiple of N. Exact for the old tokens",
        source="the padding of Megatron-LM, with zeros",
        reshape=partial(_to_size, True),
        examples=lambda spec: tuple(f"multiple:{of}" for of in (64, 100) if spec.vocab_size % of)[:1],
    ),
    _pruned(form="prune:FILE", gives="the tokens that a file lists", reshape=_prune_to_list),
    _pruned(form="prune-text:FILE", gives="the tokens that a text uses", reshape=_prune_to_text),
    _entry(
        form="N",
        takes="vocabulary size",
        gives="N tokens",
        needs="A smaller N is possible only if the tokenizer needs none of the dropped tokens. Exact for the tokens in"
        " both vocabularies",
        source="derived for gptkit: rows of zeros are added, or rows are dropped",
        reshape=partial(_to_size, False),
        examples=lambda spec: (str(spec.vocab_size + 3),),
    ),
)
