"""Train a model on texts, from random weights or from a checkpoint, and write the result as a checkpoint."""

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
from ..converter.opening import Opening
from ..converter.outline import Outline, outline
from ..converter.resolve import identify
from ..converter.targets import with_config
from ..converter.threads import suit
from ..converter.tokenizer import Tokenizer
from ..display import Record
from ..errors import InvalidInput, NoNumber, UsageError
from ..modules import Decoder
from ..modules.generate import Sampling
from ..modules.generate import generate as generate_tokens
from ..modules.load import as_array, build, load
from ..modules.save import save
from ..signatures import takes
from .data import (
    SMALLEST,
    ProgressCallback,
    Stretch,
    TokenFile,
    Windows,
    is_tokens,
    open_tokens,
    paths_of,
    require_tokenizer,
    same_tokenizer,
    tokenize,
)
from .loop import Run, Settings, TrainingStep, fit, usual_rate
from .options import FURTHER, STEPS, TrainOptions, windows_of
from .parallel import Group, process_group
from .state import Store, claim, run_folder

CONTEXT = 1024  # the largest default number of tokens per window
_EVALUATED = 2**16  # the largest number of tokens that an evaluation reads
_SAMPLED = 48  # the number of tokens of a sample
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".distcp")
_PEAKS = {
    "A100": 312e12, "H100": 989e12, "H200": 989e12, "H800": 989e12, "B200": 2250e12, "L40S": 362e12, "L4": 121e12,
    "A10G": 70e12, "A10": 125e12, "V100": 125e12, "T4": 65e12, "RTX 4090": 165e12, "RTX 3090": 71e12,
}  # fmt: skip
"""The largest number of FLOPs per second in dense 16-bit matrix products, from data sheets, by part of a GPU's name."""


@dataclass(frozen=True)
class Prepared(Record):
    """The description of a training run, before its first step."""

    JSON = "model parameters from_scratch to tokens held_out flops peak peak_by settings first"

    model: str
    """The model as the user named it, such as a path or a preset."""
    parameters: int
    """The number of parameters."""
    from_scratch: bool
    """Whether training starts from random weights."""
    to: str
    """The format of the result."""
    tokens: int
    """The number of tokens of the training text."""
    held_out: int
    """The number of tokens that every evaluation reads."""
    flops: int
    """FLOPs per step."""
    peak: float
    """The largest number of FLOPs per second that all devices together can compute."""
    peak_by: str
    """The source of `peak` in words, such as a data sheet or a measurement."""
    settings: dict[str, Any]
    """The settings of the run, with the fields of `loop.Settings`."""
    first: int
    """The number of steps that are already finished, if a run is resumed."""


@dataclass(frozen=True)
class Trained(Record):
    """The result of a training run."""

    JSON = "folder=name to steps tokens seconds loss held_out curve"

    folder: Path
    """The folder of the checkpoint."""
    to: str
    """The format of the checkpoint."""
    steps: int
    """The number of steps."""
    tokens: int
    """The number of training tokens."""
    seconds: float
    """The training time in seconds."""
    curve: list[dict[str, Any]]
    """The evaluations, with `step`, `tokens`, `loss`, `held_out` and `averaged`. Losses are in nats per token."""

    @property
    def name(self) -> str:
        return str(self.folder)

    @property
    def loss(self) -> float:
        """The training loss of the last step."""
        return float(self.curve[-1]["loss"])

    @property
    def held_out(self) -> float:
        """The last loss on the held-out text."""
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
    progress: ProgressCallback | None = None,
    **fields: Any,
) -> Trained:
    """Train a model and write it as a checkpoint folder, in float32 and with the tokenizer.

    The folder has Hugging Face files if a family has the model's architecture, and otherwise gptkit's own format.

    Args:
        model: a checkpoint, or an architecture (a preset, a config.json, a gptkit.json), which gets random weights.
        data: text files, or one folder that `tokenize` wrote.
        out: the folder to make. The checkpoints and measurements of the run are in the folder `out`.training.
        options: how to train; see `TrainOptions`.
        on_start: called with a description of the run before its first step.
        tell: called after every step.
        progress: called during tokenisation after every piece of text, with its number of bytes and the number of bytes
            of all texts.
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
    options = replace(options or TrainOptions(), **fields)
    resume, force = options.resume, options.force
    target, texts = Path(out).expanduser(), paths_of(data)
    with ExitStack() as stack:
        group = stack.enter_context(process_group(options.device))
        store = Store(run_folder(target, "training"), group)
        group.lead(lambda: claim(stack, target, store.folder, lambda: [store], resume, force))
        source = tree_of(str(model), options.random, options.opening)
        tree, scratch = source
        length = min(CONTEXT, longest(tree.spec)) if options.context is None else options.context
        steps = STEPS if scratch else FURTHER
        windows = windows_of(options.batch, length, options.tokens, group.size * options.accumulate, steps)
        default_rate = usual_rate(size_of(tree.spec)) / (1 if scratch else 10)
        settings = options.settings(windows, length, options.tokens, default_rate, group)
        reader = TextReader(
            store.folder, store.resumes(resume, force), group,
            options.tokenizer or (None if scratch else str(model)), tree.spec.vocab_size, progress, options.offline,
        )  # fmt: skip
        tokens = _read_texts(reader, texts, str(model), source, options)
        require_trainable(tree.spec, options.documents_apart and tokens.documents > 1, not group.alone)
        training, held_out = split(tokens, options.held_out, reader, length, windows, options.documents_apart)
        family, _ = expressed(tree.spec)
        form = with_config("local" if family is None else f"hf:{family_of(tree, family)}", options.config)
        suit(tree.spec)
        decoder = load(model, "float32", random=scratch, seed=options.seed, device=group.device, **options.opening)
        about = _about(decoder, scratch, tokens, held_out, settings, group, options.documents_apart)
        changes: list[dict[str, Any]] = []
        group.lead(lambda: changes.extend(store.begin(about, resume, force)))
        on_start(_prepared(str(model), source, form, training, held_out, settings, store))
        run = _train_model(decoder, tokens, training, held_out, settings, store, options.sample, tell)
        whole = gathered(decoder, group)
        done = Trained(target, form, run.step, run.step * windows * length, run.seconds, run.curve)
        # Write the tokenizer of the training texts, and not the one next to the files that the tree was read from.
        whole.source = replace(decoder.source or tree, path=tokens.folder, texts={})
        record = {"trained": {**about, **({"changes": changes} if changes else {}), "curve": run.curve}}
        group.lead(lambda: save(whole, target, form, dtype="float32", force=force, record=record))
        group.lead(store.done)
        return done


def _read_texts(
    reader: TextReader, texts: Sequence[str | Path], model: str, source: tuple[Outline, bool], options: TrainOptions
) -> TokenFile:
    """Return the tokens of the texts. Raise UsageError if their vocabulary or tokenizer does not suit the model.

    `source` is the result of `tree_of` for the model.
    """
    tokens, (tree, scratch) = reader(texts, "data"), source
    if tokens.folder != reader.folder / "data":
        if options.tokenizer is not None:
            raise UsageError(
                f"--tokenizer does not work with {tokens.folder}, a folder of tokens that already has a tokenizer",
                "Give the text files themselves, or leave out --tokenizer.",
            )
        if not scratch:  # the weights were trained on the ids of their own tokenizer
            require_tokenizer(tokens, model, **options.opening)
    size = tree.spec.vocab_size
    if tokens.vocabulary > size:
        raise UsageError(
            f"the tokenizer has {tokens.vocabulary:,} tokens, but {model} has a vocabulary of {size:,}",
            f"Train one that fits: gptkit tokenize FILE OUT --vocabulary {size}"
            if size >= SMALLEST
            else f"Choose a model with at least {SMALLEST} tokens.",
        )
    return tokens


def _prepared(
    model: str,
    source: tuple[Outline, bool],
    form: str,
    training: Stretch,
    held_out: Windows,
    settings: Settings,
    store: Store,
) -> Prepared:
    """Return the description of a run for `on_start`, just before the run starts or continues.

    `source` is the result of `tree_of`, and `form` is the format in which the model is written.
    """
    (tree, scratch), length, group, last = source, settings.context, store.group, store.last()
    flops = training_flops(tree.spec, length, settings.windows).dense
    peak, peak_by = peak_flops(group.device, settings.dtype)
    return Prepared(
        model, size_of(tree.spec), scratch, form, len(training) * length, len(held_out.ids) * length, flops,
        peak * group.size, peak_by, msgspec.to_builtins(settings), max(store.step_of(last), 0),
    )  # fmt: skip


def _train_model(
    decoder: Decoder,
    tokens: TokenFile,
    training: Stretch,
    held_out: Windows,
    settings: Settings,
    store: Store,
    prompt: str | None,
    tell: Callable[[TrainingStep], None],
) -> Run:
    """Train a model in place.

    At every evaluation, the model continues the `prompt`, if there is one. Raise NoNumber as `train` does.
    """

    def step_of(number: int) -> Windows:
        if number % settings.every == 0:
            tokens.require_unchanged()
        return training.step(number, settings.windows, settings.seed)

    sample = None
    if prompt is not None:
        coder = tokens.load_tokenizer()
        generate_tokens(decoder, coder.encode(prompt), 0)  # refuse a prompt that the model cannot read, before training
        sample = partial(_sampled, coder=coder, prompt=prompt, seed=settings.seed)
    try:
        return fit(decoder, step_of, held_out, settings, group=store.group, store=store, sample=sample, tell=tell)
    except NoNumber as error:
        store.group.lead(store.mark_broken)
        if (last := store.last()) is None:
            raise
        raise NoNumber(
            error.message, f"Continue from step {store.step_of(last):,} with --resume and a smaller --lr or --clip."
        ) from error


def tree_of(model: str, random: bool, opening: Opening) -> tuple[Outline, bool]:
    """Return the outline of a model (its architecture and tokenizer), and whether training starts from random weights.

    Training starts from random weights if the model has no weights, or if `random` is true.
    """
    reference = identify(model)
    names = reference.names or ()
    is_config = reference.path is not None and reference.path.suffix == ".json" and reference.names is None
    has_no_weights = (
        reference.path is not None
        and reference.names is not None
        and not any(name.endswith(_WEIGHTS) for name in names)
    )
    scratch = random or reference.preset is not None or is_config or has_no_weights
    return outline(reference, companions=not scratch, **opening), scratch


def size_of(spec: ModelSpec) -> int:
    """Return the number of parameters of a model."""
    return sum(parameter.count for parameter in spec.parameters())


def longest(spec: ModelSpec) -> int:
    """Return the longest window, in tokens, on which a model can be trained.

    It is the model's context, and at most the length of its position table. Without a stated context, it is `CONTEXT`.
    """
    table = CONTEXT if spec.positions is None else spec.positions.length
    return min(spec.context_length or table, table)


def family_of(tree: Outline, first: str) -> str:
    """Return the family in whose Hugging Face format a model is written.

    It is the model's own family if that can store the architecture, and otherwise `first`.
    """
    from ..architectures import named
    from ..architectures.obstacles import express

    own = tree.origin.family
    if own is None or own == first:
        return first
    return own if express(named(own), tree.spec, clear=("rounding",)).tree is not None else first


def folder_of(data: Sequence[str | Path], own: Path) -> Path:
    """Return the folder with the tokens of `data`: `data` itself if it is a folder of tokens, and otherwise `own`.

    `own` is the folder in which a run stores the tokens of text files. Raise UsageError if `data` has a folder of
    tokens together with something else.
    """
    paths = [Path(path) for path in data]
    folders = [path for path in paths if is_tokens(path)]
    if folders and len(paths) > 1:
        raise UsageError(
            "--data accepts either text files or one folder written by gptkit tokenize, not both and "
            "not several folders",
            "Combine the texts in one folder: gptkit tokenize FILE1 FILE2 FOLDER",
        )
    return folders[0] if folders else own


@dataclass(frozen=True)
class TextReader:
    """A function that reads texts as tokens, and stores the tokens in the folder of a run."""

    folder: Path
    resumed: bool
    """Whether an earlier call of the same run may have written the tokens to the folder."""
    group: Group
    tokenizer: str | Path | None
    """The tokenizer, as in `tokenize`; None trains a new one with `vocabulary` tokens on the texts."""
    vocabulary: int
    progress: ProgressCallback | None
    offline: bool

    def __call__(self, texts: Sequence[str | Path], name: str, tokenizer: str | Path | None = None) -> TokenFile:
        """Return the tokens of text files, or of a folder that `tokenize` wrote.

        Args:
            texts: text files, or one folder of tokens.
            name: the folder, within the run's folder, in which the tokens of text files are stored.
            tokenizer: a tokenizer to use instead of the reader's own.
        """
        own, tokenizer = self.folder / name, tokenizer or self.tokenizer
        where = folder_of(texts, own)
        if where == own and self.resumed and is_tokens(own):
            self.group.lead(lambda: _require_texts(texts, own))
        elif where == own:
            new = self.vocabulary if tokenizer is None else None
            given: Any = {"tokenizer": tokenizer, "vocabulary": new, "offline": self.offline, "progress": self.progress}
            self.group.lead(lambda: tokenize(texts, own, force=True, **given))
        return open_tokens(where)


def _require_texts(texts: Sequence[str | Path], own: Path) -> None:
    """Raise InvalidInput if the texts are not those whose tokens are in the run's folder `own`."""
    before = {source.name: source.sha256 for source in open_tokens(own).sources}
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


def recurrent_operation(spec: ModelSpec) -> str:
    """Return the id of the model's first operation that carries a state from token to token, or "" if there is none.

    Such operations are recurrences and causal convolutions.
    """
    operations = (operation for block in dict.fromkeys(spec.blocks) for operation in spec.block_operations(block))
    return next(
        (operation.id for operation in operations if isinstance(operation, ops.Scan | ops.Convolve | ops.Pairs)), ""
    )


def require_trainable(spec: ModelSpec, apart: bool, several: bool) -> None:
    """Raise an error if a model cannot be trained.

    Args:
        spec: the model's architecture.
        apart: whether documents must be separated. No mask can do this for recurrent layers, which carry a state from
            token to token.
        several: whether several processes train the model. FSDP2 then supports neither layers that share weights nor
            mixtures of experts, because an expert may get a gradient in only some of the processes.

    Raises:
        MissingComponent: the model does not predict a next token.
        UsageError: the model has a layer that cannot be trained under these conditions.
    """
    spec.predicts("training on texts")
    spec.one_stack("gptkit train")
    if apart and recurrent_operation(spec):
        raise UsageError(
            f"the model has recurrent layers ({recurrent_operation(spec)}), which carry a state from one document "
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
        for operation in spec.block_operations(block):
            if several and isinstance(operation, ops.Choose):
                raise UsageError(
                    f"the model is a mixture of experts ({operation.id}), which gptkit cannot train with several "
                    "processes",
                    "Train in one process, without torchrun.",
                )


def split(
    tokens: TokenFile,
    held_out: float | str | Path,
    reader: TextReader,
    length: int,
    windows: int,
    apart: bool,
    evaluated: int = _EVALUATED,
) -> tuple[Stretch, Windows]:
    """Divide the tokens into the part to train on and the windows to evaluate.

    Args:
        tokens: the tokens of the training texts.
        held_out: the share of the tokens to hold out, or another text or folder of tokens to evaluate instead.
        reader: the function that reads this other text.
        length: tokens per window.
        windows: windows per step.
        apart: whether documents are separated (see `Stretch.apart`).
        evaluated: the largest number of tokens to evaluate.

    Raises:
        UsageError: there is nothing to evaluate, or less than one step to train on; or the held-out text has another
            tokenizer.
    """
    training, held_out_stretch = _stretches(tokens, held_out, reader, length, apart)
    if not len(held_out_stretch):
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
    return training, held_out_stretch.spread(max(reader.group.size, evaluated // length))


def _stretches(
    tokens: TokenFile, held_out: float | str | Path, reader: TextReader, length: int, apart: bool
) -> tuple[Stretch, Stretch]:
    """Return the range of tokens to train on and the range that is held out. The arguments are those of `split`."""
    if not isinstance(held_out, int | float):
        other = reader([held_out], "held-out", tokens.folder / "tokenizer.json")
        if other.tokenizer != tokens.tokenizer and not same_tokenizer(other.load_tokenizer(), tokens.load_tokenizer()):
            raise UsageError(
                f"the text of --held-out, {held_out}, was tokenised with another tokenizer than the training text",
                f"Use the same tokenizer: gptkit tokenize FILE FOLDER --tokenizer {tokens.folder}",
            )
        return Stretch(tokens, 0, tokens.tokens, length, apart), Stretch(other, 0, other.tokens, length, apart)
    if not 0 < held_out < 1:
        raise UsageError(
            f"the held-out share must be between 0 and 1, not {held_out:g}",
            "Give a share, such as 0.05, or a text file.",
        )
    cut = max(tokens.tokens - max(int(tokens.tokens * held_out), length + 1), 0)
    return Stretch(tokens, 0, cut, length, apart), Stretch(tokens, cut, tokens.tokens, length, apart)


def _about(
    model: Decoder, scratch: bool, tokens: TokenFile, held_out: Windows, settings: Settings, group: Group, apart: bool
) -> dict[str, Any]:
    """Return the settings and hashes that identify a run, as JSON values.

    They are stored in the manifest of the result, and must be the same when the run is resumed. `scratch` is true if
    training starts from random weights, and `apart` if documents are separated.
    """
    return {
        "weights": "random" if scratch else digest_of(model),
        "tree": hashlib.sha256(json_bytes(to_json(model.spec))).hexdigest(),
        "texts": [{"sha256": source.sha256, "bytes": source.bytes} for source in tokens.sources],
        "tokens": tokens.digest,
        "tokenizer": tokens.tokenizer,
        "held_out": hashlib.sha256(held_out.ids.tobytes()).hexdigest(),
        "documents": "apart" if apart else "as one text",
        "processes": group.size,
        **msgspec.to_builtins(settings),
    }


def digest_of(model: Decoder) -> str:
    """Return the sha256 of a model's architecture and parameters, whatever files they were read from."""
    digest = hashlib.sha256(json_bytes(to_json(model.spec)))
    for _, parameter in model.named_parameters():
        digest.update(parameter.detach().cpu().reshape(-1).numpy().data)
    return digest.hexdigest()


@cache
def peak_flops(device: torch.device, dtype: str) -> tuple[float, str]:
    """Return the largest number of FLOPs per second of a device in matrix products, and the source of that number.

    The source is a data sheet, or else a measurement with a product of two 1024 × 1024 matrices.
    """
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
    """Return a prompt with its continuation by the model."""
    ids = coder.encode(prompt)
    new_ids = generate_tokens(
        model, ids, _SAMPLED, sampling=Sampling(0.8, seed=seed), stop=coder.eos_ids, tell=lambda line: None
    )
    return coder.decode([*ids, *new_ids], skip_special_tokens=True)


def gathered(model: Decoder, group: Group) -> Decoder:
    """Return the model in eval mode with unsharded parameters, in every process."""
    if group.alone:
        return model.eval()

    def tensors() -> Iterator[tuple[str, np.ndarray[Any, Any], str]]:
        for name, parameter in model.named_parameters():
            yield name, *as_array(group.whole(parameter.detach()).contiguous())

    return build(model.spec, tensors(), torch.float32)
