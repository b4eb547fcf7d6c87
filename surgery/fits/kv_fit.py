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
from .calibration import Calibration, run_block
from .grouping import Groups, contiguous_groups, group_similar, head_similarity, query_order
from .regression import Moment, augment, fit_keys, fit_values, mix_inputs, pool_mean, ridge
from .scores import refit_scores

Fit = Callable[[BlockModule, Block, Tensor, Tensor, Context], dict[str, Tensor]]
"""The new tensors of a layer's attention, of the block as it was, the record that it is to have, what comes to it in
the original and in the new model, and their context."""

ROUNDS, STEPS, STRENGTH = 2, 10, 1e-3
"""Of `refit_scores`: how often it linearises, conjugate gradients each time, and its ridge."""
RIDGE = 1.0
"""Strength of the projections' ridges: as much weight on where they start as on the text."""
GROUPING_WORK = 10**11
"""Multiplications that finding similar heads may take; beyond it, neighbours are put together."""
DOWN = "feed_forward.down_proj"


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
    student: Tensor | None = None  # the original's stream, until a layer is fitted
    for layer in calibration.walk(model, range(max(changed) + 1)):
        old, context, here = layer.module, layer.context, layer.x if student is None else student
        if layer.index not in changed:
            student = None if student is None else run_block(old, here, context)[0]
            continue
        with torch.no_grad():
            spec = model.spec.blocks[layer.index].replaced(attention=changed[layer.index])
            tensors = (fit or _fit)(old, spec, layer.x, here, context)
            new = block_with(old, spec, tensors)
        found = {f"blocks.{layer.index}.attention.{name}": value for name, value in tensors.items()}
        student, down = _refit_down(new, here, layer.output, context)
        if down is not None:
            found[f"blocks.{layer.index}.{DOWN}.weight"] = down
        yield {name: value.numpy() for name, value in found.items()}


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
        keys, values = (each.repeat_interleave(spec.group, dim=0) for each in (heads.keys, heads.values))
        heads = replace(heads, keys=keys, values=values)
    inputs = augmented(after, heads.bias)
    covariance = Moment.of(inputs).covariance
    fitted: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []  # queries, key, value, outputs of each group
    mixed: list[Tensor] = []
    for group in _groups(spec, new, heads, covariance):
        readers = query_order((group,), spec.heads // len(heads.keys))
        theirs = scores[:, readers], pattern[:, readers]
        q, k = shared_key(spec, heads, group, readers, covariance, inputs, *theirs, context)
        asking = inputs[:, None] @ q.to(inputs).transpose(-1, -2)  # (B, n, T, d)
        asked = (inputs @ k.to(inputs).T)[:, None].expand_as(asking)
        seen = mix_inputs(_weights(attention, asking, asked, readers, context)[1], inputs)  # (B, n, T, e)
        own = heads.values[list(group)], heads.outputs[readers]
        value, outputs = fit_values(*own, Moment.of(seen).covariance)
        fitted.append((q, k, value, outputs))
        mixed.append(seen @ value.to(seen).T)
    q = torch.cat([each[0] for each in fitted]).flatten(0, 1).double()  # (H·d, e), in the new order
    k, v = (torch.cat([each[which] for each in fitted]).double() for which in (1, 2))
    o = torch.cat([each[3] for each in fitted]).transpose(0, 1).flatten(1)  # (hidden, H·d)
    o = refit_output(attention, o, torch.cat(mixed, dim=1), before, teacher, student, context)
    return projections({"q_proj": q, "k_proj": k, "v_proj": v}, spec, heads.bias) | {"o_proj.weight": o}


def projections(found: Mapping[str, Tensor], spec: Attention, bias: bool) -> dict[str, Tensor]:
    """Weights, and biases where their last column is one, by name."""
    tensors = {f"{name}.weight": each[:, : spec.hidden_size].contiguous() for name, each in found.items()}
    return tensors | ({f"{name}.bias": each[:, -1].contiguous() for name, each in found.items()} if bias else {})


def shared_key(
    spec: Attention,
    heads: Heads,
    group: Sequence[int],
    readers: Sequence[int],
    covariance: Tensor,
    inputs: Tensor,
    scores: Tensor,
    pattern: Tensor,
    context: Context,
) -> tuple[Tensor, Tensor]:
    """The queries (n, d, e) and the key (d, e) of one group."""
    queries, keys = heads.queries[list(readers)], heads.keys[list(group)]
    if spec.q_norm is not None or spec.k_norm is not None:
        return queries, pool_mean(keys)  # what a norm follows is not bilinear in the inputs
    rotary, scale = _rotary(spec), spec.scale
    angles: Tensor | None = None
    if rotary is not None:
        # The rotary tables have a factor of their own (YaRN, longrope).
        scale *= float(getattr(rotary.scaling, "attention_factor", 1.0)) ** 2
        steps = context.position_ids.shape[-1]
        turns = inverse_frequencies(rotary, steps, inputs.dtype)
        angles = torch.arange(steps, dtype=inputs.dtype)[:, None] * turns  # (T, dim/2)
    rows = _as_halves(rotary, spec.head_dim)
    queries, key = fit_keys(queries[:, rows], keys[:, rows], covariance, 0 if rotary is None else rotary.dim)
    start = queries.to(inputs), key.to(inputs)
    given = (*start, inputs, pattern, scores, scale, angles)
    found = refit_scores(*given, rounds=ROUNDS, steps=STEPS, strength=STRENGTH)
    back = torch.argsort(rows)
    return found.queries[:, back], found.key[back]


def refit_output(
    attention: AttentionModule,
    start: Tensor,
    mixed: Tensor,
    before: Tensor,
    teacher: Tensor,
    student: Tensor,
    context: Context,
) -> Tensor:
    """The output projection (hidden, H·d) from what is mixed now, (B, H, T, d), to the original stream."""
    wanted: Tensor = attention(before, context)
    bias = 0 if attention.o_proj.bias is None else attention.o_proj.bias
    return _refit(start, mixed.transpose(1, 2).flatten(2), wanted - bias + (teacher - student), teacher + wanted)


def _refit(start: Tensor, inputs: Tensor, wanted: Tensor, stream: Tensor) -> Tensor:
    """A projection that takes inputs to what is wanted. Each token counts by what it is worth there: one over the mean
    square of the original's stream, of which a few tokens have nearly all.
    """
    weight = stream.square().mean(dim=-1).clamp_min(1e-30).reciprocal()
    return ridge(start, Moment.of(inputs, wanted, weight), RIDGE)


def _refit_down(
    block: BlockModule, student: Tensor, teacher_output: Tensor, context: Context
) -> tuple[Tensor, Tensor | None]:
    """The stream after a new block, and the down projection fitted to the original stream; none of experts."""
    if isinstance(block.feed_forward, MixtureOfExpertsModule):
        return run_block(block, student, context)[0], None
    output, seen = run_block(block, student, context, [DOWN])
    inner, made = seen[DOWN]
    linear = block.feed_forward.down_proj
    assert isinstance(linear, Linear)
    bias = 0 if linear.bias is None else linear.bias.detach()
    wanted = teacher_output - (output - made) - bias
    fitted = _refit(linear.weight.detach().double(), inner, wanted, teacher_output)
    with torch.no_grad():
        linear.weight.copy_(fitted)
    return run_block(block, student, context)[0], fitted


# --- what a layer computes on the way ---------------------------------------------------------------------------------


def patterns(attention: AttentionModule, x: Tensor, context: Context) -> tuple[Tensor, Tensor]:
    """An attention's scores q·k · scale without biases of positions, and its weights: (B, H, T, T) each."""
    spec = attention.spec
    q, k = (
        torch.unflatten(each, -1, (-1, spec.head_dim)).transpose(1, 2)
        for each in (attention.q_proj(x), attention.k_proj(x))
    )  # (B, heads, T, d)
    return _weights(attention, q, k.repeat_interleave(spec.group, dim=1), None, context)


def _weights(
    attention: AttentionModule, q: Tensor, k: Tensor, readers: Sequence[int] | None, context: Context
) -> tuple[Tensor, Tensor]:
    """Scores and softmax of q and k, (B, n, T, d) each, before norms and positions, of the heads `readers`."""
    spec, position = attention.spec, attention.spec.position
    q = q if attention.q_norm is None else attention.q_norm(q)
    k = k if attention.k_norm is None else attention.k_norm(k)
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
    mask = context.additive_mask(spec.window, spec.window)
    return scores, torch.softmax(biased if mask is None else biased + mask, dim=-1)


def _rotary(spec: Attention) -> Rotary | None:
    return spec.position if isinstance(spec.position, Rotary) else None


def _as_halves(rotary: Rotary | None, head_dim: int) -> Tensor:
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
    """Which old heads become one: neighbours where a slope of ALiBi belongs to its place, or the search is too long."""
    old, rotary = len(heads.keys), _rotary(spec)
    work = old * (old - 1) // 2 * covariance.shape[0] ** 3
    in_place = isinstance(spec.position, ALiBi) or new.kv_heads == 1 or spec.q_norm is not None
    if in_place or work > GROUPING_WORK:
        return contiguous_groups(old, new.kv_heads)
    rows = _as_halves(rotary, spec.head_dim)
    queries, keys = heads.queries[:, rows], heads.keys[:, rows]
    dim = 0 if rotary is None else rotary.dim
    return group_similar(head_similarity(queries, keys, heads.values, heads.outputs, covariance, dim), new.kv_heads)
