"""The exceptions of gptkit. Each has an exit code for the command line: 1 if the command failed, 2 if the call is
wrong, 3 if compared models differ, 4 if the input cannot be used, 5 if the network is needed.

Every message is one or two lines: what is wrong, and then what to do about it.
"""

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar


def shown(value: Any, most: int = 60) -> str:
    """Return the first `most` characters of a value's repr, for a message.

    Messages show values from files only through this function. With YAML aliases or pickles, a small file can contain
    the same list a huge number of times, so the value is visited only as far as it is shown. Values whose repr fails,
    because they are nested too deeply or are integers of thousands of digits, are safe too.
    """
    text = ""
    for piece in _pieces(value, most):
        text += piece
        if len(text) >= most:
            break
    return text[:most]


def _pieces(value: Any, most: int) -> Iterator[str]:
    """Yield the parts of a value's repr, in order, for `shown`, which stops after `most` characters.

    A container yields its opening bracket before its contents, so stopping there also limits the depth of recursion.
    """
    kind = type(value)
    if kind in (list, tuple):
        yield "[" if kind is list else "("
        for index, item in enumerate(value):
            yield ", " if index else ""
            yield from _pieces(item, most)
        yield "]" if kind is list else ",)" if len(value) == 1 else ")"
    elif kind is dict:
        yield "{"
        for index, (key, item) in enumerate(value.items()):
            yield ", " if index else ""
            yield from _pieces(key, most)
            yield ": "
            yield from _pieces(item, most)
        yield "}"
    elif kind in (str, bytes, bytearray):
        yield repr(value[: most + 1])  # one more, so that a cut text has no closing quote
    elif kind in (set, frozenset) and value:
        yield f"{kind.__name__} of {len(value):,} values"
    elif kind is int and value.bit_length() > 4096:
        yield f"an integer of {value.bit_length():,} bits"
    else:
        try:
            yield repr(value)
        except Exception:  # whatever an object's own __repr__ raises
            yield f"a {kind.__name__} too large to show"


def meant(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that a mistyped word most likely stands for; None if no word is similar enough."""
    from difflib import get_close_matches  # here, because most commands never need it

    words = list(known)
    begun = sorted((candidate for candidate in words if len(word) > 2 and candidate.startswith(word)), key=len)
    if begun and all(candidate.startswith(begun[0]) for candidate in begun):
        return begun[0]
    # 0.75, because difflib's default of 0.6 suggests "untie" for "prune".
    return next(iter(get_close_matches(word[:60], words, 1, 0.75)), None)


class GptkitError(Exception):
    """The base class of all errors that gptkit raises. `message` says what is wrong, and `hint` what to do next."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n{self.hint}"


class UsageError(GptkitError):
    """The call itself is wrong: options contradict each other, or an output already exists."""

    exit_code = 2


class Different(GptkitError):
    """Two models were compared, and they do not compute the same function."""

    exit_code = 3


class InvalidInput(GptkitError):
    """A file or a reference cannot be used as it is."""

    exit_code = 4


class ConfigError(InvalidInput):
    """A field of config.json has the wrong type or range, or gptkit refuses its value and says why."""


class UnknownFamily(InvalidInput):
    """gptkit does not support the model family in config.json, or there is no config.json."""


class CheckpointError(InvalidInput):
    """Tensors are missing, extra, truncated or damaged, or have the wrong shape."""


class UntrustedInput(InvalidInput):
    """The input could run code or reach outside its folder: a pickle, or a path with `..`."""


class Offline(GptkitError):
    """The network is needed, but it is not available, or the call forbids it."""

    exit_code = 5


class CannotExpress(GptkitError):
    """The target format or family cannot represent some components of the model; the message lists them."""


class MissingComponent(GptkitError):
    """The request needs a component that the model does not have, or does not support one that it has."""


class SwapRefused(GptkitError):
    """The preconditions of a swap are not met by this checkpoint; the message says which ones, and what is possible."""


class NoNumber(GptkitError):
    """The loss or a gradient in training is NaN or infinite. The parameters are still finite."""


class Elsewhere(GptkitError):
    """Another process of the same distributed run failed and reported the error. `code` is its exit code, which this
    process uses too.
    """

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code
