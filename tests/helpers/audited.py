"""Whatever `open_checkpoint` is asked for while tests run is audited as well: what it refuses has to be an error there
too, and what it opens must not be called broken.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gptkit.converter import checkpoint
from gptkit.converter.resolve import identify
from gptkit.converter.tree import OtherClass, Quantised
from gptkit.errors import CannotExpress, GptkitError, InvalidInput, UnknownFamily
from gptkit.parity.audit import audit
from gptkit.parity.audits.reader import READ

NOT_BROKEN = (UnknownFamily, Quantised, OtherClass)
"""Refusals of what other programs may well load: a note says so."""


def audited(reference: Any, error: GptkitError | None, **options: Any) -> None:
    """Fail where an audit and the reader do not agree. `error`: why the reader refuses the checkpoint, if it does."""
    try:
        findings = audit(reference, **options).findings
    except GptkitError:
        assert error is not None, f"audit raises, and load opens {reference}"
        return
    errors = [each for each in findings if each.severity == "error"]
    said = f"{reference}\nload: {error or 'opens it'}\naudit: {[each.message for each in findings]}"
    if error is None:
        assert not [each for each in errors if each.rule in READ], said
    else:
        assert errors or (findings and isinstance(error, NOT_BROKEN)), said


def opening_audited(opening: Callable[..., Any]) -> Callable[..., Any]:
    """Return `open_checkpoint` with an audit of every local checkpoint that it opens or refuses."""
    auditing = False

    def opened(reference: Any, **options: Any) -> Any:
        nonlocal auditing
        if not auditing and local(reference):
            auditing = True
            try:
                as_loaded(reference, options.get("allow_pickle", False))
            finally:
                auditing = False
        return opening(reference, **options)

    def as_loaded(reference: Any, allow_pickle: bool) -> None:
        error = None
        try:
            opening(reference, allow_pickle=allow_pickle)
        except (InvalidInput, CannotExpress) as failure:
            error = failure
        except GptkitError:
            return
        audited(reference, error, allow_pickle=allow_pickle)

    return opened


def local(reference: Any) -> bool:
    """Return whether a reference is of files here."""
    try:
        return identify(reference).path is not None
    except InvalidInput:
        return False


@contextmanager
def watched() -> Iterator[None]:
    """Have every module that opens checkpoints audit them too."""
    own, ours = checkpoint.open_checkpoint, opening_audited(checkpoint.open_checkpoint)
    with pytest.MonkeyPatch.context() as patch:
        for module in list(sys.modules.values()):
            if vars(module).get("open_checkpoint") is own:
                patch.setattr(module, "open_checkpoint", ours)
        yield
