"""Where two models part, and why: the first component whose output differs, and what would put it right.

Both models run on the same input in fp64, and the outputs of their components are laid side by side in the order of
computation. Which transformers module computes which component is not declared anywhere: a leaf says under which name
a component's weight is stored, and transformers stores it under the name of the module that uses it. A fused q-k-v
module's output is taken apart by its weight's own layout. What counts as a difference is judged, component by
component, against the reference's own rounding there (its fp32 against its fp64).

The cause is found by trying: every mutation of `parity.mutations`, in all layers or in the one where the models part,
and the reference's own fields where the trees differ. What restores parity is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from ..architectures import Architecture, BoundLeaf
from ..modules import Decoder
from ..spec import ModelSpec, differences
from .compare import largest_gap
from .mutations import MUTATIONS, Mutant, Weights
from .probe import Batch
from .reference import reference_logits
from .score import run_tree

__all__ = [
    "Cause",
    "Divergence",
    "Part",
    "Tap",
    "bisect",
    "find_causes",
    "relative_gap",
    "taps",
    "valid_rows",
    "watching",
]

FACTOR = 16.0
"""Times the reference's own rounding at a component that a difference there must be to count."""

FLOOR = 1e-9
"""Relative difference below which nothing counts: fp64 sums in another order."""


Side = Literal["output", "input"]


@dataclass(frozen=True)
class Tap:
    """One place to look: a component's output, or the input of the projection behind it.

    label: the component in words; layer: its index, None outside of layers; ours, theirs: a module's name and the side
    of it; rows: which of their output's features are ours, where they fuse several.
    """

    label: str
    layer: int | None
    ours: tuple[str, Side]
    theirs: tuple[str, Side]
    rows: Tensor | None = None

    @property
    def name(self) -> str:
        """The place in words."""
        return self.label if self.layer is None else f"layer {self.layer} {self.label}"


@dataclass(frozen=True)
class Part:
    """What was found at one tap: the largest difference over the largest value, and the reference's own rounding."""

    name: str
    label: str
    layer: int | None
    relative: float
    noise: float

    @property
    def parts(self) -> bool:
        """Whether the two models differ here by more than rounding."""
        return not self.relative <= max(FACTOR * self.noise, FLOOR)


@dataclass(frozen=True)
class Cause:
    """A repair that was tried: in words, whether it restores parity, and the logit difference that is left."""

    repair: str
    restores: bool
    left: float


@dataclass(frozen=True)
class Divergence:
    """All taps in the order of computation, and the likely causes, best first."""

    places: tuple[Part, ...]
    causes: tuple[Cause, ...] = ()

    @property
    def first(self) -> Part | None:
        """The first place where the models part."""
        return next((place for place in self.places if place.parts), None)


LABELS = {
    "embedding": "embedding",
    "embedding.norm": "embedding norm",
    "positions": "positions",
    "attention_norm": "attention norm",
    "attention.q_proj": "attention q",
    "attention.k_proj": "attention k",
    "attention.v_proj": "attention v",
    "attention.q_norm": "attention q norm",
    "attention.k_norm": "attention k norm",
    "attention.o_proj": "attention output projection",
    "feed_forward_norm": "feed-forward norm",
    "feed_forward.gate_proj": "feed-forward gate",
    "feed_forward.up_proj": "feed-forward up",
    "feed_forward.down_proj": "feed-forward down",
    "final_norm": "final norm",
    "head": "head",
}
MIXED = {
    "attention.o_proj": "attention mix (positions, scale, mask, softmax)",
    "feed_forward.down_proj": "feed-forward activation",
}
"""What the input of a projection tells about what stands before it."""


def taps(architecture: Architecture, spec: ModelSpec) -> list[Tap]:
    """Where to look, in the order of computation; components without a weight of their own are seen through others."""
    order = {path: index for index, (path, _) in enumerate(spec.nodes())}
    found: list[tuple[float, Tap]] = []
    rank = {label: index for index, label in enumerate(LABELS)}
    for leaf in architecture.bind(spec):
        if not leaf.checkpoint.endswith(".weight"):
            continue
        theirs = leaf.checkpoint.removesuffix(".weight")
        for part, name in enumerate(leaf.shared):
            ours = name.removesuffix(".weight")
            short, layer = _within_block(ours)
            rows = None if len(leaf.shared) == 1 else _rows(leaf, part)
            node = ours if ours in order else ours.rsplit(".", 1)[0]
            place = order[node] + rank[short] / 100
            if short in MIXED:
                found.append((place - 0.005, Tap(MIXED[short], layer, (ours, "input"), (theirs, "input"))))
            # Our embedding applies its norm itself; the table's own rows are what goes into that norm.
            normed = short == "embedding" and spec.embedding.norm is not None
            here: tuple[str, Side] = ("embedding.norm", "input") if normed else (ours, "output")
            found.append((place, Tap(LABELS[short], layer, here, (theirs, "output"), rows)))
    return [tap for _, tap in sorted(found, key=lambda pair: pair[0])]


def _within_block(path: str) -> tuple[str, int | None]:
    if not path.startswith("blocks."):
        return path, None
    _, layer, rest = path.split(".", 2)
    return rest, int(layer)


def _rows(leaf: BoundLeaf, part: int) -> Tensor:
    """Which output features of a fused module are this part's: the layout, run on each element's feature number."""
    transposed = leaf.layout.shared != "" and leaf.layout.checkpoint.split()[0] == leaf.layout.shared.split()[-1]
    features = leaf.shape[1] if transposed else leaf.shape[0]
    numbers = np.arange(features)
    whole = np.broadcast_to(numbers[None, :] if transposed else numbers[:, None], leaf.shape)
    return torch.from_numpy(np.array(leaf.to_shared(whole)[part][:, 0]))


@contextmanager
def watching(model: nn.Module, watched: Sequence[Tap], ours: bool) -> Iterator[dict[int, Tensor]]:
    """While open, every forward pass leaves what each tap saw."""
    modules = dict(model.named_modules())
    seen: dict[int, Tensor] = {}
    hooks = []

    def keep(index: int, tap: Tap) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: Any, output: Any) -> None:
            value = inputs[0] if (tap.ours if ours else tap.theirs)[1] == "input" else output
            value = value[0] if isinstance(value, tuple) else value
            if tap.rows is not None and not ours:
                value = value[..., tap.rows]
            seen[index] = value.detach().clone()  # Falcon adds to a module's output in place

        return hook

    for index, tap in enumerate(watched):
        module = modules.get((tap.ours if ours else tap.theirs)[0])
        if module is not None:
            hooks.append(module.register_forward_hook(keep(index, tap)))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def bisect(
    architecture: Architecture,
    spec: ModelSpec,
    batches: Sequence[Batch],
    reference: Any,
    reference32: Any,
    candidate: Decoder,
) -> list[Part]:
    """Every tap's difference, in the order of computation.

    Args:
        architecture: the reference's family, which names transformers' modules.
        spec: the reference's tree.
        batches: the inputs.
        reference: transformers' model in fp64.
        reference32: the same in fp32, for the noise.
        candidate: gptkit's in fp64.

    """
    watched = taps(architecture, spec)
    worst = [0.0] * len(watched)
    noise = [0.0] * len(watched)
    looked = [False] * len(watched)
    head = [0.0, 0.0]
    with torch.inference_mode():
        for batch in batches:
            rows: list[dict[int, Tensor]] = []
            logits = []
            for model, ours in ((reference, False), (reference32, False), (candidate, True)):
                with watching(model, watched, ours) as seen:
                    if ours:
                        out = model(batch.input_ids, batch.attention_mask)
                    else:
                        out = reference_logits(model, batch.input_ids, batch.attention_mask)
                rows.append(seen)
                logits.append(batch.valid(out).double())
            if not bool(torch.isfinite(logits[0]).all()):
                continue  # transformers' eager bloom in fp64 where a padded row may look at nothing
            for index in range(len(watched)):
                if any(index not in each for each in rows):
                    continue
                exact, rounded, other = (valid_rows(each[index], batch) for each in rows)
                if exact.shape != other.shape:
                    continue
                looked[index] = True
                worst[index] = max(worst[index], relative_gap(exact, other))
                noise[index] = max(noise[index], relative_gap(exact, rounded))
            head = [max(head[0], relative_gap(logits[0], logits[2])), max(head[1], relative_gap(logits[0], logits[1]))]
    places = [Part(tap.name, tap.label, tap.layer, worst[i], noise[i]) for i, tap in enumerate(watched) if looked[i]]
    if not any(place.label == "head" for place in places):
        places.append(Part("head", "head", None, *head))
    return places


def valid_rows(value: Tensor, batch: Batch) -> Tensor:
    """The rows of real tokens, (N, features), in fp64; what has no batch of its own (positions) as it is."""
    shape = batch.input_ids.shape
    if value.shape[:2] == shape:
        return batch.valid(value.reshape(*shape, -1)).double()
    if value.shape[0] == shape[0] * shape[1]:  # transformers' own modules may flatten batch and time
        return batch.valid(value.reshape(*shape, -1)).double()
    return value.reshape(-1, value.shape[-1]).double()


def relative_gap(a: Tensor, b: Tensor) -> float:
    """The largest difference over the largest value of `a`; infinite where there is a NaN."""
    difference = (a - b).abs().max().item()
    if difference != difference:
        return float("inf")
    scale = a.abs().max().item()
    return difference / scale if scale else difference


def find_causes(
    reference: Sequence[Tensor],
    allowed: float,
    batches: Sequence[Batch],
    spec: ModelSpec,
    candidate: Decoder,
    layer: int | None,
    right: Weights | None = None,
) -> list[Cause]:
    """Repairs that bring the candidate's logits closer, those that restore parity first.

    Args:
        reference: transformers' logits in fp64, (N, V) a batch.
        allowed: the difference that rounding explains.
        batches: their inputs.
        spec: the reference's tree.
        candidate: gptkit's model in fp64.
        layer: where the models first part; repairs are tried there alone too.
        right: the reference's weights by shared name, where they are known.

    """
    weights = {name: parameter.detach() for name, parameter in candidate.named_parameters()}
    own = candidate.spec
    start = _gap(own, weights, batches, reference)
    found: list[Cause] = []
    for repair, mutant in _repairs(spec, own, weights, layer, right):
        left = _gap(*mutant, batches, reference)
        if left <= allowed or left < start / 10:
            found.append(Cause(repair, left <= allowed, left))
    return sorted(found, key=lambda cause: (not cause.restores, cause.left))[:5]


def _repairs(
    spec: ModelSpec, own: ModelSpec, weights: Weights, layer: int | None, right: Weights | None
) -> Iterator[tuple[str, Mutant]]:
    same_tensors = [(p.name, p.shape) for p in spec.parameters()] == [(p.name, p.shape) for p in own.parameters()]
    if spec != own and same_tensors:
        fields = sorted({path.split(".")[-1] for path, _, _ in differences(spec, own)})
        yield f"the reference's {', '.join(fields)}", (spec, dict(weights))
    if spec.head.tied and not own.head.tied and not own.head.bias:
        untied = {name: tensor for name, tensor in weights.items() if name != "head.weight"}
        yield "tying the head to the embedding", (msgspec.structs.replace(own, head=spec.head), untied)
    if right is not None and same_tensors:
        wrong = [name for name, tensor in right.items() if not torch.equal(tensor, weights[name])]
        if wrong:
            kinds = dict.fromkeys(name.split(".", 2)[-1] if name.startswith("blocks.") else name for name in wrong)
            words = ", ".join(list(kinds)[:4]) + (", …" if len(kinds) > 4 else "")
            yield f"the reference's values of {words}", (own, {**weights, **{name: right[name] for name in wrong}})
    for mutation in MUTATIONS:
        mutant = mutation.apply(own, weights)
        if mutant is None or _untouched(own, weights, mutant):
            continue
        yield mutation.repair, mutant
        if layer is not None:
            alone = _in_layer(own, weights, mutant, layer)
            if not _untouched(own, weights, alone):
                yield f"{mutation.repair} in layer {layer}", alone


def _untouched(spec: ModelSpec, weights: Weights, mutant: Mutant) -> bool:
    return mutant[0] == spec and all(tensor is weights.get(name) for name, tensor in mutant[1].items())


def _in_layer(spec: ModelSpec, weights: Weights, mutant: Mutant, layer: int) -> Mutant:
    """The mutant's layer in an otherwise unchanged model."""
    blocks = list(spec.blocks)
    blocks[layer] = mutant[0].blocks[layer]
    new = dict(weights)
    new.update({name: t for name, t in mutant[1].items() if name.startswith(f"blocks.{layer}.")})
    return msgspec.structs.replace(spec, blocks=tuple(blocks)), new


def _gap(spec: ModelSpec, weights: Weights, batches: Sequence[Batch], reference: Sequence[Tensor]) -> float:
    return largest_gap(reference, run_tree(spec, weights, batches))
