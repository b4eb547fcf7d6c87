"""Convert plain feed-forwards into gated ones, dense ones into mixtures of experts, and back.

A plain feed-forward equals a gated one, act(gate(x)) · up(x), whose factor up(x) is always 1: gate_proj gets the old
weights, and up_proj is 0·x + 1. This is exact, and keeps every bit. The reverse is exact if up(x) is the same for every
input, that is, if the weight of up_proj is zero. Its bias c is then folded into the columns of the output projection:
down·diag(c).

If up(x) depends on the input, it is removed, and the function changes. On a calibration text, the output projection is
fitted by least squares, so that down'·act(gate(x)) is nearest to the old output. On sample:llama (all 5 layers) this
costs a KL of 1.1 nats, and 6.9 without the fit. (If gate_proj is removed instead, down·act(up(x)), the KL is 1.2 with
the fit and 4.4 without it.)

There are two kinds of experts:

- copies (Sparse Upcycling 2212.05055): each of E experts is a copy of the old feed-forward, and a router of random
  weights chooses K of them for a token. The router's weights of these K sum to 1, so the output is that of one expert.
  This is exact, and training makes the experts different.
- a split: each of E experts has a part of the intermediate dimension, and every token uses all of them. A router of
  zeros gives all experts the weight 1/E, and their output projections are multiplied by E. This is exact. (It is a
  start for the fine-grained experts of DeepSeekMoE 2401.06066.)

In the reverse direction, equal experts become one, and experts whose router is zero are joined to one. Otherwise the
result is the mean of the experts. With a text, an expert counts with the weight that the router gives it on average.
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
    """Return the feed-forward of a block. If the block has a mixture, return the component of its experts."""
    inner = block.feed_forward
    return inner.expert if isinstance(inner, MixtureOfExperts) else inner


def with_dense(block: Block, dense: Dense) -> Block:
    """Return the block with another feed-forward. If the block has a mixture, every expert is replaced."""
    inner = block.feed_forward
    mixture = isinstance(inner, MixtureOfExperts)
    return block.replaced(feed_forward=replace(inner, expert=dense) if mixture else dense)


def paths(spec: ModelSpec, layer: int) -> list[str]:
    """Return the path of a layer's feed-forward in the model, or if it is a mixture, the paths of all experts."""
    return [expert.path for expert in experts(spec.blocks[layer], layer)]


def _is_gated(block: Block) -> bool:
    """Return whether the feed-forward of a block is gated. If it is a mixture, return whether the experts are."""
    return isinstance(dense_of(block), GatedFeedForward)


# --- plain -> gated ---------------------------------------------------------------------------------------------------


def _to_gated(spec: ModelSpec, asked: Asked) -> Swapped:
    """Convert plain feed-forwards into gated ones with the same activation. This is exact, and values keep all bits."""
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
    """Return the component of the gated feed-forward that replaces a plain one.

    gate_proj and up_proj have biases, since a single flag stands for both and the bias of up_proj has to be 1.
    """
    return cast("GatedFeedForward", recast(old, GatedFeedForward, up_bias=True))


def _gated_tensors(path: str, old: Dense) -> dict[str, Tensor]:
    """Return the tensors of the gated feed-forward that replaces a plain one.

    gate_proj is the old up_proj, and the new up_proj is 0·x + 1.
    """
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
    """Convert gated feed-forwards into plain ones.

    This is exact if up_proj's output does not depend on the input. Otherwise down_proj is fitted on a text.
    """
    hint = "To make them gated, use --mlp gated."
    gated = asked.those(spec, _is_gated, "these feed-forwards are plain already", hint)
    zero = asked.weights.zero
    plain = {layer: recast(dense_of(spec.blocks[layer]), FeedForward) for layer in gated}
    # up(x) is the same for every x if the weight of up_proj is zero.
    varying = [i for i in gated if not zero(*(f"{path}.up_proj.weight" for path in paths(spec, i)))]
    refit = None if asked.approximate or not varying else _refitted(spec, varying, asked)
    blocks, tensors = dict[int, Block](), dict[str, Tensor]()
    for layer in gated:
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
    summary = {"from": "gated", "to": "plain", "layers": gated, "refitted": varying if refit is not None else []}
    note = f"in {in_words(varying)}, up_proj was left out, although its output depends on the input"
    guarantee = guarantee_of(len(varying), len(spec.blocks))
    return Swapped(with_blocks(spec, blocks), guarantee, tensors, summary, (note,) if varying else ())


def _plain_tensors(path: str, bias: bool) -> dict[str, Tensor]:
    """Return up_proj of the plain feed-forward that replaces a gated one. It is the old gate_proj."""
    parts = ("weight", "bias") if bias else ("weight",)
    return {f"{path}.up_proj.{part}": Moved(f"{path}.gate_proj.{part}") for part in parts}


def _folded_tensors(asked: Asked, path: str, old: Dense) -> dict[str, Tensor]:
    """Return down_proj with the constant output of up_proj folded into it. Return {} if the constant is 1.

    The constant is the bias of up_proj, or 0 if there is none.
    """
    constant, down = f"{path}.up_proj.bias", f"{path}.down_proj.weight"
    if not old.up_bias:
        return {down: Computed(lambda model: 0 * model.wide(down))}
    if asked.weights.filled(1.0, constant):
        return {}
    return {down: Computed(lambda model: model.wide(down) * model.wide(constant))}


def _refitted(spec: ModelSpec, layers: list[int], asked: Asked) -> Scratch:
    """Return the fit on a text of down_proj in these layers, which compensates for the removed factor up(x).

    Raises SwapRefused for mixtures of experts, and without a text.
    """
    mixed = [layer for layer in layers if isinstance(spec.blocks[layer].feed_forward, MixtureOfExperts)]
    if mixed or asked.calibration is None:
        raise SwapRefused(
            f"gated -> plain cannot be exact here: in {in_words(mixed or layers)}, the output of up_proj depends on the"
            " input, because its weight is not zero",
            "--approximate leaves out up_proj and measures the damage.",
        )
    return Scratch.by("feed_forward.downs", asked.calibration(), set(layers))


# --- experts ----------------------------------------------------------------------------------------------------------


_MOST = 1024  # the maximum number of experts in a mixture; see `components.MixtureOfExperts`
_NORMALISED = True  # whether the weights of the chosen experts sum to 1


def is_mixture(block: Block) -> bool:
    """Return whether a block's feed-forward is a mixture of experts."""
    return isinstance(block.feed_forward, MixtureOfExperts)


def _wanted(spec: ModelSpec, asked: Asked) -> tuple[int, int, dict[int, Dense]]:
    """Return E and K of the value "moe:ExK", and the feed-forwards to convert, by layer."""
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
    """Convert feed-forwards into mixtures of E experts.

    The experts are copies, of which a token uses K. With `split`, they are parts, and a token uses all of them.
    """
    seed = asked.settings.get("seed", 0)
    if not split and (not isinstance(seed, int) or isinstance(seed, bool) or seed < 0):
        raise UsageError(f"the router's seed is {seed!r}, expected a whole number of at least 0")
    count, top, dense_layers = _wanted(spec, asked)
    if split and top != count:
        hint = f"--mlp moe:{count}x{count}:split, or --mlp moe:{count}x{top}, which makes copies."
        raise SwapRefused(
            f"--mlp {asked.value} divides the feed-forward into {count} experts and uses only {top} of them for "
            "a token, so the output of the others would be lost",
            hint,
        )
    tensors: dict[str, Tensor] = {}
    for layer, dense in dense_layers.items():
        path, width = f"blocks.{layer}.feed_forward", dense.intermediate_size
        router = f"{path}.router.weight"
        if split:
            if width % count:
                fits = ", ".join(str(n) for n in range(2, min(width, _MOST) + 1) if width % n == 0)
                raise SwapRefused(f"the width {width} is not divisible into {count} equal parts", f"Possible: {fits}")
            dense_layers[layer] = replace(dense, intermediate_size=width // count)
            tensors[router] = Filled((count, spec.hidden_size), 0.0, like=f"{path}.down_proj.weight")
            for index in range(count):
                tensors |= _part(path, dense_layers[layer], index, count)
        else:
            first = f"{path}.gate_proj.weight" if isinstance(dense, GatedFeedForward) else f"{path}.up_proj.weight"
            draw = partial(_drawn, rows=count, columns=spec.hidden_size, seed=(seed, layer))
            tensors |= {router: Moved(first, draw)} | _copies(path, dense, count)
    fields: dict[str, Any] = {"experts": count, "top_k": top, "normalise": _NORMALISED and not split}
    mixture = partial(MixtureOfExperts, hidden_size=spec.hidden_size, **fields)
    new = with_mixers(spec, {layer: mixture(expert=expert) for layer, expert in dense_layers.items()})
    summary = {"from": "dense", "to": "experts", "experts": count, "top_k": top, "layers": list(dense_layers)}
    summary |= {"split": True} if split else {"seed": seed}
    notes = (
        ("every token uses all experts with equal weights; to use fewer per token, train the model",) if split else ()
    )
    return Swapped(new, "exact", tensors, summary, notes)


def _copies(path: str, dense: Dense, count: int) -> dict[str, Tensor]:
    """Return the tensors of `count` experts, which are copies of the old feed-forward."""
    return {f"{path}.experts.{i}.{name}": Moved(f"{path}.{name}") for i in range(count) for name in dense.shapes()}


def _drawn(weight: NDArray[Any], rows: int, columns: int, seed: tuple[int, int]) -> NDArray[Any]:
    """Return the weight of a router (rows, columns), whose elements are drawn at random from the elements of `weight`.

    The result depends on the seed, but not on the machine.
    """
    chosen = np.random.Generator(np.random.PCG64(seed)).integers(0, weight.size, (rows, columns))
    result: NDArray[Any] = weight.reshape(-1)[chosen]
    return result


def _part(path: str, expert: Dense, index: int, count: int) -> dict[str, Tensor]:
    """Return the tensors of expert `index` of `count` experts into which a feed-forward is split.

    The expert gets its rows of the input projections, and its columns of down_proj. The columns are multiplied by
    `count`, because the router gives every expert the weight 1/count. For the same reason, every expert gets the whole
    output bias. Every expert also gets the parameters of the activation function, if there are any.
    """
    cut = slice(index * expert.intermediate_size, (index + 1) * expert.intermediate_size)
    tensors: dict[str, Tensor] = {name: Moved(f"{path}.{name}", lambda array: array[cut]) for name in expert.shapes()}
    tensors["down_proj.weight"] = _weighed(f"{path}.down_proj.weight", cut, count)
    if expert.down_bias:
        tensors["down_proj.bias"] = Moved(f"{path}.down_proj.bias")
    tensors |= {name: Moved(f"{path}.{name}") for name in _numbers(expert)}
    return {f"{path}.experts.{index}.{name}": how for name, how in tensors.items()}


def _numbers(expert: Dense) -> list[str]:
    """Return the names of the parameters of the activation function, whose size does not depend on the width."""
    return [name for name in expert.weights() if name.startswith("activation.")]


def _weighed(name: str, cut: slice, factor: float) -> Computed:
    """Return the columns `cut` of a weight, multiplied by a factor."""
    return Computed(lambda model: model.wide(name)[:, cut] * factor)


# --- experts -> dense -------------------------------------------------------------------------------------------------


def _to_dense(spec: ModelSpec, asked: Asked) -> Swapped:
    """Convert mixtures of experts into single feed-forwards.

    This is exact if all experts are equal, or if the router always gives all experts the same weight. Otherwise the
    result is the mean of the experts.
    """
    hint = "--mlp moe:8x2 makes 8 experts from each feed-forward."
    layers = asked.those(spec, is_mixture, "these feed-forwards are dense already", hint)
    mixtures: dict[int, Any] = {layer: spec.blocks[layer].feed_forward for layer in layers}
    for layer, mixture in mixtures.items():
        if mixture.extras:
            reason = f"the mixture of experts of layer {layer} uses {', '.join(mixture.extras)}"
            raise SwapRefused(
                f"{reason}: this swap merges experts only if a plain softmax weighs them and no expert is shared"
            )
    equal = [layer for layer in layers if weights_sum_to_one(mixtures[layer]) and experts_alike(spec, asked, layer)]
    weighed_equally = [layer for layer in layers if layer not in equal and _all_weighed_alike(spec, asked, layer)]
    lossy = [layer for layer in layers if layer not in (*equal, *weighed_equally)]
    shares = None  # equal shares
    if lossy and not asked.approximate and asked.calibration is not None:
        shares = Scratch.by("feed_forward.shares", asked.calibration(), set(lossy))
    changed, tensors = dict[int, Dense](), dict[str, Tensor]()
    for layer, mixture in mixtures.items():
        path, dense = f"blocks.{layer}.feed_forward", mixture.expert
        if layer in equal:
            tensors |= {f"{path}.{name}": Moved(f"{path}.experts.0.{name}") for name in dense.shapes()}
        elif layer in weighed_equally:
            tensors |= _side_by_side(path, mixture)
            dense = replace(dense, intermediate_size=dense.intermediate_size * mixture.experts)
        else:
            for name in dense.shapes():
                tensors[f"{path}.{name}"] = _mean(path, name, mixture.experts, shares, layer)
        changed[layer] = dense
    summary = {"from": "experts", "to": "dense", "layers": layers, "alike": equal, "side_by_side": weighed_equally}
    notes = (f"{in_words(lossy)}: the experts differ and were replaced by their mean",) if lossy else ()
    guarantee = guarantee_of(len(lossy), len(spec.blocks))
    return Swapped(with_mixers(spec, changed), guarantee, tensors, summary, notes)


def weights_sum_to_one(mixture: MixtureOfExperts) -> bool:
    """Return whether the router's weights of the experts that process a token always sum to one."""
    return mixture.normalise or mixture.top_k == mixture.experts


def experts_alike(spec: ModelSpec, asked: Asked, layer: int) -> bool:
    """Return whether all experts of a layer have the same parameters."""
    mixture: Any = spec.blocks[layer].feed_forward
    path = f"blocks.{layer}.feed_forward.experts"
    pairs = ((name, i) for name in mixture.expert.shapes() for i in range(1, mixture.experts))
    return all(asked.weights.same(f"{path}.0.{name}", f"{path}.{i}.{name}") for name, i in pairs)


def _all_weighed_alike(spec: ModelSpec, asked: Asked, layer: int) -> bool:
    """Return whether a layer's router gives all E experts the weight 1/E for every token.

    If the activation functions have parameters, these must also be equal in all experts.
    """
    mixture: Any = spec.blocks[layer].feed_forward
    path = f"blocks.{layer}.feed_forward"
    pairs = ((name, i) for name in _numbers(mixture.expert) for i in range(1, mixture.experts))
    return (
        mixture.top_k == mixture.experts
        and asked.weights.zero(f"{path}.router.weight")
        and all(asked.weights.same(f"{path}.experts.0.{name}", f"{path}.experts.{i}.{name}") for name, i in pairs)
    )


def _side_by_side(path: str, mixture: MixtureOfExperts) -> dict[str, Tensor]:
    """Join all E experts to one feed-forward that is E times as wide. Return its tensors.

    The output projection is divided by E, and the output bias is the mean of the experts' biases.
    """
    tensors: dict[str, Tensor] = {}
    for name in mixture.expert.shapes():
        names = tuple(f"{path}.experts.{i}.{name}" for i in range(mixture.experts))
        how: Tensor = Moved(names, lambda *arrays: np.concatenate(arrays))
        if name in _numbers(mixture.expert):
            how = Moved(names[0])
        elif name == "down_proj.weight":
            how = _joined(names, mixture.experts)
        elif name == "down_proj.bias" and len(names) > 1:
            how = Computed(lambda model, names=names: np.mean([model.wide(source) for source in names], axis=0))  # type: ignore[misc]
        tensors[f"{path}.{name}"] = how
    return tensors


def _joined(names: tuple[str, ...], divisor: float) -> Computed:
    """Concatenate several weights along their columns, and divide them by `divisor`."""
    return Computed(lambda model: np.concatenate([model.wide(name) for name in names], axis=1) / divisor)


def _mean(path: str, name: str, count: int, shares: Scratch | None, layer: int) -> Computed:
    """Return the mean of the experts' tensors `name` in a layer, for the feed-forward that replaces a mixture.

    If `shares` is given (`feed_forward.shares`), an expert is weighted by its share of the router's weights on a text.
    """

    def compute(model: Model) -> Wide:
        share = np.full(count, 1 / count) if shares is None else shares.of(model, str(layer))
        result: Wide = sum(share[i] * model.wide(f"{path}.experts.{i}.{name}") for i in range(count))
        return result

    return Computed(compute)


def _parts_worth_trying(spec: ModelSpec) -> tuple[str, ...]:
    """Return the value that `gptkit swaps` tries on a model: a split into two experts, if it is possible."""
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
        needs="The feed-forward gets 50 % more parameters: gate_proj has the old weights, and up_proj outputs 1",
        source="derived for gptkit; gated units: Shazeer 2002.05202",
        reshape=_to_gated,
        clears=(Clears("*", theirs=GatedFeedForward),),
    ),
    _entry(
        form="plain",
        takes="gated feed-forward",
        gives="plain feed-forward",
        needs="Exact only if the weight of up_proj is zero, as after --mlp gated. Otherwise down_proj is fitted"
        " to a calibration text",
        exact_where="the weight of up_proj is zero",
        source="derived for gptkit",
        reshape=_to_plain,
        clears=(Clears("*", theirs=FeedForward),),
        calibrated=True,
    ),
    _entry(
        form="moe:ExK:split",
        takes="dense feed-forward",
        gives="E experts, each a part of the old feed-forward",
        needs="K must equal E, and E must divide the width of the feed-forward",
        source="derived for gptkit; fine-grained experts: DeepSeekMoE 2401.06066",
        reshape=partial(_to_experts, True),
        examples=_parts_worth_trying,
    ),
    _entry(
        form="moe:ExK",
        takes="dense feed-forward",
        gives="E experts, copies of the old feed-forward, with K per token",
        needs="The feed-forward gets E times as many parameters",
        source="Sparse Upcycling 2212.05055",
        reshape=partial(_to_experts, False),
        examples=lambda spec: () if all(map(is_mixture, spec.blocks)) else ("moe:4x2",),
        clears=(Clears("*", "mlp=moe:{theirs.experts}x{theirs.top_k}", theirs=MixtureOfExperts),),
    ),
    _entry(
        form="dense",
        takes="mixture of experts",
        gives="dense feed-forward",
        needs="Exact only if all experts are equal, or if the router gives all of them the same weight. Otherwise the"
        " result is the mean of the experts, weighted on a calibration text",
        exact_where="all experts are equal, or the router gives all of them the same weight",
        source="the reverse of Sparse Upcycling 2212.05055",
        reshape=_to_dense,
        clears=tuple(Clears("*", ours=MixtureOfExperts, theirs=dense) for dense in (GatedFeedForward, FeedForward)),
        calibrated=True,
    ),
)
