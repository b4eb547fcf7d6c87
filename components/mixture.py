"""A mixture of feed-forwards behind a router. No torch."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from msgspec import Meta

from ..errors import ConfigError
from .base import Component, Mixer, Positive, Size, Weight, bias
from .feed_forward import UNITS, ExpertLatent, FeedForward, GatedFeedForward
from .norms import Norm
from .operations import (
    Activation,
    Add,
    AnyOperation,
    Choose,
    Combine,
    Gather,
    Linear,
    Product,
    Program,
    Scale,
    Sizes,
    linear,
)
from .words import Words

__all__ = ["MOST_EXPERTS", "DenseBesideExperts", "MixtureOfExperts"]

MOST_EXPERTS = 1024  # the largest number of experts in a mixture


class MixtureOfExperts(Mixer, Component, frozen=True):
    """A mixture of feed-forwards of the same form, from which a router chooses `top_k` for every token (Shazeer
    1701.06538).

    The router computes logits and from them p, a number per expert. The output is the sum of the chosen experts'
    outputs, weighted by their p, and of the shared expert, if there is one.
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
    tells = ("expert",)

    hidden_size: Size
    """The width of the residual stream."""
    experts: Annotated[int, Meta(ge=1, le=MOST_EXPERTS)]
    """The number of experts."""
    top_k: Size
    """The number of experts per token."""
    expert: FeedForward | GatedFeedForward
    """The form of an expert."""
    normalise: bool = True
    """Whether the largest p are divided by their sum (Mixtral 2401.04088). Identical experts then give the output of
    one of them."""
    added: Annotated[float, Meta(ge=0)] = 0.0
    """A number that is added to this sum (LFM2-MoE)."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """How p is computed from the logits: a softmax over all experts, or a sigmoid for each (DeepSeek-V3 2412.19437)."""
    multiplier: Positive = 1.0
    """A factor of the weights."""
    choice_bias: bool = False
    """Whether a bias is added to p when experts are chosen. It does not change the weights (2408.15664)."""
    biased: Literal["scores", "logits"] = "scores"
    """Whether this bias is added to p or to the logits."""
    router_bias: bool = False
    """Whether the router has a bias."""
    groups: Size = 1
    """The number of groups of experts, of which the router first chooses some."""
    top_groups: Size = 1
    """The number of chosen groups: those in which the sum of the largest p is largest."""
    group_best: Literal[1, 2] = 2
    """The number of largest p of a group in this sum."""
    shared: FeedForward | GatedFeedForward | None = None
    """An expert that every token uses. Several shared experts equal one with the sum of their widths."""
    shared_gate: bool = False
    """Whether the shared expert is multiplied by σ(gate(x)), one number per token."""
    averaged: bool = False
    """Whether the output is half of the sum of the shared expert and the others."""
    jitter: Positive | None = None
    """With j, every chosen expert has a separate softmax (SparseMixer 2409.12136). It leaves out the experts that were
    chosen before, and those whose logits are below the expert's own l by more than 2j · max(|logit|, l)."""
    weighs: Literal["outputs", "inputs"] = "outputs"
    """With "inputs", an expert reads p · x, and its output is not weighted (Llama 4)."""
    router_norm: Norm | None = None
    """The norm of the router's input."""
    router_multiplier: Positive = 1.0
    """A factor of the router's input."""
    expert_norm: Norm | None = None
    """The norm of the experts' input."""
    expert_scale: bool = False
    """Whether the final weight of an expert is multiplied by a number of this expert (Gemma 4)."""
    latent: ExpertLatent | None = None
    """The projections around the experts, if they read and write a latent."""
    routed_in: Literal["input", "float32"] = "input"
    """The dtype of the router's product. It changes only the rounding, like the fields below."""
    chosen_by: Literal["scores", "logits", "logits of all"] = "scores"
    """How p is computed: for all experts ("scores"), only for those with the largest logits ("logits"), or as a sigmoid
    of all logits, from which the largest are chosen ("logits of all", Llama 4)."""
    scored_in: Literal["float32", "input"] = "float32"
    """The dtype of p."""
    in_order: bool = True
    """Whether the chosen experts are sorted by p before they are summed."""
    rounded: bool = False
    """Whether weights are rounded to the dtype of x first."""
    wide_router: bool = False
    """Whether the router is stored in fp32 for any model dtype."""
    wide_choice: bool = False
    """Whether the choice bias is stored in fp32 for any model dtype."""
    summed: Literal["by token", "by expert", "over all"] = "by token"
    """How the experts are summed. "by token": the outputs of a token are summed at once. "by expert": one after the
    other in the order of their numbers, with a rounding each time (DBRX). "over all": every expert gets all tokens, as
    zeros if it was not chosen, in one product, which costs as much as if all experts were chosen (Llama 4)."""
    total: Literal["sum", "norm"] = "sum"
    """Whether `normalise` computes its divisor as a sum or as a norm, which differ only in the order of the addition
    (DBRX)."""

    def __post_init__(self) -> None:
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
                "a mixture with a latent needs experts with inside: true, and a mixture without a latent "
                "needs inside: false"
            )
        for inner, wide, what in (
            (self.expert, self.expert_width, "the experts have"),
            (self.shared, self.hidden_size, "the shared expert has"),
        ):
            if inner is not None and inner.hidden_size != wide:
                raise ConfigError(f"{what} hidden_size {inner.hidden_size}, but the input has size {wide}")

    @property
    def intermediate_size(self) -> int:
        """The number of units of an expert."""
        return self.expert.intermediate_size

    @property
    def expert_width(self) -> int:
        """The width of the input and output of an expert."""
        return self.hidden_size if self.latent is None else self.latent.width

    @property
    def shared_size(self) -> int:
        """The number of units of the shared expert; 0 if there is none."""
        return 0 if self.shared is None else self.shared.intermediate_size

    @property
    def eligible(self) -> int:
        """The number of experts in the chosen groups."""
        return self.experts // self.groups * min(self.top_groups, self.groups)

    @property
    def beside(self) -> list[str]:
        """Return the fields that a plain softmax over experts does not have: biases, groups, a scale or a shared
        expert.
        """
        found = self.choices().items()
        return [name for name, plain in found if name != "normalise" and getattr(self, name) != plain]

    @property
    def of_chosen(self) -> bool:
        """Whether the scores are computed only for the experts with the largest logits.

        Softmax and sigmoid choose the same experts. The scores of a softmax then sum to 1.
        """
        alike = self.normalise or self.scores == "sigmoid"
        plain = alike and not self.choice_bias and self.groups == 1 and self.jitter is None
        return plain and (self.chosen_by == "logits" or (self.chosen_by != "scores" and self.scores == "sigmoid"))

    def children(self) -> Iterator[tuple[str, Component]]:
        yield from ((f"experts.{number}", self.expert) for number in range(self.experts))
        named: dict[str, Component | None] = {"latent": self.latent, "shared": self.shared}
        named |= {"router_norm": self.router_norm, "expert_norm": self.expert_norm}
        yield from ((name, each) for name, each in named.items() if each is not None)

    def weights(self) -> dict[str, Weight]:
        found = {"router.weight": Weight((self.experts, self.hidden_size), "router")}
        if self.router_bias:
            found["router.bias"] = bias(self.experts)
        if self.choice_bias:
            found["choice.bias"] = bias(self.experts)
        if self.expert_scale:
            found["expert_scale.weight"] = Weight((self.experts,), "inner", 1.0)
        if self.shared_gate and self.shared is not None:
            found["shared_gate.weight"] = Weight((1, self.hidden_size), "router")
        return found

    def words(self) -> dict[str, Words]:
        one, few = self.expert.aspects(), f"{self.top_k} of {self.experts} experts"
        name, (short, data, whole) = next(iter(one.items()))
        counts = {"experts": self.experts, "top_k": self.top_k, "normalise": self.normalise}
        data = data | counts | {field: value for field, (_, value) in self.untold().items() if field not in counts}
        routed, given = ("", "") if self.normalise else (", weights as routed", ", weights as the router gives them")
        more = "".join(f", {each}" for each in self._more())
        return one | {name: Words(f"{short}, {few}{routed}{more}", data, f"{few}{given}{more}, each {whole}")}

    def _more(self) -> Iterator[str]:
        """Yield short descriptions of the differences from a plain softmax over experts."""
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
        """Return a small copy, in which the same choices are possible.

        If all experts are chosen, they still are. Otherwise there is at least one more expert. Groups have two experts,
        or three if only some experts of a single group are chosen.
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
        found = {name: msgspec.structs.replace(self, top_k=k) for name, k in counts.items() if 1 <= k <= self.eligible}
        one = self.scores == "softmax" and self.jitter is None  # the weights of all experts sum to 1
        if self.top_k < self.experts or not one:
            found["weights of experts normalised or not"] = msgspec.structs.replace(self, normalise=not self.normalise)
        return found

    def disorder(self) -> dict[str, dict[str, list[int]]]:
        order = [*range(1, self.experts), 0]
        modules = ("router", *(("choice",) if self.choice_bias else ("expert_scale",) if self.expert_scale else ()))
        return {"experts in other places": dict.fromkeys(modules, order)}

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        taken: Sizes = (*shape[:-1], self.top_k, self.expert_width)
        mixed: Sizes = (*shape[:-1], self.expert_width)
        chosen = f"{path}.{'choice' if self.choice_bias else 'expert_scale' if self.expert_scale else 'chosen'}"
        before: list[AnyOperation] = []
        read = given = source
        if self.router_norm is not None:
            before += self.router_norm.operations(f"{path}.router_norm", source, shape)
            read = before[-1].id
        if self.router_multiplier != 1:
            factor = self.router_multiplier
            before.append(Scale(f"{path}.router_scaled", (read,), shape, "norms", factor=factor))
            read = before[-1].id
        inner = () if self.expert_norm is None else self.expert_norm.operations(f"{path}.expert_norm", source, shape)
        given, latent = inner[-1].id if inner else source, self.latent
        if latent is not None:
            inner = (*inner, linear(latent, "down_proj", f"{path}.latent", given, mixed, "feed-forward"))
            given = inner[-1].id
        gathered, combined = f"{path}.gathered", f"{path}.combined"
        *inside, last = self.expert.operations(f"{path}.experts", gathered, taken)
        apart = 1 if any(isinstance(each, Linear) and each.fused for each in inside) else self.experts

        whole = (
            self.experts if self.summed == "by expert" else 1
        )  # the number of parts of inputs and outputs, which are processed one after the other

        def copied(each: AnyOperation, **changes: object) -> AnyOperation:
            """Return an operation of one expert as that of many, from which tokens choose."""
            changes["copies"] = self.experts if each.weights else 1
            if isinstance(each, Linear):
                changes |= {"inputs": (*each.inputs, chosen), "choice": chosen}
            return msgspec.structs.replace(each, **changes)

        weighs_wide = not self.rounded and self.scored_in == "float32"
        apart_too, inputs = self.summed == "by expert", self.weighs == "inputs"
        copied_wide = "" if self.routed_in == "input" else "input" if self.wide_router else "both"
        choice: dict[str, Any] = {
            **{
                name: getattr(self, name) for name in ("top_k", "experts", "normalise", "added", "scores", "multiplier")
            },
            **{name: getattr(self, name) for name in ("groups", "top_groups", "group_best", "jitter")},
            "of_chosen": (self.of_chosen and self.chosen_by == "logits") or self.biased == "logits",
            "biased": self.biased,
            "wide": self.scored_in == "float32",
            "weights": (("bias", (self.experts,)),) if self.choice_bias else (),
        }
        choice |= {"weights": (("weight", (self.experts,)),)} if self.expert_scale else {}
        return (
            *before,
            linear(self, "router", path, read, (*shape[:-1], self.experts), "router", wide=copied_wide),
            Choose(chosen, (f"{path}.router",), (*shape[:-1], self.top_k), "router", **choice),
            *(msgspec.structs.replace(each, held=combined) for each in inner),
            Gather(gathered, (given, chosen), taken, "feed-forward", apart=whole, held=combined, weighs=inputs),
            *(copied(each, apart=apart) for each in inside),
            copied(last, apart=whole),
            Combine(
                combined,
                (chosen, last.id),
                mixed,
                "feed-forward",
                wide=weighs_wide,
                one_by_one=apart_too,
                weighs=not inputs,
            ),
            *self._back(path, shape, combined),
            *self._beside(path, source, shape, combined if latent is None else f"{path}.latent.up_proj"),
        )

    def _back(self, path: str, shape: Sizes, combined: str) -> Iterator[AnyOperation]:
        """Yield the projection of the experts' sum onto the stream, where they have a latent."""
        if self.latent is not None:
            yield linear(self.latent, "up_proj", f"{path}.latent", combined, shape, "feed-forward")

    def _beside(self, path: str, source: str, shape: Sizes, combined: str) -> Iterator[AnyOperation]:
        """Yield the operations of the shared expert, and its sum with the others."""
        if self.shared is None:
            return
        row, end = "feed-forward", f"{path}.both"
        *inside, last = self.shared.operations(f"{path}.shared", source, shape)
        yield from inside
        yield last
        branch = last.id
        if self.shared_gate:
            one: Sizes = (*shape[:-1], 1)
            yield linear(self, "shared_gate", path, source, one, row)
            yield Activation(f"{path}.shared_weight", (f"{path}.shared_gate",), one, row, function="sigmoid")
            yield Product(f"{path}.shared_weighted", (f"{path}.shared_weight", branch), shape, row)
            branch = f"{path}.shared_weighted"
        yield Add(end, (combined, branch), shape, row)
        if self.averaged:
            yield Scale(f"{path}.averaged", (end,), shape, row, factor=0.5)


class DenseBesideExperts(Mixer, Component, frozen=True):
    """A feed-forward that every token uses and a mixture, which read the same input and whose results are added (Gemma
    4).
    """

    slot = "feed_forward"
    axes = ("experts", "intermediate_size")
    tells = ("dense", "dense_norm", "dense_output_norm", "mixture", "mixture_output_norm")

    hidden_size: Size
    """The width of the residual stream."""
    dense: GatedFeedForward
    """The feed-forward."""
    dense_norm: Norm
    """The norm of the feed-forward's input."""
    dense_output_norm: Norm
    """The norm of the feed-forward's output."""
    mixture: MixtureOfExperts
    """The mixture, which has an input norm of its own."""
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
        """The number of units of an expert."""
        return self.mixture.intermediate_size

    def words(self) -> dict[str, Words]:
        found = dict(self.dense.aspects())
        for aspect, said in self.mixture.aspects().items():
            found[aspect] = found[aspect].beside(said) if aspect in found else said
        norms = [self.dense_norm, self.dense_output_norm, self.mixture_output_norm]
        told = " and ".join(dict.fromkeys(norm.named().long for norm in norms))
        return found | {"feed-forward norms": Words(told, [norm.named().data for norm in norms])}

    def biases(self) -> dict[str, Words]:
        return self.dense.biases()

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        found: list[AnyOperation] = [*self.dense_norm.operations(f"{path}.dense_norm", source, shape)]
        found += self.dense.operations(f"{path}.dense", found[-1].id, shape)
        found += self.dense_output_norm.operations(f"{path}.dense_output_norm", found[-1].id, shape)
        dense = found[-1].id
        found += self.mixture.operations(f"{path}.mixture", source, shape)
        found += self.mixture_output_norm.operations(f"{path}.mixture_output_norm", found[-1].id, shape)
        return (*found, Add(f"{path}.both", (dense, found[-1].id), shape, "feed-forward"))
