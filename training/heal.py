"""heal: a changed model trained to answer as the original does, beside a control and a floor.

The whole model is trained by the KL divergence of its next-token distribution from the original's (Hinton et al.
1503.02531, at temperature 1), after each changed layer by itself where that is asked for, on what the original's layer
was given (block-local; as in 2510.14444). `rates` chooses the rate, and no model is published that is further from the
original than the changed one was.

Two other runs show what the text alone does: the *control* is the original, trained on the same tokens as a language
model; the *floor* is the changed tree from random weights, trained as the changed model was.
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
from ..converter.threads import suit
from ..converter.tokenizer import Tokenizer, load_tokenizer
from ..display import Record, Shown
from ..errors import InvalidInput, UsageError
from ..modules import Decoder
from ..modules.load import load
from ..modules.save import require_form, save
from ..surgery.recipe import HEAL, read_recipe
from ..surgery.registry import Step as Asked
from .data import SAMPLE, Progress, Stretch, TokenFile, Windows, paths_of, require_tokenizer
from .loop import Settings, TrainingStep, usual_rate
from .options import FURTHER, HealOptions, takes, windows_of
from .parallel import Group, group
from .rates import FILE
from .runs import Held, Outcome, Runs, stores_in
from .state import beside as beside_of
from .state import claim
from .train import (
    CONTEXT,
    TextReader,
    carries,
    digest_of,
    family_of,
    gathered,
    longest,
    require_trainable,
    size_of,
    split,
)
from .trainable import changed_layers, chosen, matrices, rank_of, touched

BUDGET = 20_000, 400_000
"""The default budget is each token of the text once, but at least and at most this many tokens."""
_LEAST_HELD, _MOST_HELD = 1024, 2**16
_HELD = 40
"""The held-out text has at most 1/40 of the budget's tokens, because every evaluation reads all of it."""
_EVALUATIONS = 0.1
"""The tokens that all evaluations read, as a share of the budget. They include the evaluations of a trial and of the
average of the last steps. Evaluating a token takes half as long as training on it, so this is a twentieth of the time.
"""
_PACE = 3e10
"""The FLOPs per second from which gptkit estimates the tokens of a budget in seconds."""


@dataclass(frozen=True)
class Healed(Record, Shown):
    """The result of a healing."""

    JSON = "folder=name teacher tokens steps seeds trained local original start healed control floor recovered kept"

    folder: Path
    teacher: str
    tokens: int  # trained on in a run
    steps: int  # of a run
    seeds: int  # runs of each kind
    trained: int  # the number of parameters that were trained
    local: tuple[int, ...]  # the layers that were first trained one by one
    original: Held  # the teacher on the held-out text
    start: Held  # the changed model on the held-out text, before training
    healed: Outcome  # the changed model, trained
    control: Outcome | None  # the teacher, trained to predict the same tokens
    floor: Outcome | None  # the changed architecture, trained in the same way from random weights

    @property
    def name(self) -> str:
        return str(self.folder)

    @property
    def kept(self) -> bool:
        """Whether the folder has the changed model untrained, because no training brought it closer to the teacher."""
        return self.healed.held[0] == self.start

    @property
    def recovered(self) -> float | None:
        """The share of the changed model's KL divergence that the healing removed; None if there was no divergence."""
        return None if self.start.kl <= 0 else 1 - self.healed.kl / self.start.kl


@takes(HealOptions)
def heal(
    changed: str | Path,
    teacher: str | Path,
    data: str | Path | Sequence[str | Path],
    out: str | Path,
    options: HealOptions | None = None,
    *,
    on_start: Callable[[str, Held, Held], None] = lambda trained, original, start: None,
    tell: Callable[[str, TrainingStep], None] = lambda what, step: None,
    progress: Progress | None = None,
    **fields: Any,
) -> Healed:
    """Train a changed model to answer as the original does, and write it as a checkpoint.

    For comparison, also train a control and a floor (see `HealOptions.beside`).

    Args:
        changed: a checkpoint that a swap wrote.
        teacher: the checkpoint that the changed model was made from. It must have the same tokens.
        data: text files, or one folder that `tokenize` wrote with the teacher's tokenizer.
        out: the folder to make. The checkpoints and measurements of the runs are in the folder `out`.healing.
        options: how to train; see `HealOptions`.
        on_start: called with `trained` and the results of the teacher and of the changed model on the held-out text.
        tell: called after every step, with the name of the run and the step.
        progress: progress of tokenising, as in `tokenize`.
        fields: fields of `HealOptions`, which take precedence over `options`.

    Raises:
        UsageError, InvalidInput, Offline, GptkitError, KeyboardInterrupt: as in `train`; also if the vocabularies
            differ.
        NoNumber: as in `train`, except that the run cannot continue at another rate, because its layers were trained at
            this one.
    """
    how = replace(options or HealOptions(), **fields)
    target, paths = Path(out).expanduser(), paths_of(data)
    with ExitStack() as stack:
        us = stack.enter_context(group(how.device))
        folder = beside_of(target, "healing")
        us.lead(lambda: claim(stack, target, folder, lambda: stores_in(folder, us), how.resume, how.force))
        going_on = any(run.goes_on(how.resume, how.force) for run in stores_in(folder, us))
        if not going_on:
            us.lead(lambda: (folder / FILE).unlink(missing_ok=True))
        models = _Models.load(changed, teacher, how, us)
        form = models.require_trainable(how, us)
        length = models.context if how.context is None else how.context
        models.require_layers(how)
        settings = _settings(how, models, length, us)  # refuse wrong options before reading a text
        reader = TextReader(
            folder, going_on, us, models.tokenizer_source, models.teacher.spec.vocab_size, progress, how.offline
        )
        found = models.read_texts(reader, paths, how)
        if how.tokens is None and how.seconds is None:
            how = replace(how, tokens=min(max(found.tokens, BUDGET[0]), BUDGET[1]))
            settings = _settings(how, models, length, us)
        apart = not any(carries(model.spec) for model in models.both)  # no mask keeps states within a document
        evaluated = _most_evaluated(how, models.model.spec)
        training, held = split(found, how.held_out, reader, length, settings.windows, apart, evaluated)
        settings = msgspec.structs.replace(settings, every=how.every or _rhythm(settings, held.ids.size))
        runs = models.runs(how, settings, found, training, held, folder, us, tell)
        result, finished = models.trained(runs, how, target, on_start)
        record, recipe = _records(result, how, settings, found, models, paths)
        whole = gathered(finished.eval(), us)
        whole.source = replace(models.model.source, path=found.folder, texts={}) if models.model.source else None
        us.lead(lambda: save(whole, target, form, dtype="float32", force=how.force, record=record, about=recipe))
        us.lead(runs.done)
        return result


@dataclass(frozen=True)
class _Models:
    """The changed model and its teacher, with the tokenizer of both."""

    changed: str
    """The reference of the changed model."""
    reference: str
    """The reference of the teacher."""
    model: Decoder
    teacher: Decoder
    tokenizer: Tokenizer | None
    tokenizer_source: str
    """The reference of the one of the two that has the tokenizer."""

    @classmethod
    def load(cls, changed: str | Path, teacher: str | Path, how: HealOptions, us: Group) -> _Models:
        """Load both models. Raise UsageError if their tokenizers encode the same text differently."""
        teacher_model, model = (load(each, "float32", device=us.device, **how.opening) for each in (teacher, changed))
        tokenizer = _tokenizer_of((teacher_model, teacher), (model, changed))
        return cls(str(changed), str(teacher), model, teacher_model, *tokenizer)

    @property
    def both(self) -> tuple[Decoder, Decoder]:
        return self.teacher, self.model

    @property
    def context(self) -> int:
        """The default number of tokens per window."""
        return min(CONTEXT, *(longest(model.spec) for model in self.both))

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The layers that differ, which are none if the layers of the models do not correspond."""
        return changed_layers(self.teacher, self.model)

    def require_trainable(self, how: HealOptions, us: Group) -> str:
        """Return the format of the result. Raise UsageError if the models or the parameters cannot be trained."""
        for model in self.both:
            require_trainable(model.spec, False, not us.alone)
        rank, spec = rank_of(how.trained), self.model.spec
        if rank and not us.alone:
            raise UsageError(
                "--train lora:RANK does not work with several processes (torchrun)",
                "Run gptkit heal without torchrun, or choose --train all.",
            )
        if rank > spec.hidden_size:
            raise UsageError(
                f"--train lora:{rank}: the rank must not be larger than the model's hidden size, {spec.hidden_size:,}"
            )
        declared = list(spec.parameters())
        names = {*matrices(declared)} if rank else chosen(how.trained, declared, lambda: touched(*self.both))
        if not names:
            raise UsageError(
                f"--train {how.trained} selects no parameter of the changed model, so there is nothing to train"
            )
        family, _ = expressed(spec)
        tree = self.model.source
        form = how.to or ("local" if family is None else f"hf:{family if tree is None else family_of(tree, family)}")
        with _moved(self.model, names):
            require_form(self.model, form, "float32")
        return form

    def require_layers(self, how: HealOptions) -> None:
        """Raise UsageError if `local` or `hidden` needs layers that correspond and there are none."""
        if how.local and not self.layers:
            raise UsageError(
                "--local trains each changed layer to imitate the same layer of the teacher. It needs equal numbers of "
                "layers, equal hidden sizes, and at least one layer that differs",
                "Leave out --local.",
            )
        if how.hidden and not self.layers:
            raise UsageError(
                "--hidden compares the hidden states of CHANGED and of the teacher after each layer. It needs equal "
                "numbers of layers, equal hidden sizes, and at least one layer that differs",
                "Leave out --hidden.",
            )

    def read_texts(self, reader: TextReader, paths: Sequence[str | Path], how: HealOptions) -> TokenFile:
        """Return the tokens of the texts. Raise UsageError if they do not fit the models."""
        found, sizes = reader(paths, "data"), [model.spec.vocab_size for model in self.both]
        if found.folder != reader.folder / "data":
            require_tokenizer(found, self.tokenizer_source, self.tokenizer, **how.opening)
        if found.vocabulary > min(sizes):
            raise UsageError(
                f"the texts have token ids up to {found.vocabulary - 1:,}, but the models have embeddings of "
                f"{sizes[0]:,} and {sizes[1]:,} rows",
                "Give the text files instead of a folder of tokens, or tokenise them again with the "
                "tokenizer of the teacher.",
            )
        return found

    def runs(
        self,
        how: HealOptions,
        settings: Settings,
        found: TokenFile,
        training: Stretch,
        held: Windows,
        folder: Path,
        us: Group,
        tell: Callable[[str, TrainingStep], None],
    ) -> Runs:
        """Return the runs of this healing, none of which has begun."""
        about = {
            "teacher": digest_of(self.teacher), "changed": digest_of(self.model), "texts": _hashes(found),
            "tokens": found.digest, "held_out": hashlib.sha256(held.ids.tobytes()).hexdigest(), "processes": us.size,
            "train": how.trained, "local": how.local, "hidden": how.hidden,
        }  # fmt: skip
        suit(self.model.spec)
        self.teacher.requires_grad_(False).eval()
        usual = msgspec.structs.replace(settings, rate=usual_rate(size_of(self.model.spec)))
        return Runs(
            self.teacher, held, usual, how.rate, how.local, self.layers, how.hidden, found, training, us, folder,
            about, how.resume, how.force, tell,
        )  # fmt: skip

    def trained(
        self, runs: Runs, how: HealOptions, target: Path, on_start: Callable[[str, Held, Held], None]
    ) -> tuple[Healed, Decoder]:
        """Make the runs. Return the result, and the healed model of the first seed."""
        original, start, settings = runs.held(self.teacher), runs.held(self.model), runs.settings
        on_start(how.trained, original, start)
        finished, outcome, steps, count = runs.healed(self.model, start, how.trained, how.seeds)
        control = floor = None
        if how.beside in (True, "control"):
            control = runs.control(original, how.seeds)
        if how.beside in (True, "floor"):
            anew = partial(load, self.changed, "float32", random=True, device=runs.group.device, **how.opening)
            floor = runs.floor(anew, how.seeds)
        layers = self.layers if how.local and settings.steps != 1 else ()
        tokens = steps * settings.windows * settings.context
        result = Healed(
            target, self.reference, tokens, steps, how.seeds, count, layers, original, start, outcome, control, floor
        )
        return result, finished


def _settings(how: HealOptions, models: _Models, length: int, us: Group) -> Settings:
    """Return the settings of a run. Where a budget follows from the text, which is not read yet, take the least."""
    by_text = how.tokens is None and how.seconds is None
    tokens = BUDGET[0] if by_text else how.tokens
    windows = windows_of(how.batch, length, tokens, us.size * how.accumulate, FURTHER)
    rate = usual_rate(size_of(models.model.spec))
    return how.settings(windows, length, tokens, rate, us, averaged=True, patience=how.patience)


def _most_evaluated(how: HealOptions, spec: ModelSpec) -> int:
    """Return the number of held-out tokens that the budget can afford to evaluate."""
    pace = _PACE / (8 * size_of(spec))
    budget = int((how.seconds or 0) * pace) if how.tokens is None else how.tokens
    return min(max(budget // _HELD, _LEAST_HELD), _MOST_HELD)


def _hashes(found: TokenFile) -> list[dict[str, Any]]:
    return [{"sha256": each.sha256, "bytes": each.bytes} for each in found.sources]


def _records(
    result: Healed, how: HealOptions, settings: Settings, found: TokenFile, models: _Models, paths: Sequence[str | Path]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the manifest says of the healing, and its entry for the recipe."""
    settings = msgspec.structs.replace(settings, rate=result.healed.rate)
    record = {**msgspec.to_builtins(settings), "train": how.trained, "share": how.local, "hidden": how.hidden}
    record |= {"texts": _hashes(found)}
    record |= _timeless({name: value for name, value in result.as_json().items() if name != "folder"})
    given = {
        "tokens": how.tokens, "seconds": how.seconds, "train": how.trained, "local": how.local, "hidden": how.hidden,
        "seeds": how.seeds, "beside": how.beside is True, "rate": settings.rate, "warmup": how.warmup,
        "decay": how.decay, "clip": how.clip, "batch": settings.windows * settings.context,
        "context": settings.context, "accumulate": how.accumulate, "every": settings.every or None,
        "held_out": how.held_out if isinstance(how.held_out, int | float) else str(how.held_out),
        "patience": how.patience, "seed": how.seed, "dtype": settings.dtype, "compile": how.compiled,
    }  # fmt: skip
    tree = models.model.source
    before = tree is not None and any("healed" in each for each in tree.origin.history)
    known = {name: value for name, value in given.items() if value is not None}
    return {"healed": record}, _recipe(models.changed, before, paths, known, how.to)


def _rhythm(settings: Settings, held: int) -> int:
    """Return the steps between two evaluations of `held` tokens that `_EVALUATIONS` allows.

    It is 0 for a budget in seconds, whose evaluations are timed by the clock.
    """
    if settings.steps is None:
        return 0
    afforded = int(_EVALUATIONS * settings.steps * settings.windows * settings.context / held)
    return max(-(-settings.steps // max(1, min(afforded - 2, 10))), 1)


@contextmanager
def _moved(model: Decoder, names: Container[str]) -> Iterator[None]:
    """Fill named parameters that are all zeros with ones for a while, because training will change them."""
    empty = [each.data for name, each in model.named_parameters() if name in names and not each.any()]
    for each in empty:
        each.fill_(1)
    try:
        yield
    finally:
        for each in empty:
            each.zero_()


def _timeless(value: Any) -> Any:
    """Return JSON values without measured seconds, so that the same call always writes the same file."""
    if isinstance(value, Mapping):
        return {name: _timeless(each) for name, each in value.items() if name != "seconds"}
    return [_timeless(each) for each in value] if isinstance(value, list) else value


def _recipe(
    changed: str | Path, healed: bool, data: Sequence[str | Path], settings: Mapping[str, Any], to: str | None
) -> dict[str, Any]:
    """Return the manifest's entry for the recipe of the changed model, with this healing as its last step.

    It is empty if no swap made the model. It is also empty if the model was `healed` before or there are several texts,
    because a recipe cannot express this.
    """
    if healed or len(data) > 1 or not (Path(changed) / MANIFEST).is_file():
        return {}
    try:
        found = read_recipe(Path(changed))
    except (InvalidInput, UsageError):
        return {}
    healing = Asked(HEAL.name, str(data[0]), settings=settings)
    return {"swap": {"recipe": replace(found, to=to, heal=healing).as_json()}}


def _tokenizer_of(*models: tuple[Decoder, str | Path]) -> tuple[Tokenizer | None, str]:
    """Return the tokenizer of two models and the reference of the model that has it.

    A model without a tokenizer uses that of the other. Raise UsageError if the two encode the same text differently.
    """
    about = [model.source for model, _ in models]
    coders = [load_tokenizer(each.path or Path(), each.texts) if each else None for each in about]
    told = [None if coder is None else coder.encode(SAMPLE) for coder in coders]
    if None not in told and told[0] != told[1]:  # the changed one may have tokens besides
        raise UsageError(
            "the tokenizers of the changed model and of the teacher encode the same text differently",
            "Give --teacher the model that CHANGED was made from.",
        )
    whose = 0 if coders[0] is not None or coders[1] is None else 1
    return coders[whose], str(models[whose][1])
