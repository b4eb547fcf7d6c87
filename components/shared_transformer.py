"""A transformer block whose weights several layers share, with separate adapters."""

from typing import Any, ClassVar, Literal, Self

import msgspec

from ..errors import ConfigError
from .activations import FACTS, Activation, function_of
from .attention import plain_scale, scale_words, shared_words
from .base import Component, Misread, Mixer, Scale, Size, Weight, bias, divided
from .norms import Norm, inside
from .operations import (
    ActivationOperation,
    Add,
    AnyOperation,
    CacheOperation,
    Concat,
    Given,
    Product,
    Program,
    Rotate,
    Sizes,
    attend,
    linear,
    out_of,
)
from .positions import ALL_OF_IT, Position, Rotary, Turning
from .words import Words

__all__ = ["FIRST", "SharedTransformer"]

FIRST = "first_stream"
"""The id of the operation that computes the first layer's input, which every `SharedTransformer` also reads."""

_FEW = 4  # the rank of adapters in a small copy


class SharedTransformer(Mixer, Component, frozen=True):
    """Attention and a gated feed-forward whose weights several layers share (Zamba 2405.16712, Zamba2 2411.15242):

        y = stream_proj(down(activation(gate(a)) · up(a))),  a = inner_norm(attention(norm([x, e])))

    e is the input of the model's first layer, concatenated with x, so queries, keys and values are computed from
    twice the stream's width. There is no residual connection in between.

    Every layer has its own stream_proj, its own KV cache and its own low-rank adapters. The outputs of the adapters
    are added to the outputs of the shared projections.
    """

    label = "shared block"
    slot = "shared"
    borrows_weights = True
    computed_in = ".shared_transformer"
    rounds = ("fused",)
    described = ("head_dim", "scale", "position", "norm", "inner_norm", "bias")
    forgotten: ClassVar[dict[str, str]] = {
        "position": "no positions in attention",
        "bias": "biases of shared blocks dropped",
        "rank": "adapters of shared feed-forwards left out",
        "attention_rank": "adapters of shared attention left out",
        "number": "one shared block taken for all",
        "weights_from": "weights of shared blocks stored in every layer",
    }

    hidden_size: Size
    """The width of the residual stream."""
    heads: Size
    """The number of query heads."""
    kv_heads: Size
    """The number of key-value heads, each shared by the same number of query heads."""
    head_dim: Size
    """The number of elements of a query, key or value."""
    scale: Scale
    """The factor by which q·k is multiplied."""
    intermediate_size: Size
    """The number of hidden units of the feed-forward."""
    activation: Activation
    """The activation of the gate."""
    norm: Norm
    """The norm of the concatenation [x, e]."""
    inner_norm: Norm
    """The norm between attention and the feed-forward."""
    position: Position | None = None
    """The position encoding inside attention: RoPE, or None."""
    bias: bool = False
    """Whether the linear layers of the feed-forward have a bias."""
    rank: Size | None = None
    """The rank of the adapters of gate and up, which share their first matrix. None means no adapters."""
    attention_rank: Size | None = None
    """The rank of the adapters of queries, keys and values. None means no adapters."""
    number: int = 0
    """The number of the shared block. Layers with the same number share weights."""
    weights_from: Literal["own", "earlier"] = "own"
    """Where the shared weights are stored. "own": in this layer, the first one with this `number`. "earlier": this
    layer uses the weights of the nearest earlier layer that stores them."""
    fused: bool = False
    """Whether gate and up are computed in one matrix product. It changes only the rounding."""

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ConfigError(f"{self.heads} query heads are not divisible by {self.kv_heads} key-value heads")
        if self.position is not None and not isinstance(self.position, Turning):
            raise ConfigError(f"a shared block needs RoPE or no positions, not {type(self.position).__name__}")
        if isinstance(self.position, Turning) and self.position.dim > self.head_dim:
            raise ConfigError(
                f"the rotary dimension {self.position.dim} is larger than the head dimension {self.head_dim}"
            )
        for name, norm, size in (("norm", self.norm, self.read), ("inner_norm", self.inner_norm, self.hidden_size)):
            if norm.size != size:
                raise ConfigError(f"{name} has size {norm.size}, but its input has size {size}")

    @property
    def read(self) -> int:
        """The number of input features of the query, key and value projections, which read [x, e]."""
        return 2 * self.hidden_size

    @property
    def shared_part(self) -> Self:
        """A copy without everything that may differ between layers with the same shared weights.

        It has no adapters, and counts as the layer that stores the weights.
        """
        return msgspec.structs.replace(self, weights_from="own", rank=None, attention_rank=None)

    def _rows(self) -> dict[str, int]:
        """Return the number of rows of the projections of queries, keys and values."""
        kv = self.kv_heads * self.head_dim
        return {"q": self.heads * self.head_dim, "k": kv, "v": kv}

    def weights(self) -> dict[str, Weight]:
        hidden, units, rows, low = self.hidden_size, self.intermediate_size, self._rows(), self.attention_rank
        own = self.weights_from == "own"
        weights: dict[str, Weight] = {}

        def add(name: str, *shape: int, stored: bool = True) -> None:
            weights.update({f"{name}.weight": Weight(shape, "inner")} if stored else {})

        for name, size in rows.items():
            add(f"{name}_proj", size, self.read, stored=own)
            add(f"{name}_adapter_down", low or 0, self.read, stored=low is not None)
            add(f"{name}_adapter_up", size, low or 0, stored=low is not None)
        add("o_proj", hidden, rows["q"], stored=own)
        add("adapter_down", self.rank or 0, hidden, stored=self.rank is not None)
        for name in _UNITS:
            add(f"{name}_proj", units, hidden, stored=own)
            add(f"{name}_adapter_up", units, self.rank or 0, stored=self.rank is not None)
        add("down_proj", hidden, units, stored=own)
        if own and self.bias:
            weights |= {"gate_proj.bias": bias(units), "up_proj.bias": bias(units), "down_proj.bias": bias(hidden)}
        return weights | {"stream_proj.weight": Weight((hidden, hidden), "writes")}

    def children(self) -> Any:
        """Return the position encoding, and the norms if this layer stores the shared weights."""
        own = self.weights_from == "own"
        return ((name, node) for name, node in super().children() if own or not isinstance(node, Norm))

    def words(self) -> dict[str, Words]:
        kind = "MHA" if self.heads == self.kv_heads else "MQA" if self.kv_heads == 1 else "GQA"
        heads = f"{self.heads}" if kind == "MHA" else f"{self.heads}/{self.kv_heads}"
        scale, function = scale_words(self.scale, self.head_dim), function_of(self.activation)
        sizes = [
            "heads",
            "kv_heads",
            "head_dim",
            "intermediate_size",
            "rank",
            "attention_rank",
            "number",
            "weights_from",
        ]
        data = {name: getattr(self, name) for name in sizes} | {"activation": function}
        adapted = [f"{n} of {what}" for n, what in ((self.rank, "gate and up"), (self.attention_rank, "q, k, v")) if n]
        again = ", again" if self.weights_from == "earlier" else ""
        summary = f"{self.number}{again}: {kind} {heads}, {FACTS[function].gated} {self.intermediate_size:,}"
        low = f", adapters of rank {' and '.join(adapted)}" if adapted else ""
        on = ALL_OF_IT
        if isinstance(self.position, Turning) and self.position.dim != self.head_dim:
            dim = self.position.dim
            on = Words(f" on {dim} dims", dim, f", on {dim} of {self.head_dim} dimensions")
        return {
            "shared block": Words(summary, data, f"number {summary}, head dim {self.head_dim}{scale.whole}{low}"),
            "scale": scale,
            "norm of shared block": inside(
                {"input": self.norm, "inner": self.inner_norm}, "", "the joined stream and between attention and units"
            ),
            **shared_words(None, self.position, on),
        }

    def biases(self) -> dict[str, Words]:
        return {"shared block": Words("shared block", self.bias, "gate, up and down of shared blocks")}

    def alike(self) -> Self:
        activation = function_of(self.activation)
        return msgspec.structs.replace(super().alike(), scale=plain_scale(self.scale), activation=activation)

    def letters(self, part: str = "") -> dict[str, int]:
        if part:
            return {}
        sizes = {"h": self.heads * self.head_dim, "k": self.kv_heads * self.head_dim, "f": self.intermediate_size}
        rank = self.attention_rank if self.rank is None else self.rank
        return sizes if rank is None else {**sizes, "r": rank}

    def share(self, devices: int) -> Self:
        heads = divided(self.heads, devices, "query heads")
        kv_heads = divided(self.kv_heads, devices, "key-value heads")
        units = divided(self.intermediate_size, devices, "units of the feed-forward")
        return msgspec.structs.replace(self, heads=heads, kv_heads=kv_heads, intermediate_size=units)

    def small(self, hidden: int) -> Self:
        kv_heads = min(self.kv_heads, 2)
        sizes = {"heads": kv_heads * min(self.heads // self.kv_heads, 2), "kv_heads": kv_heads}
        ranks = {name: getattr(self, name) and min(getattr(self, name), _FEW) for name in ("rank", "attention_rank")}
        fields = {"norm": self.norm.small(2 * hidden), "inner_norm": self.inner_norm.small(hidden), **sizes, **ranks}
        return msgspec.structs.replace(self, hidden_size=hidden, intermediate_size=2 * hidden, **fields)

    def slips(self) -> dict[str, Self]:
        other: Activation = "gelu_tanh" if function_of(self.activation) == "gelu" else "gelu"
        slips = {"scores not scaled": msgspec.structs.replace(self, scale=1.0)}
        slips["scores scaled by their width alone"] = msgspec.structs.replace(self, scale=self.head_dim**-0.5)
        slips["another activation"] = msgspec.structs.replace(self, activation=other)
        if isinstance(self.position, Rotary):
            slips["no RoPE"] = msgspec.structs.replace(self, position=None)
        return slips

    def misread(self) -> dict[str, Misread]:
        names = [f"{name}_{part}.weight" for name in "qkv" for part in ("proj", "adapter_down")]
        halves = self.hidden_size
        return {
            "stream and embedding exchanged in shared blocks": lambda own: {
                name: own[name].roll(halves, dims=1) for name in names if name in own
            }
        }

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        row, tokens = self.label, shape[:-1]
        embedded = Given(f"{path}.embedded", (FIRST,), shape, row, words="what the first layer reads", again=True)
        joined = Concat(f"{path}.joined", (source, embedded.id), (*tokens, self.read), row)
        attention = self._attention(path, joined.id, shape)
        units = self._feed_forward(path, attention[-1].id, shape)
        return (embedded, joined, *attention, *units, linear(self, "stream_proj", path, units[-1].id, shape, row))

    def _stored(self, operation: AnyOperation) -> AnyOperation:
        """Return the operation. If an earlier layer stores the shared weights, the result has no weights."""
        return operation if self.weights_from == "own" else msgspec.structs.replace(operation, weights=())

    def _adapter(self, name: str, path: str, source: str, inner: Sizes, **fields: Any) -> AnyOperation:
        """Return the operation of the second of the two matrices of a low-rank adapter.

        `name` is the projection to which the adapter belongs, such as "q".
        """
        return linear(self, f"{name}_adapter_up", path, source, inner, self.label, **fields)

    def _adapted(self, name: str, path: str, source: str, inner: Sizes, live_until: str = "") -> AnyOperation:
        """Return the operation that adds the outputs of a projection and of its adapter.

        `name` is the projection, such as "q", and `source` is the id of its output.
        """
        inputs = (source, f"{path}.{name}_adapter_up")
        return Add(f"{path}.{name}_adapted", inputs, inner, self.label, live_until=live_until)

    def _norm(self, name: str, path: str, source: str, shape: Sizes) -> list[AnyOperation]:
        program: Program = getattr(self, name).operations(f"{path}.{name}", source, shape)
        return [self._stored(operation) for operation in out_of(self.label, program)]

    def _attention(self, path: str, source: str, shape: Sizes) -> list[AnyOperation]:
        """Return the operations of the input norm, of attention, and of attention's output projection."""
        row, end, part, tokens = self.label, f"{path}.o_proj", self.shared_part, shape[:-1]
        program = self._norm("norm", path, source, (*tokens, self.read))
        read, inputs = program[-1].id, dict[str, str]()
        for name, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
            inner: Sizes = (*tokens, heads, self.head_dim)
            until = "" if self.attention_rank else end
            program.append(self._stored(linear(part, f"{name}_proj", path, read, inner, row, until)))
            if self.attention_rank is not None:
                projected = program[-1].id
                down = linear(self, f"{name}_adapter_down", path, read, (*tokens, self.attention_rank), row)
                program += (down, self._adapter(name, path, down.id, inner))
                program.append(self._adapted(name, path, projected, inner, end))
            inputs[name] = program[-1].id
        for name, heads in (("q", self.heads), ("k", self.kv_heads)):
            if isinstance(self.position, Turning):
                inner = (*tokens, heads, self.head_dim)
                fields: dict[str, Any] = {"rotary": self.position, "live_until": end if name == "q" else ""}
                program.append(Rotate(f"{path}.{name}_rotated", (inputs[name],), inner, row, **fields))
                inputs[name] = program[-1].id
        for name in "kv":
            seen: Sizes = ("B", "S", self.kv_heads, self.head_dim)
            program.append(CacheOperation(f"{path}.{name}_cached", (inputs[name],), seen, row, live_until=end))
            inputs[name] = program[-1].id
        scores = {"scale": self.scale, "query_dim": self.head_dim, "kv_heads": self.kv_heads}
        program += attend(path, (inputs["q"], inputs["k"], inputs["v"]), scores, self.heads, self.head_dim)
        return [*program, self._stored(linear(part, "o_proj", path, program[-1].id, shape, row))]

    def _feed_forward(self, path: str, source: str, shape: Sizes) -> list[AnyOperation]:
        """Return the operations of the inner norm and the feed-forward."""
        row, part, tokens = self.label, self.shared_part, shape[:-1]
        units: Sizes = (*tokens, self.intermediate_size)
        program = self._norm("inner_norm", path, source, shape)
        read = program[-1].id
        both: dict[str, Any] = {"fused": self.fused, "joined": self.fused}
        gate, up = (linear(part, f"{n}_proj", path, read, units, row, together=f"{path}.both", **both) for n in _UNITS)
        program.append(self._stored(gate))
        inputs = {"gate": gate.id, "up": up.id}
        if self.rank is not None:
            down = linear(self, "adapter_down", path, read, (*tokens, self.rank), row)
            fields: dict[str, Any] = {"together": f"{path}.both_adapters", **both}
            program += (down, *(self._adapter(name, path, down.id, units, **fields) for name in _UNITS))
        program.append(self._stored(up))
        if self.rank is not None:
            for name, projected in inputs.items():
                program.append(self._adapted(name, path, projected, units))
                inputs[name] = program[-1].id
        active = ActivationOperation(f"{path}.activated", (inputs["gate"],), units, row, function=self.activation)
        program += (active, Product(f"{path}.gated", (active.id, inputs["up"]), units, row))
        return [*program, self._stored(linear(part, "down_proj", path, program[-1].id, shape, row))]


_UNITS = ("gate", "up")
