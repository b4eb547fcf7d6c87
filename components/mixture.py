"""Mixtures of experts: feed-forwards from which a router chooses some for every token."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from msgspec import Meta

from ..errors import ConfigError
from .base import Component, Mixer, Positive, Size, Weight, bias
from .feed_forward import UNITS, ExpertLatent, FeedForward, GatedFeedForward
from .norms import Norm
from .operations import (
    ActivationOperation,
    Add,
    AnyOperation,
    Choose,
    Combine,
    Gather,
    Linear,
    Product,
    Program,
    ScaleOperation,
    Sizes,
    linear,
)
from .words import Words

__all__ = ["MOST_EXPERTS", "DenseBesideExperts", "MixtureOfExperts"]

MOST_EXPERTS = 1024  # the largest number of experts in a mixture


class MixtureOfExperts(Mixer, Component, frozen=True):
    """A mixture of experts: a router chooses some of several feed-forwards for every token (Shazeer 1701.06538).

    The router computes p = scores(router(x)), a softmax over all experts or a sigmoid for each (DeepSeek-V3
    2412.19437). The output is Σ p_e · expert_e(x) over the experts e with the `top_k` largest p.
    """

    label = "router"
    forgotten: ClassVar[dict[str, str]] = {
        "normalise": "weights of experts normalised or not",
        "added": "weights of experts divided by their sum alone",
        "scores": "a sigmoid router taken for softmax",
        "multiplier": "weights of experts not scaled",
        "choice_bias": "bias of the experts' choice dropped",
        "router_bias": "router bias dropped",
        "groups": "experts chosen from all groups",
        "top_groups": "experts chosen from one group",
        "group_best": "groups chosen by two experts",
        "shared": "shared expert left out",
        "shared_gate": "gate of the shared expert left out",
        "averaged": "experts and shared expert not averaged",
        "jitter": "experts weighed by one softmax",
        "weighs": "outputs of experts weighed, not their inputs",
        "biased": "bias of the choice on scores, not on logits",
        "router_norm": "norm before the router left out",
        "router_multiplier": "what the router reads not scaled",
        "expert_norm": "norm before experts left out",
        "expert_scale": "weights of experts without their own factors",
        "latent": "experts on the stream, not on their latent",
    }
    rounds = (
        "routed_in",
        "chosen_by",
        "scored_in",
        "in_order",
        "rounded",
        "wide_router",
        "wide_choice",
        "summed",
        "total",
    )
    slot = "feed_forward"
    axes = ("intermediate_size", "shared_size")
    described = ("expert",)

    hidden_size: Size
    """The width of the residual stream."""
    experts: Annotated[int, Meta(ge=1, le=MOST_EXPERTS)]
    """The number of experts."""
    top_k: Size
    """The number of experts that the router chooses for a token."""
    expert: FeedForward | GatedFeedForward
    """The form of every expert. Each expert has weights of its own."""
    normalise: bool = True
    """Whether the p of the chosen experts are divided by their sum (Mixtral 2401.04088). Then a mixture of equal
    experts gives the output of one of them."""
    added: Annotated[float, Meta(ge=0)] = 0.0
    """A number that is added to the sum by which `normalise` divides (LFM2-MoE)."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """The function from logits to p: a softmax over all experts, or a sigmoid for each (DeepSeek-V3 2412.19437)."""
    multiplier: Positive = 1.0
    """The factor by which p is multiplied, after `normalise`."""
    choice_bias: bool = False
    """Whether a learnt number per expert is added to p for the choice of experts, but not for their weights
    (2408.15664)."""
    biased: Literal["scores", "logits"] = "scores"
    """Whether the numbers of `choice_bias` are added to p ("scores") or to the logits."""
    router_bias: bool = False
    """Whether the linear layer of the router has a bias."""
    groups: Size = 1
    """The number of groups of experts. With several, the router first chooses groups, and then experts in them."""
    top_groups: Size = 1
    """The number of groups that are chosen."""
    group_best: Literal[1, 2] = 2
    """How groups are chosen: by the sum of the largest p in a group. The value is the number of p in this sum."""
    shared: FeedForward | GatedFeedForward | None = None
    """An expert that every token uses. Several shared experts equal one whose width is the sum of theirs."""
    shared_gate: bool = False
    """Whether the shared expert's output is multiplied by σ(gate(x)), one number per token."""
    averaged: bool = False
    """Whether the output is the mean of the shared expert's output and the sum over the chosen experts, instead of
    their sum."""
    jitter: Positive | None = None
    """With j, every chosen expert has a separate softmax (SparseMixer 2409.12136). This softmax leaves out the experts
    that were chosen before, and those whose logits are below the expert's own l by more than 2j · max(|logit|, l)."""
    weighs: Literal["outputs", "inputs"] = "outputs"
    """What p multiplies: an expert's output, or its input (Llama 4)."""
    router_norm: Norm | None = None
    """The norm of the router's input."""
    router_multiplier: Positive = 1.0
    """The factor by which the router's input is multiplied, after its norm."""
    expert_norm: Norm | None = None
    """The norm of the experts' input."""
    expert_scale: bool = False
    """Whether the final weight of an expert is multiplied by a learnt number of the expert (Gemma 4)."""
    latent: ExpertLatent | None = None
    """The projections to and from a latent. If set, experts read a projection of x to the latent and write to the
    latent. The sum of their outputs is projected back."""
    routed_in: Literal["input", "float32"] = "input"
    """The dtype of the router's product: that of its input, or at least fp32."""
    chosen_by: Literal["scores", "logits", "logits of all"] = "scores"
    """How experts are chosen. "scores": by the p of all experts. "logits": by the logits, and p is computed for the
    chosen experts only. "logits of all": by the logits, and p is the sigmoid of all logits (Llama 4)."""
    scored_in: Literal["float32", "input"] = "float32"
    """The dtype of p: at least fp32, or that of the logits."""
    in_order: bool = True
    """Whether a token's experts are summed in the order of their p. Otherwise they are summed in the order of their
    indices."""
    rounded: bool = False
    """Whether the experts' weights (p) are rounded to the dtype of x before they multiply."""
    wide_router: bool = False
    """Whether the router's weight is stored in fp32, whatever the model's dtype is."""
    wide_choice: bool = False
    """Whether the numbers of `choice_bias` are stored in fp32, whatever the model's dtype is."""
    summed: Literal["by token", "by expert", "over all"] = "by token"
    """How the outputs of experts are summed. "by token": all experts of a token at once. "by expert": one expert after
    the other is added, and the sum is rounded every time (DBRX). "over all": every expert computes all tokens in one
    product, with zeros as the input for tokens that did not choose it (Llama 4). This costs as much as if all experts
    were chosen."""
    total: Literal["sum", "norm"] = "sum"
    """How `normalise` computes the sum of p: as a sum, or as a norm (DBRX). The two add in different orders."""

    def __post_init__(self) -> None:
        self._check_router()
        self._check_widths()

    def _check_router(self) -> None:
        if self.top_k > self.experts:
            raise ConfigError(f"top_k is {self.top_k}, but there are only {self.experts} experts to choose from")
        if self.experts % self.groups or (self.groups > 1 and self.experts < self.group_best * self.groups):
            raise ConfigError(
                f"{self.experts} experts cannot be divided into {self.groups} equal groups of at least "
                f"{self.group_best} experts"
            )
        if self.top_k > self.eligible:
            raise ConfigError(
                f"top_k is {self.top_k}, but the {self.top_groups} groups that the router chooses "
                f"(top_groups) have only {self.eligible} experts"
            )
        plain = self.scores == "softmax" and not self.choice_bias and self.groups == 1
        if self.jitter is not None and not plain:
            raise ConfigError(
                "a router with jitter needs scores: softmax, without choice_bias and without groups of experts"
            )
        if self.expert_scale and self.choice_bias:
            raise ConfigError("a router with expert_scale cannot have choice_bias")

    def _check_widths(self) -> None:
        for norm in (self.router_norm, self.expert_norm):
            if norm is not None and norm.size != self.hidden_size:
                raise ConfigError(
                    f"router_norm or expert_norm has size {norm.size}, but the hidden size is {self.hidden_size}"
                )
        if self.latent is not None and self.latent.hidden_size != self.hidden_size:
            raise ConfigError(
                f"the latent projection has hidden_size {self.latent.hidden_size}, but the mixture has "
                f"hidden_size {self.hidden_size}"
            )
        if getattr(self.expert, "inside", False) != (self.latent is not None):
            raise ConfigError(
                "the experts of a mixture need inside: true if the mixture has a latent projection (latent), and "
                "inside: false if it has none"
            )
        for inner, wide, what in (
            (self.expert, self.expert_width, "the experts have"),
            (self.shared, self.hidden_size, "the shared expert has"),
        ):
            if inner is not None and inner.hidden_size != wide:
                raise ConfigError(f"{what} hidden_size {inner.hidden_size}, but the input has size {wide}")

    @property
    def intermediate_size(self) -> int:
        """The number of hidden units of an expert."""
        return self.expert.intermediate_size

    @property
    def expert_width(self) -> int:
        """The width of an expert's input and output."""
        return self.hidden_size if self.latent is None else self.latent.width

    @property
    def shared_size(self) -> int:
        """The number of hidden units of the shared expert, or 0."""
        return 0 if self.shared is None else self.shared.intermediate_size

    @property
    def eligible(self) -> int:
        """The number of experts in the chosen groups."""
        return self.experts // self.groups * min(self.top_groups, self.groups)

    @property
    def extras(self) -> list[str]:
        """The names of the fields by which this mixture differs from a plain top-k softmax over experts.

        Examples are biases, groups of experts, a factor and a shared expert.
        """
        defaults = self.choices().items()
        return [name for name, default in defaults if name != "normalise" and getattr(self, name) != default]

    @property
    def of_chosen(self) -> bool:
        """Whether experts are chosen by their logits, and scores are computed for the chosen experts only.

        The same experts would be chosen by the scores of all experts, because a softmax or sigmoid keeps the order.
        """
        alike = self.normalise or self.scores == "sigmoid"
        plain = alike and not self.choice_bias and self.groups == 1 and self.jitter is None
        return plain and (self.chosen_by == "logits" or (self.chosen_by != "scores" and self.scores == "sigmoid"))

    def children(self) -> Iterator[tuple[str, Component]]:
        yield from ((f"experts.{number}", self.expert) for number in range(self.experts))
        named: dict[str, Component | None] = {"latent": self.latent, "shared": self.shared}
        named |= {"router_norm": self.router_norm, "expert_norm": self.expert_norm}
        yield from ((name, part) for name, part in named.items() if part is not None)

    def weights(self) -> dict[str, Weight]:
        weights = {"router.weight": Weight((self.experts, self.hidden_size), "router")}
        if self.router_bias:
            weights["router.bias"] = bias(self.experts)
        if self.choice_bias:
            weights["choice.bias"] = bias(self.experts)
        if self.expert_scale:
            weights["expert_scale.weight"] = Weight((self.experts,), "inner", 1.0)
        if self.shared_gate and self.shared is not None:
            weights["shared_gate.weight"] = Weight((1, self.hidden_size), "router")
        return weights

    def words(self) -> dict[str, Words]:
        one, few = self.expert.aspects(), f"{self.top_k} of {self.experts} experts"
        name, (short, data, whole) = next(iter(one.items()))
        counts = {"experts": self.experts, "top_k": self.top_k, "normalise": self.normalise}
        data = data | counts | {field: value for field, (_, value) in self.undescribed().items() if field not in counts}
        routed, given = ("", "") if self.normalise else (", weights as routed", ", weights as the router gives them")
        more = "".join(f", {words}" for words in self._extras_in_words())
        return one | {name: Words(f"{short}, {few}{routed}{more}", data, f"{few}{given}{more}, each {whole}")}

    def _extras_in_words(self) -> Iterator[str]:
        """Yield a short description of everything that a plain top-k softmax over experts does not have."""
        if self.scores == "sigmoid" or self.choice_bias:
            of = " of logits" if self.biased == "logits" else ""
            yield f"{self.scores}{f' + bias{of}' if self.choice_bias else ''}"
        if self.jitter is not None:
            yield f"a softmax each, within {2 * self.jitter:g}"
        if self.multiplier != 1:
            yield f"× {self.multiplier:g}"
        if self.weighs == "inputs":
            yield "inputs weighed"
        if self.router_bias:
            yield "router bias"
        if self.groups > 1 or self.top_groups > 1:
            yield f"{self.top_groups} of {self.groups} groups"
        if self.latent is not None:
            yield f"in a latent of {self.latent.width:,}"
        if self.shared is not None:
            width = f"{self.shared.intermediate_size:,}"
            yield f"shared {width}{', gated' if self.shared_gate else ''}{', averaged' if self.averaged else ''}"

    def biases(self) -> dict[str, Words]:
        return self.expert.biases() | ({"router": Words("router", True)} if self.router_bias else {})

    def letters(self, part: str = "") -> dict[str, int]:
        return {} if part else {"E": self.experts}

    def share(self, devices: int) -> Self:
        return self._with_parts(lambda part: part.share(devices))

    def small(self, hidden: int) -> Self:
        """Return a small copy. If the router leaves out some of the experts or groups, so does that of the copy.

        A copy with groups has two experts per group. It has three if the router chooses one group per token, and
        several of the group's experts, but not all.
        """
        if self.groups > 1:
            groups = min(self.groups, 4)
            top_groups = min(self.top_groups, groups - (self.top_groups < self.groups))
            members = 3 if top_groups == 1 < self.top_k < self.eligible else 2
            sizes = {"groups": groups, "top_groups": top_groups, "experts": members * groups}
            sizes["top_k"] = min(self.top_k, 2)
        else:
            top_k = min(self.top_k, 3)
            sizes = {"experts": top_k if self.top_k == self.experts else min(self.experts, 4), "top_k": top_k}
        inner = hidden if self.latent is None else hidden // 2
        expert = msgspec.structs.replace(
            self.expert, hidden_size=inner, intermediate_size=min(3 * hidden // 2, UNITS - 64)
        )
        latent = None if self.latent is None else msgspec.structs.replace(self.latent, hidden_size=hidden, width=inner)
        shared = None if self.shared is None else self.shared.small(hidden)
        norms = {name: getattr(self, name) for name in ("router_norm", "expert_norm")}
        small = {name: norm and norm.small(hidden) for name, norm in norms.items()}
        return msgspec.structs.replace(
            self, hidden_size=hidden, expert=expert, shared=shared, latent=latent, **small, **sizes
        )

    def slips(self) -> dict[str, Self]:
        more = "an expert a token too many"
        counts = {more: self.top_k + 1, f"{more}, the other way round": self.top_k - 1}
        slips = {name: msgspec.structs.replace(self, top_k=k) for name, k in counts.items() if 1 <= k <= self.eligible}
        one = self.scores == "softmax" and self.jitter is None  # the sum of all weights is 1
        if self.top_k < self.experts or not one:
            slips["weights of experts normalised or not"] = msgspec.structs.replace(self, normalise=not self.normalise)
        return slips

    def disorder(self) -> dict[str, dict[str, list[int]]]:
        order = [*range(1, self.experts), 0]
        modules = ("router", *(("choice",) if self.choice_bias else ("expert_scale",) if self.expert_scale else ()))
        return {"experts in other places": dict.fromkeys(modules, order)}

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        router = self._router(path, source, shape)
        experts = self._experts(path, source, router[-1].id, shape)
        return (*router, *experts, *self._with_shared(path, source, experts[-1].id, shape))

    def _router(self, path: str, source: str, shape: Sizes) -> list[AnyOperation]:
        """Return the operations of the router. The last operation chooses the experts of every token."""
        program: list[AnyOperation] = []
        read = source
        if self.router_norm is not None:
            program += self.router_norm.operations(f"{path}.router_norm", source, shape)
            read = program[-1].id
        if self.router_multiplier != 1:
            factor = self.router_multiplier
            program.append(ScaleOperation(f"{path}.router_scaled", (read,), shape, "norms", factor=factor))
            read = program[-1].id
        wide = "" if self.routed_in == "input" else "input" if self.wide_router else "both"
        program.append(linear(self, "router", path, read, (*shape[:-1], self.experts), "router", wide=wide))
        names = ("top_k", "experts", "normalise", "added", "scores", "multiplier", "groups", "top_groups", "group_best")
        fields: dict[str, Any] = {name: getattr(self, name) for name in (*names, "jitter", "biased")}
        fields["of_chosen"] = (self.of_chosen and self.chosen_by == "logits") or self.biased == "logits"
        fields["wide"] = self.scored_in == "float32"
        name = "choice" if self.choice_bias else "expert_scale" if self.expert_scale else "chosen"
        parameter = {"choice": "bias", "expert_scale": "weight"}.get(name)
        fields["weights"] = ((parameter, (self.experts,)),) if parameter else ()
        return [*program, Choose(f"{path}.{name}", (program[-1].id,), (*shape[:-1], self.top_k), "router", **fields)]

    def _experts(self, path: str, source: str, choice: str, shape: Sizes) -> list[AnyOperation]:
        """Return the operations that compute the sum of the chosen experts' outputs from the input.

        `choice` is the id of the operation that chooses the experts.
        """
        row, gathered, combined = "feed-forward", f"{path}.gathered", f"{path}.combined"
        mixed: Sizes = (*shape[:-1], self.expert_width)
        chosen: Sizes = (*shape[:-1], self.top_k, self.expert_width)
        before: list[AnyOperation] = []
        if self.expert_norm is not None:
            before += self.expert_norm.operations(f"{path}.expert_norm", source, shape)
        read = before[-1].id if before else source
        if self.latent is not None:
            before.append(linear(self.latent, "down_proj", f"{path}.latent", read, mixed, row))
            read = before[-1].id
        *inside, last = self.expert.operations(f"{path}.experts", gathered, chosen)
        fused = any(isinstance(operation, Linear) and operation.fused for operation in inside)
        by_expert, inputs_weighed = self.summed == "by expert", self.weighs == "inputs"
        parts = self.experts if by_expert else 1  # the number of tensors in which the experts' inputs and outputs are
        wide = not self.rounded and self.scored_in == "float32"
        program: list[AnyOperation] = [
            *(msgspec.structs.replace(operation, live_until=combined) for operation in before),
            Gather(gathered, (read, choice), chosen, row, apart=parts, live_until=combined, weighs=inputs_weighed),
            *(self._copied(operation, choice, 1 if fused else self.experts) for operation in inside),
            self._copied(last, choice, parts),
            Combine(
                combined, (choice, last.id), mixed, row, wide=wide, one_by_one=by_expert, weighs=not inputs_weighed
            ),
        ]
        if self.latent is not None:
            program.append(linear(self.latent, "up_proj", f"{path}.latent", combined, shape, row))
        return program

    def _copied(self, operation: AnyOperation, choice: str, apart: int) -> AnyOperation:
        """Return one operation that stands for the same operation of all experts.

        Args:
            operation: the operation of one expert.
            choice: the id of the operation that chooses experts.
            apart: the number of experts that run one after the other (`Operation.apart`).
        """
        fields: dict[str, Any] = {"copies": self.experts if operation.weights else 1, "apart": apart}
        if isinstance(operation, Linear):
            fields |= {"inputs": (*operation.inputs, choice), "choice": choice}
        return msgspec.structs.replace(operation, **fields)

    def _with_shared(self, path: str, source: str, combined: str, shape: Sizes) -> Iterator[AnyOperation]:
        """Yield the operations of the shared expert, and the addition of its output to that of the chosen experts.

        `combined` is the id of the operation that sums the outputs of the chosen experts.
        """
        if self.shared is None:
            return
        row, total = "feed-forward", f"{path}.both"
        *inside, last = self.shared.operations(f"{path}.shared", source, shape)
        yield from inside
        yield last
        branch = last.id
        if self.shared_gate:
            one: Sizes = (*shape[:-1], 1)
            yield linear(self, "shared_gate", path, source, one, row)
            yield ActivationOperation(f"{path}.shared_weight", (f"{path}.shared_gate",), one, row, function="sigmoid")
            yield Product(f"{path}.shared_weighted", (f"{path}.shared_weight", branch), shape, row)
            branch = f"{path}.shared_weighted"
        yield Add(total, (combined, branch), shape, row)
        if self.averaged:
            yield ScaleOperation(f"{path}.averaged", (total,), shape, row, factor=0.5)


class DenseBesideExperts(Mixer, Component, frozen=True):
    """A dense feed-forward next to a mixture of experts, whose outputs are added (Gemma 4).

    Both read the same input. The norm of the mixture's input is a field of the mixture.
    """

    slot = "feed_forward"
    axes = ("experts", "intermediate_size")
    described = ("dense", "dense_norm", "dense_output_norm", "mixture", "mixture_output_norm")

    hidden_size: Size
    """The width of the residual stream."""
    dense: GatedFeedForward
    """The dense feed-forward, which every token uses."""
    dense_norm: Norm
    """The norm of the dense feed-forward's input."""
    dense_output_norm: Norm
    """The norm of the dense feed-forward's output."""
    mixture: MixtureOfExperts
    """The mixture of experts."""
    mixture_output_norm: Norm
    """The norm of the mixture's output."""

    def __post_init__(self) -> None:
        for name, part in self.entries().items():
            width = part if isinstance(part, int) else getattr(part, "hidden_size", getattr(part, "size", None))
            if width != self.hidden_size:
                raise ConfigError(f"{name} has width {width}, but the hidden size is {self.hidden_size}")

    @property
    def experts(self) -> int:
        return self.mixture.experts

    @property
    def intermediate_size(self) -> int:
        """The number of hidden units of an expert of the mixture."""
        return self.mixture.intermediate_size

    def words(self) -> dict[str, Words]:
        words = dict(self.dense.aspects())
        for aspect, described in self.mixture.aspects().items():
            words[aspect] = words[aspect].joined(described) if aspect in words else described
        norms = [self.dense_norm, self.dense_output_norm, self.mixture_output_norm]
        text = " and ".join(dict.fromkeys(norm.named().long for norm in norms))
        return words | {"feed-forward norms": Words(text, [norm.named().data for norm in norms])}

    def biases(self) -> dict[str, Words]:
        return self.dense.biases()

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        program: list[AnyOperation] = [*self.dense_norm.operations(f"{path}.dense_norm", source, shape)]
        program += self.dense.operations(f"{path}.dense", program[-1].id, shape)
        program += self.dense_output_norm.operations(f"{path}.dense_output_norm", program[-1].id, shape)
        dense = program[-1].id
        program += self.mixture.operations(f"{path}.mixture", source, shape)
        program += self.mixture_output_norm.operations(f"{path}.mixture_output_norm", program[-1].id, shape)
        return (*program, Add(f"{path}.both", (dense, program[-1].id), shape, "feed-forward"))
