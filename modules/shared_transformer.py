"""A transformer block whose weights are shared by several layers, as in transformers' modeling_zamba2.py."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..analysis.activations import Kernel
from ..components import Attention, Norm, SharedTransformer, Turning
from .attention import Mixing, turned
from .cache import LayerCache
from .context import Context
from .layers import ACTIVATIONS, FusedLinears, LinearModule
from .registry import build_module, computes


@computes(SharedTransformer)
class _SharedTransformerModule(nn.Module):
    """The torch module of `components.SharedTransformer`. The first layer that uses a block stores its weights."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, spec: SharedTransformer, kernel: Kernel = "sdpa") -> None:
        super().__init__()
        self.spec = spec
        for name, weight in spec.weights().items():
            module, _, what = name.rpartition(".")
            if what == "weight":
                rows, columns = weight.shape
                self.add_module(module, LinearModule(columns, rows, f"{module}.bias" in spec.weights()))
        for name, norm in spec.children():
            if isinstance(norm, Norm):
                self.add_module(name, build_module(norm))
        self.both, self.adapters = FusedLinears(), FusedLinears()
        fields: Any = {name: getattr(spec, name) for name in ("hidden_size", "heads", "kv_heads", "head_dim", "scale")}
        self.mix = Mixing(Attention(**fields), kernel)
        self.kernel = self.mix.kernel
        self.activation = ACTIVATIONS[spec.activation]

    @staticmethod
    def cache(_: SharedTransformer) -> LayerCache:
        """Return an empty cache for one layer. Keys and values differ by layer, although weights are shared."""
        return LayerCache(None)

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:  # (B, T, hidden)
        spec, lender = self.spec, context.lender(self.spec, self)
        mixed = self._attended(lender, lender.norm(torch.cat((x, context.first_stream()), dim=-1)), context, cache)
        read = lender.inner_norm(lender.o_proj(mixed))
        del mixed
        raised = self._raised(lender.both, (lender.gate_proj, lender.up_proj), read)
        if spec.rank is not None:
            adapters = (self.gate_adapter_up, self.up_adapter_up)
            raised = raised + self._raised(self.adapters, adapters, self.adapter_down(read))
        del read
        gate, up = raised.chunk(2, dim=-1)
        if not spec.fused:  # transformers then computes them as two tensors
            gate, up = gate.contiguous(), up.contiguous()
        out: Tensor = self.stream_proj(lender.down_proj(self.activation(gate) * up))
        return out

    def _raised(self, fused: FusedLinears, linears: tuple[Any, Any], x: Tensor) -> Tensor:
        """Return the outputs of two linears, such as gate and up, for x, concatenated along the last dimension.

        `fused` computes both in one matrix product, if the family's code does.
        """
        return torch.cat(fused(linears, x) if self.spec.fused else [linear(x) for linear in linears], dim=-1)

    def _attended(self, lender: Any, x: Tensor, context: Context, cache: LayerCache | None) -> Tensor:
        """Return the outputs of all attention heads, (B, T, H·d), for the normed input x.

        `lender` is the module that stores the shared weights.
        """
        spec, heads = self.spec, (*x.shape[:2], -1, self.spec.head_dim)
        parts = []
        for name in "qkv":
            projected = getattr(lender, f"{name}_proj")(x)
            if spec.attention_rank is not None:
                down, up = (getattr(self, f"{name}_adapter_{side}") for side in ("down", "up"))
                projected = projected + up(down(x))
            parts.append(projected.view(heads).transpose(1, 2))  # (B, H, T, hd)
        q, k, v = parts
        if isinstance(spec.position, Turning):
            q, k = turned(spec.position, q, k, context.tables(spec.position))
        # Contiguous as from a cache, because memory order decides the order of sums.
        k, v = (k.contiguous(), v.contiguous()) if cache is None else cache.append(k, v)
        return self.mix(q, k, v, context)
