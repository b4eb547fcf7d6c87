"""Fold constants into other weights of a block, which changes none of its outputs, and drop biases.

value-bias: the attention weights of a query sum to one, so the bias of the values only adds a constant to the output.
It moves into the output bias: b_o += W_o b_v, with b_v of a key-value head repeated for every query head of its group
(TransformerLens, `fold_value_biases`).

scale: the scale of the scores is folded into the queries. The new scale is 1, or with "scale:head" 1/√head_dim, as in
most families. If the queries have a norm, the norm's weight is multiplied instead of the projection.

norm: γ of a norm is folded into the weights that read it, and β into their biases (TransformerLens, `fold_ln`).

Biases may also be dropped. Dropping a bias of zeros is exact. So is dropping the bias of keys that have no rotary
positions and no norm: it shifts all scores of a query equally, and softmax ignores such shifts. Dropping any other bias
changes the logits, and gptkit measures how much.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from msgspec.structs import replace

from ...architectures.obstacles import without_biases
from ...components import ALiBi, Attention, ModelSpec, Norm
from ...errors import MissingComponent, SwapRefused, UsageError
from ..base import Computed, Filled, Model, Swapped, Tensor, Wide
from ..layerwise import (
    attentions,
    head_weight,
    readers,
    regained,
    tensors_of,
    unclipped,
    weighed,
    with_blocks,
    with_mixers,
)
from ..options import WEIGHTS, Option
from ..registry import Asked, Clears, Swap, nearest
from .basis import Compute, known, norms, require_weights, with_norms
from .norm import has_bias, shifts_taken


def _output_of_value_bias(output: Wide, bias: Wide, group: int, head_dim: int) -> Wide:
    """Return W_o b_v, the constant that the bias of the values adds to the attention's output.

    Args:
        output: W_o, [hidden, heads · head_dim].
        bias: b_v, [kv_heads · head_dim].
        group: The number of query heads per key-value head.
        head_dim: The number of elements of a head.
    """
    return np.asarray(output @ np.repeat(bias.reshape(-1, head_dim), group, axis=0).reshape(-1))


def _fold_value_bias(spec: ModelSpec, asked: Asked) -> Swapped:
    """Fold the bias of the values into the bias of the output projection."""
    tensors, changed = dict[str, Tensor](), dict[int, Attention]()
    for layer, attention in attentions(spec, asked.chosen(spec), ", whose value bias this swap cannot fold").items():
        path = f"blocks.{layer}.attention"
        unclipped(path, attention)
        value, output = f"{path}.v_proj.bias", f"{path}.o_proj"
        if asked.weights.zero(value):
            continue
        if attention.sinks:
            raise SwapRefused(
                f"cannot fold the value bias of {path}: it has attention sinks, so its attention weights do not "
                "sum to one"
            )

        def make(model: Model, value: str = value, output: str = output, attention: Attention = attention) -> Wide:
            operands = model.wide(f"{output}.weight"), model.wide(value), attention.group, attention.head_dim
            moved = _output_of_value_bias(*operands)
            return moved + model.wide(f"{output}.bias") if attention.output_bias else moved

        tensors[f"{output}.bias"] = Computed(make)
        tensors[value] = Filled((attention.kv_heads * attention.head_dim,), 0.0, value)
        changed[layer] = replace(attention, output_bias=True)
    if not changed:
        raise SwapRefused("no layer has a value bias other than zero, so there is nothing to fold")
    return Swapped(with_mixers(spec, changed), "exact", tensors, {"layers": sorted(changed)})


def _rescaled(name: str, factor: float, norm: Norm | None = None) -> Computed:
    """Return the tensor `name` times a factor.

    If it is the weight of `norm`, the gain of the norm is multiplied, which may be 1 + weight.
    """
    if norm is not None:
        return Computed(regained(norm, name, partial(np.multiply, factor)))
    return Computed(lambda model: model.wide(name) * factor)


def _fold_scale(spec: ModelSpec, asked: Asked) -> Swapped:
    """Fold the scale of the attention scores into the queries."""
    if asked.argument not in (None, "head"):
        raise SwapRefused(f"--fold {asked.value!r} is unknown", "Known: scale, scale:head.")
    tensors, changed = dict[str, Tensor](), dict[int, Attention]()
    for layer, attention in attentions(
        spec, asked.chosen(spec), ", whose attention scale this swap cannot fold"
    ).items():
        wanted = attention.head_dim**-0.5 if asked.argument == "head" else 1.0
        if math.isclose(attention.scale, wanted, rel_tol=1e-14):  # families write 1/√d in several ways
            continue
        unclipped(f"blocks.{layer}.attention", attention)
        if isinstance(attention.position, ALiBi) and attention.position.scaled:
            reason = f"layer {layer} multiplies its ALiBi bias by the scale too, so the scale cannot move into a weight"
            hint = "Leave such layers out with --blocks, or first change the position encoding (--position)."
            raise SwapRefused(reason, hint)
        path, factor = f"blocks.{layer}.attention", attention.scale / wanted
        norm = attention.q_norm
        weighed(f"{path}.q_norm", norm, "1 + weight")
        names = tensors_of(path, attention, "q_proj") if norm is None else tensors_of(f"{path}.q_norm", norm)
        tensors |= {name: _rescaled(name, factor, norm) for name in names}
        changed[layer] = replace(attention, scale=wanted, scaling="multiply")
    if not changed:
        raise SwapRefused(f"every layer already has the attention scale that --fold {asked.value} gives")
    return Swapped(with_mixers(spec, changed), "exact", tensors, {"layers": sorted(changed)})


def _scaled_inputs(weight: str, gamma: str) -> Compute:
    """Return a function that folds a norm's weight γ into the weight R [out, in] of a linear after it: R·diag(γ)."""
    return lambda model: model.wide(weight) * model.wide(gamma)


def _fold_norm(spec: ModelSpec, asked: Asked) -> Swapped:
    """Fold weight and bias of norms into the linears that read them.

    These are the norms before attention and feed-forward. If no layers were chosen, the last norm is folded too.
    """
    require_weights(spec)
    computed, whole = dict[str, Compute](), asked.layers is None
    for layer in asked.chosen(spec):
        if spec.blocks[layer].residual == "normed":
            raise SwapRefused(
                f"layer {layer} takes its residual from the output of its norm, which this swap does not support"
            )
    blocks, head = shifts_taken(spec, asked.layers, computed)
    cleared: dict[str, Norm] = {}
    for layer, block in blocks.items():
        path = f"blocks.{layer}"
        computed |= {
            reader.weight: _scaled_inputs(reader.weight, f"{reader.norm}.weight") for reader in readers(block, path)
        }
        cleared |= norms(block, path)
        plain = {name: _without_bias(norm) for name, norm in norms(block, path)}
        blocks[layer] = with_norms(block, path, plain)
    if whole:
        computed["head.weight"] = _scaled_inputs(head_weight(spec), "final_norm.weight")
        cleared |= [known("final_norm", spec.final_norm)]
    tensors: dict[str, Tensor] = {name: Computed(make) for name, make in computed.items()}
    for path, norm in cleared.items():
        _clear(norm, path, tensors)
    final = _without_bias(cleared["final_norm"]) if whole else spec.final_norm
    new = with_blocks(spec, blocks, head=replace(head, tied=head.tied and not whole), final_norm=final)
    notes = ("the head was untied from the embedding, because it takes up the last norm's weight",)
    summary = {"layers": list(asked.chosen(spec)), "head": whole}
    return Swapped(new, "exact", tensors, summary, notes if whole and spec.tied else ())


def _without_bias(norm: Norm) -> Norm:
    return replace(norm, bias=False) if has_bias(norm) else norm


def _clear(norm: Norm, path: str, tensors: dict[str, Tensor]) -> None:
    """Set a norm's weight to 1: add it to the new tensors `tensors`."""
    tensors[f"{path}.weight"] = Filled((norm.size,), 1.0, f"{path}.weight")


_entry = partial(Swap, option="fold", source="TransformerLens", by_layer=True)
_UNSCALED = "An ALiBi bias, if there is one, must not be multiplied by the scale"


# --- dropped biases ---------------------------------------------------------------------------------------------------


NAMES: Mapping[str, tuple[str, ...]] = {
    "head.bias": ("bias",),
    "norm.bias": ("bias",),
    "query.bias": ("q_proj.bias",),
    "key.bias": ("k_proj.bias", "k_rope_proj.bias"),
    "value.bias": ("v_proj.bias",),
    "latent.bias": ("q_down_proj.bias", "kv_down_proj.bias"),
    "output.bias": ("o_proj.bias",),
    "up.bias": ("up_proj.bias", "gate_proj.bias"),
    "down.bias": ("down_proj.bias",),
    "biases": (),
}
"""The values of --drop, and the names of the parameters that they mean in components. "biases" means all biases."""


def _biases_of(spec: ModelSpec, what: str, layers: tuple[int, ...] | None = None) -> list[str]:
    """Return the names of the biases that a value of --drop means (`what`), in some layers or in the whole model."""
    components = {path: node for path, node in spec.nodes() if what != "norm.bias" or isinstance(node, Norm)}
    if what == "head.bias":
        components = {"head": spec.has_head()}
    names = {f"{path}.{name}" for path, node in components.items() for name in node.weights() if name in NAMES[what]}
    return [
        p.name
        for p in spec.parameters()
        if p.role == "bias" and (what == "biases" or p.name in names) and (layers is None or p.layer in layers)
    ]


def _shift_of_scores(spec: ModelSpec, name: str) -> bool:
    """Return whether a bias shifts all attention scores of a query equally, so that softmax ignores it."""
    parts = name.split(".")
    if parts[0] != "blocks" or parts[-2] != "k_proj":
        return False
    attention = spec.blocks[int(parts[1])].attention
    if not isinstance(attention, Attention) or (attention.position is not None and attention.position.turns):
        return False
    # Norms, clips and caps depend on the size of keys or scores, and the score of a sink is not shifted.
    return attention.k_norm is None and attention.clip is None and attention.cap is None and not attention.sinks


def _drop(spec: ModelSpec, asked: Asked) -> Swapped:
    """Remove biases (--drop).

    A component may have one flag for several biases, such as those of q, k and v. If only some of them are removed,
    these become zeros instead. If all are, the flag is cleared.
    """
    what = asked.value
    if what not in NAMES:
        near = nearest("drop", what)
        hint = f"{f'did you mean {near}? ' if near else ''}known: {', '.join(NAMES)}"
        raise UsageError(f"--drop {what!r} is unknown", hint)
    dropped = _biases_of(spec, what, asked.layers)
    if not dropped:
        has = [name for name in NAMES if _biases_of(spec, name, asked.layers)]
        known = f"Possible here: {', '.join(has)}." if has else "This model has no biases."
        raise SwapRefused(f"--drop {what}: the model has no such bias", known)
    missed = [name for name in dropped if not _shift_of_scores(spec, name) and not asked.weights.zero(name)]
    zero = {name for name in _biases_of(spec, "biases") if name not in dropped and asked.weights.zero(name)}
    new = without_biases(spec, {*dropped, *zero})
    # Other biases of zeros stay, unless they share a flag with dropped ones: q, k and v have one flag.
    remaining = {parameter.name for parameter in new.parameters()}
    owners = {name.rsplit(".", 2)[0] for name in dropped if name not in remaining}
    new = without_biases(spec, {*dropped, *(name for name in zero if name.rsplit(".", 2)[0] in owners)})
    remaining = {parameter.name for parameter in new.parameters()}
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters()}
    tensors: dict[str, Tensor] = {name: Filled(shapes[name], 0.0, name) for name in dropped if name in remaining}
    notes: tuple[str, ...] = ()
    if missed:
        way, fold = {"value.bias": ("value-bias", _fold_value_bias), "norm.bias": ("norm", _fold_norm)}.get(
            what, ("", _drop)
        )
        advice = (
            f"; --fold {way} folds them into other parameters exactly" if way and _possible(fold, spec, asked) else ""
        )
        notes = (f"{len(missed)} of {len(dropped)} dropped biases are not zero, for example {missed[0]}{advice}",)
    summary = {"dropped": len(dropped), "nonzero": len(missed)}
    return Swapped(new, "approximate" if missed else "exact", tensors, summary, notes)


def _possible(fold: Callable[[ModelSpec, Asked], Swapped], spec: ModelSpec, asked: Asked) -> bool:
    """Return whether a fold, such as `_fold_norm`, is possible on this model."""
    try:
        fold(spec, asked)
    except (MissingComponent, SwapRefused):
        return False
    return True


ORDER = 180
OPTIONS = (
    Option(
        "drop",
        WEIGHTS,
        2,
        "Remove these biases, such as head.bias, key.bias or norm.bias. --drop biases removes all biases.",
        "BIASES",
        words="head.bias = lm_head.bias; norm.bias = norms.bias; query.bias = q.bias, q_proj.bias; key.bias = k.bias, "
        "k_proj.bias; value.bias = v.bias, v_proj.bias; latent.bias = q_down_proj.bias, kv_down_proj.bias; "
        "output.bias = o.bias, o_proj.bias; up.bias = up_proj.bias; down.bias = down_proj.bias; "
        "biases = bias, all biases",
    ),
    Option(
        "fold",
        WEIGHTS,
        3,
        "Fold one kind of constant into neighbouring weights. norm folds the gains and biases of norms into "
        "the next projections, value-bias the bias of the values into the output bias of attention, and "
        "scale the scale of attention scores into the queries.",
        "value-bias | scale | norm",
        words="norm = norms; value-bias = value_bias; scale = scales",
    ),
)
SWAPS = (
    Swap(
        option="drop",
        form="BIASES",
        takes="biases of one kind",
        gives="no such biases",
        needs="Exact for biases that are zero, and for biases of keys without RoPE and norm. Otherwise approximate",
        exact_where="the dropped biases are zero",
        source="TransformerLens; softmax ignores a constant that is added to all scores",
        reshape=_drop,
        examples=lambda spec: [name for name in NAMES if name != "biases" and _biases_of(spec, name)],
        by_layer=True,
        clears=(
            *(Clears(f"*.{part}_bias", f"drop={part}.bias") for part in ("output", "up", "down")),
            Clears("head.bias", "drop=head.bias"),
            Clears("*norm.bias", "drop=norm.bias"),
            # q, k and v have one flag.
            Clears("*.qkv_bias", "drop=key.bias", "drop=query.bias", "fold=value-bias"),
            Clears("*.qkv_bias", "drop=key.bias", "drop=query.bias", "drop=value.bias"),
        ),
    ),
    _entry(
        form="norm",
        takes="weights and biases of norms",
        gives="weights and biases of the linear layers after the norms",
        needs="Needs pre-norm blocks",
        reshape=_fold_norm,
        clears=(Clears("*norm.bias"),),
    ),
    _entry(
        form="value-bias",
        takes="the bias of the value projection",
        each_stack=True,
        gives="a bias of the output projection",
        needs="Needs a bias other than zero",
        reshape=_fold_value_bias,
    ),
    _entry(
        form="scale",
        takes="the scale of attention scores",
        each_stack=True,
        gives="a scale of 1, with the old scale folded into the queries",
        needs=_UNSCALED,
        reshape=_fold_scale,
        clears=(Clears("*.scale"),),
    ),
    _entry(
        form="scale:WHERE",
        takes="the scale of attention scores",
        each_stack=True,
        gives="a scale of 1/√head_dim, with the rest folded into the queries",
        needs=_UNSCALED,
        reshape=_fold_scale,
        examples=lambda spec: ("scale:head",),
        clears=(Clears("*.scale", "fold=scale:head"),),
    ),
)
