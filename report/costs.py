"""What `params` tells beside its table: bytes, the key-value cache, FLOPs and memory, as sheets of figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ..analysis.costs import stated_context, usual_context
from ..analysis.figures import SCALES, Asked, Figures, fits
from ..spec import ModelSpec
from .sheets import Row, Sheet, binary, change, decimal, difference, whole_bytes

__all__ = ["cost_sheets"]

Told = tuple[str, ModelSpec, Figures]
"""A model's name, tree and figures."""

NOTHING = "–"
"""Where a model has no such figure."""

TOTAL, TOTAL_BINARY = "total", "total in GiB"
DENSE = ("scores, dense", "total, dense")
SIX_N = ("6N", "6N, no embedding")
CHECKPOINTED = ("checkpointed", "total, checkpointed")
LABELS = (
    *("attention", "feed-forward", "router", "head", "scores"),
    *("weights", "KV cache", "gradients", "Adam's moments", "fp32 weights", "activations"),
    *(TOTAL, TOTAL_BINARY, *DENSE, *SIX_N, *CHECKPOINTED),
)
"""In the order of their rows; the cache's, which are numbers of tokens, come as they are."""


@dataclass(frozen=True)
class _Column:
    """Figures under their labels, and how they are written."""

    name: str
    cells: Mapping[str, int]
    told: Callable[[str, int], str]


def cost_sheets(models: Sequence[Told], asked: Asked, compared: bool = False) -> list[Sheet]:
    """A sheet for each thing that was asked for.

    Of one model its cases stand side by side, of several the models; `compared` adds what the second has more or less
    than the first.
    """
    sheets = [
        *([_cache(models, asked, compared)] if asked.kv else []),
        *(_flops(models, asked, compared) if asked.flops else []),
        *(_memory(models, asked, compared) if asked.memory else []),
    ]
    sheets = [sheet for sheet in sheets if sheet.rows]  # none where no model has positions for so many tokens
    notes = [*_chosen(models, asked, compared), *_too_short(models, asked), *_beyond(models, asked, compared)]
    if asked.dtype in SCALES:
        notes.append(f"{asked.dtype}: {asked.dtype[3:]} bits a parameter, without the scales that go with them.")
    if not notes:
        return sheets
    last = sheets.pop() if sheets else Sheet("", (), ())
    return [*sheets, Sheet(last.title, last.columns, last.rows, (*last.notes, *notes))]


def _too_short(models: Sequence[Told], asked: Asked) -> list[str]:
    """Which models have no figures, and why."""
    notes = []
    for name, spec, figures in models:
        tokens = [*asked.kv, *([figures.context] if asked.flops or asked.memory else [])]
        if spec.positions is not None and max(tokens, default=0) > spec.positions.length:
            notes.append(f"{NOTHING} {name}: positions for {spec.positions.length:,} tokens, no more.")
    return notes


def _chosen(models: Sequence[Told], asked: Asked, compared: bool) -> list[str]:
    """Why FLOPs and memory are told at this context, where nobody named one and it is not every model's own."""
    if asked.context is not None or not (asked.flops or asked.memory):
        return []
    context = models[0][2].context
    if all(stated_context(spec) == context for _, spec, _ in models):
        return []
    name, spec = next((name, spec) for name, spec, _ in models if usual_context(spec) == context)
    name = "the model" if compared else name
    if stated_context(spec) is None:
        why = f"{name} states no context"
    else:
        why = f"the context of {name}, the shorter of the two" if len(models) == 2 else ""
        why = why or f"the context of {name}, the shortest of these"
    return [f"{context:,} tokens: {why}; --context sets another."]


def _beyond(models: Sequence[Told], asked: Asked, compared: bool) -> list[str]:
    """Which contexts a model has figures for and was not made for."""
    notes: dict[str, None] = {}
    for name, spec, figures in models:
        tokens = [*asked.kv, *([figures.context] if asked.flops or asked.memory else [])]
        own = stated_context(spec)
        more = sorted({each for each in tokens if own is not None and each > own and fits(spec, each)})
        if more:
            whose = "the model's" if compared else f"{name}'s"
            notes[f"{' and '.join(f'{each:,}' for each in more)} tokens: beyond {whose} context of {own:,}."] = None
    return list(notes)


def _sheet(title: str, columns: Sequence[_Column], compared: bool, notes: Sequence[str], empty: str = NOTHING) -> Sheet:
    """Columns of figures below one another's labels; a total is ruled off, and what is beside it is dim."""
    there = dict.fromkeys(label for column in columns for label in column.cells)
    labels = sorted(there, key=lambda label: LABELS.index(label) if label in LABELS else -1)
    rows = []
    for label in labels:
        numbers = [column.cells.get(label) for column in columns]
        cells = [
            empty if number is None else column.told(label, number)
            for column, number in zip(columns, numbers, strict=True)
        ]
        if compared:
            cells += _changed(label, columns)
        style = "bold" if label == TOTAL else "dim" if label in (*DENSE, *SIX_N, *CHECKPOINTED) else None
        rows.append(Row(label, tuple(cells), style, ruled=label == TOTAL))
    names = [*(column.name for column in columns), *(["difference", "change"] if compared else [])]
    return Sheet(title, tuple(names), tuple(rows), tuple(notes))


def _changed(label: str, columns: Sequence[_Column]) -> list[str]:
    """What the second column has more or less. Of a component that one side lacks it has none; else nobody knows."""
    before, after = (column.cells.get(label) for column in columns)
    if None in (before, after) and (label not in LABELS or not all(column.cells for column in columns)):
        return ["", ""]
    told = partial(columns[0].told, label)
    return [difference(before or 0, after or 0, told), change(before or 0, after or 0)]


def _sequences(batch: int, tokens: int) -> str:
    return f"{tokens:,} tokens" if batch == 1 else f"{batch:,} × {tokens:,} tokens"


# --- the cache -------------------------------------------------------------------------------------------------------

A_TOKEN = "per token"


def _cache(models: Sequence[Told], asked: Asked, compared: bool) -> Sheet:
    def cells(figures: Figures) -> dict[str, int]:
        there = {each.context: each for each in figures.cache if each is not None}
        found = {} if figures.a_token is None else {A_TOKEN: figures.a_token}
        return found | {_sequences(asked.batch, tokens): each.held for tokens, each in there.items()}

    def exact(label: str, nbytes: int) -> str:
        return whole_bytes(nbytes) if label == A_TOKEN else decimal(nbytes, "B")

    windows = any(block.attention.window is not None for _, spec, _ in models for block in spec.blocks)
    notes = ["A layer with a window of w tokens holds w − 1 of them until the next comes."] if windows else []
    for name, _, figures in models:
        last = next((each for each in reversed(figures.cache) if each is not None), None)
        if last is not None and last.in_transformers not in (None, last.held):
            told = f"{decimal(last.in_transformers, 'B')} at {last.context:,} tokens"
            notes.append(f"transformers repeats {name}'s keys and values before its cache, which holds {told}.")
    columns = [_Column(name, cells(figures), _bytes) for name, _, figures in models]
    if len(models) == 1:
        (only,) = columns
        columns = [
            _Column("bytes", only.cells, exact),
            _Column("in KiB, GiB", only.cells, lambda _, nbytes: binary(nbytes)),
        ]
    return _sheet(f"KV cache, {asked.cached}", columns, compared, notes)


def _bytes(label: str, nbytes: int) -> str:
    return binary(nbytes) if label == TOTAL_BINARY else decimal(nbytes, "B")


# --- FLOPs -----------------------------------------------------------------------------------------------------------


def _flops(models: Sequence[Told], asked: Asked, compared: bool) -> list[Sheet]:
    context = models[0][2].context
    where = _sequences(asked.batch, context)
    notes = [
        f"Next token: one that sees {context:,} tokens, itself among them.",
        f"Prefill: {where} read at once. Training step: that, forward and backward, 3 × prefill.",
        "Scores: queries × keys and weights × values, as far as the causal mask and windows need them; dense: each"
        " token with each, as kernels compute that skip nothing.",
        "6N: 6 × parameters that a token meets × tokens, the usual estimate of a training step.",
    ]
    kinds = {"next token": _token, "prefill": _prefill, "training step": _training}
    if len(models) == 1:
        columns = [_Column(kind, cells(models[0][2]), _flop) for kind, cells in kinds.items()]
        return [_sheet(f"FLOPs for {where}", columns, False, notes, empty="")]
    titles = ("the next token", f"a prefill of {where}", f"a training step on {where}")
    return [
        _sheet(
            f"FLOPs of {title}", [_Column(name, cells(figures), _flop) for name, _, figures in models], compared, told
        )
        for title, cells, told in zip(titles, kinds.values(), (notes[:1], (), notes[1:]), strict=True)
    ]


def _flop(_: str, number: int) -> str:
    return decimal(number, "FLOP")


def _token(figures: Figures) -> dict[str, int]:
    found = figures.token
    return {} if found is None else {**found.flops, TOTAL: found.total_flops}


def _prefill(figures: Figures) -> dict[str, int]:
    found = figures.prefill
    if found is None:
        return {}
    dense = dict(zip(DENSE, (found.scores, found.dense), strict=True))
    return {**found.products, "scores": found.needed_scores, TOTAL: found.causal, **dense}


def _training(figures: Figures) -> dict[str, int]:
    found = figures.training
    if found is None:
        return {}
    estimates = zip(SIX_N, (found.six_n, found.six_n_non_embedding), strict=True)
    return {label: 3 * number for label, number in _prefill(figures).items()} | dict(estimates)


# --- memory ----------------------------------------------------------------------------------------------------------


def _memory(models: Sequence[Told], asked: Asked, compared: bool) -> list[Sheet]:
    where = _sequences(asked.batch, models[0][2].context)
    kinds = {"inference": _inference, "training": _adam}
    notes: dict[str, tuple[str, ...]] = dict.fromkeys(kinds, ())
    for _, _, figures in models:
        if figures.inference_memory is not None and figures.training_memory is not None:
            notes["inference"] = (f"Inference: {'; '.join(figures.inference_memory.assumed)}.",)
            notes["training"] = (
                f"Training: {'; '.join(figures.training_memory.assumed)}.",
                "Checkpointed: every layer's activations are made again for the backward pass, not kept.",
            )
    if len(models) == 1:
        columns = [_Column(kind, cells(models[0][2]), _bytes) for kind, cells in kinds.items()]
        return [_sheet(f"Memory for {where}", columns, False, [*notes["inference"], *notes["training"]], empty="")]
    titles = (f"Memory to run on {where}", f"Memory to train with Adam on {where}")
    return [
        _sheet(title, [_Column(name, cells(figures), _bytes) for name, _, figures in models], compared, notes[kind])
        for title, (kind, cells) in zip(titles, kinds.items(), strict=True)
    ]


def _inference(figures: Figures) -> dict[str, int]:
    found = figures.inference_memory
    if found is None:
        return {}
    parts = {"weights": found.weights, "KV cache": found.cache, "activations": found.activations}
    return {**parts, TOTAL: found.total, TOTAL_BINARY: found.total}


def _adam(figures: Figures) -> dict[str, int]:
    found = figures.training_memory
    if found is None:
        return {}
    checkpointed = dict(zip(CHECKPOINTED, (found.checkpointed, found.total_checkpointed), strict=True))
    return {
        "weights": found.weights,
        "gradients": found.gradients,
        "Adam's moments": found.moments,
        **({"fp32 weights": found.master} if found.master else {}),
        "activations": found.activations,
        TOTAL: found.total,
        TOTAL_BINARY: found.total,
        **checkpointed,
    }
