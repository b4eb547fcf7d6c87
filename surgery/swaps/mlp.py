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

from functools import partial

from msgspec.structs import replace

from ...components import Block, FeedForward, GatedFeedForward, MixtureOfExperts, ModelSpec, recast
from ...errors import SwapRefused
from ..base import Computed, Filled, Moved, Swapped, Tensor
from ..fits.scratch import Scratch
from ..layerwise import experts, guarantee_of, in_words, with_blocks
from ..options import FEED_FORWARD, Option
from ..registry import Asked, Clears, Step, Swap

Dense = FeedForward | GatedFeedForward


def dense_of(block: Block) -> Dense:
    """A block's feed-forward, or what each of its experts is."""
    inner = block.feed_forward
    return inner.expert if isinstance(inner, MixtureOfExperts) else inner


def with_dense(block: Block, dense: Dense) -> Block:
    """The block with another feed-forward, or with experts that are such."""
    inner = block.feed_forward
    mixture = isinstance(inner, MixtureOfExperts)
    return block.replaced(feed_forward=replace(inner, expert=dense) if mixture else dense)


def paths(spec: ModelSpec, layer: int) -> list[str]:
    """The paths of a layer's feed-forwards: one, or one an expert."""
    return [path for path, _ in experts(spec.blocks[layer], f"blocks.{layer}")]


def _is_gated(block: Block) -> bool:
    """Whether a block's feed-forward, or each of its experts, is gated."""
    return isinstance(dense_of(block), GatedFeedForward)


# --- plain -> gated ---------------------------------------------------------------------------------------------------


def _to_gated(spec: ModelSpec, asked: Asked) -> Swapped:
    """Plain -> gated, with the same activation. Exact, and every value keeps its bits."""
    plain = asked.those(
        spec,
        lambda block: not _is_gated(block),
        "the feed-forwards asked for are gated already",
        "--activation changes what their gates compute; --mlp plain is the way back, where it exists.",
    )
    blocks, tensors = dict[int, Block](), dict[str, Tensor]()
    for layer in plain:
        old = dense_of(spec.blocks[layer])
        for path in paths(spec, layer):
            tensors |= gated_tensors(path, old)
        blocks[layer] = with_dense(spec.blocks[layer], gated(old))
    return Swapped(with_blocks(spec, blocks), "exact", tensors, {"from": "plain", "to": "gated", "layers": plain})


def gated(old: Dense) -> GatedFeedForward:
    """The gated feed-forward in a plain one's place. Its one flag for both biases has to be set: up's is the 1."""
    found: GatedFeedForward = recast(old, GatedFeedForward, up_bias=True)
    return found


def gated_tensors(path: str, old: Dense) -> dict[str, Tensor]:
    """gate = up, with its bias or none; up = 0·x + 1."""
    weight, inner = f"{path}.up_proj.weight", (old.intermediate_size,)
    bias = Moved(f"{path}.up_proj.bias") if old.up_bias else Filled(inner, 0.0, like=weight)
    return {
        f"{path}.gate_proj.weight": Moved(weight),
        f"{path}.gate_proj.bias": bias,
        weight: Filled((old.intermediate_size, old.hidden_size), 0.0, like=weight),
        f"{path}.up_proj.bias": Filled(inner, 1.0, like=weight),
    }


def _ungate(before: ModelSpec, asked: Asked) -> Step | None:
    """The way back from `_to_gated`, where no layer was gated: a bias that only came with the gate goes again."""
    blocks = [before.blocks[i] for i in asked.chosen(before)]
    biased = {dense_of(block).up_bias for block in blocks}
    if any(map(_is_gated, blocks)) or len(biased) > 1:
        return None
    return asked.again("mlp", "plain", **({} if biased == {True} else {"drop_zero_bias": True}))


# --- gated -> plain ---------------------------------------------------------------------------------------------------


def _to_plain(spec: ModelSpec, asked: Asked) -> Swapped:
    """Gated -> plain: exact where the factor `up` is the same for every input, refitted on a text where it is not."""
    hint = "--mlp gated is the way to gated ones."
    found = asked.those(spec, _is_gated, "the feed-forwards asked for are plain already", hint)
    zero = asked.weights.zero
    # Where its weight is zero, up(x) is the same for every x.
    varying = [i for i in found if not zero(*(f"{path}.up_proj.weight" for path in paths(spec, i)))]
    refit = None if asked.approximate or not varying else refitted(spec, varying, asked)
    blocks, tensors = dict[int, Block](), dict[str, Tensor]()
    for layer in found:
        old = dense_of(spec.blocks[layer])
        gate_biases = [f"{path}.gate_proj.bias" for path in paths(spec, layer)]
        bias = old.up_bias and not (asked.settings.get("drop_zero_bias") and zero(*gate_biases))
        for path in paths(spec, layer):
            tensors |= plain_tensors(path, bias)
            if layer not in varying:
                tensors |= folded_tensors(asked, path, old)
            elif refit is not None:
                tensors |= refit.waiting([f"{path}.down_proj.weight"])
        blocks[layer] = with_dense(spec.blocks[layer], recast(old, FeedForward, up_bias=bias))
    summary = {"from": "gated", "to": "plain", "layers": found, "refitted": varying if refit is not None else []}
    note = f"in {in_words(varying)} the factor without an activation was left out: it depends on the input"
    guarantee = guarantee_of(len(varying), len(spec.blocks))
    return Swapped(with_blocks(spec, blocks), guarantee, tensors, summary, (note,) if varying else ())


def plain_tensors(path: str, bias: bool) -> dict[str, Tensor]:
    """up = gate, what it was multiplied by left out."""
    parts = ("weight", "bias") if bias else ("weight",)
    return {f"{path}.up_proj.{part}": Moved(f"{path}.gate_proj.{part}") for part in parts}


def folded_tensors(asked: Asked, path: str, old: Dense) -> dict[str, Tensor]:
    """The constant that gate was multiplied by goes into down, unless it is 1; without a bias it is 0."""
    constant, down = f"{path}.up_proj.bias", f"{path}.down_proj.weight"
    if not old.up_bias:
        return {down: Computed(lambda model: 0 * model.wide(down))}
    if asked.weights.filled(1.0, constant):
        return {}
    return {down: Computed(lambda model: model.wide(down) * model.wide(constant))}


def refitted(spec: ModelSpec, layers: list[int], asked: Asked) -> Scratch:
    """The output projections of layers, fitted on the text to make up for the factor that goes."""
    mixed = [layer for layer in layers if isinstance(spec.blocks[layer].feed_forward, MixtureOfExperts)]
    if mixed or asked.calibration is None:
        raise SwapRefused(
            f"gated -> plain cannot be exact here: in {in_words(mixed or layers)} the factor without an activation"
            " depends on the input (the weight of up_proj is not zero)",
            "--approximate leaves that factor out and measures the damage.",
        )
    return Scratch.by("feed_forward.downs", asked.calibration(), set(layers))


entry = partial(Swap, option="mlp", by_layer=True)

ORDER = 120
OPTIONS = (
    Option(
        "mlp",
        FEED_FORWARD,
        1,
        "The kind of feed-forward; moe:8x2 has 8 experts, 2 of them per token.",
        "gated | swiglu | plain | moe:ExK | dense",
        words="gated = glu; plain = ungated, vanilla; moe = mixture of experts, mixture, experts; dense",
        two={
            "swiglu": (("mlp", "gated"), ("activation", "silu")),
            "geglu": (("mlp", "gated"), ("activation", "gelu")),
            "reglu": (("mlp", "gated"), ("activation", "relu")),
        },
        settings={"seed": int, "drop_zero_bias": bool},
    ),
)
SWAPS = (
    entry(
        form="gated",
        takes="plain feed-forward",
        gives="gated feed-forward",
        needs="half as many parameters again: the gate is the old projection, the new one is 0·x + 1",
        source="derived for gptkit; gated units: Shazeer 2002.05202",
        reshape=_to_gated,
        inverse=_ungate,
        clears=(Clears("*", theirs=GatedFeedForward),),
    ),
    entry(
        form="plain",
        takes="gated feed-forward",
        gives="plain feed-forward",
        needs="an up_proj whose weight is zero, as after --mlp gated; otherwise down_proj is fitted on a text",
        source="derived for gptkit",
        reshape=_to_plain,
        clears=(Clears("*", theirs=FeedForward),),
        calibrated=True,
    ),
)
