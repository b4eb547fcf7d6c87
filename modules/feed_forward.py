"""Feed-forwards: plain, gated, and a mixture of several."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..components import (
    Arithmetic,
    DenseBesideExperts,
    ExpertLatent,
    FeedForward,
    GatedFeedForward,
    LayerInput,
    Mixer,
    MixtureOfExperts,
)
from .layers import (
    ACTIVATIONS,
    FusedLinears,
    GatheredLinears,
    LinearModule,
    PromotedLinear,
    StackedLinears,
    WideLinear,
    activation_of,
    at_least_float32,
)
from .registry import build_module, computes


@computes(FeedForward)
class _FeedForwardModule(nn.Module):
    """A plain feed-forward: down(activation(up(x)))."""

    def __init__(self, spec: FeedForward, kernel: str = "sdpa") -> None:  # noqa: ARG002 - no feed-forward has two
        super().__init__()
        self.up_proj = LinearModule(spec.hidden_size, spec.intermediate_size, spec.up_bias, spec.arithmetic)
        self.down_proj = LinearModule(spec.intermediate_size, spec.hidden_size, spec.down_bias, spec.arithmetic)
        self.activation = activation_of(spec.activation)

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return self.lowered(self.gated(self.raised(x)))

    def raised(self, x: Tensor) -> Tensor:
        """Project x to the intermediate size, before the activation: (…, hidden) -> (…, intermediate)."""
        units: Tensor = self.up_proj(x)
        return units

    def gated(self, raised: Tensor) -> Tensor:
        """Apply the activation to the result of `raised`."""
        return self.activation(raised)

    def lowered(self, inner: Tensor) -> Tensor:
        """Project the result of `gated` down to the hidden size."""
        out: Tensor = self.down_proj(inner)
        return out


@computes(GatedFeedForward)
class _GatedFeedForwardModule(nn.Module):
    """A gated feed-forward: down(activation(gate(x)) · up(x))."""

    def __init__(self, spec: GatedFeedForward, kernel: str = "sdpa") -> None:  # noqa: ARG002 - no feed-forward has two
        super().__init__()
        self.gate_proj = LinearModule(spec.hidden_size, spec.intermediate_size, spec.up_bias, spec.arithmetic)
        self.up_proj = LinearModule(spec.hidden_size, spec.intermediate_size, spec.up_bias, spec.arithmetic)
        down: Arithmetic = "conv1d" if spec.down_turned else spec.arithmetic
        self.down_proj = LinearModule(spec.intermediate_size, spec.hidden_size, spec.down_bias, down)
        self.inner_norm = build_module(spec.inner_norm) if spec.inner_norm else None
        self.fused = FusedLinears() if spec.fused else None
        self.activation = ACTIVATIONS[spec.activation]
        self.limit, self.up_shift, self.sparsity = spec.limit, spec.up_shift, spec.sparsity
        self.gate_multiplier = spec.gate_multiplier

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        if self.limit is not None or self.up_shift:
            inner = self.gated(
                torch.cat((self.gate_proj(x), self.up_proj(x)), -1) if self.fused is None else self.raised(x)
            )
        elif self.fused is None:
            gate = self.activation(_sparse(self._scaled(self.gate_proj(x)), self.sparsity))
            inner = gate * self.up_proj(x) if torch.is_grad_enabled() else gate.mul_(self.up_proj(x))
        else:
            inner = self.gated(self.raised(x))
        return self.lowered(inner)

    def lowered(self, inner: Tensor) -> Tensor:
        """Project the result of `gated` down to the hidden size, after the inner norm if there is one."""
        out: Tensor = self.down_proj(inner if self.inner_norm is None else self.inner_norm(inner))
        return out

    def raised(self, x: Tensor) -> Tensor:
        """Return gate(x) and up(x) concatenated, (…, 2·intermediate), computed as one matrix product."""
        assert self.fused is not None
        return torch.cat(self.fused((self.gate_proj, self.up_proj), x), dim=-1)

    def _scaled(self, gate: Tensor) -> Tensor:
        return gate if self.gate_multiplier == 1 else gate * self.gate_multiplier

    def gated(self, raised: Tensor) -> Tensor:
        """Return activation(gate) · up for the result of `raised`."""
        gate, up = raised.chunk(2, dim=-1)
        gate = _sparse(self._scaled(gate), self.sparsity)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self.activation(gate) * (up + self.up_shift if self.up_shift else up)


def _sparse(x: Tensor, share: float | None) -> Tensor:
    """Return max(0, x - q), in which about the fraction `share` of every row's elements is 0 (Gemma 3n).

    q is the `share`-quantile of a normal distribution with the mean and the standard deviation of the row. If `share`
    is None, return x.
    """
    if share is None:
        return x
    of_all = torch.full((), share, device=x.device)  # in fp32, as transformers; filled, since a graph cannot copy it
    deviations = torch.erfinv(2 * of_all - 1) * math.sqrt(2)
    least = x.mean(dim=-1, keepdim=True) + x.std(dim=-1, keepdim=True, unbiased=False) * deviations.to(x.dtype)
    return (x - least).relu_()


@computes(LayerInput)
class _LayerInputModule(nn.Module):
    """The sub-layer for a layer's additional input: down(activation(gate(x)) · layer_input)."""

    def __init__(self, spec: LayerInput, kernel: str = "sdpa") -> None:  # noqa: ARG002 - it has one
        super().__init__()
        self.gate_proj = LinearModule(spec.hidden_size, spec.width, False)
        self.down_proj = LinearModule(spec.width, spec.hidden_size, False)
        self.activation = ACTIVATIONS[spec.activation]

    def forward(self, x: Tensor, context: Any, *_: Any) -> Tensor:
        gate, given = self.activation(self.gate_proj(x)), context.layer_input()
        out: Tensor = self.down_proj(gate * given if torch.is_grad_enabled() else gate.mul_(given))
        return out


class _Choice(nn.Module):
    """A bias that is added to the router's scores (N, experts) for the choice of experts, but not for their weights."""

    def __init__(self, spec: MixtureOfExperts) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(spec.experts))
        self.wide = spec.wide_choice

    def forward(self, scores: Tensor) -> Tensor:
        return scores + self.bias

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Choice:
        super()._apply(at_least_float32(fn) if self.wide else fn, recurse)  # type: ignore[no-untyped-call]
        return self


class _Factors(nn.Module):
    """A learned factor per expert, by which the router's weights (N, top_k) of the chosen experts are multiplied."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts))

    def forward(self, weights: Tensor, chosen: Tensor) -> Tensor:
        return weights * self.weight[chosen]


@computes(DenseBesideExperts)
class _DenseBesideExpertsModule(nn.Module):
    """A dense feed-forward and a mixture of experts that read the same input. Their outputs are normed and added."""

    def __init__(self, spec: DenseBesideExperts, kernel: str = "sdpa") -> None:
        super().__init__()
        for name, part in spec.children():
            self.add_module(name, build_module(part, *((kernel,) if isinstance(part, Mixer) else ())))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        dense: Tensor = self.dense_output_norm(self.dense(self.dense_norm(x)))
        return dense + self.mixture_output_norm(self.mixture(x, *rest))  # type: ignore[no-any-return]


@computes(ExpertLatent)
class _ExpertLatentModule(nn.Module):
    """The projections before and after experts that compute at a smaller width (the latent). The mixture calls them."""

    def __init__(self, spec: ExpertLatent) -> None:
        super().__init__()
        self.down_proj = LinearModule(spec.hidden_size, spec.width, spec.bias)
        self.up_proj = LinearModule(spec.width, spec.hidden_size, spec.bias)


@computes(MixtureOfExperts)
class MixtureOfExpertsModule(nn.Module):
    """A mixture of experts: for every token the weighted sum of the experts that the router chose.

    See `components.MixtureOfExperts`. Tokens are sorted by expert, and an expert computes all of its tokens at once. A
    token's results are summed in the order of their weights, in the router's dtype. transformers' default
    (integrations/moe.py, grouped_mm) rounds in this way.
    """

    def __init__(self, spec: MixtureOfExperts, kernel: str = "sdpa") -> None:  # noqa: ARG002 - no feed-forward has two
        super().__init__()
        self.spec = spec
        router = WideLinear if spec.wide_router else PromotedLinear if spec.routed_in == "float32" else LinearModule
        self.router = router(spec.hidden_size, spec.experts, spec.router_bias)
        self.choice = _Choice(spec) if spec.choice_bias else None
        self.experts = nn.ModuleList(build_module(spec.expert) for _ in range(spec.experts))
        self.shared = None if spec.shared is None else build_module(spec.shared)
        expert = spec.expert
        plain = isinstance(expert, GatedFeedForward) and not (expert.up_bias or expert.down_bias or expert.inner_norm)
        over_all = spec.summed == "over all" and spec.weighs == "inputs" and plain
        self.into = StackedLinears() if over_all else None
        self.out_of = StackedLinears()
        self.gathered = GatheredLinears(), GatheredLinears()
        self.latent: Any = None if spec.latent is None else build_module(spec.latent)
        self.router_norm = build_module(spec.router_norm) if spec.router_norm else None
        self.expert_norm = build_module(spec.expert_norm) if spec.expert_norm else None
        self.expert_scale = _Factors(spec.experts) if spec.expert_scale else None
        gated = spec.shared_gate and spec.shared is not None
        self.shared_gate = LinearModule(spec.hidden_size, 1, False) if gated else None

    def forward(self, x: Tensor, context: Any = None, *_: Any) -> Tensor:  # (B, T, hidden)
        rows = x.reshape(-1, x.shape[-1])
        static = getattr(context, "capacity", None) is not None
        mix = self._gathered if static and self._can_gather() else self.mix
        weights, chosen = self.route(rows)  # both (N, top_k), N = B·T
        given = rows if self.expert_norm is None else self.expert_norm(rows)
        if self.latent is None:
            mixed = mix(given, weights, chosen)
        else:
            mixed = self.latent.up_proj(mix(self.latent.down_proj(given), weights, chosen))
        mixed = mixed.reshape(x.shape)
        if self.shared is None:
            return mixed
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = torch.sigmoid(self.shared_gate(x)) * shared
        both: Tensor = mixed + shared
        return both / 2 if self.spec.averaged else both

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the indices of the experts chosen for tokens (N, hidden), both (N, top_k)."""
        spec = self.spec
        wide = torch.promote_types(x.dtype, torch.float32)
        x = x if self.router_norm is None else self.router_norm(x)
        x = x if spec.router_multiplier == 1 else x * spec.router_multiplier
        logits: Tensor = self.router(x.to(wide) if spec.routed_in == "float32" else x)
        dtype = wide if spec.scored_in == "float32" else logits.dtype
        if spec.jitter is not None:
            (weights, chosen), summed = self._one_after_another(logits.to(dtype), spec.jitter), False
        elif spec.biased == "logits":
            chosen, summed = self._chosen(logits.to(dtype)), False
            weights = self._scores(logits.to(dtype).gather(1, chosen))
        elif spec.of_chosen:
            largest, chosen = logits.topk(spec.top_k, dim=-1, sorted=spec.in_order)
            of_all = spec.chosen_by == "logits of all"
            weights = self._scores(logits.to(dtype)).gather(1, chosen) if of_all else self._scores(largest.to(dtype))
            summed = spec.scores == "softmax"
        else:
            scores = self._scores(logits.to(dtype))
            chosen = self._chosen(scores)
            weights, summed = self.weighing(scores).gather(1, chosen), False
        if spec.normalise and not summed:
            norm = spec.total == "norm"
            total = weights.norm(1, -1, keepdim=True) if norm else weights.sum(dim=-1, keepdim=True)
            weights = weights / (total + spec.added if spec.added else total)
        weights = weights if spec.multiplier == 1 else weights * spec.multiplier
        weights = weights if self.expert_scale is None else self.expert_scale(weights, chosen)
        return (weights.to(x.dtype) if spec.rounded else weights), chosen

    def _one_after_another(self, logits: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
        """Choose experts one after the other, as Phi-3.5-MoE does. Return their weights and indices, both (N, top_k).

        The weight of an expert comes from a softmax over the experts that are not chosen yet and whose logits are near
        its own. `MixtureOfExperts.jitter` says how near.
        """
        used = torch.zeros_like(logits, dtype=torch.bool)
        weights, chosen = [], []
        for _ in range(self.spec.top_k):
            with torch.no_grad():
                largest, best = logits.masked_fill(used, float("-inf")).max(dim=-1, keepdim=True)
                far = (largest - logits) / logits.abs().clamp(min=largest) > 2 * jitter
                excluded = far | used
                used = used.scatter(-1, best, True)
            weights.append(torch.softmax(logits.masked_fill(excluded, float("-inf")), dim=-1).gather(-1, best))
            chosen.append(best)
        return torch.cat(weights, dim=-1), torch.cat(chosen, dim=-1)

    def weighing(self, scores: Tensor) -> Tensor:
        """Return the weights of all experts, (N, experts): the router's scores without the bias for the choice.

        A subclass in `parity.mutations` overrides this method to add the bias, which is a typical mistake.
        """
        return scores

    def _scores(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits, dim=-1) if self.spec.scores == "softmax" else torch.sigmoid(logits)

    def _chosen(self, scores: Tensor) -> Tensor:
        """Return the indices (N, top_k) of the experts with the highest scores (N, experts)."""
        spec = self.spec
        scores = scores if self.choice is None else self.choice(scores)
        if spec.groups > 1:
            by_group = torch.unflatten(scores, -1, (spec.groups, -1))
            best = by_group.topk(spec.group_best, dim=-1)[0].sum(dim=-1)
            groups = best.topk(min(spec.top_groups, spec.groups), dim=-1, sorted=False)[1]
            out = torch.ones_like(best, dtype=torch.bool).scatter_(1, groups, False)
            scores = by_group.masked_fill(out[..., None], float("-inf")).flatten(1)
        return scores.topk(spec.top_k, dim=-1, sorted=spec.in_order)[1]

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return the weighted sum of the experts' outputs for tokens x (N, hidden).

        `weights` and `chosen` are the results of `route`, both (N, top_k).
        """
        if self.spec.summed == "by expert":
            return self._one_by_one(x, weights, chosen)
        if self.into is not None:
            return self._over_all(x, weights, chosen)
        top_k = chosen.shape[-1]
        numbers, order = chosen.reshape(-1).sort()
        by_expert = x[order // top_k]  # (N·top_k, hidden), by expert
        counts = numbers.bincount(minlength=len(self.experts)).tolist()
        inputs, weighing = self.spec.weighs == "inputs", weights.reshape(-1)[order, None]
        by_expert = by_expert * weighing if inputs else by_expert
        done = self._outputs(by_expert, counts)
        weighted = done if inputs else done * weighing
        in_place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return weighted[in_place].view(-1, top_k, x.shape[-1]).sum(dim=1).to(x.dtype)

    def _one_by_one(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return the weighted sum of the experts' outputs, computed one expert after the other."""
        total = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            places, tokens = torch.where((chosen == number).T)
            if len(tokens):
                given, weighing = x[tokens], weights[tokens, places, None]
                inputs = self.spec.weighs == "inputs"
                done = expert(given * weighing) if inputs else expert(given) * weighing
                total = total.index_add(0, tokens, done.to(total.dtype))
        return total

    def _can_gather(self) -> bool:
        """Return whether `_gathered` computes these experts: linears and an activation, all without parameters more."""
        first: Any = self.experts[0]
        plain = getattr(first, "inner_norm", None) is None and not isinstance(first.activation, nn.Module)
        return plain and self.into is None and all(GatheredLinears.accepts(row) for row in self._linears())

    def _linears(self) -> list[list[nn.Module]]:
        """Return the linears before the activation of every expert, and then those after it."""
        before = ("gate_proj", "up_proj") if hasattr(self.experts[0], "gate_proj") else ("up_proj",)
        return [
            [getattr(expert, name) for name in names] for names in (before, ("down_proj",)) for expert in self.experts
        ]

    def _gathered(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return the result of `mix` for few tokens, without reading on the host which experts were chosen.

        Every token multiplies copies of the weights of its experts.
        """
        spec, top_k, first = self.spec, chosen.shape[-1], cast("Any", self.experts[0])
        if spec.summed == "by expert":
            chosen, order = chosen.sort(dim=-1)
            weights = weights.gather(1, order)
        numbers, weighing = chosen.reshape(-1), weights.reshape(-1, 1)
        rows = x[:, None].expand(-1, top_k, -1).reshape(-1, x.shape[-1])  # (N·top_k, hidden)
        linears, fused = self._linears(), [getattr(expert, "fused", None) for expert in self.experts]
        count = len(self.experts)
        rows = rows * weighing if spec.weighs == "inputs" else rows
        inner = first.gated(self.gathered[0](linears[:count], fused, numbers, rows))
        done = self.gathered[1](linears[count:], [None] * count, numbers, inner)
        done = done if spec.weighs == "inputs" else done * weighing
        by_token = done.view(-1, top_k, x.shape[-1])
        if spec.summed == "by expert":
            return reduce(torch.add, by_token.to(x.dtype).unbind(1), torch.zeros_like(x))
        return by_token.sum(dim=1).to(x.dtype)

    def _over_all(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return the weighted sum of the experts' outputs, with batched matrix products over all experts and tokens.

        The input of an expert is zero at tokens that did not choose it, and so is its output. The family's code in
        transformers computes it like this, and one product per expert would round differently.
        """
        weighing = x.new_zeros(len(x), len(self.experts), dtype=weights.dtype).scatter(1, chosen, weights)
        experts: list[Any] = list(self.experts)
        given = x * weighing.t()[..., None]  # (experts, N, hidden)
        assert self.into is not None
        inner = experts[0].gated(self.into([(expert.gate_proj, expert.up_proj) for expert in experts], given))
        return self.out_of([(expert.down_proj,) for expert in experts], inner).sum(dim=0)

    def _outputs(self, by_expert: Tensor, counts: list[int]) -> Tensor:
        """Return the experts' outputs for inputs that are sorted by expert.

        `counts` has the number of rows of every expert: the first counts[0] rows are those of expert 0, and so on.
        """
        used: list[Any] = [expert for expert, count in zip(self.experts, counts, strict=True) if count]
        sizes = [count for count in counts if count]
        pairs = zip(used, torch.split(by_expert, sizes), strict=True)
        first = used[0]
        if getattr(first, "fused", first) is None or isinstance(first.activation, nn.Module):
            return torch.cat([expert(tokens) for expert, tokens in pairs])
        # All tokens' activations at once: a single row of one expert would be contiguous, and gelu rounds differently.
        inner = first.gated(torch.cat([expert.raised(tokens) for expert, tokens in pairs]))
        return torch.cat([expert.lowered(part) for expert, part in zip(used, torch.split(inner, sizes), strict=True)])
