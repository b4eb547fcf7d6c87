"""Change the number of query heads.

More heads are always exact: the columns of new heads in o_proj are zero. Their other weights are copies of old heads,
so that training can change the zeros. In grouped attention, every key-value head gets the same number of additional
query heads. If the number does not allow that, whole groups are added. If every head has its own key and value, these
are added too.

Fewer heads are exact if only heads without any output are removed. Otherwise the least important ones are removed. With
a text, these are the heads that the others can best replace, and o_proj is fitted again (Hassibi & Stork 1993, a head
at a time). Without a text (--approximate), they are the heads with the smallest ‖O V‖. Either the same number is
removed from every group, or whole groups are removed. "N:active" keeps the heads that are most active on the text, does
not change their weights, and records their numbers (Minitron 2407.14679).

The ALiBi slope of a head depends on its number and on the number of heads (2108.12409). The slopes for the old and for
the new number of heads may have some in common. A head then moves to the place that has its slope. If a slope is
missing, there is no exact form.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from msgspec.structs import replace

from ...components import ALiBi, ModelSpec
from ...errors import SwapRefused
from ..base import Index, Model, Swapped, Tensor, Wide, by_head, taken
from ..fits.scratch import Scratch
from ..layerwise import (
    Grouped,
    HeadChoice,
    choice_of,
    key_heads,
    one_or_all,
    parts,
    remaining,
    slopes,
    unnormed,
    with_mixers,
)
from ..options import ATTENTION, Option, Parts
from ..registry import Asked, Clears, Swap, active


def _resize_heads(spec: ModelSpec, asked: Asked, active: bool = False) -> Swapped:
    """Change the number of query heads in the chosen layers. With `active`, the most active heads on a text stay."""
    new = asked.number("a number of heads")
    none = f"these layers have {new} heads already"
    layers = asked.those(spec, lambda block: block.attention.heads != new, none, "Possible: another number.")
    changed, tensors = dict[int, Grouped](), dict[str, Tensor]()
    fitting: dict[int, tuple[int, tuple[Index, ...]]] = {}
    exact = True
    for layer in layers:
        path, attention = f"blocks.{layer}.attention", spec.blocks[layer].attention
        unnormed(path, attention)
        if new > attention.heads:
            choice: HeadChoice | None = _more(attention, new)
        else:
            tried = [(keys, _units_of(attention, new, keys)) for keys in _key_counts(attention, new)]
            choices = (_without_dead(asked, path, attention, new, keys, units) for keys, units in tried)
            choice = next((candidate for candidate in choices if candidate is not None), None)
            exact = exact and choice is not None
            if choice is None and asked.approximate:
                equal = np.ones(attention.heads)
                score = asked.weights.ask(partial(_by_weights, path=path, attention=attention), equal, equal)
                (keys, units), *_ = tried
                choice = choice_of(attention, remaining(attention, units, new, keys, score))
            elif choice is None:
                fitting[layer] = tried[0]
        keys = fitting[layer][0] if choice is None else len(choice.keys)
        key_field = {"kv_heads": keys} if hasattr(attention, "kv_heads") else {}
        changed[layer] = replace(attention, heads=new, **key_field)
        tensors |= {} if choice is None else _chosen_heads(path, attention, choice)
    if fitting and asked.calibration is None and not active:
        first = min(fitting)
        raise SwapRefused(
            f"all {spec.blocks[first].attention.heads} heads of layer {first} affect the logits, and only a text shows"
            " which of them matter least",
            "Give a text with --calibrate FILE, or use --approximate to choose heads by their weights.",
        )
    summary: dict[str, Any] = {"from": one_or_all(spec.blocks[layer].attention.heads for layer in layers), "to": new}
    if fitting and active:
        scores = _activities(spec, asked, fitting)
        for layer, (keys, units) in fitting.items():
            attention = spec.blocks[layer].attention
            choice = choice_of(attention, remaining(attention, units, new, keys, scores[layer]))
            tensors |= _chosen_heads(f"blocks.{layer}.attention", attention, choice)
            summary.setdefault("kept", {})[str(layer)] = choice.heads.tolist()
        summary["by"] = "activity"
    elif fitting and asked.calibration is not None:
        # One fit for all layers, so that the text runs through the model only once.
        names = [part.name for i in fitting for part in parts(f"blocks.{i}.attention", spec.blocks[i].attention)]
        names += [f"blocks.{i}.attention.o_proj.bias" for i in fitting if spec.blocks[i].attention.output_bias]
        tensors |= Scratch.by("pruning.heads", asked.calibration(), fitting, new).waiting(names)
    return Swapped(with_mixers(spec, changed), "exact" if exact else "approximate", tensors, summary)


def _activities(spec: ModelSpec, asked: Asked, layers: Iterable[int]) -> dict[int, Wide]:
    """Return the activity of every query head of these layers on the text, by layer (`fits.pruning.head_activity`)."""
    calibration, heads = asked.text("choosing the heads to remove"), {i: spec.blocks[i].attention.heads for i in layers}

    def question(model: Model) -> dict[int, Wide]:
        from ..fits.pruning import head_activity

        return head_activity(model, calibration, heads)

    return asked.weights.run(question)


def _chosen_heads(path: str, attention: Grouped, choice: HeadChoice) -> dict[str, Tensor]:
    """Return the tensors of an attention with the chosen heads. Heads that must output zero get zeros in o_proj."""
    tensors: dict[str, Tensor] = {}
    for part in parts(path, attention):
        heads = choice.keys if part.keys else choice.heads
        heads = np.where(choice.silent, -1, heads) if part.axis else heads
        tensors[part.name] = taken(part.name, by_head(heads, np.arange(part.size), part.size), part.axis)
    return tensors


# --- the possible numbers of heads ------------------------------------------------------------------------------------


def _key_counts(attention: Grouped, new: int) -> list[int]:
    """Return the numbers of key-value heads that an attention with `new` query heads may have.

    These are the present number, if it divides `new`, and the number for which a key-value head has as many query heads
    as before, if that is whole. Raises SwapRefused if both are impossible.
    """
    keys = key_heads(attention)
    group = attention.heads // keys
    if group == 1:
        return [new]
    counts = [keys] * (new % keys == 0) + [new // group] * (new % group == 0)
    if not counts:
        near = [n for n in range(1, 2 * attention.heads + 1) if n % keys == 0 or n % group == 0]
        reason = f"{new} query heads cannot share {keys} key-value heads evenly, nor be in groups of {group}"
        raise SwapRefused(reason, f"Possible: {', '.join(map(str, near))}, …")
    return list(dict.fromkeys(counts))


def _more(attention: Grouped, new: int) -> HeadChoice:
    """Choose the old heads whose weights `new` heads get, if the attention gets more heads.

    The additional heads are copies of old heads, but output zeros. With ALiBi, an old head moves to the place that has
    its slope.
    """
    old, keys = attention.heads, key_heads(attention)
    group = old // keys
    if keys in (old, 1):
        heads, silent, places = np.arange(new) % old, np.ones(new, dtype=bool), list(range(old))
        before, after = slopes(attention, old), slopes(attention, new)
        if before is not None and after is not None:
            if not set(before) <= set(after):
                fit = [str(n) for n in range(old + 1, 4 * old) if set(before) <= set(slopes(attention, n) or [])]
                hint = f"Possible: {', '.join(fit)}." if fit else "First change the position encoding (--position)."
                raise SwapRefused(f"with {new} heads, ALiBi lacks some slopes of the model's {old} heads", hint)
            places = [after.index(slope) for slope in before]
        heads[places], silent[places] = np.arange(old), False
        return HeadChoice(heads, heads if keys == old else np.zeros(1, dtype=np.int64), silent)
    _refuse_grouped_alibi(attention, new)
    new_keys = _key_counts(attention, new)[0]
    key_index = np.arange(new_keys) % keys
    within = np.arange(new // new_keys)
    heads = (key_index[:, None] * group + within[None, :] % group).reshape(-1)
    silent = ((np.arange(new_keys) >= keys)[:, None] | (within >= group)[None, :]).reshape(-1)
    return HeadChoice(heads, key_index, silent)


def _refuse_grouped_alibi(attention: Grouped, new: int) -> None:
    """Raise SwapRefused for ALiBi with several query heads per key-value head.

    The heads of a group cannot move to other places, so their ALiBi slopes would change with the number of heads.
    """
    if isinstance(attention.position, ALiBi):
        raise SwapRefused(
            f"ALiBi's slopes depend on the number of heads, and {attention.heads} grouped heads cannot take the slopes"
            f" of {new} heads",
            "First use --attention mha, which gives every head its own key and value.",
        )


def _units_of(attention: Grouped, new: int, new_keys: int) -> tuple[Index, ...]:
    """Return the sets of query heads that can be removed together, if `new` query heads stay.

    These are single heads, or all query heads of a key-value head. With ALiBi, there is one set, with all heads whose
    slopes do not exist for `new` heads.
    """
    old, keys = attention.heads, key_heads(attention)
    single = tuple(np.array([head]) for head in range(old))
    if keys not in (old, 1):
        _refuse_grouped_alibi(attention, new)
        return single if new_keys == keys else tuple(np.split(np.arange(old), keys))
    before, after = slopes(attention, old), slopes(attention, new)
    if before is None or after is None:
        return single
    if not set(after) <= set(before):
        fit = [str(n) for n in range(1, old) if set(slopes(attention, n) or []) <= set(before)]
        hint = f"Possible: {', '.join(fit)}."
        raise SwapRefused(f"with {new} heads, ALiBi has slopes that the model's {old} heads do not have", hint)
    return (np.array([head for head, slope in enumerate(before) if slope not in after]),)


# --- the heads to remove ----------------------------------------------------------------------------------------------


def _outputs(model: Model, path: str, attention: Grouped) -> Wide:
    """Return the weight of o_proj, divided by query head: (hidden, heads, elements of a head)."""
    columns: Wide = model.wide(f"{path}.o_proj.weight")
    return columns.reshape(len(columns), attention.heads, -1)


def _values(model: Model, path: str, attention: Grouped) -> Wide:
    """Return the weight of v_proj for each query head, (heads, elements of a head, inputs). A bias is the last column.

    Query heads that share a value head get the same rows.
    """
    shapes = attention.shapes()
    linear = "v_proj" if "v_proj.weight" in shapes else "v_up_proj"
    keys = key_heads(attention)
    values = model.wide(f"{path}.{linear}.weight")
    if f"{linear}.bias" in shapes:
        values = np.concatenate([values, model.wide(f"{path}.{linear}.bias")[:, None]], axis=1)
    return values.reshape(keys, len(values) // keys, -1).repeat(attention.heads // keys, axis=0)


def _by_weights(model: Model, path: str, attention: Grouped) -> Wide:
    """Return ‖O V‖² for each query head, where O is the head's part of o_proj and V its part of v_proj."""
    products = np.einsum(
        "ohe,hei->hoi", _outputs(model, path, attention), _values(model, path, attention), optimize=True
    )
    score: Wide = (products**2).sum(axis=(1, 2))
    return score


def _dead(model: Model, path: str, attention: Grouped) -> np.ndarray:
    """Return for each query head whether its output is always zero, because its part of v_proj or o_proj is zero."""
    unheard = ~_outputs(model, path, attention).any(axis=(0, 2))
    return np.asarray(unheard | ~_values(model, path, attention).any(axis=(1, 2)))


def _without_dead(
    asked: Asked, path: str, attention: Grouped, new: int, new_keys: int, units: Sequence[Index]
) -> HeadChoice | None:
    """Choose `new` query heads such that all others always output zero, so that removing the others is exact.

    Return None if too few heads always output zero. `units` are the sets of heads that can be removed together.
    """
    all_heads = np.ones(attention.heads, dtype=bool)
    dead = asked.weights.ask(lambda model: _dead(model, path, attention), ~all_heads, all_heads)
    # Of the heads without output, the last are removed first, so that heads that this swap added are removed again.
    order = np.where(dead, -np.arange(attention.heads, dtype=np.float64), 1e9)
    stay = remaining(attention, units, new, new_keys, order)
    dropped = np.setdiff1d(np.arange(attention.heads), stay)
    return choice_of(attention, stay) if dead[dropped].all() else None


def _examples(spec: ModelSpec) -> tuple[str, ...]:
    """Return the numbers of heads that `gptkit swaps` tries on a model."""
    attention = spec.blocks[0].attention
    keys, heads = key_heads(attention), attention.heads
    step = keys if 1 < keys < heads else 1
    return (str(heads + step), *([str(heads - step)] if heads > step else []))


ORDER = 80
_PARTS: Parts = {"": ("heads", lambda spec: {block.attention.heads for block in spec.blocks})}
OPTIONS = (
    Option(
        "heads",
        ATTENTION,
        2,
        "The number of query heads per layer, such as 6. To reduce the number, 6:active keeps the heads with "
        "the largest outputs on a text. Without :active, gptkit removes the heads that the others can "
        "replace best, and fits the remaining weights on a text.",
        "N | N:active",
        parts=_PARTS,
    ),
)
_ALLOWED = "Needs a number of heads that the groups of grouped-query attention and the ALiBi slopes allow"
_entry = partial(
    Swap,
    option="heads",
    takes="query heads",
    exact_where="the dropped heads output zeros",
    by_layer=True,
    calibrated=True,
)
SWAPS = (
    _entry(
        form="N:active",
        gives="the N query heads with the largest outputs, unchanged",
        needs=f"{_ALLOWED}, and a calibration text. Exact only if the dropped heads output zeros",
        source="Minitron 2407.14679",
        reshape=lambda spec, asked: _resize_heads(spec, asked.before_colon(), active=True),
        examples=lambda spec: tuple(f"{value}:active" for value in _examples(spec)[1:]),
    ),
    _entry(
        form="N",
        gives="N query heads",
        needs=f"{_ALLOWED}. More heads are exact. Fewer are exact only if the dropped heads output zeros; otherwise"
        " the weights are fitted to a calibration text",
        source="Net2Net 1511.05641 (more); Hassibi & Stork 1993, Optimal Brain Surgeon (fewer)",
        reshape=_resize_heads,
        cheaper=active,
        examples=_examples,
        clears=(Clears("*.heads", "heads={theirs}"),),
    ),
)
