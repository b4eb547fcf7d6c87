"""The function `swap`: replace components of a checkpoint, write the result, and measure it from the written files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..analysis.parameters import SMALL, count
from ..architectures import Architecture
from ..components import ModelSpec
from ..converter.checkpoint import Checkpoint, digests, open_checkpoint
from ..converter.companions import companions_in
from ..converter.convert import companions, plan_output
from ..converter.dtypes import HF_NAMES, parse_dtype, widest
from ..converter.names import CONFIG
from ..converter.opening import Opening
from ..converter.publish import Staging
from ..converter.targets import FOLDERS, Target, target, with_config
from ..converter.threads import as_before, suit
from ..converter.write import FolderPlan, execute
from ..display import Shown
from ..errors import UsageError
from ..version import __version__
from .base import Guarantee, Measurement, Model, Moved, StoredModel
from .chain import Chain, chain, leaving
from .fits.text import CalibrationText, read_text
from .recipe import Recipe, plain, read_recipe
from .registry import Step, steps_of

if TYPE_CHECKING:
    from ..modules.devices import Device
    from ..parity.damage import Damage


@dataclass(frozen=True)
class SwapResult(Shown):
    """The result of `swap`, also of a dry run."""

    source: Checkpoint
    target: Path
    chain: Chain
    dtype: str
    """The dtype that computed tensors are stored in."""
    measured: Measurement | None
    """The comparison of logits before and after. None for a dry run, and if the call asked not to measure."""
    parameters: tuple[int, int]
    """The total numbers of parameters before and after."""
    plan: FolderPlan
    published: bool
    each: tuple[Measurement, ...] = ()
    """The change of the logits by every step alone. Empty if that was not measured."""
    recipe: Recipe | None = None
    """The recipe that is stored with the output. Running it again gives the same output."""
    same_source: bool | None = None
    """Whether the recipe was recorded from exactly these files. None if gptkit did not write the recipe."""
    naive: Measurement | None = None
    """The change of the logits that the same steps would cause without fits on a text. None if no step was fitted."""
    family: Architecture | None = None
    """The family of the Hugging Face files that were written."""

    def __repr__(self) -> str:
        steps = " ".join(map(str, self.chain.steps))
        return f"<{self.source.reference} {steps} -> {self.target}: {self.guarantee}>"

    @property
    def spec(self) -> ModelSpec:
        return self.chain.spec

    @property
    def guarantee(self) -> Guarantee:
        return self.chain.guarantee


_NO_RECIPE = Recipe("", "", (), "the call")


@dataclass(frozen=True)
class _Request:
    """The swap steps of a call and of its recipe, and the settings for them."""

    recipe: Recipe | None
    steps: list[Step]  # the steps of the recipe, and then those of the call
    form: Target  # the output format
    to: str | None  # the output format as the call or the recipe names it
    dtype: str | None  # the requested dtype, as the call or the recipe names it
    calibrate: str | Path | None  # the text file for fits
    tokens: int | None  # the number of tokens to fit on, from the call or the recipe
    stored: str | None  # the dtype in which computed tensors are stored; with None, gptkit chooses it
    repeats: bool  # whether the call names no text; the text must then be the one that the recipe records

    @property
    def labels(self) -> list[str]:
        """Return the names of the recipe's steps for error messages."""
        recipe = self.recipe
        return [f"{recipe.where}, step {number}" for number in range(1, len(recipe.steps) + 1)] if recipe else []

    def settled(self, dry_run: bool) -> int:
        """Return the number of steps at the start that run exactly as given, without trying variants.

        These are all steps in a dry run. Otherwise they are the steps of a recipe that gptkit wrote with an output.
        """
        if dry_run:
            return len(self.steps)
        return len(self.recipe.steps) if self.recipe is not None and self.recipe.sources else 0

    def text(self, source: Checkpoint) -> CalibrationText:
        """Read the text that calibrated steps are fitted on."""
        most = max((step.tokens for step in self.steps if step.tokens is not None), default=None)
        return read_text(source, self.calibrate, self.tokens or most)

    def recorded(self, done: Chain) -> Recipe:
        """Return the recipe to store with the output: the requested steps, in the variants that gptkit chose."""
        base = self.recipe or _NO_RECIPE
        steps = tuple(map(_recorded_step, self.steps, done.steps, done.models))
        return replace(base, steps=steps, to=self.to, dtype=self.dtype, calibration=done.calibration, sources={})


@dataclass(frozen=True)
class _Measurements:
    """Measurements of how much a swap changes the logits. All fields are empty if nothing was measured."""

    whole: Measurement | None = None  # the change by all steps together, from the written files
    naive: Measurement | None = None  # the change by the same steps without fits on a text
    steps: tuple[Measurement, ...] = ()  # the change by each step alone


@as_before()
def swap(
    model: str | Path,
    out: str | Path,
    steps: Sequence[Step] = (),
    *,
    blocks: str | None = None,
    approximate: bool = False,
    to: str | None = None,
    config: str | None = None,
    calibrate: str | Path | None = None,
    calibrate_tokens: int | None = None,
    recipe: str | Path | None = None,
    dtype: str | None = None,
    resume: bool = False,
    force: bool = False,
    dry_run: bool = False,
    measured: bool = True,
    each_step: bool | None = None,
    device: Device = "auto",
    offline: bool = False,
    allow_pickle: bool = False,
    allow_extra: bool = False,
    progress: Callable[[int], None] | None = None,
    **asked: str | Sequence[str] | None,
) -> SwapResult:
    """Replace components of a checkpoint, and write the result in gptkit's own format or as Hugging Face files.

    Args:
        model: A folder, a file or a Hugging Face id; see `converter.resolve`.
        out: The folder to write.
        steps: The swaps to run, in this order; see `registry.Step`.
        asked: Swaps by name, such as `norm="rmsnorm", attention="gqa:4"`. They run in a fixed order, that of
            `surgery.registry`. A list of values runs in the order of the list: `merge_lora=["first", "second"]`.
        blocks: The layers that `asked` changes ("3-7"). The default is all layers.
        approximate: Use the simplest form of each swap in `asked` instead of the best known one, and report how much
            the logits change.
        to: The output format. The default "local" is gptkit's own format. For Hugging Face files, use "hf" (the family
            of the original), "hf:FAMILY", or "auto" (any family that can express the model, the original's first).
            gptkit also verifies Hugging Face files against transformers.
        config: "transformers4" for files that programs for transformers 4 read too; see `converter.compatibility`.
        calibrate: A text file. Calibrated swaps are fitted on it, and its last part measures the result. For
            checkpoints that come from a sample, the default is the bundled play.
        calibrate_tokens: The number of tokens to fit on. By default, gptkit tries 2,048, 8,192 and so on up to 32,768
            while the text is long enough and the result improves. See `surgery.choice`.
        recipe: A recipe file, the name of a bundled recipe, or a folder that gptkit swap wrote; see `surgery.recipe`.
            Other requested swaps run after it. A heal step is run by `training.healed`, which gptkit.swap calls.
        dtype: The dtype of computed tensors. Tensors that only move keep their dtype, except in Hugging Face files,
            which have one dtype. The default is float64 for an exact swap into gptkit's own format. Otherwise, and for
            merged adapters, it is the checkpoint's dtype. If this dtype rounds values, gptkit checks exactness before
            rounding, and measures the rounding from the files.
        resume: Continue the interrupted training (healing) of a recipe. Repeat the same call with this argument.
        force: Replace an existing checkpoint folder, in one step.
        dry_run: Describe the result. Nothing is computed or written.
        measured: Compare logits before and after, in fp32 and fp64, from the written files.
        each_step: Also measure the effect of every step alone. The default is True for several steps on a small model.
        device: The device on which swaps are fitted on a text, and logits are compared: "cpu", "cuda" or "cuda:1". The
            default "auto" is a GPU if there is one. A dry run uses the CPU. TF32 is off.
        offline: Use only local files and the cache of the hub.
        allow_pickle: Also read .bin files (weights only), of the model and of adapters.
        allow_extra: Leave out tensors that the model does not use. Without it, such tensors are an error.
        progress: A function that is called with the number of bytes of every tensor written.

    Raises:
        SwapRefused: A precondition does not hold. As after the other errors, nothing was written.
        CannotExpress: No requested family can express the model. The message says why, and names swaps that would help.
        GptkitError: An exact swap changed the logits by more than rounding, or transformers computes others.
        InvalidInput, Offline, UsageError: As for `convert`, and for weights or logits that are not finite.
    """
    if resume:  # `training.healed` handles it for recipes that heal
        hint = "Leave --resume out: an interrupted swap continues without it."
        raise UsageError("--resume needs a recipe that ends with heal", hint)
    given = None if recipe is None else read_recipe(recipe)
    request = _requested(given, steps, asked, blocks, approximate, calibrate, calibrate_tokens, dtype, to, config)
    if not dry_run:
        Staging(Path(out), force).check()  # an output that cannot be written is refused before any work
    opening: Opening = {"offline": offline, "allow_pickle": allow_pickle}
    source = open_checkpoint(model, allow_extra=allow_extra, **opening)
    suit(source.spec)
    if not dry_run:
        _require_other_folder(Path(out), source)
    text = cache(partial(request.text, source))
    with _computing_on(device, dry_run) as place:
        done, recorded, family = _carried_out(request, source, text, dry_run, place, opening)
        stored = request.stored or done.stored
        records = [{**swapped.summary, "dtype": HF_NAMES[stored], "gptkit": __version__} for swapped in done.swapped]
        form = Target("local") if family is None else replace(request.form, family=family.name)
        plan = _plan(source, done, records, form, request.stored)
        figures = _Measurements()
        if not dry_run:
            recorded = replace(recorded, sources=digests(source))
            with Staging(Path(out), force) as staging:
                files = execute(plan, _tensors(done.models[-1]), staging, progress)
                if measured:
                    measured_on = text() if request.calibrate is not None or _is_sample(source) else None
                    figures = _measure(source, done, stored, staging.path, measured_on, family, each_step, place)
                staging.commit(_manifest(source, family, recorded, records, figures, place), files=files)
    totals = (count(source.spec).total, count(done.spec).total)
    same = None if given is None or not given.sources or dry_run else given.sources == recorded.sources
    rest = not dry_run, figures.steps, recorded, same, figures.naive, family
    return SwapResult(source, Path(out), done, HF_NAMES[stored], figures.whole, totals, plan, *rest)


@contextmanager
def _computing_on(device: Device, dry_run: bool = False) -> Iterator[Device]:
    """Yield the device to compute on, without TF32. Raise GptkitError if the memory of a GPU is full.

    A dry run computes nothing, so torch is not imported for it.
    """
    if dry_run:
        yield "cpu"
        return
    from ..modules.devices import device_of, in_float32, reported_memory

    with in_float32(), reported_memory():
        yield device_of(device, "swap")


def _is_sample(source: Checkpoint) -> bool:
    """Return whether a checkpoint comes from a sample, for which gptkit has a text."""
    return (source.origin.reference or "").startswith("sample:")


def _require_other_folder(out: Path, source: Checkpoint) -> None:
    """Raise UsageError if the output folder is that of the model."""
    if out.resolve() in (source.path.resolve(), source.folder.resolve()):
        raise UsageError(f"the output folder {out} is the model itself, which would be lost", "Name another folder.")


def _requested(
    recipe: Recipe | None,
    steps: Sequence[Step],
    asked: Mapping[str, str | Sequence[str] | None],
    blocks: str | None,
    approximate: bool,
    calibrate: str | Path | None,
    calibrate_tokens: int | None,
    dtype: str | None,
    to: str | None,
    config: str | None,
) -> _Request:
    """Combine the arguments of a call of `swap` with its recipe.

    The steps of the arguments run after those of the recipe. For other settings, an argument overrides the recipe.
    """
    repeats = calibrate is None
    if recipe is not None:
        dtype, to = dtype or recipe.dtype, to or recipe.to
        calibrate = recipe.text() if calibrate is None else calibrate
    if calibrate is not None and not Path(calibrate).is_file():
        raise UsageError(f"there is no text file {calibrate}", "Give --calibrate a file with some pages of plain text.")
    to = to if config is None else with_config(_format(to), config)
    form = target(_format(to), FOLDERS)
    known = None if recipe is None else recipe.calibration.get("tokens")
    first = [] if recipe is None else [replace(s, tokens=s.tokens or calibrate_tokens or known) for s in recipe.steps]
    later = [replace(s, tokens=s.tokens or calibrate_tokens) for s in (*steps, *steps_of(asked, blocks, approximate))]
    stored = None if dtype is None else parse_dtype(dtype)
    steps, tokens = [*first, *later], calibrate_tokens or known
    return _Request(recipe, steps, form, to, dtype, calibrate, tokens, stored, repeats)


def _format(to: str | None) -> str:
    """Return the name of the output format, as `targets.target` parses it, for the argument `to` of `swap`."""
    return "hf:auto" if to == "auto" else to or "local"


def _carried_out(
    request: _Request,
    source: Checkpoint,
    text: Callable[[], CalibrationText],
    dry_run: bool,
    device: Device,
    opening: Opening,
) -> tuple[Chain, Recipe, Architecture | None]:
    """Run the steps of a request. Return their result, the recipe to store, and the family of Hugging Face files.

    The family is None if the output has gptkit's own format.
    """
    leaves, recipe = request.form.kind != "local", request.recipe
    done = chain(
        source,
        request.steps,
        stored=request.stored,
        text=text,
        names=request.labels,
        leaves=leaves,
        settled=request.settled(dry_run),
        device=device,
        **opening,
    )
    if recipe is not None and request.repeats and recipe.calibration and done.calibration != recipe.calibration:
        raise recipe.another_text()
    recorded = request.recorded(done)
    family, done = leaving(done, source, request.form) if leaves else (None, done)
    return done, recorded, family


def _measure(
    source: Checkpoint,
    done: Chain,
    stored: str,
    folder: Path,
    text: CalibrationText | None,
    family: Architecture | None,
    each_step: bool | None,
    device: Device,
) -> _Measurements:
    """Measure how much the logits change: from the written files, by each step alone, and without fits on a text.

    `each_step` says whether to measure each step alone. With None, this is done for several steps on a small model.
    """
    from .guarantee import measured_from_files, plain_form, require_transformers, steps_alone

    held_out = None if text is None else text.held_out
    text = text if held_out else None
    whole = measured_from_files(source, done, stored, folder, held_out, device)
    if family is not None:
        require_transformers(folder, device)
    steps = [step for step in done.steps if step.option != "as"]
    if each_step is None:
        each_step = len(steps) > 1 and max(count(model.spec).total for model in done.models) <= SMALL
    alone = steps_alone(done, text, device) if each_step else ()
    return _Measurements(whole, plain_form(source, done, text, device), alone)


def _manifest(
    source: Checkpoint,
    family: Architecture | None,
    recipe: Recipe,
    records: Sequence[Mapping[str, Any]],
    measurements: _Measurements,
    device: Device,
) -> dict[str, Any]:
    """Return what the manifest.json of the output says about the swap. `records` has one JSON object for each step.

    It names the device if that is not the CPU, because a fit gives other last bits on another device.
    """
    from ..modules.devices import in_words

    whole, naive = measurements.whole, measurements.naive
    return {
        "gptkit": __version__,
        "format": "local" if family is None else "hf",
        "source": {"reference": source.origin.reference, "revision": source.revision},
        "swap": {
            "recipe": recipe.as_json(),
            "steps": records,
            "measured": None if whole is None else whole.as_json(),
            "measured_plainly": None if naive is None else naive.as_json(),
            "measured_steps": [measurement.as_json() for measurement in measurements.steps],
            **({} if str(device) == "cpu" else {"device": in_words(device)}),
        },
    }


def _recorded_step(asked: Step, done: Step, model: Model) -> Step:
    """Return a step for the recipe of the output: the requested step, with the settings of the variant that was chosen.

    A share such as "gqa:1/2" stays a share.

    Args:
        asked: The requested step.
        done: The step that ran.
        model: The model before the step.
    """
    value = asked.value if plain(asked, model.spec).value == done.value else done.value
    return replace(asked, value=value, approximate=done.approximate, tokens=done.tokens)


def _plan(
    source: Checkpoint, done: Chain, records: Sequence[Mapping[str, Any]], to: Target, stored: str | None
) -> FolderPlan:
    """Plan every file of the output in the format `to`. `records` are the JSON records of the steps.

    If Hugging Face files are written, they store all tensors in the dtype `stored`, if it is given.
    """
    whole = None if to.kind == "local" else stored
    last = done.models[-1]
    dtypes = {parameter.name: whole or last.dtype(parameter.name) for parameter in done.spec.parameters()}
    # If tensors are stored in fp32 or fp64, the model must run in fp32 at least: bf16 would round away their digits.
    wide = any(done.computed(name) for name in dtypes) and done.stored in ("F32", "F64")
    compute = whole or (widest([source.dtype, "F32"]) if wide else source.dtype)
    origin = replace(source.origin, history=(*source.origin.history, *map(dict, records)))
    folder = companions(source)
    if not done.texts:
        return plan_output(done.spec, origin, to, dtypes, compute, folder, texts=source.texts)
    files = [] if folder is None else companions_in(folder)
    texts = {path.name: path.read_bytes() for path in files} | dict(source.texts)
    texts.update({name: text for name, text in done.texts.items() if text is not None})
    remaining = {name: text for name, text in texts.items() if done.texts.get(name, b"") is not None}
    config = remaining.pop(CONFIG, None)  # the original's, with the new token ids
    if config is not None:
        origin = replace(origin, config_text=config.decode())
    return plan_output(done.spec, origin, to, dtypes, compute, None, texts=remaining)


def _tensors(model: Model) -> Iterator[tuple[str, np.ndarray, str]]:
    """Yield name, array and dtype of every tensor of a model, one at a time, for writing."""
    for parameter in model.spec.parameters():
        yield parameter.name, *model.tensor(parameter.name)
        model.release()


@as_before()
def assess(
    result: SwapResult,
    text: Sequence[int] | None,
    progress: Callable[[str], None] | None = None,
    device: Device = "auto",
) -> Damage:
    """Measure the damage of a swap from the published files, in more detail than `swap` does.

    `text` has token ids of the old vocabulary. With None, the damage is not measured on a text. `device` is as in
    `swap`.
    """
    from ..parity.damage import damage

    done = result.chain
    suit(done.spec)
    with _computing_on(device) as place:
        return damage(
            done.against,
            StoredModel(open_checkpoint(result.target)),
            text=text,
            tokens=done.promise.tokens,
            most=done.promise.length,
            layers=_layers_of(done),
            device=place,
            progress=progress,
        )


def held_out(result: SwapResult, calibrate: str | Path | None, tokens: int | None) -> tuple[int, ...] | None:
    """Return the part of the calibration text on which a swap is measured, or None without a text.

    This is the end of the text, which no fit uses.
    """
    recipe, source = result.recipe, result.source
    file = calibrate or (None if recipe is None else recipe.text())
    if file is None and not _is_sample(source):
        return None
    tokens_of_recipe = None if recipe is None else recipe.calibration.get("tokens")
    return read_text(source, file, tokens or tokens_of_recipe).held_out


def _layers_of(done: Chain) -> list[tuple[int, int]]:
    """Return pairs of layer numbers: of a layer before the swaps, and of the layer after them that has its tensors.

    Dropped layers are left out.
    """
    pairs = [(layer, layer) for layer in range(len(done.models[0].spec.blocks))]
    for swapped in done.swapped:
        origins: dict[int, set[int]] = {layer: set() for layer in range(len(swapped.spec.blocks))}
        for parameter in swapped.spec.parameters():
            source = swapped.tensors.get(parameter.name, Moved(parameter.name))
            if parameter.layer is not None and isinstance(source, Moved):
                names = (name for name in source.names if name.startswith("blocks."))
                origins[parameter.layer] |= {int(name.split(".")[1]) for name in names}
        step = {layer: min(layers, default=layer) for layer, layers in origins.items() if len(layers) <= 1}
        renamed = {before: after for after, before in reversed(step.items())}  # of copies the first
        pairs = [(first, renamed[before]) for first, before in pairs if before in renamed]
    return pairs
