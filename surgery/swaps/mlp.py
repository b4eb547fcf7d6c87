"""Plain feed-forward <-> gated feed-forward, and dense <-> mixture of experts.

A plain feed-forward is a gated one whose other factor is 1: gate = up, and up = 0·x + 1. That is exact and leaves every
bit where it was. The way back is exact where that factor is the same for every input: its weight is zero, and its bias
c goes into the columns of the output projection, down·diag(c).

Where it depends on the input it has to go, and what is left is a smaller kind of network. On a calibration text the
output projection is fitted anew, by least squares, so that down'·act(gate(x)) comes nearest to what the layer gave:
on the bundled llama, all 5 layers, KL 1.1 nats, against 6.9 where it is left as it was. (Leaving out the gate instead,
down·act(up(x)), starts better, at 4.4, and ends no better, at 1.2.)

Of experts there are

- copies (Sparse Upcycling 2212.05055): each expert is the feed-forward there was, and a router of random weights takes
  K of the E. Their weights are made to sum to 1, so experts that are alike give what one of them gives. Exact, until
  training parts them.
- a split: each expert is one of E parts of the intermediate dimension, all of them taken. A router of zeros weighs each
  with 1/E, which E times the output projection makes up for: exact. (The fine-grained experts of DeepSeekMoE
  2401.06066 start so.)

Back: experts that are alike are one; those that a router of zeros all takes stand side by side again. Otherwise there
is their mean, each expert weighted with how much the router gave it on a text.
"""

import re
from functools import partial
from typing import Any, cast

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ...components import Block, FeedForward, GatedFeedForward, MixtureOfExperts, ModelSpec, recast
from ...errors import SwapRefused, UsageError
from ..base import Computed, Filled, Model, Moved, Swapped, Tensor, Wide
from ..fits.scratch import Scratch
from ..layerwise import Dense, experts, guarantee_of, in_words, unnormed, with_blocks, with_mixers
from ..options import FEED_FORWARD, Option
from ..registry import Asked, Clears, Swap


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
    return [each.path for each in experts(spec.blocks[layer], layer)]


def _is_gated(block: Block) -> bool:
    """Whether a block's feed-forward, or each of its experts, is gated."""
    return isinstance(dense_of(block), GatedFeedForward)


# --- plain -> gated ---------------------------------------------------------------------------------------------------


def _to_gated(spec: ModelSpec, asked: Asked) -> Swapped:
    """Plain -> gated, with the same activation. Exact, and every value keeps its bits."""
    hint = "To change the gates' function, use --activation; to remove the gates, --mlp plain."
    plain = asked.those(spec, lambda b: not _is_gated(b), "these feed-forwards are gated already", hint)
    blocks, tensors = dict[int, Block](), dict[str, Tensor]()
    for layer in plain:
        old = dense_of(spec.blocks[layer])
        for path in paths(spec, layer):
            tensors |= _gated_tensors(path, old)
        blocks[layer] = with_dense(spec.blocks[layer], _gated(old))
    return Swapped(with_blocks(spec, blocks), "exact", tensors, {"from": "plain", "to": "gated", "layers": plain})


def _gated(old: Dense) -> GatedFeedForward:
    """The gated feed-forward in a plain one's place. Its one flag for both biases has to be set: up's is the 1."""
    return cast("GatedFeedForward", recast(old, GatedFeedForward, up_bias=True))


def _gated_tensors(path: str, old: Dense) -> dict[str, Tensor]:
    """gate = up, with its bias or none; up = 0·x + 1."""
    weight, inner = f"{path}.up_proj.weight", (old.intermediate_size,)
    bias = Moved(f"{path}.up_proj.bias") if old.up_bias else Filled(inner, 0.0, like=weight)
    return {
        f"{path}.gate_proj.weight": Moved(weight),
        f"{path}.gate_proj.bias": bias,
        weight: Filled((old.intermediate_size, old.hidden_size), 0.0, like=weight),
        f"{path}.up_proj.bias": Filled(inner, 1.0, like=weight),
    }


# --- gated -> plain ---------------------------------------------------------------------------------------------------


def _to_plain(spec: ModelSpec, asked: Asked) -> Swapped:
    """Gated -> plain: exact where the factor `up` is the same for every input, refitted on a text where it is not."""
    hint = "To make them gated, use --mlp gated."
    found = asked.those(spec, _is_gated, "these feed-forwards are plain already", hint)
    zero = asked.weights.zero
    plain = {layer: recast(dense_of(spec.blocks[layer]), FeedForward) for layer in found}
    # Where its weight is zero, up(x) is the same for every x.
    varying = [i for i in found if not zero(*(f"{path}.up_proj.weight" for path in paths(spec, i)))]
    refit = None if asked.approximate or not varying else _refitted(spec, varying, asked)
    blocks, tensors = dict[int, Block](), dict[str, Tensor]()
    for layer in found:
        old = dense_of(spec.blocks[layer])
        gate_biases = [f"{path}.gate_proj.bias" for path in paths(spec, layer)]
        bias = old.up_bias and not (asked.settings.get("drop_zero_bias") and zero(*gate_biases))
        for path in paths(spec, layer):
            tensors |= _plain_tensors(path, bias)
            if layer not in varying:
                tensors |= _folded_tensors(asked, path, old)
            elif refit is not None:
                tensors |= refit.waiting([f"{path}.down_proj.weight"])
        blocks[layer] = with_dense(spec.blocks[layer], replace(plain[layer], up_bias=bias))
    summary = {"from": "gated", "to": "plain", "layers": found, "refitted": varying if refit is not None else []}
    note = f"in {in_words(varying)}, the factor without an activation was left out, although it depends on the input"
    guarantee = guarantee_of(len(varying), len(spec.blocks))
    return Swapped(with_blocks(spec, blocks), guarantee, tensors, summary, (note,) if varying else ())


def _plain_tensors(path: str, bias: bool) -> dict[str, Tensor]:
    """up = gate, what it was multiplied by left out."""
    parts = ("weight", "bias") if bias else ("weight",)
    return {f"{path}.up_proj.{part}": Moved(f"{path}.gate_proj.{part}") for part in parts}


def _folded_tensors(asked: Asked, path: str, old: Dense) -> dict[str, Tensor]:
    """The constant that gate was multiplied by goes into down, unless it is 1; without a bias it is 0."""
    constant, down = f"{path}.up_proj.bias", f"{path}.down_proj.weight"
    if not old.up_bias:
        return {down: Computed(lambda model: 0 * model.wide(down))}
    if asked.weights.filled(1.0, constant):
        return {}
    return {down: Computed(lambda model: model.wide(down) * model.wide(constant))}


def _refitted(spec: ModelSpec, layers: list[int], asked: Asked) -> Scratch:
    """The output projections of layers, fitted on the text to make up for the factor that goes."""
    mixed = [layer for layer in layers if isinstance(spec.blocks[layer].feed_forward, MixtureOfExperts)]
    if mixed or asked.calibration is None:
        raise SwapRefused(
            f"gated -> plain cannot be exact here: in {in_words(mixed or layers)} the factor without an activation"
            " depends on the input (the weight of up_proj is not zero)",
            "--approximate leaves that factor out and measures the damage.",
        )
    return Scratch.by("feed_forward.downs", asked.calibration(), set(layers))


# --- experts ----------------------------------------------------------------------------------------------------------


_MOST = 1024  # experts that a mixture may have; see `components.MixtureOfExperts`
_NORMALISED = True  # the weights of the experts that are taken are made to sum to 1


def is_mixture(block: Block) -> bool:
    """Whether a block's feed-forward is a mixture of experts."""
    return isinstance(block.feed_forward, MixtureOfExperts)


def _wanted(spec: ModelSpec, asked: Asked) -> tuple[int, int, dict[int, Dense]]:
    """E and K of "moe:ExK", and the layers asked for that have one feed-forward, with it."""
    match = re.fullmatch(r"moe:(\d{1,9})x(\d{1,9})(:split)?", asked.value)
    if match is None:
        raise UsageError(f"{asked.value!r}: expected moe:ExK, such as moe:8x2 for 8 experts with 2 of them per token")
    count, top = int(match[1]), int(match[2])
    if not 1 <= top <= count or count > _MOST:
        raise SwapRefused(
            f"{top} of {count} experts per token is not possible: give 1 to {_MOST} experts, and 1 to all of "
            "them per token",
            "moe:8x2, for example, means 8 experts with 2 of them per token.",
        )
    none = "these feed-forwards are mixtures of experts already"
    layers = asked.those(spec, lambda block: not is_mixture(block), none, "To merge the experts, use --mlp dense.")
    dense = {layer: dense_of(spec.blocks[layer]) for layer in layers}
    for layer, inner in dense.items():
        unnormed(f"blocks.{layer}.feed_forward", inner)
    return count, top, dense


# --- dense -> experts -------------------------------------------------------------------------------------------------


def _to_experts(split: bool, spec: ModelSpec, asked: Asked) -> Swapped:
    """Dense -> E experts that are copies, K of them for each token; or its parts, all of them taken."""
    seed = asked.settings.get("seed", 0)
    if not split and (not isinstance(seed, int) or isinstance(seed, bool) or seed < 0):
        raise UsageError(f"the router's seed is {seed!r}, expected a whole number from 0")
    count, top, found = _wanted(spec, asked)
    if split and top != count:
        hint = f"--mlp moe:{count}x{count}:split, or --mlp moe:{count}x{top}, which makes copies."
        raise SwapRefused(
            f"with {top} of {count} parts per token, the output of the other parts is lost: a split needs all of them",
            hint,
        )
    tensors: dict[str, Tensor] = {}
    for layer, dense in found.items():
        path, width = f"blocks.{layer}.feed_forward", dense.intermediate_size
        router = f"{path}.router.weight"
        if split:
            if width % count:
                fits = ", ".join(str(n) for n in range(2, min(width, _MOST) + 1) if width % n == 0)
                raise SwapRefused(f"the width {width} is not divisible into {count} equal parts", f"Possible: {fits}")
            found[layer] = replace(dense, intermediate_size=width // count)
            tensors[router] = Filled((count, spec.hidden_size), 0.0, like=f"{path}.down_proj.weight")
            for index in range(count):
                tensors |= _part(path, found[layer], index, count)
        else:
            first = f"{path}.gate_proj.weight" if isinstance(dense, GatedFeedForward) else f"{path}.up_proj.weight"
            draw = partial(_drawn, rows=count, columns=spec.hidden_size, seed=(seed, layer))
            tensors |= {router: Moved(first, draw)} | _copies(path, dense, count)
    made: dict[str, Any] = {"experts": count, "top_k": top, "normalise": _NORMALISED and not split}
    mixture = partial(MixtureOfExperts, hidden_size=spec.hidden_size, **made)
    new = with_mixers(spec, {layer: mixture(expert=each) for layer, each in found.items()})
    summary = {"from": "dense", "to": "experts", "experts": count, "top_k": top, "layers": list(found)}
    summary |= {"split": True} if split else {"seed": seed}
    notes = (
        ("every token uses all experts with equal weights; to use fewer per token, train the model",) if split else ()
    )
    return Swapped(new, "exact", tensors, summary, notes)


def _copies(path: str, dense: Dense, count: int) -> dict[str, Tensor]:
    """Every expert's tensors: those of the feed-forward that there was."""
    return {f"{path}.experts.{i}.{name}": Moved(f"{path}.{name}") for i in range(count) for name in dense.shapes()}


def _drawn(weight: NDArray[Any], rows: int, columns: int, seed: tuple[int, int]) -> NDArray[Any]:
    """A router (rows, columns) of elements drawn at random from a weight, the same ones on every machine for a seed."""
    chosen = np.random.Generator(np.random.PCG64(seed)).integers(0, weight.size, (rows, columns))
    result: NDArray[Any] = weight.reshape(-1)[chosen]
    return result


def _part(path: str, expert: Dense, index: int, count: int) -> dict[str, Tensor]:
    """One expert of a split: its rows of what reads, its columns of what writes, the latter times `count`. The output
    bias is every expert's, as an activation's own numbers are: weighted with 1/count each, they sum to it.
    """
    cut = slice(index * expert.intermediate_size, (index + 1) * expert.intermediate_size)
    tensors: dict[str, Tensor] = {name: Moved(f"{path}.{name}", lambda array: array[cut]) for name in expert.shapes()}
    tensors["down_proj.weight"] = _weighed(f"{path}.down_proj.weight", cut, count)
    if expert.down_bias:
        tensors["down_proj.bias"] = Moved(f"{path}.down_proj.bias")
    tensors |= {name: Moved(f"{path}.{name}") for name in _numbers(expert)}
    return {f"{path}.experts.{index}.{name}": how for name, how in tensors.items()}


def _numbers(expert: Dense) -> list[str]:
    """The tensors of an activation's own numbers, which units do not share out."""
    return [name for name in expert.weights() if name.startswith("activation.")]


def _weighed(name: str, cut: slice, factor: float) -> Computed:
    """Columns of a weight, times a number."""
    return Computed(lambda model: model.wide(name)[:, cut] * factor)


# --- back -------------------------------------------------------------------------------------------------------------


def _to_dense(spec: ModelSpec, asked: Asked) -> Swapped:
    """Mixture -> one feed-forward: exact where the experts are alike or all weighted alike, else their mean."""
    hint = "--mlp moe:8x2 makes 8 experts from each."
    found = asked.those(spec, is_mixture, "these feed-forwards are dense already", hint)
    mixtures: dict[int, Any] = {layer: spec.blocks[layer].feed_forward for layer in found}
    for layer, mixture in mixtures.items():
        if mixture.beside:
            told = f"the mixture of layer {layer} has {', '.join(mixture.beside)}"
            raise SwapRefused(
                f"{told}: experts can be merged into one only if a softmax weighs them and there is no shared expert"
            )
    one = [layer for layer in found if weights_sum_to_one(mixtures[layer]) and experts_alike(spec, asked, layer)]
    all_of = [layer for layer in found if layer not in one and _all_weighed_alike(spec, asked, layer)]
    lossy = [layer for layer in found if layer not in (*one, *all_of)]
    shares = None  # all count alike
    if lossy and not asked.approximate and asked.calibration is not None:
        shares = Scratch.by("feed_forward.shares", asked.calibration(), set(lossy))
    changed, tensors = dict[int, Dense](), dict[str, Tensor]()
    for layer, mixture in mixtures.items():
        path, dense = f"blocks.{layer}.feed_forward", mixture.expert
        if layer in one:
            tensors |= {f"{path}.{name}": Moved(f"{path}.experts.0.{name}") for name in dense.shapes()}
        elif layer in all_of:
            tensors |= _side_by_side(path, mixture)
            dense = replace(dense, intermediate_size=dense.intermediate_size * mixture.experts)
        else:
            for name in dense.shapes():
                tensors[f"{path}.{name}"] = _mean(path, name, mixture.experts, shares, layer)
        changed[layer] = dense
    summary = {"from": "experts", "to": "dense", "layers": found, "alike": one, "side_by_side": all_of}
    notes = (f"{in_words(lossy)}: the experts differ and were replaced by their mean",) if lossy else ()
    guarantee = guarantee_of(len(lossy), len(spec.blocks))
    return Swapped(with_mixers(spec, changed), guarantee, tensors, summary, notes)


def weights_sum_to_one(mixture: MixtureOfExperts) -> bool:
    """Whether the weights of the experts that a token gets do, whatever the router says."""
    return mixture.normalise or mixture.top_k == mixture.experts


def experts_alike(spec: ModelSpec, asked: Asked, layer: int) -> bool:
    """Whether every expert of a layer has the same values."""
    mixture: Any = spec.blocks[layer].feed_forward
    path = f"blocks.{layer}.feed_forward.experts"
    pairs = ((name, i) for name in mixture.expert.shapes() for i in range(1, mixture.experts))
    return all(asked.weights.same(f"{path}.0.{name}", f"{path}.{i}.{name}") for name, i in pairs)


def _all_weighed_alike(spec: ModelSpec, asked: Asked, layer: int) -> bool:
    """Whether a layer's router takes all experts for every token, each with the weight 1/E, and one activation."""
    mixture: Any = spec.blocks[layer].feed_forward
    path = f"blocks.{layer}.feed_forward"
    pairs = ((name, i) for name in _numbers(mixture.expert) for i in range(1, mixture.experts))
    return (
        mixture.top_k == mixture.experts
        and asked.weights.zero(f"{path}.router.weight")
        and all(asked.weights.same(f"{path}.experts.0.{name}", f"{path}.experts.{i}.{name}") for name, i in pairs)
    )


def _side_by_side(path: str, mixture: MixtureOfExperts) -> dict[str, Tensor]:
    """One feed-forward of all the experts' units, the output projection over E; the mean of the output biases."""
    tensors: dict[str, Tensor] = {}
    for name in mixture.expert.shapes():
        names = tuple(f"{path}.experts.{i}.{name}" for i in range(mixture.experts))
        how: Tensor = Moved(names, lambda *arrays: np.concatenate(arrays))
        if name in _numbers(mixture.expert):
            how = Moved(names[0])
        elif name == "down_proj.weight":
            how = _joined(names, mixture.experts)
        elif name == "down_proj.bias" and len(names) > 1:
            how = Computed(lambda model, names=names: np.mean([model.wide(each) for each in names], axis=0))  # type: ignore[misc]
        tensors[f"{path}.{name}"] = how
    return tensors


def _joined(names: tuple[str, ...], divisor: float) -> Computed:
    """The columns of several weights side by side, over a number."""
    return Computed(lambda model: np.concatenate([model.wide(name) for name in names], axis=1) / divisor)


def _mean(path: str, name: str, count: int, shares: Scratch | None, layer: int) -> Computed:
    """The mean of one of the experts' tensors, by their shares."""

    def compute(model: Model) -> Wide:
        share = np.full(count, 1 / count) if shares is None else shares.of(model, str(layer))
        result: Wide = sum(share[i] * model.wide(f"{path}.experts.{i}.{name}") for i in range(count))
        return result

    return Computed(compute)


def _parts_worth_trying(spec: ModelSpec) -> tuple[str, ...]:
    """Where some layer is dense, and all that are have halves."""
    widths = {block.feed_forward.intermediate_size for block in spec.blocks if not is_mixture(block)}
    return ("moe:2x2:split",) if widths and not any(width % 2 for width in widths) else ()


_entry = partial(Swap, option="mlp", by_layer=True, apart=True, each_stack=True)

ORDER = 120
OPTIONS = (
    Option(
        "mlp",
        FEED_FORWARD,
        1,
        "The kind of feed-forward: gated, swiglu (gated, with the activation silu), plain (not gated), "
        "moe:8x2 (a mixture of 8 experts, 2 of them per token) or dense (a single feed-forward instead of a "
        "mixture).",
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
    _entry(
        form="gated",
        takes="plain feed-forward",
        gives="gated feed-forward",
        needs="half as many parameters again: the gate is the old projection, the new one is 0·x + 1",
        source="derived for gptkit; gated units: Shazeer 2002.05202",
        reshape=_to_gated,
        clears=(Clears("*", theirs=GatedFeedForward),),
    ),
    _entry(
        form="plain",
        takes="gated feed-forward",
        gives="plain feed-forward",
        needs="an up_proj whose weight is zero, as after --mlp gated; otherwise down_proj is fitted on a text",
        source="derived for gptkit",
        reshape=_to_plain,
        clears=(Clears("*", theirs=FeedForward),),
        calibrated=True,
    ),
    _entry(
        form="moe:ExK:split",
        takes="dense feed-forward",
        gives="E experts that are its parts",
        needs="K = E; a width that E divides",
        source="derived for gptkit; fine-grained experts: DeepSeekMoE 2401.06066",
        reshape=partial(_to_experts, True),
        examples=_parts_worth_trying,
    ),
    _entry(
        form="moe:ExK",
        takes="dense feed-forward",
        gives="E experts that are copies, K per token",
        needs="E times the feed-forward's parameters",
        source="Sparse Upcycling 2212.05055",
        reshape=partial(_to_experts, False),
        examples=lambda spec: () if all(map(is_mixture, spec.blocks)) else ("moe:4x2",),
        clears=(Clears("*", "mlp=moe:{theirs.experts}x{theirs.top_k}", theirs=MixtureOfExperts),),
    ),
    _entry(
        form="dense",
        takes="mixture of experts",
        gives="dense feed-forward",
        needs="experts that are alike, or a router of zeros that takes all; otherwise a text, for their mean",
        source="Sparse Upcycling 2212.05055, backwards",
        reshape=_to_dense,
        clears=tuple(Clears("*", ours=MixtureOfExperts, theirs=dense) for dense in (GatedFeedForward, FeedForward)),
        calibrated=True,
    ),
)
