"""Every checkpoint that the tests of this folder open, or have refused, is audited too."""

from collections.abc import Iterator

import pytest
from helpers.audited import watched


@pytest.fixture(autouse=True, scope="package")
def every_checkpoint_is_audited() -> Iterator[None]:
    with watched():
        yield
