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
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ..architectures import expressed
from ..converter.files import locked
from ..converter.manifest import MANIFEST
from ..converter.threads import suit
from ..converter.tokenizer import Tokenizer, load_tokenizer
from ..display import Record, Shown
from ..errors import InvalidInput, UsageError, shown
from ..modules import Decoder
from ..modules.load import load
from ..modules.save import require_form, save
from ..surgery.recipe import HEAL, read_recipe
from ..surgery.registry import Step as Asked
from .data import SAMPLE, Progress, TokenFile, paths_of, require_tokenizer
from .loop import Settings, TrainingStep, usual_rate
from .parallel import group
from .rates import FILE
from .runs import Held, Outcome, Runs, stores_in
from .state import beside as beside_of
from .state import make, remove_empty, remove_unbegun, require_free
from .train import (
    CONTEXT,
    FURTHER,
    HELD_OUT,
    carries,
    digest_of,
    family_of,
    gathered,
    longest,
    require_trainable,
    settings_of,
    size_of,
    split,
    tokens_of,
    windows_of,
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


# Complex: still to be split.
def heal(  # noqa: C901
    changed: str | Path,
    teacher: str | Path,
    data: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    tokens: int | None = None,
    seconds: float | None = None,
    trained: str = "all",
    local: float = 0.0,
    hidden: float = 0.0,
    seeds: int = 1,
    beside: bool | str = True,
    batch: int | None = None,
    context: int | None = None,
    rate: float | None = None,
    warmup: float = 0.05,
    decay: float = 0.0,
    clip: float = 1.0,
    accumulate: int = 1,
    every: int | None = None,
    patience: int = 0,
    held_out: float | str | Path = HELD_OUT,
    seed: int = 0,
    dtype: str | None = None,
    compiled: bool = False,
    device: str | None = None,
    to: str | None = None,
    resume: bool = False,
    force: bool = False,
    offline: bool = False,
    allow_pickle: bool = False,
    on_start: Callable[[str, Held, Held], None] = lambda trained, original, start: None,
    tell: Callable[[str, TrainingStep], None] = lambda what, step: None,
    progress: Progress | None = None,
) -> Healed:
    """Train a changed model to answer as the original does, and write it as a checkpoint.

    For comparison, also train a control and a floor (see `beside`).

    Args:
        changed: a checkpoint that a swap wrote.
        teacher: the checkpoint that the changed model was made from. It must have the same tokens.
        data: text files, or one folder that `tokenize` wrote with the teacher's tokenizer.
        out: the folder to make. The checkpoints and measurements of the runs are in the folder `out`.healing.
        tokens: the number of training tokens of a run; by default the tokens of the text, within `BUDGET`.
        seconds: the training time of a run, instead of `tokens`.
        trained: the parameters to train: "all", "changed" (new parameters and changed components), "norms", or
            "lora:RANK" (an update of this rank for every matrix).
        local: the share of the budget in which every changed layer is first trained alone, on the same layer of the
            teacher. It needs models with the same number of layers and the same hidden size.
        hidden: the weight of the hidden-state loss, the distance to the teacher's hidden states after every layer. It
            needs models with the same number of layers and the same hidden size.
        seeds: the number of runs of each kind, which differ in the order of the windows.
        beside: whether to also train the control (the teacher, on the same tokens) and the floor (the changed
            architecture from random weights), or "control" or "floor" for only one of them.
        patience: end a run after this number of evaluations without a better one; 0 never ends it early.
        batch: tokens per step. This and the following arguments are as in `train`.
        context: tokens per window.
        rate: AdamW's highest learning rate for the healed model; by default, short trials choose it. The control's rate
            is chosen in the same way, and the floor has the rate of `train` for random weights.
        warmup: the share of a run in which the learning rate rises to `rate`.
        decay: the weight decay; by default none.
        clip: the largest norm of a gradient.
        accumulate: the number of parts into which a step is split.
        every: steps between two evaluations and checkpoints; by default evaluations take about a twentieth of the
            time.
        held_out: the share of the text that is held out, or the path of a separate text.
        seed: the seed of the first run's order of windows. The other runs have the seeds that follow.
        dtype: the dtype of matrix products.
        compiled: whether to compile both models with torch.compile.
        device: by default a GPU if there is one.
        to: the format of the result, as in `save`; by default the files of the family that has this architecture, or
            "local" if there is no such family.
        resume: continue from the last checkpoints.
        force: replace `out`, and discard unfinished runs.
        offline: use local files and the hub's cache only.
        allow_pickle: also read .bin files (weights only).
        on_start: called with `trained` and the results of the teacher and of the changed model on the held-out text.
        tell: called after every step, with the name of the run and the step.
        progress: progress of tokenising, as in `tokenize`.

    Raises:
        UsageError, InvalidInput, Offline, GptkitError, KeyboardInterrupt: as in `train`; also if the vocabularies
            differ.
        NoNumber: as in `train`, except that the run cannot continue at another rate, because its layers were trained at
            this one.
    """
    target, paths = Path(out).expanduser(), paths_of(data)
    rank = rank_of(trained)
    if seeds < 1 or not 0 <= local < 1:
        raise UsageError(
            f"--seeds must be 1 or more (it is {seeds}), and --local at least 0 and less than 1 (it is {local:g})"
        )
    if beside not in (True, False, "control", "floor"):
        raise UsageError(f"beside must be True, False, 'control' or 'floor', not {shown(beside, 40)}")
    if not 0 <= hidden < math.inf:
        raise UsageError(f"--hidden, the weight of the hidden-state loss, must be 0 or more, not {hidden:g}")
    with ExitStack() as stack:
        us = stack.enter_context(group(device))
        folder = beside_of(target, "healing")

        def claim() -> None:
            require_free(target, resume, force, stores_in(folder, us))
            stack.enter_context(locked(folder))  # first: whoever has it not cleans nothing up
            make(folder)
            stack.callback(remove_empty, folder)
            stack.callback(remove_unbegun, folder)
            runs = stores_in(folder, us)
            if not any(each.goes_on(resume, force) for each in runs):
                for each in runs:  # now, for their tokens may be written over: half of a run is none to resume
                    each.forget()
                (folder / FILE).unlink(missing_ok=True)

        us.lead(claim)
        going_on = any(each.goes_on(resume, force) for each in stores_in(folder, us))
        opening: Any = {"device": us.device, "offline": offline, "allow_pickle": allow_pickle}
        original, model = (load(each, "float32", **opening) for each in (teacher, changed))
        sizes = original.spec.vocab_size, model.spec.vocab_size
        coder, coded = _tokenizer_of((original, teacher), (model, changed))
        for each in (original, model):
            require_trainable(each.spec, False, not us.alone)
        if rank and not us.alone:
            raise UsageError(
                "--train lora:RANK does not work with several processes (torchrun)",
                "Run gptkit heal without torchrun, or choose --train all.",
            )
        if rank > model.spec.hidden_size:
            raise UsageError(
                f"--train lora:{rank}: the rank must not be larger than the model's hidden size, "
                f"{model.spec.hidden_size:,}"
            )
        declared = list(model.spec.parameters())
        names = set(matrices(declared)) if rank else chosen(trained, declared, lambda: touched(original, model))
        if not names:
            raise UsageError(
                f"--train {trained} selects no parameter of the changed model, so there is nothing to train"
            )
        family, _ = expressed(model.spec)
        tree = model.source
        form = to or ("local" if family is None else f"hf:{family if tree is None else family_of(tree, family)}")
        with _moved(model, names):
            require_form(model, form, "float32")

        length = min(CONTEXT, longest(original.spec), longest(model.spec)) if context is None else context
        layers = changed_layers(original, model)
        if local and not layers:
            raise UsageError(
                "--local trains each changed layer on the same layer of the teacher, but the models have no "
                "such layers: they must have equal numbers of layers, equal hidden sizes and a changed "
                "layer",
                "Leave out --local.",
            )
        if hidden and not layers:
            raise UsageError(
                "--hidden compares the hidden states of CHANGED and of the teacher after each layer. It needs equal "
                "numbers of layers, equal hidden sizes, and at least one layer that differs",
                "Leave out --hidden.",
            )

        def settings_for(tokens: int | None) -> Settings:
            windows = windows_of(batch, length, tokens, us.size * accumulate, FURTHER)
            return settings_of(
                windows, length, tokens, seconds, every=every, accumulate=accumulate, warmup=warmup, averaged=True,
                decay=decay, clip=clip, seed=seed, compiled=compiled, patience=patience,
                rate=usual_rate(size_of(model.spec)) if rate is None else rate,
                dtype=dtype or ("bfloat16" if us.device.type == "cuda" else "float32"),
            )  # fmt: skip

        by_text = tokens is None and seconds is None
        settings = settings_for(BUDGET[0] if by_text else tokens)  # what is wrong is refused before a text is read

        made = {"tokenizer": coded, "vocabulary": sizes[0], "progress": progress, "offline": offline}

        def take(paths: Sequence[str | Path], name: str, **another: Any) -> TokenFile:
            return tokens_of(paths, folder / name, going_on, us, **{**made, **another})

        found = take(paths, "data")
        if found.folder != folder / "data":
            require_tokenizer(found, coded, coder, offline=offline, allow_pickle=allow_pickle)
        if found.vocabulary > min(sizes):
            rows = f"{sizes[0]:,} and {sizes[1]:,} rows"
            message = (
                f"the texts have token ids up to {found.vocabulary - 1:,}, but the models have embeddings of {rows}"
            )
            raise UsageError(
                message,
                "Give the text files instead of a folder of tokens, or tokenise them again with the "
                "tokenizer of the teacher.",
            )
        if by_text:
            tokens = min(max(found.tokens, BUDGET[0]), BUDGET[1])
            settings = settings_for(tokens)
        # Held out is what the budget can afford to evaluate.
        pace = _PACE / (8 * size_of(model.spec))
        budget = int((seconds or 0) * pace) if tokens is None else tokens
        most = min(max(budget // _HELD, _LEAST_HELD), _MOST_HELD)
        windows = settings.windows
        apart = not any(carries(each.spec) for each in (original, model))  # no mask keeps states within a document
        training, held = split(found, held_out, take, us, length, windows, apart, most)
        settings = msgspec.structs.replace(settings, every=every or _rhythm(settings, held.ids.size))
        texts = [{"sha256": each.sha256, "bytes": each.bytes} for each in found.sources]
        about = {
            "teacher": digest_of(original), "changed": digest_of(model), "texts": texts, "tokens": found.digest,
            "held_out": hashlib.sha256(held.ids.tobytes()).hexdigest(), "processes": us.size, "train": trained,
            "local": local, "hidden": hidden,
        }  # fmt: skip
        suit(model.spec)
        original.requires_grad_(False).eval()
        usual = msgspec.structs.replace(settings, rate=usual_rate(size_of(model.spec)))
        runs = Runs(
            original, held, usual, rate, local, layers, hidden, found, training, us, folder, about, resume, force, tell
        )
        unchanged, start = runs.held(original), runs.held(model)
        on_start(trained, unchanged, start)
        finished, outcome, steps, count = runs.healed(model, start, trained, seeds)
        control = floor = None
        if beside in (True, "control"):
            control = runs.control(unchanged, seeds)
        if beside in (True, "floor"):
            floor = runs.floor(partial(load, changed, "float32", random=True, **opening), seeds)
        result = Healed(
            target, str(teacher), steps * windows * length, steps, seeds, count,
            layers if local and settings.steps != 1 else (), unchanged, start, outcome, control, floor,
        )  # fmt: skip
        settings = msgspec.structs.replace(settings, rate=outcome.rate)
        record = {**msgspec.to_builtins(settings), "train": trained, "share": local, "hidden": hidden, "texts": texts}
        record |= _timeless({name: value for name, value in result.as_json().items() if name != "folder"})
        given = {
            "tokens": tokens, "seconds": seconds, "train": trained, "local": local, "hidden": hidden, "seeds": seeds,
            "beside": beside is True, "rate": outcome.rate, "warmup": warmup, "decay": decay, "clip": clip,
            "batch": windows * length, "context": length, "accumulate": accumulate, "every": settings.every or None,
            "held_out": held_out if isinstance(held_out, int | float) else str(held_out), "patience": patience,
            "seed": seed, "dtype": settings.dtype, "compile": compiled,
        }  # fmt: skip
        before = tree is not None and any("healed" in each for each in tree.origin.history)
        known = {name: value for name, value in given.items() if value is not None}
        manifest = _recipe(changed, before, paths, known, to)
        whole = gathered(finished.eval(), us)
        whole.source = replace(model.source, path=found.folder, texts={}) if model.source else None
        healed = {"healed": record}
        us.lead(lambda: save(whole, target, form, dtype="float32", force=force, record=healed, about=manifest))
        us.lead(runs.done)
        return result


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
