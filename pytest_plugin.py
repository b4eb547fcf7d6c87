"""The pytest plugin: fixtures for tests of your own implementations of models.

pytest finds it if gptkit is installed. It imports torch only when a test uses one of the fixtures.

- `assert_same_function(model, reference)` fails unless your module computes the same logits as transformers. The
  failure names the first component that differs, and the mistake that explains the difference.
- `tiny_checkpoint(family, seed=0)` returns a folder with a small random checkpoint of a family.
"""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def assert_same_function() -> Callable[..., None]:
    """Return `gptkit.testing.assert_same_function`."""
    from .testing import assert_same_function

    return assert_same_function


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that writes a small random checkpoint of a family, and returns its folder.

    Its arguments are the family's name and `seed`. Calls with equal arguments in one session return the same folder.
    """
    folders: dict[tuple[str, int], Path] = {}

    def make(family: str, seed: int = 0) -> Path:
        from .testing import tiny_checkpoint

        if (family, seed) not in folders:
            folders[family, seed] = tiny_checkpoint(family, tmp_path_factory.mktemp(family), seed)
        return folders[family, seed]

    return make
