"""Of what is exhaustive, `make test` runs a cover, and `make test-all` everything.

A test with `@covered()` runs for all of its cases in `make test-all`. `make test` chooses cases until every value of
each argument was among them (of a model: each fact of its tree and each way that a tensor of it lies in a checkpoint,
whatever family it is of), the ones that bring most first; the rest bear the mark `exhaustive`. `covered("variant",
"dtype")` looks at these arguments alone, `covered(…, by=…)` at whatever a function of them gives. Nothing is drawn by
lot: the cover of a list of cases is always the same.

Some tests are too slow for all variants even in `make test-all`: it runs the first variant of each family and those
that show something new (`slow_unless_new`), or a cover of them (`rest_slow`), and `make test-slow` the others.

A test whose cases go over all families is covered without being told to: a family more makes `make test` no longer
unless there is something in its trees that was in none before.
"""

import heapq
import itertools
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cache
from typing import Any

import msgspec
import pytest

from gptkit.architectures import architecture_of
from gptkit.architectures.presets import presets
from gptkit.components import ModelSpec, without_rounding
from helpers.families import CONFIGS, REPRESENTATIVES, VARIANTS, Variant, spec_of
from helpers.full_spec import full
from helpers.trees import TREES

exhaustive = pytest.mark.exhaustive
"""For what `make test` leaves out altogether; something that is no less must hold the same there."""

SHARE = 10
"""`make test` has one in so many of hypothesis' examples."""

quick = False
"""Whether exhaustive tests are left out of this run; conftest says so."""


def covered(*names: str, by: Callable[..., Iterable[Hashable]] | None = None) -> pytest.MarkDecorator:
    """The mark of a test of which a cover is enough. by: what a case shows, of the arguments `names`."""
    return pytest.mark.covered(*names, by=by)


def few(count: int) -> pytest.MarkDecorator:
    """The mark of a test whose cases hold one law on different models, of which some are enough: where others beside it
    do the same for other laws, all models are among them, since each test begins at another.
    """
    return pytest.mark.covered(few=count)


def others_slow(cases: Iterable[Any]) -> list[Any]:
    """Return the cases as parameters, with the marks of `slow_unless_new` for cases that are, or name, a variant."""
    return [pytest.param(case, id=str(case), marks=slow_unless_new(model_of(case))) for case in cases]


def slow_unless_new(variant: str | None) -> list[pytest.MarkDecorator]:
    """Return the mark `slow` for a variant that shows nothing new: it is not its family's first, and every fact of its
    tree and every layout of its tensors also occurs in a variant without the mark.
    """
    return [] if variant in {None, *TREES, *_not_slow()} else [pytest.mark.slow]


@cache
def _not_slow() -> frozenset[str]:
    """Return the first variant of every family, and a few others that together show what these do not."""
    first = {variant.name for variant in REPRESENTATIVES.values()}
    shown = frozenset().union(*map(contents, first))
    others = [variant.name for variant in VARIANTS if variant.name not in first]
    return frozenset(first | {others[place] for place in chosen([contents(name) - shown for name in others])})


def rest_slow(cases: Iterable[Any], by: Callable[[str], AbstractSet[Hashable]] | None = None) -> list[Any]:
    """Return families or variants as parameters, for a test of which a cover is enough also in `make test-all`.

    All cases are slow that are not needed to show everything that some case shows. `by` returns what a variant shows,
    by its name; by default, these are `contents`. Cases that are neither a family nor a variant are not slow.
    """
    listed = [*cases]
    shown = [(by or contents)(name) if (name := model_of(case)) else frozenset({str(case)}) for case in listed]
    kept = chosen(shown)
    return [
        pytest.param(case, id=str(case), marks=[] if place in kept else [pytest.mark.slow])
        for place, case in enumerate(listed)
    ]


def examples(count: int) -> int:
    """How many examples of hypothesis, or turns of a loop, are enough here where `make test-all` has `count`."""
    return max(count // SHARE, min(count, 2)) if quick else count


def chosen(shown: Sequence[AbstractSet[Hashable]], start: int = 0) -> set[int]:
    """The places of cases that together show whatever any of them shows; of two that bring as much the first one, seen
    from where the search starts.
    """
    missing = set(itertools.chain(*shown))
    start %= len(shown)
    kept: set[int] = set()
    # What a case brings becomes less and never more: the first one that still brings as much as it did brings the most.
    places = (*range(start, len(shown)), *range(start))
    best = [(-len(shown[place]), turn, place) for turn, place in enumerate(places)]
    heapq.heapify(best)
    while missing or not kept:
        brought, turn, place = best[0]
        brings = -len(missing & shown[place])
        if brings == brought:
            heapq.heappop(best)
            kept.add(place)
            missing -= shown[place]
        else:
            heapq.heapreplace(best, (brings, turn, place))
    return kept


def spread(count: int, wanted: int, start: int) -> set[int]:
    """So many of the places 0 … count - 1, as far from one another as they can be."""
    wanted = min(wanted, count)
    return {(start + number * count // wanted) % count for number in range(wanted)}


def shows(arguments: Mapping[str, Any], names: Sequence[str], by: Callable[..., Iterable[Hashable]] | None) -> set[Any]:
    """What a case shows."""
    if by is not None:
        return set(by(*(arguments[name] for name in names)))
    return set().union(*(named(name, arguments[name]) for name in names or arguments))


def named(name: str, value: Any) -> AbstractSet[Hashable]:
    """What is in the value of an argument, as the argument's."""
    model = model_of(value)
    return {(name, each) for each in kinds(value)} if model is None else _named(name, model)


@cache
def _named(name: str, model: str) -> frozenset[Hashable]:
    return frozenset((name, each) for each in contents(model))


def kinds(value: Any) -> set[Hashable]:
    """What is in a model (`model_of`); of anything else its value, or what it looks like."""
    model = model_of(value)
    if model is not None:
        return set(contents(model))
    if isinstance(value, ModelSpec):
        return facts(value)
    return {value if isinstance(value, str | int | float | bool | None) else repr(value)}


def model_of(value: Any) -> str | None:
    """The name in CONFIGS or TREES of the model that an argument is or names, of a family its representative's."""
    if isinstance(value, Variant):
        return value.name if value.name in CONFIGS else None
    if isinstance(value, str) and value in REPRESENTATIVES:
        return REPRESENTATIVES[value].name
    return value if isinstance(value, str) and (value in CONFIGS or value in TREES) else None


@cache
def contents(name: str) -> frozenset[Hashable]:
    """The facts of a model's tree, and how its tensors lie in a checkpoint."""
    if name in TREES:
        return frozenset(facts(TREES[name]))
    spec = spec_of(CONFIGS[name])
    leaves = architecture_of(CONFIGS[name]).bind(spec)
    return frozenset({*facts(spec), *(("layout", leaf.layout) for leaf in leaves)})


def goes_over_families(cases: Sequence[Mapping[str, Any]]) -> bool:
    """Whether there is an argument that in some case or other is a model of each family there is."""
    family_of = {variant.name: variant.family for variant in VARIANTS}
    models = ({model_of(case[name]) for case in cases} for name in cases[0])
    return any({family_of.get(model) for model in each if model} >= {*REPRESENTATIVES} for each in models)


def facts(spec: ModelSpec) -> set[Hashable]:
    """What is true of some part of a tree, whatever its sizes: (field, value) of each that is no number."""
    found: set[Hashable] = set()

    def walk(name: str, node: Any) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                walk(key, value)
        elif isinstance(node, list):
            for value in node:
                walk(name, value)
        else:
            numeric = isinstance(node, int | float) and not isinstance(node, bool)
            found.add((name, "number" if numeric else node))

    walk("", full(msgspec.structs.replace(spec, blocks=tuple(dict.fromkeys(spec.blocks)))))
    return found


def functions(spec: ModelSpec) -> set[Hashable]:
    """The facts of a tree that make it another function: not those by which it rounds."""
    return facts(without_rounding(spec))


def layouts(model: str) -> frozenset[Hashable]:
    """How the tensors of a model lie in a checkpoint."""
    return contents(model) - facts(spec_of(CONFIGS[model]))


def preset_facts(name: str) -> set[Hashable]:
    """The facts of a preset's tree, and its family."""
    config = presets()[name].config
    architecture = architecture_of(config)
    return facts(architecture.spec(config)) | {architecture.name}


def mark_the_rest(items: Sequence[pytest.Item]) -> None:
    """Mark the cases of covered tests that no cover needs as exhaustive, and of what looks at pages in a browser all
    but the first: `make test-browser` and `make test-all` run them.
    """
    for item in [item for item in items if "browser" in getattr(item, "fixturenames", ())][1:]:
        item.add_marker(exhaustive)
    groups: dict[tuple[str, str], list[pytest.Function]] = {}
    for item in items:
        if item.get_closest_marker("slow") is not None:
            continue  # which neither `make test` nor `make test-all` runs
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            groups.setdefault((item.nodeid.split("::")[0], item.originalname), []).append(item)
        else:
            assert item.get_closest_marker("covered") is None, f"{item.nodeid} is covered, and has no cases"
    for cases in groups.values():
        mark = cases[0].get_closest_marker("covered")
        if mark is None and goes_over_families([case.callspec.params for case in cases]):
            mark = covered().mark
        if mark is None:
            continue
        start = zlib.crc32(cases[0].originalname.encode())
        if "few" in mark.kwargs:
            kept = spread(len(cases), mark.kwargs["few"], start)
        else:
            kept = chosen([shows(case.callspec.params, mark.args, mark.kwargs["by"]) for case in cases], start)
        for place, case in enumerate(cases):
            if place not in kept:
                case.add_marker(exhaustive)
