"""What `make test` leaves out: only what a cover does without, and always the same."""

import itertools

import pytest
from helpers.covering import (
    chosen,
    covered,
    exhaustive,
    facts,
    few,
    goes_over_families,
    kinds,
    mark_the_rest,
    shows,
    spread,
)
from helpers.families import REPRESENTATIVES, VARIANTS, spec_of

from gptkit.architectures import architecture_of


def test_a_cover_shows_whatever_a_case_shows() -> None:
    cases = [{"a": a, "b": b, "c": c} for a, b, c in itertools.product("xyz", range(5), (True, False))]
    shown = [shows(case, (), None) for case in cases]
    kept = chosen(shown)
    assert set().union(*(shown[place] for place in kept)) == set().union(*shown)
    assert len(kept) == 5
    assert kept == chosen(shown)
    assert chosen([shows(case, ("a",), None) for case in cases]) == {0, 10, 20}
    assert chosen([shows(case, ("a", "c"), lambda a, c: {(a, c)}) for case in cases]) == {0, 1, 10, 11, 20, 21}


def test_places_lie_apart_and_begin_where_they_are_told() -> None:
    assert spread(9, 3, 0) == {0, 3, 6}
    assert spread(9, 3, 7) == {7, 1, 4}
    assert spread(2, 3, 5) == {0, 1}
    assert all(len(spread(count, 3, start)) == min(count, 3) for count in range(1, 20) for start in range(20))


def test_every_fact_of_every_familys_trees_is_in_a_cover_of_variants() -> None:
    kept = chosen([kinds(variant) for variant in VARIANTS])
    assert {architecture_of(VARIANTS[place].config).name for place in kept} < {variant.family for variant in VARIANTS}
    told = set().union(*(facts(spec_of(variant.config)) for variant in VARIANTS))
    assert told == set().union(*(facts(spec_of(VARIANTS[place].config)) for place in kept))
    assert ("activation", "silu") in told and ("eps", "number") in told
    assert len(kept) < len(VARIANTS) / 2


def test_a_cover_begins_where_it_is_told() -> None:
    assert chosen([{1, 2}, {1, 2}, {1, 2}], 4) == {1}
    assert chosen([set(), set()], 1) == {1}


def test_a_test_that_goes_over_all_families_is_known() -> None:
    every = [{"variant": variant, "layers": 2} for variant in VARIANTS]
    assert goes_over_families(every) and goes_over_families([{"name": family} for family in REPRESENTATIVES])
    assert not goes_over_families([case for case in every if case["variant"].family != "bloom"])
    assert not goes_over_families([{"a": 1}, {"a": "gpt2"}])


@covered()
@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b", range(3))
def test_marked_by_cover(request: pytest.FixtureRequest, a: int, b: int) -> None:
    """The cases of this test, looked at by the next one."""


@few(2)
@pytest.mark.parametrize("a", range(7))
def test_marked_as_few(request: pytest.FixtureRequest, a: int) -> None:
    """Likewise."""


@pytest.mark.parametrize("family", REPRESENTATIVES)
def test_marked_by_itself(request: pytest.FixtureRequest, family: str) -> None:
    """Likewise."""


@exhaustive
def test_marked_by_hand() -> None:
    """Likewise."""


def test_the_rest_is_marked_as_exhaustive(request: pytest.FixtureRequest) -> None:
    module = request.node.parent
    items = [item for item in module.collect() if item.name.startswith("test_marked")]
    mark_the_rest(items)
    left = [item.name.split("[")[0] for item in items if item.get_closest_marker("exhaustive") is None]
    assert (left.count("test_marked_by_cover"), left.count("test_marked_as_few")) == (4, 2)
    assert 1 < left.count("test_marked_by_itself") < len(REPRESENTATIVES)
    assert "test_marked_by_hand" not in left
