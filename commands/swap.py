"""swap and swaps: components exchanged, and which can be."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from ..errors import UsageError
from ..terminal import answer, console, progress_bar, say, status
from .base import Force, ForWeights, Json, ModelArgument, Quiet, app, examples, guarded, option
from .completion import forms, one_of

if TYPE_CHECKING:
    from ..surgery.options import Option
    from ..surgery.swap import SwapResult


HOW = "How to swap"
"""The heading in the help of `swap` of what is no swap."""


class SwapCommand(TyperCommand):
    """`swap`: its own options, and one for every option of a swap that is registered, plugins' too. They are looked up
    when somebody swaps or asks for help; other commands do not wait for them. What was given arrives in `**asked`.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        from ..surgery.registry import all_options

        return [*super().get_params(ctx), *map(swap_option, all_options())]


def swap_option(option: Option) -> TyperOption:
    """An option of a swap as the command line has it."""
    fields: dict[str, Any] = {"is_flag": True, "default": False}
    if not option.flag:
        complete = partial(lambda values, ctx, args, incomplete: values(incomplete), one_of(forms(option.metavar)))
        fields = {"type": str, "metavar": option.metavar, "autocompletion": complete}
    names = [option.name, option.spelled]
    return TyperOption(param_decls=names, help=option.help, rich_help_panel=option.group, **fields)


@app.command(
    cls=SwapCommand,
    epilog=examples(
        "gptkit swap sample:gpt2 gpt2-rms --norm rmsnorm", "gptkit swap sample:gpt2 modern --recipe gpt2-to-modern"
    ),
)
@guarded
def swap(
    model: ModelArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    *,
    recipe: Annotated[
        str | None,
        option(
            "FILE",
            "Run a recipe: a TOML file, a name out of gptkit swaps --recipes, or a folder that a swap wrote.",
            HOW,
        ),
    ] = None,
    blocks: Annotated[str | None, option("LAYERS", "Change these layers alone: 3-7, or 0,2,4-.", HOW)] = None,
    approximate: Annotated[
        bool, option("--approximate", "Replace plainly instead of in the best form, whatever it loses.", HOW)
    ] = False,
    calibrate: Annotated[
        str | None, option("FILE", "Fit on this text; the samples have the bundled play.", HOW)
    ] = None,
    calibrate_tokens: Annotated[
        int | None, option("N", "Fit on so many of its tokens; by default 2,048.", HOW, min=1)
    ] = None,
    to: Annotated[
        str | None, option("--as FORMAT", "The format to write: local (gptkit's own), hf, hf:FAMILY or auto.", HOW)
    ] = None,
    dtype: Annotated[
        str | None,
        option(
            "DTYPE",
            "The dtype of computed tensors, and with --as hf of all; by default the output says which and why.",
            HOW,
        ),
    ] = None,
    no_measure: Annotated[bool, option("--no-measure", "Do not compare logits before and after.")] = False,
    measure_steps: Annotated[
        bool, option("--measure-steps", "Measure each step by itself, of a large model too.")
    ] = False,
    report: Annotated[
        Path | None, option("--report --html FILE", "Write what the swap costs, FILE.html and FILE.json.")
    ] = None,
    force: Force = False,
    dry_run: Annotated[bool, option("--dry-run", "Say what would come out, and write nothing.")] = False,
    opening: ForWeights,
    quiet: Quiet = False,
    **asked: str | bool | None,
) -> None:
    """Exchange components, with a guarantee measured from the files that were written."""
    from ..report.summaries import swap_lines
    from ..surgery.swap import swap as run

    if report is not None and not dry_run:
        from ..report.damage import report_paths

        report_paths(report)
    values = {name: ("" if value is True else value) for name, value in asked.items() if value not in (None, False)}
    with progress_bar("swapping", quiet) as advance:
        done = run(
            model,
            out,
            recipe=recipe,
            blocks=blocks,
            approximate=approximate,
            calibrate=calibrate,
            calibrate_tokens=calibrate_tokens,
            to=to,
            dtype=dtype,
            force=force,
            dry_run=dry_run,
            measured=not no_measure,
            each_step=measure_steps or None,
            **opening,
            progress=lambda nbytes: advance(nbytes, 0),
            **values,  # type: ignore[arg-type]
        )
    if not quiet:
        from ..report.surgery import dry_run_report, steps_report

        say(swap_lines(done), quiet)
        if dry_run:
            console().print("", dry_run_report(done), sep="\n")
        elif len(done.chain.steps) > 1:
            console().print("", steps_report(done), sep="\n")
    if report is not None and not dry_run:
        damage_report(done, report, calibrate, calibrate_tokens, quiet)


def damage_report(done: SwapResult, path: Path, calibrate: str | None, tokens: int | None, quiet: bool) -> None:
    """`swap --report`."""
    from ..report.damage import write_report
    from ..report.summaries import damage_lines
    from ..surgery.damage import assess, held_out

    with status("measuring what changed", quiet) as tell:
        found = assess(done, held_out(done, calibrate, tokens), tell)
    written = write_report(done, found, path)
    say([*damage_lines(found), f"report: {', '.join(map(str, written))}"], quiet)


@app.command(epilog=examples("gptkit swaps sample:gpt2", "gptkit swaps --recipes"))
@guarded
def swaps(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="The model to try them on; without one, all swaps are listed.")
    ] = None,
    *,
    recipes: Annotated[bool, option("--recipes", "List the recipes that come with gptkit.")] = False,
    json: Json = False,
    opening: ForWeights,
) -> None:
    """List the swaps: what each guarantees, on a MODEL or at best, and what it costs."""
    from ..report.surgery import listing_report, recipes_json, recipes_report, registry_json, registry_report
    from ..surgery.recipe import read_recipe, shipped

    if recipes:
        if model is not None:
            raise UsageError("--recipes takes no MODEL", "gptkit swap MODEL OUT --recipe NAME --dry-run tries one.")
        found = [read_recipe(name) for name in shipped()]
        return answer(json, lambda: recipes_json(found), lambda: recipes_report(found))
    if model is None:
        from ..surgery.registry import all_options, all_swaps

        groups = {each.name: each.group for each in all_options()}
        return answer(json, lambda: registry_json(all_swaps()), lambda: registry_report(all_swaps(), groups))
    from ..converter.checkpoint import open_checkpoint
    from ..surgery.listing import listing

    listed = listing(open_checkpoint(model, **opening))
    return answer(json, listed.as_json, lambda: listing_report(listed))
