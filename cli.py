"""The command line: parse, call, print. Every command is a function of the package.

Imports of torch, transformers and rich wait inside the commands, so that --help and params answer at once.
"""

from __future__ import annotations

import functools
import inspect
import io
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer
import typer.core

from . import __version__
from .errors import Elsewhere, GptkitError, UsageError
from .surgery.options import OPTIONS

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderResult

    from .converter.checkpoint import Checkpoint
    from .surgery.swap import SwapResult

__all__ = ["app", "main"]

INTERRUPTED = 130
TERMINATED = 143


class Terminated(KeyboardInterrupt):
    """SIGTERM: what Ctrl-C would do, with an exit code of its own."""


# What typer raises for a wrong call. Of its classes typer names a subclass alone, and has moved the others.
WrongCall: type[Exception] = typer.BadParameter.__mro__[1]


class Commands(typer.core.TyperGroup):
    """The commands; a wrong call is told in gptkit's own two lines instead of a page."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except WrongCall as error:
            call: Any = error
            message = str(call.format_message()).strip()
            if message:  # none where there was no argument at all: the help was printed
                command = call.ctx.command_path if call.ctx is not None else "gptkit"
                complain(f"{message[0].lower()}{message[1:].rstrip('.')}\n{command} -h says what it takes")
            code = call.exit_code
        except typer.Abort:
            complain("interrupted")
            code = INTERRUPTED
        sys.exit(code or 0)


app = typer.Typer(
    name="gptkit",
    cls=Commands,
    help="Take any GPT-style checkpoint apart, change it, and prove that it still computes what it should.",
    epilog="Try: gptkit params qwen3-8b  ·  gptkit demo  ·  gptkit verify sample:llama",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

F = TypeVar("F", bound=Callable[..., None])

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="org/name or org/name@revision, a preset, a folder, a .safetensors file, or sample:gpt2."
    ),
]
Offline = Annotated[bool, typer.Option("--offline", help="Use local files and the hub's cache only.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing checkpoint folder, in one step.")]
AllowPickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Read .bin files too (weights only); safetensors need no trust.")
]
AllowExtra = Annotated[bool, typer.Option("--allow-extra", help="Leave out tensors with no place.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print nothing but errors.")]


def guarded(function: F) -> F:
    """Turn gptkit's errors into a line or two on stderr and their exit codes."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        if kwargs.get("quiet"):
            # Read by the hub's library when it is imported, which is not yet; without a terminal it is quiet by itself.
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        try:
            function(*args, **kwargs)
            sys.stdout.flush()  # here, where a reader that has gone is known what to do about
        except Elsewhere as error:
            raise typer.Exit(error.code) from None
        except GptkitError as error:
            fail(str(error), error.exit_code)
        except KeyboardInterrupt as error:
            # A note says what is kept, where something is.
            told = "\n".join(["interrupted", *getattr(error, "__notes__", [])])
            fail(told, TERMINATED if isinstance(error, Terminated) else INTERRUPTED)
        except BrokenPipeError:
            give_up_stdout()  # the reader (head, less) has gone
            raise typer.Exit(0) from None
        except OSError as error:
            give_up_stdout()
            where = f"{error.filename}: " if isinstance(error.filename, str) else ""
            fail(f"{where}{error.strerror or error}", 1)
        except MemoryError:
            fail("not enough memory", 1)
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            fail(f"{type(error).__name__}: {error}\nThis is a bug in gptkit; GPTKIT_DEBUG=1 shows where.", 1)

    return run  # type: ignore[return-value]


def fail(message: str, code: int) -> NoReturn:
    """Say why on stderr and exit. The traceback only with GPTKIT_DEBUG=1."""
    if os.environ.get("GPTKIT_DEBUG") == "1":
        traceback.print_exc()
    complain(message)
    raise typer.Exit(code)


def complain(message: str) -> None:
    """Lines on stderr: the first behind our name, what is below it set in."""
    first, _, rest = message.partition("\n")
    typer.echo(
        "\n".join(printable(line) for line in [f"gptkit: {first}", *(f"  {x}" for x in rest.split("\n") if x)]),
        err=True,
    )


def printable(line: str) -> str:
    """A line without control characters: a name out of a file may hold anything, terminal commands included."""
    return line if line.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


def give_up_stdout() -> None:
    """Nothing more can be written there; what is still buffered would fail again at exit."""
    with suppress(OSError):
        sys.stdout.flush()
        return
    with suppress(OSError):  # no file at all, in a notebook or a test
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def console(markup: bool = False) -> Console:
    """Standard output, as wide as the terminal or COLUMNS says, 80 where it is no terminal; without control characters
    but its own, and with NO_COLOR without those. `markup` only for words that are all gptkit's.
    """
    from rich.console import Console, RenderHook
    from rich.segment import Segment

    class StandardOutput(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would exit with 1; see `guarded`

    @dataclass
    class Clean:
        renderable: ConsoleRenderable

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            for text, style, control in console.render(self.renderable, options):
                # One for one, for the widths are settled.
                yield Segment("".join(c if c.isprintable() or c == "\n" else "?" for c in text), style, control)

    class Cleaning(RenderHook):
        def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
            return [Clean(renderable) for renderable in renderables]

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 80
    colours: Any = None if os.environ.get("NO_COLOR") else "auto"
    made = StandardOutput(width=width, highlight=False, markup=markup, emoji=False, color_system=colours)
    made.push_render_hook(Cleaning())
    return made


@contextmanager
def progress_bar(what: str, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr where a person is looking; takes (bytes done now, bytes in all, 0 where nobody knows)."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(what, total=None)

    def advance(done: int, total: int) -> None:
        bar.start()  # not before: downloads have bars of their own, and two at a time overwrite each other
        bar.update(task, advance=done, total=total or None)

    try:
        yield advance
    finally:
        bar.stop()


def version(value: bool) -> None:
    """--version."""
    if value:
        typer.echo(f"gptkit {__version__}")
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=version, is_eager=True)
    ] = False,
) -> None:
    """The group itself does nothing."""


@app.command(epilog="Example: gptkit params qwen3-8b llama-3-8b --by-layer")
@guarded
def params(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL", help="Presets, samples, folders, config.json files or org/name.")
    ],
    by_layer: Annotated[bool, typer.Option("--by-layer", help="Add each layer.")] = False,
    stored: Annotated[
        bool, typer.Option("--stored", help="Add dtypes and bytes, from the headers of the weight files.")
    ] = False,
    json: Json = False,
    offline: Offline = False,
) -> None:
    """Count parameters per component, from a config alone."""
    from .analysis.params import params as count_params
    from .report.tables import parameter_table, print_json

    counts = count_params(*models, offline=offline, stored=stored)
    if json:
        print_json({"schema_version": 1, "models": [each.as_json() for each in counts]})
    else:
        console().print(parameter_table([(c.name, c.family, c.spec, c.count) for c in counts], by_layer))
        if any(each.revision or each.notes or each.stored for each in counts):
            from .report.summaries import source_lines

            say(["", *source_lines(counts)], quiet=False)


@app.command(epilog="Example: gptkit presets")
@guarded
def presets(json: Json = False) -> None:
    """List the models that params knows by name."""
    from .architectures.presets import presets as known
    from .report.summaries import preset_table
    from .report.tables import print_json

    if json:
        print_json(
            [{"name": p.name, "aliases": list(p.aliases), "repo": p.repo, "source": p.source} for p in known().values()]
        )
    else:
        console().print(preset_table(list(known().values())))


@app.command(epilog="Example: gptkit load sample:llama")
@guarded
def load(
    model: ModelArgument,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or float64.")] = None,
    offline: Offline = False,
    allow_pickle: AllowPickle = False,
    allow_extra: AllowExtra = False,
    json: Json = False,
) -> None:
    """Open, map and build a checkpoint; report what it is and anything unexpected."""
    from .converter.checkpoint import open_checkpoint
    from .report.summaries import load_json, load_summary
    from .report.tables import print_json

    checkpoint = open_checkpoint(model, offline=offline, allow_pickle=allow_pickle, allow_extra=allow_extra)
    from .modules.load import load_checkpoint, torch_dtype

    total = sum(path.stat().st_size for path in checkpoint.files)
    with progress_bar("loading") as advance:
        module = load_checkpoint(checkpoint, dtype, progress=lambda done: advance(done, total))
    for name, parameter in module.named_parameters():
        if bad := int((~parameter.isfinite()).sum()):
            checkpoint.notes.append(f"{name}: {bad:,} of its values are NaN or infinite")
    built = f"{sum(p.numel() for p in module.parameters()):,} parameters as {torch_dtype(dtype, checkpoint.dtype)}"
    if json:
        print_json(load_json(checkpoint))
        return
    console().print(load_summary(checkpoint))
    console().print(f"built          {built}", soft_wrap=True)


@app.command(epilog="Example: gptkit convert gpt2 --to local  ·  gptkit convert gpt2-local back --to hf")
@guarded
def convert(
    model: ModelArgument,
    out: Annotated[Path | None, typer.Argument(metavar="OUT", help="The folder to make [MODEL-FORMAT].")] = None,
    to: Annotated[
        str, typer.Option(help="local (gptkit's own), hf, hf:FAMILY, hf:auto, gguf, llama2c, nanogpt or dcp.")
    ] = "local",
    dtype: Annotated[
        str | None, typer.Option(help="Store every tensor as this: float32, bfloat16, …; q8_0 in a gguf.")
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Start another file beyond it: 2GB, 500MB.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Threads, by default one a core.")] = None,
    max_memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Of tensors held at once: 500MB.")] = None,
    force: Force = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written; read no weight.")] = False,
    offline: Offline = False,
    allow_pickle: AllowPickle = False,
    allow_extra: AllowExtra = False,
    quiet: Quiet = False,
) -> None:
    """Convert to gptkit's own format, back to Hugging Face files, or to another format."""
    from .converter.convert import Conversion
    from .converter.convert import convert as run
    from .converter.distributed import leads
    from .report.summaries import conversion_lines

    quiet = quiet or not leads()
    total = 0

    def planned(conversion: Conversion) -> None:
        nonlocal total
        total = sum(shard.nbytes for shard in conversion.plan.shards)

    with progress_bar("converting", quiet) as advance:
        done = run(
            model,
            out,
            to,
            force=force,
            dry_run=dry_run,
            offline=offline,
            allow_pickle=allow_pickle,
            allow_extra=allow_extra,
            dtype=dtype,
            max_shard_bytes=parse_size("--max-shard-size", max_shard_size),
            workers=workers,
            max_memory=parse_size("--max-memory", max_memory),
            progress=lambda nbytes: advance(nbytes, total),
            on_plan=planned,
        )
    say(conversion_lines(done), quiet)


HOW = "How"
"""The heading in the help of `swap` of what is no swap."""


def with_swaps(function: F) -> F:
    """An option for every swap of `surgery.options`; what was given arrives in the function's `**asked`."""
    signature = inspect.signature(function, eval_str=True)
    parameters = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    for each in OPTIONS:
        kind: Any
        kind, default = (bool, False) if each.flag else (str | None, None)
        option = typer.Option(each.spelled, help=each.help, metavar=each.metavar or None, rich_help_panel=each.group)
        annotation = Annotated[kind, option]
        parameters.append(
            inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function


@app.command(epilog="Example: gptkit swap sample:gpt2 gpt2-rms --norm rmsnorm  ·  gptkit swaps sample:gpt2")
@guarded
@with_swaps
def swap(
    model: ModelArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make.")],
    *,
    recipe: Annotated[
        str | None,
        typer.Option(metavar="FILE", rich_help_panel=HOW, help="Steps: a TOML file, a name of ours, or an output."),
    ] = None,
    blocks: Annotated[
        str | None, typer.Option(metavar="LAYERS", rich_help_panel=HOW, help="Some layers alone: 3-7, 0,2,4-.")
    ] = None,
    approximate: Annotated[
        bool, typer.Option("--approximate", rich_help_panel=HOW, help="The plain replacement, whatever it loses.")
    ] = False,
    calibrate: Annotated[
        str | None,
        typer.Option(metavar="FILE", rich_help_panel=HOW, help="A text to fit on; samples have the bundled play."),
    ] = None,
    calibrate_tokens: Annotated[
        int | None, typer.Option(metavar="N", min=1, rich_help_panel=HOW, help="Tokens of it to fit on (2,048).")
    ] = None,
    to: Annotated[
        str | None,
        typer.Option("--as", metavar="FORMAT", rich_help_panel=HOW, help="local, or auto, hf, hf:FAMILY to leave."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="DTYPE", rich_help_panel=HOW, help="Of computed tensors (float64 if the swap is exact)."),
    ] = None,
    no_measure: Annotated[bool, typer.Option("--no-measure", help="Do not compare logits before and after.")] = False,
    measure_steps: Annotated[
        bool, typer.Option("--measure-steps", help="Each step by itself, of a large model too.")
    ] = False,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write what it costs, FILE.html and FILE.json.")
    ] = None,
    force: Force = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would come out; write nothing.")] = False,
    offline: Offline = False,
    allow_pickle: AllowPickle = False,
    allow_extra: AllowExtra = False,
    quiet: Quiet = False,
    **asked: str | bool | None,
) -> None:
    """Exchange components, with a guarantee measured from the files that were written."""
    from .report.summaries import swap_lines
    from .surgery.swap import swap as run

    if report is not None and not dry_run:
        from .report.damage import report_paths

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
            offline=offline,
            allow_pickle=allow_pickle,
            allow_extra=allow_extra,
            progress=lambda nbytes: advance(nbytes, 0),
            **values,  # type: ignore[arg-type]
        )
    if not quiet:
        from .report.surgery import dry_run_report, steps_report

        say(swap_lines(done), quiet)
        if dry_run:
            console().print("", dry_run_report(done), sep="\n")
        elif len(done.chain.steps) > 1:
            console().print("", steps_report(done), sep="\n")
    if report is not None and not dry_run:
        damage_report(done, report, calibrate, calibrate_tokens, quiet)


def damage_report(done: SwapResult, path: Path, calibrate: str | None, tokens: int | None, quiet: bool) -> None:
    """`swap --report`."""
    from .report.damage import write_report
    from .report.summaries import damage_lines
    from .surgery.damage import assess, held_out

    with status("measuring the damage", quiet) as tell:
        found = assess(done, held_out(done, calibrate, tokens), tell)
    written = write_report(done, found, path)
    say([*damage_lines(found), f"report: {', '.join(map(str, written))}"], quiet)


@app.command(epilog="Example: gptkit swaps sample:gpt2  ·  gptkit swaps --recipes")
@guarded
def swaps(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="What to try them on; without one, all that there are.")
    ] = None,
    recipes: Annotated[bool, typer.Option("--recipes", help="List the recipes that come along.")] = False,
    json: Json = False,
    offline: Offline = False,
    allow_pickle: AllowPickle = False,
    allow_extra: AllowExtra = False,
) -> None:
    """List the swaps: what each guarantees, on a MODEL or at best, and what it costs."""
    from .report.surgery import listing_report, recipes_json, recipes_report, registry_json, registry_report
    from .report.tables import print_json
    from .surgery.recipe import read_recipe, shipped

    if recipes:
        if model is not None:
            raise UsageError("--recipes takes no MODEL", "gptkit swap MODEL OUT --recipe NAME --dry-run tries one.")
        found = [read_recipe(name) for name in shipped()]
        if json:
            print_json(recipes_json(found))
        else:
            console().print(recipes_report(found))
        return
    if model is None:
        from .surgery.registry import all_swaps

        if json:
            print_json(registry_json(all_swaps()))
        else:
            console().print(registry_report(all_swaps(), {each.name: each.group for each in OPTIONS}))
        return
    from .converter.checkpoint import open_checkpoint
    from .surgery.listing import listing

    listed = listing(open_checkpoint(model, offline=offline, allow_pickle=allow_pickle, allow_extra=allow_extra))
    if json:
        print_json(listed.as_json())
    else:
        console().print(listing_report(listed))


@app.command(epilog="Example: gptkit verify sample:gpt2 gpt2-local  ·  exit 0: the same, 3: different")
@guarded
def verify(
    model: ModelArgument,
    local: Annotated[
        str | None, typer.Argument(metavar="LOCAL", help="What to hold against it [MODEL itself].")
    ] = None,
    dtype: Annotated[str, typer.Option(help="What both sides compute in.")] = "float32",
    attention: Annotated[str | None, typer.Option(help="sdpa or eager, on both sides.")] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A text to compare on, beside the probe.")] = None,
    long: Annotated[bool, typer.Option("--long", help="Also probe past windows of more than 1,024 tokens.")] = False,
    mutations: Annotated[
        bool | None,
        typer.Option("--mutations/--no-mutations", help="Make mistakes on purpose and count those caught."),
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="MODULE:CALLABLE", help="A port of your own: what returns your torch module.")
    ] = None,
    card: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a card, FILE.json and FILE.md.")] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page: a heatmap by layer and component.")
    ] = None,
    damage: Annotated[
        bool | None,
        typer.Option("--damage/--no-damage", help="What LOCAL costs by position, layer and component."),
    ] = None,
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="A text to measure perplexity on.")] = None,
    stream: Annotated[bool, typer.Option("--stream", help="A layer at a time, for models larger than memory.")] = False,
    json: Json = False,
    offline: Offline = False,
    allow_pickle: AllowPickle = False,
    allow_extra: AllowExtra = False,
    quiet: Quiet = False,
) -> None:
    """Compare logits with transformers."""
    if html is not None:
        from .report.pages import ready

        ready(html)
    if against is not None:
        if local is not None or card is not None:
            raise UsageError("--against takes a MODEL alone", "gptkit verify sample:llama --against my_port:build")
        verify_against(model, against, html, json, quiet, offline)
        return
    from .parity.verify import verify as run
    from .report.summaries import verification_report
    from .report.tables import print_json

    with status("verifying", quiet or json) as tell:
        result = run(
            model,
            local,
            dtype=dtype,
            attention=attention,
            prompts=prompt or (),
            long=long,
            mutations=mutations,
            stream=stream,
            bisected=None if html is None else True,
            damaged=True if damage is None and text is not None else damage,
            text=lambda source: measured_text(source, text),
            offline=offline,
            allow_pickle=allow_pickle,
            allow_extra=allow_extra,
            progress=tell,
        )
    if json:
        print_json(result.as_json())
    elif not quiet:
        console().print(verification_report(result))
    if card is not None:
        from .parity.card import write_card

        written = write_card(result, card, offline=offline, allow_pickle=allow_pickle, allow_extra=allow_extra)
        if not json:
            say([f"card: {', '.join(str(path) for path in written)}"], quiet)
    if html is not None:
        from .report.pages import write_page
        from .report.verification import verification_page

        write_page(verification_page(result), html)
        say([f"page: {html}"], quiet or json)
    if not result.passed:
        raise typer.Exit(3)


def measured_text(source: Checkpoint, file: Path | None) -> tuple[int, ...] | None:
    """The end of a text, or of the bundled play for the samples."""
    from .surgery.calibration import read_text

    if file is None and not (source.origin.reference or "").startswith("sample:"):
        return None
    return read_text(source, file, tokens=0).held_out


def verify_against(model: str, against: str, html: Path | None, json: bool, quiet: bool, offline: bool) -> None:
    """`verify --against`: exit 3 where the port is not the model."""
    from .parity.port import verify_port
    from .report.summaries import port_report
    from .report.tables import print_json

    with status("verifying", quiet or json) as tell:
        tell("a port of your own")
        result = verify_port(model, against, offline=offline)
    if json:
        print_json(result.as_json())
    elif not quiet:
        console().print(port_report(result))
    if html is not None:
        from .report.pages import write_page
        from .report.verification import port_page

        write_page(port_page(result), html)
        say([f"page: {html}"], quiet or json)
    if not result.passed:
        raise typer.Exit(3)


@app.command(epilog="Example: gptkit generate sample:gpt2 'ROMEO:' -n 80 --temperature 0.8 --seed 1")
@guarded
def generate(
    model: ModelArgument,
    text: Annotated[str | None, typer.Argument(metavar="TEXT", help="The prompt; - reads standard input.")] = None,
    ids: Annotated[str | None, typer.Option(help="Token ids instead of a text: '1 5 9'.")] = None,
    max_new_tokens: Annotated[int, typer.Option("-n", "--max-new-tokens", help="Where to stop.")] = 100,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy, which is the default unless --top-k or --top-p is given.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens that make up p.")] = None,
    seed: Annotated[int | None, typer.Option(help="For the same text twice.")] = None,
    dtype: Annotated[str | None, typer.Option(help="What to compute in; the checkpoint's unless told.")] = None,
    attention: Annotated[str, typer.Option(help="sdpa or eager.")] = "sdpa",
    offline: Offline = False,
    allow_pickle: AllowPickle = False,
    allow_extra: AllowExtra = False,
) -> None:
    """Write on from a prompt."""
    from .modules.attention import Kernel
    from .modules.text import generate as run

    if (text is None) == (ids is None):
        raise UsageError("give a prompt: either TEXT or --ids", "gptkit generate sample:gpt2 'ROMEO:'")
    if attention not in ("sdpa", "eager"):
        raise UsageError(f"unknown attention {attention!r}", "known: sdpa, eager")
    kernel: Kernel = "eager" if attention == "eager" else "sdpa"
    prompt: str | list[int]
    if ids is not None:
        prompt = parse_ids(ids)
    else:
        prompt = read_stdin() if text == "-" else text or ""
    pieces = run(
        model,
        prompt,
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        dtype=dtype,
        attention=kernel,
        offline=offline,
        allow_pickle=allow_pickle,
        allow_extra=allow_extra,
    )
    watched = sys.stdout.isatty()
    try:
        for piece in chain([prompt] if isinstance(prompt, str) else [], pieces):
            # What a model says is somebody else's text. A program gets all of it, a terminal what it can show.
            shown = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in piece) if watched else piece
            sys.stdout.write(shown)  # not typer.echo, which drops what looks like a colour
            sys.stdout.flush()
    finally:
        typer.echo()  # after an interruption too: what is said about it gets a line of its own


@app.command(epilog="Example: gptkit check gpt2-local")
@guarded
def check(folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder that gptkit wrote.")]) -> None:
    """Hash a folder's files again and compare with its manifest; say which tensor changed, and where."""
    from .converter.publish import MANIFEST, check_manifest
    from .errors import CheckpointError, InvalidInput

    if not folder.is_dir():
        raise InvalidInput(f"no such folder: {folder}", "Name a folder that gptkit wrote.")
    if not (folder / MANIFEST).exists():
        raise InvalidInput(f"{folder} has no {MANIFEST}: gptkit did not write it", "gptkit load checks any checkpoint.")
    problems = check_manifest(folder)
    if problems:
        some = [*problems[:10], *([f"… and {len(problems) - 10} more"] if len(problems) > 10 else [])]
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        raise CheckpointError(f"{folder}: {count}", "\n".join(some))
    say([f"{folder}: every file has the bytes that its manifest says"], quiet=False)


@app.command(epilog="Example: gptkit demo --keep tour")
@guarded
def demo(
    keep: Annotated[Path | None, typer.Option(help="Keep the converted checkpoints in this folder.")] = None,
) -> None:
    """A tour on the trained samples: count, convert, verify, swap, verify again, generate."""
    from .report.demo import tour

    if not tour(console(markup=True), keep):
        raise typer.Exit(3)


UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(option: str, text: str | None) -> int | None:
    """Bytes of "2GB", "500 MB", "1.5GiB", "1000000"; raises UsageError."""
    if text is None:
        return None
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,6})?)\s*([a-zA-Z]*)\s*", text, re.ASCII)
    nbytes = int(float(found[1]) * UNITS.get(found[2].upper(), 0)) if found else 0
    if nbytes <= 0:
        raise UsageError(f"{option} {text!r} is not a size", "Give a number of bytes, as 2GB, 500MB or 1GiB.")
    return nbytes


def parse_ids(text: str) -> list[int]:
    """'1 5 9' or '1,5,9' as numbers.

    Raises:
        UsageError: something in it is not a number.

    """
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise UsageError(f"--ids takes numbers, not {text!r:.60}") from error


def read_stdin() -> str:
    """Standard input.

    Raises:
        UsageError: it is not text.

    """
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not text: {error}") from error


def say(lines: list[str], quiet: bool) -> None:
    """Lines on standard output, never cut or wrapped: they name files."""
    if not quiet:
        typer.echo("\n".join(map(printable, lines)))


@contextmanager
def status(what: str, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what is going on, where a person is looking."""
    if quiet or not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    live = Console(stderr=True).status(what)

    def tell(text: str) -> None:
        live.start()  # not before, as for the bar
        live.update(f"{what}: {text}")

    try:
        yield tell
    finally:
        live.stop()


def terminate(*_: object) -> NoReturn:
    """Leave in order at the first SIGTERM, at once at the second. Raises Terminated."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise Terminated


def main() -> None:
    """The `gptkit` command."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # else whoever started us decided on it
        signal.signal(signal.SIGTERM, terminate)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may lack a character
    app(prog_name="gptkit")


if __name__ == "__main__":
    main()
