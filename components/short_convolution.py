"""Short causal convolutions."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import msgspec

from .base import Component, Misread, Mixer, Size, Weight, bias, divided
from .operations import AnyOperation, Convolve, Product, Program, Sizes, linear
from .words import Words

__all__ = ["ShortConvolution"]


class ShortConvolution(Mixer, Component, frozen=True):
    """out(c ⊙ conv(b ⊙ x)), where b, c and x are projections of the input, and the convolution is causal (LFM2, Liquid
    AI 2511.23404). The projections are named before_proj (b), behind_proj (c) and in_proj (x). One matrix product
    computes them, in this order.
    """

    label = "convolution"
    slot = "convolution"
    computed_in = ".short_convolution"
    described = ("bias",)
    forgotten: ClassVar[dict[str, str]] = {"bias": "biases of short convolutions dropped"}

    hidden_size: Size
    """The width of the residual stream."""
    channels: Size
    """The width of b, c and x."""
    kernel: Size
    """The length of the convolution's kernel, in tokens. Every channel has its own kernel."""
    bias: bool = False
    """Whether all linear layers and the convolution have a bias."""

    def weights(self) -> dict[str, Weight]:
        inner = Weight((self.channels, self.hidden_size), "reads")
        weights = {f"{name}.weight": inner for name in _READ}
        weights["convolved.weight"] = Weight((self.channels, self.kernel), "kernel")
        weights["o_proj.weight"] = Weight((self.hidden_size, self.channels), "writes")
        if self.bias:
            weights |= {f"{name}.bias": bias(self.channels) for name in (*_READ, "convolved")}
            weights["o_proj.bias"] = bias(self.hidden_size)
        return weights

    def words(self) -> dict[str, Words]:
        data = {"kind": "ShortConvolution", "channels": self.channels, "kernel": self.kernel}
        return {
            "convolution": Words(
                f"gated, {self.kernel} tokens", data, f"gated, {self.channels:,} channels, {self.kernel} tokens"
            )
        }

    def biases(self) -> dict[str, Words]:
        return {"convolution": Words("convolution", self.bias)}

    def share(self, devices: int) -> Self:
        return msgspec.structs.replace(self, channels=divided(self.channels, devices, "channels of the convolution"))

    def small(self, hidden: int) -> Self:
        return msgspec.structs.replace(self, hidden_size=hidden, channels=hidden)

    def misread(self) -> dict[str, Misread]:
        def gates(own: Mapping[str, Any]) -> dict[str, Any]:
            """Exchange the parameters of the projections b and c, as a faulty conversion may do."""
            names = {"before_proj": "behind_proj", "behind_proj": "before_proj"}
            return {f"{names[n]}.{w}": own[f"{n}.{w}"] for n in names for w in ("weight", "bias") if f"{n}.{w}" in own}

        return {"gates of short convolutions swapped": gates, **misread_kernels("convolved")}

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        inner: Sizes = (*shape[:-1], self.channels)
        end = f"{path}.o_proj"
        together: dict[str, Any] = {"together": f"{path}.bcx", "fused": True, "live_until": end}
        b, c, x = (linear(self, name, path, source, inner, "convolution", **together) for name in _READ)
        gated = Product(f"{path}.gated", (b.id, x.id), inner, "convolution", live_until=end)
        convolved = convolve(self, "convolved", path, gated.id, inner, "convolution", live_until=end)
        last = Product(f"{path}.gated_again", (c.id, convolved.id), inner, "convolution")
        return b, x, c, gated, convolved, last, linear(self, "o_proj", path, last.id, shape, "convolution")


_READ = ("before_proj", "behind_proj", "in_proj")


def misread_kernels(*names: str) -> dict[str, Misread]:
    """Return mistakes in reading convolution kernels, as name of the mistake -> function (see `Component.misread`).

    A kernel may be reversed, or shifted by one token. `names` are the names of the convolutions in their component.
    """
    return {
        "kernels of convolutions back to front": lambda own: {
            f"{n}.weight": own[f"{n}.weight"].flip(-1) for n in names
        },
        "convolutions off by one token": lambda own: {f"{n}.weight": own[f"{n}.weight"].roll(1, -1) for n in names},
    }


def convolve(node: Component, name: str, path: str, source: str, shape: Sizes, row: str, **fields: Any) -> AnyOperation:
    """Return the operation of a causal convolution of a component.

    Args:
        node: The component.
        name: The name of the convolution in the component, such as "x_conv".
        path: The name of the component's module in the block.
        source: The id of the convolution's input.
        shape: The shape of the result.
        row: See `Operation`.
        fields: Further fields of `Convolve`.
    """
    own = tuple((key.partition(".")[2], size) for key, size in node.shapes().items() if key.startswith(f"{name}."))
    return Convolve(f"{path}.{name}", (source,), shape, row, own, width=dict(own)["weight"][1], **fields)
