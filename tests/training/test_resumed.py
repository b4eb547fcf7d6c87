"""A stopped run whose files were edited: none goes on, and nothing is published."""

import json
import math
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.covering import few
from helpers.training import made, trained
from safetensors.torch import load_file, save_file

from gptkit.errors import InvalidInput
from gptkit.training import loop

ODD: tuple[Any, ...] = (
    "x",
    "",
    None,
    [],
    {},
    True,
    -5,
    0,
    1,
    3,
    10**18,
    1 << 70,
    0.5,
    float("inf"),
    [1],
    [{}],
    {"step": 4},
)


def edits() -> Iterator[tuple[str, Callable[[Path], None]]]:
    """What is done to the folder of a run that stopped at step 5, by what is edited."""

    def state_of(change: Callable[[Any], Any]) -> Callable[[Path], None]:
        def edit(folder: Path) -> None:
            path = folder / "step-00000005/state.json"
            path.write_text(json.dumps(change(json.loads(path.read_text()))))

        return edit

    def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
        def edit(folder: Path) -> None:
            path = folder / "step-00000005/state.safetensors"
            found = load_file(path)
            change(found)
            save_file(found, path)

        return edit

    def run_of(change: dict[str, Any]) -> Callable[[Path], None]:
        return lambda folder: put(folder / "run.json", {**json.loads((folder / "run.json").read_text()), **change})

    def put(path: Path, value: Any) -> None:
        path.write_text(json.dumps(value))

    for value in ({}, [], "x", None, 5, [[]], {"step": 5}):
        yield f"state {value}", state_of(lambda _, value=value: value)
    for name in ("step", "seconds", "threads", "curve"):
        yield f"no {name}", state_of(lambda state, name=name: {k: v for k, v in state.items() if k != name})
        for value in ODD:
            if (name, value) not in (("threads", 1), ("threads", 3)):  # a run may use any number of threads
                yield f"{name} {value}", state_of(lambda state, name=name, value=value: {**state, name: value})
    for name in ("step", "tokens", "loss", "held_out"):
        for value in ODD:
            yield (
                f"curve {name} {value}",
                state_of(lambda s, name=name, value=value: {**s, "curve": [{**s["curve"][0], name: value}]}),
            )
            yield (
                f"curve, more: {name} {value}",
                state_of(
                    lambda s, name=name, value=value: {**s, "curve": [*s["curve"], {**s["curve"][0], name: value}]}
                ),
            )
    yield "an unknown field", state_of(lambda state: {**state, "other": 1})
    for data in (b"\xff\xfe", b"", b"{}\n" * 6, b"[" * 10**5, b"\0" * 100, b"[]\n" * 6, b'{"step": 1}\n' * 6):
        yield f"metrics {data[:4]!r}", lambda folder, data=data: (folder / "metrics.jsonl").write_bytes(data) and None
        yield f"state {data[:4]!r}", lambda f, data=data: (f / "step-00000005/state.json").write_bytes(data) and None
        yield f"run {data[:4]!r}", lambda folder, data=data: (folder / "run.json").write_bytes(data) and None
    for name in ("metrics.jsonl", "run.json", "step-00000005/state.json"):

        def linked(folder: Path, name: str = name) -> None:
            (folder / name).rename(folder.parent / "elsewhere")
            (folder / name).symlink_to(folder.parent / "elsewhere")

        yield f"a link for {name}", linked
    for what in ([{"behind": 1, "rate": 5.0}], [{"behind": 10**9}], {}, "x", [[]], [{"behind": -9}], [{"note": "x"}]):
        if what != {}:
            yield f"changes {what}", run_of({"changes": what})
    yield "another step's folder", lambda folder: (folder / "step-00000005").rename(folder / "step-00000008") and None
    yield (
        "a folder far ahead",
        lambda folder: shutil.copytree(folder / "step-00000005", folder / f"step-{10**18}") and None,
    )
    yield "no number", tensors(lambda t: t["parameter embedding.weight"].fill_(math.nan))
    yield "a spread tensor", tensors(lambda t: t.update({"parameter embedding.weight": torch.ones(1)}))
    yield "a missing tensor", tensors(lambda t: t.pop("parameter embedding.weight"))
    yield "a negative moment", tensors(lambda t: t["exp_avg_sq embedding.weight"].fill_(-1.0))
    yield "fewer steps", tensors(lambda t: [each.fill_(2) for name, each in t.items() if name[:5] == "step "])
    yield (
        "an integer tensor",
        tensors(lambda t: t.update({"parameter embedding.weight": t["parameter embedding.weight"].int()})),
    )


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stopped at step 5."""
    folder = tmp_path_factory.mktemp("interrupted")
    made(folder)

    def interrupt(step: loop.TrainingStep) -> None:
        if step.step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        trained(folder, tell=interrupt)
    return folder


@pytest.fixture
def stopped(interrupted: Path) -> Iterator[Path]:
    """The run as it stopped, in the same place, for a test to edit."""
    shutil.copytree(interrupted / "out.training", interrupted / "kept")
    yield interrupted
    for name in ("out", "out.training"):
        shutil.rmtree(interrupted / name, ignore_errors=True)
    (interrupted / "elsewhere").unlink(missing_ok=True)
    (interrupted / "kept").rename(interrupted / "out.training")


@few(12)
@pytest.mark.parametrize("edit", [pytest.param(edit, id=name) for name, edit in edits()])
def test_a_run_that_was_edited_does_not_go_on(edit: Callable[[Path], None], stopped: Path) -> None:
    edit(stopped / "out.training")
    with pytest.raises(InvalidInput, match=r"out\.training") as caught:
        trained(stopped, resume=True)
    assert len(str(caught.value)) < 1000 and str(caught.value).count("\n") <= 1
    assert not (stopped / "out").exists()


def test_a_run_that_was_not_edited_goes_on(stopped: Path) -> None:
    assert trained(stopped, resume=True).steps == 12
