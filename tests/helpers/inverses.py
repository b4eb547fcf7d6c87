"""What undoes a swap, where anything does: the property tests take steps back by it."""

import math
from collections.abc import Callable, Iterable
from typing import Any

from gptkit.components import LatentAttention, ModelSpec, Rotary
from gptkit.surgery.registry import Asked, Step, layers_in, swap_for
from gptkit.surgery.swaps import activation, layers, mlp, rotation

Inverse = Callable[[ModelSpec, Asked], Step | None]


def inverse(step: Step, before: ModelSpec) -> Step | None:
    """What undoes a step on a tree."""
    argument = step.value.partition(":")[2] if ":" in step.value else None
    layers = None if step.blocks is None else layers_in(step.blocks, len(before.blocks))
    swap = swap_for(step.option, step.value)
    undo = INVERSES.get((swap.option, swap.form))
    return None if undo is None else undo(before, Asked(step.value, argument, layers, step.approximate, step.settings))


def again(asked: Asked, option: str, value: str, **settings: Any) -> Step:
    """A step in the same layers."""
    blocks = None if asked.layers is None else ",".join(map(str, asked.layers))
    return Step(option, value, blocks, settings=settings)


def smaller(option: str, numbers: Callable[[ModelSpec], Iterable[int | None]]) -> Inverse:
    """The step that undoes growth: the number as it was, where it was one number and there are more now."""

    def undo(before: ModelSpec, asked: Asked) -> Step | None:
        stacks = [before] if before.encoder is None else [before, before.encoder]
        old = {each or 0 for stack in stacks for each in numbers(stack)}
        number = int(asked.value.rpartition(":")[2])
        return again(asked, option, str(max(old))) if len(old) == 1 and number > max(old) else None

    return undo


def _of_attention(field: str) -> Callable[[ModelSpec], Iterable[int | None]]:
    """A field of attention, of the layers that have one."""

    def numbers(before: ModelSpec) -> Iterable[int | None]:
        found = (block.mixer("attention") for block in before.blocks)
        return (getattr(each, field, None) for each in found if each is not None)

    return numbers


def _activation(before: ModelSpec, asked: Asked) -> Step | None:
    """The way back, where it is exact too."""
    new = asked.value
    old = {mlp.dense_of(before.blocks[i]).activation for i in asked.chosen(before)}
    if len(old) != 1 or (name := old.pop()) == new or activation.how(new, name) != "exact":  # type: ignore[arg-type]
        return None
    return again(asked, "activation", name)


def _scale(before: ModelSpec, asked: Asked) -> Step | None:
    """The step back, where the scale before was the usual one."""
    found = [block.mixer("attention") for block in before.blocks]
    usual = all(hasattr(a, "kv_heads") and math.isclose(a.scale, a.head_dim**-0.5, rel_tol=1e-14) for a in found)
    return Step("fold", "scale:head") if usual and asked.argument is None else None


def _kv_heads(before: ModelSpec, asked: Asked) -> Step | None:
    """The step back from more heads, where all layers had the same number."""
    counts = {getattr(block.mixer("attention"), "kv_heads", None) for block in before.blocks} - {None}
    return again(asked, "attention", f"gqa:{counts.pop()}") if len(counts) == 1 else None


def _gated(before: ModelSpec, asked: Asked) -> Step | None:
    """The way back from gated feed-forwards, where no layer was gated: a bias that only came with the gate goes."""
    dense = [mlp.dense_of(before.blocks[i]) for i in asked.chosen(before)]
    biased = {each.up_bias for each in dense}
    if any("gate_proj.weight" in each.shapes() for each in dense) or len(biased) > 1:
        return None
    return again(asked, "mlp", "plain", **({} if biased == {True} else {"drop_zero_bias": True}))


def _experts(before: ModelSpec, asked: Asked) -> Step | None:
    """The way back from copies or parts, where all that was asked for was dense."""
    return None if asked.those(before, mlp.is_mixture) else again(asked, "mlp", "dense")


def _more_layers(before: ModelSpec, asked: Asked) -> Step:
    """The list that takes the added layers out again."""
    order = layers.expansion(len(before.blocks), int(asked.value.removeprefix("+")))
    return Step("layers", "keep:" + ",".join(str(index) for index, (_, copy) in enumerate(order) if not copy))


def _rmsnorm(_: ModelSpec, asked: Asked) -> Step | None:
    return None if asked.approximate else Step("norm", "layernorm")


def _layernorm(_: ModelSpec, asked: Asked) -> Step | None:
    """The way back from LayerNorms, where all of the stream's norms are: an RMSNorm beside them would have to be shown
    a stream without a mean, which a tree does not tell.
    """
    return None if asked.approximate or asked.layers is not None else Step("norm", "rmsnorm")


def _block(before: ModelSpec, asked: Asked) -> Step | None:
    """The way back, where all were serial, or all parallel and of one kind."""
    to_serial, blocks = asked.value != "serial", [before.blocks[layer] for layer in asked.chosen(before)]
    shared = {block.feed_forward_norm is None for block in blocks}
    if any(block.parallel == to_serial for block in blocks) or (len(shared) > 1 and not to_serial):
        return None
    return again(asked, "block", "serial" if to_serial else "parallel:shared" if shared.pop() else "parallel")


def _no_positions(before: ModelSpec, asked: Asked) -> Step | None:
    """Of neutral rotary positions or a table of zeros, where there were none."""
    there = any(before.blocks[layer].attention.position for layer in asked.chosen(before))
    table = asked.value.startswith("learned") and asked.argument is not None
    other_length = table and int(asked.argument or 0) != before.context_length
    return None if there or before.positions is not None or other_length else again(asked, "position", "none")


def _neutral(before: ModelSpec, asked: Asked) -> Step | None:
    """Of none, where neutral rotary positions were on whole heads."""
    for attention in (before.blocks[layer].attention for layer in asked.chosen(before)):
        if isinstance(attention, LatentAttention) or before.positions is not None:
            return None
        if attention.position != Rotary(dim=attention.head_dim, base=10_000.0, scaling=rotation.NEUTRAL):
            return None
    return again(asked, "position", "rope:neutral")


def _context(before: ModelSpec, asked: Asked) -> Step | None:
    """The context as it was; rows that were cut do not come back."""
    old, table, length = before.context_length, before.positions, int(asked.value)
    if old is None or (table is not None and (table.length != old or length < old)):
        return None
    return Step("context", str(old))


def _pairs(before: ModelSpec, asked: Asked) -> Step | None:
    """The way back, where all layers go the same way."""
    found = {rotary.pairs for rotary in rotation.rotary_layers(before, asked.chosen(before)).values()}
    return again(asked, "rope_pairs", found.pop()) if len(found) == 1 else None


def _window(before: ModelSpec, asked: Asked) -> Step | None:
    """The way back, where all layers had one window, or none."""
    found = [getattr(before.blocks[layer].mixer("attention"), "window", "other") for layer in asked.chosen(before)]
    windows = {each for each in found if each != "other"}
    return again(asked, "window", str(windows.pop() or "none")) if len(windows) == 1 else None


def _vocabulary(before: ModelSpec, asked: Asked) -> Step | None:
    grows = asked.argument is not None or int(asked.value) > before.vocab_size
    return Step("vocab", str(before.vocab_size)) if grows else None


INVERSES: dict[tuple[str, str], Inverse] = {
    **{("activation", name): _activation for name in activation.TARGETS},
    ("attention", "mha"): _kv_heads,
    ("attention", "mqa"): _kv_heads,
    ("attention", "gqa:N"): _kv_heads,
    ("block", "parallel"): _block,
    ("block", "parallel:shared"): _block,
    ("block", "serial"): _block,
    ("context", "N"): _context,
    ("fold", "scale"): _scale,
    ("head_dim", "N"): smaller("head_dim", _of_attention("head_dim")),
    ("heads", "N"): smaller("heads", _of_attention("heads")),
    ("hidden", "N"): smaller("hidden", lambda before: [before.hidden_size]),
    ("intermediate", "N"): smaller(
        "intermediate", lambda before: [block.feed_forward.intermediate_size for block in before.blocks]
    ),
    ("layers", "+N"): _more_layers,
    ("mlp", "gated"): _gated,
    ("mlp", "moe:ExK"): _experts,
    ("mlp", "moe:ExK:split"): _experts,
    ("norm", "layernorm"): _layernorm,
    ("norm", "rmsnorm"): _rmsnorm,
    ("position", "learned"): _no_positions,
    ("position", "learned:LENGTH"): _no_positions,
    ("position", "none"): _neutral,
    ("position", "rope:neutral"): _no_positions,
    ("rope_pairs", "adjacent"): _pairs,
    ("rope_pairs", "halves"): _pairs,
    ("rope_scaling", "dynamic:FACTOR"): lambda before, asked: again(asked, "rope_scaling", "none"),
    ("tie", ""): lambda before, asked: Step("untie", ""),
    ("untie", ""): lambda before, asked: Step("tie", ""),
    ("vocab", "N"): _vocabulary,
    ("vocab", "multiple:N"): _vocabulary,
    ("window", "N"): _window,
    ("window", "none"): _window,
}
"""By a swap's option and form; what is not named has none."""
