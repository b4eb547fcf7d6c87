"""The installed release of transformers, which decides how some families round."""

from importlib.metadata import version

import pytest

from gptkit.architectures import ARCHITECTURES, releases


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the installed release anew."""
    monkeypatch.setattr(releases, "installed", releases.installed.__wrapped__)


def test_it_is_read_without_an_import() -> None:
    major, minor, *_ = version("transformers").split(".")
    assert releases.installed() == (int(major), int(minor))
    assert releases.untested() == []


@pytest.mark.parametrize(("release", "later"), [((5, 23), False), ((5, 24), True), ((6, 0), True), (None, True)])
def test_a_release_from_which_something_holds(
    release: tuple[int, int] | None, later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(releases, "installed", lambda: release)
    assert releases.since("5.24") is later


@pytest.mark.parametrize("release", [(4, 57), (5, 2), (5, 99), (6, 0)])
def test_a_release_that_was_not_compared_is_noted(release: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "installed", lambda: release)
    (note,) = releases.untested()
    assert f"{release[0]}.{release[1]} is installed" in note


@pytest.mark.parametrize(("release", "faulty"), [((5, 22), True), ((5, 23), False), (None, False)])
def test_a_fault_of_an_earlier_release_is_named(
    release: tuple[int, int] | None, faulty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(releases, "installed", lambda: release)
    found = releases.faults(ARCHITECTURES["mamba2"].mended)
    assert len(found) == faulty
    assert all("release 5.23 corrects this" in note for note in found)
    assert not releases.faults(ARCHITECTURES["llama"].mended)


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "find_spec", lambda name: None)
    assert releases.installed() is None
    assert releases.untested() == []
