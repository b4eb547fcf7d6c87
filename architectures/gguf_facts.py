"""Typed access to the header of a GGUF file, with bounds on every number. It does not import numpy."""

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, shown
from .config import MAX_LAYERS
from .layout import Shape

Value = str | int | float | bool | list[bool] | list[int]
_DRAFTS = "nextn_predict_layers"


@dataclass(frozen=True)
class GgufFacts:
    """The contents of a GGUF file's header."""

    name: str
    """The value of general.architecture, which is also the prefix of keys. The arguments `key` of the methods lack this
    prefix."""
    metadata: Mapping[str, Any]
    """All keys with their prefix -> their values. Arrays are lists."""
    shapes: Mapping[str, Shape]
    """The shapes of all tensors by name, in numpy's order of dimensions. GGUF has the opposite order."""
    floats: Callable[[str], tuple[float, ...]]
    """Returns the values of a tensor that contains no weights, but numbers that describe the model
    (rope_freqs.weight)."""

    def raw(self, key: str) -> Any:
        """Return the value of a key, or None if the file lacks it.

        A list of equal values is returned as a single value.
        """
        value = self.metadata.get(f"{self.name}.{key}")
        if isinstance(value, list) and value and all(type(v) is type(value[0]) and v == value[0] for v in value):
            return value[0]
        return value

    def fail(self, key: str, value: Any, wanted: str) -> ConfigError:
        """Return the error for an invalid value of a key. The caller raises it."""
        return ConfigError(f"GGUF metadata: {self.name}.{key} is {shown(value)}, expected {wanted}")

    def require(self, key: str, value: Any, wanted: Any) -> None:
        """Raise ConfigError unless a key has the only value that gptkit supports.

        Args:
            key: the metadata key.
            value: its value in the file.
            wanted: the supported value.
        """
        if value != wanted:
            raise self.fail(key, value, shown(wanted))

    def integer(self, key: str, default: int | None = None, *, most: int = 2**31 - 1) -> int:
        """Return the value of a key that must be an integer from 1 to `most`.

        The key is required if there is no default.
        """
        value = self.raw(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.fail(key, value, f"an integer from 1 to {most:,}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return the value of a key that must be a finite number above zero.

        It is the shortest decimal number that rounds to the stored fp32 value.
        """
        value = self.raw(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.fail(key, value, "a finite number above zero")
        return shortest(float(value))

    def value(self, key: str, *default: Any) -> Any:
        """Return the value of a key that must be a number of at least 0, or a boolean.

        The key is required if there is no default.
        """
        value = self.raw(key)
        if value is None and default:
            return default[0]
        if isinstance(value, bool):
            return value
        if isinstance(value, float):
            return self.number(key)
        if isinstance(value, int) and 0 <= value < 2**31:
            return value
        raise self.fail(key, value, "a number of at least 0, or a boolean")

    def string(self, key: str, default: str) -> str:
        value = self.raw(key)
        if value is not None and not isinstance(value, str):
            raise self.fail(key, value, "a string")
        return default if value is None else value

    @property
    def layers(self) -> int:
        """The number of layers, without extra layers that draft tokens.

        A number above that of the file's tensors is refused.
        """
        count, drafts = self.integer("block_count", most=min(MAX_LAYERS, max(1, len(self.shapes)))), self.drafts
        if drafts >= count:
            raise self.fail(_DRAFTS, drafts, f"fewer than block_count ({count})")
        return count - drafts

    @property
    def drafts(self) -> int:
        """The number of extra layers after the last one that draft tokens (multi-token prediction)."""
        return 0 if self.raw(_DRAFTS) in (None, 0) else self.integer(_DRAFTS)

    @property
    def vocab_size(self) -> int:
        """The number of rows of the token embedding. If the metadata state another number, ConfigError is raised."""
        shape = self.shapes.get("token_embd.weight", ())
        if len(shape) != 2:
            raise ConfigError("GGUF: token_embd.weight is missing or does not have two dimensions")
        self.require("vocab_size", self.integer("vocab_size", shape[0]), shape[0])
        return shape[0]

    @property
    def tied(self) -> bool:
        """Whether the head is tied to the token embedding."""
        return "output.weight" not in self.shapes

    def head_dim(self, *, only: bool = False) -> int:
        """Return the width of a head. If the file does not state it, it is hidden size / heads.

        With `only`, a file that states another width raises ConfigError.
        """
        hidden, heads = self.integer("embedding_length"), self.integer("attention.head_count")
        key = "attention.key_length"
        stated = self.integer(key) if self.raw(key) is not None else None
        if (stated is None or only) and hidden % heads:
            raise self.fail("attention.head_count", heads, f"a divisor of embedding_length ({hidden})")
        head_dim = hidden // heads if stated is None else stated
        if only:
            self.require(key, head_dim, hidden // heads)
        key = "attention.value_length"
        self.require(key, self.integer(key, head_dim), head_dim)
        return head_dim


def fp32(value: float) -> float:
    """Return a number rounded to fp32. Raises ConfigError if it is too large."""
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError as error:
        raise ConfigError(f"{value!r} is too large for float32, the type of numbers in GGUF") from error
    return rounded


def shortest(value: float) -> float:
    """Return the shortest decimal that fp32 rounds to `value`: 1e-05, not 9.99999975e-06."""
    try:
        if fp32(value) != value:
            return value
        return next((n for digits in range(1, 10) if fp32(n := float(f"{value:.{digits}g}")) == value), value)
    except ConfigError:
        return value
