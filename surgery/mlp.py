"""Plain feed-forward <-> gated feed-forward.

A plain feed-forward is a gated one whose other factor is 1: gate = up, and up = 0·x + 1. That is exact and leaves every
bit where it was. The way back is exact where that factor is the same for every input: its weight is zero, and its bias
c goes into the columns of the output projection, down·diag(c).

Where it depends on the input it has to go, and what is left is a smaller kind of network. On a calibration text the
output projection is fitted anew, by least squares, so that down'·act(gate(x)) comes nearest to what the layer gave:
on the bundled llama, all 5 layers, KL 1.1 nats, against 6.9 where it is left as it was. (Leaving out the gate instead,
down·act(up(x)), starts better, at 4.4, and ends no better, at 1.2.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
import torch

from ..components import Block, FeedForward, GatedFeedForward, MixtureOfExperts, ModelSpec
from ..errors import SwapRefused
from .base import Computed, Filled, Model, Moved, Swapped, Tensor, Wide
from .calibration import Calibration, Layer, Scratch
from .layerwise import blocks_text, chosen_layers, guarantee_of, in_words
from .registry import Asked, Clears, Step, Swap
from .regression import Moment, ridge
from .stream import experts

__all__ = ["SWAPS", "dense_of", "is_gated", "paths", "with_dense"]

replace = msgspec.structs.replace

STRENGTH = 1e-3
"""Of the ridge that holds the refitted projection to a multiple of the old one."""


# --- walking over feed-forwards, those of experts too -----------------------------------------------------------------


def dense_of(block: Block) -> FeedForward | GatedFeedForward:
    """A block's feed-forward, or what each of its experts is."""
    inner = block.feed_forward
    return inner.expert if isinstance(inner, MixtureOfExperts) else inner


def with_dense(block: Block, dense: FeedForward | GatedFeedForward) -> Block:
    """The block with another feed-forward, or with experts that are such."""
    inner = block.feed_forward
    if isinstance(inner, MixtureOfExperts):
        return block.replaced(feed_forward=replace(inner, expert=dense))
    return block.replaced(feed_forward=dense)


def paths(spec: ModelSpec, layer: int) -> list[str]:
    """The paths of a layer's feed-forwards: one, or one an expert."""
    return [path for path, _ in experts(spec.blocks[layer], f"blocks.{layer}")]


def is_gated(block: Block) -> bool:
    """Whether a block's feed-forward, or each of its experts, is gated."""
    return isinstance(dense_of(block), GatedFeedForward)


# --- plain -> gated ---------------------------------------------------------------------------------------------------


def to_gated(model: Model, asked: Asked) -> Swapped:
    """Plain -> gated, with the same activation. Exact, and every value keeps its bits.

    Raises:
        SwapRefused: the chosen feed-forwards are gated already.

    """
    spec = model.spec
    plain = [layer for layer in chosen_layers(spec, asked) if isinstance(dense_of(spec.blocks[layer]), FeedForward)]
    if not plain:
        raise SwapRefused(
            "the feed-forwards asked for are gated already",
            "--activation changes what their gates compute; --mlp plain is the way back, where it exists.",
        )
    blocks, tensors = list(spec.blocks), dict[str, Tensor]()
    for layer in plain:
        old = dense_of(blocks[layer])
        assert isinstance(old, FeedForward)
        for path in paths(spec, layer):
            tensors |= gated_tensors(path, old)
        blocks[layer] = with_dense(blocks[layer], gated(old))
    new = replace(spec, blocks=tuple(blocks))
    return Swapped(new, "exact", tensors, {"from": "plain", "to": "gated", "layers": plain})


def gated(old: FeedForward) -> GatedFeedForward:
    """The gated feed-forward in a plain one's place. Its one flag for both biases has to be set: up's is the 1."""
    return GatedFeedForward(
        hidden_size=old.hidden_size,
        intermediate_size=old.intermediate_size,
        activation=old.activation,
        up_bias=True,
        down_bias=old.down_bias,
        arithmetic=old.arithmetic,
    )


def gated_tensors(path: str, old: FeedForward) -> dict[str, Tensor]:
    """gate = up, with its bias or none; up = 0·x + 1."""
    weight, inner = f"{path}.up_proj.weight", (old.intermediate_size,)
    bias = Moved(f"{path}.up_proj.bias") if old.up_bias else Filled(inner, 0.0, like=weight)
    return {
        f"{path}.gate_proj.weight": Moved(weight),
        f"{path}.gate_proj.bias": bias,
        weight: Filled((old.intermediate_size, old.hidden_size), 0.0, like=weight),
        f"{path}.up_proj.bias": Filled(inner, 1.0, like=weight),
    }


def ungate(before: ModelSpec, asked: Asked) -> Step | None:
    """The way back from `to_gated`: a bias that only came with the gate goes again."""
    plain = [block for block in (before.blocks[i] for i in asked.chosen(before)) if not is_gated(block)]
    if len(plain) < len(asked.chosen(before)):
        return None  # what was gated before stays so, and the layers differ
    biased = {dense_of(block).up_bias for block in plain}
    if len(biased) > 1:
        return None
    return Step("mlp", "plain", blocks_text(asked), settings={} if biased == {True} else {"drop_zero_bias": True})


# --- gated -> plain ---------------------------------------------------------------------------------------------------


def to_plain(model: Model, asked: Asked) -> Swapped:
    """Gated -> plain: exact where the factor `up` is the same for every input, refitted on a text where it is not.

    Raises:
        SwapRefused: no chosen feed-forward is gated; one that cannot be exact is an expert's.
        UsageError: one cannot be exact, and there is no text to fit on.

    """
    spec = model.spec
    found = [layer for layer in chosen_layers(spec, asked) if is_gated(spec.blocks[layer])]
    if not found:
        raise SwapRefused("the feed-forwards asked for are plain already", "--mlp gated is the way to gated ones.")
    varying = [layer for layer in found if not all(constant_up(model, path) for path in paths(spec, layer))]
    refit = None if asked.approximate or not varying else refitted(model, varying, asked)
    blocks, tensors = list(spec.blocks), dict[str, Tensor]()
    for layer in found:
        old = dense_of(blocks[layer])
        assert isinstance(old, GatedFeedForward)
        bias = old.up_bias and not (asked.settings.get("drop_zero_bias") and zero_gate_bias(model, layer))
        for path in paths(spec, layer):
            tensors |= plain_tensors(path, bias)
            if layer not in varying:
                tensors |= folded_tensors(model, path, old)
            elif refit is not None:
                tensors[f"{path}.down_proj.weight"] = refit.waiting(f"{path}.down_proj.weight")
        blocks[layer] = with_dense(blocks[layer], plain(old, bias))
    new = replace(spec, blocks=tuple(blocks))
    summary = {"from": "gated", "to": "plain", "layers": found, "refitted": varying if refit is not None else []}
    guarantee = guarantee_of(len(varying), len(spec.blocks))
    note = f"in {in_words(varying)} the factor without an activation was left out: it depends on the input"
    return Swapped(new, guarantee, tensors, summary, (note,) if varying else ())


def constant_up(model: Model, path: str) -> bool:
    """Whether up(x) is the same for every x."""
    return not model.wide(f"{path}.up_proj.weight").any()


def zero_gate_bias(model: Model, layer: int) -> bool:
    """Whether the bias of the gate is zero, in all experts."""
    return not any(model.wide(f"{path}.gate_proj.bias").any() for path in paths(model.spec, layer))


def plain(old: GatedFeedForward, bias: bool) -> FeedForward:
    """The plain feed-forward in a gated one's place."""
    return FeedForward(
        hidden_size=old.hidden_size,
        intermediate_size=old.intermediate_size,
        activation=old.activation,
        up_bias=bias,
        down_bias=old.down_bias,
        arithmetic=old.arithmetic,
    )


def plain_tensors(path: str, bias: bool) -> dict[str, Tensor]:
    """up = gate, what it was multiplied by left out."""
    tensors: dict[str, Tensor] = {f"{path}.up_proj.weight": Moved(f"{path}.gate_proj.weight")}
    return tensors | ({f"{path}.up_proj.bias": Moved(f"{path}.gate_proj.bias")} if bias else {})


def folded_tensors(model: Model, path: str, old: GatedFeedForward) -> dict[str, Tensor]:
    """The constant that gate was multiplied by goes into down, unless it is 1."""
    constant = f"{path}.up_proj.bias" if old.up_bias else None
    if constant is not None and bool((model.wide(constant) == 1).all()):
        return {}
    return {f"{path}.down_proj.weight": folded(f"{path}.down_proj.weight", constant)}


def folded(down: str, constant: str | None) -> Computed:
    """down·diag(constant); without a bias the constant is 0."""

    def compute(model: Model) -> Wide:
        weight = model.wide(down)
        result: Wide = weight * model.wide(constant) if constant is not None else 0 * weight
        return result

    return Computed(compute)


def refitted(model: Model, layers: list[int], asked: Asked) -> Scratch:
    """The output projections of layers, fitted on the text to make up for the factor that goes.

    Raises:
        SwapRefused: a layer is a mixture of experts, each of which sees too little of a text.
        UsageError: there is no text.

    """
    mixed = [layer for layer in layers if isinstance(model.spec.blocks[layer].feed_forward, MixtureOfExperts)]
    if mixed or asked.calibration is None:
        raise SwapRefused(
            f"gated -> plain cannot be exact here: in {in_words(mixed or layers)} the factor without an activation"
            " depends on the input (the weight of up_proj is not zero)",
            "--approximate leaves that factor out and measures the damage.",
        )
    calibration = asked.calibration()
    return Scratch(lambda: refits(model, calibration, set(layers)))


def refits(model: Model, calibration: Calibration, layers: set[int]) -> Iterator[Mapping[str, Wide]]:
    """down' of each layer by its shared name."""
    for layer in calibration.walk(model):
        if layer.index in layers:
            name = f"blocks.{layer.index}.feed_forward.down_proj.weight"
            yield {name: refit_down(layer, torch.from_numpy(model.wide(name).copy()))}


def refit_down(layer: Layer, down: torch.Tensor) -> Wide:
    """argmin E|down·(a · u) - down'·a|² over down', with a = act(gate(x)) and u = up(x); where the text says little it
    is held to down·diag(E[a² u] / E[a²]), the best for each unit alone.
    """
    module = layer.module.feed_forward
    _, seen = layer.run(("feed_forward.gate_proj", "feed_forward.up_proj"))
    gate, up = (seen[f"feed_forward.{name}"][1].flatten(0, 1).to(torch.float64) for name in ("gate_proj", "up_proj"))
    gate = module.activation(gate)
    share = (gate.square() * up).sum(dim=0) / gate.square().sum(dim=0).clamp_min(torch.finfo(gate.dtype).tiny)
    moment = Moment.zeros(gate.shape[1], down.shape[0])
    moment.add(gate, (gate * up) @ down.T)
    result: Wide = ridge(down * share, moment, STRENGTH).numpy()
    return result


SWAPS = (
    Swap(
        option="mlp",
        form="gated",
        takes="plain feed-forward",
        gives="gated feed-forward",
        guarantee="exact",
        needs="half as many parameters again: the gate is the old projection, the new one is 0·x + 1",
        source="derived for gptkit; gated units: Shazeer 2002.05202",
        apply=to_gated,
        examples=lambda spec: () if all(is_gated(block) for block in spec.blocks) else ("gated",),
        by_layer=True,
        inverse=ungate,
        clears=(Clears("*", theirs=GatedFeedForward),),
    ),
    Swap(
        option="mlp",
        form="plain",
        takes="gated feed-forward",
        gives="plain feed-forward",
        guarantee="exact",
        needs="an up_proj whose weight is zero, as after --mlp gated; otherwise down_proj is fitted on a text",
        source="derived for gptkit",
        apply=to_plain,
        examples=lambda spec: ("plain",) if any(is_gated(block) for block in spec.blocks) else (),
        clears=(Clears("*", theirs=FeedForward),),
        by_layer=True,
        calibrated=True,
    ),
)
