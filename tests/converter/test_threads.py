"""Threads by what a model is worth and what is free; what a person has set stays."""

import os
from pathlib import Path

import numpy as np  # noqa: F401 (whose BLAS is looked for)
import pytest
import torch
from helpers.families import CONFIGS, spec_of

import gptkit
from gptkit.converter import threads as module
from gptkit.converter.outline import outline
from gptkit.converter.threads import as_before, free_cores, quota, suit, worth
from gptkit.surgery import base

SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # by which a person decides


@pytest.mark.parametrize(
    ("available", "limit", "cores", "load", "free"),
    [
        (8, None, 8, 0.0, 8),
        (8, None, 8, 0.9, 7),
        (8, None, 8, 8.0, 1),
        (8, None, 8, 40.0, 1),
        (2, None, 64, 10.0, 2),  # pinned to two of many
        (64, 3.5, 64, 0.0, 3),  # a container
        (64, 0.5, 64, 0.0, 1),
        (64, 16.0, 64, 60.5, 3),
    ],
)
def test_free_cores(available: int, limit: float | None, cores: int, load: float, free: int) -> None:
    assert free_cores(available, limit, cores, load) == free


def test_what_a_model_is_worth() -> None:
    assert [worth(size, 64) for size in (0, 652_320, 15_000_000, 40_000_000, 135_000_000, 8 * 10**9)] == [
        *(1, 1, 1, 2, 8, 64)
    ]
    assert worth(8 * 10**9, 1) == 1 and worth(8 * 10**9, 3) == 3


@pytest.mark.parametrize(
    ("files", "group", "expected"),
    [
        ({"cpu.max": "max 100000\n"}, "0::/\n", None),
        ({"cpu.max": "200000 100000\n"}, "0::/\n", 2.0),
        ({"a/cpu.max": "max 100000\n", "cpu.max": "150000 100000\n"}, "0::/a/b\n", 1.5),
        ({"a/cpu.max": "50000 100000\n", "cpu.max": "150000 100000\n"}, "0::/a\n", 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, "1:cpu:/\n0::/\n", None),
        ({"cpu/x/cpu.cfs_quota_us": "300000\n", "cpu/x/cpu.cfs_period_us": "100000\n"}, "1:cpu:/x\n", 3.0),
        ({"cpu.max": "nonsense"}, "0::/\n", None),
        ({}, "0::/\n", None),
    ],
)
def test_the_time_of_a_control_group(files: dict[str, str], group: str, expected: float | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text)
    (tmp_path / "group").write_text(group)
    assert quota(tmp_path / "root", tmp_path / "group") == expected
    assert quota(tmp_path / "root", tmp_path / "absent") is None


def blas() -> int | None:
    found = module._blas()
    return None if found is None else int(found[0]())


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of eight cores that nobody else uses, and eight threads by default."""
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "available_cores", lambda: 8)
    monkeypatch.setattr(module, "quota", lambda: None)
    monkeypatch.setattr(module, "_load", lambda: 0.2)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(module, "_by_itself", lambda: frozenset({8}))


@pytest.mark.usefixtures("eight")
def test_threads_are_set_for_a_model_and_are_as_before_in_the_end() -> None:
    with as_before():
        torch.set_num_threads(8)
        before = (torch.get_num_threads(), blas())
        for spec, expected in ((spec_of(CONFIGS["gpt2"]), 1), (outline("gpt2-medium").spec, 7)):
            with as_before():
                suit(spec)
                assert (torch.get_num_threads(), blas() or expected) == (expected, expected)
            assert (torch.get_num_threads(), blas()) == before


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize("name", ["torch", *SETTINGS])
def test_what_a_person_has_set_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with as_before():
        torch.set_num_threads(5 if name == "torch" else 8)
        if name != "torch":
            monkeypatch.setenv(name, "8")
        before = (torch.get_num_threads(), blas())
        suit(spec_of(CONFIGS["gpt2"]))
        assert (torch.get_num_threads(), blas()) == before


@pytest.mark.exhaustive
@pytest.mark.usefixtures("eight")
def test_a_swap_and_a_verification_compute_in_few_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model in one, though there are eight; and the caller has the eight that it had."""
    seen: list[int] = []
    monkeypatch.setattr(base.StoredModel, "release", lambda _: seen.append(torch.get_num_threads()))
    with as_before():
        torch.set_num_threads(8)
        gptkit.swap("sample:llama", tmp_path / "out", attention="mha")
        assert set(seen) == {1}
        monkeypatch.setattr(
            "gptkit.parity.verify.compare", lambda *_: pytest.fail(f"in {torch.get_num_threads()} threads")
        )
        with pytest.raises(pytest.fail.Exception, match="in 1 threads"):
            gptkit.verify(tmp_path / "out", mutations=False)
        assert torch.get_num_threads() == 8
