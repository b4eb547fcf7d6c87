"""Position encodings: learned and sinusoidal embeddings, RoPE and its scalings, and position biases."""

from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from msgspec import Meta

from ..errors import ConfigError
from .base import Component, Open, Positive, Size, Turns, Weight, divided
from .words import Words, plain_number

__all__ = [
    "ALiBi",
    "Biasing",
    "Buckets",
    "DynamicScaling",
    "LearnedPositions",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "Position",
    "ProportionalScaling",
    "RelativeBias",
    "RopeScaling",
    "Rotary",
    "SinusoidalPositions",
    "Temperature",
    "Turning",
    "YarnScaling",
]


class LearnedPositions(Component, frozen=True):
    """A learnt table of position embeddings, which are added to the token embeddings."""

    label = "positions"
    rows = "T"
    described = ("length", "size")
    by_length: ClassVar[dict[str, Any]] = {"length": 1}
    forgotten: ClassVar[dict[str, str]] = {
        "offset": "rows before the first position not skipped",
        "counts": "padding counted among positions",
        "padding": "tokens of padding given positions of their own",
    }

    length: Size
    """The longest sequence, in tokens."""
    size: Size
    """The width of the residual stream."""
    offset: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """A token's row is its position plus this number (2 in OPT). The table has `length` + `offset` rows."""
    counts: Literal["tokens", "real tokens"] = "tokens"
    """How positions are counted by default: all earlier tokens, including padding, or only "real tokens" (OPT)."""
    padding: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    """The id of tokens that are not counted, whatever the attention mask contains. Their row is the one before the
    first position (RoBERTa)."""

    def __post_init__(self) -> None:
        if self.padding is not None and (not self.offset or self.counts != "tokens"):
            raise ConfigError(
                'a position table with a padding token needs "offset" of at least 1 and "counts": "tokens", because '
                "padding tokens use the row before the first position and are not counted"
            )

    def weights(self) -> dict[str, Weight]:
        return {"weight": Weight((self.table_rows, self.size), "table")}

    @property
    def table_rows(self) -> int:
        """The number of rows of the table."""
        return self.length + self.offset

    def words(self) -> dict[str, Words]:
        return {"position": Words(f"learned {self.length:,}", self.length, f"learned, {self.length:,}")}

    def disorder(self) -> dict[str, dict[str, list[int]]]:
        return {"positions off by one": {"": [*range(1, self.table_rows), 0]}}


class SinusoidalPositions(Component, frozen=True):
    """Sinusoidal position embeddings, first the sines and then the cosines, which are added to the token embeddings
    (Vaswani et al. 2017).
    """

    label = "positions"
    rounds = ("made",)
    described = ("length", "size")
    by_length: ClassVar[dict[str, Any]] = {"length": 1}
    forgotten: ClassVar[dict[str, str]] = {
        "offset": "positions counted from 0",
        "ends": "frequencies of sinusoidal positions as in the paper",
    }
    counts: ClassVar[str] = "tokens"
    padding: ClassVar[None] = None

    length: Size
    """The longest sequence, in tokens."""
    size: Size
    """The width of the residual stream."""
    offset: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """A number that is added to every position."""
    ends: Literal["one", "both"] = "one"
    """The longest wavelength of a pair of sine and cosine. "both": 2π · 10,000 tokens (XGLM, tensor2tensor). "one":
    2π · 10,000^((size − 2) / size) tokens (the paper, CTRL). The shortest wavelength is always 2π tokens."""
    made: Literal["float32", "float64"] = "float32"
    """The dtype in which the angles are computed. It changes only the rounding."""

    def __post_init__(self) -> None:
        if self.size % 2 or (self.ends == "both" and self.size < 4):
            raise ConfigError(f"sinusoidal positions need an even number of dimensions, not {self.size}")

    def words(self) -> dict[str, Words]:
        data = {"kind": "sinusoidal", "length": self.length}
        return {"position": Words(f"sinusoidal {self.length:,}", data, f"sinusoidal, up to {self.length:,}")}


class LinearScaling(Component, frozen=True):
    """Linear interpolation of positions for RoPE: every position is divided by `factor` (kaiokendev 2023)."""

    factor: Positive
    """The divisor of positions."""

    def words(self) -> dict[str, Words]:
        return _scaling(self, f"linear ×{plain_number(self.factor)}")


class DynamicScaling(Component, frozen=True):
    """NTK-aware scaling: the base grows if the sequence is longer than `original_context` (bloc97, emozilla 2023)."""

    factor: Positive
    """How fast the base grows with the length of the sequence."""
    original_context: Size
    """The length up to which the base is unchanged, in tokens."""

    def words(self) -> dict[str, Words]:
        return _scaling(self, f"dynamic ×{plain_number(self.factor)}", f" beyond {self.original_context:,}")


class YarnScaling(Component, frozen=True):
    """YaRN (Peng et al. 2309.00071): pairs of elements that rotate slowly are interpolated. Fast pairs are unchanged.

    Pairs between slow and fast ones are interpolated in part. cos and sin are multiplied by `attention_factor`.
    """

    forgotten: ClassVar[dict[str, str]] = {
        "beta_fast": "YaRN's beta_fast forgotten",
        "beta_slow": "YaRN's beta_slow forgotten",
        "truncate": "YaRN's ramp truncated",
    }

    factor: Positive
    """The divisor of the frequencies of slow pairs."""
    original_context: Size
    """The context length before the scaling, in tokens."""
    attention_factor: Positive
    """The factor by which cos and sin are multiplied."""
    beta_fast: Turns = 32.0
    """Pairs that turn more often than this within the original context are unchanged."""
    beta_slow: Turns = 1.0
    """Pairs that turn less often than this within the original context are fully interpolated."""
    truncate: bool = True
    """Whether the limits between slow, intermediate and fast pairs are rounded to whole pairs."""

    def words(self) -> dict[str, Words]:
        return _scaling(self, f"YaRN ×{plain_number(self.factor)}", f" from {self.original_context:,}")


class LongRopeScaling(Component, frozen=True):
    """LongRoPE (2402.13753): the frequency of every pair has its own divisor. Long sequences have other divisors.

    cos and sin are multiplied by `attention_factor`.
    """

    rounds = ("renewed",)
    short_factor: tuple[Positive, ...]
    """The divisors of the pairs' frequencies for sequences up to `original_context`."""
    long_factor: tuple[Positive, ...]
    """The divisors of the pairs' frequencies for longer sequences."""
    original_context: Size
    """The length after which the long divisors are used, in tokens."""
    attention_factor: Positive
    """The factor by which cos and sin are multiplied."""
    renewed: bool = False
    """What happens if a text grows beyond `original_context`. If true, the keys of all tokens are computed again, as if
    the text had been read at once (Phi-3). Otherwise the old keys stay as they are (llama)."""

    def words(self) -> dict[str, Words]:
        return _scaling(self, "LongRoPE", f" from {self.original_context:,}")


class Llama3Scaling(Component, frozen=True):
    """Llama 3.1's scaling: the frequencies of pairs that rotate slowly are divided by `factor`.

    Fast pairs are unchanged. The frequencies of pairs between slow and fast ones are divided by a number between 1 and
    `factor`.
    """

    factor: Positive
    """The divisor of the frequencies of slow pairs."""
    low_freq_factor: Positive
    """Pairs that turn less often than this within the original context are slow."""
    high_freq_factor: Positive
    """Pairs that turn more often than this within the original context are fast."""
    original_context: Size
    """The context length before the scaling, in tokens."""

    def words(self) -> dict[str, Words]:
        return _scaling(self, f"llama3 ×{plain_number(self.factor)}", f" from {self.original_context:,}")


class ProportionalScaling(Component, frozen=True):
    """p-RoPE (Barbero et al. 2410.06205): only the pairs with the highest frequencies rotate. The others never do."""

    factor: Turns
    """The divisor of the frequencies of the pairs that rotate."""
    turning: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    """The number of pairs that rotate."""

    def words(self) -> dict[str, Words]:
        linear = "" if self.factor == 1 else f", linear ×{plain_number(self.factor)}"
        text = f"{self.turning:,} pairs turn{linear}"
        return {"scaling": Words(text, _scaling(self, text)["scaling"].data, f"of which {text}")}


def _scaling(scaling: Component, short: str, more: str = "") -> dict[str, Words]:
    """Describe a RoPE scaling: as `short` in a table, as `short` + `more` in a sentence, and as JSON of all fields."""
    data: dict[str, Any] = msgspec.to_builtins(scaling)
    kind = data.pop("type").removesuffix("Scaling").lower()
    return {"scaling": Words(short, {"kind": kind, **data}, short + more)}


RopeScaling = LinearScaling | DynamicScaling | YarnScaling | LongRopeScaling | Llama3Scaling | ProportionalScaling


ALL_OF_IT = Words("", None)  # the words for a position encoding on all elements of every head


class Position(Open, frozen=True):
    """The base class of position encodings inside attention.

    A class such as `Rotary` inherits from both `Position` and `Component`.
    """

    __slots__ = ()
    turns: ClassVar[bool] = False
    """Whether the encoding rotates queries and keys."""
    biases: ClassVar[bool] = False
    """Whether the encoding adds a bias to the scores."""

    @property
    def aspect(self) -> str:
        return "position"

    def aspects_on(self, on: Words) -> dict[str, Words]:  # noqa: ARG002 - most kinds do not depend on it
        """Return descriptions of the encoding, as `aspects` does.

        `on` is a text such as " on 32 dims", which says to which elements of a head the encoding applies.
        """
        return self.aspects()


class Turning(Position, frozen=True):
    """A position encoding that rotates queries and keys."""

    __slots__ = ()
    turns = True
    title: ClassVar[str]
    """The name of the encoding in drawings."""
    dim: int
    """The number of rotated elements of a head, which are its first ones."""


class Biasing(Position, frozen=True):
    """A position encoding that adds a bias to attention scores.

    The bias depends on the head, and on the positions of query and key.
    """

    __slots__ = ()
    biases = True
    title: ClassVar[str]
    """The name of the encoding in drawings."""
    formula: ClassVar[str]
    """The formula of the bias in drawings."""

    @property
    def scaled(self) -> bool:
        """Whether the bias is multiplied by the attention scale, like q·k."""
        return False

    @property
    def apart(self) -> bool:
        """Whether the bias is added in a separate step, to scores that are already rounded to the model's dtype."""
        return False

    @property
    def fused(self) -> bool:
        """Whether fused attention kernels can use the bias. Otherwise scores are computed without such a kernel."""
        return self.scaled


PAIRED_HALVES = "RoPE pairs element 0 with d/2 instead of 1"
PAIRED_NEIGHBOURS = "RoPE pairs element 0 with 1 instead of d/2"
"""The names of two mistakes of implementations: RoPE rotates the wrong elements together (see `Rotary.pairs`)."""
DIVIDED = "RoPE positions divided by 2"
"""The name of a mistake of implementations: a linear RoPE scaling that the model does not have."""


class Rotary(Turning, Component, frozen=True):
    """Rotary positions, RoPE (Su et al. 2104.09864), on the first elements of a head."""

    title = "RoPE"
    rounds = ("rounding", "joined", "lie")
    described = ("dim", "scaling", "pairs")
    by_length: ClassVar[dict[str, Any]] = {"base": 1.0, "scaling": None}
    usual: ClassVar[dict[str, Any]] = {
        "base": ("a RoPE base of {:,.0f}", (1e4, 1e5, 5e5, 1e6, 1e7)),
        "scaling": ("RoPE positions divided by {.factor:g}", tuple(LinearScaling(factor=by) for by in (4.0, 8.0))),
    }
    forgotten: ClassVar[dict[str, str]] = {
        "scaling": "rope scaling dropped",
        "pairs": PAIRED_HALVES,
        "direction": "RoPE turned the other way",
        "spread": "RoPE frequencies spread over the elements that turn",
    }

    dim: Size
    """The number of rotated elements of a head, which is even."""
    base: Positive
    """The base of the frequencies: pair i rotates by base^(-2i / dim) per token."""
    scaling: RopeScaling | None = None
    """The change of the frequencies for longer contexts."""
    pairs: Literal["halves", "adjacent"] = "halves"
    """Which elements are rotated together: i and i + dim/2 ("halves": GPT-NeoX, llama), or 2i and 2i + 1 ("adjacent":
    the paper, GPT-J). The frequencies are the same."""
    rounding: Literal["input", "result", "keys", "tables", "complex"] = "input"
    """What is rounded to the dtype of the queries and keys. "input": cos, sin and their products. "result": only the
    result (OLMo). "keys": only the result, and only that of keys (CodeGen). "tables": cos, sin and the result (Cohere).
    "complex": only the result of complex products (DeepSeek-V2, with adjacent pairs)."""
    direction: Literal["forward", "backward"] = "forward"
    """Whether later tokens are rotated by larger angles, or by smaller ones ("backward", nanochat)."""
    joined: bool = False
    """Whether the result is always copied by a concatenation, even if all elements of a head rotate. GPT-NeoX
    concatenates rotated and other elements, and gpt-oss both halves."""
    lie: Literal["by head", "by token"] = "by head"
    """The memory layout of the result: head by head, or token by token as the projection gives it (GPT-J)."""
    spread: Size | None = None
    """The divisor in the exponent of the base, if it is not `dim`: pair i rotates by base^(-2i / spread). If the number
    of dimensions in config.json is odd, transformers rotates one element more and divides by the odd number."""

    def __post_init__(self) -> None:
        if self.dim % 2:
            raise ConfigError(f"RoPE needs an even number of dimensions, not {self.dim}")
        if self.spread == self.dim:
            raise ConfigError(f"spread equals the rotary dimension, {self.dim}, and has no effect: leave out spread")
        if self.spread is not None and isinstance(self.scaling, YarnScaling | ProportionalScaling):
            raise ConfigError(f"the RoPE scaling {type(self.scaling).__name__} does not support the field spread")
        if isinstance(self.scaling, DynamicScaling) and self.exponent == 2:
            raise ConfigError("dynamic RoPE scaling needs more than 2 rotary dimensions: it divides by dim - 2")
        if isinstance(self.scaling, YarnScaling) and self.base == 1:
            raise ConfigError("YaRN needs a RoPE base other than 1: it divides by the logarithm of the base")
        if isinstance(self.scaling, ProportionalScaling) and self.scaling.turning > self.dim // 2:
            raise ConfigError(
                f"the RoPE scaling rotates {self.scaling.turning} pairs of dimensions, but a rotary "
                f"dimension of {self.dim} has only {self.dim // 2} pairs"
            )
        if isinstance(self.scaling, LongRopeScaling):
            for name in ("short_factor", "long_factor"):
                length = len(getattr(self.scaling, name))
                if length != self.dim // 2:
                    raise ConfigError(
                        f"longrope: {name} has {length} values, but {self.dim // 2} are needed, half the "
                        "rotary dimension"
                    )

    @property
    def exponent(self) -> int:
        """The divisor d in the frequencies base^(-2i / d): `spread` if it is set, and otherwise `dim`."""
        return self.dim if self.spread is None else self.spread

    def words(self, on: Words = ALL_OF_IT) -> dict[str, Words]:
        scaling = Words("", None) if self.scaling is None else self.scaling.named()
        short, long = (f", {words}" if words else "" for words in (scaling.short, scaling.long))
        data = {"kind": "RoPE", "base": self.base, "dims": on.data, "scaling": scaling.data}
        data |= {"direction": self.direction} if self.direction == "backward" else {}
        base, halves = plain_number(self.base), self.pairs == "halves"
        long += ", turned backward" if self.direction == "backward" else ""
        whole = f"rotary, base {base}{on.long}{'' if halves else ', pairs of neighbours'}{long}"
        pairs = Words("halves", None) if halves else Words("neighbours", self.pairs)
        return {"position": Words(f"RoPE {base}{on.short}{short}", data, whole), "rope pairs": pairs}

    def aspects_on(self, on: Words) -> dict[str, Words]:
        return self.whole(self.words(on))

    def slips(self) -> dict[str, Self]:
        name, bases = (
            "wrong rope base",
            [msgspec.structs.replace(self, base=self.base * factor) for factor in (10.0, 0.1)],
        )
        pairs = PAIRED_NEIGHBOURS if self.pairs == "halves" else PAIRED_HALVES
        slips = {name: bases[0], f"{name}, the other way round": bases[1], pairs: self.in_other_pairs()}
        if self.scaling is None or isinstance(self.scaling, LinearScaling):
            slips |= {DIVIDED: self.divided(2.0), f"{DIVIDED}, the other way round": self.divided(0.5)}
        return slips

    def divided(self, divisor: float) -> Self:
        """Return the same RoPE with positions divided by `divisor`, in addition to its linear scaling if it has one."""
        factor = divisor * (self.scaling.factor if isinstance(self.scaling, LinearScaling) else 1.0)
        return msgspec.structs.replace(self, scaling=None if factor == 1 else LinearScaling(factor=factor))

    def in_other_pairs(self) -> Self:
        """Return the same RoPE with the other value of `pairs`: "adjacent" instead of "halves", or the reverse."""
        return msgspec.structs.replace(self, pairs="adjacent" if self.pairs == "halves" else "halves")

    def partners(self) -> list[int]:
        """Return, for every rotated element of a head, the index of the other element of its pair."""
        half = self.dim // 2
        return [(at + half) % self.dim if self.pairs == "halves" else at ^ 1 for at in range(self.dim)]


class ALiBi(Biasing, Component, frozen=True):
    """A bias of slope(head) · position of the key (Press et al. 2108.12409)."""

    title = "ALiBi"
    formula = "slope(head) · s"
    rounds = ("rounding",)
    forgotten: ClassVar[dict[str, str]] = {"scaled": "ALiBi's bias not scaled"}

    scaled: bool = False
    """Whether the bias is multiplied by the attention scale together with q·k (Falcon). Otherwise it is added after the
    scaling (BLOOM)."""
    rounding: Literal["float32", "bfloat16", "apart"] = "float32"
    """The dtype to which slopes and products are rounded before they are added to the scores. "apart": positions are
    counted back from the last key, and the bias is added to the scaled scores in fp32 (MPT)."""

    @property
    def apart(self) -> bool:
        return self.rounding == "apart"

    def words(self) -> dict[str, Words]:
        short = "ALiBi, scaled" if self.scaled else "ALiBi"
        return {"position": Words(short, {"kind": "ALiBi", "scaled": self.scaled}, "ALiBi")}

    def by_slope(self, heads: int) -> list[int]:
        """Return the indices of the heads, sorted by descending slope; see `modules.positions.alibi_slopes`."""
        whole = 1 << heads.bit_length() - 1
        return sorted(range(heads), key=[*range(2, 2 * whole + 1, 2), *range(1, 2 * (heads - whole), 2)].__getitem__)


class Buckets(Biasing, Component, frozen=True):
    """A bias per head and bucket of distances between key and query (T5, 1910.10683).

    The biases are in the table of the model's `RelativeBias`. Half of the buckets stand for one distance each. The
    others stand for wider and wider ranges of distances.
    """

    title = "relative bias"
    formula = "b(bucket(s − t))"
    described = ("buckets", "furthest")
    apart: ClassVar[bool] = True
    fused: ClassVar[bool] = True
    forgotten: ClassVar[dict[str, str]] = {"both": "buckets of one direction"}

    buckets: Size
    """The number of buckets."""
    furthest: Size
    """The smallest distance in the last bucket, which also has all longer distances."""
    both: bool = False
    """Whether half of the buckets are for keys after the query, and the other half for keys before it."""

    def __post_init__(self) -> None:
        if not self.exact or self.furthest <= self.exact:
            raise ConfigError(
                f"{self.buckets} position buckets cannot cover distances up to {self.furthest} tokens: "
                f"furthest must be larger than {self.exact}, the number of buckets for a single distance"
            )

    @property
    def exact(self) -> int:
        """The number of buckets that stand for a single distance, for keys on one side of the query."""
        return self.buckets // (4 if self.both else 2)

    def words(self) -> dict[str, Words]:
        data = {"kind": "relative bias", "buckets": self.buckets, "furthest": self.furthest}
        text = f"{self.buckets} buckets up to {self.furthest:,} tokens"
        return {"position": Words("relative bias", data, f"relative bias, {text}")}

    def table(self, heads: int) -> "RelativeBias":
        """Return the table component that stores the biases for this number of heads."""
        return RelativeBias(buckets=self.buckets, heads=heads)

    def slips(self) -> dict[str, Self]:
        nearest = max(self.furthest // 2, self.exact + 1)
        return {"buckets up to half the distance": msgspec.structs.replace(self, furthest=nearest)}


class RelativeBias(Component, frozen=True):
    """A table with one bias per bucket and head, which all layers of a stack add to their scores (see `Buckets`)."""

    label = "attention"
    given = ("heads", "buckets")

    buckets: Size
    """The number of rows."""
    heads: Size
    """The number of columns."""

    def words(self) -> dict[str, Words]:
        return {"relative bias": Words("one table", {})}

    def weights(self) -> dict[str, Weight]:
        return {"weight": Weight((self.buckets, self.heads), "inner")}

    def letters(self, part: str = "") -> dict[str, int]:  # noqa: ARG002
        return {"b": self.buckets, "n": self.heads}

    def share(self, devices: int) -> Self:
        return msgspec.structs.replace(self, heads=divided(self.heads, devices, "heads"))

    def small(self, hidden: int) -> Self:  # noqa: ARG002
        return msgspec.structs.replace(self, heads=min(self.heads, 2))

    def disorder(self) -> dict[str, dict[str, list[int]]]:
        return {"relative biases off by one": {"": [*range(1, self.buckets), 0]}}


class Temperature(Component, frozen=True):
    """A factor by which queries are multiplied, and which grows with a token's position t (2501.19399, Llama 4):

    1 + growth · log(1 + floor((t + offset) / original_context))
    """

    rounds = ("counts",)
    forgotten: ClassVar[dict[str, str]] = {"offset": "positions of the temperature counted from 0"}
    described = ("growth", "original_context")

    growth: Positive
    """The factor by which the logarithm is multiplied."""
    original_context: Size
    """The number of tokens after which the factor grows for the first time, apart from the offset."""
    offset: Literal[0, 1] = 0
    """The number that is added to the position t."""
    counts: Literal["positions", "tokens"] = "positions"
    """What the position t is. "positions": the given position, and the factor is rounded to the dtype of queries
    (Ministral 3). "tokens": the number of earlier tokens, including padding, and only the result is rounded (Llama
    4)."""

    def words(self) -> dict[str, Words]:
        data = {"growth": self.growth, "original_context": self.original_context}
        return {"temperature": Words(f"+ {self.growth:g} · log per {self.original_context:,}", data)}
