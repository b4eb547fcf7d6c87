"""Multi-head self-attention with softmax."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal, Self

import msgspec

from ..errors import ConfigError, UsageError
from .base import Arithmetic, Component, Mixer, Positive, Scale, Size, Weight, bias, divided
from .norms import Norm, inside
from .operations import (
    ActivationOperation,
    AnyOperation,
    CacheOperation,
    Cap,
    Given,
    Product,
    Program,
    Rotate,
    ScaleOperation,
    Sizes,
    Temper,
    attend,
    linear,
    out_of,
)
from .positions import ALL_OF_IT, ALiBi, Biasing, Buckets, LongRopeScaling, Position, Rotary, Temperature, Turning
from .words import NOT_THERE, Words

__all__ = ["Attention"]


class Attention(Mixer, Component, frozen=True):
    """Self-attention with query heads and key-value heads (MHA, GQA, MQA)."""

    label = "attention"
    slot = "attention"
    axes = ("group",)
    rounds = (
        "arithmetic",
        "scaling",
        "kv_expansion",
        "fused",
        "fused_rows",
        "softmax",
        "scores",
        "kept",
        "lie",
        "kernel",
        "sunk",
        "gate",
    )
    described = (
        *("head_dim", "scale", "position", "window", "chunked", "causal", "q_norm", "k_norm", "v_norm", "qkv_bias"),
        *("output_bias", "kv_from"),
    )
    by_length: ClassVar[dict[str, Any]] = {"window": None, "chunked": False, "temperature": None}
    forgotten: ClassVar[dict[str, str]] = {
        "causal": "a causal mask, which hides what comes later",
        "position": "no positions in attention",
        "window": "window ignored",
        "chunked": "chunks taken for windows",
        "q_norm": "norm of queries left out",
        "k_norm": "norm of keys left out",
        "qkv_bias": "QKV bias dropped",
        "output_bias": "output bias of attention dropped",
        "cap": "cap on scores dropped",
        "clip": "q, k and v not clipped",
        "clip_normed": "q and k clipped before their norms",
        "norm_order": "norms of queries and keys before positions",
        "sinks": "sinks left out",
        "mixed_norm": "norm before the output projection left out",
        "gated": "gate of attention left out",
        "gate_bias": "bias of attention's gate dropped",
        "temperature": "queries not scaled by their positions",
        "v_norm": "norm of values left out",
        "kv_from": "keys and values projected apart in every layer",
        "key_multiplier": "keys not scaled",
    }

    # --- what is computed ---

    hidden_size: Size
    """The width of the residual stream."""
    heads: Size
    """The number of query heads."""
    kv_heads: Size
    """The number of key-value heads. Consecutive query heads share one: `heads` / `kv_heads` of them."""
    head_dim: Size
    """The number of elements of a query, key or value."""
    scale: Scale
    """The factor by which q·k is multiplied, usually 1/√head_dim."""
    causal: bool = True
    """Whether a token attends only to itself and to earlier tokens. Otherwise it attends to all tokens (BERT), and
    there is no KV cache."""
    position: Position | None = None
    """The position encoding inside attention, such as RoPE or ALiBi."""
    window: Size | None = None
    """The sliding window. With w, position t attends to t-w+1 … t; without `causal`, to t-w+1 … t+w-1 (ModernBERT)."""
    chunked: bool = False
    """Whether a token attends only to the tokens of its own chunk of `window` tokens (Llama 4)."""
    q_norm: Norm | None = None
    """The norm of every query head, or of all heads at once if it is as wide as all of them (OLMo 2)."""
    k_norm: Norm | None = None
    """The norm of every key head, or of all key heads at once."""
    qkv_bias: bool = False
    """Whether the projections of queries, keys and values have a bias."""
    output_bias: bool = False
    """Whether the output projection has a bias."""
    cap: Positive | None = None
    """With c, every score s becomes c · tanh(s / c), before the mask (Gemma 2)."""
    clip: Positive | None = None
    """With c, every element of q, k and v is limited to -c … c (OLMo, DBRX)."""
    clip_normed: bool = False
    """Whether q and k are limited after their norms (OLMoE)."""
    norm_order: Literal["before", "after"] = "before"
    """Whether the norms of queries and keys come before or after the positions (Hunyuan)."""
    sinks: bool = False
    """Whether every head has one more learnt score, for a key without a value (gpt-oss)."""
    mixed_norm: Norm | None = None
    """The norm of the output of all heads before the output projection (BitNet)."""
    gated: bool = False
    """Whether every element of the heads' output is multiplied by σ(gate(x)) (2505.06708, AFMoE)."""
    gate_bias: bool = False
    """Whether the projection of the gate has a bias."""
    temperature: Temperature | None = None
    """A factor that depends on the position of a query, and by which the query is multiplied at the end."""
    v_norm: Norm | None = None
    """The norm of the values of every head (Gemma 4)."""
    kv_from: Literal["input", "keys", "earlier"] = "input"
    """Where keys and values come from. "input": they have separate projections. "keys": one projection gives both, and
    values are its result before the keys' norm and positions (Gemma 4). "earlier": the layer uses the keys and values
    of the nearest earlier layer that computes its own. That layer must have the same window, and the same number and
    width of key-value heads (Gemma 3n)."""
    key_multiplier: Positive = 1.0
    """The factor by which keys are multiplied before they are rotated (Falcon-H1)."""

    # --- how it is rounded: see `rounds` ---

    arithmetic: Arithmetic = "linear"
    """How the projections multiply and add their bias."""
    scaling: Literal["multiply", "divide", "queries"] = "multiply"
    """How the scale is applied. "multiply": scores are multiplied by it. "divide": scores are divided by its inverse.
    "queries": queries are multiplied by it before the product (OPT)."""
    kv_expansion: Literal["repeat", "broadcast", "projection"] = "repeat"
    """When a key head is repeated for its query heads: after the cache ("repeat"), inside the matrix product
    ("broadcast"), or directly after the projection, before positions are applied ("projection")."""
    fused: bool = False
    """Whether q, k and v are computed in one matrix product."""
    fused_rows: Literal["by head", "by part"] = "by head"
    """The order of the rows of the fused product of q, k and v. "by head": for one key-value head after the other, its
    queries, its key and its value. "by part": all queries, then all keys, then all values, as always with the
    arithmetic "conv1d"."""
    softmax: Literal["float32", "input"] = "float32"
    """The dtype of the softmax: at least fp32, or that of its input."""
    scores: Literal["input", "product", "float32", "float32, then scaled"] = "input"
    """How scores are computed if no fused kernel computes them. "input": in the dtype of q and k, and scaled as
    `scaling` says. "product": in the dtype of q and k, with the scale inside the product (GPT-NeoX-Japanese).
    "float32": in at least fp32, with the scale inside the product. "float32, then scaled": in at least fp32, and
    multiplied by the scale afterwards (GPT-J, GPT-Neo)."""
    kept: Literal["window", "all"] = "window"
    """Which tokens the cache of a layer with a window contains. "window": only those that are inside the window of the
    next token. "all": all tokens, and the attention weights of tokens outside the window are 0 (GPT-Neo)."""
    lie: Literal["as cached", "as projected"] = "as cached"
    """The memory layout of keys and values without a cache. "as cached": head by head, as in a cache. "as projected":
    token by token (MPT)."""
    kernel: Literal["any", "eager"] = "any"
    """With "eager", scores are computed as a tensor whichever kernel is requested, because the family has no fused
    attention."""
    sunk: Literal["in softmax", "in float32", "behind it"] = "in softmax"
    """How the learnt score of `sinks` acts. "in softmax": it is one more score of the softmax, in the scores' dtype.
    "in float32": the same, in fp32. "behind it": the heads' output is multiplied by 1 minus the weight that the sink
    would have in the softmax (Granite)."""
    gate: Literal["apart", "with queries"] = "apart"
    """Whether the gate has a projection of its own ("apart"), or one product with the queries, in which the gate of a
    head comes after its query ("with queries", Qwen3-Next)."""

    def __post_init__(self) -> None:
        self._check_positions()
        self._check_scores()
        self._check_norm_sizes()
        self._check_keys()
        self._check_norm_order()
        if self.gate_bias and not self.gated:
            raise ConfigError("gate_bias is true, but the attention has no gate")
        if self.gate == "with queries" and (self.fused or self.clip is not None):
            raise ConfigError(
                'with gate: "with queries", the query projection also computes the gate, so clip and '
                "fused: true are impossible"
            )

    def _check_positions(self) -> None:
        """Raise ConfigError if the heads, the position encoding and the window cannot be combined."""
        if self.chunked and self.window is None:
            raise ConfigError(
                "chunked attention (chunked: true) needs a window, which is the number of tokens in a chunk"
            )
        if not self.causal and (self.chunked or self.kv_from != "input" or isinstance(self.position, ALiBi)):
            raise ConfigError(
                "bidirectional attention (causal: false) supports neither chunked: true, nor kv_from other "
                "than input, nor ALiBi positions"
            )
        if isinstance(self.position, Buckets) and (self.window is not None or self.group > 1):
            raise ConfigError(
                "bucketed position biases (T5) need attention without a window, and kv_heads must equal heads"
            )
        if self.heads % self.kv_heads:
            raise ConfigError(f"{self.heads} query heads are not divisible by {self.kv_heads} key-value heads")
        if isinstance(self.position, Turning) and self.position.dim > self.head_dim:
            raise ConfigError(
                f"the rotary dimension {self.position.dim} is larger than the head dimension {self.head_dim}"
            )

    def _check_scores(self) -> None:
        """Raise ConfigError if `scores` and `kv_expansion` do not support position biases or shared keys."""
        if isinstance(self.position, Biasing) and self.scores != "input":
            raise ConfigError(
                "attention with position biases, such as ALiBi, must compute its scores in the dtype of the "
                "input (scores: input), not in float32"
                if self.scores != "product"
                else (
                    "attention with position biases, such as ALiBi, must have scores: input, because its "
                    "position encoding determines where the scale is applied"
                )
            )
        if self.kv_expansion == "broadcast" and self.group > 1:
            if self.kv_heads > 1:
                raise ConfigError(f"kv_expansion: broadcast needs kv_heads: 1, but kv_heads is {self.kv_heads}")
            if self.scores in ("float32", "product") or (
                isinstance(self.position, Biasing) and not self.position.scaled
            ):
                raise ConfigError(
                    "kv_expansion: broadcast supports neither scores: float32, nor scores: product, nor "
                    "position biases that are added without the attention scale"
                )

    def _check_norm_sizes(self) -> None:
        for norm, heads in ((self.q_norm, self.heads), (self.k_norm, self.kv_heads)):
            if norm is not None and norm.size not in (self.head_dim, heads * self.head_dim):
                raise ConfigError(
                    f"the norm of queries or keys (q_norm or k_norm) has size {norm.size}, but must have the "
                    f"size of one head ({self.head_dim}) or of all {heads} heads together "
                    f"({heads * self.head_dim})"
                )
        if self.v_norm is not None and self.v_norm.size != self.head_dim:
            raise ConfigError(f"v_norm has size {self.v_norm.size}, but the head dimension is {self.head_dim}")

    def _check_keys(self) -> None:
        """Raise ConfigError if a field needs projections of keys and values that the layer does not have."""
        if self.kv_from != "input" and (self.fused or self.kv_expansion == "projection"):
            raise ConfigError(
                f"with kv_from: {self.kv_from}, the layer does not project keys and values, so fused: true "
                "and kv_expansion: projection are impossible"
            )
        if self.kv_from == "earlier" and (self.k_norm is not None or self.v_norm is not None):
            raise ConfigError(
                "with kv_from: earlier, the layer uses the keys and values of another layer, so it cannot "
                "have k_norm or v_norm"
            )
        if self.key_multiplier != 1 and (self.kv_from != "input" or self.k_norm is not None or self.clip is not None):
            raise ConfigError(
                "key_multiplier needs keys that are projected from the input (kv_from: input), without "
                "k_norm and without clip"
            )

    def _check_norm_order(self) -> None:
        """Raise ConfigError if the fields for norms, for their order and for clipping cannot be combined."""
        if self.mixed_norm is not None and self.mixed_norm.size != self.heads * self.head_dim:
            raise ConfigError(
                f"mixed_norm has size {self.mixed_norm.size}, but {self.heads} heads of dimension "
                f"{self.head_dim} need {self.heads * self.head_dim}"
            )
        if self.norm_order == "after" and (self.q_norm is None or self.position is None):
            raise ConfigError(
                "norm_order: after puts the norms of queries and keys after the position encoding, so it "
                "needs q_norm and a position encoding"
            )
        if self.clip_normed and self.norm_order == "after":
            raise ConfigError(
                "clip_normed: true clips queries and keys after their norms, and needs norm_order: before"
            )
        if self.norm_order == "after" and not self.by_head:
            raise ConfigError(
                "with norm_order: after, q_norm and k_norm must have the size of one head, not of all heads together"
            )

    @property
    def by_head(self) -> bool:
        """Whether q and k have norms on single heads only, so that heads can be removed, added and reordered."""
        norms = ((self.q_norm, self.heads), (self.k_norm, self.kv_heads))
        return all(norm is None or count == 1 or norm.size == self.head_dim for norm, count in norms)

    @property
    def group(self) -> int:
        """The number of query heads per key-value head."""
        return self.heads // self.kv_heads

    @property
    def cache_window(self) -> int | None:
        """The number of tokens that the cache keeps, or None for all."""
        return None if self.kept == "all" else self.window

    @property
    def projected(self) -> tuple[str, ...]:
        """The projections of the input that the layer has: "q", "k" and "v", or only some of them."""
        return {"input": ("q", "k", "v"), "keys": ("q", "k"), "earlier": ("q",)}[self.kv_from]

    @property
    def kv_signature(self) -> tuple[int | None, int, int]:
        """The window, the number of key-value heads, and their width.

        A layer can use the keys and values of an earlier layer if all three are the same in both layers.
        """
        return self.window, self.kv_heads, self.head_dim

    @property
    def groups(self) -> int:
        """The number of groups into which the rows of the fused weight of q, k and v are divided (see `fused_rows`).

        It is the number of key-value heads if rows are ordered by head, and otherwise 1.
        """
        return 1 if self.arithmetic == "conv1d" or self.fused_rows == "by part" else self.kv_heads

    def weights(self) -> dict[str, Weight]:
        q, kv, hidden = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden_size
        rows = {part: q if part == "q" else kv for part in self.projected}
        weights = {f"{part}_proj.weight": Weight((size, hidden), "reads") for part, size in rows.items()}
        weights["o_proj.weight"] = Weight((hidden, q), "writes")
        if self.qkv_bias:
            weights |= {f"{part}_proj.bias": bias(size) for part, size in rows.items()}
        if self.output_bias:
            weights["o_proj.bias"] = bias(hidden)
        if self.gated:
            weights["gate_proj.weight"] = Weight((q, hidden), "reads")
        if self.gate_bias:
            weights["gate_proj.bias"] = bias(q)
        if self.sinks:
            weights["sinks"] = Weight((self.heads,), "inner")
        return weights

    def words(self) -> dict[str, Words]:
        kind = "MHA" if self.group == 1 else "MQA" if self.kv_heads == 1 else "GQA"
        heads = f"{self.heads}" if kind == "MHA" else f"{self.heads}/{self.kv_heads}"
        counts = f"{self.heads} heads" if kind == "MHA" else f"{self.heads} q, {self.kv_heads} kv"
        scale = scale_words(self.scale, self.head_dim)
        on = ALL_OF_IT
        if isinstance(self.position, Turning) and self.position.dim != self.head_dim:
            dim = self.position.dim
            on = Words(f" on {dim} dims", dim, f", on {dim} of {self.head_dim} dimensions")
        norms = {"q": self.q_norm, "k": self.k_norm, "v": self.v_norm}
        normed = [name for name, norm in norms.items() if norm is not None]
        kv = {"input": "", "keys": ", v = k", "earlier": ", earlier k and v"}[self.kv_from]
        source = {"kv_from": self.kv_from} if kv else {}
        return {
            "attention": Words(
                f"{kind} {heads}{kv}",
                {"kind": kind, "heads": self.heads, "kv_heads": self.kv_heads, **source},
                f"{kind}, {counts}, head dim {self.head_dim}{scale.whole}{kv}",
            ),
            "head dim": Words(f"{self.head_dim:,}", self.head_dim),
            "scale": scale,
            "q/k norm": inside(
                norms,
                f" on {normed[0]}" if len(normed) == 1 else "",
                f"{' and '.join(normed)} heads{'' if self.by_head else ', all at once'}",
            ),
            **shared_words(self.window, self.position, on, self.chunked, self.causal),
        }

    def biases(self) -> dict[str, Words]:
        out = Words("attention out", self.output_bias, "attention output")
        gate = {"gate": Words("attention gate", self.gate_bias)} if self.gated else {}
        return {"qkv": Words("q, k, v", self.qkv_bias), "output": out, **gate}

    def alike(self) -> Self:
        return msgspec.structs.replace(super().alike(), scale=plain_scale(self.scale))

    def letters(self, part: str = "") -> dict[str, int]:
        if part:
            return {"c": self.head_dim}
        return {"h": self.heads * self.head_dim, "k": self.kv_heads * self.head_dim}

    def share(self, devices: int) -> Self:
        heads, kv_heads = divided(self.heads, devices, "query heads"), self.kv_heads
        if kv_heads % devices and devices % kv_heads:
            raise UsageError(
                f"--tp {devices}: {kv_heads} key-value heads can be neither split nor repeated evenly over "
                f"{devices} GPUs",
                f"Possible numbers of GPUs: {', '.join(map(str, self._devices()))}.",
            )
        kv_heads = max(kv_heads // devices, 1)
        return msgspec.structs.replace(self, heads=heads, kv_heads=kv_heads, **self._norms_of(heads, kv_heads))

    def _devices(self) -> list[int]:
        """Return every number of GPUs over which the query heads, with their keys and values, can be divided evenly."""
        even = [count for count in range(1, self.heads + 1) if self.heads % count == 0]
        return [count for count in even if self.kv_heads % count == 0 or count % self.kv_heads == 0]

    def small(self, hidden: int) -> Self:
        kv_heads = min(self.kv_heads, 2)
        heads = kv_heads * min(self.group, 2)
        if isinstance(self.position, ALiBi):
            heads = few_biased(self.heads)
            kv_heads = {self.heads: heads, 1: 1}.get(self.kv_heads, 2)
        norms = self._norms_of(heads, kv_heads)
        return msgspec.structs.replace(self, hidden_size=hidden, heads=heads, kv_heads=kv_heads, **norms)

    def _norms_of(self, heads: int, kv_heads: int) -> dict[str, Norm | None]:
        """Return the norms of a copy of this attention with other numbers of heads, by field name.

        A norm over all heads together gets the new width. A norm of single heads stays as it is.
        """
        numbers = {"q_norm": heads, "k_norm": kv_heads, "mixed_norm": heads}
        norms: dict[str, Norm | None] = {}
        for name, number in numbers.items():
            norm: Norm | None = getattr(self, name)
            by_head = norm is None or (norm.size == self.head_dim and name != "mixed_norm")
            norms[name] = norm if by_head or norm is None else norm.small(number * self.head_dim)
        return norms

    def slips(self) -> dict[str, Self]:
        slips = {"scores not scaled": msgspec.structs.replace(self, scale=1.0)}
        if isinstance(self.position, Rotary):
            slips["no RoPE"] = msgspec.structs.replace(self, position=None, norm_order="before")
            longer, by_pair = self.head_dim - self.position.dim, isinstance(self.position.scaling, LongRopeScaling)
            if longer > 0 and longer % 2 == 0 and not by_pair:
                whole = msgspec.structs.replace(self.position, dim=self.head_dim)
                slips["RoPE on whole heads, not on a part"] = msgspec.structs.replace(self, position=whole)
        return slips

    def disorder(self) -> dict[str, dict[str, list[int]]]:
        heads, kv_heads, width, half = self.heads, self.kv_heads, range(self.head_dim), self.head_dim // 2
        orders: dict[str, dict[str, list[int]]] = {}

        def rows(order: Iterable[int], inside: Sequence[int] = width) -> list[int]:
            """Return row numbers of a projection, with its heads in the order `order`.

            `inside` is the order of the elements in every head.
            """
            return [head * self.head_dim + at for head in order for at in inside]

        if isinstance(self.position, Rotary):
            both = {"q": range(heads), "k": range(kv_heads)}
            interleaved = [at for pair in zip(width[:half], width[half:], strict=True) for at in pair]
            orders["rope permute missing"] = {f"{n}_proj": rows(of, interleaved) for n, of in both.items()}
            turned = [*self.position.partners(), *width[self.position.dim :]]
            backward = {f"{name}_proj": rows(of, turned) for name, of in both.items()}
            for name, norm in (("q", self.q_norm), ("k", self.k_norm)):
                whole = norm is not None and norm.size != self.head_dim
                backward[f"{name}_norm"] = rows(both[name], turned) if whole else turned
            orders["RoPE turned the other way"] = backward
        if kv_heads not in (1, heads):
            order = rows([head for first in range(self.group) for head in range(first, heads, self.group)])
            orders["query heads in other groups"] = {"q_proj": order, "o_proj": order}
        elif isinstance(self.position, ALiBi):
            order = rows(self.position.by_slope(heads))
            moved = ("q_proj", "o_proj", *(("k_proj", "v_proj") if kv_heads > 1 else ()))
            orders["ALiBi slopes in descending order"] = dict.fromkeys(moved, order)
        return orders

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        row, end = "attention", f"{path}.o_proj"
        program: list[AnyOperation] = []
        inputs: dict[str, str] = {}
        norms_values = self.v_norm is not None and self.kv_from == "input"
        for part in "vqk" if norms_values else "qkv":  # values are normalised before queries and keys are rotated
            program += self._part(part, path, source)
            inputs[part] = program[-1].id
        scores = {
            "scale": self.scale,
            "query_dim": self.head_dim,
            "kv_heads": self.kv_heads,
            "wide": self.scores.startswith("float32"),
            "broadcast": self.kv_expansion == "broadcast",
            "written": self.kernel == "eager",
        }
        rest: dict[str, Any] = {
            "position": self.position,
            "cap": self.cap,
            "window": self.window,
            "chunked": self.chunked,
            "causal": self.causal,
            "wide": self.softmax == "float32",
            "sinks": self.sunk if self.sinks else "",
        }
        program += attend(path, (inputs["q"], inputs["k"], inputs["v"]), scores, self.heads, self.head_dim, **rest)
        if self.mixed_norm is not None:
            all_heads: Sizes = ("B", "T", self.mixed_norm.size)
            program += out_of(row, self.mixed_norm.operations(f"{path}.mixed_norm", program[-1].id, all_heads))
        if self.gated:
            mixed, wide = program[-1].id, ("B", "T", self.heads, self.head_dim)
            fields = self._product(path, "gate") if self.gate == "with queries" else {}
            program.append(linear(self, "gate_proj", path, source, wide, row, **fields))
            program.append(
                ActivationOperation(f"{path}.gate", (program[-1].id,), wide, row, function="sigmoid", live_until=end)
            )
            program.append(Product(f"{path}.gated", (mixed, program[-1].id), wide, row))
        return (*program, linear(self, "o_proj", path, program[-1].id, shape, row))

    def _product(self, path: str, part: str) -> dict[str, Any]:
        """Return the fields of `Linear` that say which projections are computed in the same matrix product.

        Args:
            path: The name of the attention module in the block.
            part: The projection: "q", "k", "v" or "gate".
        """
        if self.gated and self.gate == "with queries" and part in ("q", "gate"):
            return {"together": f"{path}.q_gate", "fused": True, "groups": self.heads}
        return {"together": f"{path}.qkv", "fused": self.fused, "groups": self.groups}

    def _part(self, part: str, path: str, source: str) -> list[AnyOperation]:
        """Return the operations that compute the queries, keys or values from the input, up to the KV cache.

        Args:
            part: What to compute: "q", "k" or "v".
            path: The name of the attention module in the block.
            source: The id of the operation that computes the input.
        """
        row, end = "attention", f"{path}.o_proj"
        inner: Sizes = ("B", "T", self.heads if part == "q" else self.kv_heads, self.head_dim)
        seen: Sizes = ("B", "S", *inner[2:])
        if self.kv_from == "earlier" and part != "q":
            words = f"{'keys' if part == 'k' else 'values'} of an earlier layer"
            return [Given(f"{path}.{part}_earlier", (), seen, row, live_until=end, words=words, again=True)]
        program: list[AnyOperation] = []
        last = f"{path}.k_proj"
        if part in self.projected:
            program.append(linear(self, f"{part}_proj", path, source, inner, row, end, **self._product(path, part)))
            last = program[-1].id
        if part == "k" and self.key_multiplier != 1:
            program.append(ScaleOperation(f"{path}.k_scaled", (last,), inner, row, factor=self.key_multiplier))
            last = program[-1].id
        program += self._normed_and_rotated(part, path, last, inner)
        last = program[-1].id if program else last
        if part == "q" and self.temperature is not None:
            program.append(Temper(f"{path}.q_tempered", (last,), inner, row, temperature=self.temperature))
        if part == "q" or not self.causal:
            return [*program[:-1], msgspec.structs.replace(program[-1], live_until=end)]
        fields: dict[str, Any] = {"window": self.cache_window, "as_given": self.lie == "as projected"}
        fields["repeats"] = self.group if self.kv_expansion == "projection" else 1
        return [*program, CacheOperation(f"{path}.{part}_cached", (last,), seen, row, live_until=end, **fields)]

    def _normed_and_rotated(self, part: str, path: str, last: str, shape: Sizes) -> Iterator[AnyOperation]:
        """Yield the clipping, norm and rotation of q, k or v, in the order that `norm_order` and `clip_normed` give.

        `last` is the id of the operation whose result is clipped, normalised and rotated.
        """
        row, end = "attention", f"{path}.o_proj"
        norm = {"q": self.q_norm, "k": self.k_norm, "v": self.v_norm}[part]
        steps = ("clip", "norm", "rotate") if self.norm_order == "before" else ("clip", "rotate", "norm")
        for step in ("norm", "clip", "rotate") if self.clip_normed else steps:
            operations: list[AnyOperation] = []
            if step == "clip" and self.clip is not None:
                limit: dict[str, Any] = {"limit": self.clip, "hard": True, "live_until": end}
                operations = [Cap(f"{path}.{part}_clipped", (last,), shape, row, **limit)]
            elif step == "norm" and norm is not None:
                normed: Sizes = shape if norm.size == self.head_dim else ("B", "T", norm.size)
                until = f"{path}.k_rotated" if self.norm_order == "before" and part != "v" else ""
                program: Program = norm.operations(f"{path}.{part}_norm", last, normed)
                operations = [
                    msgspec.structs.replace(operation, live_until=until) for operation in out_of(row, program)
                ]
            elif step == "rotate" and isinstance(self.position, Turning) and part != "v":
                # Queries and keys are normalised when both have been rotated.
                waits = self.norm_order == "after" and self.k_norm is not None
                fields: dict[str, Any] = {"rotary": self.position, "live_until": f"{path}.k_norm" if waits else ""}
                operations = [Rotate(f"{path}.{part}_rotated", (last,), shape, row, **fields)]
            yield from operations
            last = operations[-1].id if operations else last


def few_biased(heads: int) -> int:
    """Return the number of query heads for a small test copy of an ALiBi attention that has `heads` query heads.

    ALiBi computes its slopes in another way if the number of heads is not a power of two. So the result is a power of
    two if `heads` is a power of two, and otherwise it is not.
    """
    return min(heads, 6 if heads & (heads - 1) else 4)


def plain_scale(scale: float) -> float:
    """Return a scale rounded to 14 digits. The digits after them depend on how a family's code computes 1/√d."""
    return float(f"{scale:.14g}")


def scale_words(scale: float, dim: int) -> Words:
    """Return the description of the scale of attention scores, as words for tables and an addition to a sentence.

    The addition (`Words.whole`) is empty for the usual scale, 1/√dim.
    """
    whole = "" if math.isclose(scale, dim**-0.5, rel_tol=1e-6) else f", scale {scale:.4g}"
    if plain_scale(scale) == plain_scale(dim**-0.5):
        return Words("1/sqrt(head dim)", "1/sqrt(head_dim)", whole)
    return Words(f"{scale:.4g}", plain_scale(scale), whole)


def shared_words(
    window: int | None, position: Position | None, on: Words, chunked: bool = False, causal: bool = True
) -> dict[str, Words]:
    """Describe the window and the position encoding of an attention of any kind, by aspect.

    Args:
        window: See `Attention`.
        position: See `Attention`.
        on: Words such as "on the first 32 elements", which say to what part of a head the encoding applies.
        chunked: See `Attention`.
        causal: See `Attention`.
    """
    no_position = {"position": Words("none", None), "rope pairs": NOT_THERE}
    sight = Words("none" if window is None else f"{window:,}", window)
    sight = Words(f"chunks of {window:,}", {"chunk": window}) if chunked else sight
    if not causal:
        both = "both directions" + ("" if window is None else f", {window:,} each")
        sight = Words(both, {"causal": False, "window": window})
    return {"window": sight, **(no_position if position is None else position.aspects_on(on))}
