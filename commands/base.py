"""What all commands share: the app, its arguments and options, and how errors become lines and exit codes."""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import typer
import typer.core

from ..errors import Elsewhere, GptkitError, UsageError
from ..plugins import load as load_plugins
from ..process import INTERRUPTED, TERMINATED, Terminated
from ..terminal import complain, fail, give_up_stdout
from ..version import __version__
from .completion import bash_words, complete_model
from .drawn import Drawn

__all__ = [
    "ROWS",
    "By",
    "ForTree",
    "ForWeights",
    "Force",
    "HeatMap",
    "Json",
    "ModelArgument",
    "Models",
    "Pictures",
    "Quiet",
    "app",
    "examples",
    "guarded",
    "option",
    "parse_size",
    "rows_by",
    "tokens",
]


# What typer raises for a wrong call. Of its classes typer names a subclass alone, and has moved the others.
WrongCall: type[Exception] = typer.BadParameter.__mro__[1]


ORDER = (
    *("params", "compare", "show", "diff", "presets", "recommend"),
    *("load", "inspect", "convert", "check", "swap", "swaps", "verify", "generate", "demo"),
)
"""The commands as the help lists them: looking first, which needs nothing, and then what touches weights."""


WORDS = {"version": "gptkit --version", "help": "gptkit -h"}
"""What other tools have as commands, and how it is called here."""


def told(call: Any) -> str:
    """What is wrong with a call, in a line; of the options that may have been meant, the nearest alone."""
    near = get_close_matches(getattr(call, "option_name", ""), getattr(call, "possibilities", None) or (), 1)
    if near:
        return f"no such option {call.option_name!r}. Did you mean {near[0]!r}?"
    message = str(call.format_message()).strip()
    # click and typer each add a suggestion, the same one
    message = re.sub(r"( Did you mean .*\?)\1$", r"\1", message)
    if any(f"{word!r}" in message for word in WORDS):
        message = re.sub(r" Did you mean .*\?$", "", message)
    return message[:1].lower() + message[1:].rstrip(".")


class Commands(typer.core.TyperGroup):
    """The commands; a wrong call is told in gptkit's own two lines instead of a page."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=ORDER.index)

    def way_on(self, call: Any, given: Sequence[str]) -> str:
        """What to do after a wrong call of `given`."""
        first = next((each for each in given if not each.startswith("-")), "")
        if first in WORDS:
            return f"{WORDS[first]} does that"
        if call.ctx is not None:
            return f"{call.ctx.command_path} -h says what it takes"
        # The parser of options does not say whose it is, and the group itself has none that take a value.
        return f"gptkit {first} -h says what it takes" if first in self.commands else "gptkit -h says what it takes"

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with bash_words():
                code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except WrongCall as error:
            call: Any = error
            given = kwargs.get("args", args[0] if args else None) or sys.argv[1:]
            message = told(call)
            if message:  # none where there was no argument at all: the help was printed
                complain(f"{message}\n{self.way_on(call, given)}")
            code = call.exit_code
        except typer.Abort:
            complain("interrupted")
            code = INTERRUPTED
        sys.exit(code or 0)


def examples(*lines: str) -> str:
    """The end of a command's help: calls to try, a line each."""
    return "\n\n".join(["Examples:", *(f"  {line}" for line in lines)])


app = typer.Typer(
    name="gptkit",
    cls=Commands,
    help="Take any GPT-style checkpoint apart, change it, and prove that it still computes what it should.",
    epilog=examples("gptkit params qwen3-8b", "gptkit verify sample:llama", "gptkit demo"),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

F = TypeVar("F", bound=Callable[..., None])


def option(
    form: str, words: str, panel: str | None = None, complete: Callable[[str], list[str]] | None = None, **more: Any
) -> Any:
    """An option as its help shows it: "--kv TOKENS", or "TOKENS" alone where its name is the parameter's."""
    parts = form.split(" ")
    names = [part for part in parts if part.startswith("-")]
    metavar = " ".join(part for part in parts if part not in names) or None
    return typer.Option(*names, metavar=metavar, help=words, rich_help_panel=panel, autocompletion=complete, **more)


Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL…",
        help="One or more models: presets, samples, folders, config.json or .gguf files, or org/name on the hub.",
        autocompletion=complete_model,
    ),
]
ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="The model: org/name or org/name@revision on the hub, a preset, a folder, a weight file, or sample:gpt2.",
        autocompletion=complete_model,
    ),
]
Json = Annotated[bool, option("--json", "Print JSON instead of text.")]
Force = Annotated[bool, option("--force", "Replace an existing checkpoint folder, in one step.")]
Quiet = Annotated[bool, option("-q --quiet", "Print nothing but errors.")]


@dataclass(frozen=True)
class Together:
    """Options that a command takes as one value: by name their annotations and defaults, and what makes the value."""

    options: Mapping[str, tuple[Any, Any]]
    make: Callable[..., Any] = dict


def _pictures(page: str) -> Together:
    name = "Draw this figure of the page, by words of its title; by default the first."
    return Together(
        {
            "html": (Annotated[Path | None, option("--html FILE", page)], None),
            "png": (Annotated[Path | None, option("--png FILE", "Write a picture (PNG), for a talk.")], None),
            "svg": (Annotated[Path | None, option("--svg FILE", "Write a picture (SVG), for a paper.")], None),
            "figure": (Annotated[str | None, option("--figure NAME", name)], None),
        },
        Drawn,
    )


_TREE = {
    "offline": (Annotated[bool, option("--offline", "Use local files and the hub's cache only.")], False),
    "allow_pickle": (
        Annotated[bool, option("--allow-pickle", "Read .bin files too (weights only); safetensors need no trust.")],
        False,
    ),
}
_EXTRA = (Annotated[bool, option("--allow-extra", "Leave out tensors that the model has no place for.")], False)

Pictures = Annotated[Drawn, _pictures("Write a page (HTML) that opens offline.")]
HeatMap = Annotated[Drawn, _pictures("Write a page (HTML) with a heat map by layer and component.")]
ForTree = Annotated[dict[str, Any], Together(_TREE)]
"""How a reference's tree is looked up: keyword arguments of `outline`."""
ForWeights = Annotated[dict[str, Any], Together({**_TREE, "allow_extra": _EXTRA})]
"""How a checkpoint is opened: keyword arguments of `open_checkpoint`."""


def _apart(function: Callable[..., None]) -> tuple[inspect.Signature, dict[str, Together]]:
    """A command's signature with each option for itself, and what is taken together."""
    signature, together = inspect.signature(function, eval_str=True), {}
    parameters = []
    for each in signature.parameters.values():
        if each.kind is each.VAR_KEYWORD:  # what a command has looked up by itself
            continue
        found = [part for part in getattr(each.annotation, "__metadata__", ()) if isinstance(part, Together)]
        if not found:
            parameters.append(each)
            continue
        together[each.name] = found[0]
        for name, (annotation, default) in found[0].options.items():
            parameters.append(inspect.Parameter(name, each.kind, default=default, annotation=annotation))
    return signature.replace(parameters=parameters), together


def guarded(function: F) -> F:
    """Turn gptkit's errors into a line or two on stderr and exit codes; options come as what they make together."""
    signature, together = _apart(function)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        if kwargs.get("quiet"):
            # Read by the hub's library when it is imported, which is not yet; without a terminal it is quiet by itself.
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        try:
            for name, each in together.items():
                kwargs[name] = each.make(**{key: kwargs.pop(key) for key in each.options})
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

    run.__signature__ = signature  # type: ignore[attr-defined]
    return run  # type: ignore[return-value]


def version(value: bool) -> None:
    """--version."""
    if value:
        typer.echo(f"gptkit {__version__}")
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[  # noqa: ARG001 - its callback answers
        bool, option("--version", "Show the version and exit.", callback=version, is_eager=True)
    ] = False,
    plugin: Annotated[
        list[str] | None, option("--plugin MODULE", "Import this module, which registers components, families, …")
    ] = None,
) -> None:
    """The group itself imports plugins, and does nothing else."""
    load_plugins(plugin or ())


UNITS = {"": 1, "B": 1} | {
    f"{prefix}{unit}": of**power for power, prefix in enumerate("KMGT", 1) for unit, of in (("B", 1000), ("IB", 1024))
}


def parse_size(option: str, text: str | None) -> int | None:
    """Bytes of "2GB", "500 MB", "1.5GiB", "1000000"; raises UsageError."""
    if text is None:
        return None
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,6})?)\s*([a-zA-Z]*)\s*", text, re.ASCII)
    nbytes = int(float(found[1]) * UNITS.get(found[2].upper(), 0)) if found else 0
    if nbytes <= 0:
        raise UsageError(f"{option} {text!r} is not a size", "Give a number of bytes, as 2GB, 500MB or 1GiB.")
    return nbytes


def memory_of(option: str, text: str | None) -> int | None:
    """A size with its unit, 24GB or 80GiB; raises UsageError."""
    if text is not None and text.strip().isdecimal():
        raise UsageError(f"{option} {text!r} has no unit", f"{option} {text.strip()}GB, or GiB.")
    return parse_size(option, text)


By = Literal["component", "layer", "tensor"]
ROWS: tuple[By, ...] = get_args(By)


def rows_by(text: str) -> By:
    """What --by names: component, layer or tensor, or a plural; raises UsageError."""
    for known in ROWS:
        if text in (known, f"{known}s"):
            return known
    raise UsageError(
        f"--by {text!r:.40} is none of {', '.join(ROWS)}",
        f"or their plurals: {', '.join(f'{each}s' for each in ROWS)}",
    )


COUNTS = {"": 1, "k": 2**10, "m": 2**20}
"""Tokens, as contexts are named: a model "of 128k" takes 131,072."""


def tokens(option: str, text: str) -> int:
    """A number of tokens: 8192, 8_192, 8k (8,192), 1M (1,048,576), 1e3; raises UsageError."""
    found = re.fullmatch(
        r"\s*(\d(?:_?\d){0,14})(\.\d{1,9})?(?:e\+?(\d{1,2}))?\s*([km]?)\s*", text, re.ASCII | re.IGNORECASE
    )
    number = 0
    if found:
        whole, part, power, unit = found.groups(default="")
        digits = part[1:]
        scaled = int(whole + digits) * 10 ** int(power or 0) * COUNTS[unit.lower()]
        number, rest = divmod(scaled, 10 ** len(digits))
        number = 0 if rest else number
    if not 1 <= number < 10**16:
        raise UsageError(
            f"{option} {text!r:.40} is not a number of tokens", f"as in {option} 8192, {option} 8k or {option} 1M"
        )
    return number
