"""Tensors that are stored under another name than the one that is looked for."""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import numpy as np

_Names = Mapping[str, tuple[int, ...]]  # tensors' names, each with its shape


def matched(ours: _Names, theirs: _Names, same: Callable[[str, str], bool]) -> dict[str, tuple[tuple[str, ...], str]]:
    """Tensors that are there under another name: ours -> theirs, and how several of theirs lie in one.

    By the end of the name and the shape, where only one fits and `same` allows it; else experts stacked, and
    projections joined, of one module, by their numbers of elements.
    """
    left = {name: shape for name, shape in theirs.items() if name not in ours}
    free = {name: shape for name, shape in ours.items() if name not in theirs}
    found: dict[str, tuple[tuple[str, ...], str]] = {}
    ends: dict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)
    for name, shape in left.items():
        for end in _ends(name):
            ends[end, shape].append(name)
    taken: set[str] = set()
    for name, shape in free.items():
        # The longest end that one name of theirs has.
        candidates = next((some for end in _ends(name) if (some := ends[end, shape])), [])
        candidates = [each for each in candidates if each not in taken]
        if len(candidates) == 1 and same(name, candidates[0]):
            found[name] = ((candidates[0],), "")
            taken.add(candidates[0])
    for name, shape in free.items():
        if name not in found:
            parts = _parts_of(name, shape, {each: left[each] for each in left if each not in taken})
            if parts:
                found[name] = (parts, "stacked" if len(shape) > len(left[parts[0]]) else "joined")
                taken.update(parts)
    return found


def _ends(name: str) -> Iterator[str]:
    """The name and its ends at dots, the longest first; a layer's number stays."""
    parts = name.split(".")
    for start in range(max(len(parts) - 1, 1)):
        if any(part.isdecimal() for part in parts[start:]) == any(part.isdecimal() for part in parts):
            yield ".".join(parts[start:])


def _parts_of(name: str, shape: tuple[int, ...], left: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """Those of the source's tensors in the same module that make up one of ours, by their numbers of elements."""
    wanted, module = int(np.prod(shape)), name.rpartition(".")[0]
    module = module.rpartition(".")[0] if name.endswith((".weight", ".bias")) else module
    inside = {each: int(np.prod(size)) for each, size in left.items() if each.startswith(f"{module}.")}
    groups: dict[str, list[str]] = defaultdict(list)
    for each in inside:
        groups[re.sub(r"\.\d+\.", ".*.", each[len(module) :])].append(each)
    words = set(re.findall(r"[a-z]+", name.rsplit(".", 1)[-1] if not name.endswith(".weight") else name.split(".")[-2]))
    kinds = [kind for kind in groups if words & set(re.findall(r"[a-z]+", kind)) - {"proj", "weight", "bias"}] or [
        *groups
    ]
    parts = tuple(each for kind in kinds for each in groups[kind])
    return parts if len(parts) > 1 and sum(inside[each] for each in parts) == wanted else ()


def counted(names: Collection[str]) -> str:
    """Return the number of tensors in words."""
    return f"{len(names):,} tensor{'' if len(names) == 1 else 's'}"


def folded(lines: Iterable[str]) -> list[str]:
    """Lines that differ by numbers alone, told once with stars."""
    return list(dict.fromkeys(re.sub(r"\.\d+(?=\.)", ".*", line) for line in lines))
