"""Where two models part: the first component whose output differs.

Both models run on the same input in fp64, and the outputs of their components are laid side by side in the order of
computation. Which transformers module computes which component is not declared anywhere: a leaf says under which name
a component's weight is stored, and transformers stores it under the name of the module that uses it. A fused q-k-v
module's output is taken apart by its weight's own layout. What counts as a difference is judged, component by
component, by what rounding to fp32 makes there in the two of them.

One model runs at a time, in memory or a layer at a time (`sides`). What the reference's components gave waits in a file
without a name, and what the others give is compared as it comes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ..architectures import Architecture, BoundLeaf
from ..components import ModelSpec
from ..modules.attention import Kernel
from .probe import RUNNING, Batch
from .sides import Sides

__all__ = ["Cause", "Divergence", "Part", "Tap", "bisect", "relative_gap", "taps", "valid_rows", "watching"]

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
    """What was found at one tap.

    relative: the largest difference in fp64, over the largest value; noise: what rounding to fp32 makes there, in the
    reference and in the candidate together.
    """

    name: str
    label: str
    layer: int | None
    relative: float
    noise: float

    @property
    def parts(self) -> bool:
        """Whether the two models differ here by more than rounding.

        From one's fp64 to the other's it is a step to fp32 on each side, measured as `noise`, and one from the one's
        fp32 to the other's: nothing where they round alike, and as much again where they do not (after a swap). Right
        models use up all of the first, since transformers keeps norms, softmax and rotary tables of an "fp64" model in
        fp32; what `mutations` has is 30 times as large at least.
        """
        return not self.relative <= max(2 * self.noise, FLOOR)


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
    "attention.kv_norm": "attention latent norm",
    "attention.kv_down_proj": "attention latent",
    "attention.k_rope_proj": "attention rotary key",
    "attention.k_up_proj": "attention k",
    "attention.v_up_proj": "attention v",
    "attention_output_norm": "attention output norm",
    "attention_sum_norm": "attention sum norm",
    "feed_forward_norm": "feed-forward norm",
    "feed_forward.router": "feed-forward router",
    "feed_forward.experts": "feed-forward experts",
    "feed_forward.gate_proj": "feed-forward gate",
    "feed_forward.up_proj": "feed-forward up",
    "feed_forward.down_proj": "feed-forward down",
    "feed_forward_output_norm": "feed-forward output norm",
    "feed_forward_sum_norm": "feed-forward sum norm",
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
    held = architecture.parameters(spec)
    moved = {part: name for name, (_, each) in held.items() for parts in each for part in parts}
    writes = {parameter.name for parameter in spec.parameters() if parameter.role == "writes"}
    for index, leaf in enumerate(architecture.bind(spec)):
        if not leaf.shared[0].endswith(".weight"):
            continue
        stacked = moved.get(leaf.checkpoint)
        theirs = leaf.checkpoint.rpartition(".")[0] if stacked is None else stacked.removesuffix(".weight")
        if ".experts." in leaf.shared[0]:
            # Experts see some tokens each, in an order of their own: what can be laid side by side is their sum.
            ours, _, inside = leaf.shared[0].partition(".experts.")
            if inside == "0.down_proj.weight" and leaf.checkpoint in moved:
                short, layer = _within_block(f"{ours}.experts")
                whole: tuple[str, Side] = (theirs.rpartition(".")[0], "output")
                place = order[ours] + rank[short] / 100
                found.append((place, Tap(LABELS[short], layer, (ours, "output"), whole)))
            continue
        for part, name in enumerate(leaf.shared):
            ours = name.removesuffix(".weight")
            short, layer = _within_block(ours)
            rows = None if len(leaf.shared) == 1 else _rows(leaf, part)
            node = ours if ours in order else ours.rsplit(".", 1)[0]
            place = order[node] + rank.get(short, len(rank) + index / 1e5) / 100
            mixed = MIXED.get(short, f"{_label(short)} input" if name in writes and short not in rank else None)
            if mixed is not None:
                found.append((place - 0.005, Tap(mixed, layer, (ours, "input"), (theirs, "input"))))
            # Our embedding applies its norm itself; the table's own rows are what goes into that norm.
            normed = short == "embedding" and spec.embedding.norm is not None
            here: tuple[str, Side] = ("embedding.norm", "input") if normed else (ours, "output")
            found.append((place, Tap(_label(short), layer, here, (theirs, "output"), rows)))
    return [tap for _, tap in sorted(found, key=lambda pair: pair[0])]


def _label(short: str) -> str:
    """What a component is called; one that has no words here by its own name."""
    return LABELS.get(short, short.removesuffix("_proj").replace(".", " ").replace("_", " "))


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
def watching(
    model: nn.Module, watched: Sequence[Tap], ours: bool, see: Callable[[int, Tensor], None]
) -> Iterator[None]:
    """While open, `see` is given what each tap sees, by its index, before anything can change it in place."""
    modules = dict(model.named_modules())
    hooks = []

    def tell(index: int, tap: Tap) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: Any, output: Any) -> None:
            value = inputs[0] if (tap.ours if ours else tap.theirs)[1] == "input" else output
            value = value[0] if isinstance(value, tuple) else value
            see(index, value.detach() if tap.rows is None or ours else value.detach()[..., tap.rows])

        return hook

    for index, tap in enumerate(watched):
        module = modules.get((tap.ours if ours else tap.theirs)[0])
        if module is not None:
            hooks.append(module.register_forward_hook(tell(index, tap)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class Kept:
    """Tensors in fp64 by key, in a file that is gone when it is closed: one row of every component of a large model is
    100 MB.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="gptkit-")  # noqa: SIM115 (closed by whoever holds this)
        self._at: dict[tuple[int, int], tuple[int, torch.Size]] = {}

    def __setitem__(self, key: tuple[int, int], value: Tensor) -> None:
        self._at[key] = self._file.seek(0, 2), value.shape
        self._file.write(value.contiguous().numpy().tobytes())

    def get(self, key: tuple[int, int]) -> Tensor | None:
        if key not in self._at:
            return None
        start, shape = self._at[key]
        self._file.seek(start)
        data = bytearray(self._file.read(8 * shape.numel()))
        return torch.frombuffer(data, dtype=torch.float64).reshape(shape) if data else torch.empty(shape)

    def close(self) -> None:
        self._file.close()


def bisect(both: Sides, batches: Sequence[Batch], path: Kernel) -> list[Part]:
    """Every tap's difference, in the order of computation: four passes, the last three held against what was kept of
    one before.

    Args:
        both: the two sides.
        batches: the inputs; what is compared is what `Batch.valid` leaves of them.
        path: the attention that both compute with.

    """
    architecture, spec = both.source.architecture, both.source.spec
    assert architecture is not None
    watched = taps(architecture, spec)
    head = len(watched)
    """The key of the logits, which a tied head's module is not asked for by name."""

    def keep(kept: Kept, index: int, value: Tensor, batch: Batch | None = None) -> None:
        batch = batch or RUNNING.get(None)
        if batch is not None:
            kept[id(batch), index] = valid_rows(value, batch) if index < head else value.double()

    def hold(kept: Kept, gaps: dict[int, float], index: int, value: Tensor, batch: Batch | None = None) -> None:
        batch = batch or RUNNING.get(None)
        right = None if batch is None else kept.get((id(batch), index))
        if batch is None or right is None:
            return
        rows = valid_rows(value, batch) if index < head else value.double()
        if rows.shape == right.shape:
            gaps[index] = max(gaps.get(index, 0.0), relative_gap(right, rows))

    def run(
        dtype: torch.dtype, ours: bool, see: Callable[..., None], inputs: Sequence[Batch] = batches
    ) -> list[Tensor]:
        watch = partial(watching, watched=watched, ours=ours, see=see)
        logits = (both.candidate if ours else both.reference)(inputs, dtype, path, watch)
        for batch, each in zip(inputs, logits, strict=True):
            see(head, each, batch)
        return logits

    worst: dict[int, float] = {}
    noise: list[dict[int, float]] = [{}, {}]
    theirs, ours = Kept(), Kept()
    try:
        exact = run(torch.float64, False, partial(keep, theirs))
        # transformers' eager bloom has NaN in fp64 where a padded row may look at nothing
        good = [batch for batch, each in zip(batches, exact, strict=True) if bool(torch.isfinite(each).all())]

        run(torch.float32, False, partial(hold, theirs, noise[0]), good)

        def both_ways(index: int, value: Tensor, batch: Batch | None = None) -> None:
            hold(theirs, worst, index, value, batch)
            keep(ours, index, value, batch)

        run(torch.float64, True, both_ways, good)
        run(torch.float32, True, partial(hold, ours, noise[1]), good)
    finally:
        theirs.close()
        ours.close()
    looked = [index for index in range(head) if all(index in each for each in (worst, *noise))]
    places = [_part(watched[i].name, watched[i].label, watched[i].layer, i, worst, noise) for i in looked]
    if not any(place.label == "head" for place in places):
        places.append(_part("head", "head", None, head, worst, noise))
    return places


def _part(
    name: str, label: str, layer: int | None, index: int, worst: dict[int, float], noise: Sequence[dict[int, float]]
) -> Part:
    return Part(name, label, layer, worst[index], sum(each[index] for each in noise))


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
