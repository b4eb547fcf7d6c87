"""Basic torch modules: linear maps, norms and activation functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..components import Activation, Arithmetic, LayerNorm, RMSNorm
from .registry import computes

VECTOR = 16
"""A size in bytes. If the rows of a matrix do not start at multiples of it, matrix products may sum in another order.
An example is an fp32 model with an odd number of heads."""


class LinearModule(nn.Module):
    """A linear map, x·Wᵀ + b with W [out, in], rounded as in the family's own code (see `components.Arithmetic`)."""

    def __init__(self, inputs: int, outputs: int, bias: bool, arithmetic: Arithmetic = "linear") -> None:
        super().__init__()
        # "conv1d": the shape is [out, in] as everywhere, but the memory order is [in, out], as for GPT-2's addmm. With
        # the other memory order, a matrix product sums in another order (3e-5 to 1.6e-4 in fp32 logits).
        transposed = arithmetic in ("conv1d", "conv1d_add")
        weight = torch.empty(inputs, outputs).t() if transposed else torch.empty(outputs, inputs)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.arithmetic = arithmetic

    def forward(self, x: Tensor) -> Tensor:  # (…, in) -> (…, out)
        return multiply(x, self.weight, self.bias, self.arithmetic)


def at_least_float32(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Wrap a function for `nn.Module._apply`, such as a conversion to bf16, so that its results are at least fp32."""

    def wide(parameter: Tensor) -> Tensor:
        moved = fn(parameter)
        narrow = moved.is_floating_point() and moved.dtype.itemsize < torch.float32.itemsize
        return parameter.to(device=moved.device, dtype=torch.float32) if narrow else moved

    return wide


class WideLinear(LinearModule):
    """A linear whose parameters stay in fp32 in a model of any dtype, and which multiplies in fp32 or wider."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> WideLinear:
        super()._apply(at_least_float32(fn), recurse)  # type: ignore[no-untyped-call]
        return self


class PromotedLinear(LinearModule):
    """A linear that converts its parameters to the dtype of its input, which may be wider."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return multiply(x, self.weight.to(x.dtype), bias, self.arithmetic)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, arithmetic: Arithmetic) -> Tensor:
    """Return x (…, in) · weight [out, in] + bias, rounded according to `arithmetic`.

    For "conv1d", the weight has the memory order [in, out], and F.linear on contiguous rows equals GPT-2's addmm.
    """
    if arithmetic in ("matmul_add", "conv1d_add") and bias is not None:
        return x @ weight.T + bias
    if arithmetic == "conv1d":
        x = x.contiguous()
        if 1 in weight.shape and weight.t().is_contiguous():
            # A single row or column has both memory orders, and torch selects the kernel by the strides.
            weight = weight.as_strided(weight.shape, (1, weight.shape[0]))
    return F.linear(x, weight, bias)


class FusedLinears:
    """Several `LinearModule`s that are applied to one input as one matrix product.

    The parameters become views of one matrix, in which changes of the parameters in place are visible. It is built
    again when parameters are replaced (another dtype or device, new weights). With gradients and in train mode, the
    matrix is concatenated in every call: the gradient of a view would not reach the parameter, and optimisers keep
    references to a parameter's memory. If a linear was replaced by an adapter or has hooks, all linears are called one
    by one. A compiled model without gradients calls them one by one, too.

    Args:
        groups: the number of groups of rows in the fused matrix of the family's checkpoints. This matrix has first the
            rows of the first group of every linear, then those of the second group, and so on.
        line: a number of bytes. Usually the outputs of one group for one token fill a multiple of it. Then the order of
            rows does not matter, and the linears are concatenated one after the other. In the few models where they do
            not, the order changes the rounding. The matrix is then built in the family's order in every call, because
            parameters cannot be views of it.
    """

    def __init__(self, groups: int = 1, line: int = VECTOR) -> None:
        self.groups, self.line = groups, line
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def __call__(self, linears: Sequence[nn.Module], x: Tensor, limit: float | None = None) -> tuple[Tensor, ...]:
        """Return the output of every linear for x, clamped to [-limit, limit] if there is a limit.

        Outputs are (…, out), or (…, groups, out / groups) if the matrix is ordered by group.
        """
        plain = [linear for linear in linears if type(linear) is LinearModule and not linear._forward_hooks]
        if len(plain) < len(linears) or any(linear._forward_pre_hooks for linear in plain):
            return tuple(clipped(linear(x), limit) for linear in linears)
        sizes = [linear.weight.shape[0] // self.groups * linear.weight.element_size() for linear in plain]
        if self.groups > 1 and any(size % self.line for size in sizes):
            rows = [linear.weight.shape[0] // self.groups for linear in plain]
            weight, bias = self._concatenated(plain, self.groups)
            out = clipped(multiply(x, weight, bias, plain[0].arithmetic), limit)
            return torch.split(torch.unflatten(out, -1, (self.groups, -1)), rows, dim=-1)
        wanted = torch.is_grad_enabled() and any(p.requires_grad for linear in plain for p in linear.parameters())
        if wanted or plain[0].training:
            weight, bias = self._concatenated(plain)
        elif torch.compiler.is_compiling():  # a compiled graph cannot check memory addresses
            return tuple(clipped(linear(x), limit) for linear in linears)
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
        """Return the concatenated weights and biases, ordered by linear, or by group if there are several groups."""

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
        """Build the fused matrix, and make the parameters views of it, so that no weight is stored twice."""
        # Not in inference mode, since inference tensors could never be trained.
        with torch.inference_mode(False), torch.no_grad():
            self.weight, self.bias = self._concatenated(linears)
            self.split(linears, self.weight, self.bias)

    @staticmethod
    def split(linears: Sequence[LinearModule], weight: Tensor, bias: Tensor | None) -> None:
        """Make the parameters views of consecutive rows of a weight and a bias that have their values."""
        start = 0
        for linear in linears:
            rows = linear.weight.shape[0]
            linear.weight.data = weight[start : start + rows]
            if bias is not None and linear.bias is not None:
                linear.bias.data = bias[start : start + rows]
            start += rows


class StackedLinears:
    """Linears without biases for a list of inputs, computed as one batched matrix product.

    Every input, such as that of one expert, has one linear or several. As in `FusedLinears`, the parameters become
    views of one tensor [inputs, in, out] if no gradient is needed.
    """

    def __init__(self) -> None:
        self.weight: Tensor | None = None

    def __call__(self, linears: Sequence[Sequence[nn.Module]], x: Tensor) -> Tensor:
        """Map x (inputs, N, in) to the concatenated outputs (inputs, N, out) of the linears of every input."""
        rows = [[linear.weight for linear in row if type(linear) is LinearModule] for row in linears]
        hooked = (linear._forward_hooks or linear._forward_pre_hooks for row in linears for linear in row)
        if sum(map(len, rows)) < sum(map(len, linears)) or any(hooked):
            pairs = zip(linears, x, strict=True)
            return torch.stack([torch.cat([linear(row_input) for linear in row], dim=-1) for row, row_input in pairs])
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
        """Yield, for every linear, its part of the tensor `whole` as a view in the shape of its weight, and the weight.

        `rows` has the weights of the linears of every input, and `whole` is what `_stacked` made of them.
        """
        for row, one in zip(rows, whole, strict=True):
            parts = torch.split(one, [len(weight) for weight in row], dim=1)
            yield from ((part.t(), weight) for part, weight in zip(parts, row, strict=True))


class GatheredLinears:
    """Linears of several experts, of which every row of the input has the number of its own.

    The parameters become views of one tensor [experts, out, in], from which the weights of the chosen experts are
    copied. The host does not need to know which these are.
    """

    def __init__(self) -> None:
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    @staticmethod
    def accepts(linears: Sequence[nn.Module]) -> bool:
        """Return whether these linears of one expert can be stacked with those of others."""
        return all(
            type(linear) is LinearModule and not linear._forward_hooks and not linear._forward_pre_hooks
            for linear in linears
        )

    def __call__(
        self, linears: Sequence[Sequence[Any]], fused: Sequence[FusedLinears | None], numbers: Tensor, x: Tensor
    ) -> Tensor:
        """Return the concatenated outputs (N, out) of the linears of the experts `numbers` (N,) for x (N, in).

        Args:
            linears: for every expert, its linears.
            fused: for every expert, the object that computes its linears as one product, if there is one.
            numbers: the number of the expert of every row.
            x: the input.
        """
        if self.weight is None or not all(map(self._views, range(len(linears)), linears)):
            self._stack(linears, fused)
        assert self.weight is not None
        out = torch.bmm(self.weight.index_select(0, numbers), x[..., None])[..., 0]
        if self.bias is None:
            return out
        return out + self.bias.index_select(0, numbers)

    def _views(self, number: int, linears: Sequence[LinearModule]) -> bool:
        """Return whether the parameters of one expert are views of the stacked tensors."""
        biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
        whole = None if self.weight is None else self.weight[number]
        bias = None if self.bias is None else self.bias[number]
        return _are_rows([linear.weight for linear in linears], whole) and _are_rows(biases, bias)

    def _stack(self, linears: Sequence[Sequence[LinearModule]], fused: Sequence[FusedLinears | None]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            parts = [FusedLinears._concatenated(row) for row in linears]
            weights, biases = zip(*parts, strict=True)
            turned = linears[0][0].arithmetic in ("conv1d", "conv1d_add")
            stacked = (
                torch.stack([weight.t() for weight in weights]).transpose(1, 2) if turned else torch.stack(weights)
            )
            self.weight, self.bias = stacked, None if biases[0] is None else torch.stack(biases)
            for number, (row, whole) in enumerate(zip(linears, fused, strict=True)):
                bias = None if self.bias is None else self.bias[number]
                FusedLinears.split(row, self.weight[number], bias)
                if whole is not None:
                    whole.weight, whole.bias = self.weight[number], bias


def _are_rows(parts: Sequence[Tensor], whole: Tensor | None) -> bool:
    """Return whether `parts` are views of consecutive rows of `whole`, starting with its first row.

    It is also true if there are no parts and `whole` is None.
    """
    if whole is None or not parts:
        return whole is None and not parts
    pointer, row = whole.data_ptr(), whole.stride(0) * whole.element_size()
    for part in parts:
        if part.data_ptr() != pointer or part.dtype != whole.dtype:
            return False
        pointer += part.shape[0] * row
    return True


class _GroupWeight(nn.Module):
    """The weight of one group of a LayerNorm, if the checkpoint stores one tensor per group."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))


@computes(LayerNorm)
class LayerNormModule(nn.Module):
    """LayerNorm over the last dimension; see `components.LayerNorm`."""

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
            parts = (tensor if tensor is None else tensor.to(wide) for tensor in (factor, self.bias))
            return self._kernel(x.to(wide), *parts).to(x.dtype)
        return self._kernel(x, factor, self.bias)

    def _kernel(self, x: Tensor, factor: Tensor | None, bias: Tensor | None) -> Tensor:
        spec = self.spec
        if spec.groups == 1:
            return F.layer_norm(x, (spec.size,), factor, bias, spec.eps)
        # transformers has one norm per head, and torch's kernel takes only one weight.
        width = spec.size // spec.groups
        none = (None,) * spec.groups
        parts = (none if tensor is None else torch.split(tensor, width) for tensor in (factor, bias))
        rows = zip(torch.split(x, width, dim=-1), *parts, strict=True)
        return torch.cat([F.layer_norm(row, (width,), gain, shift, spec.eps) for row, gain, shift in rows], dim=-1)

    def _written_out(self, x: Tensor, factor: Tensor | None) -> Tensor:
        """Compute the norm with the operations of transformers' CohereLayerNorm, which round differently."""
        wide = torch.promote_types(x.dtype, torch.float32)
        rows = torch.unflatten(x.to(wide), -1, (self.spec.groups, -1))
        rows = rows - rows.mean(-1, keepdim=True)
        normed = (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self.spec.eps)).flatten(-2)
        normed = normed if factor is None else factor.to(wide) * normed
        return (normed if self.bias is None else normed + self.bias.to(wide)).to(x.dtype)


_fused = ContextVar("_fused", default=False)


@contextmanager
def fused_norms() -> Iterator[None]:
    """Compute RMSNorms in this block with torch's fused kernel, which launches 2 to 4 kernels instead of 8.

    The sum of squares then has another order. In fp32, the results differ by rounding; in bf16, most are the same.
    """
    before = _fused.set(True)
    try:
        yield
    finally:
        _fused.reset(before)


@computes(RMSNorm)
class RMSNormModule(nn.Module):
    """RMSNorm over the last dimension, in fp32 or wider; see `components.RMSNorm` for `cast`.

    F.rms_norm with a weight is not used: it multiplies in fp32, which changes bf16 logits of llama by 0.17 to 1.0.
    """

    def __init__(self, spec: RMSNorm) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(spec.size)) if spec.gain != "none" else None

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return x normalised, in the dtype of x or in `dtype`."""
        dtype = x.dtype if dtype is None else dtype
        cast_first = self.spec.cast == "before_weight"
        if not torch.compiler.is_compiling() and _fused.get() and self.spec.groups == 1:
            whole = x if cast_first and dtype == x.dtype else x.to(torch.promote_types(x.dtype, torch.float32))
            return self._weighted(F.rms_norm(whole, (x.shape[-1],), None, self.spec.eps), dtype)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide if self.spec.groups == 1 else torch.unflatten(wide, -1, (self.spec.groups, -1))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.spec.eps)
        wide = wide if self.spec.groups == 1 else wide.flatten(-2)
        return self._weighted(wide.to(dtype) if cast_first else wide, dtype)

    def _weighted(self, normed: Tensor, dtype: torch.dtype) -> Tensor:
        """Return normalised vectors, which may be overwritten, times the weight, in `dtype`."""
        if self.weight is None:
            return normed.to(dtype)
        # 1 + weight has the dtype of the vectors that it multiplies.
        factor = self.weight if self.spec.gain == "weight" else self.spec.factor(self.weight.to(normed.dtype))
        if not torch.is_grad_enabled():  # in place, which is impossible if the weight needs a gradient
            return normed.mul_(factor).to(dtype)
        return (factor * normed).to(dtype)


def capped(x: Tensor, limit: float | None) -> Tensor:
    """Return limit · tanh(x / limit), as in transformers' Gemma 2, or x if the limit is None.

    Without gradients it overwrites x, so the caller must not use x afterwards.
    """
    if limit is None:
        return x
    return torch.tanh(x / limit) * limit if torch.is_grad_enabled() else x.div_(limit).tanh_().mul_(limit)


def clipped(x: Tensor, limit: float | None) -> Tensor:
    """Return x clamped to [-limit, limit], or x if the limit is None."""
    return x if limit is None else x.clamp(-limit, limit)


def _gelu_new(x: Tensor) -> Tensor:
    """Compute the tanh approximation of GELU as transformers' NewGELUActivation, which rounds unlike F.gelu."""
    # In place where gradients allow it. This saves four tensors and rounds the same.
    return 0.5 * x * (1.0 + torch.pow(x, 3.0).mul_(0.044715).add_(x).mul_(math.sqrt(2.0 / math.pi)).tanh_())


def _gelu_bloom(x: Tensor) -> Tensor:
    """Compute the tanh approximation of GELU as transformers' bloom_gelu_forward."""
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def _gelu_python(x: Tensor) -> Tensor:
    """Compute x·Φ(x) as transformers' GELUActivation does for old checkpoints."""
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def _gelu_fast(x: Tensor) -> Tensor:
    """Compute the tanh approximation of GELU as transformers' FastGELUActivation."""
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def _laplace(x: Tensor) -> Tensor:
    """Compute Φ((x - μ) / σ), MEGA's approximation of squared ReLU (2209.10655). Φ is the normal distribution's CDF."""
    return 0.5 * (1.0 + torch.erf((x - 0.707107).div(0.282095 * math.sqrt(2.0))))


def _quick_gelu(x: Tensor) -> Tensor:
    """Compute x·σ(1.702 x)."""
    return x * torch.sigmoid(1.702 * x)


def _gelu_10(x: Tensor) -> Tensor:
    """Compute x·Φ(x), clamped to [-10, 10] (2004.09602)."""
    return F.gelu(x).clip(-10, 10)


def _relu2(x: Tensor) -> Tensor:
    """Compute max(0, x)² (Primer, 2109.08668)."""
    return F.relu(x).square()


def _sqrtsoftplus(x: Tensor) -> Tensor:
    """Compute √log(1 + eˣ)."""
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
    "linear": torch.clone,  # a copy, since later operations may write into it
}


class _Xielu(nn.Module):
    """The activation xIELU (2411.13010). β and eps are not trained.

    It is x² · softplus(α) + βx above 0, and (eˣ - 1 - x) · (β + softplus(α')) + βx below 0.
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
    """Return the function for an activation, or a new module if the activation has parameters."""
    return _Xielu() if name == "xielu" else ACTIVATIONS[name]
