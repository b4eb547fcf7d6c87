"""Write a draft as the text of a definition file in Python.

Strings from a checkpoint are written with `repr`, or into comments without characters that could end the comment.
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
from ..architectures.decoder import DecoderFamily
from ..architectures.fields import Field
from ..architectures.layout import Layout
from ..architectures.rope import RotaryKind
from .record import Draft

_PLACED = "gptkit.architectures"
_HOMES = {
    **dict.fromkeys(("Leaf", "Stacked", "leaves_of"), f"{_PLACED}.base"),
    "DecoderFamily": f"{_PLACED}.decoder",
    "Field": f"{_PLACED}.fields",
    "Layout": f"{_PLACED}.layout",
    "RotaryKind": f"{_PLACED}.rope",
    "register": _PLACED,
}
"""The modules from which a definition imports names."""


def source_of(draft: Draft, head: Sequence[str]) -> str:
    """Return the text of the definition file for a draft. `head` are the paragraphs of its docstring."""
    write = _Writer()
    for name in ("DecoderFamily", "leaves_of", "register"):
        write.named(name)
    body = [*_decoder_lines(draft, write), "", *_leaf_lines(draft, write), "", *_family_lines(draft, write)]
    questions = [question for place, question in draft.todo.items() if not _has_entry(place, draft)]
    todo = [line for question in questions for line in _comment(f"TODO: {question}")]
    docstring = "\n\n".join(textwrap.fill(_plain(paragraph), 110) for paragraph in head)
    body += ["", "register(FAMILY)", ""]
    return "\n".join([f'"""{docstring}\n"""', "", *write.imports(), "", *todo, *([""] if todo else []), *body])


def _decoder_lines(draft: Draft, write: "_Writer") -> list[str]:
    """Return the source lines that define FIELDS and DECODER. `write` converts values into expressions."""
    fields = _entries(
        draft, "fields", {write.value(name): write.value(field) for name, field in draft.fields.items()}, draft.fields
    )
    usual = {
        field.name: field.default
        for field in dataclasses.fields(DecoderFamily)
        if field.default is not dataclasses.MISSING
    }
    given = {
        name: value
        for name, value in draft.arguments.items()
        if name not in usual or (value is not usual[name] and value != usual[name])
    }
    given.pop("fixed", None)
    arguments = _entries(
        draft, "arguments", {f"{name}=": write.value(value) for name, value in given.items()}, given, sign=""
    )
    roles = draft.arguments["fixed"]
    fixed = _entries(draft, "fixed", {write.value(role): write.value(value) for role, value in roles.items()}, roles)
    lines = ["FIELDS = {", *fields, "}", "", "DECODER = DecoderFamily(", "    FIELDS,", *arguments]
    return [*lines, *_nested("fixed", fixed), ")"]


def _leaf_lines(draft: Draft, write: "_Writer") -> list[str]:
    """Return the source lines that define MODULES and LEAVES. `write` converts values into expressions."""
    modules, others = draft.modules()
    named = _entries(
        draft,
        "leaves",
        {write.value(name): write.value(shared) for name, (shared, _) in modules.items()},
        [template for _, template in modules.values()],
    )
    leaves = _entries(draft, "leaves", {write.value(leaf): "" for leaf in others.values()}, others, sign="")
    return ["MODULES = {", *named, "}", "LEAVES = (", "    *leaves_of(MODULES),", *leaves, ")"]


def _family_lines(draft: Draft, write: "_Writer") -> list[str]:
    """Return the source lines that define FAMILY. `write` converts values into expressions."""
    more = dict(draft.more)
    positional = [write.value(draft.model_type), write.value(more.pop("hf_class")), "LEAVES"]
    eager, irrelevant, refusals = more.pop("eager", False), more.pop("irrelevant"), more.pop("refused")
    lines = ["FAMILY = DECODER.architecture(", *(f"    {value}," for value in positional)]
    lines += [f"    {name}={write.value(value)}," for name, value in more.items() if value not in ({}, ())]
    lines += ["    # the class has no other attention", '    reference=lambda _: ("eager",),'] if eager else []
    reasons = [f"    {write.value(name)}: {write.value(reason)}," for name, reason in irrelevant.items()]
    texts = {write.value(name): write.value(refusal) for name, refusal in refusals.items()}
    return [
        *lines,
        *_nested("irrelevant", reasons),
        *_nested("refused", _entries(draft, "refused", texts, refusals)),
        ")",
    ]


def _nested(name: str, entries: Sequence[str]) -> list[str]:
    """Return the source lines of an argument that is a dictionary with these entries. Without entries, return []."""
    return [f"    {name}={{", *(f"    {line}" for line in entries), "    },"] if entries else []


def _has_entry(place: str, draft: Draft) -> bool:
    """Return whether the definition file has an entry that a TODO is about, such as a config field.

    The TODO then becomes a comment before this entry. `place` is its key in the draft, such as "fields.NAME".
    """
    part, _, name = place.partition(".")
    return name in {"fields": draft.fields, "refused": draft.more["refused"], "leaves": draft.leaves}.get(part, ())


def _entries(draft: Draft, part: str, texts: Mapping[str, str], names: Any, sign: str = ": ") -> list[str]:
    """Return the source lines of the entries of a dictionary, or of the arguments of a call.

    Two comments come before an entry: the reason for it (`draft.why`), and its TODO (`draft.todo`), if they exist. Both
    are looked up under the key "PART.NAME", such as "fields.n_head".

    Args:
        draft: The draft with the reasons and TODOs.
        part: PART, the first part of this key.
        texts: The source text of each value, by the source text of its key or argument name.
        names: NAME, the second part of this key, for each entry in the order of `texts`.
        sign: The text between key and value.
    """
    lines = []
    for (name, value), place in zip(texts.items(), names, strict=True):
        todo = draft.todo.get(f"{part}.{place}")
        lines += [
            f"    {line}"
            for line in (*_comment(draft.why.get(f"{part}.{place}", "")), *_comment(f"TODO: {todo}" if todo else ""))
        ]
        lines.append(f"    {name}{sign}{value},")
    return lines


def _comment(text: str) -> list[str]:
    """Return a text as lines of a comment, without unprintable characters."""
    clean = "".join(sign if sign.isprintable() else "?" for sign in text)[:400]
    return [f"# {line}" for line in textwrap.wrap(clean, 100, break_on_hyphens=False)]


def _plain(text: str) -> str:
    """Replace characters that could end a docstring by question marks."""
    return re.sub(r"[^\w .,;:/()=%'~+*&<>\-]", "?", text, flags=re.ASCII)


class _Writer:
    """Writes values as Python expressions, and collects the imports that these need."""

    def __init__(self) -> None:
        self._names: dict[str, set[str]] = {}
        self._places = _places()

    def named(self, name: str, home: str = "") -> str:
        """Return a name, and import it in the file from the module `home`. By default, `_HOMES` gives the module."""
        self._names.setdefault(home or _HOMES[name], set()).add(name)
        return name

    def imports(self) -> list[str]:
        return [f"from {home} import {', '.join(sorted(names))}" for home, names in sorted(self._names.items())]

    def value(self, value: Any) -> str:
        """Return the expression for a value of a draft.

        The value is plain data, a declaration such as `Field`, or an object of a supported family, such as a function.
        Such an object is imported from the family's module.
        """
        if isinstance(value, float) and not math.isfinite(value):
            return f"float({str(value)!r})"
        if value is None or isinstance(value, (bool, int, float, str)):
            return ascii(value)
        if type(value) in (list, tuple):
            inner = ", ".join(map(self.value, value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{self.value(key)}: {self.value(item)}" for key, item in value.items()) + "}"
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
            arguments = {field.name: (getattr(value, field.name), field.default) for field in dataclasses.fields(value)}
            return self._call(value, arguments)
        if isinstance(value, RotaryKind):
            arguments = {name: (getattr(value, name), usual) for name, usual in RotaryKind._field_defaults.items()}
            return self._call(value, arguments)
        if isinstance(value, msgspec.Struct):
            inner = ", ".join(f"{name}={self.value(getattr(value, name))}" for name in value.__struct_fields__)
            return f"{self.named(type(value).__name__, 'gptkit.components')}({inner})"
        owner, _, method = getattr(value, "__qualname__", "").partition(".")
        home = getattr(value, "__module__", "")
        holder: Any = getattr(sys.modules.get(home), owner, None)
        if callable(value) and (getattr(holder, method, None) if method else holder) is value:
            if home.startswith(f"{families.__name__}."):
                return f"{self.named(home.rpartition('.')[2], families.__name__)}.{owner}"
            return self.named(owner, home) + (f".{method}" if method else "")
        module, _, path = self._places[id(value)].partition(":")
        return f"{self.named(module, families.__name__)}.{path}"

    def _call(self, value: Any, arguments: Mapping[str, tuple[Any, Any]]) -> str:
        parts = [f"{name}={self.value(argument)}" for name, (argument, usual) in arguments.items() if argument != usual]
        return f"{self.named(type(value).__name__)}({', '.join(parts)})"


@cache
def _places() -> dict[int, str]:
    return dict(_references())


def _references() -> Iterator[tuple[int, str]]:
    """Yield the `id` of each function or other object in the supported families' definitions that is not plain data.

    Each comes with the place, "module:path", from which a definition file can import it.
    """
    for name, module in list(sys.modules.items()):
        if not name.startswith(f"{families.__name__}."):
            continue
        for variable, table in list(vars(module).items()):
            place = f"{name.rpartition('.')[2]}:{variable}"
            if type(table) is DecoderFamily:
                yield from _references_in(table, place)
            elif type(table) is Architecture:
                for number, leaf in enumerate(table.leaves):
                    if leaf.when is not None:
                        yield id(leaf.when), f"{place}.leaves[{number}].when"


def _references_in(table: DecoderFamily, place: str) -> Iterator[tuple[int, str]]:
    """Yield the `id` of each function or other object in one family's definition that is not plain data.

    Each comes with its place, "module:path". `table` is the definition, and `place` the place of the definition itself.
    """
    plain = (str, int, float, bool, tuple, list, type(None), type)
    for part in ("layers", "recurrent", "mixtures", "written", "norms"):
        yield id(getattr(table, part)), f"{place}.{part}"
    for role, value in table.fixed.items():
        if not isinstance(value, plain):
            yield id(value), f"{place}.fixed[{role!r}]"
    for name, field in table.fields.items():
        for part in ("read", "write"):
            if not getattr(getattr(field, part), "__qualname__", "<").isidentifier():
                yield id(getattr(field, part)), f"{place}.fields[{name!r}].{part}"
