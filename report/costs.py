"""What `params` tells beside its table: bytes, the key-value cache, FLOPs and memory, as sheets of figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ..analysis.costs import stated_context, usual_context, windows
from ..analysis.figures import CostFigures, Scenario, fits
from ..analysis.formats import SCALES
from ..analysis.parameters import count
from ..analysis.params import ModelCount
from ..components import ModelSpec
from ..components.ranges import layer_ranges, range_label
from .quantities import binary_bytes, decimal, difference, percent_change, whole_bytes
from .sheets import Sheet, SheetRow

if TYPE_CHECKING:
    from ..analysis.costs import CacheSize
    from ..analysis.parallel import Stage


_Model = tuple[str, ModelSpec, CostFigures]  # a name, a tree and its figures
_Words = Callable[[str, int], str]  # how a figure under its label is written
_Column = tuple[str, Mapping[str, int], _Words]  # a name, figures under their labels, and how they are written
_NOTHING = "–"  # where a model has no such figure
_TOTAL, _TOTAL_BINARY = "total", "total in GiB"
_BESIDE = ("scores, dense", "total, dense", "6N", "6N, no embedding", "checkpointed", "total, checkpointed")
_LABELS = (
    *("attention", "feed-forward", "router", "head", "scores"),
    *("weights", "KV cache", "gradients", "Adam's moments", "fp32 weights", "gathered", "activations"),
    *(_TOTAL, _TOTAL_BINARY, *_BESIDE),
)
"""In the order of their rows; the cache's, which are numbers of tokens, come as they are."""


def cost_sheets(counts: Sequence[ModelCount], asked: Scenario, compared: bool = False) -> list[Sheet]:
    """A sheet for each thing asked for, models side by side; `compared` adds what the second has more or less."""
    models = [(each.name, each.spec, each.figures) for each in counts if each.figures is not None]
    sheets = [
        *([_cache(models, asked, compared)] if asked.kv else []),
        *(
            [_allocated(models[0][0], bool(windows(models[0][1])), models[0][2].cache)]
            if asked.kv and len(models) == 1
            else []
        ),
        *(_flops(models, asked, compared) if asked.flops else []),
        *(_memory(models, asked, compared) if asked.memory else []),
        *(
            [_allocated(models[0][0], bool(windows(models[0][1])), models[0][2].cache)]
            if asked.memory and not asked.kv and len(models) == 1
            else []
        ),
        *([_formats(models)] if asked.memory and not compared else []),
        *(_explained(models) if asked.explain else []),
        *([_fits(models, asked)] if asked.gpu is not None else []),
        *([_split(models, asked)] if asked.spread else []),
    ]
    sheets = [sheet for sheet in sheets if sheet.rows]  # none where no model has positions for so many tokens
    notes = _context_notes(models, asked, compared)
    if asked.dtype in SCALES:
        notes.append(f"{asked.dtype}: {asked.dtype[3:]} bits per parameter, without quantisation scales.")
    if not notes:
        return sheets
    last = sheets.pop() if sheets else Sheet("", (), ())
    return [*sheets, replace(last, notes=(*last.notes, *notes))]


def _context_notes(models: Sequence[_Model], asked: Scenario, compared: bool) -> list[str]:
    """Why figures are told at this context, which models have none there, and which were not made for it."""
    notes, context = [], models[0][2].context if models else 0
    chosen = asked.context is None and (asked.flops or asked.memory or asked.spread)
    if chosen and any(stated_context(spec) != context for _, spec, _ in models):
        name, spec = next((name, spec) for name, spec, _ in models if usual_context(spec) == context)
        name = "the model" if compared else name
        which = "shorter of the two" if len(models) == 2 else "shortest of these"
        why = f"the context of {name}, the {which}"
        why = f"{name} states no context" if stated_context(spec) is None else why
        notes.append(f"{context:,} tokens: {why}; --context sets another.")
    beyond: dict[str, None] = {}
    for name, spec, figures in models:
        lengths = [*asked.kv, *([figures.context] if asked.at_context else [])]
        if spec.positions is not None and max(lengths, default=0) > spec.positions.length:
            notes.append(f"{_NOTHING} {name} has only {spec.positions.length:,} positions.")
        own = stated_context(spec)
        more = sorted({each for each in lengths if own is not None and each > own and fits(spec, each)})
        if more:
            whose = "the model's" if compared else f"{name}'s"
            beyond[f"{' and '.join(f'{each:,}' for each in more)} tokens: beyond {whose} context of {own:,}."] = None
    return [*notes, *beyond]


def _sheet(
    title: str, columns: Sequence[_Column], compared: bool, notes: Sequence[str], empty: str = _NOTHING
) -> Sheet:
    """Columns of figures below one another's labels; a total is ruled off, and what is beside it is dim."""
    there = dict.fromkeys(label for _, cells, _ in columns for label in cells)
    rows = []
    for label in sorted(there, key=lambda label: _LABELS.index(label) if label in _LABELS else -1):
        numbers = [cells.get(label) for _, cells, _ in columns]
        words = [partial(told, label) for *_, told in columns]
        texts = [empty if number is None else told(number) for told, number in zip(words, numbers, strict=True)]
        if compared:
            # A component that one side lacks it has none of; whatever else is lacking nobody knows.
            unknown = label not in _LABELS or not all(cells for _, cells, _ in columns)
            before, after = (number or 0 for number in numbers)
            known = None not in numbers or not unknown
            texts += [difference(before, after, words[0]), percent_change(before, after)] if known else ["", ""]
        style = "bold" if label == _TOTAL else "dim" if label in _BESIDE else None
        rows.append(SheetRow(label, tuple(texts), style, ruled=label == _TOTAL))
    names = [*(name for name, *_ in columns), *(["difference", "change"] if compared else [])]
    return Sheet(title, tuple(names), tuple(rows), tuple(notes))


def _by_kind(
    title: str, kinds: Sequence[tuple[str, str, Sequence[str]]], models: Sequence[_Model], words: _Words, compared: bool
) -> list[Sheet]:
    """Of one model a sheet with a column a kind; of several a sheet a kind. kinds: (name, own title, notes)."""
    if len(models) == 1:
        columns = [(kind, _cells(models[0][2]).get(kind, {}), words) for kind, _, _ in kinds]
        return [_sheet(title, columns, False, [note for *_, notes in kinds for note in notes], empty="")]
    sheets = []
    for kind, own_title, notes in kinds:
        columns = [(name, _cells(figures).get(kind, {}), words) for name, _, figures in models]
        sheets.append(_sheet(own_title, columns, compared, notes))
    return sheets


def _sequences(batch: int, tokens: int) -> str:
    return f"{tokens:,} tokens" if batch == 1 else f"{batch:,} × {tokens:,} tokens"


def _cache(models: Sequence[_Model], asked: Scenario, compared: bool) -> Sheet:
    columns: list[_Column] = []
    windowed = any(windows(spec) for _, spec, _ in models)
    notes = ["A layer with a window of w tokens caches w − 1 of them."] if windowed else []
    both = [name for name, spec, _ in models if not spec.causal]
    if both:
        notes.append(f"{' and '.join(both)}: attention in both directions needs no cache.")
    if any(spec.encoder is not None for _, spec, _ in models):
        notes.append("With an encoder, the cache also has keys and values of a source with as many tokens.")
    for name, _, figures in models:
        sizes = [each for each in figures.cache if each is not None]
        cells = {} if figures.a_token is None else {_A_TOKEN: figures.a_token}
        cells |= {_STATES: sizes[0].states} if sizes and sizes[0].states else {}
        cells |= {_sequences(asked.batch, each.context): each.held for each in sizes}
        cells |= {f"of these the source's {each.context:,}": each.of_source for each in sizes if each.of_source}
        columns.append((name, cells, _bytes))
        if sizes and sizes[-1].in_transformers not in (None, sizes[-1].held):
            holds = f"{decimal(sizes[-1].in_transformers, 'B')} at {sizes[-1].context:,} tokens"
            notes.append(f"transformers repeats the keys and values of {name} before it caches them: {holds}.")

    return _sheet(f"KV cache, {asked.cached}", _alone(columns[0][1]) if len(models) == 1 else columns, compared, notes)


_A_TOKEN = "per token"
_STATES = "states, however long"


def _alone(held: Mapping[str, int]) -> list[_Column]:
    """The columns of one model's cache."""

    def exact(label: str, nbytes: int) -> str:
        return whole_bytes(nbytes) if label == _A_TOKEN else decimal(nbytes, "B")

    return [("bytes", held, exact), ("in KiB, GiB", held, lambda label, nbytes: binary_bytes(nbytes))]


def named_cache(model: ModelCount) -> list[Sheet]:
    """The cache of a model of an unknown family, as its config.json tells it."""
    sizes = model.named.cache if model.named is not None else ()
    if not sizes:
        return []
    held = {_A_TOKEN: sizes[0].a_token} | {_sequences(each.batch, each.context): each.held for each in sizes}
    windowed = any(each.held < each.a_token * each.batch * each.context for each in sizes)
    note = ["From config.json alone: kinds of layers, heads, windows, ranks of latents and sizes of states."]
    return [_sheet(f"KV cache, {sizes[0].dtype}", _alone(held), False, note), _allocated(model.name, windowed, sizes)]


def _allocated(name: str, windowed: bool, sizes: Sequence[CacheSize | None]) -> Sheet:
    """The cache as programs allocate it, a row a context."""
    rows = []
    for size in sizes:
        if size is not None:
            cells = [size.in_transformers, size.in_vllm, size.in_llama_cpp]
            words = tuple(_NOTHING if nbytes is None else decimal(nbytes, "B") for nbytes in cells)
            rows.append(SheetRow(_sequences(size.batch, size.context), words))
    of_kinds = (", layers alike in padded groups", ", windows with the 512 tokens of a batch") if windowed else ("", "")
    notes = ["vLLM: blocks of 16 tokens{}. llama.cpp: float16, contexts padded to 256{}.".format(*of_kinds)]
    if any(size is not None and size.in_llama_cpp is None for size in sizes):
        notes.append(f"{_NOTHING} gptkit knows no architecture of llama.cpp that has the cache of {name}.")
    return Sheet("KV cache as programs allocate it", ("transformers", "vLLM", "llama.cpp"), tuple(rows), tuple(notes))


def _bytes(label: str, nbytes: int) -> str:
    return binary_bytes(nbytes) if label == _TOTAL_BINARY else decimal(nbytes, "B")


def _flops(models: Sequence[_Model], asked: Scenario, compared: bool) -> list[Sheet]:
    context = models[0][2].context
    where = _sequences(asked.batch, context)
    notes = [
        f"Next token: it attends to {context:,} tokens, itself included.",
        f"Prefill: {where} in one forward pass. Training step: forward and backward, 3 × prefill.",
        "Scores: queries × keys and weights × values, only where the causal mask and windows allow them; dense: for"
        " all pairs of tokens, as in kernels that skip none.",
        "6N: 6 × parameters used per token × tokens, the usual estimate of a training step.",
    ]
    if any(spec.encoder is not None for _, spec, _ in models):
        notes.append(
            "With an encoder, a source of as many tokens is encoded once; the next token runs only the decoder."
        )
    kinds = (
        ("next token", "FLOPs of the next token", notes[:1]),
        ("prefill", f"FLOPs of a prefill of {where}", notes[:0]),
        ("training step", f"FLOPs of a training step on {where}", notes[1:]),
    )
    return _by_kind(f"FLOPs for {where}", kinds, models, lambda _, number: decimal(number, "FLOP"), compared)


def _memory(models: Sequence[_Model], asked: Scenario, compared: bool) -> list[Sheet]:
    where = _sequences(asked.batch, models[0][2].context)
    running, training = [], []
    for _, _, figures in models:
        if figures.inference_memory is not None and figures.training_memory is not None:
            running = [f"Inference: {'; '.join(figures.inference_memory.assumed)}."]
            training = [f"Training: {'; '.join(figures.training_memory.assumed)}."]
            if asked.fsdp > 1:
                training += [
                    "Gathered: parameters of two layers and outside layers, gradients of one layer and outside layers."
                ]
            training += ["Checkpointed: every layer's activations are recomputed for the backward pass, not stored."]
    kinds = [("inference", f"Memory to run on {where}", running)]
    kinds += [("training", f"Memory to train with Adam on {where}", training)]
    return _by_kind(f"Memory for {where}", kinds, models, _bytes, compared)


def _cells(figures: CostFigures) -> dict[str, dict[str, int]]:
    """The figures of each kind, by label; no kind that the model has none of."""
    cells: dict[str, dict[str, int]] = {}
    token, prefill, step = figures.token, figures.prefill, figures.training
    if token is not None:
        cells["next token"] = {**token.flops, _TOTAL: token.total_flops}
    if prefill is not None:
        dense = {"scores, dense": prefill.scores, "total, dense": prefill.dense}
        cells["prefill"] = {**prefill.products, "scores": prefill.needed_scores, _TOTAL: prefill.causal, **dense}
    if step is not None:
        estimates = {"6N": step.six_n, "6N, no embedding": step.six_n_non_embedding}
        cells["training step"] = {name: 3 * number for name, number in cells["prefill"].items()} | estimates
    running, training = figures.inference_memory, figures.training_memory
    if running is not None:
        cells["inference"] = _parts(running.weights, running.cache, running.activations, running.total)
    if training is not None:
        cells["training"] = {
            "weights": training.weights,
            "gradients": training.gradients,
            "Adam's moments": training.moments,
            **({"fp32 weights": training.master} if training.master else {}),
            **({"gathered": training.gathered} if training.gathered else {}),
            "activations": training.activations,
            _TOTAL: training.total,
            _TOTAL_BINARY: training.total,
            "checkpointed": training.checkpointed,
            "total, checkpointed": training.total_checkpointed,
        }
    return cells


def _parts(weights: int, cache: int, activations: int, total: int) -> dict[str, int]:
    return {"weights": weights, "KV cache": cache, "activations": activations, _TOTAL: total, _TOTAL_BINARY: total}


def _formats(models: Sequence[_Model]) -> Sheet:
    """The weights in other formats: of one model with its bits a weight, else a column a model."""
    rows, alone = [], len(models) == 1
    for name in dict.fromkeys(name for _, _, figures in models for name in figures.formats or ()):
        cells = []
        for _, spec, figures in models:
            nbytes = (figures.formats or {}).get(name)
            words = [_NOTHING] * 3
            if nbytes is not None:
                words = [decimal(nbytes, "B"), binary_bytes(nbytes), f"{8 * nbytes / count(spec).total:.2f}"]
            cells += words if alone else words[:1]
        rows.append(SheetRow(name, tuple(cells)))
    columns = ("bytes", "in powers of 1024", "bits a weight") if alone else tuple(name for name, *_ in models)
    lacking = [name for name, _, figures in models if None in (figures.formats or {}).values()]
    notes = [
        "nf4: as transformers loads it with bitsandbytes, with quantised scales; only linear layers outside of experts"
        " are nf4, and the rest is bfloat16.",
        "q8_0, q4_k_m, q4_0: each tensor as llama-quantize stores it, scales included, without the file's vocabulary.",
    ]
    notes += [f"{_NOTHING} {', '.join(lacking)}: llama.cpp has no type for some of its tensors."] if lacking else []
    return Sheet("Weights in other formats", columns, tuple(rows), tuple(notes))


def _explained(models: Sequence[_Model]) -> list[Sheet]:
    sheets = []
    for name, _, figures in models:
        total = figures.explained
        if total is not None:
            rows = [SheetRow(each.label, (each.formula, f"{each.value:,}")) for each in total.terms]
            rows.append(SheetRow(_TOTAL, (total.formula, f"{total.total:,}"), "bold", ruled=True))
            for index, letter in enumerate(total.symbols):
                rows.append(SheetRow(letter.name, (letter.meaning, f"{letter.value:,}"), "dim", ruled=not index))
            title = "The total as a formula" if len(models) == 1 else f"The total of {name} as a formula"
            sheets.append(Sheet(title, ("formula", "parameters"), tuple(rows), words=1))
    return sheets


def _fits(models: Sequence[_Model], asked: Scenario) -> Sheet:
    """Of one model a row a dtype; of several the longest context, a column a model."""
    there = {name: figures.fits for name, _, figures in models if figures.fits is not None}
    if not there or asked.gpu is None:
        return Sheet("", (), ())
    first, rows, alone = next(iter(there.values())), [], len(models) == 1
    for dtype in dict.fromkeys(row.dtype for fitting in there.values() for row in fitting.rows):
        cells: list[str] = []
        for name, _, _ in models:
            row = next((row for row in there[name].rows if row.dtype == dtype), None) if name in there else None
            words = [f"{number:,}" if number else _NOTHING for number in ((row.context, row.batch) if row else (0, 0))]
            left = _NOTHING if row is None or row.left is None else decimal(row.left, "B")
            cells += [decimal(row.weights, "B"), *words, left] if alone and row is not None else words[:1]
        rows.append(SheetRow(dtype, tuple(cells)))
    own = ("weights", "longest context", f"batch of {first.context:,}", "left over")
    columns = own if alone else tuple(name for name, *_ in models)
    what = "What fits" if alone else "The longest context that fits"
    size, equal = _card(asked.gpu)
    title = f"{what} in a {size} card ({equal})"
    if asked.spread:
        title = f"{what} on {asked.tp * asked.pp:,} cards of {size} ({equal})"
    sequences = "one sequence" if first.batch == 1 else f"{first.batch:,} sequences"
    notes = [
        f"Longest context: tokens of {sequences} in one forward pass, at most the model's context;"
        f" {_NOTHING} if none fits.",
        *([_batch_note(first.context, asked)] if alone else []),
        "Counted are weights, the KV cache and activations. Nothing is reserved for the runtime, which takes 0.5 to"
        " 2 GB more.",
    ]
    if asked.spread and asked.dtype is None:
        notes.append("int8 and int4: without quantisation scales.")
    return Sheet(title, columns, tuple(rows), tuple(notes))


def _card(nbytes: int) -> tuple[str, str]:
    """Return the size by which a card is sold, such as 24 GB, and the same in GiB and in powers of 1000."""
    gib = f"{nbytes / 2**30:.4g}"
    if float(gib) * 2**30 != nbytes:
        return decimal(nbytes, "B"), binary_bytes(nbytes)
    return f"{gib} GB", f"{gib} GiB = {decimal(nbytes, 'B')}"


def _batch_note(context: int, asked: Scenario) -> str:
    """Explain the columns about the batch."""
    note = f"Batch: the most sequences of {context:,} tokens that fit"
    note += "" if asked.context is not None else " (--context sets another number of tokens)"
    return f"{note}. Left over: the memory that this batch leaves free, which is too little for one more."


def _split(models: Sequence[_Model], asked: Scenario) -> Sheet:
    """Of one model a column a stage, equal neighbours folded; of several the fullest GPU of each."""

    def cells(stage: Stage) -> dict[str, int]:
        return _parts(stage.weight, stage.cache, stage.activations, stage.total)

    columns: list[_Column] = []
    notes, several = [], len(models) > 1
    for name, _, figures in models:
        split = figures.split
        if split is None or several:
            columns.append((name, {} if split is None else cells(split.fullest), _bytes))
        if split is None:
            continue
        for first, last, same in [] if several else layer_ranges(map(cells, split.stages)):
            columns.append(("each GPU" if split.pp == 1 else f"stage {range_label(first, last)}", same, _bytes))
        notes += [f"{name}: {note}" if several else note for note in split.notes]
        notes.append(f"{name if several else 'Together'}: {decimal(split.together, 'B')} of weights on all GPUs.")
    notes.append("Split as in Megatron-LM (1909.08053); communication buffers are not counted.")
    gpus = f"{asked.tp * asked.pp:,} GPUs (tp {asked.tp}, pp {asked.pp})"
    title = f"Memory on each of {gpus}, {asked.dtype or 'bfloat16'}, {_sequences(asked.batch, models[0][2].context)}"
    return _sheet(title + ", the fullest" * (several and asked.pp > 1), columns, False, notes)
