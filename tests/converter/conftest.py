"""Every checkpoint that the tests of this folder open, or have refused, is audited too."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
from helpers.audited import watched

_COUNTING = ("test_identify.py", "test_interrupted.py")
"""Files whose tests count the calls that open or read a file, or let one of them fail."""


@pytest.fixture(autouse=True)
def every_checkpoint_is_audited(request: pytest.FixtureRequest) -> Iterator[None]:
    with nullcontext() if request.path.name in _COUNTING else watched():
        yield
