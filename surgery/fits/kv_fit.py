"""Fewer key-value heads, or latent attention in their place, fitted on a text, layer after layer.

The original and the new model run together, so that the fit of a layer sees the errors of the fitted layers before it.
In each layer, for every group of old key-value heads that becomes one, these are fitted:

1. keys and queries, by a formula (`regression.fit_keys`), on the layer's inputs in the new model,
2. keys and queries again, to match the original's scores (`scores.refit_scores`), on at most `SCORED` tokens,
3. values, by a formula (`regression.fit_values`), on the layer's inputs mixed by the new attention weights,
4. the output projection, by ridge regression to the original's attention output plus the difference between the hidden
   states of the two models before the layer,
5. the feed-forward's down projection, by ridge regression to the original's hidden states after the layer.

The strength of each ridge is the one that is best on tokens left out of the regression.

At the end, elements of matrices that are multiplied with each other get the same size (`regression.balanced`). This
does not change the function, and makes it easier to train.

For latent attention, all rotary keys become one as in steps 1 and 2. The latent has the directions of the input that
attention uses most. These are the leading singular directions of [O_h V_h] Σ^½ for values, stacked over the query
heads, and of [(E q qᵀ)^½ K_h] Σ^½ for keys without rotary positions. Both count equally. Then steps 4 and 5 follow.

The memory is one layer of each model, the activations of the text, and one layer's attention patterns. The fit uses
only the text: there are no gradients through the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...components import Attention, Block, SubLayer
from ...modules.attention import AttentionModule
from ...modules.context import Context
from ...modules.decoder import BlockModule
from ...modules.feed_forward import MixtureOfExpertsModule
from ...modules.layers import LinearModule, capped
from ...modules.registry import module_of
from ..base import Model, Wide
from ..layerwise import unknown
from .calibration import Calibration, CalibrationLayer, block_of, run_block
from .regression import (
    Groups,
    Moment,
    augment,
    balanced,
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
    ridge_by_held_out,
    square_roots,
)
from .scores import refit_scores

ROUNDS, STEPS, STRENGTH = 2, 10, 1e-3
"""For `refit_scores`: the number of linearisations, of steps of conjugate gradients in each, and the ridge strength."""
SCORED = 6144  # the maximum number of tokens for `refit_scores`, which takes most of the time
_GROUPING_WORK = 10**11  # the maximum number of multiplications of the search for similar heads
DOWN = "feed_forward.down_proj"


def fitted_layers(model: Model, changed: Mapping[int, Any], calibration: Calibration) -> Iterator[dict[str, Wide]]:
    """Fit the attention of some layers on a text. Yield the new tensors of each of these layers, in order.

    `changed` has the new attention of each layer, by the layer's number.
    """
    student: Tensor | None = None  # the new model's hidden states; None while it equals the original's
    for layer in calibration.walk(model, range(max(changed) + 1)):
        old, context, inputs = layer.module, layer.context, layer.x if student is None else student
        if layer.index not in changed:
            student = None if student is None else run_block(old, inputs, context)[0]
            continue
        attention = changed[layer.index]
        record = model.spec.blocks[layer.index].replaced(attention=attention)
        with torch.no_grad():
            fit = _LayerFit(old, record, layer, inputs)
            tensors = fit.fewer_heads(attention) if hasattr(attention, "kv_heads") else fit.latent(attention)
            new = block_with(old, record, tensors)
        tensors_by_name = {f"blocks.{layer.index}.attention.{name}": value for name, value in tensors.items()}
        student, down = refit_down(new, inputs, layer.output, context)
        if down is not None:
            tensors_by_name[f"blocks.{layer.index}.{DOWN}.weight"] = down
        yield {name: value.cpu().numpy() for name, value in tensors_by_name.items()}


def averaged_layers(model: Model, changed: Mapping[int, Any]) -> Iterator[dict[str, Wide]]:
    """Compute latent attention without a text, layer by layer. Yield its tensors for each layer.

    The rotary key is the mean of the old keys. The latent has the leading singular directions of the weights, as if all
    directions of the input were equally frequent. `changed` has the new attention of each layer.
    """
    for index, new in changed.items():
        heads = _Heads.of(block_of(model, index))
        dim, identity = _turning(heads.spec), torch.eye(heads.queries.shape[-1], dtype=torch.float64)
        tensors = heads.with_latent(new, heads.queries[:, :dim], pool_mean(heads.keys)[:dim], identity)
        yield {f"blocks.{index}.attention.{name}": value.numpy() for name, value in tensors.items()}
        model.release()


def block_with(old: BlockModule, spec: Block, tensors: dict[str, Tensor]) -> BlockModule:
    """Return a block with the components `spec` and new attention tensors. Its other weights are those of `old`."""
    new = BlockModule(spec).to(device=next(old.parameters()).device, dtype=torch.float32).eval()
    values = dict(old.state_dict())
    values.update({f"attention.{name}": value.float() for name, value in tensors.items()})
    new.load_state_dict({name: values[name] for name in new.state_dict()})
    return new


# --- heads ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Heads:
    """The projections of an attention in fp64, divided by head. A bias is appended to its matrix as the last column.

    H and KV are the numbers of query and key-value heads. d is the width of a head, and e the width of the input, plus
    1 if there is a bias.
    """

    attention: AttentionModule
    queries: Tensor  # (H, d, e)
    keys: Tensor  # (KV, d, e)
    values: Tensor  # (KV, d, e)
    outputs: Tensor  # (H, hidden, d)

    @classmethod
    def of(cls, block: BlockModule) -> _Heads:
        attention = block.attention
        assert isinstance(attention, AttentionModule)
        spec = attention.spec

        def heads(linear: LinearModule) -> Tensor:
            weight: Tensor = linear.weight.detach().double()
            if linear.bias is not None:
                weight = augment(weight, linear.bias.detach().double())
            return torch.unflatten(weight, 0, (-1, spec.head_dim))

        outputs = torch.unflatten(attention.o_proj.weight.detach().double(), 1, (spec.heads, -1)).transpose(0, 1)
        return cls(attention, heads(attention.q_proj), heads(attention.k_proj), heads(attention.v_proj), outputs)

    @property
    def spec(self) -> Attention:
        return self.attention.spec

    def projections(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Divide matrices into weights and biases, by tensor name. The bias of a matrix, if any, is its last column."""
        width, bias = self.spec.hidden_size, self.spec.qkv_bias
        tensors = {f"{name}.weight": weight[:, :width].contiguous() for name, weight in weights.items()}
        return tensors | (
            {f"{name}.bias": weight[:, -1].contiguous() for name, weight in weights.items()} if bias else {}
        )

    def with_latent(self, new: Any, queries: Tensor, key: Tensor, covariance: Tensor) -> dict[str, Tensor]:
        """Compute the tensors of the latent attention `new`, which replaces this attention. o_proj is unchanged.

        Args:
            new: The component of the latent attention.
            queries: The rotary part of the queries, (H, dim, e).
            key: The rotary key that all heads share, (dim, e).
            covariance: The second moment of the layer's input, (e, e).
        """
        spec, dim = self.spec, key.shape[0]
        readers = spec.heads // len(self.keys)
        plain_q, plain_k = self.queries[:, dim:], self.keys[:, dim:].repeat_interleave(readers, dim=0)
        if spec.qkv_bias:  # the bias of keys without positions shifts all scores of a query, which softmax ignores
            plain_k = plain_k * torch.cat((torch.ones(spec.hidden_size), torch.zeros(1))).to(plain_k)
        values = self.values.repeat_interleave(readers, dim=0)  # (H, d, e)
        root, inverse = square_roots(covariance)
        grams = [gram_of(self.outputs @ values @ root)]
        if plain_k.shape[1]:
            factors = plain_q @ root  # a root of E q qᵀ is enough: its Gram is used
            grams.append(gram_of(plain_k @ root, factors @ factors.transpose(-1, -2)))
        # Values and keys count equally, whatever the sizes of values and scores.
        total = torch.stack([gram / gram.trace().clamp_min(1e-300) for gram in grams]).sum(dim=0)
        basis = leading(total, new.kv_rank)  # (e, rank)
        ups = [(part @ root @ basis).flatten(0, 1) for part in (plain_k, values)]
        down, up = balanced(basis.T @ inverse, torch.cat(ups))
        projections = {"q_proj": torch.cat((plain_q, queries), dim=1).flatten(0, 1), "kv_down_proj": down}
        tensors = self.projections(projections | ({"k_rope_proj": key} if dim else {}))
        cut = len(ups[0])  # 0 if all of a key is rotary
        if cut:
            tensors["k_up_proj.weight"] = up[:cut]
        tensors["v_up_proj.weight"] = up[cut:]
        return tensors | {"o_proj.weight": self.attention.o_proj.weight.detach().double()}


# --- one layer's attention --------------------------------------------------------------------------------------------


class _LayerFit:
    """The fit of one layer's attention, in fp64.

    Args:
        block: The original block with its weights.
        record: The components of the new block.
        layer: The layer of the original model (the teacher), with its input.
        student: The input of the same layer in the new model.
    """

    def __init__(self, block: BlockModule, record: Block, layer: CalibrationLayer, student: Tensor) -> None:
        self.block, self.record, self.student, self.context = block, record, student, layer.context
        self.teacher, self.attention_output = layer.x, layer.run("attention")[1]["attention"][1]
        self.heads = _Heads.of(block)
        self.attention, self.spec = self.heads.attention, self.heads.spec
        self.sublayer = sublayer_of(record, "attention")
        norm = nn.Identity() if self.sublayer.norm is None else block.attention_norm
        before, after = norm(self.teacher), norm(student)
        ones = [torch.ones_like(after[..., :1])] * self.spec.qkv_bias
        self.inputs = torch.cat((after, *ones), dim=-1)  # (B, T, e)
        self.covariance = Moment.of(self.inputs).covariance
        # The original's scores q·k · scale without biases of positions, and its attention weights, for some sequences.
        # Both are (some of B, H, T, T).
        self.some = slice(None, None, -(-after.shape[:2].numel() // SCORED))  # sequences from all of the text
        q, k = (
            torch.unflatten(projected, -1, (-1, self.spec.head_dim)).transpose(1, 2)
            for projected in (self.attention.q_proj(before[self.some]), self.attention.k_proj(before[self.some]))
        )  # (B, heads, T, d)
        self.scores, self.pattern = self._weights(q, k.repeat_interleave(self.spec.group, dim=1), None)

    def fewer_heads(self, new: Attention) -> dict[str, Tensor]:
        """Fit an attention with fewer key-value heads. Return weights and biases of its q, k, v and o projections."""
        spec, heads, inputs = self.spec, self.heads, self.inputs
        if len(heads.keys) % new.kv_heads:  # a group splits the readers of a head, so every reader gets its own key
            keys, values = (part.repeat_interleave(spec.group, dim=0) for part in (heads.keys, heads.values))
            heads = self.heads = replace(heads, keys=keys, values=values)
        fitted: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []  # queries, key, value, outputs of each group
        mixed: list[Tensor] = []
        for group in self._groups(new.kv_heads):
            readers = query_order((group,), spec.heads // len(heads.keys))
            q, k = self._shared_key(group, readers)
            asking = inputs[:, None] @ q.to(inputs).transpose(-1, -2)  # (B, n, T, d)
            asked = (inputs @ k.to(inputs).T)[:, None].expand_as(asking)
            mixed_inputs = mix_inputs(self._weights(asking, asked, readers)[1], inputs)  # (B, n, T, e)
            old = heads.values[list(group)], heads.outputs[readers]
            value, outputs = fit_values(*old, Moment.of(mixed_inputs).covariance)
            fitted.append((q, k, value, outputs))
            mixed.append(mixed_inputs @ value.to(mixed_inputs).T)
        q = torch.cat([fit[0] for fit in fitted]).flatten(0, 1).double()  # (H·d, e), in the new order
        k = torch.cat([fit[1] for fit in fitted]).double()
        o = torch.cat([fit[3] for fit in fitted]).transpose(0, 1).flatten(1)  # (hidden, H·d)
        o = self._refit_output(o, torch.cat(mixed, dim=1))
        columns = torch.unflatten(o, 1, (new.kv_heads, -1, spec.head_dim)).unbind(1)  # (hidden, n, d) a group
        pairs = [(fit[2].double(), output.flatten(0, 1)) for fit, output in zip(fitted, columns, strict=True)]
        if spec.v_norm is None:  # a norm stands between the two
            pairs = [balanced(*pair) for pair in pairs]
        v = torch.cat([value for value, _ in pairs])
        o = torch.cat([output.reshape(len(o), -1) for _, output in pairs], dim=1)
        return heads.projections({"q_proj": q, "k_proj": k, "v_proj": v}) | {"o_proj.weight": o}

    def latent(self, new: Any) -> dict[str, Tensor]:
        """Fit latent attention. Return all its tensors, by their names in the attention."""
        heads, dim = self.heads, _turning(self.spec)
        queries, key = heads.queries, heads.keys[0]
        if dim:
            queries, key = self._shared_key(range(len(heads.keys)), range(self.spec.heads))
        tensors = heads.with_latent(new, queries[:, :dim], key[:dim], self.covariance)
        block = block_with(self.block, self.record, tensors)
        mixed = run_block(block, self.student, self.context, "attention.o_proj")[1]["attention.o_proj"][0]
        by_heads = torch.unflatten(mixed, -1, (self.spec.heads, -1)).transpose(1, 2)
        return tensors | {"o_proj.weight": self._refit_output(tensors["o_proj.weight"], by_heads)}

    def _shared_key(self, group: Sequence[int], readers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Fit one key head that replaces a group of key heads. Return the new queries (n, d, e) and the key (d, e).

        `readers` are the numbers of the query heads that use the keys of the group.
        """
        spec, inputs = self.spec, self.inputs
        queries, keys = self.heads.queries[list(readers)], self.heads.keys[list(group)]
        if spec.q_norm is not None or spec.k_norm is not None:
            return queries, pool_mean(keys)  # a norm follows, so the scores are not bilinear in the inputs
        scale, dim, rows = spec.scale * spec.key_multiplier, _turning(spec), _as_halves(spec)
        angles: Tensor | None = None
        if dim:
            rotary: Any = spec.position
            # The tables of cos and sin include a factor of their own (YaRN, longrope).
            scale *= float(getattr(rotary.scaling, "attention_factor", 1.0)) ** 2
            steps = self.context.position_ids.shape[-1]
            turns = module_of(rotary).frequencies(rotary, steps, inputs.dtype)
            angles = (torch.arange(steps, dtype=inputs.dtype)[:, None] * turns).to(inputs)  # (T, dim/2)
        queries, key = fit_keys(queries[:, rows], keys[:, rows], self.covariance, dim)
        original = self.pattern[:, list(readers)], self.scores[:, list(readers)]
        arguments = (queries.to(inputs), key.to(inputs), inputs[self.some], *original, scale, angles)
        refitted = refit_scores(*arguments, rounds=ROUNDS, steps=STEPS, strength=STRENGTH)
        (q, k), back = (refitted.queries, refitted.key), torch.argsort(rows)
        if dim < spec.head_dim:
            plain, asking = balanced(k[dim:].double(), q[:, dim:].double().transpose(1, 2).flatten(0, 1))
            k = torch.cat((k[:dim], plain.to(k)))
            q = torch.cat((q[:, :dim], torch.unflatten(asking, 0, (len(q), -1)).transpose(1, 2).to(q)), dim=1)
        return q[:, back], k[back]

    def _refit_output(self, start: Tensor, mixed: Tensor) -> Tensor:
        """Fit the output projection (hidden, H·d), so that hidden states after attention are near to the original ones.

        `start` is the projection that the ridge pulls towards. `mixed` has the outputs of the new heads, (B, H, T, d).
        """
        bias = 0 if self.attention.o_proj.bias is None else self.attention.o_proj.bias
        missing = (self.teacher - self.student) / self.sublayer.multiplier
        wanted = self.attention_output - bias + (missing if added(self.sublayer) else 0)
        stream = self.teacher + self.sublayer.multiplier * self.attention_output
        return refit(start, mixed.transpose(1, 2).flatten(2), wanted, stream)

    def _weights(self, q: Tensor, k: Tensor, readers: Sequence[int] | None) -> tuple[Tensor, Tensor]:
        """Return the scores and attention weights of some query heads, (B, n, T, T) each.

        `q` and `k` are (B, n, T, d), before norms and positions. `readers` are the numbers of the query heads, or None
        for all.
        """
        attention, spec, context = self.attention, self.spec, self.context
        position: Any = spec.position
        q = q if attention.q_norm is None else attention.q_norm(q)
        k = k if attention.k_norm is None else attention.k_norm(k)
        if _turning(spec):
            tables, turn = context.tables(position), module_of(position).turn
            q, k = turn(q, tables), turn(k, tables)
        q = q if spec.temperature is None else context.tempered(spec.temperature, q)
        scores = q @ k.transpose(-1, -2) * (spec.scale * spec.key_multiplier)
        biased = scores  # and capped; the fit of scores uses them without a cap
        if _biased(spec):
            bias = context.bias(position, spec.heads, spec.window)[: len(q)]  # all rows have the same positions
            bias = bias if readers is None else bias[:, list(readers)]
            biased = scores + (bias * spec.scale if position.scaled else bias)
        biased = capped(biased, spec.cap)
        mask = context.additive_mask(spec.window, spec.window, spec.chunked, spec.causal)
        biased = biased if mask is None else biased + mask[: len(q)]
        if attention.sinks is None:
            return scores, torch.softmax(biased, dim=-1)
        sinks = attention.sinks if readers is None else attention.sinks[list(readers)]
        column = sinks[:, None, None].to(biased).expand(*biased.shape[:3], 1)
        return scores, torch.softmax(torch.cat((biased, column), dim=-1), dim=-1)[..., :-1]

    def _groups(self, new: int) -> Groups:
        """Divide the old key-value heads into `new` groups. Each group becomes one head.

        Heads with similar functions are grouped together. Neighbouring heads are grouped instead if ALiBi or attention
        sinks fix the order of heads, if queries have a norm, or if the search would take too long.
        """
        heads, spec, dim, rows = self.heads, self.spec, _turning(self.spec), _as_halves(self.spec)
        old = len(heads.keys)
        work = old * (old - 1) // 2 * self.covariance.shape[0] ** 3
        if _biased(spec) or spec.sinks or new == 1 or spec.q_norm is not None or work > _GROUPING_WORK:
            return contiguous_groups(old, new)
        parts = heads.queries[:, rows], heads.keys[:, rows], heads.values, heads.outputs
        return group_similar(head_similarity(*parts, self.covariance, dim), new)


def refit(start: Tensor, inputs: Tensor, wanted: Tensor, stream: Tensor) -> Tensor:
    """Fit a projection from `inputs` to `wanted` by ridge regression that pulls towards the projection `start`.

    Every token is weighted by one over the mean square of its hidden states in the original model (`stream`). Otherwise
    a few tokens with huge activations would determine the fit.
    """
    weight = stream.square().mean(dim=-1).clamp_min(1e-30).reciprocal()
    return ridge_by_held_out(start, inputs, wanted, weight)


def sublayer_of(block: Block, slot: str) -> SubLayer:
    """Return the sub-layer of a block by its slot: "attention", "feed_forward" or "recurrence"."""
    return next(sublayer for sublayer in block.sublayers if sublayer.mixer.slot == slot)


def added(sublayer: SubLayer) -> bool:
    """Return whether no norm follows a sub-layer, so that its output is added to the residual stream directly.

    A constant multiplier of the output is allowed.
    """
    return sublayer.output_norm is None and sublayer.sum_norm is None


def refit_down(
    block: BlockModule, student: Tensor, teacher_output: Tensor, context: Context
) -> tuple[Tensor, Tensor | None]:
    """Fit the down projection of a block with a new attention, so that its output is near to the original block's.

    Nothing is fitted in a mixture of experts, or if a norm follows the feed-forward.

    Args:
        block: The block with its new attention. Its down projection is overwritten.
        student: The block's input in the new model.
        teacher_output: The block's output in the original model.
        context: The positions and masks of the text.

    Returns:
        The new block's output, and the weight of its down projection. This weight is the old one if a norm follows, and
        None for a mixture of experts.
    """
    if isinstance(block.feed_forward, MixtureOfExpertsModule):
        return run_block(block, student, context)[0], None
    output, seen = run_block(block, student, context, DOWN)
    inner, down_output = seen[DOWN]
    linear, sublayer = block.feed_forward.down_proj, sublayer_of(block.spec, "feed_forward")
    if not added(sublayer):
        return output, linear.weight.detach().double()
    bias = 0 if linear.bias is None else linear.bias.detach()
    factor = sublayer.multiplier
    wanted = (teacher_output - (output - factor * down_output)) / factor - bias
    fitted = refit(linear.weight.detach().double(), inner, wanted, teacher_output)
    with torch.no_grad():
        linear.weight.copy_(fitted)
        return output + factor * (linear(inner) - down_output), fitted


def _turning(spec: Attention) -> int:
    """Return the number of elements of a head that RoPE rotates. Raises SwapRefused for rotations other than RoPE."""
    position: Any = spec.position
    if position is None or not position.turns:
        return 0
    if not hasattr(position, "pairs"):
        raise unknown("an attention's position encoding", position, "RoPE")
    return int(position.dim)


def _biased(spec: Attention) -> bool:
    """Return whether the position encoding adds biases to the scores, as ALiBi does."""
    return spec.position is not None and spec.position.biases


def _as_halves(spec: Attention) -> Tensor:
    """Return the order of a head's elements in which the two elements of rotary pair i are at i and i + dim/2."""
    order, dim, position = torch.arange(spec.head_dim), _turning(spec), spec.position
    if not dim or getattr(position, "pairs", "halves") == "halves":
        return order
    return torch.cat((order[:dim].reshape(-1, 2).T.reshape(-1), order[dim:]))
