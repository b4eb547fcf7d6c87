"""Generate parts of pages from the code: `<!-- generated: NAME ARGUMENT… -->` in a page becomes Markdown.

The functions do not need Sphinx, so that tests can call them.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from itertools import groupby, pairwise
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal, get_args, get_origin, get_type_hints

import msgspec
import outlines
import typer

import components
from gptkit import components as tree
from gptkit.analysis.parameters import count
from gptkit.architectures import ARCHITECTURES, Architecture, architecture_of
from gptkit.architectures.gguf_table import GGUF
from gptkit.architectures.presets import presets
from gptkit.cli import app as gptkit_app
from gptkit.report.families import families_json
from gptkit.surgery.options import guarantee_in_words, spelled
from gptkit.surgery.registry import all_options

if TYPE_CHECKING:
    from sphinx.application import Sphinx

MARK = re.compile(r"^<!-- generated: (?P<words>[^>]+?) -->$", re.M)
ROOT = Path(__file__).parents[2]


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Return a Markdown table. The columns in `right` have figures and are right-aligned."""
    rule = ["---:" if number in right else "---" for number in range(len(heads))]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in (heads, rule, *rows))


# --- the command line ------------------------------------------------------------------------------------------------


def commands() -> list[str]:
    """Return the names of all commands, in the order of --help."""
    group = typer.main.get_command(gptkit_app)
    return group.list_commands(None)  # type: ignore[attr-defined, no-any-return]


def help_of(*words: str) -> str:
    """Return the output of `gptkit … --help` at 80 columns."""
    env = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "PYTHONUTF8": "1", "TERMINAL_WIDTH": "80"}
    run = subprocess.run(
        [sys.executable, "-m", "gptkit", *words, "--help"], capture_output=True, text=True, env=env, check=True
    )
    lines = [line.rstrip() for line in run.stdout.strip("\n").split("\n")]
    return "\n".join(lines).strip("\n")


def commands_page(*only: str) -> str:
    """Return the help of every command, each with a heading."""
    parts = [f"## gptkit\n\n```text\n{help_of()}\n```"] if not only else []
    parts += [f"(command-{name})=\n## gptkit {name}\n\n```text\n{help_of(name)}\n```" for name in only or commands()]
    return "\n\n".join(parts)


# --- families, presets, extras ----------------------------------------------------------------------------------------


def families() -> str:
    """Return a table of the decoders: a family's model types, transformers' class, and its number of presets."""
    return _families(lambda family: not (family.base_class or family.two_stacks))


def encoders() -> str:
    """Return the same table for encoders."""
    return _families(lambda family: bool(family.base_class))


def encoder_decoders() -> str:
    """Return the same table for encoder-decoders."""
    return _families(lambda family: family.two_stacks)


def _families(wanted: Callable[[Architecture], bool]) -> str:
    rows = []
    for name, family in ARCHITECTURES.items():
        if not wanted(family):
            continue
        known = [preset for preset in presets().values() if architecture_of(preset.config) is family]
        text = (home(family).__doc__ or "").partition("\n\n")[0]
        about = " ".join(text.split()).partition(" Source: ")[0]
        kinds = ", ".join(f"`{kind}`" for kind in family.model_types)
        classes = " or ".join(f"`{each}`" for each in (family.hf_class, family.base_class) if each)
        rows.append([f"`{name}`", kinds, classes, str(len(known)), about])
    return table(["family", "`model_type`", "transformers' class", "presets", "description"], rows, right=[3])


def home(family: Architecture) -> ModuleType:
    """Return the module that defines a family. Other modules may import the family from it."""
    found = [
        module
        for name, module in sys.modules.items()
        if name.startswith("gptkit.architectures.families.") and family in vars(module).values()
    ]
    return min(found, key=lambda module: module.__name__.rpartition(".")[2] not in family.name.replace("-", "_"))


def gguf_families() -> str:
    """Return a table of llama.cpp's architectures, with the families that gptkit writes for them."""
    known: dict[str, list[str]] = {}
    for row in GGUF.values():
        known.setdefault(row.name, []).extend(f"`{family}`" for family in row.written)
    return table(
        ["llama.cpp's architecture", "families"], [[f"`{name}`", ", ".join(known[name])] for name in sorted(known)]
    )


def others() -> str:
    """Return a table of the causal language models of transformers that are not supported, by reason."""
    reasons: dict[str, list[str]] = {}
    for each in families_json(everything=True)["others"]:
        reasons.setdefault(each["why"], []).append(f"`{each['model_type']}`")
    rows = sorted(([why, str(len(kinds)), ", ".join(kinds)] for why, kinds in reasons.items()), key=lambda row: row[0])
    return table(["reason: the model has", "number", "`model_type`"], rows, right=[1])


def how_many() -> str:
    """Return a sentence with the number of supported causal language models of the installed transformers."""
    exact, counted, types = (families_json()["counts"][name] for name in ("exact", "counted", "types"))
    whose = f"causal language models of transformers {version('transformers')}"
    return (
        f"gptkit supports {exact} of the {types} {whose}, and counts the parameters of {counted}. It does not support "
        "these yet:"
    )


def paths() -> str:
    """Return a list of the families that are compared with only one of transformers' attention paths, and why."""
    found = [
        f"- `{name}`: {family.reference_quirk}" for name, family in ARCHITECTURES.items() if family.reference_quirk
    ]
    return "\n".join(found)


def sourced(source: str) -> str:
    """Return the source of a preset's config, with its address as a link."""
    link = re.match(r"https?://[^\s,;]+", source)
    if link is None:
        return source
    text = "config.json" if link[0].endswith("config.json") else re.sub(r"https?://", "", link[0])
    return f"[{text}]({link[0]}){source[link.end() :]}"


def presets_table(*only: str) -> str:
    """Return a table of presets: names, number of parameters, source of the config; with `only`, those of some
    families.
    """
    rows = []
    for preset in presets().values():
        architecture = architecture_of(preset.config)
        if not only or architecture.name in only:
            total = count(architecture.spec(preset.config)).total
            aliases = ", ".join(f"`{alias}`" for alias in preset.aliases)
            rows.append([f"`{preset.name}`", aliases, f"{total:,}", sourced(preset.source)])
    return table(["preset", "other names", "parameters", "source"], rows, right=[2])


def presets_page() -> str:
    """Return a table of presets for every family."""
    return "\n\n".join(f"## {name}\n\n{presets_table(name)}" for name in ARCHITECTURES)


def extras() -> str:
    """Return a table of the extras in pyproject.toml and the packages that they install."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return table(
        ["extra", "installs"], [[f"`{name}`", ", ".join(f"`{each}`" for each in data[name])] for name in sorted(data)]
    )


# --- the tree ---------------------------------------------------------------------------------------------------------

COMPONENTS: tuple[type[tree.Component], ...] = tuple(
    each for each in vars(tree).values() if isinstance(each, type) and issubclass(each, tree.Component)
)
"""All components, in the order of `components`."""


def kind(hint: object) -> str:
    """Return the type of a field in words."""
    if hint is tree.Activation:
        return "an [activation](../explanation/feed-forward.md#activations)"
    if get_origin(hint) is Literal:
        return " or ".join(f"`{each}`" for each in get_args(hint))
    if hasattr(hint, "__metadata__"):
        (meta,) = hint.__metadata__
        least = f" from {meta.ge}" if meta.ge is not None else " above 0" if meta.gt is not None else ""
        most = f" to {meta.le:,}" if meta.le is not None and meta.le < 1e6 else ""
        return f"{kind(hint.__origin__)}{least}{most}"  # type: ignore[attr-defined]
    if get_origin(hint) is tuple:
        return f"a list of {kind(get_args(hint)[0])}"
    parts = get_args(hint)
    if parts:
        return ", or ".join(kind(part) for part in parts)
    names = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "null"}
    if hint in names:
        return names[hint]
    name = getattr(hint, "__name__", str(hint))
    return f"[`{name}`](#component-{name.lower()})" if hint in COMPONENTS else f"`{name}`"


def default(field: msgspec.structs.FieldInfo) -> str:
    """Return the default of a field, or a dash if it has none."""
    if field.default is msgspec.NODEFAULT:
        return "–"
    return "`null`" if field.default is None else f"`{msgspec.json.encode(field.default).decode()}`"


def tree_json(reference: str) -> str:
    """Return a sample's tree as JSON, with only its first block."""
    from gptkit import open_checkpoint

    data = tree.to_json(open_checkpoint(reference, offline=True).spec)
    more = f"… {len(data['blocks']) - 1} more"
    return f"```json\n{json.dumps({**data, 'blocks': [data['blocks'][0], more]}, indent=2, ensure_ascii=False)}\n```"


def names_table(reference: str) -> str:
    """Return a table of a sample's parameters outside its layers and in the first layer."""
    from gptkit import open_checkpoint

    some = [each for each in open_checkpoint(reference, offline=True).spec.parameters() if each.layer in (None, 0)]
    shape = [" × ".join(f"{size:,}" for size in each.shape) for each in some]
    rows = [[f"`{each.name}`", size, each.component] for each, size in zip(some, shape, strict=True)]
    return table(["shared name", "shape", "component"], rows)


def meanings(component: type[tree.Component]) -> dict[str, str]:
    """Return the docstrings of a component's fields, which are the strings after them in the class."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(component))).body
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def components_page() -> str:
    """Return every component: its text, and its fields as a table."""
    parts = []
    for each in COMPONENTS:
        hints = get_type_hints(each, include_extras=True)
        meaning = meanings(each)
        rows = [
            [
                f"`{field.name}`",
                kind(hints[field.name]),
                default(field),
                ("*Rounding.* " if field.name in each.rounds else "") + meaning.get(field.name, ""),
            ]
            for field in msgspec.structs.fields(each)
        ]
        name = each.__name__
        text = f"(component-{name.lower()})=\n## {name}\n\n```{{eval-rst}}\n"
        text += f".. autoclass:: gptkit.components.{name}\n```"
        parts.append(text + ("\n\n" + table(["field", "type", "default", "meaning"], rows) if rows else ""))
    return "\n\n".join(parts)


# --- swaps ------------------------------------------------------------------------------------------------------------


def linked(source: str) -> str:
    """Return a source with its arXiv numbers as links."""
    return re.sub(r"\b(\d{4}\.\d{5})\b", r"[\1](https://arxiv.org/abs/\1)", source)


def swaps_table(*options: str) -> str:
    """Return a table of the swaps of some options, or of all.

    `attention:mla` stands for the swaps of --attention whose form starts with mla. Consecutive swaps with the same
    conditions and guarantee share a row. The sources are listed below the table.
    """
    from gptkit.surgery.registry import all_swaps

    wanted = [option.replace("-", "_").partition(":") for option in options]
    some = [
        swap
        for swap in all_swaps()
        if not wanted or any(swap.option == option and swap.form.startswith(form) for option, _, form in wanted)
    ]
    assert some, f"no swap is asked for by {options}"
    rows = []
    kinds = groupby(some, lambda swap: (swap.option, swap.takes, swap.guarantee, swap.needs))
    for (option, takes, guarantee, needs), alike in kinds:
        each = list(alike)
        asked = ", ".join(f"`{' '.join([spelled(option), *([swap.form] if swap.form else [])])}`" for swap in each)
        gives = "; ".join(dict.fromkeys(swap.gives for swap in each))
        rows.append([asked, f"{takes} → {gives}", guarantee_in_words(guarantee), needs])
    sources: dict[str, list[str]] = {}
    for swap in some:
        if swap.source not in (known := sources.setdefault(f"`{spelled(swap.option)}`", [])):
            known.append(swap.source)
    told = "\n".join(f"- {option}: {linked('; '.join(known))}" for option, known in sources.items())
    return f"{table(['option', 'from → to', 'guarantee at best', 'conditions'], rows)}\n\nSources:\n\n{told}"


def swap_options() -> str:
    """Return the swaps of all options, by group."""
    parts = []
    for group in dict.fromkeys(option.group for option in all_options()):
        names = [option.name for option in all_options() if option.group == group]
        parts.append(f"## {group}\n\n{swaps_table(*names)}")
    return "\n\n".join(parts)


def recipes() -> str:
    """Return the recipes that come with gptkit."""
    from gptkit.surgery.recipe import read_recipe, shipped

    found = [read_recipe(name) for name in shipped()]
    return "\n\n".join(
        f"## {each.name}\n\n{each.description}\n\n```text\n" + "\n".join(str(step) for step in each.every) + "\n```"
        for each in found
    )


def errors() -> str:
    """Return the tree of exceptions."""
    from gptkit import errors as module

    def lines(error: type[Exception], depth: int) -> list[str]:
        inner = (
            line
            for kind in error.__subclasses__()
            if kind.__module__ == module.__name__
            for line in lines(kind, depth + 1)
        )
        return ["  " * depth + error.__name__, *inner]

    return "```text\n" + "\n".join(lines(module.GptkitError, 0)) + "\n```"


# --- in a page --------------------------------------------------------------------------------------------------------

GENERATORS: Mapping[str, Callable[..., str]] = {
    "commands": commands_page,
    "components": components_page,
    "costs": lambda topic, *names: table(*components.costs(topic, names)),
    "errors": errors,
    "json": outlines.outline,
    "names": names_table,
    "paths": paths,
    "extras": extras,
    "families": families,
    "encoders": encoders,
    "encoder-decoders": encoder_decoders,
    "others": others,
    "gguf": gguf_families,
    "how_many": how_many,
    "presets": presets_page,
    "recipes": recipes,
    "swap-options": swap_options,
    "swaps": swaps_table,
    "tree": tree_json,
    "users": lambda *words: table(*components.users(" ".join(words))),
}


@cache
def generate(words: str) -> str:
    """Return the Markdown for "NAME ARGUMENT…"."""
    name, *arguments = words.split()
    return GENERATORS[name](*arguments)


def filled(text: str) -> str:
    """Return a page with every mark replaced."""
    return MARK.sub(lambda match: generate(match["words"]), text)


def setup(app: Sphinx) -> dict[str, bool]:
    """Fill in every page when it is read."""

    def fill(app: Sphinx, name: str, source: list[str]) -> None:
        source[0] = filled(source[0])

    app.connect("source-read", fill)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
