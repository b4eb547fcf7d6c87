"""A draft as the text of a definition file. Whatever comes from a checkpoint stands in it as `repr` has it, or in a
comment without anything that could end one.
"""

import dataclasses
import math
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec

from ..architectures import Architecture, Leaf, families
from ..architectures.base import Stacked
from ..architectures.decoder import Decoder
from ..architectures.fields import Field
from ..architectures.layout import Layout
from ..architectures.rope import RotaryKind
from .record import Draft

_PLACED = "gptkit.architectures"
_HOMES = {
    **dict.fromkeys(("Leaf", "Stacked", "leaves_of"), f"{_PLACED}.base"),
    "Decoder": f"{_PLACED}.decoder",
    "Field": f"{_PLACED}.fields",
    "Layout": f"{_PLACED}.layout",
    "RotaryKind": f"{_PLACED}.rope",
    "register": _PLACED,
}
"""Where a definition imports from what it names."""


def source_of(draft: Draft, head: Sequence[str]) -> str:
    """The file. `head`: what was proved of it, a paragraph each."""
    write = _Writer()
    fields = _entries(
        draft, "fields", {write.value(name): write.value(each) for name, each in draft.fields.items()}, draft.fields
    )
    usual = {each.name: each.default for each in dataclasses.fields(Decoder) if each.default is not dataclasses.MISSING}
    given = {
        name: each
        for name, each in draft.arguments.items()
        if name not in usual or (each is not usual[name] and each != usual[name])
    }
    given.pop("fixed", None)
    arguments = _entries(
        draft, "arguments", {f"{name}=": write.value(each) for name, each in given.items()}, given, sign=""
    )
    fixed = _entries(
        draft,
        "fixed",
        {write.value(role): write.value(each) for role, each in draft.arguments["fixed"].items()},
        draft.arguments["fixed"],
    )
    modules, others = draft.modules()
    named = _entries(
        draft,
        "leaves",
        {write.value(a): write.value(b) for a, (b, _) in modules.items()},
        [each for _, each in modules.values()],
    )
    leaves = _entries(draft, "leaves", {f"{write.value(each)}": "" for each in others.values()}, others, sign="")
    more = dict(draft.more)
    own = [write.value(draft.model_type), write.value(more.pop("hf_class")), "LEAVES"]
    eager = more.pop("eager", False)
    refused = _entries(
        draft,
        "refused",
        {write.value(name): write.value(each) for name, each in more.pop("refused").items()},
        draft.more["refused"],
    )
    irrelevant = more.pop("irrelevant")
    rest = [f"    {name}={write.value(each)}," for name, each in more.items() if each not in ({}, ())]
    rest += ["    # the class has no other attention", '    reference=lambda _: ("eager",),'] if eager else []
    rest += (
        [
            "    irrelevant={",
            *(f"        {write.value(name)}: {write.value(each)}," for name, each in irrelevant.items()),
            "    },",
        ]
        if irrelevant
        else []
    )
    rest += ["    refused={", *(f"    {line}" for line in refused), "    },"] if refused else []
    body = ["FIELDS = {", *fields, "}", "", "DECODER = Decoder(", "    FIELDS,", *arguments]
    body += ["    fixed={", *(f"    {line}" for line in fixed), "    },"] if fixed else []
    body += [")", "", "MODULES = {", *named, "}", "LEAVES = (", "    *leaves_of(MODULES),", *leaves, ")", ""]
    body += ["FAMILY = DECODER.architecture(", *(f"    {each}," for each in own), *rest, ")", "", "register(FAMILY)"]
    for name in ("Decoder", "leaves_of", "register"):
        write.named(name)
    open_ones = [(place, each) for place, each in draft.todo.items() if not _stands(place, draft)]
    todo = [line for _, each in open_ones for line in _comment(f"TODO: {each}")]
    told = "\n\n".join(textwrap.fill(_plain(each), 110) for each in head)
    return "\n".join([f'"""{told}\n"""', "", *write.imports(), "", *todo, *([""] if todo else []), *body, ""])


def _stands(place: str, draft: Draft) -> bool:
    """Whether a doubt is told where its subject stands."""
    part, _, name = place.partition(".")
    return name in {"fields": draft.fields, "refused": draft.more["refused"], "leaves": draft.leaves}.get(part, ())


def _entries(draft: Draft, part: str, texts: Mapping[str, str], names: Any, sign: str = ": ") -> list[str]:
    """Lines of a dictionary or a call, each below its reason and its doubt."""
    lines = []
    for (name, value), own in zip(texts.items(), names, strict=True):
        doubt = draft.todo.get(f"{part}.{own}")
        lines += [
            f"    {line}"
            for line in (*_comment(draft.why.get(f"{part}.{own}", "")), *_comment(f"TODO: {doubt}" if doubt else ""))
        ]
        lines.append(f"    {name}{sign}{value},")
    return lines


def _comment(text: str) -> list[str]:
    """Lines of a comment, whatever the text is."""
    clean = "".join(sign if sign.isprintable() else "?" for sign in text)[:400]
    return [f"# {line}" for line in textwrap.wrap(clean, 100, break_on_hyphens=False)]


def _plain(text: str) -> str:
    """The text without what could end a docstring."""
    return re.sub(r"[^\w .,;:/()=%'~+*&<>\-]", "?", text, flags=re.ASCII)


class _Writer:
    """Values as expressions, and the imports that these need."""

    def __init__(self) -> None:
        self._names: dict[str, set[str]] = {}
        self._places = _places()

    def named(self, name: str, home: str = "") -> str:
        """A name that is imported."""
        self._names.setdefault(home or _HOMES[name], set()).add(name)
        return name

    def imports(self) -> list[str]:
        return [f"from {home} import {', '.join(sorted(names))}" for home, names in sorted(self._names.items())]

    def value(self, value: Any) -> str:
        """An expression of plain data, of our own declarations, or of what one of our families holds."""
        if isinstance(value, float) and not math.isfinite(value):
            return f"float({str(value)!r})"
        if value is None or isinstance(value, (bool, int, float, str)):
            return ascii(value)
        if type(value) in (list, tuple):
            inner = ", ".join(map(self.value, value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{self.value(key)}: {self.value(each)}" for key, each in value.items()) + "}"
        if isinstance(value, Field):
            parts = [self.value(value.role), *([self.value(value.default)] if value.default is not None else [])]
            usual = Field("")
            parts += [
                f"{name}={self.value(getattr(value, name))}"
                for name in ("read", "write")
                if getattr(value, name) is not getattr(usual, name)
            ]
            return f"{self.named('Field')}({', '.join(parts)})"
        if isinstance(value, type):
            return self.named(value.__name__, "gptkit.components")
        if type(value) in (Leaf, Layout, Stacked):
            told = {each.name: (getattr(value, each.name), each.default) for each in dataclasses.fields(value)}
            return self._made(value, told)
        if isinstance(value, RotaryKind):
            told = {name: (getattr(value, name), usual) for name, usual in RotaryKind._field_defaults.items()}
            return self._made(value, told)
        if isinstance(value, msgspec.Struct):
            inner = ", ".join(f"{name}={self.value(getattr(value, name))}" for name in value.__struct_fields__)
            return f"{self.named(type(value).__name__, 'gptkit.components')}({inner})"
        owner, _, method = getattr(value, "__qualname__", "").partition(".")
        home = getattr(value, "__module__", "")
        held: Any = getattr(sys.modules.get(home), owner, None)
        if callable(value) and (getattr(held, method, None) if method else held) is value:
            if home.startswith(f"{families.__name__}."):
                return f"{self.named(home.rpartition('.')[2], families.__name__)}.{owner}"
            return self.named(owner, home) + (f".{method}" if method else "")
        module, _, path = self._places[id(value)].partition(":")
        return f"{self.named(module, families.__name__)}.{path}"

    def _made(self, value: Any, told: Mapping[str, tuple[Any, Any]]) -> str:
        parts = [f"{name}={self.value(each)}" for name, (each, usual) in told.items() if each != usual]
        return f"{self.named(type(value).__name__)}({', '.join(parts)})"


@cache
def _places() -> dict[int, str]:
    return dict(_references())


def _references() -> Iterator[tuple[int, str]]:
    """What the families' tables hold that is no plain data, by its identity: "module:path"."""
    plain = (str, int, float, bool, tuple, list, type(None), type)
    for name, module in list(sys.modules.items()):
        if not name.startswith(f"{families.__name__}."):
            continue
        for variable, table in list(vars(module).items()):
            place = f"{name.rpartition('.')[2]}:{variable}"
            if type(table) is Decoder:
                for part in ("layers", "recurrent", "mixtures", "written", "norms"):
                    yield id(getattr(table, part)), f"{place}.{part}"
                for role, value in table.fixed.items():
                    if not isinstance(value, plain):
                        yield id(value), f"{place}.fixed[{role!r}]"
                for field, each in table.fields.items():
                    for part in ("read", "write"):
                        if not getattr(getattr(each, part), "__qualname__", "<").isidentifier():
                            yield id(getattr(each, part)), f"{place}.fields[{field!r}].{part}"
            elif type(table) is Architecture:
                for number, leaf in enumerate(table.leaves):
                    if leaf.when is not None:
                        yield id(leaf.when), f"{place}.leaves[{number}].when"
