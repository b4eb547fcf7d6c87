"""swap: exchange components of a checkpoint, write the result, and measure its guarantee from the written files."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ..analysis.parameters import count
from ..architectures import Architecture
from ..components import ModelSpec
from ..converter.checkpoint import Checkpoint, open_checkpoint
from ..converter.companions import companions_in
from ..converter.convert import companions, plan_output
from ..converter.dtypes import HF_NAMES, parse_dtype, widest
from ..converter.files import sha256_file
from ..converter.names import CONFIG, LOCAL_CONFIG
from ..converter.publish import Staging
from ..converter.targets import FOLDERS, target
from ..converter.threads import as_before, suit
from ..converter.write import Plan, execute
from ..display import Shown
from ..errors import UsageError
from ..parity.damage import Damage, damage
from ..parity.probe import SMALL
from ..version import __version__
from .base import Guarantee, Model, Moved, Stored
from .chain import Chain, chain, leaving
from .fits.calibration import read_text
from .guarantee import each_alone, hold_to_transformers, measured_from_files, plain_form
from .measure import Measurement
from .recipe import Recipe, plain, read_recipe
from .registry import Step, steps_of


@dataclass(frozen=True)
class SwapResult(Shown):
    """What a swap did, or would do.

    `measured` is None where it was asked not to measure, and of a dry run; `dtype` is what computed tensors are stored
    in; `parameters` are the totals before and after. `each` has what every step of a chain costs by itself, empty where
    that was not measured; `recipe` what the output carries, so that it can be made again; `same_source`
    whether a recipe that gptkit wrote was made of the very same files. `naive` is what the plain form of the steps that
    were fitted on a text costs, `family` whose Hugging Face files they are.
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
    naive: Measurement | None = None
    family: Architecture | None = None

    def __repr__(self) -> str:
        steps = " ".join(map(str, self.chain.steps))
        return f"<{self.source.reference} {steps} -> {self.target}: {self.guarantee}>"

    @property
    def spec(self) -> ModelSpec:
        return self.chain.spec

    @property
    def guarantee(self) -> Guarantee:
        return self.chain.guarantee


@as_before()
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
    resume: bool = False,
    force: bool = False,
    dry_run: bool = False,
    measured: bool = True,
    each_step: bool | None = None,
    offline: bool = False,
    allow_pickle: bool = False,
    allow_extra: bool = False,
    progress: Callable[[int], None] | None = None,
    **asked: str | Sequence[str] | None,
) -> SwapResult:
    """Exchange components and write the result in gptkit's own format.

    Args:
        model: a reference; see `converter.resolve`.
        out: the folder to make.
        steps: what to do, in this order; see `registry.Step`.
        asked: the same by name, `norm="rmsnorm", attention="gqa:4"`, carried out in the registry's order; a list of
            values is carried out in the list's order: `merge_lora=["first", "second"]`.
        blocks: the layers that `asked` is for ("3-7"); all by default.
        approximate: replace plainly instead of in the best form known, and report what it costs.
        to: "local", gptkit's own format, which is the default, or Hugging Face files: "hf" of the family that the model
            came from, "hf:FAMILY", "auto" of whichever can hold the tree, its own first. These are then also verified
            against transformers, from the files.
        calibrate: a text file that calibrated swaps are fitted on, and its last part measured on; by default the
            bundled play, for checkpoints that come from the samples alone.
        calibrate_tokens: how many of its tokens they are fitted on; by default 2,048, 8,192 and so on up to 32,768 are
            tried, as far as the text goes and as long as it pays. See `surgery.choice`.
        recipe: a file of steps, the name of one of ours, or a folder that a swap made; see `surgery.recipe`. What is
            asked for beside it comes after it. Its healing is left to `training.healed`, which gptkit.swap is.
        dtype: how the tensors that the swap computes are stored; those that only move keep their dtype, but in Hugging
            Face files, which are loaded in one. By default float64 where the swap is exact and the result is gptkit's
            own format, for exactness to be measured from the file; else, and where an adapter is merged, the
            checkpoint's own. Anything narrower than float64 rounds them once, and an exact swap is then exact up to
            that rounding: what the rounding costs is measured from the files, exactness from the same tensors before.
        resume: go on with the healing of a recipe that was stopped in it; the same call again.
        force: replace an existing checkpoint folder, in one step.
        dry_run: say what would come out; compute and write nothing.
        measured: compare logits before and after, in fp32 and fp64, from the files that were written.
        each_step: measure also what every step costs by itself; by default of several steps on models of up to 50
            million parameters.
        offline: use local files and the hub's cache only.
        allow_pickle: read .bin files too (weights only), of the model and of an adapter.
        allow_extra: leave out tensors that have no place in the model instead of refusing them.
        progress: called with the bytes of every tensor written.

    Raises:
        SwapRefused: a precondition does not hold; nothing was written.
        CannotExpress: no family that was asked for can hold the tree; what is in the way, and what would clear it.
        GptkitError: an exact swap came out above its bound, or transformers computes something else; nothing was
            published.
        InvalidInput, Offline, UsageError: as `convert`; weights or logits that are not finite.
    """
    if resume:  # `training.healed` takes it from those that heal
        hint = "Leave --resume out: an interrupted swap continues without it."
        raise UsageError("--resume needs a recipe that ends with heal", hint)
    told, repeated = None if recipe is None else read_recipe(recipe), False
    if told is not None:
        dtype, to = dtype or told.dtype, to or told.to
        repeated = calibrate is None
        calibrate = told.text() if calibrate is None else calibrate
    if calibrate is not None and not Path(calibrate).is_file():
        raise UsageError(f"there is no text file {calibrate}", "Give --calibrate a file with some pages of plain text.")
    asked_to, form = to, target("hf:auto" if to == "auto" else to or "local", FOLDERS)
    known = None if told is None else told.calibration.get("tokens")
    given = [replace(step, tokens=step.tokens or calibrate_tokens or known) for step in told.steps] if told else []
    more = (*steps, *steps_of(asked, blocks, approximate))
    wanted = [*given, *(replace(step, tokens=step.tokens or calibrate_tokens) for step in more)]
    written = told is not None and bool(told.sources)  # by gptkit, and so what was chosen then
    settled = len(wanted) if dry_run else len(given) if written else 0
    stored = None if dtype is None else parse_dtype(dtype)
    if not dry_run:
        Staging(Path(out), force).check()  # what cannot be written is refused before anything is fetched or computed
    source = open_checkpoint(model, offline=offline, allow_pickle=allow_pickle, allow_extra=allow_extra)
    suit(source.spec)
    if not dry_run and Path(out).resolve() in (source.path.resolve(), source.folder.resolve()):
        raise UsageError(f"the output folder {out} is the model itself, which would be lost", "Name another folder.")
    most = max((step.tokens for step in wanted if step.tokens is not None), default=None)
    text = cache(lambda: read_text(source, calibrate, calibrate_tokens or known or most))
    labels = [f"{told.where}, step {number}" for number in range(1, len(told.steps) + 1)] if told else ()
    leaves = form.kind != "local"
    done = chain(
        source,
        wanted,
        stored=stored,
        text=text,
        offline=offline,
        allow_pickle=allow_pickle,
        names=labels,
        leaves=leaves,
        settled=settled,
    )
    if repeated and told is not None and told.calibration and done.calibration != told.calibration:
        raise told.another_text()
    base = told or Recipe("", "", (), "the call")
    taken = tuple(map(_taken, wanted, done.steps, done.models))
    carried = replace(base, steps=taken, to=asked_to, dtype=dtype, calibration=done.calibration, sources={})
    architecture, done = leaving(done, source, form) if leaves else (None, done)
    whole = stored if architecture is not None else None
    stored = stored or done.stored
    records = [{**each.summary, "dtype": HF_NAMES[stored], "gptkit": __version__} for each in done.swapped]
    plan = _plan(source, done, records, "local" if architecture is None else f"hf:{architecture.name}", whole)
    found, naive = None, None
    each: tuple[Measurement, ...] = ()
    if not dry_run:
        folder = source.path if source.path.is_dir() else source.path.parent
        trees = [folder / name for name in (LOCAL_CONFIG, CONFIG) if (folder / name).is_file()][:1]
        sources = {path.name: sha256_file(path) for path in (*source.files, *trees)}
        carried = replace(carried, sources=sources)
        with Staging(Path(out), force) as staging:
            files = execute(plan, _tensors(done.models[-1]), staging, progress)
            if measured:
                sampled = (source.origin.reference or "").startswith("sample:")
                held_out = text().held_out if calibrate is not None or sampled else None
                found = measured_from_files(source, done, stored, staging.path, held_out)
                if architecture is not None:
                    hold_to_transformers(staging.path)
                largest = max(count(model.spec).total for model in done.models)
                if each_step or (each_step is None and len(wanted) > 1 and largest <= SMALL):
                    each = each_alone(done, text() if held_out else None)
                naive = plain_form(source, done, text() if held_out else None)
            manifest: dict[str, Any] = {
                "gptkit": __version__,
                "format": "local" if architecture is None else "hf",
                "source": {"reference": source.origin.reference, "revision": source.revision},
                "swap": {
                    "recipe": carried.as_json(),
                    "steps": records,
                    "measured": None if found is None else found.as_json(),
                    "measured_plainly": None if naive is None else naive.as_json(),
                    "measured_steps": [one.as_json() for one in each],
                },
            }
            staging.commit(manifest, files=files)
    totals = (count(source.spec).total, count(done.spec).total)
    same = None if told is None or not told.sources or dry_run else told.sources == carried.sources
    results = HF_NAMES[stored], found, totals, plan, not dry_run, each, carried, same, naive, architecture
    return SwapResult(source, Path(out), done, *results)


def _taken(asked: Step, done: Step, model: Model) -> Step:
    """Return a step of a tree as a recipe is to have it: as asked for, but in the form that was chosen."""
    value = asked.value if plain(asked, model.spec).value == done.value else done.value
    return replace(asked, value=value, approximate=done.approximate, tokens=done.tokens)


def _plan(source: Checkpoint, done: Chain, records: Sequence[Mapping[str, Any]], to: str, whole: str | None) -> Plan:
    """Every file of the output. `whole`: the dtype that all tensors are stored in, where it is one."""
    last = done.models[-1]
    dtypes = {parameter.name: whole or last.dtype(parameter.name) for parameter in done.spec.parameters()}
    # What is stored wide is computed in fp32 at least: a bf16 model would round away what is there.
    wide = any(done.computed(name) for name in dtypes) and done.stored in ("F32", "F64")
    compute = whole or (widest([source.dtype, "F32"]) if wide else source.dtype)
    origin = replace(source.origin, history=(*source.origin.history, *(dict(each) for each in records)))
    folder = companions(source)
    if not done.texts:
        return plan_output(done.spec, origin, to, dtypes, compute, folder, texts=source.texts)
    files = [] if folder is None else companions_in(folder)
    texts = {path.name: path.read_bytes() for path in files} | dict(source.texts)
    texts.update({name: text for name, text in done.texts.items() if text is not None})
    kept = {name: text for name, text in texts.items() if done.texts.get(name, b"") is not None}
    config = kept.pop(CONFIG, None)  # the original's, in which token ids have changed
    if config is not None:
        origin = replace(origin, config_text=config.decode())
    return plan_output(done.spec, origin, to, dtypes, compute, None, texts=kept)


def _tensors(model: Model) -> Iterator[tuple[str, np.ndarray, str]]:
    """The output's tensors, one at a time."""
    for parameter in model.spec.parameters():
        yield parameter.name, *model.tensor(parameter.name)
        model.release()


@as_before()
def assess(result: SwapResult, text: Sequence[int] | None, progress: Callable[[str], None] | None = None) -> Damage:
    """The damage of a published swap, from its files, on token ids of the old vocabulary or on none."""
    done = result.chain
    suit(done.spec)
    return damage(
        done.against,
        Stored(open_checkpoint(result.target)),
        text=text,
        tokens=done.promise.tokens,
        most=done.promise.length,
        layers=_layers_of(done),
        progress=progress,
    )


def held_out(result: SwapResult, calibrate: str | Path | None, tokens: int | None) -> tuple[int, ...] | None:
    """The text that a swap is measured on: the end of the one it was or could be fitted on, where there is one."""
    recipe, source = result.recipe, result.source
    file = calibrate or (None if recipe is None else recipe.text())
    if file is None and not (source.origin.reference or "").startswith("sample:"):
        return None
    known = None if recipe is None else recipe.calibration.get("tokens")
    return read_text(source, file, tokens or known).held_out


def _layers_of(done: Chain) -> list[tuple[int, int]]:
    """The layers that stand for one another before and after, each at most once: their tensors were moved there."""
    pairs = [(layer, layer) for layer in range(len(done.models[0].spec.blocks))]
    for swapped in done.swapped:
        origins: dict[int, set[int]] = {layer: set() for layer in range(len(swapped.spec.blocks))}
        for parameter in swapped.spec.parameters():
            made = swapped.tensors.get(parameter.name, Moved(parameter.name))
            if parameter.layer is not None and isinstance(made, Moved):
                names = (name for name in made.names if name.startswith("blocks."))
                origins[parameter.layer] |= {int(name.split(".")[1]) for name in names}
        step = {layer: min(own, default=layer) for layer, own in origins.items() if len(own) <= 1}
        renamed = {before: after for after, before in reversed(step.items())}  # of copies the first
        pairs = [(first, renamed[before]) for first, before in pairs if before in renamed]
    return pairs
