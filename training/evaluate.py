"""eval: what a model makes of texts, by the position in its context and past it, and beside another model.

Every file (of a .jsonl every line) is a document, and no window crosses its end. A window of W tokens predicts the W
that follow each of them, so that all tokens of a document but its first are predicted, each once. Standard errors are
over windows, not tokens: what follows one another in a text is not independent. Of sums L and sizes T by window the
mean is ΣL / ΣT, and its variance n / (n - 1) · Σ(L - mean · T)² / (ΣT)² (the ratio estimator of clusters).

Two models that read the same tokens are paired window by window. Where their tokenizers differ, tokens are not the same
thing: then it is by bytes, the second one's tokens counting in that window of the first in which they end.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..analysis.activations import Kernel
from ..analysis.costs import stated_context
from ..components import ModelSpec
from ..converter.checkpoint import Checkpoint, open_checkpoint
from ..converter.dtypes import Array
from ..converter.threads import as_before, suit
from ..converter.tokenizer import Tokenizer, load_tokenizer
from ..display import Record, Shown
from ..errors import GptkitError, InvalidInput, UsageError
from ..modules.decoder import Decoder
from ..modules.generate import outside_vocabulary
from ..modules.load import load_checkpoint
from ..parity.compare import perplexity
from ..parity.probe import TOGETHER, WINDOW
from ..surgery.registry import steps_named
from ..surgery.shapes import swapped
from .data import Text, around, encode, is_tokens, open_tokens, paths_of, require_tokenizer

MOST = 2048
"""Tokens of a window where nobody says how many, at most: attention grows with the square."""
_LOGITS = 2**22
"""Logits that are made at once."""
_ENDS = slice(None, 1), slice(-1, None)
"""The first and the last."""


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class Estimate(Record):
    """A mean with its standard error over windows.

    Attributes:
        value: the mean.
        error: the standard error; None with one window.
    """

    value: float
    error: float | None

    def as_json(self) -> dict[str, Any]:
        return {"value": _finite(self.value), "error": _finite(self.error)}


@dataclass(frozen=True)
class Bin(Record):
    """The figures for a range of positions in the window.

    Attributes:
        first: the first position, counted from 0. A token at this position predicts the next one.
        last: the last position.
        tokens: the number of predicted tokens.
        nats: the mean negative log-probability of a token.
        top_k: the share of tokens among the k most likely ones, by k.
    """

    first: int
    last: int
    tokens: int
    nats: Estimate
    top_k: Mapping[int, Estimate]


@dataclass(frozen=True)
class Curve(Record):
    """The figures of a model by position in the window.

    Attributes:
        name: the name of the model.
        context: the context of the model; None if it is unknown.
        width: the number of tokens in a window.
        bins: the ranges of positions with their figures.
    """

    name: str
    context: int | None
    width: int
    bins: tuple[Bin, ...]


@dataclass(frozen=True)
class Score(Record):
    """The figures of a model on a text.

    Attributes:
        reference: the name of the model.
        tokens: the number of predicted tokens.
        windows: the number of windows.
        bytes: the number of bytes of the predicted text in UTF-8.
        nats: the mean negative log-probability of a token.
        perplexity: the exponential of this mean.
        bits_per_byte: the bits of all tokens divided by the number of bytes.
        top_k: the share of tokens among the k most likely ones, by k.
        curve: the figures by position in the window.
    """

    JSON = "reference tokens windows bytes nats perplexity=finite_perplexity bits_per_byte top_k curve"

    reference: str
    tokens: int
    windows: int
    bytes: int
    nats: Estimate
    perplexity: float
    bits_per_byte: Estimate
    top_k: Mapping[int, Estimate]
    curve: Curve

    @property
    def finite_perplexity(self) -> float | None:
        return _finite(self.perplexity)


@dataclass(frozen=True)
class Paired(Record):
    """The comparison of a model with another one on the same text, window by window.

    Attributes:
        difference: the mean of the model's figure minus the other's.
        unit: "nats a token", or "bits a byte" if the models have different tokenizers.
        windows: the number of windows.
        better: the share of windows in which the model predicts the text better than the other.
        worse: the share of windows in which it predicts the text worse.
    """

    difference: Estimate
    unit: str
    windows: int
    better: float
    worse: float


@dataclass(frozen=True)
class Evaluation(Record, Shown):
    """The result of `evaluate`.

    Attributes:
        data: the names of the texts.
        documents: the number of documents.
        context: the number of tokens in a window.
        stride: the number of tokens between the starts of two windows.
        score: the figures of the model.
        against: the figures of the other model; None without one.
        paired: the comparison with the other model; None without one.
        extrapolation: the curves for windows that are longer than the context.
        notes: sentences that say what the figures do not include.
    """

    JSON = "schema_version data documents context stride score against paired extrapolation notes"

    data: tuple[str, ...]
    documents: int
    context: int
    stride: int
    score: Score
    against: Score | None = None
    paired: Paired | None = None
    extrapolation: tuple[Curve, ...] = ()
    notes: tuple[str, ...] = ()
    schema_version: int = field(default=1, repr=False)


# --- texts and windows ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Document:
    """A text as tokens: their ids, and in bytes of the text where each ends."""

    name: str
    ids: Array
    ends: Array


def _documents(path: Path, tokenizer: Tokenizer | None, checkpoint: Checkpoint) -> list[_Document]:
    """The documents of a file of text, or of a folder of tokens that the checkpoint's tokenizer made."""
    if is_tokens(path):
        return _stored(path, tokenizer, checkpoint.reference)
    if tokenizer is None:
        raise UsageError(
            f"{checkpoint.reference} has no tokenizer, so gptkit cannot read the text {path}",
            "Tokenise the text first, and give the folder to --data: gptkit tokenize FILE FOLDER --tokenizer MODEL",
        )
    before, _ = around(tokenizer, ())
    found, ids, ends = list[_Document](), list[int](), list[Array]()
    size = 0
    for text, last in Text(path).pieces():
        new, places = encode(tokenizer, text, not ids)
        signs = np.frombuffer(text.encode("utf-32-le"), "<u4")
        until = np.concatenate(([0], np.cumsum(1 + (signs >= 0x80) + (signs >= 0x800) + (signs >= 0x10000))))
        if new:
            ids += [*([] if ids else before), *new]
            ends += [np.zeros(0 if ends else len(before)), size + np.maximum.accumulate(until[places])]
        size += int(until[-1])
        if last:
            whole = np.concatenate(ends) if ends else np.zeros(0)
            whole[-1:] = size
            name = f"{path}" if path.suffix != ".jsonl" else f"{path}, document {len(found) + 1:,}"
            found.append(_Document(name, np.array(ids, np.int64), whole))
            ids, ends, size = [], [], 0
    return found


def _stored(folder: Path, tokenizer: Tokenizer | None, model: str) -> list[_Document]:
    """A folder of tokens, in which no token's own bytes are known: each counts as many as the others."""
    opened = open_tokens(folder)
    if tokenizer is not None:
        require_tokenizer(opened, model, tokenizer)
    share, first, found = opened.bytes / opened.tokens, 0, []
    for number, end in enumerate(opened.ends.tolist(), 1):
        ids = opened.read(first, end - first)
        found.append(_Document(f"{folder}, document {number:,}", ids, share * np.arange(1, len(ids) + 1)))
        first = end
    return found


def _read(checkpoint: Checkpoint, files: Sequence[Path]) -> list[_Document]:
    """Documents of two tokens and more; InvalidInput where there is none, UsageError for ids that the model lacks."""
    tokenizer, rows = load_tokenizer(checkpoint.folder, checkpoint.texts), checkpoint.spec.vocab_size
    found = [document for path in files for document in _documents(path, tokenizer, checkpoint)]
    for document in found:
        if (outside := document.ids[document.ids >= rows]).size:
            ids = np.unique(outside).tolist()
            raise outside_vocabulary(
                ids, rows, f"They are in {document.name}. Check that the tokenizer belongs to this model."
            )
    if not any(len(document.ids) > 1 for document in found):
        raise InvalidInput(
            f"{', '.join(map(str, files))}: every text has fewer than two tokens, so nothing can be predicted",
            "Give a longer text.",
        )
    return found


@dataclass(frozen=True)
class _Window:
    """`given` tokens of a document from its token `first` on, and how many of the last predictions count here."""

    document: int
    first: int
    given: int
    counted: int


def _windows(documents: Sequence[_Document], width: int, stride: int) -> list[_Window]:
    """Windows of `width` tokens, or what is left, each beginning `stride` behind the one before: every token of a
    document but its first is predicted in the first window that comes to it.
    """
    found = []
    for number, document in enumerate(documents):
        first = done = 0
        while done < len(document.ids) - 1:
            given = min(width, len(document.ids) - 1 - first)
            found.append(_Window(number, first, given, first + given - done))
            done, first = first + given, first + stride
    return found


# --- what a model makes of them ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """What a model makes of documents: of every prediction that counts, in the order of the text, what it lost in nats
    and how many tokens it held likelier.
    """

    name: str
    spec: ModelSpec
    documents: Sequence[_Document]
    windows: Sequence[_Window]
    lost: Array
    rank: Array

    def _by_prediction(self, values: Callable[[_Window], Array]) -> Array:
        return np.concatenate([values(window) for window in self.windows])

    @cached_property
    def window(self) -> Array:
        """The number of each prediction's window."""
        return np.repeat(np.arange(len(self.windows)), [window.counted for window in self.windows])

    @cached_property
    def position(self) -> Array:
        return self._by_prediction(lambda each: np.arange(each.given - each.counted, each.given))

    def ends(self, token: int) -> Array:
        """The byte of its document at which each predicted token (1), or the one before it (0), ends."""

        def of(each: _Window) -> Array:
            last = each.first + each.given + token
            return self.documents[each.document].ends[last - each.counted : last]

        return self._by_prediction(of)

    def estimate(self, values: Array, sizes: Array | None = None, here: Array | slice = slice(None)) -> Estimate:
        """The mean of values of the predictions `here`, each of the size given (one, where none is)."""
        weights = None if sizes is None else sizes[here]
        sums, totals = (np.bincount(self.window[here], each) for each in (values[here], weights))
        return ratio(sums, totals)

    def top(self, ks: Sequence[int], here: Array | slice = slice(None)) -> dict[int, Estimate]:
        return {k: self.estimate(1.0 * (self.rank < k), here=here) for k in ks}

    def curve(self, edges: Sequence[int], width: int, ks: Sequence[int]) -> Curve:
        """By position, in bins that begin at `edges`; those that no window comes to are not there."""
        bins = []
        for first, end in zip(edges, [*edges[1:], width], strict=True):
            here = (self.position >= first) & (self.position < end)
            if count := int(here.sum()):
                last = int(self.position[here].max())
                bins.append(Bin(first, last, count, self.estimate(self.lost, here=here), self.top(ks, here)))
        return Curve(self.name, stated_context(self.spec), width, tuple(bins))

    def score(self, width: int, ks: Sequence[int]) -> Score:
        nbytes, nats = self.ends(1) - self.ends(0), self.estimate(self.lost)
        return Score(
            reference=self.name,
            tokens=len(self.lost),
            windows=len(self.windows),
            bytes=round(nbytes.sum()),
            nats=nats,
            perplexity=perplexity(torch.tensor(nats.value)),
            bits_per_byte=self.estimate(self.lost / math.log(2), nbytes),
            top_k=self.top(ks),
            curve=self.curve(_doubling(width), width, ks),
        )


def ratio(sums: Array, sizes: Array) -> Estimate:
    """The mean of what windows of some sizes sum up to, and its standard error; see above."""
    sums, sizes = sums[sizes > 0], sizes[sizes > 0]
    count, total = len(sizes), sizes.sum()
    mean = float(sums.sum() / total) if count else math.nan
    if count < 2:
        return Estimate(mean, None)
    return Estimate(mean, math.sqrt(count / (count - 1) * np.square(sums - mean * sizes).sum()) / float(total))


def _doubling(width: int) -> list[int]:
    """0, 1, 2, 4, … below the width."""
    return [0, *(2**power for power in range((width - 1).bit_length()))]


def _past(context: int, width: int) -> list[int]:
    """The same within the context, and behind it by halves of it."""
    return [*_doubling(context), *range(context, width, max(context // 2, 1))]


def _run(
    name: str, model: Decoder, documents: Sequence[_Document], windows: Sequence[_Window], tell: Callable[[str], None]
) -> _Run:
    """Run a model through windows; GptkitError where its logits are NaN."""
    device, lost, ranks, done = model.embedding.weight.device, list[Tensor](), list[Tensor](), 0
    for given, alike in groupby(windows, key=lambda each: each.given):
        group, together = list(alike), max(1, TOGETHER // given)
        for start in range(0, len(group), together):
            part = group[start : start + together]
            rows = np.stack([documents[each.document].ids[each.first : each.first + given + 1] for each in part])
            ids = torch.from_numpy(rows).to(device)
            states = states_of(model, ids[:, :-1])
            for row, each in enumerate(part):
                here = slice(given - each.counted, given)
                for found in predicted(model, states[row, here], ids[row, 1:][here]):
                    lost.append(found[0].cpu())
                    ranks.append(found[1].cpu())
                    if bool(lost[-1].isnan().any()):
                        raise GptkitError(
                            f"{name}: the logits for the text {documents[each.document].name} are NaN",
                            "The weights may be damaged, or activations may be too large for float16. Try --dtype "
                            "float32.",
                        )
            done += len(part)
            tell(f"{name}: {done:,} of {len(windows):,} windows")
    return _Run(name, model.spec, documents, windows, torch.cat(lost).numpy(), torch.cat(ranks).numpy())


@torch.inference_mode()
def states_of(model: Decoder, ids: Tensor) -> Tensor:
    """What comes to the head, (B, T, hidden): the logits of a whole batch would be the most of its memory."""
    assert model.head is not None
    kept: list[Tensor] = []

    def take(_: Any, inputs: Any) -> Any:
        kept.append(inputs[0])
        return (inputs[0][:, :0], *inputs[1:])

    with model.head.register_forward_pre_hook(take):
        model(ids)
    return kept[0]


@torch.inference_mode()
def predicted(model: Decoder, states: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Of states (N, hidden) and the tokens that follow: what is lost in nats, in fp64, and how many tokens are
    likelier, of equal ones those with a smaller id.
    """
    assert model.head is not None
    found, step = [], max(1, _LOGITS // model.spec.vocab_size)
    for part, wanted in zip(torch.split(states, step), torch.split(targets, step), strict=True):
        logits = model.head(part, model.embedding.weight).double()
        own = logits.gather(1, wanted[:, None])
        before = torch.arange(logits.shape[1], device=logits.device) < wanted[:, None]
        rank = ((logits > own) | (before & (logits == own))).sum(1)
        found.append((logits.logsumexp(1) - own[:, 0], rank))
    return found


# --- beside another ---------------------------------------------------------------------------------------------------


def _pair(a: _Run, b: _Run) -> Paired:
    """`a` less `b`, by `a`'s windows."""
    same = all(np.array_equal(x.ids, y.ids) for x, y in zip(a.documents, b.documents, strict=True))
    ours: Array
    theirs: Array
    if same:
        ours, theirs, sizes = (np.bincount(a.window, each).astype(np.float64) for each in (a.lost, b.lost, None))
        unit = "nats a token"
    else:
        ours, theirs, sizes = _by_bytes(a, b)
        ours, theirs, unit = ours / math.log(2), theirs / math.log(2), "bits a byte"
    kept = sizes > 0
    ours, theirs, sizes = ours[kept], theirs[kept], sizes[kept]
    better, worse = float((ours < theirs).mean()), float((ours > theirs).mean())
    return Paired(ratio(ours - theirs, sizes), unit, len(sizes), better, worse)


def _by_bytes(a: _Run, b: _Run) -> tuple[Array, Array, Array]:
    """What both lose in nats in each of `a`'s windows, and its bytes: from where both have begun to predict."""
    both = list(zip(a.documents, b.documents, strict=True))
    firsts, sizes = (np.array([max([*x.ends[at], *y.ends[at]], default=0.0) for x, y in both]) for at in _ENDS)
    bases, of = np.cumsum(sizes) - sizes, np.array([each.document for each in a.windows])
    lasts = bases[of] + [a.documents[each.document].ends[each.first + each.given] for each in a.windows]
    found = []
    for run in (a, b):
        document = np.repeat([each.document for each in run.windows], [each.counted for each in run.windows])
        begins, ends = run.ends(0), run.ends(1)
        window = np.minimum(np.searchsorted(lasts, bases[document] + ends), len(of) - 1)
        counts = (begins >= firsts[document]) & (of[window] == document)  # a document of one token has no window
        found += [np.bincount(window, each * counts, len(of)) for each in (run.lost, ends - begins)]
    return found[0], found[2], found[1]


# --- all of it --------------------------------------------------------------------------------------------------------


@as_before()
def evaluate(
    model: str | Path,
    data: str | Path | Sequence[str | Path],
    *,
    against: str | Path | None = None,
    context: int | None = None,
    past: int = 1,
    stride: int | None = None,
    top_k: Sequence[int] = (1, 5),
    rope: str | None = None,
    dtype: torch.dtype | str = "float32",
    attention: Kernel = "sdpa",
    device: str | torch.device = "cpu",
    offline: bool = False,
    allow_pickle: bool = False,
    allow_extra: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Evaluation:
    """Measure the perplexity, bits per byte and top-k accuracy of a model on texts, in total and by position.

    Args:
        model: the checkpoint: a folder, a file, a sample, or a repository on the hub.
        data: text files in UTF-8, or folders that `tokenize` wrote. A file is one document, except that every line of a
            .jsonl file is a document.
        against: another model to evaluate on the same texts in the same windows.
        context: the number of tokens in a window; by default the shorter context of the models, at most `MOST`.
        past: also evaluate windows of this number of contexts, to show the loss after the end of the context.
        stride: the number of tokens between the starts of two windows; by default a whole window. A smaller stride
            predicts every token from more tokens, and takes longer.
        top_k: the values of k for which to report the share of tokens that are among the k most likely ones.
        rope: a RoPE scaling ("yarn:4"). The model with this scaling is compared with the unscaled model after the end
            of its context.
        dtype: the dtype to compute in.
        attention: "sdpa" or "eager".
        device: the device to compute on.
        offline: use local files and the hub's cache only.
        allow_pickle: also read .bin files (weights only).
        allow_extra: leave out tensors that have no place in the model instead of refusing them.
        progress: called with a line that names the model and says how much is done.

    Raises:
        InvalidInput: a file cannot be read as text, or no text has two tokens; also as in `open_checkpoint`.
        UsageError: a window is longer than the position table; a token is outside the vocabulary; there is no
            tokenizer; a number is out of range.
        SwapRefused: `rope` was given for a model without RoPE.
        MissingComponent: the model does not predict a next token.
        GptkitError: the logits are NaN.
    """
    paths = paths_of(data)
    opened = [
        open_checkpoint(each, offline=offline, allow_pickle=allow_pickle, allow_extra=allow_extra)
        for each in (model, against)
        if each is not None
    ]
    for each in opened:
        each.spec.predicts("eval")
        each.spec.one_stack("eval")
    suit(opened[0].spec)
    names = [checkpoint.reference for checkpoint in opened]
    if len(opened) == 2 and names[0] == names[1]:
        names[1] += " (again)"
    usual = [min(stated_context(each.spec) or WINDOW, MOST) for each in opened]
    width = min(usual) if context is None else context
    step = width if stride is None else stride
    _require(paths, width, past, step, top_k, rope)
    for checkpoint in opened:
        _require_positions(checkpoint, width * past)
    scaled = None
    if rope is not None:  # before anything is computed, for what it may be refused for
        origin, spec = opened[0].origin, opened[0].spec
        scaled = swapped(spec, steps_named("rope_scaling", rope), origin.family, names[0]).spec
    tell = progress or (lambda _: None)
    runs, curves = list[_Run](), list[Curve]()
    for name, checkpoint in zip(names, opened, strict=True):
        documents = _read(checkpoint, paths)
        decoder = load_checkpoint(checkpoint, dtype, attention, device=device)
        runs.append(_run(name, decoder, documents, _windows(documents, width, step), tell))
        if past > 1:
            far = partial(_far, documents=documents, context=width, past=past, top_k=top_k, tell=tell)
            curves.append(far(name, decoder))
            if scaled is not None and checkpoint is opened[0]:
                curves.append(far(f"{name}, {rope}", _with_tree(decoder, scaled, attention)))
        del decoder
        checkpoint.release()
    paired = _pair(*runs) if len(runs) == 2 else None
    scores = [run.score(width, top_k) for run in runs]
    return Evaluation(
        data=tuple(map(str, paths)),
        documents=len(runs[0].documents),
        context=width,
        stride=step,
        score=scores[0],
        against=scores[1] if len(scores) == 2 else None,
        paired=paired,
        extrapolation=tuple(curves),
        notes=tuple(_notes(runs[0].documents, curves, width * past, paired)),
    )


def _notes(
    documents: Sequence[_Document], curves: Sequence[Curve], length: int, paired: Paired | None
) -> Iterator[str]:
    """Yield notes about documents that are too short, and about models that tokenise differently.

    Args:
        documents: the documents of the first model.
        curves: the losses by position, if windows are longer than the context.
        length: the number of tokens of the longest window.
        paired: the comparison with another model, if there is one.
    """
    if short := sum(len(document.ids) < 2 for document in documents):
        yield f"{short:,} of {len(documents):,} documents have fewer than two tokens, so they have no prediction"
    if curves and (reached := max(curve.bins[-1].last for curve in curves) + 1) < length:
        yield f"no document is longer than {reached + 1:,} tokens, so nothing was measured at larger positions"
    if paired is not None and paired.unit == "bits a byte":
        yield "the models tokenise the text differently, so they are compared in bits per byte"


def _far(
    name: str,
    model: Decoder,
    *,
    documents: Sequence[_Document],
    context: int,
    past: int,
    top_k: Sequence[int],
    tell: Callable[[str], None],
) -> Curve:
    """The curve in windows of several contexts."""
    width = context * past
    run = _run(name, model, documents, _windows(documents, width, width), tell)
    return run.curve(_past(context, width), width, top_k)


def _with_tree(model: Decoder, spec: ModelSpec, attention: Kernel) -> Decoder:
    """The same parameters, in the same memory, as another tree."""
    with torch.device("meta"):
        made = Decoder(spec, attention)
    made.load_state_dict(model.state_dict(), assign=True)
    return made.eval()


def _require(paths: Sequence[Path], width: int, past: int, stride: int, top_k: Sequence[int], rope: str | None) -> None:
    """Raise UsageError for numbers out of range, InvalidInput for files that are not there."""
    if not paths:
        raise UsageError("there is no text to measure on", "Give --data FILE.")
    for path in paths:
        if not path.exists():
            raise InvalidInput(f"there is no file or folder {path}")
        if path.is_dir() and not is_tokens(path):
            raise InvalidInput(
                f"the folder {path} was not written by gptkit tokenize",
                "Give text files, or a folder written by gptkit tokenize.",
            )
    if width < 1:
        raise UsageError(f"--context must be 1 or more, not {width}")
    if past < 1:
        raise UsageError(
            f"--past must be 1 or more, not {past}",
            "For example, 2 evaluates sequences of up to twice the model's context.",
        )
    if not 1 <= stride <= width:
        raise UsageError(
            f"--stride must be from 1 to {width:,}, the number of tokens in a window (--context), not {stride:,}"
        )
    if not top_k or min(top_k) < 1:
        raise UsageError(
            f"--top-k must be whole numbers of 1 or more, not {', '.join(map(str, top_k)) or 'empty'}",
            "For example: --top-k 1,5",
        )
    if rope is not None and past == 1:
        raise UsageError(
            "--rope works only with --past, because scaled RoPE is for sequences beyond the model's context",
            "Add, for example, --past 4.",
        )


def _require_positions(checkpoint: Checkpoint, width: int) -> None:
    """Raise UsageError where windows are longer than a table of positions."""
    positions = checkpoint.spec.positions
    if positions is not None and width > positions.length:
        raise UsageError(
            f"the position table of {checkpoint.reference} has only {positions.length:,} rows, but a "
            f"window has {width:,} tokens",
            "Leave out --past, or choose a smaller --context.",
        )
