"""The leaves of the module tree: linear maps, norms, activations. Each is built from its component's record."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..components import Activation, Arithmetic, LayerNorm, RMSNorm
from .registry import computes

VECTOR = 16
"""Bytes. Where rows begin between multiples of it, a product may sum them in another order (in fp32 an odd head's)."""


class LinearModule(nn.Module):
    """x·Wᵀ + b with W [out, in], rounded as the family's own code rounds it (see `components.Arithmetic`)."""

    def __init__(self, inputs: int, outputs: int, bias: bool, arithmetic: Arithmetic = "linear") -> None:
        super().__init__()
        # "conv1d": the shape is [out, in] as everywhere, but the memory lies [in, out], as GPT-2's addmm reads it:
        # a matrix product over the other memory order sums in another order (3e-5 to 1.6e-4 in fp32 logits).
        lies = arithmetic in ("conv1d", "conv1d_add")
        weight = torch.empty(inputs, outputs).t() if lies else torch.empty(outputs, inputs)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.arithmetic = arithmetic

    def forward(self, x: Tensor) -> Tensor:  # (…, in) -> (…, out)
        return multiply(x, self.weight, self.bias, self.arithmetic)


def kept_wide(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """What `nn.Module._apply` is given, for parameters that stay in fp32 where it would make them narrower."""

    def wide(parameter: Tensor) -> Tensor:
        moved = fn(parameter)
        narrow = moved.is_floating_point() and moved.dtype.itemsize < torch.float32.itemsize
        return parameter.to(device=moved.device, dtype=torch.float32) if narrow else moved

    return wide


class WideLinear(LinearModule):
    """A linear whose parameters stay in fp32 in a model of any dtype, and are multiplied in fp32 at least."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> WideLinear:
        super()._apply(kept_wide(fn), recurse)  # type: ignore[no-untyped-call]
        return self


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, arithmetic: Arithmetic) -> Tensor:
    """Return x (…, in) · weight [out, in] + bias, as `arithmetic` says.

    "conv1d" is the weight's memory order: over contiguous rows linear is GPT-2's addmm, on the matrix as it lies.
    """
    if arithmetic in ("matmul_add", "conv1d_add") and bias is not None:
        return x @ weight.T + bias
    if arithmetic == "conv1d":
        x = x.contiguous()
        if 1 in weight.shape and weight.t().is_contiguous():
            # A single row or column lies in either order, and the kernel is chosen by the strides that are told.
            weight = weight.as_strided(weight.shape, (1, weight.shape[0]))
    return F.linear(x, weight, bias)


class FusedLinears:
    """Several `LinearModule`s on one input as one matrix product, with their parameters as they are.

    The parameters become views of one matrix, made again whenever they were replaced (another dtype or device, new
    weights); in-place changes show through. Where gradients are needed, and in train mode, the matrix is concatenated
    every time, since a view's gradient would not reach the parameter, and whoever trains holds on to its memory. A
    linear that is no longer a plain one (an adapter in its place, a hook on it) is called for itself, and so are its
    neighbours. Without gradients a compiled model calls each, too.

    `groups`: the linears' rows come in so many equal groups, and the family's own matrix has the first group's rows of
    each linear, then the second's, and so on. Where a row lies shows only where a group's results are no whole
    `line`s of bytes: there the matrix is made so, every time, since its rows are no views for parameters. Elsewhere (in
    all models but odd ones) one linear's rows lie behind another's, as without groups.
    """

    def __init__(self, groups: int = 1, line: int = VECTOR) -> None:
        self.groups, self.line = groups, line
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def __call__(self, linears: Sequence[nn.Module], x: Tensor, limit: float | None = None) -> tuple[Tensor, ...]:
        """What each linear gives, `clipped`: (…, out), or (…, groups, out / groups) as it lies."""
        plain = [each for each in linears if type(each) is LinearModule and not each._forward_hooks]
        if len(plain) < len(linears) or any(each._forward_pre_hooks for each in plain):
            return tuple(clipped(each(x), limit) for each in linears)
        wide = [each.weight.shape[0] // self.groups * each.weight.element_size() for each in plain]
        if self.groups > 1 and any(each % self.line for each in wide):
            rows = [linear.weight.shape[0] // self.groups for linear in plain]
            weight, bias = self._concatenated(plain, self.groups)
            out = clipped(multiply(x, weight, bias, plain[0].arithmetic), limit)
            return torch.split(torch.unflatten(out, -1, (self.groups, -1)), rows, dim=-1)
        wanted = torch.is_grad_enabled() and any(p.requires_grad for linear in plain for p in linear.parameters())
        if wanted or plain[0].training:
            weight, bias = self._concatenated(plain)
        elif torch.compiler.is_compiling():  # a graph does not know where a tensor lies
            return tuple(clipped(each(x), limit) for each in linears)
        else:
            biases: list[Tensor] = [linear.bias for linear in plain if linear.bias is not None]
            if not (_are_rows([linear.weight for linear in plain], self.weight) and _are_rows(biases, self.bias)):
                self._fuse(plain)
            assert self.weight is not None
            weight, bias = self.weight, self.bias
        sizes = [linear.weight.shape[0] for linear in plain]
        return torch.split(clipped(multiply(x, weight, bias, plain[0].arithmetic), limit), sizes, dim=-1)

    @staticmethod
    def _concatenated(linears: Sequence[LinearModule], groups: int = 1) -> tuple[Tensor, Tensor | None]:
        """All rows of each linear together, or of each group."""

        def joined(parts: list[Tensor]) -> Tensor:
            if groups == 1:
                return torch.cat(parts)
            return torch.cat([torch.unflatten(part, 0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)

        if linears[0].arithmetic in ("conv1d", "conv1d_add"):
            weight = torch.cat([linear.weight.t() for linear in linears], dim=1).t()  # memory [in, out]
        else:
            weight = joined([linear.weight for linear in linears])
        biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
        return weight, joined(biases) if biases else None

    def _fuse(self, linears: Sequence[LinearModule]) -> None:
        """Make the matrix and let the parameters be views of it, so that nothing is held twice."""
        # Not as inference tensors, even when first used to generate: those could never be trained through again.
        with torch.inference_mode(False), torch.no_grad():
            self.weight, self.bias = self._concatenated(linears)
            start = 0
            for linear in linears:
                rows = linear.weight.shape[0]
                linear.weight.data = self.weight[start : start + rows]
                if self.bias is not None and linear.bias is not None:
                    linear.bias.data = self.bias[start : start + rows]
                start += rows


class StackedLinears:
    """Linears without biases, some side by side for each of several inputs, as one batched product.

    As with `FusedLinears` their parameters become views of one tensor, [inputs, in, out], where no gradient is needed.
    """

    def __init__(self) -> None:
        self.weight: Tensor | None = None

    def __call__(self, linears: Sequence[Sequence[nn.Module]], x: Tensor) -> Tensor:
        """(inputs, N, in) -> (inputs, N, out), one linear's results beside the other's."""
        rows = [[each.weight for each in row if type(each) is LinearModule] for row in linears]
        hooked = (each._forward_hooks or each._forward_pre_hooks for row in linears for each in row)
        if sum(map(len, rows)) < sum(map(len, linears)) or any(hooked):
            each_alone = zip(linears, x, strict=True)
            return torch.stack([torch.cat([each(given) for each in row], dim=-1) for row, given in each_alone])
        wanted = torch.is_grad_enabled() and any(weight.requires_grad for row in rows for weight in row)
        if wanted or torch.compiler.is_compiling():
            return torch.bmm(x, self._stacked(rows))
        if self.weight is None or any(
            mine.data_ptr() != weight.data_ptr() or mine.dtype != weight.dtype or mine.stride() != weight.stride()
            for mine, weight in self._views(rows, self.weight)
        ):
            with torch.inference_mode(False), torch.no_grad():
                self.weight = self._stacked(rows)
                for mine, weight in self._views(rows, self.weight):
                    weight.data = mine
        return torch.bmm(x, self.weight)

    @staticmethod
    def _stacked(rows: Sequence[Sequence[Tensor]]) -> Tensor:
        return torch.stack([torch.cat([weight.t() for weight in row], dim=1) for row in rows])

    @staticmethod
    def _views(rows: Sequence[Sequence[Tensor]], whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each part of the tensor, as a linear has it, beside that linear's weight."""
        for row, one in zip(rows, whole, strict=True):
            parts = torch.split(one, [len(weight) for weight in row], dim=1)
            yield from ((part.t(), weight) for part, weight in zip(parts, row, strict=True))


def _are_rows(parts: Sequence[Tensor], whole: Tensor | None) -> bool:
    """Whether `parts` are views of the rows of `whole`, one after the other from its first; none of no tensor."""
    if whole is None or not parts:
        return whole is None and not parts
    pointer, row = whole.data_ptr(), whole.stride(0) * whole.element_size()
    for part in parts:
        if part.data_ptr() != pointer or part.dtype != whole.dtype:
            return False
        pointer += part.shape[0] * row
    return True


class _GroupWeight(nn.Module):
    """The weight of one group of a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))


@computes(LayerNorm)
class LayerNormModule(nn.Module):
    """Over the last dimension."""

    def __init__(self, spec: LayerNorm) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(spec.size)) if spec.gain != "none" and not spec.apart else None
        self.bias = nn.Parameter(torch.empty(spec.size)) if spec.bias else None
        for group in range(spec.groups if spec.apart else 0):
            self.add_module(str(group), _GroupWeight(spec.size // spec.groups))

    def forward(self, x: Tensor) -> Tensor:
        spec = self.spec
        weight = torch.cat([*self.parameters()]) if spec.apart else self.weight
        factor = None if weight is None else spec.factor(weight)
        if spec.cast == "float32":
            return self._written_out(x, factor)
        if spec.cast == "float32 kernel":
            wide = torch.promote_types(x.dtype, torch.float32)
            parts = (each if each is None else each.to(wide) for each in (factor, self.bias))
            return self._kernel(x.to(wide), *parts).to(x.dtype)
        return self._kernel(x, factor, self.bias)

    def _kernel(self, x: Tensor, factor: Tensor | None, bias: Tensor | None) -> Tensor:
        spec = self.spec
        if spec.groups == 1:
            return F.layer_norm(x, (spec.size,), factor, bias, spec.eps)
        # transformers has a norm for each head, and torch's kernel no two weights.
        width = spec.size // spec.groups
        none = (None,) * spec.groups
        parts = (none if each is None else torch.split(each, width) for each in (factor, bias))
        rows = zip(torch.split(x, width, dim=-1), *parts, strict=True)
        return torch.cat([F.layer_norm(row, (width,), gain, shift, spec.eps) for row, gain, shift in rows], dim=-1)

    def _written_out(self, x: Tensor, factor: Tensor | None) -> Tensor:
        """As transformers' CohereLayerNorm."""
        wide = torch.promote_types(x.dtype, torch.float32)
        rows = torch.unflatten(x.to(wide), -1, (self.spec.groups, -1))
        rows = rows - rows.mean(-1, keepdim=True)
        normed = (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self.spec.eps)).flatten(-2)
        normed = normed if factor is None else factor.to(wide) * normed
        return (normed if self.bias is None else normed + self.bias.to(wide)).to(x.dtype)


@computes(RMSNorm)
class RMSNormModule(nn.Module):
    """Over the last dimension, in fp32 at least; see `components.RMSNorm` for `cast`.

    Not F.rms_norm: it keeps fp32 until after the weight, which is 0.17 to 1.0 off in bf16 logits for llama.
    """

    def __init__(self, spec: RMSNorm) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(spec.size)) if spec.gain != "none" else None

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Of x, and in its dtype; or in another, to which it returns where x is wider."""
        dtype = x.dtype if dtype is None else dtype
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide if self.spec.groups == 1 else torch.unflatten(wide, -1, (self.spec.groups, -1))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.spec.eps)
        wide = wide if self.spec.groups == 1 else wide.flatten(-2)
        cast_first = self.spec.cast == "before_weight"
        normed = wide.to(dtype) if cast_first else wide
        if self.weight is None:
            return normed.to(dtype)
        # 1 + weight is as wide as what it multiplies.
        factor = self.weight if self.spec.gain == "weight" else self.spec.factor(self.weight.to(normed.dtype))
        if not torch.is_grad_enabled():  # in place, which a gradient of the weight would not survive
            return normed.mul_(factor).to(dtype)
        return (factor * normed).to(dtype)


def capped(x: Tensor, limit: float | None) -> Tensor:
    """limit · tanh(x / limit), as transformers' Gemma 2 writes it; x where there is no limit.

    Where no gradient is wanted it is made in the place of x, which nobody else may hold.
    """
    if limit is None:
        return x
    return torch.tanh(x / limit) * limit if torch.is_grad_enabled() else x.div_(limit).tanh_().mul_(limit)


def clipped(x: Tensor, limit: float | None) -> Tensor:
    """x, no further than a limit from 0."""
    return x if limit is None else x.clamp(-limit, limit)


def _gelu_new(x: Tensor) -> Tensor:
    """The tanh approximation as transformers' NewGELUActivation writes it; F.gelu rounds otherwise."""
    # In place as far as a gradient allows: the same roundings, with four tensors fewer.
    return 0.5 * x * (1.0 + torch.pow(x, 3.0).mul_(0.044715).add_(x).mul_(math.sqrt(2.0 / math.pi)).tanh_())


def _gelu_bloom(x: Tensor) -> Tensor:
    """The tanh approximation as transformers' bloom_gelu_forward writes it."""
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def _gelu_python(x: Tensor) -> Tensor:
    """x·Φ(x) as transformers' GELUActivation writes it out for its old checkpoints."""
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def _gelu_fast(x: Tensor) -> Tensor:
    """The tanh approximation as transformers' FastGELUActivation writes it."""
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def _laplace(x: Tensor) -> Tensor:
    """The normal distribution's Φ((x - μ) / σ), with which MEGA (2209.10655) comes near to the square of ReLU."""
    return 0.5 * (1.0 + torch.erf((x - 0.707107).div(0.282095 * math.sqrt(2.0))))


def _quick_gelu(x: Tensor) -> Tensor:
    """x·σ(1.702 x)."""
    return x * torch.sigmoid(1.702 * x)


def _gelu_10(x: Tensor) -> Tensor:
    """x·Φ(x), no further than 10 from 0 (2004.09602)."""
    return F.gelu(x).clip(-10, 10)


def _relu2(x: Tensor) -> Tensor:
    """max(0, x)² (Primer, 2109.08668)."""
    return F.relu(x).square()


def _sqrtsoftplus(x: Tensor) -> Tensor:
    """√log(1 + eˣ)."""
    return F.softplus(x).sqrt()


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_python": _gelu_python,
    "gelu_new": _gelu_new,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_bloom": _gelu_bloom,
    "gelu_fast": _gelu_fast,
    "gelu_10": _gelu_10,
    "quick_gelu": _quick_gelu,
    "silu": F.silu,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "relu": F.relu,
    "relu2": _relu2,
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "laplace": _laplace,
    "sqrtsoftplus": _sqrtsoftplus,
    "linear": torch.clone,  # a tensor of its own, since what comes after may write into it
}


class _Xielu(nn.Module):
    """x² · softplus(α) + βx above 0 and (eˣ - 1 - x) · (β + softplus(α')) + βx below it (2411.13010). Two of its
    numbers are not trained.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n, self.beta, self.eps = (nn.Parameter(torch.empty(1)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        beta, eps = self.beta.detach(), self.eps.detach()
        above, below = F.softplus(self.alpha_p), beta + F.softplus(self.alpha_n)
        positive = above * x * x + beta * x
        negative = (torch.expm1(torch.min(x, eps)) - x) * below + beta * x
        return torch.where(x > 0, positive, negative)


def activation_of(name: Activation) -> Callable[[Tensor], Tensor]:
    """What computes an activation: a function, or a module with the parameters that it has."""
    return _Xielu() if name == "xielu" else ACTIVATIONS[name]
