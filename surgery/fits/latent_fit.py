"""A latent of fewer numbers for keys and values, fitted on a text layer after layer; see `latent`.

The original and the new model run side by side, as in `kv_fit`. In each layer: rotary keys become one (closed form and
refit of `kv_fit`); the latent's directions are the leading ones of what attention makes of the input, the values' part
[O_h V_h] Σ^½ stacked over the query heads and, of keys without rotary positions, [(E q qᵀ)^½ K_h] Σ^½, each counted as
much as the other; then the output projection is refitted to the original's output.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...components import Attention, Block, LatentAttention, Rotary
from ...modules.attention import AttentionModule, LatentAttentionModule
from ...modules.context import Context
from ...modules.decoder import BlockModule
from ..base import Model, Wide
from . import kv_fit
from .calibration import Calibration, block_of
from .kv_fit import Heads, augmented, block_with, by_head, patterns, refit_output, shared_key
from .regression import Moment, pool_mean, square_roots

__all__ = ["averaged_layers", "fitted_layers"]


def fitted_layers(
    model: Model, changed: dict[int, LatentAttention], calibration: Calibration
) -> Iterator[dict[str, Wide]]:
    """The new tensors of each of the layers `changed` (layer -> its new attention), in order of the layers."""
    return kv_fit.fitted_layers(model, changed, calibration, _fit)


def averaged_layers(model: Model, changed: dict[int, LatentAttention]) -> Iterator[dict[str, Wide]]:
    """The plain form, without a text: the rotary keys' mean, and the leading directions of the weights alone."""
    for index, new in changed.items():
        old = block_of(model, index, torch.float32)
        assert isinstance(old.attention, AttentionModule)
        spec, heads = old.attention.spec, by_head(old.attention)
        identity = torch.eye(heads.queries.shape[-1], dtype=torch.float64)
        dim = spec.position.dim if isinstance(spec.position, Rotary) else 0
        tensors = _assembled(spec, new, heads, heads.queries[:, :dim], pool_mean(heads.keys)[:dim], identity)
        tensors["o_proj.weight"] = old.attention.o_proj.weight.detach().double()
        yield {f"blocks.{index}.attention.{name}": value.numpy() for name, value in tensors.items()}
        model.release()


def _fit(block: BlockModule, record: Block, teacher: Tensor, student: Tensor, context: Context) -> dict[str, Tensor]:
    """One layer's new tensors by their names in the attention, in fp64."""
    attention = block.attention
    new = record.attention
    assert isinstance(attention, AttentionModule) and isinstance(new, LatentAttention)
    spec, heads = attention.spec, by_head(attention)
    before, after = block.attention_norm(teacher), block.attention_norm(student)
    inputs = augmented(after, heads.bias)
    moment = Moment.zeros(inputs.shape[-1])
    moment.add(inputs)
    dim = spec.position.dim if isinstance(spec.position, Rotary) else 0
    queries, key = heads.queries, heads.keys[0]
    if dim:
        scores, pattern = patterns(attention, before, context)
        queries, key = shared_key(spec, heads, moment, inputs, scores, pattern, context)
    tensors = _assembled(spec, new, heads, queries[:, :dim], key[:dim], moment.covariance)
    tensors["o_proj.weight"] = attention.o_proj.weight.detach().double()
    made = block_with(block, record, tensors)
    mixed = _mixed(made, after, context)
    tensors["o_proj.weight"] = refit_output(
        attention, tensors["o_proj.weight"], mixed, before, teacher, student, context
    )
    return tensors


def _mixed(block: BlockModule, x: Tensor, context: Context) -> Tensor:
    """What comes to a latent attention's output projection, by heads: (B, H, T, value_dim)."""
    attention = block.attention
    assert isinstance(attention, LatentAttentionModule)
    seen: list[Tensor] = []
    hook = attention.o_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        attention(x, context)
    finally:
        hook.remove()
    return torch.unflatten(seen[0], -1, (attention.spec.heads, -1)).transpose(1, 2)


def _assembled(
    spec: Attention, new: LatentAttention, heads: Heads, queries: Tensor, key: Tensor, covariance: Tensor
) -> dict[str, Tensor]:
    """All tensors but the output projection's, of rotary queries (H, dim, e) and their key (dim, e)."""
    readers = spec.heads // len(heads.keys)
    dim = key.shape[0]
    plain_q, plain_k = heads.queries[:, dim:], heads.keys[:, dim:].repeat_interleave(readers, dim=0)
    if heads.bias:  # of keys without positions: it shifts all scores of a query alike, which softmax does not see
        plain_k = plain_k * torch.cat((torch.ones(spec.hidden_size), torch.zeros(1))).double()
    values = heads.values.repeat_interleave(readers, dim=0)  # (H, d, e)
    root, inverse = square_roots(covariance)
    grams = [_gram(heads.outputs @ values @ root)]
    if plain_k.shape[1]:
        factors = plain_q @ root  # a root of E q qᵀ is enough: its Gram stands between
        products = plain_k @ root
        grams.append((products.transpose(-1, -2) @ (factors @ factors.transpose(-1, -2)) @ products).sum(dim=0))
    # Each part as much as the other, whatever the sizes of values and scores.
    total = torch.stack([gram / gram.trace().clamp_min(1e-300) for gram in grams]).sum(dim=0)
    basis = torch.linalg.eigh(total)[1].flip(-1)[:, : new.kv_rank]  # (e, rank)
    basis = torch.nn.functional.pad(basis, (0, new.kv_rank - basis.shape[1]))
    found = {
        "q_proj": torch.cat((plain_q, queries), dim=1).flatten(0, 1),
        "kv_down_proj": basis.T @ inverse,
    }
    if dim:
        found["k_rope_proj"] = key
    tensors = {f"{name}.weight": each[:, : spec.hidden_size].contiguous() for name, each in found.items()}
    if heads.bias:
        tensors |= {f"{name}.bias": each[:, -1].contiguous() for name, each in found.items()}
    if plain_k.shape[1]:
        tensors["k_up_proj.weight"] = (plain_k @ root @ basis).flatten(0, 1)
    tensors["v_up_proj.weight"] = (values @ root @ basis).flatten(0, 1)
    return tensors


def _gram(products: Tensor) -> Tensor:
    """The sum over heads of PᵀP: (H, hidden, e) -> (e, e)."""
    return (products.transpose(-1, -2) @ products).sum(dim=0)
