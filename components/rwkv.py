"""RWKV's time mixing and channel mixing, which read a token and the previous token."""

import math
from collections.abc import Iterator, Sequence
from typing import Self

import msgspec

from .base import Component, Logs, Misread, Mixer, Size, Weight, divided
from .operations import ActivationOperation, AnyOperation, Blend, Pairs, Product, Program, Scan, Sizes, linear
from .words import Words

__all__ = ["ChannelMixing", "TimeMixing"]


class TimeMixing(Mixer, Component, frozen=True):
    """A weighted mean of the values of all tokens so far (RWKV-4, Peng et al. 2305.13048). A token has the weight
    e^key, which decays with every later step. The current token's weight has an additional factor e^bonus:

        a ← e^(−e^decay) ⊙ a + e^k ⊙ v,  b ← e^(−e^decay) ⊙ b + e^k,  y = (a + e^(bonus + k) ⊙ v) / (b + e^(bonus + k))

    where y uses the a and b of the previous token. k, v and the gate r are projections of μ ⊙ x + (1 − μ) ⊙ x'. x' is
    the input of the previous token. μ has one number per column, and differs between the three. y is multiplied by
    σ(r). The state consists of a and b, both divided by e^m for the largest exponent m, of m itself, and of x'. It is
    in at least fp32, except x'.
    """

    label = "recurrence"
    slot = "recurrence"
    computed_in = ".rwkv"
    described = ("inner",)

    hidden_size: Size
    """The width of the residual stream."""
    inner: Size
    """The number of channels of the recurrence."""

    def weights(self) -> dict[str, Weight]:
        weights = {"decay": Weight((self.inner,), "inner", Logs(math.exp(-5), math.exp(3)))}
        weights["bonus"] = Weight((self.inner,), "inner", math.log(0.3))
        weights |= _read(self.hidden_size, {"k": self.inner, "v": self.inner, "r": self.inner})
        return weights | {"o_proj.weight": Weight((self.hidden_size, self.inner), "writes")}

    def words(self) -> dict[str, Words]:
        summary = f"RWKV, {self.inner:,} channels"
        return {"recurrence": Words(summary, {"kind": "RWKV", "inner": self.inner}, f"{summary}, each 3 numbers")}

    def letters(self, part: str = "") -> dict[str, int]:
        return {} if part else {"i": self.inner}

    def share(self, devices: int) -> Self:
        return msgspec.structs.replace(self, inner=divided(self.inner, devices, "channels of the recurrence"))

    def small(self, hidden: int) -> Self:
        return msgspec.structs.replace(self, hidden_size=hidden, inner=min(self.inner, 2 * hidden))

    def misread(self) -> dict[str, Misread]:
        return {
            "logarithms of decays taken for decays": lambda own: {"decay": own["decay"].exp()},
            "own token counted as any other": lambda own: {"bonus": own["bonus"] * 0},
            **_misread_mixes(self),
        }

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        row, inner, end = "recurrence", ("B", "T", self.inner), f"{path}.o_proj"
        program = list(_blended(self, path, source, shape, row, "kvr", f"{path}.opened"))
        k, v, r = (linear(self, f"{n}_proj", path, f"{path}.{n}_mixed", inner, row, end) for n in "kvr")
        opened = ActivationOperation(f"{path}.opened", (r.id,), inner, row, function="sigmoid", live_until=end)
        scan = Scan(
            f"{path}.mean",
            (k.id, v.id),
            inner,
            row,
            tuple((name, (self.inner,)) for name in ("decay", "bonus")),
            state=(self.inner, 3),
            title="weighted mean",
            formula="(a + e^(bonus + k) v) / (b + e^(bonus + k)), a ← e^(−w) a + e^k v, b ← e^(−w) b + e^k",
            saved=0,
            wide=True,
            theirs=3 * self.inner,
            again=True,
        )
        product = Product(f"{path}.gated", (opened.id, scan.id), inner, row)
        return (*program, k, v, r, opened, scan, product, linear(self, "o_proj", path, product.id, shape, row))


class ChannelMixing(Mixer, Component, frozen=True):
    """σ(gate_proj(x_g)) ⊙ down_proj(relu(up_proj(x_u))²) (RWKV-4, Peng et al. 2305.13048).

    x_g and x_u are both of the form μ ⊙ x + (1 − μ) ⊙ x', where x' is the input of the previous token. μ has one
    element per column, and differs between x_g and x_u.
    """

    label = "feed-forward"
    slot = "channel_mixing"
    computed_in = ".rwkv"
    described = ("intermediate_size",)

    hidden_size: Size
    """The width of the residual stream."""
    intermediate_size: Size
    """The number of hidden units."""

    @property
    def aspect(self) -> str:
        return "feed-forward"

    def weights(self) -> dict[str, Weight]:
        weights = _read(self.hidden_size, {"up": self.intermediate_size, "gate": self.hidden_size})
        return weights | {"down_proj.weight": Weight((self.hidden_size, self.intermediate_size), "writes")}

    def words(self) -> dict[str, Words]:
        width = self.intermediate_size
        data = {"kind": "channel mixing", "width": width}
        whole = f"channel mixing, relu2, {width:,}"
        return {"feed-forward": Words(f"channel mixing {width:,}", data, whole), "activation": Words("relu²", "relu2")}

    def letters(self, part: str = "") -> dict[str, int]:
        return {} if part else {"f": self.intermediate_size}

    def share(self, devices: int) -> Self:
        units = divided(self.intermediate_size, devices, "units of the feed-forward")
        return msgspec.structs.replace(self, intermediate_size=units)

    def small(self, hidden: int) -> Self:
        return msgspec.structs.replace(self, hidden_size=hidden, intermediate_size=2 * hidden)

    def misread(self) -> dict[str, Misread]:
        return _misread_mixes(self)

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        row, inner, end = "feed-forward", (*shape[:-1], self.intermediate_size), f"{path}.gated"
        program = list(_blended(self, path, source, shape, row, ("up", "gate"), end))
        up = linear(self, "up_proj", path, f"{path}.up_mixed", inner, row)
        active = ActivationOperation(f"{path}.activated", (up.id,), inner, row, function="relu2")
        down = linear(self, "down_proj", path, active.id, shape, row, end)
        gate = linear(self, "gate_proj", path, f"{path}.gate_mixed", shape, row)
        opened = ActivationOperation(f"{path}.opened", (gate.id,), shape, row, function="sigmoid", live_until=end)
        return (*program, up, active, down, gate, opened, Product(end, (opened.id, down.id), shape, row))


def _read(hidden: int, widths: dict[str, int]) -> dict[str, Weight]:
    """Return the parameters of projections of μ ⊙ x + (1 − μ) ⊙ x': a vector μ and a matrix for every projection.

    `widths` has the number of outputs of every projection, by name.
    """
    mixes = {f"{name}_mix": Weight((hidden,), "columns", 0.5) for name in widths}
    return mixes | {f"{name}_proj.weight": Weight((size, hidden), "reads") for name, size in widths.items()}


def _blended(
    node: Component, path: str, source: str, shape: Sizes, row: str, names: Sequence[str], live_until: str
) -> Iterator[AnyOperation]:
    """Yield the operations that compute μ ⊙ x + (1 − μ) ⊙ x', the input of every projection in `names`.

    x is the input of the current token, and x' that of the previous token.
    """
    pairs = Pairs(f"{path}.before", (source,), (*shape[:-1], 2, shape[-1]), row)
    yield pairs
    for name in names:
        weights = ((f"{name}_mix", node.shapes()[f"{name}_mix"]),)
        yield Blend(f"{path}.{name}_mixed", (pairs.id,), shape, row, weights, live_until=live_until)


def _misread_mixes(node: Component) -> dict[str, Misread]:
    names = [name for name, weight in node.weights().items() if weight.role == "columns"]
    return {
        "the token before left out": lambda own: {name: own[name] * 0 + 1 for name in names},
        "a token taken for the one before": lambda own: {name: 1 - own[name] for name in names},
    }
