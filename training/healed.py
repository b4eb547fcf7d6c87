"""Swap components of a model, and then heal the changed model if the recipe has a heal step."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..converter.files import locked
from ..converter.opening import Opening
from ..errors import UsageError
from ..surgery.recipe import read_recipe
from ..surgery.registry import Step
from ..surgery.swap import SwapResult
from ..surgery.swap import swap as exchange

if TYPE_CHECKING:
    from .heal import Healed


@dataclass(frozen=True)
class HealedSwap(SwapResult):
    """The results of a swap and of the healing after it. The effect of the swap was measured before the healing."""

    healed: Healed | None = None  # the result of the healing


@wraps(exchange)
def swap(
    model: str | Path,
    out: str | Path,
    steps: Sequence[Step] = (),
    *,
    recipe: str | Path | None = None,
    to: str | None = None,
    config: str | None = None,
    resume: bool = False,
    force: bool = False,
    dry_run: bool = False,
    watched: Callable[..., Healed] | None = None,
    **options: Any,
) -> SwapResult:
    """Swap components of a checkpoint with `surgery.swap`. If the recipe has a heal step, train the result afterwards.

    With `resume`, an interrupted healing continues. The swaps before it are carried out again, with identical bytes.
    `watched` is called instead of `training.heal.heal`, with the same arguments. A command can pass a function that
    shows progress.
    """
    content = None if recipe is None else read_recipe(recipe)
    run = partial(exchange, model, recipe=recipe, dry_run=dry_run, **options)
    if content is None or content.heal is None:
        return run(out=out, steps=steps, to=to, config=config, resume=resume, force=force)
    target, to = Path(out), to or content.to
    if dry_run:
        done = run(out=out, steps=steps, to=to, config=config, force=force)
        return replace(done, recipe=replace(done.recipe, heal=content.heal) if done.recipe else None)
    import torch  # which a dry run does not need

    from .heal import heal
    from .parallel import Group
    from .runs import stores_in
    from .state import make_folder, remove_empty, require_free, run_folder

    arguments = {"train": "trained", "compile": "compiled"}
    healing: dict[str, Any] = {arguments.get(name, name): value for name, value in content.heal.settings.items()}
    if {"tokens", "seconds"} <= healing.keys():
        raise UsageError(
            f"{content.where}: the heal step sets both tokens and seconds, but needs exactly one of them",
            "Remove one of them.",
        )
    opening: Any = {name: options[name] for name in Opening.__annotations__ if name in options}
    folder = run_folder(target, "healing")
    runs = stores_in(folder, Group(0, 1, torch.device("cpu")))
    require_free(target, resume, force, runs)
    changed = folder / "changed"
    with ExitStack() as stack:
        make_folder(folder)
        stack.callback(remove_empty, folder)
        stack.enter_context(locked(folder / "recipe"))  # heal locks the folder itself
        for store in runs:
            store.resumes(resume, force)  # refuse before the swaps, which may take long
        stack.callback(shutil.rmtree, changed, ignore_errors=True)
        done = run(out=changed, steps=steps, to="local", force=True)
        healing = {"device": options.get("device", "auto"), **healing}
        healed = (watched or heal)(
            changed, model, [content.heal.value], target, **healing, **opening, resume=resume, force=force,
            to="hf:auto" if to == "auto" else to, config=config,
        )  # fmt: skip
    recipe_done = None if done.recipe is None else replace(done.recipe, heal=content.heal, to=to)
    return HealedSwap(**{**vars(done), "target": target, "recipe": recipe_done}, healed=healed)
