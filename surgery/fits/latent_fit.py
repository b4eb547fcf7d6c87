"""A latent of fewer numbers for keys and values, fitted on a text layer after layer; see `latent`.

The original and the new model run side by side, as in `kv_fit`. In each layer: rotary keys become one (closed form and
refit of `kv_fit`); the latent's directions are the leading ones of what attention makes of the input, the values' part
[O_h V_h] Σ^½ stacked over the query heads and, of keys without rotary positions, [(E q qᵀ)^½ K_h] Σ^½, each counted as
much as the other; then the output projection is refitted to the original's output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ...components import Attention, Block, LatentAttention
from ...modules.attention import AttentionModule, LatentAttentionModule
from ...modules.context import Context
from ...modules.decoder import BlockModule
from ..base import Model, Wide
from . import kv_fit
from .calibration import Calibration, block_of
from .kv_fit import Heads, augmented, block_with, by_head, patterns, projections, refit_output, shared_key
from .regression import Moment, gram_of, leading, pool_mean, square_roots


def fitted_layers(
    model: Model, changed: Mapping[int, LatentAttention], calibration: Calibration
) -> Iterator[dict[str, Wide]]:
    """The new tensors of each of the layers `changed` (layer -> its new attention), in order of the layers."""
    return kv_fit.fitted_layers(model, changed, calibration, _fit)


def averaged_layers(model: Model, changed: Mapping[int, LatentAttention]) -> Iterator[dict[str, Wide]]:
    """The plain form, without a text: the rotary keys' mean, and the leading directions of the weights alone."""
    for index, new in changed.items():
        attention = block_of(model, index).attention
        assert isinstance(attention, AttentionModule)
        heads, dim = by_head(attention), turning(attention.spec)
        identity = torch.eye(heads.queries.shape[-1], dtype=torch.float64)
        tensors = _assembled(attention, new, heads, heads.queries[:, :dim], pool_mean(heads.keys)[:dim], identity)
        yield {f"blocks.{index}.attention.{name}": value.numpy() for name, value in tensors.items()}
        model.release()


def turning(spec: Attention) -> int:
    """Elements of a head that positions turn."""
    return int(getattr(spec.position, "dim", 0))


def _fit(block: BlockModule, record: Block, teacher: Tensor, student: Tensor, context: Context) -> dict[str, Tensor]:
    """One layer's new tensors by their names in the attention, in fp64."""
    attention, new = block.attention, record.attention
    assert isinstance(attention, AttentionModule) and isinstance(new, LatentAttention)
    spec, heads = attention.spec, by_head(attention)
    before, after = block.attention_norm(teacher), block.attention_norm(student)
    inputs, dim = augmented(after, heads.bias), turning(spec)
    covariance = Moment.of(inputs).covariance
    queries, key = heads.queries, heads.keys[0]
    if dim:
        everyone, readers = range(len(heads.keys)), range(spec.heads)
        theirs = patterns(attention, before, context)
        queries, key = shared_key(spec, heads, everyone, readers, covariance, inputs, *theirs, context)
    tensors = _assembled(attention, new, heads, queries[:, :dim], key[:dim], covariance)
    mixed = _mixed(block_with(block, record, tensors), after, context)
    start = tensors["o_proj.weight"]
    return tensors | {"o_proj.weight": refit_output(attention, start, mixed, before, teacher, student, context)}


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
    attention: AttentionModule, new: LatentAttention, heads: Heads, queries: Tensor, key: Tensor, covariance: Tensor
) -> dict[str, Tensor]:
    """All tensors, of rotary queries (H, dim, e) and their key (dim, e); the output projection's as it was."""
    spec, dim = attention.spec, key.shape[0]
    readers = spec.heads // len(heads.keys)
    plain_q, plain_k = heads.queries[:, dim:], heads.keys[:, dim:].repeat_interleave(readers, dim=0)
    if heads.bias:  # of keys without positions: it shifts all scores of a query alike, which softmax does not see
        plain_k = plain_k * torch.cat((torch.ones(spec.hidden_size), torch.zeros(1))).double()
    values = heads.values.repeat_interleave(readers, dim=0)  # (H, d, e)
    root, inverse = square_roots(covariance)
    grams = [gram_of(heads.outputs @ values @ root)]
    if plain_k.shape[1]:
        factors = plain_q @ root  # a root of E q qᵀ is enough: its Gram stands between
        grams.append(gram_of(plain_k @ root, factors @ factors.transpose(-1, -2)))
    # Each part as much as the other, whatever the sizes of values and scores.
    total = torch.stack([gram / gram.trace().clamp_min(1e-300) for gram in grams]).sum(dim=0)
    basis = leading(total, new.kv_rank)  # (e, rank)
    found = {"q_proj": torch.cat((plain_q, queries), dim=1).flatten(0, 1), "kv_down_proj": basis.T @ inverse}
    tensors = projections(found | ({"k_rope_proj": key} if dim else {}), spec, heads.bias)
    if plain_k.shape[1]:
        tensors["k_up_proj.weight"] = (plain_k @ root @ basis).flatten(0, 1)
    tensors["v_up_proj.weight"] = (values @ root @ basis).flatten(0, 1)
    return tensors | {"o_proj.weight": attention.o_proj.weight.detach().double()}
