"""What test files share: the package `helpers` (`from helpers.families import VARIANTS`), the `hub` and `browser`
fixtures, and one thread for all."""

import gc
import itertools
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from helpers.browser import chromium
from helpers.hubserver import Hub

# A shell has what it starts in the background ignore Ctrl-C, and so would the commands that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


_NUMBERS = itertools.count()


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") != "no" and not config.option.collectonly:
        return  # the process that deals tests out to others runs none, and needs neither torch nor transformers
    gc.disable()  # until everything is imported and collected, of which nothing is garbage
    from helpers import covering
    from hypothesis import HealthCheck, settings

    covering.quick = "not exhaustive" in config.option.markexpr
    # What `make test` finds is to be of the change and not of the day: it tries the same examples each time, as
    # `make test-all` and `make test-slow` do not; and no test fails because the machine is busy.
    # One folder may serve all examples of a test.
    patient = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    settings.register_profile("gptkit", derandomize=covering.quick, deadline=None, suppress_health_check=patient)
    settings.load_profile("gptkit")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from helpers import covering

    covering.mark_the_rest(items)


def pytest_collection_finish() -> None:
    """Tests, torch and transformers stay until the end: the garbage collector need not look at them time and again, and
    what tests leave is so small that it may wait."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Models this small wait for other threads longer than they compute."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium; see `browser.opened`."""
    yield from chromium()


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Return an empty folder for one test.

    pytest's own fixture reads the names of all earlier folders to find a free number, and tests here make thousands.
    """
    name = re.sub(r"\W", "_", request.node.name)[:30]
    folder = tmp_path_factory.getbasetemp() / f"{name}-{next(_NUMBERS)}"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where the system has one, for what need not wait for the disk."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else tmp_path) as folder:
        yield Path(folder)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A running hub that this process takes for the real one, with an empty cache; the working directory is empty."""
    constants = pytest.importorskip("huggingface_hub.constants")
    hub = Hub()
    hub.start()
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # The library waits before it asks a hub again that is in trouble; this one is in no hurry to recover.
    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda _: None))
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    yield hub
    hub.stop()
