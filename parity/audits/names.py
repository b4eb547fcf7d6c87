"""Match tensors that are stored under another name than the expected one."""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import numpy as np

_Names = Mapping[str, tuple[int, ...]]  # the shapes of tensors by name


def matched(ours: _Names, theirs: _Names, same: Callable[[str, str], bool]) -> dict[str, tuple[tuple[str, ...], str]]:
    """Match tensors that only `ours` has with tensors that only `theirs` has.

    Both arguments map tensor names to shapes. Two tensors match if they have the same shape, their names end alike, no
    other tensor fits, and `same` accepts the two names. A tensor without such a match may match several tensors of one
    module that together have as many elements: the experts that it stacks, or the projections that it joins.

    Returns:
        For each matched tensor in `ours`: the matching names in `theirs`, and how the tensor contains them: "stacked",
        "joined", or "" if it matches one tensor.
    """
    unmatched = {name: shape for name, shape in theirs.items() if name not in ours}
    missing = {name: shape for name, shape in ours.items() if name not in theirs}
    matches: dict[str, tuple[tuple[str, ...], str]] = {}
    ends: dict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)
    for name, shape in unmatched.items():
        for end in _ends(name):
            ends[end, shape].append(name)
    used: set[str] = set()
    for name, shape in missing.items():
        # The longest end that a name in `theirs` has.
        candidates = next((names for end in _ends(name) if (names := ends[end, shape])), [])
        candidates = [candidate for candidate in candidates if candidate not in used]
        if len(candidates) == 1 and same(name, candidates[0]):
            matches[name] = ((candidates[0],), "")
            used.add(candidates[0])
    for name, shape in missing.items():
        if name not in matches:
            parts = _parts_of(name, shape, {tensor: unmatched[tensor] for tensor in unmatched if tensor not in used})
            if parts:
                matches[name] = (parts, "stacked" if len(shape) > len(unmatched[parts[0]]) else "joined")
                used.update(parts)
    return matches


def _ends(name: str) -> Iterator[str]:
    """Yield a tensor's name and its endings, the longest first: "a.0.b.c", "0.b.c".

    An ending starts after a dot, has at least two parts, and contains the layer number if the name has one.
    """
    parts = name.split(".")
    for start in range(max(len(parts) - 1, 1)):
        if any(part.isdecimal() for part in parts[start:]) == any(part.isdecimal() for part in parts):
            yield ".".join(parts[start:])


def _parts_of(name: str, shape: tuple[int, ...], unmatched: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """Return the tensors that a joined or stacked tensor may consist of, or () if there are none.

    Args:
        name: the joined or stacked tensor.
        shape: its shape.
        unmatched: the candidates by name, with their shapes. Those of the same module must together have as many
            elements.
    """
    elements, module = int(np.prod(shape)), name.rpartition(".")[0]
    module = module.rpartition(".")[0] if name.endswith((".weight", ".bias")) else module
    sizes = {tensor: int(np.prod(size)) for tensor, size in unmatched.items() if tensor.startswith(f"{module}.")}
    groups: dict[str, list[str]] = defaultdict(list)
    for tensor in sizes:
        groups[re.sub(r"\.\d+\.", ".*.", tensor[len(module) :])].append(tensor)
    words = set(re.findall(r"[a-z]+", name.rsplit(".", 1)[-1] if not name.endswith(".weight") else name.split(".")[-2]))
    kinds = [kind for kind in groups if words & set(re.findall(r"[a-z]+", kind)) - {"proj", "weight", "bias"}] or [
        *groups
    ]
    parts = tuple(tensor for kind in kinds for tensor in groups[kind])
    return parts if len(parts) > 1 and sum(sizes[tensor] for tensor in parts) == elements else ()


def counted(names: Collection[str]) -> str:
    """Return the number of tensors in words, such as "3 tensors"."""
    return f"{len(names):,} tensor{'' if len(names) == 1 else 's'}"


def folded(lines: Iterable[str]) -> list[str]:
    """Replace layer numbers in the lines by a star ("layers.*.norm"), and return each resulting line once."""
    return list(dict.fromkeys(re.sub(r"\.\d+(?=\.)", ".*", line) for line in lines))
