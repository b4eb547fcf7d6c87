"""train: a tree from random weights, or a checkpoint further, on texts; the result is a checkpoint like any other."""

from __future__ import annotations

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
from ..converter.files import sha256_file
from ..converter.names import json_bytes
from ..converter.outline import Outline, outline
from ..converter.resolve import identify
from ..converter.threads import suit
from ..converter.tokenizer import Tokenizer
from ..display import Record
from ..errors import InvalidInput, NoNumber, UsageError
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
from .loop import Run, Settings, TrainingStep, fit, usual_rate
from .options import FURTHER, STEPS, TrainOptions, takes, windows_of
from .parallel import Group, group
from .state import Store, beside, claim

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
    """The result of a training run.

    Attributes:
        folder: the folder of the trained checkpoint.
        to: the format of the checkpoint.
        steps: the number of training steps.
        tokens: the number of training tokens.
        seconds: the training time.
        curve: the losses during training, one entry per evaluation.
    """

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


@takes(TrainOptions)
def train(
    model: str | Path,
    data: str | Path | Sequence[str | Path],
    out: str | Path,
    options: TrainOptions | None = None,
    *,
    on_start: Callable[[Prepared], None] = lambda prepared: None,
    tell: Callable[[TrainingStep], None] = lambda step: None,
    progress: Progress | None = None,
    **fields: Any,
) -> Trained:
    """Train a model and write it as a checkpoint folder, in float32 and with the tokenizer.

    The folder has Hugging Face files if a family has the model's architecture, and otherwise gptkit's own format.

    Args:
        model: a tree (a preset, a config.json, a spec), which gets random weights, or a checkpoint.
        data: text files, or one folder that `tokenize` wrote.
        out: the folder to make. The checkpoints and measurements of the run are in the folder `out`.training.
        options: how to train; see `TrainOptions`.
        on_start: called with a description of the run before its first step.
        tell: called after every step.
        progress: progress of tokenising, as in `tokenize`.
        fields: fields of `TrainOptions`, which take precedence over `options`.

    Raises:
        UsageError: `out` exists; a budget, size or rate makes no sense; the text is too short for one step; the
            tokenizer has more tokens than the model; the tokens are not of the checkpoint's tokenizer; the run to
            resume had other options.
        InvalidInput, Offline: as in `load` and `tokenize`; also if a text or a token file changed during the run.
        NoNumber: the loss or a gradient is NaN or infinite. The last checkpoint stays. A resumed run may have another
            `rate` and `clip`.
        GptkitError: the disk is full. The last checkpoint stays.
        KeyboardInterrupt: after a checkpoint is written.
    """
    how, target, texts = replace(options or TrainOptions(), **fields), Path(out).expanduser(), paths_of(data)
    with ExitStack() as stack:
        us = stack.enter_context(group(how.device))
        store = Store(beside(target, "training"), us)
        us.lead(lambda: claim(stack, target, store.folder, lambda: [store], how.resume, how.force))
        source = tree_of(str(model), how.random, **how.opening)
        tree, scratch = source
        length = min(CONTEXT, longest(tree.spec)) if how.context is None else how.context
        steps = STEPS if scratch else FURTHER
        windows = windows_of(how.batch, length, how.tokens, us.size * how.accumulate, steps)
        usual_rate_here = usual_rate(size_of(tree.spec)) / (1 if scratch else 10)
        settings = how.settings(windows, length, how.tokens, usual_rate_here, us)
        reader = TextReader(
            store.folder, store.goes_on(how.resume, how.force), us,
            how.tokenizer or (None if scratch else str(model)), tree.spec.vocab_size, progress, how.offline,
        )  # fmt: skip
        found = _read_texts(reader, texts, str(model), source, how)
        require_trainable(tree.spec, how.documents_apart and found.documents > 1, not us.alone)
        training, held = split(found, how.held_out, reader, length, windows, how.documents_apart)
        family, _ = expressed(tree.spec)
        to = "local" if family is None else f"hf:{family_of(tree, family)}"
        suit(tree.spec)
        decoder = load(model, "float32", random=scratch, seed=how.seed, device=us.device, **how.opening)
        about = _about(decoder, scratch, found, held, settings, us, how.documents_apart)
        changes: list[dict[str, Any]] = []
        us.lead(lambda: changes.extend(store.begin(about, how.resume, how.force)))
        on_start(_prepared(str(model), source, to, training, held, settings, store))
        run = _fitted(decoder, found, training, held, settings, store, how.sample, tell)
        whole = gathered(decoder, us)
        done = Trained(target, to, run.step, run.step * windows * length, run.seconds, run.curve)
        # The tokenizer of the training goes along, and not the one next to the files that the tree came from.
        whole.source = replace(decoder.source or tree, path=found.folder, texts={})
        record = {"trained": {**about, **({"changes": changes} if changes else {}), "curve": run.curve}}
        us.lead(lambda: save(whole, target, to, dtype="float32", force=how.force, record=record))
        us.lead(store.done)
        return done


def _read_texts(
    reader: TextReader, texts: Sequence[str | Path], model: str, source: tuple[Outline, bool], how: TrainOptions
) -> TokenFile:
    """Return the tokens of the texts. Raise UsageError if they do not fit the model or its weights."""
    found, (tree, scratch) = reader(texts, "data"), source
    if found.folder != reader.folder / "data":
        if how.tokenizer is not None:
            raise UsageError(
                f"--tokenizer does not work with {found.folder}, a folder of tokens that already has a tokenizer",
                "Give the text files themselves, or leave out --tokenizer.",
            )
        if not scratch:  # such weights know the ids of their own tokenizer
            require_tokenizer(found, model, **how.opening)
    size = tree.spec.vocab_size
    if found.vocabulary > size:
        raise UsageError(
            f"the tokenizer has {found.vocabulary:,} tokens, but {model} has a vocabulary of {size:,}",
            f"Train one that fits: gptkit tokenize FILE OUT --vocabulary {size}"
            if size >= SMALLEST
            else f"Choose a model with at least {SMALLEST} tokens.",
        )
    return found


def _prepared(
    model: str,
    source: tuple[Outline, bool],
    to: str,
    training: Stretch,
    held: Windows,
    settings: Settings,
    store: Store,
) -> Prepared:
    """Return the description of a run that is about to begin or to go on."""
    (tree, scratch), length, us, last = source, settings.context, store.group, store.last()
    flops = training_flops(tree.spec, length, settings.windows).dense
    peak, peak_by = peak_flops(us.device, settings.dtype)
    return Prepared(
        model, size_of(tree.spec), scratch, to, len(training) * length, len(held.ids) * length, flops, peak * us.size,
        peak_by, msgspec.to_builtins(settings), max(store.step_of(last), 0),
    )  # fmt: skip


def _fitted(
    decoder: Decoder,
    found: TokenFile,
    training: Stretch,
    held: Windows,
    settings: Settings,
    store: Store,
    prompt: str | None,
    tell: Callable[[TrainingStep], None],
) -> Run:
    """Train a model in place, with a sample of text after the prompt at every evaluation. Raise NoNumber as `train`."""

    def step_of(number: int) -> Windows:
        if number % settings.every == 0:
            found.require_unchanged()
        return training.step(number, settings.windows, settings.seed)

    sample = None
    if prompt is not None:
        coder = found.load_tokenizer()
        generate_tokens(decoder, coder.encode(prompt), 0)  # refuse a prompt that the model cannot read, before training
        sample = partial(_sampled, coder=coder, prompt=prompt, seed=settings.seed)
    try:
        return fit(decoder, step_of, held, settings, group=store.group, store=store, sample=sample, tell=tell)
    except NoNumber as error:
        store.group.lead(store.broke)
        if (last := store.last()) is None:
            raise
        raise NoNumber(
            error.message, f"Continue from step {store.step_of(last):,} with --resume and a smaller --lr or --clip."
        ) from error


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
    return own if express(named(own), tree.spec, clear=("rounding",)).tree is not None else found


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


@dataclass(frozen=True)
class TextReader:
    """Reads texts as tokens, and keeps the tokens in the folder of a run."""

    folder: Path
    going_on: bool
    """Whether an earlier call of the same run left its tokens in the folder."""
    group: Group
    tokenizer: str | Path | None
    """The tokenizer, as in `tokenize`; None makes a new one of `vocabulary` tokens from the texts."""
    vocabulary: int
    progress: Progress | None
    offline: bool

    def __call__(self, texts: Sequence[str | Path], name: str, tokenizer: str | Path | None = None) -> TokenFile:
        """Return the tokens of a folder that `tokenize` wrote, or of texts, which are kept in the folder `name`.

        A `tokenizer` takes precedence over the usual one.
        """
        own, tokenizer = self.folder / name, tokenizer or self.tokenizer
        where = folder_of(texts, own)
        if where == own and self.going_on and is_tokens(own):
            self.group.lead(lambda: _require_texts(texts, own))
        elif where == own:
            new = self.vocabulary if tokenizer is None else None
            given: Any = {"tokenizer": tokenizer, "vocabulary": new, "offline": self.offline, "progress": self.progress}
            self.group.lead(lambda: tokenize(texts, own, force=True, **given))
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
    if several and spec.has_shared_blocks:
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
    reader: TextReader,
    length: int,
    windows: int,
    apart: bool,
    evaluated: int = _EVALUATED,
) -> tuple[Stretch, Windows]:
    """What is trained on, and the windows of `length` tokens that are evaluated, `evaluated` tokens at most. Raises
    UsageError where there is none to evaluate, or less to train on than the `windows` of a step.
    """
    most = max(reader.group.size, evaluated // length)
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
        other = reader([held_out], "held-out", found.folder / "tokenizer.json")
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
