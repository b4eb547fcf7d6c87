"""Fewer units of a feed-forward and fewer query heads by a text: those go that the others can best make up for, the
projection behind them being fitted again (Optimal Brain Surgeon, Hassibi & Stork 1993, on the second moments of what
it reads).

Or those go that are least active there, and nothing is fitted: Minitron's criteria (Muralidharan et al. 2407.14679),
by which a head or a unit is worth the norm of what it gives over a sequence, a mean over sequences; and of experts
REAP's (Lasby et al. 2510.13999).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from ...modules.feed_forward import MixtureOfExpertsModule
from ..base import Index, Model, Wide, by_head, gather
from ..layerwise import Choice, Grouped, Inner, by_weights, kept, largest, parts, remaining
from .calibration import Calibration

_RIDGES = (1e-6, 1e-4, 1e-3, 1e-2, 1e-1)
"""What may be added to the diagonal of the activations' second moments, beside their mean."""
_ROUNDS = 8  # in so many steps units go; on the trained samples 8 cost a sixth to a quarter less than one


def refit(old: Wide, moments: Wide, kept: Index, ridge: float) -> Wide:
    """W' [out, kept] that gives from some inputs, as nearly as can be, what W [out, n] gives from all.

    moments [n, n] are the means of a·aᵀ over the text. Least squares with a ridge that draws to W itself.
    """
    gram = with_ridge(moments, kept, ridge)
    target = old @ moments[:, kept] + old[:, kept] * (gram - moments[np.ix_(kept, kept)]).diagonal()
    return np.asarray(np.linalg.solve(gram, target.T).T, dtype=np.float64)


def with_ridge(moments: Wide, kept: Index, ridge: float) -> Wide:
    """The second moments of some inputs, with a part `ridge` of their mean added to the diagonal."""
    gram: Wide = moments[np.ix_(kept, kept)]
    return gram + ridge * max(float(np.trace(gram)) / len(kept), 1e-30) * np.eye(len(kept))


def ridge_for(old: Wide, rows: Wide, stay: Callable[[Wide, float], Index]) -> float:
    """The ridge with which W refitted to fewer inputs is best on tokens that it was not fitted on.

    rows [tokens, n] are what W [out, n] reads; three quarters of them are fitted on. `stay` says of their second
    moments and a ridge which inputs are kept.
    """
    cut = len(rows) - len(rows) // 4
    seen, unseen = rows[:cut], rows[cut:]
    if not len(unseen):
        return _RIDGES[0]
    moments, wanted = seen.T @ seen / len(seen), unseen @ old.T

    def error(ridge: float) -> float:
        kept = stay(moments, ridge)
        return float(((unseen[:, kept] @ refit(old, moments, kept, ridge).T - wanted) ** 2).sum())

    return min(_RIDGES, key=error)


def _reads(model: Model, weight: str, bias: str, activations: Wide) -> tuple[Wide, Wide]:
    """A projection's matrix and what it reads; a bias is the weight of one more input, which is always 1."""
    if not bias:
        return model.wide(weight), activations
    old = np.concatenate([model.wide(weight), model.wide(bias)[:, None]], axis=1)
    return old, np.concatenate([activations, np.ones((len(activations), 1))], axis=1)


# --- units ------------------------------------------------------------------------------------------------------------


def least_needed(old: Wide, moments: Wide, units: int, size: int, ridge: float, rounds: int = _ROUNDS) -> Index:
    """Which `size` of the first `units` inputs of W [out, n] stay, the others being refitted each time some go.

    Without input j, the rest refitted, the output is off by ‖W_j‖² / (M⁻¹)_jj on average, M the inputs' second moments.
    Some go at a time, since that changes what the rest are needed for.
    """
    rest = np.arange(units, old.shape[1])
    stay = np.arange(units)
    for left in np.linspace(units, size, rounds + 1).round().astype(int)[1:]:
        index = np.append(stay, rest)
        weight = refit(old, moments, index, ridge)[:, : len(stay)]
        cost = (weight**2).sum(axis=0) / np.linalg.inv(with_ridge(moments, index, ridge)).diagonal()[: len(stay)]
        stay = stay[largest(cost, left)]
    return stay


def _needed_units(old: Wide, rows: Wide, units: int, size: int) -> tuple[Index, Wide]:
    """Return which `size` of the first `units` inputs stay, and W [out, n] refitted to them, on what it reads."""
    rest = np.arange(units, old.shape[1])

    def at_once(moments: Wide, ridge: float) -> Index:
        return np.append(least_needed(old, moments, units, size, ridge, rounds=1), rest)

    ridge, moments = ridge_for(old, rows, at_once), rows.T @ rows / len(rows)
    index = least_needed(old, moments, units, size, ridge)
    return index, refit(old, moments, np.append(index, rest), ridge)


def units(model: Model, calibration: Calibration, inner: Sequence[Inner], size: int) -> Iterator[dict[str, Wide]]:
    """The tensors of one feed-forward after the other: the units that are needed most, and down_proj fitted to them."""
    for layer in calibration.walk(model, {each.layer for each in inner}):
        own = {each.down.split(".", 2)[2].removesuffix(".weight"): each for each in inner if each.layer == layer.index}
        _, seen = layer.run(*own)
        for name, each in own.items():
            # An expert that got no token has none.
            rows = seen[name][0].reshape(-1, each.units).double().numpy() if name in seen else np.zeros((0, each.units))
            bias = each.down_bias if each.record.down_bias else ""
            old, rows = _reads(model, each.down, bias, rows)
            rest = np.arange(each.units, old.shape[1])
            if len(rows):
                index, new = _needed_units(old, rows, each.units, size)
            else:
                index = largest(by_weights(model, each), size)
                new = old[:, np.append(index, rest)]
            arrays: dict[str, Wide] = {up: model.wide(up)[index] for up in each.up}
            yield arrays | {each.down: new[:, :size]} | ({bias: new[:, size]} if bias else {})


def unit_activity(model: Model, calibration: Calibration, inner: Sequence[Inner]) -> dict[str, Wide]:
    """For each feed-forward, by its path, how active each unit is; an expert's tokens count as one sequence."""
    found: dict[str, Wide] = {}
    for layer in calibration.walk(model, {each.layer for each in inner}):
        own = {each.down.split(".", 2)[2].removesuffix(".weight"): each for each in inner if each.layer == layer.index}
        _, seen = layer.run(*own)
        for name, each in own.items():
            rows = seen[name][0] if name in seen else torch.zeros(1, each.units)  # an expert that got no token
            found[each.path] = _activity(rows.reshape(-1, *rows.shape[-2:], 1))
    return found


def _activity(outputs: torch.Tensor) -> Wide:
    """Of what each of some parts gives (sequences, tokens, parts, elements): its norm a sequence, the mean of them."""
    return np.asarray(outputs.double().square().sum(dim=(1, 3)).sqrt().mean(dim=0).numpy())


# --- heads ------------------------------------------------------------------------------------------------------------


def _columns(heads: Sequence[int] | Index, size: int, old: Wide) -> Index:
    """The columns of some heads, and those after the last head's."""
    whole = old.shape[1] // size * size
    own = by_head(np.asarray(heads), np.arange(size), size)
    return np.append(own, np.arange(whole, old.shape[1])).astype(np.int64)


def _by_need(old: Wide, moments: Wide, size: int, ridge: float) -> Callable[[list[int]], Callable[[Index], float]]:
    """By how much o_proj's output [hidden] is off, on average, without a unit, the rest fitted again.

    old [hidden, heads · size (and 1 for a bias)]; moments are the second moments of what it is multiplied with.
    """

    def costs(left: list[int]) -> Callable[[Index], float]:
        index = _columns(left, size, old)
        weight, inverse = refit(old, moments, index, ridge), np.linalg.inv(with_ridge(moments, index, ridge))

        def cost(unit: Index) -> float:
            at = np.concatenate([np.arange(size) + left.index(head) * size for head in unit.tolist()])
            part = weight[:, at]
            return float((part * np.linalg.solve(inverse[np.ix_(at, at)], part.T).T).sum())

        return cost

    return costs


def head_activity(model: Model, calibration: Calibration, layers: Mapping[int, int]) -> dict[int, Wide]:
    """For each of these layers, of so many heads, how active each head is."""
    found = {}
    for layer in calibration.walk(model, layers):
        rows = layer.run("attention.o_proj")[1]["attention.o_proj"][0]
        found[layer.index] = _activity(rows.reshape(*rows.shape[:2], layers[layer.index], -1))
    return found


def _needed_heads(
    old: Wide, rows: Wide, size: int, attention: Grouped, remaining: Callable[..., list[int]]
) -> tuple[Choice, Wide]:
    """Return which heads of `size` stay, and o_proj [hidden, n] refitted to them, on what it reads [tokens, n].

    `remaining` says it by what each costs.
    """
    moments = rows.T @ rows / len(rows)

    def chosen(ridge: float) -> Choice:
        return kept(attention, remaining(_by_need(old, moments, size, ridge)))

    first = _columns(chosen(_RIDGES[0]).heads, size, old)
    ridge = ridge_for(old, rows, lambda *_: first)
    choice = chosen(ridge)
    return choice, refit(old, moments, _columns(choice.heads, size, old), ridge)


def heads(
    model: Model, calibration: Calibration, fitting: Mapping[int, tuple[int, Sequence[Index]]], new: int
) -> Iterator[dict[str, Wide]]:
    """The tensors of one layer's attention after the other: the heads needed most, and o_proj fitted to them."""
    for layer in calibration.walk(model, fitting):
        rows = layer.run("attention.o_proj")[1]["attention.o_proj"][0]
        path, (keys, candidates) = f"blocks.{layer.index}.attention", fitting[layer.index]
        attention: Grouped = model.spec.blocks[layer.index].attention
        *before, output = parts(path, attention)
        bias = f"{path}.o_proj.bias" if attention.output_bias else ""
        old, seen = _reads(model, output.name, bias, rows.reshape(-1, rows.shape[-1]).double().numpy())
        choice, fresh = _needed_heads(
            old, seen, output.size, attention, partial(remaining, attention, candidates, new, keys)
        )
        arrays = {}
        for part in before:
            own = by_head(choice.keys if part.keys else choice.heads, np.arange(part.size), part.size)
            arrays[part.name] = gather(model.wide(part.name), own, part.axis)
        arrays[output.name] = fresh[:, : new * output.size]
        yield arrays | ({bias: fresh[:, -1]} if bias else {})


# --- experts ----------------------------------------------------------------------------------------------------------


def expert_saliency(model: Model, calibration: Calibration, layers: Collection[int]) -> dict[int, Wide]:
    """For each expert of these layers the mean, over the tokens that are led to it, of its weight times the norm of
    what it answers; 0 where no token is.
    """
    found = {}
    for layer in calibration.walk(model, layers):
        module = layer.module.feed_forward
        assert isinstance(module, MixtureOfExpertsModule)
        x = layer.run("feed_forward")[1]["feed_forward"][0].flatten(0, 1)
        scores = np.zeros(module.spec.experts)
        with torch.no_grad():
            weights, chosen = module.route(x)
            given = x if module.expert_norm is None else module.expert_norm(x)
            for number, expert in enumerate(module.experts):
                tokens, places = torch.where(chosen == number)
                weight = weights[tokens, places, None]
                if len(tokens):
                    inputs = module.spec.weighs == "inputs"
                    answer = expert(given[tokens] * weight) if inputs else expert(given[tokens]) * weight
                    scores[number] = float(answer.double().norm(dim=-1).mean())
        found[layer.index] = scores
    return found
