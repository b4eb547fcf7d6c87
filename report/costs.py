"""The tables of costs that `params` prints (`sheets.Sheet`): bytes, the KV cache, FLOPs and memory."""

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
from .quantities import binary_bytes, decimal, decimal_bytes, difference, percent_change, whole_bytes
from .sheets import Sheet, SheetRow

if TYPE_CHECKING:
    from ..analysis.costs import CacheSize
    from ..analysis.parallel import Stage


_Costed = tuple[str, ModelSpec, CostFigures]  # a model's name, its component tree and its costs
_Words = Callable[[str, int], str]  # formats a figure, given its label
_Column = tuple[str, Mapping[str, int], _Words]  # a name, figures by label, and their format
_NOTHING = "–"  # stands for a figure that a model does not have
_TOTAL, _TOTAL_BINARY = "total", "total in GiB"
_ESTIMATES = ("scores, dense", "total, dense", "6N", "6N, no embedding", "checkpointed", "total, checkpointed")
_LABELS = (
    *("attention", "feed-forward", "router", "head", "scores"),
    *("weights", "KV cache", "gradients", "Adam's moments", "fp32 weights", "gathered", "activations"),
    *(_TOTAL, _TOTAL_BINARY, *_ESTIMATES),
)
"""The order of the rows. Rows of the cache, whose labels are numbers of tokens, keep their own order."""


def cost_sheets(counts: Sequence[ModelCount], asked: Scenario, compared: bool = False) -> list[Sheet]:
    """Return one table for every kind of cost that the user asked for, with one column per model.

    If `compared`, there are two models, and the tables also have their difference.
    """
    models = [(model.name, model.spec, model.figures) for model in counts if model.figures is not None]
    allocated = [_allocated(name, bool(windows(spec)), figures.cache) for name, spec, figures in models]
    allocated = allocated if len(models) == 1 else []
    sheets = [
        *([_cache(models, asked, compared), *allocated] if asked.kv else []),
        *(_flops(models, asked, compared) if asked.flops else []),
        *([*_memory(models, asked, compared), *([] if asked.kv else allocated)] if asked.memory else []),
        *([_formats(models)] if asked.memory and not compared else []),
        *(_explained(models) if asked.explain else []),
        *([_fits(models, asked)] if asked.gpu is not None else []),
        *([_split(models, asked)] if asked.spread else []),
    ]
    sheets = [sheet for sheet in sheets if sheet.rows]  # a sheet is empty if no model has enough positions
    notes = _context_notes(models, asked, compared)
    if asked.dtype in SCALES:
        notes.append(f"{asked.dtype}: {asked.dtype[3:]} bits per parameter, without quantisation scales.")
    if not notes:
        return sheets
    last = sheets.pop() if sheets else Sheet("", (), ())
    return [*sheets, replace(last, notes=(*last.notes, *notes))]


def _context_notes(models: Sequence[_Costed], asked: Scenario, compared: bool) -> list[str]:
    """Return notes that say why this context length was chosen, and which models do not support it.

    Args:
        models: the compared models.
        asked: the options of the command.
        compared: whether there are two models, of which the second is the first one after a swap.
    """
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
        longer = sorted({length for length in lengths if own is not None and length > own and fits(spec, length)})
        if longer:
            whose, tokens = "the model's" if compared else f"{name}'s", " and ".join(f"{n:,}" for n in longer)
            beyond[f"{tokens} tokens: beyond {whose} context of {own:,}."] = None
    return [*notes, *beyond]


def _sheet(
    title: str, columns: Sequence[_Column], compared: bool, notes: Sequence[str], empty: str = _NOTHING
) -> Sheet:
    """Return a table of the given columns, with one row for every label in any of them.

    Args:
        title: its title.
        columns: the heading of every column, its figures by row label, and the function that formats them.
        compared: add the difference between the two columns.
        notes: sentences below the table.
        empty: the text of a cell if the column has no figure for the row.
    """
    labels = dict.fromkeys(label for _, cells, _ in columns for label in cells)
    rows = []
    for label in sorted(labels, key=lambda label: _LABELS.index(label) if label in _LABELS else -1):
        numbers = [cells.get(label) for _, cells, _ in columns]
        formats = [partial(words, label) for *_, words in columns]
        texts = [empty if number is None else words(number) for words, number in zip(formats, numbers, strict=True)]
        if compared:
            # A missing component counts as 0. Any other missing figure is unknown.
            unknown = label not in _LABELS or not all(cells for _, cells, _ in columns)
            before, after = (number or 0 for number in numbers)
            known = None not in numbers or not unknown
            texts += [difference(before, after, formats[0]), percent_change(before, after)] if known else ["", ""]
        style = "bold" if label == _TOTAL else "dim" if label in _ESTIMATES else None
        rows.append(SheetRow(label, tuple(texts), style, ruled=label == _TOTAL))
    names = [*(name for name, *_ in columns), *(["difference", "change"] if compared else [])]
    return Sheet(title, tuple(names), tuple(rows), tuple(notes))


def _by_kind(
    title: str,
    kinds: Sequence[tuple[str, str, Sequence[str]]],
    models: Sequence[_Costed],
    words: _Words,
    compared: bool,
) -> list[Sheet]:
    """Return the tables of costs that have several kinds, such as the FLOPs of the next token and of a prefill.

    For one model, this is one table with a column per kind. For several models, it is one table per kind.

    Args:
        title: the title of the table for one model.
        kinds: the name of every kind, the title of its table for several models, and its notes.
        models: the models with their figures.
        words: the function that formats a figure, given its label.
        compared: add the difference between two models.
    """
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


def _cache(models: Sequence[_Costed], asked: Scenario, compared: bool) -> Sheet:
    columns: list[_Column] = []
    windowed = any(windows(spec) for _, spec, _ in models)
    notes = ["A layer with a window of w tokens caches w − 1 of them."] if windowed else []
    bidirectional = [name for name, spec, _ in models if not spec.causal]
    if bidirectional:
        notes.append(f"{' and '.join(bidirectional)}: attention in both directions needs no cache.")
    if any(spec.encoder is not None for _, spec, _ in models):
        notes.append("With an encoder, the cache also has keys and values of a source with as many tokens.")
    for name, _, figures in models:
        sizes = [size for size in figures.cache if size is not None]
        cells = {} if figures.bytes_per_token is None else {_PER_TOKEN: figures.bytes_per_token}
        cells |= {_STATES: sizes[0].states} if sizes and sizes[0].states else {}
        cells |= {_sequences(asked.batch, size.context): size.nbytes for size in sizes}
        cells |= {f"of which the source's {size.context:,}": size.of_source for size in sizes if size.of_source}
        columns.append((name, cells, _bytes))
        if sizes and sizes[-1].in_transformers not in (None, sizes[-1].nbytes):
            size = f"{decimal_bytes(sizes[-1].in_transformers)} at {sizes[-1].context:,} tokens"
            notes.append(f"transformers repeats the keys and values of {name} before it caches them: {size}.")

    return _sheet(f"KV cache, {asked.cached}", _alone(columns[0][1]) if len(models) == 1 else columns, compared, notes)


_PER_TOKEN = "per token"
_STATES = "states, for any length"


def _alone(sizes: Mapping[str, int]) -> list[_Column]:

    def exact(label: str, nbytes: int) -> str:
        return whole_bytes(nbytes) if label == _PER_TOKEN else decimal_bytes(nbytes)

    return [("bytes", sizes, exact), ("in KiB, GiB", sizes, lambda label, nbytes: binary_bytes(nbytes))]


def named_cache(model: ModelCount) -> list[Sheet]:
    """Return the tables of the KV cache of a model of an unknown family, computed from its config.json."""
    sizes = model.named.cache if model.named is not None else ()
    if not sizes:
        return []
    cells = {_PER_TOKEN: sizes[0].bytes_per_token} | {
        _sequences(size.batch, size.context): size.nbytes for size in sizes
    }
    windowed = any(size.nbytes < size.bytes_per_token * size.batch * size.context for size in sizes)
    note = ["From config.json alone: kinds of layers, heads, windows, ranks of latents and sizes of states."]
    return [_sheet(f"KV cache, {sizes[0].dtype}", _alone(cells), False, note), _allocated(model.name, windowed, sizes)]


def _allocated(name: str, windowed: bool, sizes: Sequence[CacheSize | None]) -> Sheet:
    """Return a table of the KV cache that transformers, vLLM and llama.cpp allocate, with one row per context."""
    rows = []
    for size in sizes:
        if size is not None:
            cells = [size.in_transformers, size.in_vllm, size.in_llama_cpp]
            words = tuple(_NOTHING if nbytes is None else decimal_bytes(nbytes) for nbytes in cells)
            rows.append(SheetRow(_sequences(size.batch, size.context), words))
    of_kinds = (", layers alike in padded groups", ", windows with the 512 tokens of a batch") if windowed else ("", "")
    notes = ["vLLM: blocks of 16 tokens{}. llama.cpp: float16, contexts padded to 256{}.".format(*of_kinds)]
    if any(size is not None and size.in_llama_cpp is None for size in sizes):
        notes.append(f"{_NOTHING} gptkit knows no architecture of llama.cpp that has the cache of {name}.")
    return Sheet("KV cache as programs allocate it", ("transformers", "vLLM", "llama.cpp"), tuple(rows), tuple(notes))


def _bytes(label: str, nbytes: int) -> str:
    return binary_bytes(nbytes) if label == _TOTAL_BINARY else decimal_bytes(nbytes)


def _flops(models: Sequence[_Costed], asked: Scenario, compared: bool) -> list[Sheet]:
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


def _memory(models: Sequence[_Costed], asked: Scenario, compared: bool) -> list[Sheet]:
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
    """Return a model's costs by kind of cost ("prefill") and then by row of the table. Kinds without figures are
    omitted.
    """
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


def _formats(models: Sequence[_Costed]) -> Sheet:
    """Return a table of the size of the weights in various formats.

    For one model it also has the bits per weight. For several models it has one column per model.
    """
    rows, alone = [], len(models) == 1
    for name in dict.fromkeys(name for _, _, figures in models for name in figures.formats or ()):
        cells = []
        for _, spec, figures in models:
            nbytes = (figures.formats or {}).get(name)
            words = [_NOTHING] * 3
            if nbytes is not None:
                words = [decimal_bytes(nbytes), binary_bytes(nbytes), f"{8 * nbytes / count(spec).total:.2f}"]
            cells += words if alone else words[:1]
        rows.append(SheetRow(name, tuple(cells)))
    columns = ("bytes", "in powers of 1024", "bits per weight") if alone else tuple(name for name, *_ in models)
    missing = [name for name, _, figures in models if None in (figures.formats or {}).values()]
    notes = [
        "nf4: as transformers loads it with bitsandbytes, with quantised scales; only linear layers outside of experts"
        " are nf4, and the rest is bfloat16.",
        "q8_0, q4_k_m, q4_0: each tensor as llama-quantize stores it, scales included, without the file's vocabulary.",
    ]
    notes += [f"{_NOTHING} {', '.join(missing)}: llama.cpp has no type for some of its tensors."] if missing else []
    return Sheet("Weights in other formats", columns, tuple(rows), tuple(notes))


def _explained(models: Sequence[_Costed]) -> list[Sheet]:
    sheets = []
    for name, _, figures in models:
        total = figures.explained
        if total is not None:
            rows = [SheetRow(term.label, (term.formula, f"{term.value:,}")) for term in total.terms]
            rows.append(SheetRow(_TOTAL, (total.formula, f"{total.total:,}"), "bold", ruled=True))
            for index, letter in enumerate(total.symbols):
                rows.append(SheetRow(letter.name, (letter.meaning, f"{letter.value:,}"), "dim", ruled=not index))
            title = "The total as a formula" if len(models) == 1 else f"The total of {name} as a formula"
            sheets.append(Sheet(title, ("formula", "parameters"), tuple(rows), words=1))
    return sheets


def _fits(models: Sequence[_Costed], asked: Scenario) -> Sheet:
    """Return a table of the contexts and batches that fit on the GPU, with one row per dtype of the weights.

    Several models get only their longest context, or their largest batch if a context is given.
    """
    fitting = {name: figures.fits for name, _, figures in models if figures.fits is not None}
    if not fitting or asked.gpu is None:
        return Sheet("", (), ())
    first, rows, alone = next(iter(fitting.values())), [], len(models) == 1
    by_batch = not alone and asked.context is not None
    for dtype in dict.fromkeys(row.dtype for of_model in fitting.values() for row in of_model.rows):
        cells: list[str] = []
        for name, _, _ in models:
            row = next((row for row in fitting[name].rows if row.dtype == dtype), None) if name in fitting else None
            words = [f"{number:,}" if number else _NOTHING for number in ((row.context, row.batch) if row else (0, 0))]
            free = _NOTHING if row is None or row.free is None else decimal_bytes(row.free)
            cells += [decimal_bytes(row.weights), *words, free] if alone and row is not None else words[by_batch:][:1]
        rows.append(SheetRow(dtype, tuple(cells)))
    columns: tuple[str, ...] = ("weights", "longest context", f"batch of {first.context:,}", "left over")
    columns = columns if alone else tuple(name for name, *_ in models)
    what = "What fits" if alone else "The longest context that fits"
    what = f"The most sequences of {first.context:,} tokens that fit" if by_batch else what
    size, equal = _card(asked.gpu)
    title = f"{what} in a {size} card ({equal})"
    if asked.spread:
        title = f"{what} on {asked.tp * asked.pp:,} cards of {size} ({equal})"
    batch = f"Batch: the most sequences of {first.context:,} tokens that fit"
    batch += "" if asked.context is not None else " (--context sets another number of tokens)"
    sequences = "one sequence" if first.batch == 1 else f"{first.batch:,} sequences"
    longest = f"Longest context: tokens of {sequences} in one forward pass, at most the model's context; "
    notes = [
        f"{'' if by_batch else longest}{_NOTHING} if none fits.",
        *(
            [f"{batch}. Left over: the memory that this batch leaves free, which is too little for one more."]
            if alone
            else []
        ),
        "Counted are weights, the KV cache and activations. Nothing is reserved for the runtime, which takes 0.5 to"
        " 2 GB more.",
    ]
    if asked.spread and asked.dtype is None:
        notes.append("int8 and int4: without quantisation scales.")
    return Sheet(title, columns, tuple(rows), tuple(notes))


def _card(nbytes: int) -> tuple[str, str]:
    """Return a GPU's memory as it is sold, such as "24 GB", and exactly, in GiB and in powers of 1000."""
    gib = f"{nbytes / 2**30:.4g}"
    if float(gib) * 2**30 != nbytes:
        return decimal_bytes(nbytes), binary_bytes(nbytes)
    return f"{gib} GB", f"{gib} GiB = {decimal_bytes(nbytes)}"


def _split(models: Sequence[_Costed], asked: Scenario) -> Sheet:
    """Return a table of the memory per GPU of models that are split over several GPUs.

    For one model, it has a column per pipeline stage. For several models, it has the fullest GPU of every model.
    """

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
        notes.append(f"{name if several else 'Together'}: {decimal_bytes(split.together)} of weights on all GPUs.")
    notes.append("Split as in Megatron-LM (1909.08053); communication buffers are not counted.")
    gpus = f"{asked.tp * asked.pp:,} GPUs (tp {asked.tp}, pp {asked.pp})"
    title = f"Memory on each of {gpus}, {asked.dtype or 'bfloat16'}, {_sequences(asked.batch, models[0][2].context)}"
    return _sheet(title + ", the fullest" * (several and asked.pp > 1), columns, False, notes)
