"""Heal a changed model: train it to predict like its teacher, the model from which a swap of components made it.

The loss is the KL divergence of the model's next-token distribution from the teacher's (Hinton et al. 1503.02531, at
temperature 1). Before that, every changed layer can be trained alone, on the input of the teacher's layer (block-local
distillation, as in 2510.14444). `rates` chooses the learning rate. If training does not bring the model closer to its
teacher, the changed model is written untrained.

Two other kinds of runs show how much comes from the text alone. The *control* is the teacher, trained further on the
same tokens as an ordinary language model. The *floor* is the changed architecture with random weights, trained in the
same way as the changed model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec

from ..architectures import expressed
from ..components import ModelSpec
from ..converter.manifest import MANIFEST
from ..converter.targets import with_config
from ..converter.threads import suit
from ..converter.tokenizer import Tokenizer, load_tokenizer
from ..display import Record, Shown
from ..errors import InvalidInput, UsageError
from ..modules import Decoder
from ..modules.load import load
from ..modules.save import require_form, save
from ..signatures import takes
from ..surgery.recipe import HEAL, read_recipe
from ..surgery.registry import Step
from .data import SAMPLE, ProgressCallback, Stretch, TokenFile, Windows, paths_of, require_tokenizer
from .loop import Settings, TrainingStep, usual_rate
from .options import FURTHER, HealOptions, windows_of
from .parallel import Group, process_group
from .rates import FILE
from .runs import HeldOutFigures, Outcome, Runs, stores_in
from .state import claim, run_folder
from .train import (
    CONTEXT,
    TextReader,
    digest_of,
    family_of,
    gathered,
    longest,
    recurrent_operation,
    require_trainable,
    size_of,
    split,
)
from .trainable import changed_layers, chosen, matrices, rank_of, touched

BUDGET = 20_000, 400_000
"""The default budget is every token of the text once, but at least and at most these numbers of tokens."""
_HELD_OUT_RANGE = 1024, 2**16
"""The smallest and the largest number of held-out tokens, if the user does not choose it."""
_BUDGET_PER_HELD_OUT = 40
"""The held-out text has at most 1/40 of the budget's tokens, because every evaluation reads all of it."""
_EVALUATIONS = 0.1
"""The number of tokens that all evaluations together read, as a share of the training tokens. It includes the
evaluations of a trial and of the averaged parameters. Evaluating a token takes about half as long as training on it, so
evaluations take a twentieth of the time.
"""
_PACE = 3e10
"""An assumed speed in FLOPs per second, from which gptkit estimates how many tokens a budget in seconds will have."""


@dataclass(frozen=True)
class Healed(Record, Shown):
    """The result of healing a changed model, that is, of training it to predict like its teacher."""

    JSON = "folder=name teacher tokens steps seeds trained local original start healed control floor recovered kept"

    folder: Path
    teacher: str
    """The teacher as the user named it, such as a path or a repository on the hub."""
    tokens: int
    """Training tokens per run."""
    steps: int
    """Steps per run."""
    seeds: int
    """The number of runs of each kind."""
    trained: int
    """The number of parameters that were trained."""
    local: tuple[int, ...]
    """The layers that were first trained alone."""
    original: HeldOutFigures
    """The loss of the teacher on the held-out text."""
    start: HeldOutFigures
    """The loss and KL divergence of the changed model on the held-out text before training."""
    healed: Outcome
    """The results of the runs that trained the changed model to predict like the teacher."""
    control: Outcome | None
    """The results of the control runs, which trained the teacher further on the same tokens; None without a control."""
    floor: Outcome | None
    """The results of the floor runs, which trained the changed architecture from random weights; None without them."""

    @property
    def name(self) -> str:
        return str(self.folder)

    @property
    def kept(self) -> bool:
        """Whether the changed model was written untrained, because no training brought it closer to the teacher."""
        return self.healed.runs[0] == self.start

    @property
    def recovered(self) -> float | None:
        """The share of the changed model's KL divergence that healing removed; None if it was 0 before training."""
        return None if self.start.kl <= 0 else 1 - self.healed.kl / self.start.kl


@takes(HealOptions)
def heal(
    changed: str | Path,
    teacher: str | Path,
    data: str | Path | Sequence[str | Path],
    out: str | Path,
    options: HealOptions | None = None,
    *,
    on_start: Callable[[str, HeldOutFigures, HeldOutFigures], None] = lambda trained, original, start: None,
    tell: Callable[[str, TrainingStep], None] = lambda what, step: None,
    progress: ProgressCallback | None = None,
    **fields: Any,
) -> Healed:
    """Train a changed model to predict as its teacher, and write it as a checkpoint.

    For comparison, also train a control and a floor (see `HealOptions.beside`).

    Args:
        changed: the checkpoint of the changed model, which a swap wrote.
        teacher: the checkpoint that the changed model was made from. It must have the same tokens.
        data: text files, or one folder that `tokenize` wrote with the teacher's tokenizer.
        out: the folder to make. The checkpoints and measurements of the runs are in the folder `out`.healing.
        options: how to train; see `HealOptions`.
        on_start: called before training with three arguments: `HealOptions.trained`, and the measurements of the
            teacher and of the changed model on the held-out text.
        tell: called after every step, with the name of the run and the step.
        progress: called during tokenisation after every piece of text, with its number of bytes and the number of bytes
            of all texts.
        fields: fields of `HealOptions`, which take precedence over `options`.

    Raises:
        UsageError, InvalidInput, Offline, GptkitError, KeyboardInterrupt: as in `train`; also if the vocabularies
            differ.
        NoNumber: as in `train`, except that the run cannot continue at another learning rate, because its layers were
            trained at this one.
    """
    options = replace(options or HealOptions(), **fields)
    resume, force = options.resume, options.force
    target, texts = Path(out).expanduser(), paths_of(data)
    with ExitStack() as stack:
        group = stack.enter_context(process_group(options.device))
        folder = run_folder(target, "healing")
        group.lead(lambda: claim(stack, target, folder, lambda: stores_in(folder, group), resume, force))
        resumed = any(run.resumes(resume, force) for run in stores_in(folder, group))
        if not resumed:
            group.lead(lambda: (folder / FILE).unlink(missing_ok=True))
        models = _Models.load(changed, teacher, options, group)
        form = models.require_trainable(options, group)
        length = models.context if options.context is None else options.context
        models.require_layers(options)
        settings = _settings(options, models, length, group)  # refuse wrong options before reading a text
        reader = TextReader(
            folder, resumed, group, models.tokenizer_source, models.teacher.spec.vocab_size, progress, options.offline
        )
        tokens = models.read_texts(reader, texts, options)
        if options.tokens is None and options.seconds is None:
            options = replace(options, tokens=min(max(tokens.tokens, BUDGET[0]), BUDGET[1]))
            settings = _settings(options, models, length, group)
        # Recurrent layers carry a state across documents, which no mask prevents.
        apart = not any(recurrent_operation(model.spec) for model in models.both)
        most_tokens = _most_evaluated(options, models.model.spec)
        training, held_out = split(tokens, options.held_out, reader, length, settings.windows, apart, most_tokens)
        settings = msgspec.structs.replace(settings, every=options.every or _rhythm(settings, held_out.ids.size))
        runs = models.runs(options, settings, tokens, training, held_out, folder, group, tell)
        result, finished = models.trained(runs, options, target, on_start)
        record, recipe = _records(result, options, settings, tokens, models, texts)
        whole = gathered(finished.eval(), group)
        whole.source = replace(models.model.source, path=tokens.folder, texts={}) if models.model.source else None
        group.lead(lambda: save(whole, target, form, dtype="float32", force=force, record=record, about=recipe))
        group.lead(runs.done)
        return result


@dataclass(frozen=True)
class _Models:
    """The changed model and its teacher, with the tokenizer that both use."""

    changed: str
    """The path or the name on the hub of the changed model."""
    reference: str
    """The path or the name on the hub of the teacher."""
    model: Decoder
    teacher: Decoder
    tokenizer: Tokenizer | None
    tokenizer_source: str
    """The path or the name on the hub of the model from which the tokenizer was read."""

    @classmethod
    def load(cls, changed: str | Path, teacher: str | Path, options: HealOptions, group: Group) -> _Models:
        """Load both models. Raise UsageError if their tokenizers encode the same text differently."""
        teacher_model, model = (
            load(reference, "float32", device=group.device, **options.opening) for reference in (teacher, changed)
        )
        tokenizer = _tokenizer_of((teacher_model, teacher), (model, changed))
        return cls(str(changed), str(teacher), model, teacher_model, *tokenizer)

    @property
    def both(self) -> tuple[Decoder, Decoder]:
        return self.teacher, self.model

    @property
    def context(self) -> int:
        """The default number of tokens per training window."""
        return min(CONTEXT, *(longest(model.spec) for model in self.both))

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The layers that differ between the models. There are none if the models differ in depth or hidden size."""
        return changed_layers(self.teacher, self.model)

    def require_trainable(self, options: HealOptions, group: Group) -> str:
        """Check that the models and the chosen parameters can be trained, and return the format of the healed model.

        The format is a target as in `save`, such as "hf:llama". Raise UsageError if the models cannot be trained.
        """
        for model in self.both:
            require_trainable(model.spec, False, not group.alone)
        rank, spec = rank_of(options.trained), self.model.spec
        if rank and not group.alone:
            raise UsageError(
                "--train lora:RANK does not work with several processes (torchrun)",
                "Run gptkit heal without torchrun, or choose --train all.",
            )
        if rank > spec.hidden_size:
            raise UsageError(
                f"--train lora:{rank}: the rank must not be larger than the model's hidden size, {spec.hidden_size:,}"
            )
        declared = list(spec.parameters())
        names = {*matrices(declared)} if rank else chosen(options.trained, declared, lambda: touched(*self.both))
        if not names:
            raise UsageError(
                f"--train {options.trained} selects no parameter of the changed model, so there is nothing to train"
            )
        family, _ = expressed(spec)
        tree = self.model.source
        form = options.to or (
            "local" if family is None else f"hf:{family if tree is None else family_of(tree, family)}"
        )
        form = with_config(form, options.config)
        with _zeros_filled(self.model, names):
            require_form(self.model, form, "float32")
        return form

    def require_layers(self, options: HealOptions) -> None:
        """Raise UsageError if the option `local` or `hidden` is used but layers of the models cannot be compared.

        They can be compared if both models have the same number of layers and the same hidden size, and a layer
        differs.
        """
        if options.local and not self.layers:
            raise UsageError(
                "--local trains each changed layer to imitate the same layer of the teacher. It needs equal numbers of "
                "layers, equal hidden sizes, and at least one layer that differs",
                "Leave out --local.",
            )
        if options.hidden and not self.layers:
            raise UsageError(
                "--hidden compares the hidden states of CHANGED and of the teacher after each layer. It needs equal "
                "numbers of layers, equal hidden sizes, and at least one layer that differs",
                "Leave out --hidden.",
            )

    def read_texts(self, reader: TextReader, texts: Sequence[str | Path], options: HealOptions) -> TokenFile:
        """Return the tokens of the texts. Raise UsageError if the tokenizer or vocabulary does not fit the models."""
        tokens, sizes = reader(texts, "data"), [model.spec.vocab_size for model in self.both]
        if tokens.folder != reader.folder / "data":
            require_tokenizer(tokens, self.tokenizer_source, self.tokenizer, **options.opening)
        if tokens.vocabulary > min(sizes):
            raise UsageError(
                f"the texts have token ids up to {tokens.vocabulary - 1:,}, but the models have embeddings of "
                f"{sizes[0]:,} and {sizes[1]:,} rows",
                "Give the text files instead of a folder of tokens, or tokenise them again with the "
                "tokenizer of the teacher.",
            )
        return tokens

    def runs(
        self,
        options: HealOptions,
        settings: Settings,
        tokens: TokenFile,
        training: Stretch,
        held_out: Windows,
        folder: Path,
        group: Group,
        tell: Callable[[str, TrainingStep], None],
    ) -> Runs:
        """Return the object that makes the training runs of this healing. The arguments are those of `Runs`."""
        about = {
            "teacher": digest_of(self.teacher), "changed": digest_of(self.model), "texts": _hashes(tokens),
            "tokens": tokens.digest, "held_out": hashlib.sha256(held_out.ids.tobytes()).hexdigest(),
            "processes": group.size, "train": options.trained, "local": options.local, "hidden": options.hidden,
        }  # fmt: skip
        suit(self.model.spec)
        self.teacher.requires_grad_(False).eval()
        usual = msgspec.structs.replace(settings, rate=usual_rate(size_of(self.model.spec)))
        return Runs(
            self.teacher, held_out, usual, options.rate, options.local, self.layers, options.hidden, tokens, training,
            group, folder, about, options.resume, options.force, tell,
        )  # fmt: skip

    def trained(
        self,
        runs: Runs,
        options: HealOptions,
        target: Path,
        on_start: Callable[[str, HeldOutFigures, HeldOutFigures], None],
    ) -> tuple[Healed, Decoder]:
        """Make all training runs of the healing. Return the results, and the healed model of the first seed.

        Args:
            runs: the object that makes the runs.
            options: the options of `heal`.
            target: the folder of the healed checkpoint.
            on_start: see `heal`.
        """
        original, start, settings = runs.figures_of(self.teacher), runs.figures_of(self.model), runs.settings
        on_start(options.trained, original, start)
        finished, outcome, steps, count = runs.healed(self.model, start, options.trained, options.seeds)
        control = floor = None
        if options.beside in (True, "control"):
            control = runs.control(original, options.seeds)
        if options.beside in (True, "floor"):
            random_model = partial(
                load, self.changed, "float32", random=True, device=runs.group.device, **options.opening
            )
            floor = runs.floor(random_model, options.seeds)
        layers = self.layers if options.local and settings.steps != 1 else ()
        tokens = steps * settings.windows * settings.context
        result = Healed(
            target,
            self.reference,
            tokens,
            steps,
            options.seeds,
            count,
            layers,
            original,
            start,
            outcome,
            control,
            floor,
        )
        return result, finished


def _settings(options: HealOptions, models: _Models, length: int, group: Group) -> Settings:
    """Return the settings of a training run in windows of `length` tokens.

    Without a budget in the options, the number of tokens in the text decides the budget. The text is not read yet at
    this point, so the settings have the smallest default budget.
    """
    by_text = options.tokens is None and options.seconds is None
    tokens = BUDGET[0] if by_text else options.tokens
    windows = windows_of(options.batch, length, tokens, group.size * options.accumulate, FURTHER)
    rate = usual_rate(size_of(models.model.spec))
    return options.settings(windows, length, tokens, rate, group, averaged=True, patience=options.patience)


def _most_evaluated(options: HealOptions, spec: ModelSpec) -> int:
    """Return the largest number of held-out tokens to use, so that evaluations take a small share of the budget."""
    pace = _PACE / (8 * size_of(spec))
    budget = int((options.seconds or 0) * pace) if options.tokens is None else options.tokens
    least, most = _HELD_OUT_RANGE
    return min(max(budget // _BUDGET_PER_HELD_OUT, least), most)


def _hashes(tokens: TokenFile) -> list[dict[str, Any]]:
    return [{"sha256": source.sha256, "bytes": source.bytes} for source in tokens.sources]


def _records(
    result: Healed,
    options: HealOptions,
    settings: Settings,
    tokens: TokenFile,
    models: _Models,
    texts: Sequence[str | Path],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two entries for the manifest of the healed checkpoint: how it was healed, and a recipe that repeats it."""
    settings = msgspec.structs.replace(settings, rate=result.healed.rate)
    record = {**msgspec.to_builtins(settings), "train": options.trained, "share": options.local}
    record |= {"hidden": options.hidden, "texts": _hashes(tokens)}
    record |= _timeless({name: value for name, value in result.as_json().items() if name != "folder"})
    arguments = {
        "tokens": options.tokens, "seconds": options.seconds, "train": options.trained, "local": options.local,
        "hidden": options.hidden, "seeds": options.seeds, "beside": options.beside is True, "rate": settings.rate,
        "warmup": options.warmup,
        "decay": options.decay, "clip": options.clip, "batch": settings.windows * settings.context,
        "context": settings.context, "accumulate": options.accumulate, "every": settings.every or None,
        "held_out": options.held_out if isinstance(options.held_out, int | float) else str(options.held_out),
        "patience": options.patience, "seed": options.seed, "dtype": settings.dtype, "compile": options.compiled,
    }  # fmt: skip
    tree = models.model.source
    before = tree is not None and any("healed" in entry for entry in tree.origin.history)
    recipe_settings = {name: value for name, value in arguments.items() if value is not None}
    return {"healed": record}, _recipe(models.changed, before, texts, recipe_settings, options.to)


def _rhythm(settings: Settings, held_out: int) -> int:
    """Return the default number of steps between two evaluations of `held_out` tokens.

    With this number, all evaluations together read about `_EVALUATIONS` times as many tokens as training does. For a
    budget in seconds, the result is 0, because the clock then decides when to evaluate.
    """
    if settings.steps is None:
        return 0
    affordable = int(_EVALUATIONS * settings.steps * settings.windows * settings.context / held_out)
    return max(-(-settings.steps // max(1, min(affordable - 2, 10))), 1)


@contextmanager
def _zeros_filled(model: Decoder, names: Container[str]) -> Iterator[None]:
    """Inside the context, fill every parameter in `names` that contains only zeros with ones, for a check of a format.

    Some formats cannot store a certain parameter, and accept only models in which it is zero. Training will change the
    parameter. So the check whether the format can store the trained model must see another value than zero.
    """
    zeros = [tensor.data for name, tensor in model.named_parameters() if name in names and not tensor.any()]
    for tensor in zeros:
        tensor.fill_(1)
    try:
        yield
    finally:
        for tensor in zeros:
            tensor.zero_()


def _timeless(value: Any) -> Any:
    """Return a JSON value without the measured times in it, so that the same call always writes the same file."""
    if isinstance(value, Mapping):
        return {name: _timeless(item) for name, item in value.items() if name != "seconds"}
    return [_timeless(item) for item in value] if isinstance(value, list) else value


def _recipe(
    changed: str | Path, healed: bool, texts: Sequence[str | Path], settings: Mapping[str, Any], to: str | None
) -> dict[str, Any]:
    """Return an entry for the manifest: the recipe that made the changed model, with this healing as its last step.

    The entry is empty if no swap made the model, if the model was already `healed` before, or if there are several
    texts, because recipes support neither of the last two.
    """
    if healed or len(texts) > 1 or not (Path(changed) / MANIFEST).is_file():
        return {}
    try:
        recipe = read_recipe(Path(changed))
    except (InvalidInput, UsageError):
        return {}
    healing = Step(HEAL.name, str(texts[0]), settings=settings)
    return {"swap": {"recipe": replace(recipe, to=to, heal=healing).as_json()}}


def _tokenizer_of(*models: tuple[Decoder, str | Path]) -> tuple[Tokenizer | None, str]:
    """Return the tokenizer for both models, and the path or name of the model from which it was read.

    A model without a tokenizer uses that of the other model. Raise UsageError if both have tokenizers, and these encode
    the same text differently.
    """
    sources = [model.source for model, _ in models]
    coders = [load_tokenizer(source.path or Path(), source.texts) if source else None for source in sources]
    encodings = [None if coder is None else coder.encode(SAMPLE) for coder in coders]
    if None not in encodings and encodings[0] != encodings[1]:  # the changed model may have more tokens
        raise UsageError(
            "the tokenizers of the changed model and of the teacher encode the same text differently",
            "Give --teacher the model that CHANGED was made from.",
        )
    whose = 0 if coders[0] is not None or coders[1] is None else 1
    return coders[whose], str(models[whose][1])
