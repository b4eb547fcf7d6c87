"""Cross-attention to the output of an encoder."""

import torch
from torch import Tensor, nn

from ..analysis.activations import Kernel
from ..components import Attention, CrossAttention
from .attention import Mixing
from .context import Context
from .layers import LinearModule
from .registry import computes


class SourceCache:
    """One layer's keys and values of the source text. The first decoding step computes them for all later ones."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None


@computes(CrossAttention)
class CrossAttentionModule(nn.Module):
    """Attention with queries from the hidden states, and keys and values from the encoder's output."""

    def __init__(self, spec: CrossAttention, kernel: Kernel = "sdpa") -> None:
        super().__init__()
        self.spec = spec
        fields = {name: getattr(spec, name) for name in ("hidden_size", "heads", "head_dim", "scale", *spec.rounds)}
        self.mix = Mixing(Attention(**fields, kv_heads=spec.heads, causal=False), kernel)
        self.kernel = self.mix.kernel
        hidden, inner = spec.hidden_size, spec.heads * spec.head_dim
        self.q_proj, self.k_proj, self.v_proj = (LinearModule(hidden, inner, spec.qkv_bias) for _ in "qkv")
        self.o_proj = LinearModule(inner, hidden, spec.output_bias)

    @staticmethod
    def cache(_: CrossAttention) -> SourceCache:
        """Return an empty cache for one layer."""
        return SourceCache()

    def forward(self, x: Tensor, context: Context, cache: SourceCache | None = None) -> Tensor:  # (B, T, hidden)
        q = self._heads(self.q_proj(x))
        if cache is None or cache.keys is None or cache.values is None:
            source = self.source(x, context)
            # Contiguous by head, as in transformers' cache, also without a cache.
            k, v = (self._heads(linear(source)).contiguous() for linear in (self.k_proj, self.v_proj))
            if cache is not None:
                cache.keys, cache.values = k, v
        else:
            k, v = cache.keys, cache.values
        out: Tensor = self.o_proj(self.mix(q, k, v, context.sight))
        return out

    def source(self, x: Tensor, context: Context) -> Tensor:  # noqa: ARG002
        """Return the encoder's output, from which keys and values are computed."""
        return context.source()

    def _heads(self, x: Tensor) -> Tensor:
        """Split heads: (B, T, H·d) -> (B, H, T, d)."""
        return torch.unflatten(x, -1, (self.spec.heads, -1)).transpose(1, 2)
