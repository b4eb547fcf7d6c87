"""Fewer key-value heads, or a latent in their place, fitted on a text, layer after layer.

Two models run side by side: the original, and the one that is made, whose fitted layers feed the next ones. In each
layer, for every group of old heads that becomes one:

1. keys and queries in closed form (`regression.fit_keys`) on what comes to the layer in the new model,
2. both refitted to the original's scores there (`scores.refit_scores`),
3. values in closed form (`regression.fit_values`) on what the new pattern of attention mixes,
4. the output projection by ridge regression to the original's attention output, and to what the streams have drifted
   apart by,
5. the feed-forward's down projection likewise, to the original's stream after the layer.

Of a latent, rotary keys become one as in 1 and 2. Its directions are the leading ones of what attention makes of the
input, the values' part [O_h V_h] Σ^½ stacked over the query heads and, of keys without rotary positions,
[(E q qᵀ)^½ K_h] Σ^½, each counted as much as the other; then come 4 and 5.

Memory is one layer of each model, the activations of the text, and one layer's attention patterns. What is fitted on is
the text alone: there are no gradients through the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from ...components import Attention, Block
from ...modules.attention import AttentionModule
from ...modules.context import Context
from ...modules.decoder import BlockModule
from ...modules.feed_forward import MixtureOfExpertsModule
from ...modules.layers import Linear, capped
from ...modules.registry import module_of
from ..base import Model, Wide
from ..layerwise import unknown
from .calibration import Calibration, block_of, run_block
from .regression import (
    Groups,
    Moment,
    augment,
    contiguous_groups,
    fit_keys,
    fit_values,
    gram_of,
    group_similar,
    head_similarity,
    leading,
    mix_inputs,
    pool_mean,
    query_order,
    ridge,
    square_roots,
)
from .scores import refit_scores

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


def fitted_layers(model: Model, changed: Mapping[int, Any], calibration: Calibration) -> Iterator[dict[str, Wide]]:
    """The new tensors of each of the layers `changed` (layer -> its new attention), in order of the layers."""
    student: Tensor | None = None  # the original's stream, until a layer is fitted
    for layer in calibration.walk(model, range(max(changed) + 1)):
        old, context, here = layer.module, layer.context, layer.x if student is None else student
        if layer.index not in changed:
            student = None if student is None else run_block(old, here, context)[0]
            continue
        with torch.no_grad():
            spec = model.spec.blocks[layer.index].replaced(attention=changed[layer.index])
            fit = _fit if hasattr(changed[layer.index], "kv_heads") else _fit_latent
            tensors = fit(old, spec, layer.x, here, context)
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
    attention, new = _module(block), cast("Attention", record.attention)
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


def averaged_layers(model: Model, changed: Mapping[int, Any]) -> Iterator[dict[str, Wide]]:
    """A latent without a text: the rotary keys' mean, and the leading directions of the weights alone."""
    for index, new in changed.items():
        attention = _module(block_of(model, index))
        heads, dim = by_head(attention), _turning(attention.spec)
        identity = torch.eye(heads.queries.shape[-1], dtype=torch.float64)
        tensors = _assembled(attention, new, heads, heads.queries[:, :dim], pool_mean(heads.keys)[:dim], identity)
        yield {f"blocks.{index}.attention.{name}": value.numpy() for name, value in tensors.items()}
        model.release()


def _fit_latent(
    block: BlockModule, record: Block, teacher: Tensor, student: Tensor, context: Context
) -> dict[str, Tensor]:
    """One layer's new tensors with a latent, by their names in the attention, in fp64."""
    attention, new = _module(block), record.attention
    spec, heads = attention.spec, by_head(attention)
    before, after = block.attention_norm(teacher), block.attention_norm(student)
    inputs, dim = augmented(after, heads.bias), _turning(spec)
    covariance = Moment.of(inputs).covariance
    queries, key = heads.queries, heads.keys[0]
    if dim:
        everyone, readers = range(len(heads.keys)), range(spec.heads)
        theirs = patterns(attention, before, context)
        queries, key = shared_key(spec, heads, everyone, readers, covariance, inputs, *theirs, context)
    tensors = _assembled(attention, new, heads, queries[:, :dim], key[:dim], covariance)
    _, seen = run_block(block_with(block, record, tensors), student, context, "attention.o_proj")
    mixed = torch.unflatten(seen["attention.o_proj"][0], -1, (spec.heads, -1)).transpose(1, 2)
    start = tensors["o_proj.weight"]
    return tensors | {"o_proj.weight": refit_output(attention, start, mixed, before, teacher, student, context)}


def _assembled(
    attention: AttentionModule, new: Any, heads: Heads, queries: Tensor, key: Tensor, covariance: Tensor
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
    scale, dim, rows = spec.scale, _turning(spec), _as_halves(spec)
    angles: Tensor | None = None
    if dim:
        rotary: Any = spec.position
        # The rotary tables have a factor of their own (YaRN, longrope).
        scale *= float(getattr(rotary.scaling, "attention_factor", 1.0)) ** 2
        steps = context.position_ids.shape[-1]
        turns = module_of(rotary).frequencies(rotary, steps, inputs.dtype)
        angles = torch.arange(steps, dtype=inputs.dtype)[:, None] * turns  # (T, dim/2)
    queries, key = fit_keys(queries[:, rows], keys[:, rows], covariance, dim)
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
    output, seen = run_block(block, student, context, DOWN)
    inner, made = seen[DOWN]
    linear: Any = block.feed_forward.down_proj
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
    spec = attention.spec
    position: Any = spec.position
    q = q if attention.q_norm is None else attention.q_norm(q)
    k = k if attention.k_norm is None else attention.k_norm(k)
    if _turning(spec):
        tables, turn = context.tables(position), module_of(position).turn
        q, k = turn(q, tables), turn(k, tables)
    scores = q @ k.transpose(-1, -2) * spec.scale
    biased = scores  # and then capped, which the fit of scores themselves is not
    if _biased(spec):
        bias = context.bias(position, spec.heads, spec.window)
        bias = bias if readers is None else bias[:, list(readers)]
        biased = scores + (bias * spec.scale if position.scaled else bias)
    biased = capped(biased, spec.cap)
    mask = context.additive_mask(spec.window)
    return scores, torch.softmax(biased if mask is None else biased + mask, dim=-1)


def _module(block: BlockModule) -> AttentionModule:
    """The attention of a block, which has heads of keys."""
    assert isinstance(block.attention, AttentionModule)
    return block.attention


def _turning(spec: Attention) -> int:
    """Elements of a head that positions turn, pair by pair. Raises SwapRefused where they turn them in another way."""
    position: Any = spec.position
    if position is None or not position.turns:
        return 0
    if not hasattr(position, "pairs"):
        raise unknown("an attention", position, "rotary positions")
    return int(position.dim)


def _biased(spec: Attention) -> bool:
    """Whether positions add to its scores."""
    return spec.position is not None and spec.position.biases


def _as_halves(spec: Attention) -> Tensor:
    """The order in which a head's elements have their rotary pairs at i and i + dim/2."""
    order, dim, position = torch.arange(spec.head_dim), _turning(spec), spec.position
    if not dim or getattr(position, "pairs", "halves") == "halves":
        return order
    return torch.cat((order[:dim].reshape(-1, 2).T.reshape(-1), order[dim:]))


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
    old, dim, rows = len(heads.keys), _turning(spec), _as_halves(spec)
    work = old * (old - 1) // 2 * covariance.shape[0] ** 3
    in_place = _biased(spec) or new.kv_heads == 1 or spec.q_norm is not None
    if in_place or work > GROUPING_WORK:
        return contiguous_groups(old, new.kv_heads)
    queries, keys = heads.queries[:, rows], heads.keys[:, rows]
    return group_similar(head_similarity(queries, keys, heads.values, heads.outputs, covariance, dim), new.kv_heads)
