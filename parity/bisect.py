"""Find the first component whose output differs between two models.

gptkit runs both models on the same input in fp64, and compares the outputs of their components in the order of
computation. A parameter's name in the checkpoint also names the module of transformers, so no table of modules is
needed. A difference counts if it is larger than the rounding to fp32 causes at this component in both models. The
models run one after the other. The outputs of the first one, transformers' model, are stored in a temporary file.
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

_FLOOR = 1e-9  # smaller relative differences are ignored: they come from fp64 sums in another order

_Side = Literal["output", "input"]
_Key = tuple[int, int]


@dataclass(frozen=True)
class Tap:
    """A place where the two models are compared: the output of a module, or the input of a projection."""

    label: str  # the component in words
    layer: int | None  # the layer's index; None outside of layers
    ours: tuple[str, _Side]  # gptkit's module, and whether its input or output is compared
    theirs: tuple[str, _Side]  # transformers' module, and whether its input or output is compared
    rows: Tensor | None = None  # the features that belong to this component, if transformers' module fuses several
    factor: float = 1.0  # multiplies the output of transformers' table or linear map to give ours
    first: bool = False  # whether only the module's first call counts; later layers call it again to share its weights
    value: int = 0  # the index of the output among the values that transformers' module returns

    def part(self, relative: float, noise: float) -> Part:
        """Return the comparison at this place as a record.

        Args:
            relative: the largest difference in fp64, relative to the largest value.
            noise: the relative difference that rounding to fp32 causes in the two models together.
        """
        name = self.label if self.layer is None else f"layer {self.layer} {self.label}"
        return Part(name, self.label, self.layer, relative, noise)


@dataclass(frozen=True)
class Part:
    """The difference between two models at one of the compared places (see `Tap`), in fp64."""

    name: str  # the component with its layer, in words
    label: str  # the component in words
    layer: int | None  # the layer's index; None outside of layers
    relative: float  # the largest difference in fp64, relative to the largest value
    noise: float  # the difference that rounding to fp32 causes here, in both models together

    @property
    def parts(self) -> bool:
        """Return whether the two models differ here by more than rounding explains.

        transformers computes norms, softmax and rotary tables of an "fp64" model in fp32. So the measured difference
        includes a rounding to fp32 on each side (`noise`). After a swap the two models may also round differently,
        which doubles the noise. The mistakes that `verify` makes on purpose give differences at least 30 times as
        large.
        """
        return not self.relative <= max(2 * self.noise, _FLOOR)


@dataclass(frozen=True)
class Cause:
    """A possible cause of a difference: a repair that was tried, and its effect on the logits."""

    repair: str  # the repair in words
    restores: bool  # whether the models agree after it, up to rounding
    left: float  # the largest difference of the logits that remains after the repair


@dataclass(frozen=True)
class Divergence:
    """Where two models differ: the comparison of all components, and the likely causes."""

    places: tuple[Part, ...]  # all compared places in the order of computation
    causes: tuple[Cause, ...] = ()  # the likely causes, the likeliest first
    undone: tuple[str, ...] = ()  # the repairs of known mistakes that were tried, in words
    copied: tuple[str, ...] = ()  # the parts of the reference that were tried in the candidate, in words

    @property
    def first(self) -> Part | None:
        """Return the first component at which the models differ, in the order of computation; None if there is none."""
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
"""The projections whose input shows the result of a computation without weights of its own."""


def _label(module: str) -> str:
    """Return the words for a module in messages: "attention.q_proj" becomes "attention q"."""
    owner, _, name = module.rpartition(".")
    words = f"{owner} {_WORDS.get(name, name.removesuffix('_proj'))}".replace("feed_forward", "feed-forward")
    return words.replace(".", " ").replace("_", " ").strip()


def taps(architecture: Architecture, spec: ModelSpec) -> list[Tap]:
    """Return the places at which gptkit's and transformers' model are compared, in the order of computation.

    Most are the outputs of modules. The result of a computation without weights, such as softmax or an activation, is
    compared at the input of the next projection.

    Args:
        architecture: the definition of the model family, which has the names of transformers' modules.
        spec: the component tree, which has the names of gptkit's modules.
    """
    known = {parameter.name: (place, parameter) for place, parameter in enumerate(spec.parameters())}
    moved = {
        part: name for name, (_, groups) in architecture.parameters(spec).items() for parts in groups for part in parts
    }
    bound = architecture.bind(spec)
    at = {name: leaf.checkpoint for leaf in bound for name in leaf.shared}
    rescaled = architecture.rescaled(spec)
    places: list[tuple[float, Tap]] = []
    for leaf in bound:
        if not leaf.shared[0].endswith(".weight") or leaf.shared[0] == "head.weight":  # the logits are compared instead
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
                # Every expert computes some of the tokens, in its own order, so gptkit compares the experts' sum. The
                # shared experts are part of it, as in transformers, except in Granite, which adds them outside.
                if short.endswith(".experts.0.down_proj"):
                    mixture = ours.partition(".experts.")[0]
                    outer = theirs.partition(".experts")[0] if ".experts" in theirs else theirs.rpartition(".")[0]
                    whole: tuple[str, _Side] = (outer, "output")
                    norm_name = at.get(f"{mixture}_output_norm.weight", "")
                    norm_name = moved.get(norm_name, norm_name).removesuffix(".weight")
                    if norm_name.startswith(f"{outer}."):  # A.X K1's module applies the norm of its output itself
                        whole = (norm_name, "input")
                    label = _label(short.partition(".0.")[0])
                    shared_name = at.get(f"{mixture}.shared.down_proj.weight", f"{outer}.")
                    if architecture.module(shared_name).startswith(f"{outer}."):
                        places.append((place, Tap(label, layer, (mixture, "output"), whole)))
                continue
            mixed = MIXED.get(short, f"{_label(short)} input" if parameter.role == "writes" else None)
            if mixed is not None:
                places.append((place - 0.5, Tap(mixed, layer, (ours, "input"), (theirs, "input"))))
            if len(leaf.shape) > 2:
                continue  # transformers computes convolutions without calling their module
            if short.startswith("recurrence.") and parameter.role == "gain":
                continue  # transformers' module also gates; the projection's input shows the result of both
            if at.get(f"{ours}.bias", leaf.checkpoint).rpartition(".")[0] != leaf.checkpoint.rpartition(".")[0]:
                continue  # another module of transformers adds this bias: Japanese GPT-NeoX
            # gptkit's embedding applies its norm itself, so the rows of the table are the norm's input.
            normed = short == "embedding" and spec.embedding.norm is not None
            here: tuple[str, _Side] = ("embedding.norm", "input") if normed else (ours, "output")
            rows = None if len(leaf.shared) == 1 else _rows(leaf, part)
            plain = 1 / rescaled.get(leaf.checkpoint, 1.0)
            factor = spec.embedding.multiplier if here == ("embedding", "output") else plain
            mixer = None if layer is None else spec.blocks[layer].mixer(short.partition(".")[0])
            shared = mixer is not None and mixer.borrows_weights
            places.append(
                (place, Tap(_label(short), layer, here, (theirs, "output"), rows, factor, shared, leaf.value))
            )
    return [tap for _, tap in sorted(places, key=lambda pair: pair[0])]


def _rows(leaf: BoundLeaf, part: int) -> Tensor:
    """Return the indices of those output features of a fused module that belong to one of the fused parameters.

    Args:
        leaf: the fused checkpoint tensor, such as q, k and v in one, with the layout that splits it.
        part: the index of the parameter among the fused ones.
    """
    transposed = leaf.layout.shared != "" and leaf.layout.checkpoint.split()[0] == leaf.layout.shared.split()[-1]
    numbers = np.arange(leaf.shape[1] if transposed else leaf.shape[0])
    whole = np.broadcast_to(numbers[None, :] if transposed else numbers[:, None], leaf.shape)
    return torch.from_numpy(np.array(leaf.to_shared(whole)[part][:, 0]))


def watching(model: nn.Module, watched: Sequence[Tap], ours: bool, see: Callable[[int, Tensor], None]) -> ExitStack:
    """Call `see` for each of the compared places whenever the model computes the value there.

    Args:
        model: gptkit's model or transformers'.
        watched: the compared places.
        ours: whether the model is gptkit's.
        see: gets a place's index in `watched` and the value, before later code can change the value in place.

    Returns:
        A context that removes the hooks when it ends.
    """
    modules = dict(model.named_modules())

    def hook_for(index: int, tap: Tap) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            is_input = (tap.ours if ours else tap.theirs)[1] == "input"
            value = first_of(inputs[0]) if is_input else first_of(output, 0 if ours else tap.value)
            value = value.detach()
            value = value * tap.factor if type(module) in (nn.Embedding, nn.Linear) else value
            see(index, value if tap.rows is None or ours else value[..., tap.rows.to(value.device)])

        return hook

    places = ((modules.get((tap.ours if ours else tap.theirs)[0]), hook_for(i, tap)) for i, tap in enumerate(watched))
    return hooked(module.register_forward_hook(hook) for module, hook in places if module is not None)


def first_of(output: Any, which: int = 0) -> Any:
    """Return a module's output. If the module returns several values, return the one with the index `which`."""
    return output[which] if isinstance(output, tuple | list) else output


class KeptStates:
    """A dictionary of fp64 tensors in a temporary file. A large model has 100 MB of hidden states per position.

    The tensors may be on any device when they are stored. They are on the CPU when they are read.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="gptkit-")  # noqa: SIM115 (closed by the caller)
        self._at: dict[_Key, tuple[int, torch.Size]] = {}
        self.close = self._file.close

    def __setitem__(self, key: _Key, value: Tensor) -> None:
        self._at[key] = self._file.seek(0, 2), value.shape
        self._file.write(value.cpu().contiguous().numpy().tobytes())

    def __contains__(self, key: _Key) -> bool:
        return key in self._at

    def __getitem__(self, key: _Key) -> Tensor:
        start, shape = self._at[key]
        self._file.seek(start)
        data = bytearray(self._file.read(8 * shape.numel()))
        return torch.frombuffer(data, dtype=torch.float64).reshape(shape) if data else torch.empty(shape)


_See = Callable[[_Key, Tensor], None]
"""Called with (the batch's identity, the index of the compared place) and the values there, (N, features) in fp64, on
the CPU."""


@dataclass(frozen=True)
class TappedRun:
    """Runs one of two models, and passes on the values of all taps."""

    both: Sides
    path: Kernel
    taps: Sequence[Tap]

    @property
    def places(self) -> list[Tap]:
        """The taps, and last the logits (after the head's multiplier, cap and bias)."""
        return [*self.taps, Tap("head", None, ("head", "output"), ("head", "output"))]

    def __call__(self, batches: Sequence[ProbeBatch], dtype: torch.dtype, ours: bool, see: _See) -> list[Tensor]:
        """Run gptkit's model (`ours`) or transformers', and return its logits, (N, V) per batch."""
        seen: set[_Key] = set()

        def record(index: int, value: Tensor) -> None:
            batch = RUNNING.get()
            key = (id(batch), index)
            if self.taps[index].first and key in seen:
                return
            seen.add(key)
            see(key, valid_rows(value, batch).cpu())

        watch = partial(watching, watched=self.taps, ours=ours, see=record)
        logits = (self.both.candidate if ours else self.both.reference)(batches, dtype, self.path, watch)
        for batch, values in zip(batches, logits, strict=True):
            see((id(batch), len(self.taps)), values.double())
        return logits


def bisect(both: Sides, batches: Sequence[ProbeBatch], path: Kernel) -> list[Part]:
    """Return the difference at every compared component, in the order of computation.

    Both models run twice, in fp64 and in fp32. The fp32 runs measure the rounding. Padding is left out. Of long
    sequences only some evenly spaced positions are compared.

    Args:
        both: the two models.
        batches: the inputs.
        path: the attention implementation of both models, "sdpa" or "eager".
    """
    architecture, spec = both.source.architecture, both.source.spec
    assert architecture is not None
    run = TappedRun(both, path, taps(architecture, spec))

    def against(stored: KeptStates, gaps: dict[int, float]) -> _See:
        def see(key: _Key, rows: Tensor) -> None:
            if key in stored and rows.shape == (right := stored[key]).shape:
                gaps[key[1]] = max(gaps.get(key[1], 0.0), relative_gap(right, rows))

        return see

    worst, theirs_noise, ours_noise = dict[int, float](), dict[int, float](), dict[int, float]()
    with closing(KeptStates()) as theirs, closing(KeptStates()) as ours:
        exact = run(batches, torch.float64, False, theirs.__setitem__)
        # transformers' eager Bloom gives NaN in fp64 for a padded row that attends to no token.
        finite_batches = [
            batch for batch, values in zip(batches, exact, strict=True) if bool(torch.isfinite(values).all())
        ]
        run(finite_batches, torch.float32, False, against(theirs, theirs_noise))
        compare_with_theirs = against(theirs, worst)

        def compare_and_store(key: _Key, rows: Tensor) -> None:
            compare_with_theirs(key, rows)
            ours[key] = rows

        run(finite_batches, torch.float64, True, compare_and_store)
        run(finite_batches, torch.float32, True, against(ours, ours_noise))
    return [
        tap.part(worst[i], theirs_noise[i] + ours_noise[i])
        for i, tap in enumerate(run.places)
        if i in worst and i in theirs_noise and i in ours_noise
    ]


def valid_rows(value: Tensor, batch: ProbeBatch) -> Tensor:
    """Return the values at tokens without padding, (N, features), in fp64.

    A value without a batch dimension, such as position embeddings, keeps all its rows. The batch and time dimensions
    may be flattened into one.
    """
    shape = batch.input_ids.shape
    if value.ndim and (value.shape[:2] == shape or value.shape[0] == shape[0] * shape[1]):
        return batch.valid(value.reshape(*shape, -1)).double()
    return value.reshape(-1, value.shape[-1] if value.ndim else 1).double()


def relative_gap(a: Tensor, b: Tensor) -> float:
    """Return max |a - b| / max |a|, or infinity if there is a NaN."""
    difference = (a - b).abs().max().item()
    if difference != difference:
        return float("inf")
    scale = a.abs().max().item()
    return difference / scale if scale else difference
