"""swap: exchange components of a checkpoint, write the result, and measure its guarantee from the written files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__
from ..analysis.parameters import count
from ..architectures import Architecture
from ..converter.checkpoint import Checkpoint, open_checkpoint
from ..converter.convert import plan_output
from ..converter.dtypes import HF_NAMES, parse_dtype, widest
from ..converter.publish import Staging
from ..converter.resolve import CONFIG
from ..converter.tokenizer import token_files
from ..converter.write import Plan, execute
from ..errors import GptkitError, InvalidInput, UsageError
from ..parity.verify import require_finite_weights, verify
from ..spec import ModelSpec
from .base import Exactly, Guarantee, Model, Promise, Stored, Swapped, SwappedModel, weakest
from .calibration import TOKENS, Calibration, Text, read_text
from .leaving import leave
from .measure import Measurement, measure
from .recipe import Recipe, described, hashes, plain, read_recipe, recipe_of_steps, told_as
from .registry import Step, apply, options, steps_of

__all__ = ["Chain", "SwapResult", "chain", "swap"]

EXACT_FP64 = 1e-12
EXACT_FP32 = 1e-5
"""The largest relative error of logits that "exact" allows, in fp64 and in fp32."""

SMALL = 50_000_000
"""Parameters of a model of which each step of a chain is measured without being asked to."""


@dataclass(frozen=True)
class Chain:
    """Steps carried out one after the other, nothing of it computed yet.

    models has the tree before the first step, after the first, and so on.
    """

    steps: tuple[Step, ...]
    swapped: tuple[Swapped, ...]
    models: tuple[Model, ...]

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
        return next((each.against for each in reversed(self.swapped) if each.against is not None), self.models[0])

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
    def largest(self) -> int:
        """Parameters of the largest tree in it."""
        return max(count(model.spec).total for model in self.models)

    @property
    def stored(self) -> str:
        """The dtype of computed tensors."""
        last = self.models[-1]
        return last.stored if isinstance(last, SwappedModel) else "F64"

    def computed(self, name: str) -> bool:
        """Whether a tensor of the result is computed by some step, and not moved alone."""
        last = self.models[-1]
        return isinstance(last, SwappedModel) and last.computed(name)


@dataclass(frozen=True)
class SwapResult:
    """What a swap did, or would do.

    `measured` is None where it was asked not to measure, and of a dry run; `dtype` is what computed tensors are stored
    in; `parameters` are the totals before and after. `each` has what every step of a chain costs by itself, empty where
    that was not measured; `recipe` what the output carries, so that it can be made again; `same_source`
    whether a recipe that gptkit wrote was made of the very same files.
    """

    source: Checkpoint
    target: Path
    chain: Chain
    dtype: str
    measured: Measurement | None
    parameters: tuple[int, int]
    plan: Plan
    published: bool
    each: tuple[Measurement, ...] = ()
    recipe: Recipe | None = None
    same_source: bool | None = None

    @property
    def spec(self) -> ModelSpec:
        return self.chain.spec

    @property
    def guarantee(self) -> Guarantee:
        return self.chain.guarantee


def chain(
    source: Checkpoint,
    steps: Sequence[Step],
    *,
    stored: str | None = None,
    text: Callable[[], Text] | None = None,
    offline: bool = False,
    names: Sequence[str] = (),
    empty: bool = False,
) -> Chain:
    """Carry out steps on an opened checkpoint, without computing a tensor.

    `stored` is the dtype of computed tensors; None is float64 for exact chains and the checkpoint's own otherwise.
    `text` gives what calibrated swaps are fitted on, in the checkpoint's own vocabulary, or says what to give. `names`
    is what errors call the steps, by default their number and option where there are several. `empty`: without a step
    the chain is the checkpoint as it is.

    Raises:
        SwapRefused: a precondition of a step does not hold.
        UsageError: a step that does not exist, or no step.

    """
    if not steps and not empty:
        raise UsageError("nothing to swap", f"say what: --norm rmsnorm, or one of --{', --'.join(options())}")
    files = source.folder
    models: list[Model] = [Stored(source)]
    found: list[Swapped] = []
    texts = dict(source.texts)
    text = text or (lambda: read_text(source, None))
    promise = Promise()
    done: list[Step] = []
    for number, asked in enumerate(steps):
        used: list[Text] = []
        calibration = partial(_calibration, text, promise, models[-1].spec, used)
        several = f"step {number + 1} ({asked})" if len(steps) > 1 else None
        with told_as(names[number] if number < len(names) else several):
            step = plain(asked, models[-1].spec)
            swapped = apply(models[-1], step, calibration=calibration, files=files, texts=texts, offline=offline)
        done.append(step)
        if used:
            drawn = {"text": used[0].name, "sha256": used[0].sha256, "tokens": len(used[0].fitted)}
            swapped = replace(swapped, summary={**swapped.summary, "calibration": drawn})
        found.append(swapped)
        promise = promise.then(swapped.promise)
        texts.update({name: text for name, text in swapped.texts.items() if text is not None})
        models.append(SwappedModel(models[-1], swapped))
    exact = weakest(each.guarantee for each in found) == "exact"
    dtype = stored or ("F64" if exact else widest(list(set(source.shared_dtypes().values()))))
    for model in models[1:]:
        assert isinstance(model, SwappedModel)
        model.stored = dtype
    return Chain(tuple(done), tuple(found), tuple(models))


def _calibration(text: Callable[[], Text], promise: Promise, spec: ModelSpec, used: list[Text]) -> Calibration:
    """The text in the vocabulary of a tree in the middle of a chain; `used` notes that a swap drew on it."""
    found = text().renamed(promise)
    used.append(found)
    return Calibration(found, spec)


def swap(
    model: str | Path,
    out: str | Path,
    steps: Sequence[Step] = (),
    *,
    blocks: str | None = None,
    approximate: bool = False,
    to: str | None = None,
    calibrate: str | Path | None = None,
    calibrate_tokens: int | None = None,
    recipe: str | Path | None = None,
    dtype: str | None = None,
    force: bool = False,
    dry_run: bool = False,
    measured: bool = True,
    each_step: bool | None = None,
    offline: bool = False,
    allow_pickle: bool = False,
    allow_extra: bool = False,
    progress: Callable[[int], None] | None = None,
    **asked: str | None,
) -> SwapResult:
    """Exchange components and write the result in gptkit's own format.

    Args:
        model: a reference; see `converter.resolve`.
        out: the folder to make.
        steps: what to do, in this order; see `registry.Step`.
        asked: the same by name, `norm="rmsnorm", attention="gqa:4"`, carried out in the registry's order.
        blocks: the layers that `asked` is for ("3-7"); all by default.
        approximate: replace plainly instead of in the best form known, and report what it costs.
        to: "local", gptkit's own format, which is the default, or Hugging Face files: "hf" of the family that the model
            came from, "hf:FAMILY", "auto" of whichever can hold the tree, its own first. These are then also verified
            against transformers, from the files.
        calibrate: a text file that calibrated swaps are fitted on, and its last part measured on; by default the
            bundled play, for checkpoints that come from the samples alone.
        calibrate_tokens: how many of its tokens they are fitted on; 2,048 by default.
        recipe: a file of steps, the name of one of ours, or a folder that a swap made; see `surgery.recipe`. What is
            asked for beside it comes after it.
        dtype: how the tensors that the swap computes are stored; those that only move keep their dtype. By default
            float64 where the swap is exact, else the checkpoint's own. Anything narrower than float64 rounds them once,
            and an exact swap is then exact up to that rounding: what the rounding costs is measured from the files,
            exactness from the same tensors before it.
        force: replace an existing checkpoint folder, in one step.
        dry_run: say what would come out; compute and write nothing.
        measured: compare logits before and after, in fp32 and fp64, from the files that were written.
        each_step: measure also what every step costs by itself; by default of several steps on models of up to 50
            million parameters.
        offline: use local files and the hub's cache only.
        allow_pickle: read .bin files too (weights only).
        allow_extra: leave out tensors that have no place in the model instead of refusing them.
        progress: called with the bytes of every tensor written.

    Raises:
        SwapRefused: a precondition does not hold; nothing was written.
        CannotExpress: no family that was asked for can hold the tree; what is in the way, and what would clear it.
        GptkitError: an exact swap came out above its bound, or transformers computes something else; nothing was
            published.
        InvalidInput, Offline, UsageError: as `convert`; weights or logits that are not finite.

    """
    told, repeated = None if recipe is None else read_recipe(recipe), False
    if told is not None:
        dtype, to = dtype or told.dtype, to or told.to
        calibrate_tokens = calibrate_tokens or told.calibration.get("tokens")
        repeated = calibrate is None
        calibrate = told.text() if calibrate is None else calibrate
    if calibrate is not None and not Path(calibrate).is_file():
        raise UsageError(f"there is no text file {calibrate}", "--calibrate FILE: some pages of plain text.")
    asked_to, to = to, to or "local"
    wanted = [*(told.steps if told else ()), *steps, *steps_of(asked, blocks, approximate)]
    stored = None if dtype is None else parse_dtype(dtype)
    if not dry_run:
        Staging(Path(out), force).check()  # what cannot be written is refused before anything is fetched or computed
    source = open_checkpoint(model, offline=offline, allow_pickle=allow_pickle, allow_extra=allow_extra)
    text = cache(lambda: read_text(source, calibrate, calibrate_tokens or TOKENS))
    if stored is None and to != "local" and wanted:
        stored = widest([source.dtype, "F32"])  # what transformers' users run; exactness is measured before it rounds
    done = chain(
        source,
        wanted,
        stored=stored,
        text=text,
        offline=offline,
        names=told.labels() if told else (),
        empty=to != "local",
    )
    if repeated and told is not None and told.calibration and done.calibration != told.calibration:
        raise told.another_text(str(told.calibration.get("text")))
    carried = recipe_of_steps(wanted, told, asked_to, dtype, done.calibration)
    architecture = None
    if to != "local":
        architecture, done = leaving(done, source, to)
    stored = done.stored
    records = [{**each.summary, "dtype": HF_NAMES[stored], "gptkit": __version__} for each in done.swapped]
    plan = _plan(source, done, records, "local" if architecture is None else f"hf:{architecture.name}")
    found, each = None, ()
    if not dry_run:
        carried = replace(carried, sources=hashes([*source.files, *described(source.path)]))
        with Staging(Path(out), force) as staging:
            files = execute(plan, _tensors(done.models[-1]), staging, progress)
            if measured:
                sampled = (source.origin.reference or "").startswith("sample:")
                held_out = text().held_out if calibrate is not None or sampled else None
                found = _measured(source, done, stored, staging.path, held_out)
                if architecture is not None:
                    _verified(staging.path)
                if each_step or (each_step is None and len(wanted) > 1 and done.largest <= SMALL):
                    each = _each(done, text() if held_out else None)
            manifest: dict[str, Any] = {
                "gptkit": __version__,
                "format": "local" if architecture is None else "hf",
                "source": {"reference": source.origin.reference, "revision": source.revision},
                "swap": {
                    "recipe": carried.as_json(),
                    "steps": records,
                    "measured": None if found is None else found.as_json(),
                    "measured_steps": [one.as_json() for one in each],
                },
            }
            staging.commit(manifest, files=files)
    totals = (count(source.spec).total, count(done.spec).total)
    same = None if told is None or not told.sources or dry_run else told.sources == carried.sources
    stored_as = HF_NAMES[stored]
    return SwapResult(source, Path(out), done, stored_as, found, totals, plan, not dry_run, each, carried, same)


def leaving(done: Chain, source: Checkpoint, to: str) -> tuple[Architecture, Chain]:
    """The family that the result goes to, and the chain with the step into its own form.

    Raises:
        CannotExpress: there is none.

    """
    model = done.models[-1]
    architecture, step = leave(model, source.origin.family, to)
    if step is None:
        return architecture, done
    after = SwappedModel(model, step, done.stored)
    steps = (*done.steps, Step("as", f"hf:{architecture.name}"))
    return architecture, replace(done, steps=steps, swapped=(*done.swapped, step), models=(*done.models, after))


def _verified(folder: Path) -> None:
    """Raise GptkitError where transformers does not compute from the files what gptkit does."""
    checkpoint = open_checkpoint(folder)
    large = count(checkpoint.spec).total > SMALL
    found = verify(folder, mutations=False, bisected=False, stream=large, dtype=HF_NAMES[checkpoint.dtype])
    if not found.passed:
        worst = max(prompt.maximum for prompt in found.prompts)
        raise GptkitError(
            f"transformers computes other logits from these files: {found.verdict}, up to {worst:.1e}. Nothing was"
            " written.",
            "Please report this checkpoint; --as local keeps it in gptkit's own format.",
        )


def _plan(source: Checkpoint, done: Chain, records: Sequence[Mapping[str, Any]], to: str) -> Plan:
    """Every file of the output."""
    last = done.models[-1]
    dtypes = {parameter.name: last.dtype(parameter.name) for parameter in done.spec.parameters()}
    # What is stored wide is computed in fp32 at least: a bf16 model would round the exactness away.
    wide = any(done.computed(name) for name in dtypes) and done.guarantee == "exact"
    compute = widest([source.dtype, "F32"]) if wide else source.dtype
    origin = replace(source.origin, history=(*source.origin.history, *records))
    if not done.texts:
        return plan_output(done.spec, origin, to, dtypes, compute, source.folder, texts=source.texts)
    texts = {path.name: path.read_bytes() for path in token_files(source.folder)} | dict(source.texts)
    texts.update({name: text for name, text in done.texts.items() if text is not None})
    kept = {name: text for name, text in texts.items() if done.texts.get(name, b"") is not None}
    config = kept.pop(CONFIG, None)  # the original's, in which token ids have changed
    if config is not None:
        origin = replace(origin, config_text=config.decode())
    return plan_output(done.spec, origin, to, dtypes, compute, None, texts=kept)


def _tensors(model: Model) -> Iterator[tuple[str, np.ndarray, str]]:
    """The output's tensors, one at a time."""
    for parameter in model.spec.parameters():
        yield parameter.name, *model.raw(parameter.name)
        model.release()


def _measured(source: Checkpoint, done: Chain, stored: str, folder: Path, text: Sequence[int] | None) -> Measurement:
    """The logits of the written files against the original's, on the probe and on a text, where there is one.

    Raises:
        GptkitError: the chain is called exact and is not.
        InvalidInput: there are logits that are no numbers.

    """
    found = measure(done.against, Stored(open_checkpoint(folder)), promise=done.promise, text=text)
    _require_numbers(source, found)
    if done.guarantee == "exact":
        _hold_to_exact(done, stored, found)
    return found


def _each(done: Chain, text: Text | None) -> tuple[Measurement, ...]:
    """What every step costs by itself, in fp64 and before any rounding: the tree after it against the tree before."""
    found = []
    for before, swapped, after in zip(done.models, done.swapped, done.models[1:], strict=False):
        against = Exactly(swapped.against or before)
        ids = None if text is None else text.held_out
        found.append(measure(against, Exactly(after), promise=swapped.promise, text=ids, dtypes=("float64",)))
        text = None if text is None else text.renamed(swapped.promise)
    return tuple(found)


def _require_numbers(source: Checkpoint, found: Measurement) -> None:
    """Raise InvalidInput where the logits are not numbers, with the weights to blame if the source has such."""
    if not all(math.isfinite(value) for value in (*found.maximum.values(), found.kl)):
        require_finite_weights(source)
        raise InvalidInput(f"{source.reference}: logits before or after the swap are not finite. Nothing was written.")


def _hold_to_exact(done: Chain, stored: str, found: Measurement) -> None:
    """Raise GptkitError where an exact swap is not.

    The files say so themselves where they hold all that was computed. Where storing rounds, exactness in fp64 is that
    of the tensors before, and fp32 files must still be right to fp32.

    A model whose stream has a large mean, or whose layers amplify, may itself round by more than the fp32 bound. The
    bound stays: what is called exact is exact to it, and the message says that fp32 is what failed.
    """
    errors = dict(found.relative)
    rounds = any(done.computed(parameter.name) for parameter in done.spec.parameters())
    if stored != "F64" and rounds:
        exactly = measure(done.against, Exactly(done.models[-1]), promise=done.promise, dtypes=("float64",))
        errors["float64"] = exactly.relative["float64"]
        if stored != "F32":
            del errors["float32"]
    for name, bound in (("float64", EXACT_FP64), ("float32", EXACT_FP32)):
        error = errors.get(name, 0.0)
        if not error <= bound:
            raise GptkitError(
                f"the swap is not exact on this checkpoint: relative error {error:.1e} in {name}, at most {bound:.0e}"
                " allowed. Nothing was written.",
                "Please report this checkpoint; --approximate gives the plain replacement.",
            )
