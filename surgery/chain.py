"""Swaps one after the other on an opened checkpoint, without a tensor computed or a file written.

The last step may be into the form of a Hugging Face family: one holds a tree where its config.json says all of it, or
all but how components round and biases of zeros, which come and go. Where none does, `remedies` says which swaps would
clear the way.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from ..architectures import Architecture
from ..architectures.obstacles import Zero, first_of
from ..components import ModelSpec
from ..converter.checkpoint import Checkpoint
from ..converter.convert import families_of, main_dtype
from ..converter.dtypes import widest
from ..converter.targets import FOLDERS, Target, target
from ..errors import MissingComponent, UsageError
from .base import Filled, Guarantee, Model, Promise, Stored, Swapped, SwappedModel, Tensor, weakest
from .choice import Tried, choose, may_choose, told
from .fits.calibration import TOKENS, Calibration, NoText, Text, read_text
from .options import spelled
from .recipe import called, plain, told_as
from .registry import Step, apply, options, swap_for
from .remedies import in_the_way


@dataclass(frozen=True)
class Chain:
    """Steps carried out one after the other, nothing of it computed yet.

    models has the tree before the first step, after the first, and so on. steps are the forms that were taken. tried
    has for each step the forms that were compared, the one that was taken first; none where there was no choice.
    """

    steps: tuple[Step, ...]
    swapped: tuple[Swapped, ...]
    models: tuple[Model, ...]
    tried: tuple[tuple[Tried, ...], ...] = ()

    @property
    def spec(self) -> ModelSpec:
        return self.models[-1].spec

    @property
    def guarantee(self) -> Guarantee:
        return weakest(each.guarantee for each in self.swapped)

    @property
    def promise(self) -> Promise:
        """What of the logits the whole chain says something about."""
        found = Promise()
        for each in self.swapped:
            found = found.then(each.promise)
        return found

    @property
    def against(self) -> Model:
        """The tree that the result is to equal."""
        for before, swapped in reversed(list(zip(self.models, self.swapped, strict=False))):
            if swapped.against is not None:
                return swapped.against(before)
        return self.models[0]

    @property
    def merges(self) -> bool:
        """Whether the result is to equal a base model with an adapter, rather than the model before."""
        return any(each.against is not None for each in self.swapped)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(note for each in self.swapped for note in each.notes)

    @property
    def texts(self) -> dict[str, bytes | None]:
        """The tokenizer's files that change."""
        return {name: text for each in self.swapped for name, text in each.texts.items()}

    @property
    def calibration(self) -> Mapping[str, Any]:
        """The text that steps were fitted on: its name, sha256 and tokens; empty where none was."""
        return next((each.summary["calibration"] for each in self.swapped if "calibration" in each.summary), {})

    @property
    def stored(self) -> str:
        """The dtype of computed tensors."""
        last = self.models[-1]
        return last.stored if isinstance(last, SwappedModel) else "F64"

    def computed(self, name: str) -> bool:
        """Whether a tensor of the result is computed by some step, and not moved alone."""
        last = self.models[-1]
        return isinstance(last, SwappedModel) and last.computed(name)


def chain(
    source: Checkpoint,
    steps: Sequence[Step],
    *,
    stored: str | None = None,
    text: Callable[[], Text] | None = None,
    offline: bool = False,
    allow_pickle: bool = False,
    names: Sequence[str] = (),
    leaves: bool = False,
    settled: int | None = None,
) -> Chain:
    """Carry out steps on an opened checkpoint, without computing a tensor, unless forms of a step are to be compared.

    `stored` is the dtype of computed tensors; None is float64 where exactness is to be proved from the file, and the
    checkpoint's own where the result is there to be used: where it is approximate, `leaves` as Hugging Face files, or
    has an adapter merged. `text` gives what calibrated swaps are fitted on, in the checkpoint's own vocabulary, or says
    what to give. `names` is what errors call the steps, by default their number and option where there are several.
    What leaves needs no step. `settled` is the number of steps, the first ones, that are carried out as they are, on
    2,048 tokens where they do not say how many; of the others the best form is chosen. None: all of them. Raises
    SwapRefused where a precondition of a step does not hold, and UsageError where there is no such step, or none.
    """
    if not steps and not leaves:
        raise UsageError(
            "nothing to swap",
            f"Name a swap, such as --norm rmsnorm. The options are {', '.join(map(spelled, options()))}",
        )
    models: list[Model] = [Stored(source)]
    found, done = list[Swapped](), list[Step]()
    given: dict[str, Any] = {"files": source.folder, "texts": dict(source.texts), "offline": offline}
    given["allow_pickle"] = allow_pickle
    read = cache(text if text is not None else partial(read_text, source, None))
    given["has_text"] = partial(_is_there, read)
    promise, tried = Promise(), list[tuple[Tried, ...]]()

    def make(step: Step) -> tuple[Swapped, bool]:
        """What a step makes of the tree so far, and whether it drew on the text."""
        used = list[Text]()

        def calibration() -> Calibration:
            """The text in the vocabulary of a tree in the middle of a chain."""
            fitted = None if swap_for(step.option, step.value).chooses else TOKENS
            used.append(read().cut(step.tokens or fitted))
            return Calibration(used[0].renamed(promise), models[-1].spec)

        swapped = apply(models[-1], step, calibration=calibration, **given)
        if used:
            drawn = {"text": used[0].name, "sha256": used[0].sha256, "tokens": len(read().fitted)}
            more = {"calibration": drawn, "fitted_on": len(used[0].fitted)}
            swapped = replace(swapped, summary={**swapped.summary, **more})
        return swapped, bool(used)

    for number, asked in enumerate(steps):
        with told_as(names[number] if number < len(names) else called(steps, number)):
            step = plain(asked, models[-1].spec)
            free = settled is not None and number >= settled and may_choose(step) and _is_there(read)
            if free:
                forms, swapped, model = choose(models[-1], step, read().renamed(promise), make)
                step = forms[0].step
                swapped = replace(swapped, notes=(*swapped.notes, *told(forms, asked)))
                tried.append(tuple(forms))
            else:
                swapped, drew = make(step)
                fitted = drew and not swap_for(step.option, step.value).chooses
                step = step if fitted else replace(step, tokens=None)
                model = SwappedModel(models[-1], swapped)
                tried.append(())
        done.append(step)
        found.append(swapped)
        promise = promise.then(swapped.promise)
        given["texts"].update({name: text for name, text in swapped.texts.items() if text is not None})
        models.append(model)
    merged = any(each.against is not None for each in found)
    proved = weakest(each.guarantee for each in found) == "exact" and not leaves and not merged
    own = main_dtype(source.spec, source.shared_dtypes())
    # In place of float64, which is for proofs, what the checkpoint is computed in.
    dtype = stored or ("F64" if proved else source.dtype if own == "F64" else own)
    for after in models[1:]:
        assert isinstance(after, SwappedModel)
        after.stored = dtype
    return Chain(tuple(done), tuple(found), tuple(models), tuple(tried))


def _is_there(text: Callable[[], Text]) -> bool:
    """Whether there is a text. What is wrong with one that was given is raised."""
    try:
        text()
    except (NoText, MissingComponent):
        return False
    return True


# --- into a family ----------------------------------------------------------------------------------------------------


def _zero_in(model: Model) -> Zero:
    """Whether every value of a bias is zero, each looked at once and only when it is asked for."""
    return cache(lambda name: not np.any(model.wide(name)))


def leave(model: Model, origin: str | None, to: str | Target) -> tuple[Architecture, Swapped | None]:
    """The family for a tree, and the last step into its own form: biases of zeros that it has, or has not.

    `origin` is the family that the checkpoint came from; `to` is "hf:auto", "hf" (the one that it came from, which is
    the first to be tried, or any where there is none) or "hf:FAMILY". Raises CannotExpress where there is none, with
    what is in the way and what would clear it, UnknownFamily for FAMILY, and UsageError for another format.
    """
    family, zero = target(to, FOLDERS).family or origin, _zero_in(model)
    tried = families_of(family, origin)
    found, refused = first_of(tried, model.spec, zero)
    if found is None or found.found is None:
        raise in_the_way(model, tried, refused, zero)
    architecture = tried[len(refused)]
    return architecture, _into(model, found.found, architecture)


def _into(model: Model, spec: ModelSpec, architecture: Architecture) -> Swapped | None:
    """The step from a tree to the one that a family has for it; None where they are the same."""
    if spec == model.spec:
        return None
    old, new = ({each.name: each.shape for each in tree.parameters()} for tree in (model.spec, spec))
    gained, lost = [name for name in new if name not in old], sorted(old.keys() - new.keys())
    tensors: dict[str, Tensor] = {name: Filled(new[name], 0.0, _beside(model, name)) for name in gained}
    notes = []
    if gained:
        notes.append(f"added as zeros, because {architecture.name} needs them: {_kinds(gained)}")
    if lost:
        notes.append(
            f"left out, because they were all zero and {architecture.name} has no such parameters: {_kinds(lost)}"
        )
    record = {"swap": "as", "as": f"hf:{architecture.name}", "guarantee": "exact"}
    return Swapped(spec, "exact", tensors, record, tuple(notes))


def _beside(model: Model, name: str) -> str:
    """The tensor whose dtype a new bias gets: the weight that it is added beside, or one in the widest dtype of any."""
    dtypes = {parameter.name: model.dtype(parameter.name) for parameter in model.spec.parameters()}
    own = f"{name.removesuffix('bias')}weight"
    wide = widest(list(set(dtypes.values())))
    return own if own in dtypes else next(each for each, dtype in dtypes.items() if dtype == wide)


def _kinds(names: Sequence[str]) -> str:
    """Tensors of all layers told once, and how many there are: "attention.q_proj.bias, … (15 tensors)"."""
    told = list(dict.fromkeys(name.split(".", 2)[-1] if name.startswith("blocks.") else name for name in names))
    more = ", …" if len(told) > 2 else ""
    return f"{', '.join(told[:2])}{more} ({len(names)} tensor{'s' if len(names) > 1 else ''})"


def leaving(done: Chain, source: Checkpoint, to: Target) -> tuple[Architecture, Chain]:
    """The family that the result goes to, and the chain with the step into its form; or raises CannotExpress."""
    model = done.models[-1]
    architecture, step = leave(model, source.origin.family, to)
    if step is None:
        return architecture, done
    after = SwappedModel(model, step, done.stored)
    steps = (*done.steps, Step("as", f"hf:{architecture.name}"))
    return architecture, replace(done, steps=steps, swapped=(*done.swapped, step), models=(*done.models, after))
