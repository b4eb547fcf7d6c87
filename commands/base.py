"""The parts that commands share: the app, arguments and options, and the conversion of errors to exit codes."""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

import typer
import typer.core

from ..converter.targets import CONFIGS
from ..errors import Elsewhere, GptkitError, UsageError, meant
from ..plugins import load as load_plugins
from ..process import INTERRUPTED, TERMINATED, Terminated
from ..terminal import complain, fail, give_up_stdout, say
from ..version import __version__
from .completion import bash_words, complete_model, one_of

if TYPE_CHECKING:
    from ..analysis.params import ModelCount
    from ..report.pages import Page
    from ..surgery.shapes import Reshaped

# The class of typer's errors for wrong calls. typer exports only a subclass, and has moved the others between versions.
_WrongCall: type[Exception] = typer.BadParameter.__mro__[1]
_PANELS = {
    "Look": ("params", "compare", "show", "diff", "audit", "presets", "families", "recommend"),
    "Convert": ("convert", "extract", "load", "inspect", "check"),
    "Change": ("swap", "swaps", "heal"),
    "Prove": ("verify",),
    "Train and use": ("tokenize", "train", "eval", "ablate", "fit-scaling", "generate"),
    "More": ("demo", "draft"),
}
"""The commands by group. Groups and commands are in the order in which the help lists them."""
_ORDER = [name for names in _PANELS.values() for name in names]
_HIDDEN = {"inspect"}  # another name of `load`
_WORDS = {"version": "gptkit --version", "help": "gptkit -h"}
"""Commands that gptkit does not have but other tools do, and the call of gptkit that does the same."""


def _mistake(call: Any) -> str:
    """Return one line that says what is wrong with a command line. `call` is click's error.

    For a mistyped command or option, gptkit suggests a similar one itself, because click suggests almost any word.
    """
    message = re.sub(r" *(\(Did you mean .*\)|Did you mean .*\?)$", "", str(call.format_message()).strip())
    message = message[:1].lower() + message[1:].rstrip(".")
    unknown = re.fullmatch(r"no such (option|command):? '(-{0,2}(.+))'", message)
    if unknown is None or call.ctx is None:
        return message
    of, (kind, word, name) = call.ctx.command, unknown.groups()
    if kind == "command":
        known = {} if word in _WORDS else {command: command for command in of.list_commands(call.ctx)}
    else:
        options = (
            option for parameter in of.get_params(call.ctx) for option in (*parameter.opts, *parameter.secondary_opts)
        )
        known = {option.lstrip("-"): option for option in options if option.startswith("--")}
    near = meant(name, known)
    return message if near is None else f"{message}. Did you mean {known[near]!r}?"


def _refuse_repeated(command: Any, ctx: Any, args: Sequence[str]) -> None:
    """Raise an error if an option that takes one value is given twice, since either value may be the intended one.

    Options that click collects in a list (`multiple`) or counts may be repeated.
    """
    _, _, order = command.make_parser(ctx).parse_args(list(args))
    single = [
        parameter
        for parameter in order
        if parameter.param_type_name == "option" and not parameter.multiple and not parameter.count
    ]
    names = [parameter.name for parameter in single]
    twice = next((parameter for parameter in single if names.count(parameter.name) > 1), None)
    if twice is not None:
        ctx.fail(f"option {twice.get_error_hint(ctx)} was given {names.count(twice.name)} times, but takes one value")


class Command(typer.core.TyperCommand):
    """A command that refuses options that are given twice, except repeatable ones."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:  # for completion in the shell, the call is not finished yet
            _refuse_repeated(self, ctx, args)
        return super().parse_args(ctx, args)


class _Commands(typer.core.TyperGroup):
    """The group of all commands. It reports a wrong call in two lines of gptkit's own, instead of click's page."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            _refuse_repeated(self, ctx, args)
        return list(super().parse_args(ctx, args))

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=_ORDER.index)

    def next_step(self, call: Any, given: Sequence[str]) -> str:
        """Return the advice to print after a wrong command line, whose words are `given`. `call` is click's error."""
        first = next((word for word in given if not word.startswith("-")), "")
        if first in _WORDS:
            return f"Use {_WORDS[first]} instead."
        if call.ctx is not None:
            return f"Run {call.ctx.command_path} -h for help."
        # click's error has no context if the parser of options raised it. gptkit itself has no options with a value
        # before the command, so the first word is the command.
        return f"Run gptkit {first} -h for help." if first in self.commands else "Run gptkit -h for help."

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _writing():  # the group's help
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _writing():  # a command's help
            return super().invoke(ctx)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with bash_words():
                code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except _WrongCall as error:
            call: Any = error
            given = kwargs.get("args", args[0] if args else None) or sys.argv[1:]
            message = _mistake(call)
            if message:  # empty if the call had no arguments; then the help was printed
                complain(f"{message}\n{self.next_step(call, given)}")
            code = call.exit_code
        except typer.Abort:
            complain("interrupted")
            code = INTERRUPTED
        sys.exit(code or 0)


@contextmanager
def _writing() -> Iterator[None]:
    """Report errors of writing to stdout in one line. A closed pipe (head, less) is no error and ends quietly."""
    try:
        yield
    except BrokenPipeError:
        give_up_stdout()
        raise typer.Exit(0) from None
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # rich, which prints the help, exits by itself
            raise typer.Exit(0) from None
        raise
    except OSError as error:
        give_up_stdout()
        where = f"{error.filename}: " if isinstance(error.filename, str) else ""
        fail(f"{where}{error.strerror or error}", 1)


def _examples(*lines: str) -> str:
    """Return the end of a command's help: examples, one per line."""
    return "\n\n".join(["Examples:", *(f"  {line}" for line in lines)])


app = typer.Typer(
    name="gptkit",
    cls=_Commands,
    help="Take any GPT-style checkpoint apart, change it, and prove that it still computes what it should.",
    epilog=_examples("gptkit params qwen3-8b", "gptkit verify sample:llama", "gptkit demo"),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_F = TypeVar("_F", bound=Callable[..., None])
_Completion = Callable[[str], list[str]] | None


def option(
    form: str, words: str, panel: str | None = None, *, default: Any = None, complete: _Completion = None, **more: Any
) -> Any:
    """Return an option of a command, as the default of a parameter.

    Args:
        form: The option as the help shows it, "--kv TOKENS", or only "TOKENS" if the parameter's name gives the rest.
        words: The help text.
        panel: The heading in the help.
        default: The value if the option is not given.
        complete: The function that completes values in the shell.
        more: Other arguments of `typer.Option`.
    """
    parts = form.split(" ")
    names = [part for part in parts if part.startswith("-")]
    metavar = " ".join(part for part in parts if part not in names) or None
    return typer.Option(
        default, *names, metavar=metavar, help=words, rich_help_panel=panel, autocompletion=complete, **more
    )


def flag(form: str, words: str, panel: str | None = None, **more: Any) -> Any:
    """Return an option without a value, which is off by default."""
    return option(form, words, panel, default=False, **more)


def argument(metavar: str, words: str, default: Any = ..., complete: Any = None) -> Any:
    """Return an argument. It is required if it has no default."""
    return typer.Argument(default, metavar=metavar, help=words, autocompletion=complete)


MODELS = argument(
    "MODEL…",
    "One or more models. Each is a preset (qwen3-8b), a sample (sample:gpt2), a folder, a config.json "
    "or .gguf file, or org/name on the Hugging Face hub.",
    complete=complete_model,
)
MODEL = argument(
    "MODEL",
    "The model: org/name or org/name@revision on the Hugging Face hub, a preset (listed by gptkit "
    "presets), a folder, a weight file, or a sample that comes with gptkit, such as sample:gpt2.",
    complete=complete_model,
)
JSON = flag("--json", "Print JSON instead of text.")
FORCE = flag(
    "--force",
    "Replace the output if it already exists. Files in the output folder that do not belong to a "
    "checkpoint, such as notes, are kept.",
)
CONFIG = option(
    "--config FORM",
    "With Hugging Face files: the form of config.json and the tokenizer's files. With transformers4, programs for "
    "transformers 4 can read them too, such as vLLM, SGLang, llama.cpp's converter and MLX. By default, the fields "
    "are those that transformers 5 reads.",
    complete=one_of(CONFIGS),
)
QUIET = flag("-q --quiet", "Print nothing but errors.")


def device_option(*, several: bool = False, panel: str | None = None, what: str = "compute") -> Any:
    """Return the option --device.

    Args:
        several: whether the layers of the model may be divided over several devices.
        panel: The heading in the help.
        what: The verb for what runs on the device.
    """
    more = " Several GPUs, such as cuda:0,cuda:1, divide the layers of the model among them." if several else ""
    return option(
        "--device DEVICE",
        f"The device to {what} on: cpu, cuda (the first GPU), cuda:1 (the second GPU), mps (the GPU of a Mac), or "
        f"auto, which is a GPU if PyTorch can use one (never mps), and otherwise the CPU.{more}",
        panel,
        default="auto",
        complete=one_of(("auto", "cpu", "cuda", "mps")),
    )


WORKERS = option("N", "The number of threads, such as 4. The default is one per CPU core.", min=1)


@dataclass(frozen=True)
class _OptionGroup:
    """Several options that a command receives as one parameter."""

    options: Mapping[str, tuple[Any, Any]]
    """The type of each option and the option itself, by name."""
    make: Callable[..., Any] = dict
    """The function that makes the parameter's value from the options, which are its keyword arguments."""


@dataclass(frozen=True)
class _PictureFiles:
    """The files of --html, --png and --svg, to which a command writes its report. It is false if none is given.

    When it is made, before the command does its work, it checks whether the files can be written.
    """

    html: Path | None
    png: Path | None
    svg: Path | None
    figure: str | None = None
    """Words in the title of the figure that is written as PNG or SVG. None is the first figure."""

    def __post_init__(self) -> None:
        if self.figure is not None and self.png is None and self.svg is None:
            raise UsageError("--figure works only with --png or --svg", "Add --svg FILE or --png FILE.")
        if self:
            from ..report.pictures import ready

            ready(self.html, self.png, self.svg)

    def __bool__(self) -> bool:
        return any(path is not None for path in (self.html, self.png, self.svg))

    def write(self, page: Callable[[], Page], quiet: bool) -> None:
        """Write the page or its figure to the files, if any are given, and print their names unless `quiet`."""
        if not self:
            return
        from ..report.pictures import write

        for path, title in write(page(), self.html, self.png, self.svg, self.figure):
            say([f"picture: {path} ({title})" if title else f"page: {path}"], quiet)


def _pictures(page: str) -> _OptionGroup:
    figure = option(
        "--figure NAME",
        "With --png or --svg: the figure of the report to draw. Give its title, or some words of the title. "
        "The default is the first figure.",
    )
    options = {
        "html": (Path | None, option("--html FILE", page)),
        "png": (
            Path | None,
            option("--png FILE", "Write one figure of the report (see --figure) to this PNG file, for slides."),
        ),
        "svg": (
            Path | None,
            option("--svg FILE", "Write one figure of the report (see --figure) to this SVG file, for a paper."),
        ),
        "figure": (str | None, figure),
    }
    return _OptionGroup(options, _PictureFiles)


_OFFLINE = flag("--offline", "Download nothing: use only local files and files already in the Hugging Face cache.")
_PICKLE = flag(
    "--allow-pickle",
    "Also read pickle files, such as .bin files written by torch.save. gptkit reads only weights from "
    "them, in a restricted process.",
)
_EXTRA = flag(
    "--allow-extra",
    "Ignore tensors in the checkpoint that the model does not use. Without this option, they are an error.",
)
_TREE = {"offline": (bool, _OFFLINE), "allow_pickle": (bool, _PICKLE)}

Pictures = Annotated[
    _PictureFiles, _pictures("Write the report with its figures to this HTML file, which opens without a network.")
]
HeatMap = Annotated[
    _PictureFiles,
    _pictures("Write the report to this HTML file, with a heat map of the differences by layer and component."),
]
ForTree = Annotated[dict[str, Any], _OptionGroup(_TREE)]
"""The options for looking up a model's tree: keyword arguments of `outline`."""
ForWeights = Annotated[dict[str, Any], _OptionGroup({**_TREE, "allow_extra": (bool, _EXTRA)})]
"""The options for opening a checkpoint: keyword arguments of `open_checkpoint`."""


def _separate_options(function: Callable[..., None]) -> tuple[inspect.Signature, dict[str, _OptionGroup]]:
    """Return a command's signature with every option of an `_OptionGroup` as a parameter of its own.

    Also return the groups, by the names of the parameters that they replaced.
    """
    signature, groups = inspect.signature(function, eval_str=True), {}
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:  # options that the command class adds, as that of swap does
            continue
        (group,) = getattr(parameter.annotation, "__metadata__", (None,))
        if not isinstance(group, _OptionGroup):
            parameters.append(parameter)
            continue
        groups[parameter.name] = group
        for name, (kind, default) in group.options.items():
            parameters.append(inspect.Parameter(name, parameter.kind, default=default, annotation=kind))
    return signature.replace(parameters=parameters), groups


_PACKAGES = {"yaml": "pyyaml"}
"""Packages whose name for pip differs from the name of their module."""


def _not_imported(error: ImportError) -> str | None:
    """Return a message about a package that is missing or cannot be imported, or None for gptkit's own modules."""
    module, root = (error.name or "").partition(".")[0], __package__.partition(".")[0]
    if module == root:
        return None
    package = _PACKAGES.get(module, module.replace("_", "-"))
    if isinstance(error, ModuleNotFoundError) and error.name == module:
        # The light distribution hf-gptkit lacks several packages, which only the full one installs.
        way = f"Install it: pip install {package}" if root == "gptkit" else "Install all of gptkit: pip install gptkit"
        return f"this command needs the Python package {package}, which is not installed\n{way}"
    reason = " ".join(str(error).split())
    if not module:
        return f"a required package cannot be imported: {reason}\nReinstall that package."
    return f"{package} cannot be imported: {reason}\nInstall another version: pip install --upgrade {package}"


def _guarded(function: _F) -> _F:
    """Wrap a command: print its errors on stderr, and exit with their codes.

    The options of an `_OptionGroup` are passed to the command as one argument.
    """
    signature, groups = _separate_options(function)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        if kwargs.get("quiet"):
            # huggingface_hub reads this variable when it is imported, which is later. It shows no progress bars without
            # a terminal.
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        try:
            for name, group in groups.items():
                kwargs[name] = group.make(**{key: kwargs.pop(key) for key in group.options})
            function(*args, **kwargs)
            sys.stdout.flush()  # here, so that `_writing` handles a closed pipe
        except Elsewhere as error:
            raise typer.Exit(error.code) from None
        except GptkitError as error:
            fail(str(error), error.exit_code)
        except KeyboardInterrupt as error:
            # The error's notes say which files are kept, if any.
            lines = "\n".join(["interrupted", *getattr(error, "__notes__", [])])
            fail(lines, TERMINATED if isinstance(error, Terminated) else INTERRUPTED)
        except OSError:
            raise  # `_writing` handles it
        except MemoryError:
            fail(
                "not enough memory on this machine\nClose other programs, or use a smaller model, context or batch.", 1
            )
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            full = _full_gpu(error, kwargs.get("model"))
            if full is not None:
                fail(str(full), full.exit_code)
            if _lacks_memory(error):
                fail(
                    "not enough memory on this machine\nClose other programs, or use a smaller model, context or "
                    "batch.",
                    1,
                )
            missing = _not_imported(error) if isinstance(error, ImportError) else None
            bug = f"{type(error).__name__}: {error}\nThis is a bug in gptkit. Set GPTKIT_DEBUG=1 to see the traceback."
            fail(missing or bug, 1)

    run.__signature__ = signature  # type: ignore[attr-defined]
    return run  # type: ignore[return-value]


def _full_gpu(error: Exception, model: Any) -> GptkitError | None:
    """Return the error for the user if the memory of a GPU is full, or None for other errors.

    `model` is the argument MODEL of the command, if it has one.
    """
    if sys.modules.get("torch") is None:  # None if it cannot be imported
        return None
    from ..modules.devices import memory_error

    return memory_error(error, model if isinstance(model, str) else None)


_NO_MEMORY = ("annot allocate memory", "failed to map segment", "cannot create shared object", "std::bad_alloc")


def _lacks_memory(error: BaseException | None) -> bool:
    """Return whether an error comes from a lack of memory, for example while a library was loaded."""
    if error is None:
        return False
    if isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY):
        return True
    return _lacks_memory(error.__cause__ or error.__context__)


def command(*calls: str, name: str | None = None, words: str | None = None, **more: Any) -> Callable[[_F], _F]:
    """Return a decorator that adds a function as a command to the app, wrapped by `_guarded`.

    Args:
        calls: Examples for the end of the help.
        name: The command's name. The default is the function's name.
        words: The help text. The default is the function's docstring.
        more: Other arguments of typer's `command`.
    """

    def add(function: _F) -> _F:
        called = name or function.__name__.replace("_", "-")
        panel = next(panel for panel, names in _PANELS.items() if called in names)
        how = {"cls": Command, "rich_help_panel": panel, "hidden": called in _HIDDEN, **more}
        paragraphs = inspect.cleandoc(words or function.__doc__ or "").split("\n\n")
        text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)  # the terminal breaks lines
        return app.command(called, help=text, epilog=_examples(*calls), **how)(_guarded(function))

    return add


def _version(value: bool) -> None:
    if value:
        typer.echo(f"gptkit {__version__}")
        raise typer.Exit


@app.callback()
def root(
    show_version: bool = flag("--version", "Show the version and exit.", callback=_version, is_eager=True),  # noqa: ARG001 - its callback answers
    plugin: list[str] | None = option(
        "--plugin MODULE",
        "Import this Python module or file, which registers model families, swaps or formats of your own. Repeatable.",
    ),
) -> None:
    """Import plugins. The group itself does nothing else."""
    load_plugins(plugin or ())


def reshaped(
    models: Sequence[ModelCount], swaps: Sequence[str] | None, recipe: str | None, opening: Mapping[str, Any]
) -> Iterator[tuple[ModelCount, Reshaped, str]]:
    """Apply --swap and --recipe to the architecture of every model, without weights.

    Yield the model, the result, and the model family whose config.json can describe the result ("" for none).
    """
    from ..architectures import expressed
    from ..surgery.shapes import steps_from, swapped

    steps = steps_from(swaps or [], recipe)
    for model in models:
        result = swapped(model.spec, steps, model.family or None, model.name, files=model.folder, **opening)
        yield model, result, expressed(result.spec)[0] or ""


_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{unit}": of**power for power, prefix in enumerate("KMGT", 1) for unit, of in (("B", 1000), ("IB", 1024))
}


def parse_size(option: str, text: str | None, of_a_card: bool = False) -> int | None:
    """Return the number of bytes that a text such as "2GB", "500 MB", "1.5GiB" or "1000000" means, or None for None.

    With `of_a_card`, the text is the memory of a GPU. It then needs a unit, and "24GB" means 24 GiB, because a GPU that
    is sold with 24 GB has 24 GiB.

    Raises:
        UsageError: the text is not a size.
    """
    if text is None:
        return None
    if of_a_card and text.strip().isdecimal():
        raise UsageError(
            f"{option} {text!r} has no unit", f"Write {option} {text.strip()}GB for a GPU with {text.strip()} GB."
        )
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,6})?)\s*([a-zA-Z]*)\s*", text, re.ASCII)
    unit = match[2].upper() if match else ""
    if of_a_card and len(unit) == 2:
        unit = f"{unit[0]}I{unit[1]}"
    nbytes = int(float(match[1]) * _UNITS.get(unit, 0)) if match else 0
    if nbytes <= 0:
        raise UsageError(f"{option} {text!r} is not a size", "Give a number of bytes, such as 2GB, 500MB or 1GiB.")
    return nbytes


_By = Literal["component", "layer", "tensor"]
_ROWS: tuple[_By, ...] = get_args(_By)


def by_option(panel: str | None = None) -> Any:
    """Return the option --by."""
    form = "--by component | layer | tensor"
    return option(
        form,
        "The rows of the table: one per component, per layer or per tensor.",
        panel,
        default="component",
        complete=one_of(_ROWS),
    )


def rows_by(text: str) -> _By:
    """Return the kind of rows that --by names: component, layer or tensor. Plurals are accepted.

    Raises:
        UsageError: the text is none of these.
    """
    for known in _ROWS:
        if text in (known, f"{known}s"):
            return known
    plurals = ", ".join(f"{known}s" for known in _ROWS)
    raise UsageError(f"--by must be component, layer or tensor, not {text!r:.40}", f"Plurals work too: {plurals}.")


_COUNTS = {"": 1, "k": 2**10, "m": 2**20}  # powers of two, as in names of contexts: "128k" means 131,072 tokens


def tokens(option: str, text: str) -> int:
    """Return the number of tokens that a text such as "8192", "8_192", "8k" (8,192), "1M" (1,048,576) or "1e3" means.

    Raises:
        UsageError: the text is not a number of tokens.
    """
    form = r"\s*(\d(?:_?\d){0,14})(\.\d{1,9})?(?:e\+?(\d{1,2}))?\s*([km]?)\s*"
    match = re.fullmatch(form, text, re.ASCII | re.IGNORECASE)
    number = 0
    if match:
        whole, part, power, unit = match.groups(default="")
        digits = part[1:]
        number, rest = divmod(int(whole + digits) * 10 ** int(power or 0) * _COUNTS[unit.lower()], 10 ** len(digits))
        number = 0 if rest else number
    if not 1 <= number < 10**16:
        raise UsageError(
            f"{option} {text!r:.40} is not a number of tokens",
            f"For example: {option} 8192, {option} 8k or {option} 1M",
        )
    return number
