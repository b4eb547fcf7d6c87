"""Measure how well a model predicts texts, by the position in its context and beyond, and compared with another model.

Every file is a document, or every line of a .jsonl file. No window crosses the end of a document. A window of W tokens
predicts the W tokens that follow them, so that every token of a document but the first is predicted once. Standard
errors are computed from windows and not from tokens, because neighbouring tokens of a text are not independent. With
the sum of losses L and the number of tokens T of every window, the mean is ΣL / ΣT, and its variance is n / (n - 1) ·
Σ(L - mean · T)² / (ΣT)² for n windows, the ratio estimator for clusters.

Two models that read the same tokens are compared window by window. If their tokenizers differ, they are compared by
bytes: a token of the second model counts for the window of the first model in which the token ends.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from ..analysis.activations import Kernel
from ..analysis.costs import stated_context
from ..components import ModelSpec
from ..converter.checkpoint import Checkpoint, open_checkpoint
from ..converter.dtypes import Array
from ..converter.opening import Opening
from ..converter.threads import as_before, suit
from ..converter.tokenizer import Tokenizer, load_tokenizer
from ..display import Record, Shown
from ..errors import GptkitError, InvalidInput, UsageError
from ..modules.decoder import Decoder
from ..modules.devices import Devices, devices_of, in_float32
from ..modules.generate import outside_vocabulary
from ..modules.load import load_checkpoint
from ..modules.placement import connect
from ..parity.compare import perplexity
from ..parity.probe import TOGETHER, WINDOW
from ..signatures import takes
from ..surgery.registry import steps_named
from ..surgery.shapes import swapped
from .data import TextFile, boundary_ids, encode_piece, is_tokens, open_tokens, paths_of, require_tokenizer

MOST = 2048
"""The largest default number of tokens per window. The cost of attention grows with its square."""
_LOGITS = 2**22
"""The largest number of logits (tokens times vocabulary) that are computed at once, which limits the memory."""
_ENDS = slice(None, 1), slice(-1, None)
"""The slices of the first and of the last element."""


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class Estimate(Record):
    """A mean with its standard error."""

    value: float
    error: float | None
    """The standard error over windows; None with one window."""

    def as_json(self) -> dict[str, Any]:
        return {"value": _finite(self.value), "error": _finite(self.error)}


@dataclass(frozen=True)
class Bin(Record):
    """The results for a range of positions in the window. At every position, the model predicts the next token."""

    first: int
    """The first position, counted from 0."""
    last: int
    """The last position."""
    tokens: int
    """The number of predictions."""
    nats: Estimate
    """The loss in nats per token."""
    top_k: Mapping[int, Estimate]
    """For every k, the share of predictions in which the true token is among the k most likely."""


@dataclass(frozen=True)
class Curve(Record):
    """The loss and the accuracy of a model by the position in the window."""

    name: str
    """The name of the model."""
    context: int | None
    """The context length that the model's config states, or None."""
    width: int
    """Tokens per window."""
    bins: tuple[Bin, ...]
    """The results for the ranges of positions, in ascending order."""


@dataclass(frozen=True)
class Score(Record):
    """The loss and accuracy of a model on the texts."""

    JSON = "reference tokens windows bytes nats perplexity=finite_perplexity bits_per_byte top_k curve"

    reference: str
    """The model as the user named it, such as a path or a repository on the hub."""
    tokens: int
    """The number of predicted tokens."""
    windows: int
    """The number of windows."""
    bytes: int
    """The size of the predicted text in UTF-8, in bytes."""
    nats: Estimate
    """The loss in nats per token."""
    perplexity: float
    """The perplexity: e to the power of the loss in nats per token."""
    bits_per_byte: Estimate
    """The loss in bits per byte of the text."""
    top_k: Mapping[int, Estimate]
    """For every k, the share of predictions in which the true token is among the k most likely."""
    curve: Curve
    """The loss and accuracy by the position in the window."""

    @property
    def finite_perplexity(self) -> float | None:
        return _finite(self.perplexity)


@dataclass(frozen=True)
class Paired(Record):
    """The loss of a model minus that of another model on the same text."""

    difference: Estimate
    """The mean difference of the losses, in `unit`."""
    unit: str
    """"nats a token", or "bits a byte" if the models tokenise the text differently."""
    windows: int
    """The number of windows that are compared."""
    better: float
    """The share of windows in which the model has a smaller loss than the other."""
    worse: float
    """The share of windows in which the model has a larger loss than the other."""


@dataclass(frozen=True)
class Evaluation(Record, Shown):
    """The result of an evaluation."""

    JSON = "schema_version data documents context stride score against paired extrapolation notes"

    data: tuple[str, ...]
    """The paths of the texts."""
    documents: int
    """The number of documents."""
    context: int
    """Tokens per window."""
    stride: int
    """Tokens between the starts of two windows."""
    score: Score
    """The loss and accuracy of the model."""
    against: Score | None = None
    """The loss and accuracy of the other model, if there is one."""
    paired: Paired | None = None
    """The comparison of both models, if there is another one."""
    extrapolation: tuple[Curve, ...] = ()
    """The loss and accuracy by position, in windows that are longer than the context."""
    notes: tuple[str, ...] = ()
    """Sentences for the user about limits of these results, such as documents that are too short."""
    schema_version: int = field(default=1, repr=False)


# --- texts and windows ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Document:
    """The token ids of one document."""

    name: str
    ids: Array
    ends: Array  # the end of every token, in bytes of the text


def _documents(path: Path, tokenizer: Tokenizer | None, checkpoint: Checkpoint) -> list[_Document]:
    """Return the documents of a text file, or of a folder of tokens that were made with the checkpoint's tokenizer."""
    if is_tokens(path):
        return _stored_documents(path, tokenizer, checkpoint.reference)
    if tokenizer is None:
        raise UsageError(
            f"{checkpoint.reference} has no tokenizer, so gptkit cannot read the text {path}",
            "Tokenise the text first, and give the folder to --data: gptkit tokenize FILE FOLDER --tokenizer MODEL",
        )
    before, _ = boundary_ids(tokenizer, ())
    documents, ids, ends = list[_Document](), list[int](), list[Array]()
    size = 0
    for text, last in TextFile(path).pieces():
        new, token_ends = encode_piece(tokenizer, text, not ids)
        characters = np.frombuffer(text.encode("utf-32-le"), "<u4")
        sizes = 1 + (characters >= 0x80) + (characters >= 0x800) + (characters >= 0x10000)  # in UTF-8
        byte_ends = np.concatenate(([0], np.cumsum(sizes)))
        if new:
            ids += [*([] if ids else before), *new]
            ends += [np.zeros(0 if ends else len(before)), size + np.maximum.accumulate(byte_ends[token_ends])]
        size += int(byte_ends[-1])
        if last:
            all_ends = np.concatenate(ends) if ends else np.zeros(0)
            all_ends[-1:] = size
            name = f"{path}" if path.suffix != ".jsonl" else f"{path}, document {len(documents) + 1:,}"
            documents.append(_Document(name, np.array(ids, np.int64), all_ends))
            ids, ends, size = [], [], 0
    return documents


def _stored_documents(folder: Path, tokenizer: Tokenizer | None, model: str) -> list[_Document]:
    """Return the documents of a folder of tokens.

    Such a folder does not store how many bytes of text a token has, so gptkit assumes the same number for all tokens.
    """
    tokens = open_tokens(folder)
    if tokenizer is not None:
        require_tokenizer(tokens, model, tokenizer)
    bytes_per_token, first, documents = tokens.bytes / tokens.tokens, 0, []
    for number, end in enumerate(tokens.ends.tolist(), 1):
        ids = tokens.read(first, end - first)
        documents.append(_Document(f"{folder}, document {number:,}", ids, bytes_per_token * np.arange(1, len(ids) + 1)))
        first = end
    return documents


def _read(checkpoint: Checkpoint, files: Sequence[Path]) -> list[_Document]:
    """Return the documents of all files.

    Raises:
        InvalidInput: all documents have fewer than two tokens.
        UsageError: a document has ids beyond the model's vocabulary.
    """
    tokenizer, rows = load_tokenizer(checkpoint.folder, checkpoint.texts), checkpoint.spec.vocab_size
    documents = [document for path in files for document in _documents(path, tokenizer, checkpoint)]
    for document in documents:
        if (outside := document.ids[document.ids >= rows]).size:
            ids = np.unique(outside).tolist()
            raise outside_vocabulary(
                ids, rows, f"They are in {document.name}. Check that the tokenizer belongs to this model."
            )
    if not any(len(document.ids) > 1 for document in documents):
        raise InvalidInput(
            f"{', '.join(map(str, files))}: every text has fewer than two tokens, so nothing can be predicted",
            "Give a longer text.",
        )
    return documents


@dataclass(frozen=True)
class _Window:
    """A sequence of tokens in a document that a model reads at once."""

    document: int  # the number of the document
    first: int  # the first token that the model reads
    length: int  # the number of tokens that the model reads
    counted: int  # the number of predictions that count, at the end of the window; earlier windows have the others


def _windows(documents: Sequence[_Document], width: int, stride: int) -> list[_Window]:
    """Return windows of at most `width` tokens, each of which starts `stride` tokens after the previous one.

    Every token of a document but the first is predicted once, in the first window that reaches it.
    """
    windows = []
    for number, document in enumerate(documents):
        first = done = 0
        while done < len(document.ids) - 1:
            length = min(width, len(document.ids) - 1 - first)
            windows.append(_Window(number, first, length, first + length - done))
            done, first = first + length, first + stride
    return windows


# --- predictions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Predictions:
    """The losses and ranks of all predictions that a model makes in windows of text, in the order of the text.

    Every token of a document except the first is predicted once.
    """

    name: str
    spec: ModelSpec
    documents: Sequence[_Document]
    windows: Sequence[_Window]
    losses: Array  # the loss of every prediction, in nats
    rank: Array  # for every prediction, the number of tokens that are more likely than the true one

    def _by_prediction(self, values: Callable[[_Window], Array]) -> Array:
        return np.concatenate([values(window) for window in self.windows])

    @cached_property
    def window(self) -> Array:
        """For every prediction, the index of its window in `windows`."""
        return np.repeat(np.arange(len(self.windows)), [window.counted for window in self.windows])

    @cached_property
    def position(self) -> Array:
        """For every prediction, its position in its window."""
        return self._by_prediction(lambda window: np.arange(window.length - window.counted, window.length))

    def ends(self, token: int) -> Array:
        """Return, for every prediction, the number of bytes of the document up to the end of a token.

        This token is the predicted one if `token` is 1, and the token before it if `token` is 0.
        """

        def ends_in(window: _Window) -> Array:
            last = window.first + window.length + token
            return self.documents[window.document].ends[last - window.counted : last]

        return self._by_prediction(ends_in)

    def estimate(self, values: Array, sizes: Array | None = None, where: Array | slice = slice(None)) -> Estimate:
        """Return the mean of `values`, which has one value per prediction, with its standard error.

        Args:
            values: one value per prediction.
            sizes: if given, one size per prediction. The result is then Σ values / Σ sizes.
            where: an index that selects the predictions to use; by default all.
        """
        weights = None if sizes is None else sizes[where]
        sums, totals = (np.bincount(self.window[where], window_weights) for window_weights in (values[where], weights))
        return ratio(sums, totals)

    def top(self, ks: Sequence[int], where: Array | slice = slice(None)) -> dict[int, Estimate]:
        """Return, for every k in `ks`, the share of predictions in which the true token is among the k most likely.

        `where` is an index that selects the predictions to use.
        """
        return {k: self.estimate(1.0 * (self.rank < k), where=where) for k in ks}

    def curve(self, edges: Sequence[int], width: int, ks: Sequence[int]) -> Curve:
        """Return the loss and the accuracy for ranges of positions in the window. Empty ranges are left out.

        Args:
            edges: the first position of every range, in ascending order.
            width: tokens per window.
            ks: the values of k for top-k accuracy.
        """
        bins = []
        for first, end in zip(edges, [*edges[1:], width], strict=True):
            where = (self.position >= first) & (self.position < end)
            if count := int(where.sum()):
                last = int(self.position[where].max())
                bins.append(Bin(first, last, count, self.estimate(self.losses, where=where), self.top(ks, where)))
        return Curve(self.name, stated_context(self.spec), width, tuple(bins))

    def score(self, width: int, ks: Sequence[int]) -> Score:
        """Return the loss and accuracy of the model. `width` is the number of tokens per window."""
        nbytes, nats = self.ends(1) - self.ends(0), self.estimate(self.losses)
        return Score(
            reference=self.name,
            tokens=len(self.losses),
            windows=len(self.windows),
            bytes=round(nbytes.sum()),
            nats=nats,
            perplexity=perplexity(torch.tensor(nats.value)),
            bits_per_byte=self.estimate(self.losses / math.log(2), nbytes),
            top_k=self.top(ks),
            curve=self.curve(_doubling(width), width, ks),
        )


def ratio(sums: Array, sizes: Array) -> Estimate:
    """Return Σ sums / Σ sizes, with the standard error that the docstring of this module explains.

    Both arrays have one element per window.
    """
    sums, sizes = sums[sizes > 0], sizes[sizes > 0]
    count, total = len(sizes), sizes.sum()
    mean = float(sums.sum() / total) if count else math.nan
    if count < 2:
        return Estimate(mean, None)
    return Estimate(mean, math.sqrt(count / (count - 1) * np.square(sums - mean * sizes).sum()) / float(total))


def _doubling(width: int) -> list[int]:
    """Return the first positions of the ranges for results by position: 0, 1, 2, 4, … below `width`."""
    return [0, *(2**power for power in range((width - 1).bit_length()))]


def _edges_beyond(context: int, width: int) -> list[int]:
    """Return the first positions of the ranges for results by position, in windows longer than the context.

    They are 0, 1, 2, 4, … within the context, and then every half context up to `width`, the length of a window.
    """
    return [*_doubling(context), *range(context, width, max(context // 2, 1))]


def _predict(
    name: str, model: Decoder, documents: Sequence[_Document], windows: Sequence[_Window], tell: Callable[[str], None]
) -> _Predictions:
    """Run a model on windows, and return its predictions. Raise GptkitError if its logits are NaN.

    `tell` is called with a line about the progress, which names the model `name`.
    """
    device, losses, ranks, done = model.embedding.weight.device, list[Tensor](), list[Tensor](), 0
    for length, same_length in groupby(windows, key=lambda window: window.length):
        group, together = list(same_length), max(1, TOGETHER // length)
        for start in range(0, len(group), together):
            batch = group[start : start + together]
            rows = np.stack([documents[item.document].ids[item.first : item.first + length + 1] for item in batch])
            ids = torch.from_numpy(rows).to(device)
            states = states_of(model, ids[:, :-1])
            for row, window in enumerate(batch):
                counted = slice(length - window.counted, length)
                for loss, rank in losses_and_ranks(model, states[row, counted], ids[row, 1:][counted]):
                    losses.append(loss.cpu())
                    ranks.append(rank.cpu())
                    if bool(losses[-1].isnan().any()):
                        raise GptkitError(
                            f"{name}: the logits for the text {documents[window.document].name} are NaN",
                            "The weights may be damaged, or activations may be too large for float16. Try --dtype "
                            "float32.",
                        )
            done += len(batch)
            tell(f"{name}: {done:,} of {len(windows):,} windows")
    return _Predictions(name, model.spec, documents, windows, torch.cat(losses).numpy(), torch.cat(ranks).numpy())


@torch.inference_mode()
def states_of(model: Decoder, ids: Tensor) -> Tensor:
    """Return the hidden states before the head, (B, T, hidden), for token ids (B, T).

    `losses_and_ranks` computes losses from them in small chunks, because the logits of a whole batch need much memory.
    """
    assert model.head is not None
    states: list[Tensor] = []

    def take(_: Any, inputs: Any) -> Any:
        states.append(inputs[0])
        return (inputs[0][:, :0], *inputs[1:])

    with model.head.register_forward_pre_hook(take):
        model(ids)
    return states[0]


@torch.inference_mode()
def losses_and_ranks(model: Decoder, states: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the loss in nats and the rank of every target, as a list with one pair of tensors per chunk of rows.

    The rank is the number of tokens that are more likely. Of equally likely tokens, those with a smaller id count as
    more likely.

    Args:
        model: the model, of which only the head runs here. Its logits are converted to float64.
        states: the hidden states before the head, (N, hidden).
        targets: the ids of the next tokens, (N,).
    """
    assert model.head is not None
    results, step = [], max(1, _LOGITS // model.spec.vocab_size)
    for part, target_ids in zip(torch.split(states, step), torch.split(targets, step), strict=True):
        logits = model.head(part, model.embedding.weight).double()
        target_ids = target_ids.to(logits.device)
        own = logits.gather(1, target_ids[:, None])
        before = torch.arange(logits.shape[1], device=logits.device) < target_ids[:, None]
        rank = ((logits > own) | (before & (logits == own))).sum(1)
        results.append((logits.logsumexp(1) - own[:, 0], rank))
    return results


# --- two models -------------------------------------------------------------------------------------------------------


def _compare(a: _Predictions, b: _Predictions) -> Paired:
    """Compare the losses of two models: the mean of a's loss minus b's loss, with a standard error over a's windows."""
    same = all(np.array_equal(x.ids, y.ids) for x, y in zip(a.documents, b.documents, strict=True))
    ours: Array
    theirs: Array
    if same:
        ours, theirs, sizes = (
            np.bincount(a.window, losses).astype(np.float64) for losses in (a.losses, b.losses, None)
        )
        unit = "nats a token"
    else:
        ours, theirs, sizes = _by_bytes(a, b)
        ours, theirs, unit = ours / math.log(2), theirs / math.log(2), "bits a byte"
    counted = sizes > 0
    ours, theirs, sizes = ours[counted], theirs[counted], sizes[counted]
    better, worse = float((ours < theirs).mean()), float((ours > theirs).mean())
    return Paired(ratio(ours - theirs, sizes), unit, len(sizes), better, worse)


def _by_bytes(a: _Predictions, b: _Predictions) -> tuple[Array, Array, Array]:
    """Return three arrays with a sum for every window of `a`: a's losses and b's losses in nats, and the bytes of text.

    The beginning of a document, up to the first token that both models predict, does not count.
    """
    both = list(zip(a.documents, b.documents, strict=True))
    firsts, sizes = (np.array([max([*x.ends[at], *y.ends[at]], default=0.0) for x, y in both]) for at in _ENDS)
    bases, of = np.cumsum(sizes) - sizes, np.array([window.document for window in a.windows])
    lasts = bases[of] + [a.documents[window.document].ends[window.first + window.length] for window in a.windows]
    sums = []
    for run in (a, b):
        document = np.repeat([window.document for window in run.windows], [window.counted for window in run.windows])
        begins, ends = run.ends(0), run.ends(1)
        places = np.minimum(np.searchsorted(lasts, bases[document] + ends), len(of) - 1)
        counts = (begins >= firsts[document]) & (of[places] == document)  # a document of one token has no window
        sums += [np.bincount(places, values * counts, len(of)) for values in (run.losses, ends - begins)]
    return sums[0], sums[2], sums[1]


# --- the evaluation ---------------------------------------------------------------------------------------------------


@as_before()
@in_float32()
@takes(Opening)
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
    device: Devices = "auto",
    allow_extra: bool = False,
    progress: Callable[[str], None] | None = None,
    **opening: Unpack[Opening],
) -> Evaluation:
    """Measure perplexity, bits per byte and top-k accuracy of a model on texts, also by position.

    Args:
        model: a checkpoint: a folder, a file, a sample, a preset, or a repository on the hub.
        data: text files in UTF-8, or folders that `tokenize` wrote. A file is one document, but every line of a .jsonl
            file is a document.
        against: another model, which reads the same texts in the same windows.
        context: tokens per window; by default the smaller context of both models, and at most 2,048.
        past: also evaluate windows that are this number of times longer than the context, to measure predictions beyond
            it. 1, the default, does not.
        stride: tokens between the starts of two windows; by default the whole window. A smaller stride gives every
            token more context, and takes longer.
        top_k: the values of k for the share of tokens that are among the k most likely.
        rope: a RoPE scaling, such as "yarn:4", to compare with the unscaled model beyond its context.
        dtype: the dtype of the computation.
        attention: "sdpa" or "eager".
        device: where to compute: "cpu", "cuda" or "cuda:1"; by default ("auto") on a GPU if there is one. Several
            devices, such as "cuda:0,cuda:1", divide the layers among them. TF32 is off.
        offline, allow_pickle: see `Opening`.
        allow_extra: ignore tensors that have no place in the model instead of refusing them.
        progress: called with a line about the progress of a model.

    Raises:
        InvalidInput: a file cannot be read as text, or no text has two tokens; also as in `open_checkpoint`.
        UsageError: a window is longer than the position table, a token is beyond the vocabulary, there is no tokenizer,
            a number is out of range, or the device is unknown or has no float64.
        SwapRefused: `rope` was given, but the model has no RoPE.
        MissingComponent: a model does not predict a next token.
        GptkitError: the logits are NaN.
    """
    paths, places = paths_of(data), devices_of(device, "eval")
    named = _opened(model, against, allow_extra=allow_extra, **opening)
    contexts = [min(stated_context(checkpoint.spec) or WINDOW, MOST) for checkpoint in named.values()]
    width = min(contexts) if context is None else context
    step = width if stride is None else stride
    _require(paths, width, past, step, top_k, rope)
    for checkpoint in named.values():
        _require_positions(checkpoint, width * past)
    scaled = {} if rope is None else _scaled(*next(iter(named.items())), rope)  # refuse it before anything is computed
    measuring = _Measuring(
        paths=paths, width=width, stride=step, past=past, top_k=top_k, dtype=dtype, attention=attention, device=places,
        tell=progress or (lambda _: None),
    )  # fmt: skip
    runs, curves = list[_Predictions](), list[Curve]()
    for name, checkpoint in named.items():
        predictions, beyond = measuring.run(name, checkpoint, {} if runs else scaled)
        runs.append(predictions)
        curves += beyond
    paired = _compare(*runs) if len(runs) == 2 else None
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


def _opened(
    model: str | Path, against: str | Path | None, *, allow_extra: bool, **opening: Unpack[Opening]
) -> dict[str, Checkpoint]:
    """Open one or two models, and return them by name. Raise MissingComponent if one does not predict a next token.

    If both have the same name, the names are changed so that they differ.
    """
    references = [reference for reference in (model, against) if reference is not None]
    checkpoints = [open_checkpoint(reference, allow_extra=allow_extra, **opening) for reference in references]
    for checkpoint in checkpoints:
        checkpoint.spec.predicts("eval")
        checkpoint.spec.one_stack("eval")
    suit(checkpoints[0].spec)
    names = [checkpoint.reference for checkpoint in checkpoints]
    if len(names) == 2 and names[0] == names[1]:
        names[1] += " (again)"
    return dict(zip(names, checkpoints, strict=True))


def _scaled(name: str, checkpoint: Checkpoint, rope: str) -> dict[str, ModelSpec]:
    """Return the architecture of a model with the RoPE scaling `rope`, such as "yarn:4".

    The key of the result is the name of the model with the name of the scaling. Raise SwapRefused if the model has no
    RoPE.
    """
    steps = steps_named("rope_scaling", rope)
    return {f"{name}, {rope}": swapped(checkpoint.spec, steps, checkpoint.origin.family, name).spec}


@dataclass(frozen=True, kw_only=True)
class _Measuring:
    """The settings with which models are run on the texts: the arguments of `evaluate`, with defaults filled in."""

    paths: Sequence[Path]
    width: int
    stride: int
    past: int
    top_k: Sequence[int]
    dtype: torch.dtype | str
    attention: Kernel
    device: Devices
    tell: Callable[[str], None]

    def run(
        self, name: str, checkpoint: Checkpoint, scaled: Mapping[str, ModelSpec]
    ) -> tuple[_Predictions, list[Curve]]:
        """Return the predictions of a model, and its results by position in windows longer than the context.

        The list has one `Curve` for the model itself, and one for every architecture in `scaled` (the model with a RoPE
        scaling). It is empty if `past` is 1.
        """
        documents = _read(checkpoint, self.paths)
        decoder = load_checkpoint(checkpoint, self.dtype, self.attention, device=self.device)
        windows = _windows(documents, self.width, self.stride)
        predictions, curves = _predict(name, decoder, documents, windows, self.tell), list[Curve]()
        if self.past > 1:
            curves.append(self._curve(name, decoder, documents))
            curves += [
                self._curve(scaled_name, _as_tree(decoder, spec, self.attention), documents)
                for scaled_name, spec in scaled.items()
            ]
        del decoder
        checkpoint.release()
        return predictions, curves

    def _curve(self, name: str, model: Decoder, documents: Sequence[_Document]) -> Curve:
        """Return the loss and accuracy by position, in windows that are `past` times longer than the context."""
        width = self.width * self.past
        run = _predict(name, model, documents, _windows(documents, width, width), self.tell)
        return run.curve(_edges_beyond(self.width, width), width, self.top_k)


def _notes(
    documents: Sequence[_Document], curves: Sequence[Curve], length: int, paired: Paired | None
) -> Iterator[str]:
    """Yield notes for the user, about documents that are too short and about models with different tokenizers.

    Args:
        documents: the documents, with the tokens of the first model.
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


def _as_tree(model: Decoder, spec: ModelSpec, attention: Kernel) -> Decoder:
    """Return a model with the architecture `spec` that shares the parameters of `model`, without a copy."""
    with torch.device("meta"):
        decoder = Decoder(spec, attention)
    decoder.load_state_dict(model.state_dict(), assign=True)
    if model.placement is not None:
        connect(decoder, model.placement)
    return decoder.eval()


def _require(paths: Sequence[Path], width: int, past: int, stride: int, top_k: Sequence[int], rope: str | None) -> None:
    """Raise UsageError if a number is out of range, and InvalidInput if a file does not exist."""
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
    """Raise UsageError if windows are longer than the model's position table."""
    positions = checkpoint.spec.positions
    if positions is not None and width > positions.length:
        raise UsageError(
            f"the position table of {checkpoint.reference} has only {positions.length:,} rows, but a "
            f"window has {width:,} tokens",
            "Leave out --past, or choose a smaller --context.",
        )
