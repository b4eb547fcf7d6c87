"""Run several swaps one after the other on an opened checkpoint, without writing a file.

After the swaps, the model can be converted for a Hugging Face family. The family must be able to express the model: its
config.json must describe all components, and its checkpoints must store all parameters. Only details of rounding may
differ. For this, gptkit may add biases that are zero, or remove such biases. If no family can express the model,
`remedies` names swaps that would make it possible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from ..architectures import Architecture
from ..architectures.obstacles import Zero, first_of
from ..components import ModelSpec
from ..converter.checkpoint import Checkpoint
from ..converter.convert import families_of, main_dtype
from ..converter.dtypes import widest
from ..converter.opening import Opening
from ..converter.targets import FOLDERS, Target, target
from ..errors import MissingComponent, UsageError
from .base import Filled, Guarantee, Model, Promise, StoredModel, Swapped, SwappedModel, Tensor, weakest
from .choice import Tried, choose, may_choose, reasons
from .fits.text import TOKENS, CalibrationText, NoText, read_text
from .options import spelled
from .recipe import called, in_messages, plain
from .registry import Step, apply, options, swap_for
from .remedies import in_the_way

if TYPE_CHECKING:
    from ..modules.devices import Device
    from .fits.calibration import Calibration


@dataclass(frozen=True)
class Chain:
    """The result of several swap steps. The tensors of the new model are not computed yet."""

    steps: tuple[Step, ...]  # the steps that ran; a step may be a better variant of the requested one (`choice`)
    swapped: tuple[Swapped, ...]  # the result of each step
    models: tuple[Model, ...]  # the model before the first step, the model after the first step, and so on
    tried: tuple[tuple[Tried, ...], ...] = ()  # for each step, the variants that were compared, the best first

    @property
    def spec(self) -> ModelSpec:
        return self.models[-1].spec

    @property
    def guarantee(self) -> Guarantee:
        return weakest(swapped.guarantee for swapped in self.swapped)

    @property
    def promise(self) -> Promise:
        """Return the tokens and sequence lengths for which the guarantee of all steps together holds."""
        whole = Promise()
        for swapped in self.swapped:
            whole = whole.then(swapped.promise)
        return whole

    @property
    def against(self) -> Model:
        """Return the model with which the result is compared.

        This is the original model, or if an adapter was merged, the base model with the adapter not merged.
        """
        for before, swapped in reversed(list(zip(self.models, self.swapped, strict=False))):
            if swapped.against is not None:
                return swapped.against(before)
        return self.models[0]

    @property
    def merges(self) -> bool:
        """Return whether a step merged an adapter, so that the result is compared with base model and adapter."""
        return any(swapped.against is not None for swapped in self.swapped)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(note for swapped in self.swapped for note in swapped.notes)

    @property
    def texts(self) -> dict[str, bytes | None]:
        """Return the new contents of the tokenizer files that change, by file name. None stands for a removed file."""
        return {name: text for swapped in self.swapped for name, text in swapped.texts.items()}

    @property
    def calibration(self) -> Mapping[str, Any]:
        """Return name, sha256 and number of tokens of the text that steps were fitted on, or {} if none was fitted."""
        return next(
            (swapped.summary["calibration"] for swapped in self.swapped if "calibration" in swapped.summary), {}
        )

    @property
    def stored(self) -> str:
        """Return the dtype in which computed tensors are stored."""
        last = self.models[-1]
        return last.stored if isinstance(last, SwappedModel) else "F64"

    def computed(self, name: str) -> bool:
        """Return whether a step computes this tensor of the result. Otherwise its values are only copied."""
        last = self.models[-1]
        return isinstance(last, SwappedModel) and last.computed(name)


def chain(
    source: Checkpoint,
    steps: Sequence[Step],
    *,
    stored: str | None = None,
    text: Callable[[], CalibrationText] | None = None,
    names: Sequence[str] = (),
    leaves: bool = False,
    settled: int | None = None,
    device: Device = "cpu",
    **opening: Unpack[Opening],
) -> Chain:
    """Run swap steps on an opened checkpoint. No tensor is computed unless several variants of a step are compared.

    Args:
        source: The opened checkpoint.
        steps: The steps to run. They may be empty if the result becomes Hugging Face files.
        stored: The dtype in which computed tensors are stored. The default is float64 if the result is exact, so that
            exactness can be measured from the files. It is the checkpoint's dtype if the result is approximate, becomes
            Hugging Face files, or has a merged adapter.
        text: A function that returns the text for calibrated swaps in the checkpoint's vocabulary, or raises NoText.
        names: The names of the steps in error messages. By default, a step is named by its number and option, if there
            are several steps.
        leaves: Whether the result becomes Hugging Face files.
        settled: The number of steps at the start of `steps` that run exactly as given. They are fitted on 2,048 tokens
            unless they name a number of tokens. For each later step, gptkit compares several variants on the text, and
            runs the best one. With None, all steps run as given.
        device: The device on which variants are measured, and swaps are fitted.
        opening: How adapters are opened.

    Raises:
        SwapRefused: A precondition of a step does not hold.
        UsageError: A step does not exist, or there are none.
    """
    if not steps and not leaves:
        raise UsageError(
            "no swap was given",
            f"Name a swap, such as --norm rmsnorm. The options are {', '.join(map(spelled, options()))}",
        )
    models: list[Model] = [StoredModel(source)]
    results, done = list[Swapped](), list[Step]()
    companions: dict[str, Any] = {"files": source.folder, "texts": dict(source.texts), "opening": opening}
    read = cache(text if text is not None else partial(read_text, source, None))
    companions["has_text"] = partial(_is_there, read)
    promise, tried = Promise(), list[tuple[Tried, ...]]()

    def make(step: Step) -> tuple[Swapped, bool]:
        """Run a step on the current model. Return its result, and whether it used the calibration text."""
        used = list[CalibrationText]()

        def calibration() -> Calibration:
            """Return the calibration text in the vocabulary of the current model."""
            from .fits.calibration import Calibration  # needs torch, which a dry run does not

            fitted = None if swap_for(step.option, step.value).chooses else TOKENS
            used.append(read().cut(step.tokens or fitted))
            return Calibration(used[0].renamed(promise), models[-1].spec, device=device)

        swapped = apply(models[-1], step, calibration=calibration, **companions)
        if used:
            drawn = {"text": used[0].name, "sha256": used[0].sha256, "tokens": len(read().fitted)}
            record = {"calibration": drawn, "fitted_on": len(used[0].fitted)}
            swapped = replace(swapped, summary={**swapped.summary, **record})
        return swapped, bool(used)

    for number, asked in enumerate(steps):
        with in_messages(names[number] if number < len(names) else called(steps, number)):
            step = plain(asked, models[-1].spec)
            choosing = settled is not None and number >= settled and may_choose(step) and _is_there(read)
            if choosing:
                forms, swapped, model = choose(models[-1], step, read().renamed(promise), make, device)
                step = forms[0].step
                swapped = replace(swapped, notes=(*swapped.notes, *reasons(forms, asked)))
                tried.append(tuple(forms))
            else:
                swapped, drew = make(step)
                fitted = drew and not swap_for(step.option, step.value).chooses
                step = step if fitted else replace(step, tokens=None)
                model = SwappedModel(models[-1], swapped)
                tried.append(())
        done.append(step)
        results.append(swapped)
        promise = promise.then(swapped.promise)
        companions["texts"].update({name: text for name, text in swapped.texts.items() if text is not None})
        models.append(model)
    merged = any(result.against is not None for result in results)
    proved = weakest(result.guarantee for result in results) == "exact" and not leaves and not merged
    main = main_dtype(source.spec, source.shared_dtypes())
    # Files in float64 can prove that a swap is exact. Otherwise the checkpoint's own dtype is used.
    dtype = stored or ("F64" if proved else source.dtype if main == "F64" else main)
    for after in models[1:]:
        assert isinstance(after, SwappedModel)
        after.stored = dtype
    return Chain(tuple(done), tuple(results), tuple(models), tuple(tried))


def _is_there(text: Callable[[], CalibrationText]) -> bool:
    """Return whether there is a calibration text. If the user gave a text that cannot be read, its error is raised."""
    try:
        text()
    except (NoText, MissingComponent):
        return False
    return True


# --- conversion for a Hugging Face family -----------------------------------------------------------------------------


def _zero_in(model: Model) -> Zero:
    """Return a function of a bias's name that returns whether the bias is all zeros. It reads each bias only once."""
    return cache(lambda name: not np.any(model.wide(name)))


def leave(model: Model, origin: str | None, to: str | Target) -> tuple[Architecture, Swapped | None]:
    """Find a Hugging Face family that can express a model, and the step that makes the model fit the family.

    This last step adds or removes biases that are zero. It is None if the model fits already.

    Args:
        model: The model after all swaps.
        origin: The family that the checkpoint came from, if known.
        to: "hf:auto" (any family), "hf" (the family `origin`, or any if that is None) or "hf:FAMILY".

    Raises:
        CannotExpress: The family, or every family, lacks something that the model has. The message lists this, and
            swaps that would help.
        UnknownFamily: There is no family FAMILY.
        UsageError: `to` names another format.
    """
    family, zero = target(to, FOLDERS).family or origin, _zero_in(model)
    tried = families_of(family, origin)
    expression, refused = first_of(tried, model.spec, zero)
    if expression is None or expression.tree is None:
        raise in_the_way(model, tried, refused, zero)
    architecture = tried[len(refused)]
    return architecture, _into(model, expression.tree, architecture)


def _into(model: Model, spec: ModelSpec, architecture: Architecture) -> Swapped | None:
    """Return the step that changes a model to `spec`, the form in which the family `architecture` can express it.

    The step adds biases of zeros that the family needs, and removes those that it lacks. Return None if the model has
    this form already.
    """
    if spec == model.spec:
        return None
    old, new = ({parameter.name: parameter.shape for parameter in tree.parameters()} for tree in (model.spec, spec))
    gained, lost = [name for name in new if name not in old], sorted(old.keys() - new.keys())
    tensors: dict[str, Tensor] = {name: Filled(new[name], 0.0, _dtype_source(model, name)) for name in gained}
    notes = []
    if gained:
        notes.append(f"added as zeros, because {architecture.name} needs them: {_kinds(gained)}")
    if lost:
        notes.append(
            f"left out, because they were all zero and {architecture.name} has no such parameters: {_kinds(lost)}"
        )
    record = {"swap": "as", "as": f"hf:{architecture.name}", "guarantee": "exact"}
    return Swapped(spec, "exact", tensors, record, tuple(notes))


def _dtype_source(model: Model, name: str) -> str:
    """Return the name of the tensor whose dtype the new bias `name` gets.

    This is the weight of the same linear. If there is none, it is a tensor with the widest dtype of the model.
    """
    dtypes = {parameter.name: model.dtype(parameter.name) for parameter in model.spec.parameters()}
    weight = f"{name.removesuffix('bias')}weight"
    wide = widest(list(set(dtypes.values())))
    return weight if weight in dtypes else next(other for other, dtype in dtypes.items() if dtype == wide)


def _kinds(names: Sequence[str]) -> str:
    """Describe tensors by their names without layer numbers, and their count: "attention.q_proj.bias (15 tensors)"."""
    kinds = list(dict.fromkeys(name.split(".", 2)[-1] if name.startswith("blocks.") else name for name in names))
    ellipsis = ", …" if len(kinds) > 2 else ""
    return f"{', '.join(kinds[:2])}{ellipsis} ({len(names)} tensor{'s' if len(names) > 1 else ''})"


def leaving(done: Chain, source: Checkpoint, to: Target) -> tuple[Architecture, Chain]:
    """Return the Hugging Face family for the result of a chain, and the chain with one more step if that needs it.

    Both come from `leave`, which also raises the errors. `to` says which families are allowed, as in `leave`.
    """
    model = done.models[-1]
    architecture, step = leave(model, source.origin.family, to)
    if step is None:
        return architecture, done
    after = SwappedModel(model, step, done.stored)
    steps = (*done.steps, Step("as", f"hf:{architecture.name}"))
    return architecture, replace(done, steps=steps, swapped=(*done.swapped, step), models=(*done.models, after))
