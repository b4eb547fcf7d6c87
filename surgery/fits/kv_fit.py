"""Fewer key-value heads fitted on a text, layer after layer.

Two models run side by side: the original, and the one that is made, whose fitted layers feed the next ones. In each
layer, for every group of old heads that becomes one:

1. keys and queries in closed form (`regression.fit_keys`) on what comes to the layer in the new model,
2. both refitted to the original's scores there (`scores.refit_scores`),
3. values in closed form (`regression.fit_values`) on what the new pattern of attention mixes,
4. the output projection by ridge regression to the original's attention output, and to what the streams have drifted
   apart by,
5. the feed-forward's down projection likewise, to the original's stream after the layer.

Memory is one layer of each model, the activations of the text, and one layer's attention patterns. What is fitted on is
the text alone: there are no gradients through the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...components import ALiBi, Attention, Block, Rotary
from ...modules.attention import AttentionModule
from ...modules.context import Context
from ...modules.decoder import BlockModule
from ...modules.feed_forward import MixtureOfExpertsModule
from ...modules.layers import Linear, capped
from ...modules.positions import apply_rotary, inverse_frequencies
from ..base import Model, Wide
from ..layerwise import replaced
from .calibration import Calibration, block_of, context_of, embed, run_block
from .grouping import Groups, contiguous_groups, group_similar, head_similarity, query_order
from .regression import Moment, augment, fit_keys, fit_values, mix_inputs, pool_mean, ridge
from .scores import refit_scores

__all__ = [
    "Heads",
    "as_halves",
    "augmented",
    "block_with",
    "by_head",
    "fitted_layers",
    "patterns",
    "refit_output",
    "shared_key",
]

Fit = Callable[[BlockModule, Block, Tensor, Tensor, Context], dict[str, Tensor]]
"""The new tensors of a layer's attention, of the block as it was, the record that it is to have, what comes to it in
the original and in the new model, and their context."""

ROUNDS, STEPS, STRENGTH = 2, 10, 1e-3
"""Of `refit_scores`: how often it linearises, conjugate gradients each time, and its ridge."""
RIDGE = 1.0
"""Strength of the projections' ridges: as much weight on where they start as on the text."""
GROUPING_WORK = 10**11
"""Multiplications that finding similar heads may take; beyond it, neighbours are put together."""


@dataclass(frozen=True)
class Heads:
    """The projections of one attention by head, biases as a last column where there are any: queries (H, d, e), keys
    and values (KV, d, e), outputs (H, hidden, d).
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    outputs: Tensor
    bias: bool


def fitted_layers(
    model: Model, changed: Mapping[int, Any], calibration: Calibration, fit: Fit | None = None
) -> Iterator[dict[str, Wide]]:
    """The new tensors of each of the layers `changed` (layer -> its new attention), in order of the layers.

    `fit` gives those of one layer's attention, by their names in it; here q, k, v and o of fewer key-value heads.
    """
    fit = fit or _fit
    ids, dtype = calibration.ids, torch.float32
    context = context_of(ids, dtype)
    teacher = student = embed(model, ids, dtype)
    for index in range(max(changed) + 1):
        old = block_of(model, index, dtype)
        if index not in changed:
            output, _ = run_block(old, teacher, context)
            student = output if student is teacher else run_block(old, student, context)[0]
            teacher = output
            continue
        with torch.no_grad():
            spec = replaced(model.spec.blocks[index], attention=changed[index])
            tensors = fit(old, spec, teacher, student, context)
            new = block_with(old, spec, tensors)
        found = {f"blocks.{index}.attention.{name}": value for name, value in tensors.items()}
        teacher = run_block(old, teacher, context)[0]
        student, down = refit_down(new, student, teacher, context)
        if down is not None:
            found[f"blocks.{index}.{DOWN}.weight"] = down
        yield {name: value.numpy() for name, value in found.items()}
        model.release()


def block_with(old: BlockModule, spec: Block, tensors: dict[str, Tensor]) -> BlockModule:
    """The block with its new attention, everything else shared with the old one."""
    new = BlockModule(spec).to(torch.float32).eval()
    values = dict(old.state_dict())
    values.update({f"attention.{name}": value.float() for name, value in tensors.items()})
    new.load_state_dict({name: values[name] for name in new.state_dict()})
    return new


def _fit(block: BlockModule, record: Block, teacher: Tensor, student: Tensor, context: Context) -> dict[str, Tensor]:
    """One layer's new q, k, v and o, by their names in the attention, in fp64."""
    attention, new = block.attention, record.attention
    assert isinstance(attention, AttentionModule) and isinstance(new, Attention)
    spec = attention.spec
    before, after = block.attention_norm(teacher), block.attention_norm(student)
    scores, pattern = patterns(attention, before, context)
    heads = by_head(attention)
    if len(heads.keys) % new.kv_heads:  # groups that cut through the readers of one head: every reader gets its own
        each = [tensor.repeat_interleave(spec.group, dim=0) for tensor in (heads.keys, heads.values)]
        heads = replace(heads, keys=each[0], values=each[1])
    inputs = augmented(after, heads.bias)
    moment = Moment.zeros(inputs.shape[-1])
    moment.add(inputs)
    groups = _groups(spec, new, heads, moment.covariance)
    order = query_order(groups, spec.heads // len(heads.keys))
    fitted: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []  # queries, key, value, outputs of each group
    mixed: list[Tensor] = []
    for group in groups:
        readers = query_order((group,), spec.heads // len(heads.keys))
        q, k = _keys(spec, heads, group, readers, moment, inputs, scores[:, readers], pattern[:, readers], context)
        seen = mix_inputs(_pattern_of(attention, q, k, inputs, readers, context), inputs)  # (B, n, T, e)
        what = Moment.zeros(seen.shape[-1])
        what.add(seen)
        value, outputs = fit_values(heads.values[list(group)], heads.outputs[readers], what.covariance)
        fitted.append((q, k, value, outputs))
        mixed.append(seen @ value.to(seen).T)
    q = torch.cat([each[0] for each in fitted]).flatten(0, 1).double()  # (H·d, e), in the new order
    k, v = (torch.cat([each[which] for each in fitted]).double() for which in (1, 2))
    o = torch.cat([each[3] for each in fitted]).transpose(0, 1).flatten(1)  # (hidden, H·d)
    o = refit_output(attention, o, torch.cat(mixed, dim=1), before, teacher, student, context)
    assert len(order) == spec.heads
    found = {"q_proj": q, "k_proj": k, "v_proj": v}
    tensors = {f"{name}.weight": each[:, : spec.hidden_size].contiguous() for name, each in found.items()}
    if heads.bias:
        tensors |= {f"{name}.bias": each[:, -1].contiguous() for name, each in found.items()}
    return tensors | {"o_proj.weight": o}


def _keys(
    spec: Attention,
    heads: Heads,
    group: Sequence[int],
    readers: Sequence[int],
    moment: Moment,
    inputs: Tensor,
    scores: Tensor,
    pattern: Tensor,
    context: Context,
) -> tuple[Tensor, Tensor]:
    """The queries (n, d, e) and the key (d, e) of one group."""
    queries, keys = heads.queries[list(readers)], heads.keys[list(group)]
    if spec.q_norm is not None or spec.k_norm is not None:
        return queries, pool_mean(keys)  # what a norm follows is not bilinear in the inputs
    position = spec.position
    rotary = position if isinstance(position, Rotary) else None
    rows = as_halves(rotary, spec.head_dim)
    queries, key = fit_keys(queries[:, rows], keys[:, rows], moment.covariance, 0 if rotary is None else rotary.dim)
    found = refit_scores(
        queries.to(inputs),
        key.to(inputs),
        inputs,
        pattern,
        scores,
        _scale(spec),
        None if rotary is None else _angles(rotary, context, inputs.dtype),
        rounds=ROUNDS,
        steps=STEPS,
        strength=STRENGTH,
    )
    back = torch.argsort(rows)
    return found.queries[:, back], found.key[back]


def shared_key(
    spec: Attention,
    heads: Heads,
    moment: Moment,
    inputs: Tensor,
    scores: Tensor,
    pattern: Tensor,
    context: Context,
) -> tuple[Tensor, Tensor]:
    """Queries (H, d, e) and one key (d, e) for all heads of an attention."""
    everyone = range(len(heads.keys))
    return _keys(spec, heads, everyone, range(spec.heads), moment, inputs, scores, pattern, context)


def refit_output(
    attention: AttentionModule,
    start: Tensor,
    mixed: Tensor,
    before: Tensor,
    teacher: Tensor,
    student: Tensor,
    context: Context,
) -> Tensor:
    """The output projection (hidden, H·d) that takes what is mixed now, (B, H, T, d), to the original's output and what
    the streams before the layer differ by. Each token counts by what it is worth there: one over the mean square of
    the original's stream, of which a few tokens have nearly all.
    """
    wanted: Tensor = attention(before, context)
    weight = (teacher + wanted).square().mean(dim=-1).clamp_min(1e-30).reciprocal()
    if attention.o_proj.bias is not None:
        wanted = wanted - attention.o_proj.bias
    moment = Moment.zeros(start.shape[1], start.shape[0])
    moment.add(mixed.transpose(1, 2).flatten(2), wanted + (teacher - student), weight)
    return ridge(start, moment, RIDGE)


DOWN = "feed_forward.down_proj"


def refit_down(
    block: BlockModule, student: Tensor, teacher_output: Tensor, context: Context
) -> tuple[Tensor, Tensor | None]:
    """The stream after a new block, and the down projection that took it nearer to the original's; None where there is
    no one such projection (experts).
    """
    if isinstance(block.feed_forward, MixtureOfExpertsModule):
        return run_block(block, student, context)[0], None
    output, seen = run_block(block, student, context, [DOWN])
    inner, made = seen[DOWN]
    linear = block.feed_forward.down_proj
    assert isinstance(linear, Linear)
    wanted = teacher_output - (output - made)
    if linear.bias is not None:
        wanted = wanted - linear.bias.detach()
    weight = teacher_output.square().mean(dim=-1).clamp_min(1e-30).reciprocal()
    moment = Moment.zeros(inner.shape[-1], made.shape[-1])
    moment.add(inner, wanted, weight)
    fitted = ridge(linear.weight.detach().double(), moment, RIDGE)
    with torch.no_grad():
        linear.weight.copy_(fitted)
    return run_block(block, student, context)[0], fitted


# --- what a layer computes on the way ---------------------------------------------------------------------------------


def patterns(attention: AttentionModule, x: Tensor, context: Context) -> tuple[Tensor, Tensor]:
    """An attention's scores q·k · scale without biases of positions, and its weights: (B, H, T, T) each."""
    spec = attention.spec
    q, k = (
        torch.unflatten(each, -1, (-1, spec.head_dim)) for each in (attention.q_proj(x), attention.k_proj(x))
    )  # (B, T, heads, d)
    q = q if attention.q_norm is None else attention.q_norm(q)
    k = k if attention.k_norm is None else attention.k_norm(k)
    return _weights(spec, q.transpose(1, 2), k.transpose(1, 2).repeat_interleave(spec.group, dim=1), None, context)


def _pattern_of(
    attention: AttentionModule, queries: Tensor, key: Tensor, inputs: Tensor, readers: Sequence[int], context: Context
) -> Tensor:
    """The weights that these query heads give with new queries (n, d, e) and a new key (d, e)."""
    spec = attention.spec
    q = inputs[:, None] @ queries.to(inputs).transpose(-1, -2)  # (B, n, T, d)
    k = (inputs @ key.to(inputs).T)[:, None].expand_as(q)
    q = q if attention.q_norm is None else attention.q_norm(q)
    k = k if attention.k_norm is None else attention.k_norm(k)
    return _weights(spec, q, k, readers, context)[1]


def _weights(
    spec: Attention, q: Tensor, k: Tensor, readers: Sequence[int] | None, context: Context
) -> tuple[Tensor, Tensor]:
    """Scores and softmax of q and k, (B, n, T, d) each, positions not yet applied; `readers` says which heads."""
    position = spec.position
    if isinstance(position, Rotary):
        tables = context.tables(position)
        q, k = apply_rotary(q, tables), apply_rotary(k, tables)
    scores = q @ k.transpose(-1, -2) * spec.scale
    biased = scores  # and then capped, which the fit of scores themselves is not
    if isinstance(position, ALiBi):
        bias = context.bias(position, spec.heads, spec.window)
        bias = bias if readers is None else bias[:, list(readers)]
        biased = scores + (bias * spec.scale if position.scaled else bias)
    biased = capped(biased, spec.cap)
    mask = context.additive_mask(spec.window)
    return scores, torch.softmax(biased if mask is None else biased + mask, dim=-1)


def _scale(spec: Attention) -> float:
    """What multiplies q·k, the rotary tables' own factor with it (YaRN, longrope)."""
    scaling = spec.position.scaling if isinstance(spec.position, Rotary) else None
    return spec.scale * float(getattr(scaling, "attention_factor", 1.0)) ** 2


def _angles(rotary: Rotary, context: Context, dtype: torch.dtype) -> Tensor:
    """(T, dim/2)."""
    steps = context.position_ids.shape[-1]
    return torch.arange(steps, dtype=dtype)[:, None] * inverse_frequencies(rotary, steps, dtype)


def as_halves(rotary: Rotary | None, head_dim: int) -> Tensor:
    """The order in which a head's elements have their rotary pairs at i and i + dim/2."""
    order = torch.arange(head_dim)
    if rotary is None or rotary.pairs == "halves":
        return order
    turned = order[: rotary.dim].reshape(-1, 2).T.reshape(-1)
    return torch.cat((turned, order[rotary.dim :]))


# --- heads ------------------------------------------------------------------------------------------------------------


def by_head(attention: AttentionModule) -> Heads:
    """The projections by head, in fp64."""
    spec = attention.spec

    def heads(linear: Linear) -> Tensor:
        weight: Tensor = linear.weight.detach().double()
        if linear.bias is not None:
            weight = augment(weight, linear.bias.detach().double())
        return torch.unflatten(weight, 0, (-1, spec.head_dim))

    outputs = torch.unflatten(attention.o_proj.weight.detach().double(), 1, (spec.heads, -1)).transpose(0, 1)
    return Heads(heads(attention.q_proj), heads(attention.k_proj), heads(attention.v_proj), outputs, spec.qkv_bias)


def augmented(x: Tensor, bias: bool) -> Tensor:
    """Inputs (B, T, hidden) with a column of ones where there are biases."""
    return torch.cat((x, torch.ones_like(x[..., :1])), dim=-1) if bias else x


def _groups(spec: Attention, new: Attention, heads: Heads, covariance: Tensor) -> Groups:
    """Which old heads become one."""
    old = len(heads.keys)
    if isinstance(spec.position, ALiBi) or new.kv_heads == 1 or spec.q_norm is not None:
        return contiguous_groups(old, new.kv_heads)  # a slope belongs to its place
    if old * (old - 1) // 2 * covariance.shape[0] ** 3 > GROUPING_WORK:
        return contiguous_groups(old, new.kv_heads)
    rows = as_halves(spec.position if isinstance(spec.position, Rotary) else None, spec.head_dim)
    rotary = spec.position.dim if isinstance(spec.position, Rotary) else 0
    table = head_similarity(
        heads.queries[:, rows], heads.keys[:, rows], heads.values, heads.outputs, covariance, rotary
    )
    return group_similar(table, new.kv_heads)
