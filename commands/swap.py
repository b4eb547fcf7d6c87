"""The commands swap, which changes components of a model, and swaps, which lists the possible changes."""

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
import typer.main

from ..errors import UsageError
from ..terminal import answer, console, progress_bar, say, status
from .base import CONFIG, FORCE, JSON, MODEL, QUIET, Command, ForWeights, argument, command, device_option, flag, option
from .completion import forms, one_of

if TYPE_CHECKING:
    from ..surgery.options import Option

_HOW, _GENERAL = "How to swap", "General"
"""The first and the last heading in the help of `swap`. The headings of the swaps come between them."""


class _SwapCommand(Command):
    """The command `swap`, with an option for every option that a registered swap declares, including those of plugins.

    The swaps are looked up only for `swap` and its help, so other commands do not wait for them. The function gets the
    values in `**asked`: for an option, the list of its values in the order of the command line, and for a flag, how
    often it was given.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        from ..surgery.registry import all_options

        own: list[Any] = super().get_params(ctx)
        options = (param for param in own if param.param_type_name == "option")
        general = [param for param in options if getattr(param, "rich_help_panel", None) != _HOW]
        for param in general:
            param.rich_help_panel = _GENERAL
        return [*(param for param in own if param not in general), *_swap_options(all_options()), *general]


def _swap_options(options: Iterable["Option"]) -> list[Any]:
    """Return options of swaps as parameters of a command.

    typer makes them from the signature of a function, because releases of typer differ in how they construct options.
    """

    def declared(**_: Any) -> None: ...

    parameters = []
    for swap_option in options:
        shown: dict[str, Any] = {"help": swap_option.help, "rich_help_panel": swap_option.group}
        if swap_option.flag:  # counts how often it is given; the metavar takes the place of the type
            kind: Any = int
            default = typer.Option(0, swap_option.spelled, count=True, metavar=" ", show_default=False, **shown)
        else:
            kind = list[str]
            shown |= {"metavar": swap_option.metavar, "autocompletion": one_of(forms(swap_option.metavar))}
            default = typer.Option([], swap_option.spelled, **shown)
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(swap_option.name, keyword, default=default, annotation=kind))
    declared.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app = typer.Typer(add_completion=False)
    app.command()(declared)
    return [param for param in typer.main.get_command(app).params if param.name != "help"]


_RECIPE = option(
    "FILE",
    "Make the changes of a recipe: a TOML file, a name from gptkit swaps --recipes, or a folder written "
    "by gptkit swap.",
    _HOW,
)
_BLOCKS = option(
    "LAYERS",
    "Change only these layers, such as 3-7 or 0,2,4- (4- means from layer 4 to the last one). The first "
    "layer is 0. The default is all layers.",
    _HOW,
)
_APPROXIMATE = flag(
    "--approximate",
    "Replace components in the simplest way, for comparison. gptkit then uses neither an exact "
    "replacement nor one that is fitted on a text, and the model may become much worse.",
    _HOW,
)
_CALIBRATE = option(
    "FILE",
    "A text file with some pages of plain text. gptkit fits weights on this text, and measures the "
    "effect of the change on its last part. The default for samples is a text that comes with gptkit. "
    "Other models have no default.",
    _HOW,
)
_CALIBRATE_TOKENS = option(
    "N",
    "The number of tokens to fit weights on, such as 8192. By default, gptkit tries 2,048 tokens, and "
    "then more as long as the result improves.",
    _HOW,
    min=1,
)
_TO = option(
    "--as FORMAT",
    "The format to write: local (gptkit's own, the default), hf (Hugging Face files of the model's own "
    "family), hf:FAMILY (such as hf:llama), or auto (Hugging Face files of the first family that "
    "supports the result).",
    _HOW,
)
_DTYPE = option(
    "DTYPE",
    "The dtype, such as bfloat16, of the tensors that the swap computes. With --as hf, it is the dtype "
    "of all tensors. The output names the default dtype and the reason for it.",
    _HOW,
)
_MEASURE_STEPS = flag(
    "--measure-steps",
    "If the command makes several changes, also measure the effect of each one. This is the default for "
    "models of up to 50M parameters.",
)
_REPORT = option(
    "--report --html FILE",
    "Write a report on how much the change raises the loss, by position, layer and component, to "
    "FILE.html and FILE.json.",
)
_RESUME = flag(
    "--resume",
    "Continue an interrupted swap whose recipe ends with a healing (further training). Repeat the "
    "command with this option.",
)


@command(
    "gptkit swap sample:gpt2 gpt2-rms --norm rmsnorm",
    "gptkit swap sample:gpt2 modern --recipe gpt2-to-modern",
    "gptkit swap BASE merged --merge-lora ADAPTER --as hf",
    cls=_SwapCommand,
)
def swap(
    model: str = MODEL,
    out: Path = argument("OUT", "The folder to write the changed model to."),
    *,
    recipe: str | None = _RECIPE,
    blocks: str | None = _BLOCKS,
    approximate: bool = _APPROXIMATE,
    calibrate: str | None = _CALIBRATE,
    calibrate_tokens: int | None = _CALIBRATE_TOKENS,
    to: str | None = _TO,
    config: str | None = CONFIG,
    dtype: str | None = _DTYPE,
    no_measure: bool = flag("--no-measure", "Skip the comparison of the logits before and after the change."),
    measure_steps: bool = _MEASURE_STEPS,
    report: Path | None = _REPORT,
    device: str = device_option(what="fit and measure"),
    resume: bool = _RESUME,
    force: bool = FORCE,
    dry_run: bool = flag("--dry-run", "Show the architecture after the change and its costs, and write nothing."),
    opening: ForWeights,
    quiet: bool = QUIET,
    **asked: Any,
) -> None:
    """Replace, shrink or merge components of a model, and measure the effect."""
    from ..report.surgery import dry_run_report, steps_report, swap_lines
    from ..training.healed import HealedSwap
    from ..training.healed import swap as run

    if report is not None and not dry_run:
        from ..report.damage import report_paths

        report_paths(report)
    values = {name: [""] * given if isinstance(given, int) else given for name, given in asked.items() if given}
    fitting: Any = {"approximate": approximate, "calibrate": calibrate, "calibrate_tokens": calibrate_tokens}
    measuring: Any = {"measured": not no_measure, "each_step": measure_steps or None, "device": device}
    writing: Any = {"to": to, "config": config, "dtype": dtype, "resume": resume, "force": force, "dry_run": dry_run}
    swapping = {"recipe": recipe, "blocks": blocks, **fitting, **measuring, **writing, **opening, **values}
    healing = None if dry_run else _healing(quiet)
    with progress_bar("swapping", quiet) as advance:
        done = run(model, out, **swapping, watched=healing, progress=lambda nbytes: advance(nbytes, 0))
    if not quiet:
        say(swap_lines(done), quiet)
        if dry_run:
            console().print("", dry_run_report(done), sep="\n")
        elif len(done.chain.steps) > 1:
            console().print("", steps_report(done), sep="\n")
        if isinstance(done, HealedSwap) and done.healed is not None:
            from ..report.healing import healing_report

            console().print(healing_report(done.healed))
    if report is not None and not dry_run:
        from ..report.damage import damage_lines, write_report
        from ..surgery.swap import assess, held_out

        with status("measuring what changed", quiet) as tell:
            damage = assess(done, held_out(done, calibrate, calibrate_tokens), tell, device)
        files = write_report(done, damage, report)
        say([*damage_lines(damage), f"report: {', '.join(map(str, files))}"], quiet)


def _healing(quiet: bool) -> Callable[..., Any]:
    """Return `training.heal.heal`, with progress lines unless `quiet`."""
    from ..report.healing import Healing
    from ..training.heal import heal

    watched = Healing(quiet)
    return partial(heal, on_start=watched.start, tell=watched.step)


@command("gptkit swaps sample:gpt2", "gptkit swaps --recipes")
def swaps(
    model: str | None = argument(
        "MODEL",
        "The model to try the swaps on, such as sample:gpt2 or a folder. Without a model, gptkit lists all swaps.",
        None,
    ),
    *,
    recipes: bool = flag("--recipes", "List the recipes (named sequences of swaps) that come with gptkit."),
    json: bool = JSON,
    opening: ForWeights,
    quiet: bool = QUIET,
) -> None:
    """List the changes that gptkit swap can make. With a MODEL, report also what each costs and whether it is exact."""
    from ..report.surgery import listing_report, recipes_json, recipes_report, registry_json, registry_report
    from ..surgery.recipe import read_recipe, shipped

    if recipes:
        if model is not None:
            raise UsageError(
                "--recipes lists all recipes and takes no MODEL",
                "To try a recipe on a model: gptkit swap MODEL OUT --recipe NAME --dry-run",
            )
        known = [read_recipe(name) for name in shipped()]
        return answer(json, lambda: recipes_json(known), lambda: recipes_report(known), quiet)
    if model is None:
        from ..surgery.registry import all_options, all_swaps

        groups = {swap_option.name: swap_option.group for swap_option in all_options()}
        return answer(json, lambda: registry_json(all_swaps()), lambda: registry_report(all_swaps(), groups), quiet)
    from ..converter.checkpoint import open_checkpoint
    from ..surgery.listing import listing

    listed = listing(open_checkpoint(model, **opening))
    return answer(json, listed.as_json, lambda: listing_report(listed), quiet)
