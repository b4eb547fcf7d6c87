"""Report faults because of which `gptkit.load` refuses a checkpoint."""

from collections.abc import Iterator

from ...converter.tree import OtherClass, Quantised
from ...errors import CannotExpress, InvalidInput, UnknownFamily
from .subject import Finding, Subject

READ = frozenset(
    {
        *("broken-file", "broken-index", "broken-config", "no-index", "dangling-index", "unlisted-tensor"),
        *("config", "no-config", "config-layers", "config-vocabulary", "config-head", "tied-head", "altered-tensor"),
        *("duplicate-tensor", "two-names", "other-name", "missing-tensor", "extra-tensor", "shape", "dtype", "refused"),
    }
)
"""The rules whose errors are faults because of which `gptkit.load` refuses a checkpoint."""


def check_reader(subject: Subject) -> Iterator[Finding]:
    """Open the checkpoint as `load` does. If that fails for a reason that no other rule has reported, report it."""
    if any(finding.rule in READ and finding.severity == "error" for finding in subject.findings):
        return
    error = subject.checkpoint
    if isinstance(error, UnknownFamily | Quantised):
        note = f"checked only by tensor names, because gptkit cannot load the model: {error.message}"
        yield Finding("not-loaded", "note", note)
    elif isinstance(error, CannotExpress | InvalidInput) and not isinstance(error, OtherClass):
        yield Finding("refused", "error", f"gptkit cannot load the model: {error.message}", (), error.hint or "")
