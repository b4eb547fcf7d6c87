"""train: a tree from random weights, or a checkpoint further, on texts; the result is a checkpoint like any other."""

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from ..analysis.costs import training_flops
from ..architectures import expressed
from ..components import ModelSpec, to_json
from ..components import operations as ops
from ..converter.files import locked, sha256_file
from ..converter.names import json_bytes
from ..converter.outline import Outline, outline
from ..converter.resolve import identify
from ..converter.threads import suit
from ..converter.tokenizer import Tokenizer
from ..display import Record
from ..errors import InvalidInput, NoNumber, UsageError, shown
from ..modules import Decoder
from ..modules.generate import Sampling
from ..modules.generate import generate as generate_tokens
from ..modules.load import as_array, build, load
from ..modules.save import save
from .data import (
    SMALLEST,
    Progress,
    Stretch,
    TokenFile,
    Windows,
    alike,
    is_tokens,
    open_tokens,
    paths_of,
    require_tokenizer,
    tokenize,
)
from .loop import Settings, TrainingStep, fit, usual_rate
from .parallel import Group, group
from .state import Store, beside, make, remove_empty, remove_unbegun, require_free

HELD_OUT = 0.05
"""The share of the text that is held out where nobody says how much."""
WINDOWS = 16  # a step, by default, where that leaves steps enough
STEPS, FURTHER = 1000, 250
"""About so many steps a small budget in tokens has by default, from random weights and from a checkpoint's: on few
tokens many small steps teach far more than few large ones.
"""
CONTEXT = 1024  # tokens at most, by default
_EVALUATED = 2**16  # tokens that an evaluation looks at, at the most
_SAMPLED = 48  # tokens of a sample
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".distcp")
_PEAKS = {
    "A100": 312e12, "H100": 989e12, "H200": 989e12, "H800": 989e12, "B200": 2250e12, "L40S": 362e12, "L4": 121e12,
    "A10G": 70e12, "A10": 125e12, "V100": 125e12, "T4": 65e12, "RTX 4090": 165e12, "RTX 3090": 71e12,
}  # fmt: skip
"""Dense 16-bit FLOPs a second by makers' data sheets, of GPUs by what their names hold."""


@dataclass(frozen=True)
class Prepared(Record):
    """What is about to be trained, before the first step. from_scratch: from random weights. to: the format of the
    result. flops: of a step. peak: FLOPs a second of where it is computed, and how that is known. first: the step that
    is gone on from.
    """

    JSON = "model parameters from_scratch to tokens held_out flops peak peak_by settings first"

    model: str
    parameters: int
    from_scratch: bool
    to: str
    tokens: int
    held_out: int
    flops: int
    peak: float
    peak_by: str
    settings: dict[str, Any]
    first: int


@dataclass(frozen=True)
class Trained(Record):
    """What came out: the folder, its format, and the run: steps, tokens, seconds and the losses on the way."""

    JSON = "folder=name to steps tokens seconds loss held_out curve"

    folder: Path
    to: str
    steps: int
    tokens: int
    seconds: float
    curve: list[dict[str, Any]]

    @property
    def name(self) -> str:
        return str(self.folder)

    @property
    def loss(self) -> float:
        return float(self.curve[-1]["loss"])

    @property
    def held_out(self) -> float:
        return float(self.curve[-1]["held_out"])


def train(
    model: str | Path,
    data: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    tokens: int | None = None,
    seconds: float | None = None,
    batch: int | None = None,
    context: int | None = None,
    rate: float | None = None,
    warmup: float = 0.05,
    decay: float = 0.1,
    clip: float = 1.0,
    accumulate: int = 1,
    every: int | None = None,
    held_out: float | str | Path = HELD_OUT,
    tokenizer: str | Path | None = None,
    documents_apart: bool = True,
    random: bool = False,
    seed: int = 0,
    dtype: str | None = None,
    compiled: bool = False,
    device: str | None = None,
    sample: str | None = None,
    resume: bool = False,
    force: bool = False,
    offline: bool = False,
    allow_pickle: bool = False,
    on_start: Callable[[Prepared], None] = lambda prepared: None,
    tell: Callable[[TrainingStep], None] = lambda step: None,
    progress: Progress | None = None,
) -> Trained:
    """Train a model and write it as a checkpoint folder: Hugging Face files of the family that has its tree, else
    gptkit's own format, in float32, with the tokenizer.

    Args:
        model: a tree (a preset, a config.json, a spec), which gets random weights, or a checkpoint.
        data: a text or several, or one folder that `tokenize` wrote.
        out: the folder to make. Beside it, in `out`.training, are the run's checkpoints and measurements.
        tokens: how many to train on; rounded up to whole steps.
        seconds: how long to train instead; such a run is not the same twice.
        batch: tokens a step, over all processes; by default those of `windows_of`.
        context: tokens a window; by default the model's context, 1,024 at most.
        rate: AdamW's highest; by default by the number of parameters, and a tenth of that for a checkpoint.
        warmup: the share of the budget within which the rate is reached.
        decay: decoupled weight decay of the matrices.
        clip: what the norm of a step's gradient is cut to; 0 leaves it.
        accumulate: compute a step in so many parts, one after the other, for less memory.
        every: evaluate and keep a checkpoint every so many steps; by default ten times, or each 500.
        held_out: the share of the text that is held out, from its end; or a text or folder of tokens by itself.
        tokenizer: for texts, as `tokenize` has it; by default the checkpoint's own, or a new one of the tree's size.
        documents_apart: no token looks at another document's, or is predicted from it.
        random: draw random weights for a checkpoint's tree too.
        seed: of the random weights and of the order of the windows.
        dtype: what is multiplied in: by default bfloat16 on a GPU, float32 elsewhere.
        compiled: by torch.compile.
        device: by default a GPU where there is one.
        sample: a prompt that is continued at every evaluation.
        resume: go on from the last checkpoint, to the bits that a run without a pause has; where the loss or a gradient
            was no number, at another rate or clip.
        force: replace `out`, and forget a run that has not ended.
        offline: use local files and the hub's cache only.
        allow_pickle: read .bin files too (weights only).
        on_start: given what is about to be trained.
        tell: given every step.
        progress: of tokenising, as in `tokenize`.

    Raises:
        UsageError: `out` exists; a budget, a size or a rate that is none; a text too short for one step; a tokenizer
            with more tokens than the model; tokens of another tokenizer than the checkpoint's; another run than the one
            to resume.
        InvalidInput, Offline: as `load` and `tokenize`; a text or a token file that changed.
        NoNumber: the loss or a gradient is none. The last checkpoint stays, and here too:
        GptkitError: the disk is full.
        KeyboardInterrupt: once a checkpoint is written.
    """
    target, texts = Path(out).expanduser(), paths_of(data)
    with ExitStack() as stack:
        us = stack.enter_context(group(device))
        store = Store(beside(target, "training"), us)

        def claim() -> None:
            require_free(target, resume, force, [store])
            stack.enter_context(locked(store.folder))  # first: whoever has it not cleans nothing up
            make(store.folder)
            stack.callback(remove_empty, store.folder)
            stack.callback(remove_unbegun, store.folder)
            if not store.goes_on(resume, force):
                store.forget()  # now, for its tokens may be written over: half of a run is none to resume

        us.lead(claim)
        going_on = store.goes_on(resume, force)
        tree, scratch = tree_of(str(model), random, offline, allow_pickle)
        made = {
            "tokenizer": tokenizer or (None if scratch else str(model)),
            "vocabulary": tree.spec.vocab_size,
            "progress": progress,
            "offline": offline,
        }

        length = min(CONTEXT, longest(tree.spec)) if context is None else context
        windows = windows_of(batch, length, tokens, us.size * accumulate, STEPS if scratch else FURTHER)
        usual = usual_rate(size_of(tree.spec)) / (1 if scratch else 10)
        settings = settings_of(
            windows, length, tokens, seconds, accumulate=accumulate, warmup=warmup, decay=decay, clip=clip, seed=seed,
            every=every, compiled=compiled, dtype=dtype or ("bfloat16" if us.device.type == "cuda" else "float32"),
            rate=usual if rate is None else rate,
        )  # fmt: skip

        def take(paths: Sequence[str | Path], name: str, **another: Any) -> TokenFile:
            return tokens_of(paths, store.folder / name, going_on, us, **{**made, **another})

        found = take(texts, "data")
        if found.folder != store.folder / "data":
            if tokenizer is not None:
                raise UsageError(
                    f"--tokenizer does not work with {found.folder}, a folder of tokens that already has a tokenizer",
                    "Give the text files themselves, or leave out --tokenizer.",
                )
            if not scratch:  # what such weights have learnt of ids is of their own tokenizer's
                require_tokenizer(found, model, offline=offline, allow_pickle=allow_pickle)
        if found.vocabulary > tree.spec.vocab_size:
            size = tree.spec.vocab_size
            message = f"the tokenizer has {found.vocabulary:,} tokens, but {model} has a vocabulary of {size:,}"
            raise UsageError(
                message,
                f"Train one that fits: gptkit tokenize FILE OUT --vocabulary {size}"
                if size >= SMALLEST
                else f"Choose a model with at least {SMALLEST} tokens.",
            )
        require_trainable(tree.spec, documents_apart and found.documents > 1, not us.alone)
        training, held = split(found, held_out, take, us, length, windows, documents_apart)
        family, _ = expressed(tree.spec)
        to = "local" if family is None else f"hf:{family_of(tree, family)}"
        suit(tree.spec)
        decoder = load(
            model, "float32", random=scratch, seed=seed, device=us.device, offline=offline, allow_pickle=allow_pickle
        )
        about = _about(decoder, scratch, found, held, settings, us, documents_apart)
        changes: list[dict[str, Any]] = []
        us.lead(lambda: changes.extend(store.begin(about, resume, force)))
        last = store.last()
        flops = training_flops(tree.spec, length, windows).dense
        peak, by = peak_flops(us.device, settings.dtype)
        on_start(
            Prepared(
                str(model), size_of(tree.spec), scratch, to, len(training) * length, len(held.ids) * length, flops,
                peak * us.size, by, msgspec.to_builtins(settings), 0 if last is None else int(last.name[5:]),
            )
        )  # fmt: skip

        def step_of(number: int) -> Windows:
            if number % settings.every == 0:
                found.require_unchanged()
            return training.step(number, windows, seed)

        text = None
        if sample is not None:
            coder = found.load_tokenizer()
            generate_tokens(decoder, coder.encode(sample), 0)  # a prompt that it cannot read is refused now
            text = partial(_sampled, coder=coder, prompt=sample, seed=seed)
        try:
            run = fit(decoder, step_of, held, settings, group=us, store=store, sample=text, tell=tell)
        except NoNumber as error:
            us.lead(store.broke)
            if (kept := store.last()) is None:
                raise
            raise NoNumber(
                error.message, f"Continue from step {int(kept.name[5:]):,} with --resume and a smaller --lr or --clip."
            ) from error
        whole = gathered(decoder, us)
        done = Trained(target, to, run.step, run.step * windows * length, run.seconds, run.curve)
        # The tokenizer that it was trained with goes along, and not the one that lay where its tree came from.
        whole.source = replace(decoder.source or tree, path=found.folder, texts={})
        record = {"trained": {**about, **({"changes": changes} if changes else {}), "curve": run.curve}}
        us.lead(lambda: save(whole, target, to, dtype="float32", force=force, record=record))
        us.lead(store.done)
        return done


def tree_of(model: str, random: bool, offline: bool, allow_pickle: bool) -> tuple[Outline, bool]:
    """The tree of a reference, and whether it is to get random weights: because it has none, or somebody wants it."""
    found = identify(model)
    names = found.names or ()
    bare = found.path is not None and found.path.suffix == ".json" and found.names is None
    empty = found.path is not None and found.names is not None and not any(n.endswith(_WEIGHTS) for n in names)
    scratch = random or found.preset is not None or bare or empty
    return outline(found, offline=offline, allow_pickle=allow_pickle, companions=not scratch), scratch


def size_of(spec: ModelSpec) -> int:
    """The parameters of a tree."""
    return sum(each.count for each in spec.parameters())


def longest(spec: ModelSpec) -> int:
    """The longest sequence of a tree, where it says one."""
    table = CONTEXT if spec.positions is None else spec.positions.length
    return min(spec.context_length or table, table)


def family_of(tree: Outline, found: str) -> str:
    """Its own family where that has the tree, before the first of all."""
    from ..architectures import named
    from ..architectures.obstacles import express

    own = tree.origin.family
    if own is None or own == found:
        return found
    return own if express(named(own), tree.spec, clear=("rounding",)).found is not None else found


def folder_of(data: Sequence[str | Path], own: Path) -> Path:
    """The folder of tokens that is named, or for texts the run's own."""
    paths = [Path(each) for each in data]
    named = [path for path in paths if is_tokens(path)]
    if named and len(paths) > 1:
        raise UsageError(
            "--data accepts either text files or one folder written by gptkit tokenize, not both and "
            "not several folders",
            "Combine the texts in one folder: gptkit tokenize FILE1 FILE2 FOLDER",
        )
    return named[0] if named else own


def tokens_of(
    texts: Sequence[str | Path],
    own: Path,
    going_on: bool,
    us: Group,
    *,
    tokenizer: str | Path | None,
    vocabulary: int,
    progress: Progress | None,
    offline: bool,
) -> TokenFile:
    """The tokens that are read: a folder of them that is named, or texts as one in `own`, by the tokenizer that is
    named or by one of so many tokens made of them; where a run is gone on with, what it left there.
    """
    where = folder_of(texts, own)
    if where == own and going_on and is_tokens(own):
        us.lead(lambda: _require_texts(texts, own))
    elif where == own:
        new = vocabulary if tokenizer is None else None
        told: Any = {"tokenizer": tokenizer, "vocabulary": new, "offline": offline, "progress": progress}
        us.lead(lambda: tokenize(texts, own, force=True, **told))
    return open_tokens(where)


def _require_texts(texts: Sequence[str | Path], own: Path) -> None:
    """Raise InvalidInput where the texts are not those that the run began with."""
    before = {each.name: each.sha256 for each in open_tokens(own).sources}
    now = {str(text): _hashed(text) for text in map(Path, texts)}  # as `tokenize` names them: ./a is a
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            raise InvalidInput(
                f"the texts differ from those at the start of the run in {own.parent}: {name} is new, missing "
                "or changed",
                "Give the original texts again, or start again with --force.",
            )


def _hashed(path: Path) -> str:
    try:
        return sha256_file(path)
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}") from error


def windows_of(batch: int | None, length: int, tokens: int | None, parts: int, steps: int) -> int:
    """How many sequences of a length a step has: as `batch` tokens are, or by default `WINDOWS`, or fewer, that a
    budget in tokens has about so many steps, but one for each part in which it is computed. Raises UsageError for a
    length below 1.
    """
    if length < 1:
        raise UsageError(f"--context must be 1 or more, not {length:,}")
    if batch is not None:
        return batch // length
    return max(1, parts, WINDOWS if tokens is None else min(WINDOWS, -(-tokens // (steps * length))))


def settings_of(
    windows: int, length: int, tokens: int | None, seconds: float | None, *, every: int | None, **others: Any
) -> Settings:
    """Settings of a budget, and of the `others` in ranges that make sense. Raises UsageError."""
    if (tokens is None) == (seconds is None):
        raise UsageError("training needs exactly one of --tokens and --time", "For example: --tokens 1M, or --time 10m")
    if seconds is not None and not 0 < seconds < math.inf:
        raise UsageError(f"--time must be more than 0 seconds, not {seconds:g}", "For example: --time 10m")
    if windows < 1:
        raise UsageError(
            f"--batch is smaller than one window (--context) of {length:,} tokens",
            "Choose a larger --batch, or a smaller --context.",
        )
    if not 0 < others["rate"] <= 10:
        raise UsageError(f"--lr, the learning rate, must be more than 0 and at most 10, not {others['rate']:g}")
    if (dtype := others.get("dtype", "float32")) not in ("float32", "bfloat16"):
        raise UsageError(f"dtype must be float32 or bfloat16, not {shown(dtype, 40)}")
    ranges = {"warmup": (0, 0.99), "decay": (0, 10), "clip": (0, math.inf)}
    for name, (least, most) in ranges.items():
        if not least <= others[name] <= most:
            raise UsageError(f"{name} must be from {least:g} to {most:g}, not {others[name]:g}")
    if others["seed"] < 0 or others["accumulate"] < 1 or (every is not None and every < 1) or (tokens or 1) < 1:
        raise UsageError("--seed must be 0 or more, and --tokens, --accumulate and --every must be 1 or more")
    steps = None if tokens is None else -(-tokens // (windows * length))
    often = every or (100 if steps is None else min(500, max(1, steps // 10)))
    return Settings(windows, length, steps, seconds, every=often, **others)


def carries(spec: ModelSpec) -> str:
    """The first part of a tree that carries a state from token to token; empty where none does."""
    every = (each for block in dict.fromkeys(spec.blocks) for each in spec.block_operations(block))
    return next((each.id for each in every if isinstance(each, ops.Scan | ops.Convolve | ops.Pairs)), "")


def require_trainable(spec: ModelSpec, apart: bool, several: bool) -> None:
    """Raise MissingComponent where no next token is predicted; UsageError for a layer that carries a state from token
    to token, which no mask keeps within a document, and for one whose tokens choose experts, where several processes
    each have tokens of their own: FSDP2 adds up gradients of what all of them have met. Nor does it have a layer's
    weights together while others compute with them.
    """
    spec.predicts("training on texts")
    spec.one_stack("gptkit train")
    if apart and carries(spec):
        raise UsageError(
            f"the model has recurrent layers ({carries(spec)}), which carry a state from one document "
            "into the next, so the text cannot be masked by document",
            "Use --no-document-mask to train on all documents as one text.",
        )
    if several and spec.shares:
        raise UsageError(
            "several layers of the model share the weights of one block, which gptkit cannot train with "
            "several processes",
            "Train in one process, without torchrun.",
        )
    for block in dict.fromkeys(spec.blocks):
        for each in spec.block_operations(block):
            if several and isinstance(each, ops.Choose):
                raise UsageError(
                    f"the model is a mixture of experts ({each.id}), which gptkit cannot train with several processes",
                    "Train in one process, without torchrun.",
                )


def split(
    found: TokenFile,
    held_out: float | str | Path,
    take: Callable[..., TokenFile],
    us: Group,
    length: int,
    windows: int,
    apart: bool,
    evaluated: int = _EVALUATED,
) -> tuple[Stretch, Windows]:
    """What is trained on, and the windows of `length` tokens that are evaluated, `evaluated` tokens at most. Raises
    UsageError where there is none to evaluate, or less to train on than the `windows` of a step.
    """
    most = max(us.size, evaluated // length)
    if isinstance(held_out, int | float):
        if not 0 < held_out < 1:
            raise UsageError(
                f"the held-out share must be between 0 and 1, not {held_out:g}",
                "Give a share, such as 0.05, or a text file.",
            )
        cut = found.tokens - max(int(found.tokens * held_out), length + 1)
        training, held = (
            Stretch(found, 0, max(cut, 0), length, apart),
            Stretch(found, max(cut, 0), found.tokens, length, apart),
        )
    else:
        other = take([held_out], "held-out", tokenizer=found.folder / "tokenizer.json")
        if other.tokenizer != found.tokenizer and not alike(other.load_tokenizer(), found.load_tokenizer()):
            raise UsageError(
                f"the text of --held-out, {held_out}, was tokenised with another tokenizer than the training text",
                f"Use the same tokenizer: gptkit tokenize FILE FOLDER --tokenizer {found.folder}",
            )
        training, held = Stretch(found, 0, found.tokens, length, apart), Stretch(other, 0, other.tokens, length, apart)
    if not len(held):
        which = "text" if isinstance(held_out, int | float) else "held-out text"
        raise UsageError(
            f"the {which} is shorter than one window (--context) of {length:,} tokens",
            "Give more text, or a smaller --context.",
        )
    if len(training) < windows:
        raise UsageError(
            f"a training step needs {windows:,} windows of {length:,} tokens, but the training text has "
            f"only {len(training):,} windows",
            "Give more text, or choose a smaller --context or --batch.",
        )
    return training, held.spread(most)


def _about(
    model: Decoder, scratch: bool, found: TokenFile, held: Windows, settings: Settings, us: Group, apart: bool
) -> dict[str, Any]:
    """What a run is, in JSON values: what its result's manifest tells, and what it is resumed by."""
    return {
        "weights": "random" if scratch else digest_of(model),
        "tree": hashlib.sha256(json_bytes(to_json(model.spec))).hexdigest(),
        "texts": [{"sha256": each.sha256, "bytes": each.bytes} for each in found.sources],
        "tokens": found.digest,
        "tokenizer": found.tokenizer,
        "held_out": hashlib.sha256(held.ids.tobytes()).hexdigest(),
        "documents": "apart" if apart else "as one text",
        "processes": us.size,
        **msgspec.to_builtins(settings),
    }


def digest_of(model: Decoder) -> str:
    """The sha256 of a model's tree and parameters, whatever files they lay in."""
    found = hashlib.sha256(json_bytes(to_json(model.spec)))
    for _, each in model.named_parameters():
        found.update(each.detach().cpu().reshape(-1).numpy().data)
    return found.hexdigest()


@cache
def peak_flops(device: torch.device, dtype: str) -> tuple[float, str]:
    """FLOPs a second that a device can do in matrix products, and how that is known."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for key in sorted(_PEAKS, key=len, reverse=True):
            if key in name and dtype != "float32":
                return _PEAKS[key], f"the data sheet of {name}"
    size, best = 1024, math.inf
    one = torch.ones(size, size, device=device, dtype=getattr(torch, dtype))
    for _ in range(4):
        began = time.perf_counter()
        float((one @ one)[0, 0])
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best, "a product measured here"


def _sampled(model: Decoder, coder: Tokenizer, prompt: str, seed: int) -> str:
    """The continuation of a prompt by the model as it is."""
    ids = coder.encode(prompt)
    made = generate_tokens(
        model, ids, _SAMPLED, sampling=Sampling(0.8, seed=seed), stop=coder.eos_ids, tell=lambda line: None
    )
    return coder.decode([*ids, *made], skip_special_tokens=True)


def gathered(model: Decoder, us: Group) -> Decoder:
    """The model with whole parameters, in every process."""
    if us.alone:
        return model.eval()

    def tensors() -> Iterator[tuple[str, np.ndarray[Any, Any], str]]:
        for name, parameter in model.named_parameters():
            yield name, *as_array(us.whole(parameter.detach()).contiguous())

    return build(model.spec, tensors(), torch.float32)
