"""What a GGUF file's header says about its model, with every number typed and bounded. No numpy."""

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
    """A header's contents.

    name: general.architecture, the prefix of the keys that its methods take without it.
    metadata: every key; an array is a list. shapes: every tensor's, as numpy has them (GGUF writes them reversed).
    floats: the values of a tensor that stands for numbers of the tree, such as rope_freqs.weight.
    """

    name: str
    metadata: Mapping[str, Any]
    shapes: Mapping[str, Shape]
    floats: Callable[[str], tuple[float, ...]]

    def raw(self, key: str) -> Any:
        """The value, None where there is none; a list of equal numbers, one a layer, counts as one of them."""
        value = self.metadata.get(f"{self.name}.{key}")
        if isinstance(value, list) and value and all(type(v) is type(value[0]) and v == value[0] for v in value):
            return value[0]
        return value

    def fail(self, key: str, value: Any, wanted: str) -> ConfigError:
        """The error for a value that is not what it should be."""
        return ConfigError(f"GGUF metadata: {self.name}.{key} is {shown(value)}, expected {wanted}")

    def require(self, key: str, value: Any, wanted: Any) -> None:
        """Raise ConfigError where a value is not the only one that is understood."""
        if value != wanted:
            raise self.fail(key, value, shown(wanted))

    def integer(self, key: str, default: int | None = None, *, most: int = 2**31 - 1) -> int:
        """A positive integer; required when there is no default."""
        value = self.raw(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.fail(key, value, f"an integer from 1 to {most:,}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above zero, as the shortest decimal that is this fp32."""
        value = self.raw(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.fail(key, value, "a finite number above zero")
        return shortest(float(value))

    def value(self, key: str, *default: Any) -> Any:
        """A number from 0, or a boolean; required when there is no default."""
        value = self.raw(key)
        if value is None and default:
            return default[0]
        if isinstance(value, bool):
            return value
        if isinstance(value, float):
            return self.number(key)
        if isinstance(value, int) and 0 <= value < 2**31:
            return value
        raise self.fail(key, value, "a number from 0, or a boolean")

    def string(self, key: str, default: str) -> str:
        value = self.raw(key)
        if value is not None and not isinstance(value, str):
            raise self.fail(key, value, "a string")
        return default if value is None else value

    @property
    def layers(self) -> int:
        """block_count, less those that draft tokens: no more layers than there are tensors."""
        count, drafts = self.integer("block_count", most=min(MAX_LAYERS, max(1, len(self.shapes)))), self.drafts
        if drafts >= count:
            raise self.fail(_DRAFTS, drafts, f"fewer than block_count ({count})")
        return count - drafts

    @property
    def drafts(self) -> int:
        """How many layers behind the last draft tokens."""
        return 0 if self.raw(_DRAFTS) in (None, 0) else self.integer(_DRAFTS)

    @property
    def vocab_size(self) -> int:
        """The rows of the token table; what the metadata say must agree."""
        shape = self.shapes.get("token_embd.weight", ())
        if len(shape) != 2:
            raise ConfigError("GGUF: token_embd.weight is missing or does not have two dimensions")
        self.require("vocab_size", self.integer("vocab_size", shape[0]), shape[0])
        return shape[0]

    @property
    def tied(self) -> bool:
        """Whether the head is the token table."""
        return "output.weight" not in self.shapes

    def head_dim(self, *, only: bool = False) -> int:
        """The width of a head, which is hidden / heads where it is not said; `only`: it can be nothing else."""
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
    """A number as fp32 holds it. Raises ConfigError where it holds none near."""
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError as error:
        raise ConfigError(f"{value!r} is too large for float32, the type of numbers in GGUF") from error
    return rounded


def shortest(value: float) -> float:
    """The number with the fewest decimal digits among those that fp32 rounds to `value`: 1e-05, not 9.99999975e-06."""
    try:
        if fp32(value) != value:
            return value
        return next((n for digits in range(1, 10) if fp32(n := float(f"{value:.{digits}g}")) == value), value)
    except ConfigError:
        return value
