"""Where two models part: the first component whose output differs.

Both run on the same input in fp64, and the outputs of their components are laid side by side in the order of
computation. Which transformers module computes which component is declared nowhere: a leaf says under which name a
component's weight is stored, and that is the module's name. What counts as a difference is judged, component by
component, by what rounding to fp32 makes there in the two of them. One model runs at a time: what the reference's
components gave waits in a file without a name, and what the others give is compared as it comes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ..analysis.activations import Kernel
from ..architectures import Architecture, BoundLeaf
from ..components import ModelSpec
from .passes import hooked
from .probe import RUNNING, ProbeBatch
from .sides import Sides

_FLOOR = 1e-9  # relative difference below which nothing counts: fp64 sums in another order

_Side = Literal["output", "input"]
_Key = tuple[int, int]


@dataclass(frozen=True)
class Tap:
    """One place to look: a component's output, or the input of the projection behind it. label: the component in words;
    layer: its index, None outside of layers; ours, theirs: a module's name and the side of it; rows: which of their
    output's features are ours, where they fuse several; factor: what the output of a plain table or linear of theirs is
    multiplied by to be ours. first: of several calls the first counts, which is the layer's own. value: which of the
    values that their module returns is the output.
    """

    label: str
    layer: int | None
    ours: tuple[str, _Side]
    theirs: tuple[str, _Side]
    rows: Tensor | None = None
    factor: float = 1.0
    first: bool = False
    value: int = 0

    def part(self, relative: float, noise: float) -> Part:
        """What was found here."""
        name = self.label if self.layer is None else f"layer {self.layer} {self.label}"
        return Part(name, self.label, self.layer, relative, noise)


@dataclass(frozen=True)
class Part:
    """What was found at one tap. relative: the largest difference in fp64, over the largest value; noise: what rounding
    to fp32 makes there, in the reference and in the candidate together.
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
        return not self.relative <= max(2 * self.noise, _FLOOR)


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


_WORDS = {
    "o_proj": "output projection",
    "q_down_proj": "latent of queries",
    "q_up_proj": "q",
    "kv_norm": "latent norm",
    "kv_down_proj": "latent",
    "k_rope_proj": "rotary key",
    "k_up_proj": "k",
    "v_up_proj": "v",
}
MIXED = {
    "attention.o_proj": "attention mix (positions, scale, mask, softmax)",
    "feed_forward.down_proj": "feed-forward activation",
}
"""What the input of a projection tells about what stands before it."""


def _label(module: str) -> str:
    """What a component is called, by its module's name within a layer."""
    owner, _, own = module.rpartition(".")
    words = f"{owner} {_WORDS.get(own, own.removesuffix('_proj'))}".replace("feed_forward", "feed-forward")
    return words.replace(".", " ").replace("_", " ").strip()


def taps(architecture: Architecture, spec: ModelSpec) -> list[Tap]:
    """Where to look, in the order of computation; components without a weight of their own are seen through others."""
    known = {each.name: (place, each) for place, each in enumerate(spec.parameters())}
    moved = {
        part: name for name, (_, each) in architecture.parameters(spec).items() for parts in each for part in parts
    }
    bound = architecture.bind(spec)
    at = {name: leaf.checkpoint for leaf in bound for name in leaf.shared}
    rescaled = architecture.rescaled(spec)
    found: list[tuple[float, Tap]] = []
    for leaf in bound:
        if not leaf.shared[0].endswith(".weight") or leaf.shared[0] == "head.weight":  # whose logits are looked at
            continue
        stacked = moved.get(leaf.checkpoint)
        theirs = (
            (leaf.module or leaf.checkpoint).rpartition(".")[0] if stacked is None else stacked.removesuffix(".weight")
        )
        theirs = architecture.module(theirs)
        for part, name in enumerate(leaf.shared):
            place, parameter = known[name]
            ours, layer = name.removesuffix(".weight"), parameter.layer
            short = ours.removeprefix(f"blocks.{layer}.")
            if ".experts." in name:
                # Experts see some tokens each, in an order of their own: what can be laid side by side is their sum,
                # with what stands beside them: in transformers too, but for Granite, which adds it outside.
                if short.endswith(".experts.0.down_proj"):
                    mixture = ours.partition(".experts.")[0]
                    outer = theirs.partition(".experts")[0] if ".experts" in theirs else theirs.rpartition(".")[0]
                    whole: tuple[str, _Side] = (outer, "output")
                    behind = at.get(f"{mixture}_output_norm.weight", "")
                    behind = moved.get(behind, behind).removesuffix(".weight")
                    if behind.startswith(f"{outer}."):  # A.X K1's module applies the norm of its output itself
                        whole = (behind, "input")
                    told = _label(short.partition(".0.")[0])
                    beside = at.get(f"{mixture}.shared.down_proj.weight", f"{outer}.")
                    if architecture.module(beside).startswith(f"{outer}."):
                        found.append((place, Tap(told, layer, (mixture, "output"), whole)))
                continue
            mixed = MIXED.get(short, f"{_label(short)} input" if parameter.role == "writes" else None)
            if mixed is not None:
                found.append((place - 0.5, Tap(mixed, layer, (ours, "input"), (theirs, "input"))))
            if len(leaf.shape) > 2:
                continue  # a convolution's, which transformers computes without its module
            if short.startswith("recurrence.") and parameter.role == "gain":
                continue  # whose module gates in transformers too: what comes of both is what the projection reads
            if at.get(f"{ours}.bias", leaf.checkpoint).rpartition(".")[0] != leaf.checkpoint.rpartition(".")[0]:
                continue  # a bias that another module of transformers' adds: Japanese GPT-NeoX
            # Our embedding applies its norm itself; the table's own rows are what goes into that norm.
            normed = short == "embedding" and spec.embedding.norm is not None
            here: tuple[str, _Side] = ("embedding.norm", "input") if normed else (ours, "output")
            rows = None if len(leaf.shared) == 1 else _rows(leaf, part)
            plain = 1 / rescaled.get(leaf.checkpoint, 1.0)
            factor = spec.embedding.multiplier if here == ("embedding", "output") else plain
            mixer = None if layer is None else spec.blocks[layer].mixer(short.partition(".")[0])
            lent = mixer is not None and mixer.lends
            found.append((place, Tap(_label(short), layer, here, (theirs, "output"), rows, factor, lent, leaf.value)))
    return [tap for _, tap in sorted(found, key=lambda pair: pair[0])]


def _rows(leaf: BoundLeaf, part: int) -> Tensor:
    """Which output features of a fused module are this part's: the layout, run on each element's feature number."""
    transposed = leaf.layout.shared != "" and leaf.layout.checkpoint.split()[0] == leaf.layout.shared.split()[-1]
    numbers = np.arange(leaf.shape[1] if transposed else leaf.shape[0])
    whole = np.broadcast_to(numbers[None, :] if transposed else numbers[:, None], leaf.shape)
    return torch.from_numpy(np.array(leaf.to_shared(whole)[part][:, 0]))


def watching(model: nn.Module, watched: Sequence[Tap], ours: bool, see: Callable[[int, Tensor], None]) -> ExitStack:
    """While open, `see` is given what each tap sees, by its index, before anything can change it in place."""
    modules = dict(model.named_modules())

    def tell(index: int, tap: Tap) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            taken = (tap.ours if ours else tap.theirs)[1] == "input"
            value = first_of(inputs[0]) if taken else first_of(output, 0 if ours else tap.value)
            value = value.detach()
            value = value * tap.factor if type(module) in (nn.Embedding, nn.Linear) else value
            see(index, value if tap.rows is None or ours else value[..., tap.rows])

        return hook

    places = ((modules.get((tap.ours if ours else tap.theirs)[0]), tell(i, tap)) for i, tap in enumerate(watched))
    return hooked(module.register_forward_hook(hook) for module, hook in places if module is not None)


def first_of(output: Any, which: int = 0) -> Any:
    """Return what a module gives: of several values the first, or another one."""
    return output[which] if isinstance(output, tuple | list) else output


class KeptStates:
    """Tensors in fp64 by key, in a file that is gone when it is closed: of a large model they are 100 MB a row."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="gptkit-")  # noqa: SIM115 (closed by whoever holds this)
        self._at: dict[_Key, tuple[int, torch.Size]] = {}
        self.close = self._file.close

    def __setitem__(self, key: _Key, value: Tensor) -> None:
        self._at[key] = self._file.seek(0, 2), value.shape
        self._file.write(value.contiguous().numpy().tobytes())

    def __contains__(self, key: _Key) -> bool:
        return key in self._at

    def __getitem__(self, key: _Key) -> Tensor:
        start, shape = self._at[key]
        self._file.seek(start)
        data = bytearray(self._file.read(8 * shape.numel()))
        return torch.frombuffer(data, dtype=torch.float64).reshape(shape) if data else torch.empty(shape)


_See = Callable[[_Key, Tensor], None]
"""Told of what a tap saw of a batch: (the batch's identity, the tap's index), rows (N, features) in fp64."""


def bisect(both: Sides, batches: Sequence[ProbeBatch], path: Kernel) -> list[Part]:
    """Every tap's difference, in the order of computation, on what `Batch.valid` leaves: in four passes."""
    architecture, spec = both.source.architecture, both.source.spec
    assert architecture is not None
    watched = taps(architecture, spec)
    head = len(watched)
    """The key of the logits, behind all that a head multiplies, limits or adds."""

    def run(dtype: torch.dtype, ours: bool, see: _See, inputs: Sequence[ProbeBatch]) -> list[Tensor]:
        seen: set[_Key] = set()

        def told(index: int, value: Tensor) -> None:
            batch = RUNNING.get()
            key = (id(batch), index)
            if watched[index].first and key in seen:
                return
            seen.add(key)
            see(key, valid_rows(value, batch))

        watch = partial(watching, watched=watched, ours=ours, see=told)
        logits = (both.candidate if ours else both.reference)(inputs, dtype, path, watch)
        for batch, each in zip(inputs, logits, strict=True):
            see((id(batch), head), each.double())
        return logits

    def against(kept: KeptStates, gaps: dict[int, float]) -> _See:
        def see(key: _Key, rows: Tensor) -> None:
            if key in kept and rows.shape == (right := kept[key]).shape:
                gaps[key[1]] = max(gaps.get(key[1], 0.0), relative_gap(right, rows))

        return see

    worst, theirs_noise, ours_noise = dict[int, float](), dict[int, float](), dict[int, float]()
    with closing(KeptStates()) as theirs, closing(KeptStates()) as ours:
        exact = run(torch.float64, False, theirs.__setitem__, batches)
        # transformers' eager bloom has NaN in fp64 where a padded row may look at nothing
        good = [batch for batch, each in zip(batches, exact, strict=True) if bool(torch.isfinite(each).all())]
        run(torch.float32, False, against(theirs, theirs_noise), good)
        hold = against(theirs, worst)

        def both_ways(key: _Key, rows: Tensor) -> None:
            hold(key, rows)
            ours[key] = rows

        run(torch.float64, True, both_ways, good)
        run(torch.float32, True, against(ours, ours_noise), good)
    last = Tap("head", None, ("head", "output"), ("head", "output"))
    return [
        tap.part(worst[i], theirs_noise[i] + ours_noise[i])
        for i, tap in enumerate([*watched, last])
        if i in worst and i in theirs_noise and i in ours_noise
    ]


def valid_rows(value: Tensor, batch: ProbeBatch) -> Tensor:
    """The rows of real tokens, (N, features), in fp64; what has no batch of its own (positions) as it is. transformers'
    own modules may flatten batch and time.
    """
    shape = batch.input_ids.shape
    if value.ndim and (value.shape[:2] == shape or value.shape[0] == shape[0] * shape[1]):
        return batch.valid(value.reshape(*shape, -1)).double()
    return value.reshape(-1, value.shape[-1] if value.ndim else 1).double()


def relative_gap(a: Tensor, b: Tensor) -> float:
    """The largest difference over the largest value of `a`; infinite where there is a NaN."""
    difference = (a - b).abs().max().item()
    if difference != difference:
        return float("inf")
    scale = a.abs().max().item()
    return difference / scale if scale else difference
