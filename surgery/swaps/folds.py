"""Constants that move from one place of a block to another, which changes nothing it computes.

value-bias: attention weights of a query sum to one, so a bias of the values is one of the outputs: b_o += W_o b_v, b_v
of a key-value head for every query head of its group (TransformerLens, `fold_value_biases`).
scale: the scale of the scores goes into the queries, and becomes 1, or 1/√head_dim with "scale:head", which is what
most families have. Where a norm follows the projection its weight takes the factor.
norm: γ goes into the weights that read the norm, β into their biases (TransformerLens, `fold_ln`).

Biases may also go. Leaving out a bias that is zero is exact. So is leaving out the bias of the keys where no positions
are turned into them and no norm follows: it adds the same to all of a query's scores, and softmax does not see a shift.
Any other is missed; what that costs is measured.
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
    """W_o b_v: output [hidden, heads · head_dim], bias [kv_heads · head_dim], which `group` query heads share."""
    return np.asarray(output @ np.repeat(bias.reshape(-1, head_dim), group, axis=0).reshape(-1))


def _fold_value_bias(spec: ModelSpec, asked: Asked) -> Swapped:
    """The values' bias into the output's."""
    tensors, changed = dict[str, Tensor](), dict[int, Attention]()
    for layer, attention in attentions(spec, asked.chosen(spec), ", which has no bias of the values").items():
        path = f"blocks.{layer}.attention"
        unclipped(path, attention)
        value, output = f"{path}.v_proj.bias", f"{path}.o_proj"
        if asked.weights.zero(value):
            continue
        if attention.sinks:
            raise SwapRefused(f"{path} has attention sinks, so its attention weights do not sum to one")

        def make(model: Model, value: str = value, output: str = output, attention: Attention = attention) -> Wide:
            given = model.wide(f"{output}.weight"), model.wide(value), attention.group, attention.head_dim
            moved = _output_of_value_bias(*given)
            return moved + model.wide(f"{output}.bias") if attention.output_bias else moved

        tensors[f"{output}.bias"] = Computed(make)
        tensors[value] = Filled((attention.kv_heads * attention.head_dim,), 0.0, value)
        changed[layer] = replace(attention, output_bias=True)
    if not changed:
        raise SwapRefused("no layer has a value bias that is not zero")
    return Swapped(with_mixers(spec, changed), "exact", tensors, {"layers": sorted(changed)})


def _rescaled(name: str, factor: float, norm: Norm | None = None) -> Computed:
    """A tensor times a factor; of a norm's what it multiplies by, and its bias."""
    if norm is not None:
        return Computed(regained(norm, name, partial(np.multiply, factor)))
    return Computed(lambda model: model.wide(name) * factor)


def _fold_scale(spec: ModelSpec, asked: Asked) -> Swapped:
    """The scale of the scores into the queries."""
    if asked.argument not in (None, "head"):
        raise SwapRefused(f"--fold {asked.value!r} is unknown", "Known: scale, scale:head.")
    tensors, changed = dict[str, Tensor](), dict[int, Attention]()
    for layer, attention in attentions(spec, asked.chosen(spec), ", which has no scale of its own heads").items():
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
        raise SwapRefused("every layer has this scale already")
    return Swapped(with_mixers(spec, changed), "exact", tensors, {"layers": sorted(changed)})


def _scaled_inputs(weight: str, gamma: str) -> Compute:
    """A reader [out, in] of a norm whose weight has become 1: R·diag(γ)."""
    return lambda model: model.wide(weight) * model.wide(gamma)


def _fold_norm(spec: ModelSpec, asked: Asked) -> Swapped:
    """γ and β of the norms before attention and feed-forward, and of the last one, into what reads them."""
    require_weights(spec)
    made, whole = dict[str, Compute](), asked.layers is None
    for layer in asked.chosen(spec):
        if spec.blocks[layer].residual == "normed":
            raise SwapRefused(
                f"layer {layer} takes its residual from the output of its norm, which this swap does not support"
            )
    blocks, head = shifts_taken(spec, asked.layers, made)
    cleared: dict[str, Norm] = {}
    for layer, block in blocks.items():
        path = f"blocks.{layer}"
        made |= {each.weight: _scaled_inputs(each.weight, f"{each.norm}.weight") for each in readers(block, path)}
        cleared |= norms(block, path)
        plain = {name: _without_bias(norm) for name, norm in norms(block, path)}
        blocks[layer] = with_norms(block, path, plain)
    if whole:
        made["head.weight"] = _scaled_inputs(head_weight(spec), "final_norm.weight")
        cleared |= [known("final_norm", spec.final_norm)]
    tensors: dict[str, Tensor] = {name: Computed(make) for name, make in made.items()}
    for path, norm in cleared.items():
        _clear(norm, path, tensors)
    final = _without_bias(cleared["final_norm"]) if whole else spec.final_norm
    new = with_blocks(spec, blocks, head=replace(head, tied=head.tied and not whole), final_norm=final)
    notes = ("the head was untied from the embedding, because it takes up the last norm's weight",)
    summary = {"layers": list(asked.chosen(spec)), "head": whole}
    return Swapped(new, "exact", tensors, summary, notes if whole and spec.tied else ())


def _without_bias(norm: Norm) -> Norm:
    """The norm without its bias."""
    return replace(norm, bias=False) if has_bias(norm) else norm


def _clear(norm: Norm, path: str, tensors: dict[str, Tensor]) -> None:
    """A norm's weight becomes 1."""
    tensors[f"{path}.weight"] = Filled((norm.size,), 1.0, f"{path}.weight")


_entry = partial(Swap, option="fold", source="TransformerLens", by_layer=True)
_UNSCALED = "an ALiBi bias, where there is one, outside the scale"


# --- biases that go ---------------------------------------------------------------------------------------------------


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
"""What can be dropped, and what it is called in its component; "biases" are all of them."""


def _biases_of(spec: ModelSpec, what: str, layers: tuple[int, ...] | None = None) -> list[str]:
    """The bias tensors that a name of `NAMES` stands for, in some layers or in all of the model."""
    own = {path: node for path, node in spec.nodes() if what != "norm.bias" or isinstance(node, Norm)}
    if what == "head.bias":
        own = {"head": spec.has_head()}
    found = {f"{path}.{name}" for path, node in own.items() for name in node.weights() if name in NAMES[what]}
    return [
        p.name
        for p in spec.parameters()
        if p.role == "bias" and (what == "biases" or p.name in found) and (layers is None or p.layer in layers)
    ]


def _shift_of_scores(spec: ModelSpec, name: str) -> bool:
    """Whether a bias adds the same to all of a query's scores, whatever its values."""
    parts = name.split(".")
    if parts[0] != "blocks" or parts[-2] != "k_proj":
        return False
    attention = spec.blocks[int(parts[1])].attention
    if not isinstance(attention, Attention) or (attention.position is not None and attention.position.turns):
        return False
    # What norms, clips or caps sees where scores lie, and so does the score of a sink, which no bias shifts.
    return attention.k_norm is None and attention.clip is None and attention.cap is None and not attention.sinks


def _drop(spec: ModelSpec, asked: Asked) -> Swapped:
    """Leave out biases; the flags of components where nothing is left, zeros where others of its kind stay."""
    what = asked.value
    if what not in NAMES:
        near = nearest("drop", what)
        hint = f"{f'did you mean {near}? ' if near else ''}known: {', '.join(NAMES)}"
        raise UsageError(f"--drop {what!r} is unknown", hint)
    gone = _biases_of(spec, what, asked.layers)
    if not gone:
        has = [name for name in NAMES if _biases_of(spec, name, asked.layers)]
        known = f"Possible here: {', '.join(has)}." if has else "This model has no biases."
        raise SwapRefused(f"the model has no bias {what} to drop", known)
    missed = [name for name in gone if not _shift_of_scores(spec, name) and not asked.weights.zero(name)]
    zero = {name for name in _biases_of(spec, "biases") if name not in gone and asked.weights.zero(name)}
    new = without_biases(spec, {*gone, *zero})
    # Zero biases of other kinds stay where they are, unless the same flag is theirs: q, k and v have one.
    left = {parameter.name for parameter in new.parameters()}
    owners = {name.rsplit(".", 2)[0] for name in gone if name not in left}
    new = without_biases(spec, {*gone, *(name for name in zero if name.rsplit(".", 2)[0] in owners)})
    left = {parameter.name for parameter in new.parameters()}
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters()}
    tensors: dict[str, Tensor] = {name: Filled(shapes[name], 0.0, name) for name in gone if name in left}
    notes: tuple[str, ...] = ()
    if missed:
        way, fold = {"value.bias": ("value-bias", _fold_value_bias), "norm.bias": ("norm", _fold_norm)}.get(
            what, ("", _drop)
        )
        keeps = (
            f"; --fold {way} folds them into other parameters exactly" if way and _possible(fold, spec, asked) else ""
        )
        notes = (f"{len(missed)} of {len(gone)} dropped biases are not zero, for example {missed[0]}{keeps}",)
    summary = {"dropped": len(gone), "nonzero": len(missed)}
    return Swapped(new, "approximate" if missed else "exact", tensors, summary, notes)


def _possible(fold: Callable[[ModelSpec, Asked], Swapped], spec: ModelSpec, asked: Asked) -> bool:
    """Whether a fold does not refuse."""
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
        "Remove these biases, such as head.bias, key.bias or norm.bias. The value biases removes all of them.",
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
        "Fold one kind of constant into neighbouring weights: norm (gains and biases of norms, into the "
        "next projections), value-bias (into the output bias of attention) or scale (the scale of attention "
        "scores, into the queries).",
        "value-bias | scale | norm",
        words="norm = norms; value-bias = value_bias; scale = scales",
    ),
)
SWAPS = (
    Swap(
        option="drop",
        form="BIASES",
        takes="biases",
        gives="none",
        needs="biases that are zero, or of keys that no positions are turned into",
        source="TransformerLens; adding a constant to all scores of a softmax",
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
        takes="γ and β of norms",
        gives="weights and biases of their readers",
        needs="pre-norm blocks",
        reshape=_fold_norm,
        clears=(Clears("*norm.bias"),),
    ),
    _entry(
        form="value-bias",
        takes="the bias of values",
        each_stack=True,
        gives="one of outputs",
        needs="a bias that is not zero",
        reshape=_fold_value_bias,
    ),
    _entry(
        form="scale",
        takes="the scale of scores",
        each_stack=True,
        gives="queries, and a scale of 1",
        needs=_UNSCALED,
        reshape=_fold_scale,
        clears=(Clears("*.scale"),),
    ),
    _entry(
        form="scale:WHERE",
        takes="the scale of scores",
        each_stack=True,
        gives="queries, and a scale of 1/√head_dim",
        needs=_UNSCALED,
        reshape=_fold_scale,
        examples=lambda spec: ("scale:head",),
        clears=(Clears("*.scale", "fold=scale:head"),),
    ),
)
