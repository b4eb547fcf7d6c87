"""Biases that go.

Leaving out a bias that is zero is exact. So is leaving out the bias of the keys where no positions are turned into them
and no norm follows: it adds the same to all of a query's scores, and softmax does not see a shift. Any other is missed;
what that costs is measured.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...architectures.obstacles import without_biases
from ...components import Attention, ModelSpec, Norm, Rotary
from ...errors import SwapRefused, UsageError
from ..base import Filled, Swapped, Tensor
from ..options import WEIGHTS, Option
from ..registry import Asked, Clears, Swap, nearest

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


def biases_of(spec: ModelSpec, what: str, layers: tuple[int, ...] | None = None) -> list[str]:
    """The bias tensors that a name of `NAMES` stands for, in some layers or in all of the model."""
    own = {path: node for path, node in spec.nodes() if what != "norm.bias" or isinstance(node, Norm)}
    if what == "head.bias":
        own = {"head": spec.head}
    found = {f"{path}.{name}" for path, node in own.items() for name in node.weights() if name in NAMES[what]}
    return [
        p.name
        for p in spec.parameters()
        if p.role == "bias" and (what == "biases" or p.name in found) and (layers is None or p.layer in layers)
    ]


def shift_of_scores(spec: ModelSpec, name: str) -> bool:
    """Whether a bias adds the same to all of a query's scores, whatever its values."""
    parts = name.split(".")
    if parts[0] != "blocks" or parts[-2] != "k_proj":
        return False
    attention = spec.blocks[int(parts[1])].attention
    return isinstance(attention, Attention) and attention.k_norm is None and not isinstance(attention.position, Rotary)


def drop(spec: ModelSpec, asked: Asked) -> Swapped:
    """Leave out biases; the flags of components where nothing is left, zeros where others of its kind stay."""
    what = asked.value
    if what not in NAMES:
        near = nearest("drop", what)
        raise UsageError(
            f"--drop {what!r} is unknown", f"{f'did you mean {near}? ' if near else ''}known: {', '.join(NAMES)}"
        )
    gone = biases_of(spec, what, asked.layers)
    if not gone:
        has = [name for name in NAMES if biases_of(spec, name, asked.layers)]
        known = f"Possible here: {', '.join(has)}." if has else "This model has no biases."
        raise SwapRefused(f"there is no bias of this kind to drop: {what}", known)
    missed = [name for name in gone if not shift_of_scores(spec, name) and not asked.weights.zero(name)]
    zero = {name for name in biases_of(spec, "biases") if name not in gone and asked.weights.zero(name)}
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
        folded = {"value.bias": "--fold value-bias", "norm.bias": "--fold norm"}.get(what)
        keeps = f"; {folded} moves them elsewhere, exactly" if folded else ""
        notes = (f"{len(missed)} of {len(gone)} biases dropped are not zero, {missed[0]} the first{keeps}",)
    summary = {"dropped": len(gone), "nonzero": len(missed)}
    return Swapped(new, "approximate" if missed else "exact", tensors, summary, notes)


ORDER = 180
OPTIONS = (
    Option(
        "drop",
        WEIGHTS,
        2,
        "Leave out biases: head.bias, key.bias, …",
        "BIASES",
        words="head.bias = lm_head.bias; norm.bias = norms.bias; query.bias = q.bias, q_proj.bias; key.bias = k.bias, "
        "k_proj.bias; value.bias = v.bias, v_proj.bias; latent.bias = q_down_proj.bias, kv_down_proj.bias; "
        "output.bias = o.bias, o_proj.bias; up.bias = up_proj.bias; down.bias = down_proj.bias; "
        "biases = bias, all biases",
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
        reshape=drop,
        examples=lambda spec: [name for name in NAMES if name != "biases" and biases_of(spec, name)],
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
)
