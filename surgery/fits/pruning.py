"""Fewer units of a feed-forward, query heads or experts, chosen on a text.

There are two ways to choose units or heads. One drops those that the others can best replace, and fits the next
projection again (Optimal Brain Surgeon, Hassibi & Stork 1993, on the second moments of the projection's inputs). The
other drops the least active ones and fits nothing. The activity is Minitron's criterion (Muralidharan et al.
2407.14679): the norm of a head's or unit's output over a sequence, averaged over sequences. Experts are chosen by
REAP's criterion (Lasby et al. 2510.13999).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from ...modules.feed_forward import MixtureOfExpertsModule
from ..base import Index, Model, Wide, by_head, gather
from ..layerwise import Grouped, HeadChoice, Inner, by_weights, choice_of, largest, parts, remaining
from .calibration import Calibration

_RIDGES = (1e-6, 1e-4, 1e-3, 1e-2, 1e-1)
"""The ridge strengths that are tried. A strength times the mean second moment is added to the diagonal."""
_ROUNDS = 8  # rounds in which units go; on the trained samples, 8 cost a sixth to a quarter less than one


def refit(old: Wide, moments: Wide, index: Index, ridge: float) -> Wide:
    """Fit W', which gets only the inputs in `index`, so that its output is near to that of W [out, n] with all inputs.

    `old` is W. `moments` [n, n] is the mean of a·aᵀ for inputs a of the text. The fit is least squares with a ridge
    that pulls towards W. `ridge` is its strength.
    """
    gram = with_ridge(moments, index, ridge)
    target = old @ moments[:, index] + old[:, index] * (gram - moments[np.ix_(index, index)]).diagonal()
    return np.asarray(np.linalg.solve(gram, target.T).T, dtype=np.float64)


def with_ridge(moments: Wide, index: Index, ridge: float) -> Wide:
    """Return the second moments of some inputs, with `ridge` times their mean added to the diagonal."""
    gram: Wide = moments[np.ix_(index, index)]
    return gram + ridge * max(float(np.trace(gram)) / len(index), 1e-30) * np.eye(len(index))


def ridge_for(old: Wide, rows: Wide, stay: Callable[[Wide, float], Index]) -> float:
    """Return the ridge strength for which W, refitted to fewer inputs, has the least error on unseen tokens.

    `old` is W [out, n], and `rows` [tokens, n] are its inputs. The first three quarters of them are used for the fit.
    `stay` is a function of the inputs' second moments and a ridge strength, which returns the inputs that stay.
    """
    cut = len(rows) - len(rows) // 4
    seen, unseen = rows[:cut], rows[cut:]
    if not len(unseen):
        return _RIDGES[0]
    moments, wanted = seen.T @ seen / len(seen), unseen @ old.T

    def error(ridge: float) -> float:
        index = stay(moments, ridge)
        return float(((unseen[:, index] @ refit(old, moments, index, ridge).T - wanted) ** 2).sum())

    return min(_RIDGES, key=error)


def _reads(model: Model, weight: str, bias: str, activations: Wide) -> tuple[Wide, Wide]:
    """Return the matrix of a projection, and its inputs on the text.

    If it has a bias, this becomes one more column, for an input that is always 1. `bias` is its name, or "".
    """
    if not bias:
        return model.wide(weight), activations
    old = np.concatenate([model.wide(weight), model.wide(bias)[:, None]], axis=1)
    return old, np.concatenate([activations, np.ones((len(activations), 1))], axis=1)


# --- units ------------------------------------------------------------------------------------------------------------


def least_needed(old: Wide, moments: Wide, units: int, size: int, ridge: float, rounds: int = _ROUNDS) -> Index:
    """Choose the `size` most needed of the first `units` inputs of W [out, n]; the other inputs always stay.

    If input j is removed and W is refitted to the others, the mean squared error of the output is ‖W_j‖² / (M⁻¹)_jj,
    where M is the second moment of the inputs (`moments`). The least needed inputs are removed in several rounds,
    because every removal changes how much the others are needed.
    """
    rest = np.arange(units, old.shape[1])
    stay = np.arange(units)
    for count in np.linspace(units, size, rounds + 1).round().astype(int)[1:]:
        index = np.append(stay, rest)
        weight = refit(old, moments, index, ridge)[:, : len(stay)]
        cost = (weight**2).sum(axis=0) / np.linalg.inv(with_ridge(moments, index, ridge)).diagonal()[: len(stay)]
        stay = stay[largest(cost, count)]
    return stay


def _needed_units(old: Wide, rows: Wide, units: int, size: int) -> tuple[Index, Wide]:
    """Choose the `size` most needed of the first `units` inputs of W [out, n], and refit W to them.

    `old` is W, and `rows` [tokens, n] are its inputs on the text.
    """
    rest = np.arange(units, old.shape[1])

    def at_once(moments: Wide, ridge: float) -> Index:
        return np.append(least_needed(old, moments, units, size, ridge, rounds=1), rest)

    ridge, moments = ridge_for(old, rows, at_once), rows.T @ rows / len(rows)
    index = least_needed(old, moments, units, size, ridge)
    return index, refit(old, moments, np.append(index, rest), ridge)


def units(model: Model, calibration: Calibration, inner: Sequence[Inner], size: int) -> Iterator[dict[str, Wide]]:
    """Yield the tensors of each feed-forward with only its `size` most needed units, and down_proj fitted to them."""
    for layer in calibration.walk(model, {mlp.layer for mlp in inner}):
        by_path = {mlp.down.split(".", 2)[2].removesuffix(".weight"): mlp for mlp in inner if mlp.layer == layer.index}
        _, seen = layer.run(*by_path)
        for name, mlp in by_path.items():
            # An expert that gets no tokens has no inputs to fit on.
            rows = seen[name][0].reshape(-1, mlp.units).double().numpy() if name in seen else np.zeros((0, mlp.units))
            bias = mlp.down_bias if mlp.record.down_bias else ""
            old, rows = _reads(model, mlp.down, bias, rows)
            rest = np.arange(mlp.units, old.shape[1])
            if len(rows):
                index, new = _needed_units(old, rows, mlp.units, size)
            else:
                index = largest(by_weights(model, mlp), size)
                new = old[:, np.append(index, rest)]
            arrays: dict[str, Wide] = {up: model.wide(up)[index] for up in mlp.up}
            yield arrays | {mlp.down: new[:, :size]} | ({bias: new[:, size]} if bias else {})


def unit_activity(model: Model, calibration: Calibration, inner: Sequence[Inner]) -> dict[str, Wide]:
    """Return the activity of each unit on the text, by the path of its feed-forward.

    The activity is Minitron's criterion. All tokens of an expert count as one sequence.
    """
    activity: dict[str, Wide] = {}
    for layer in calibration.walk(model, {mlp.layer for mlp in inner}):
        by_path = {mlp.down.split(".", 2)[2].removesuffix(".weight"): mlp for mlp in inner if mlp.layer == layer.index}
        _, seen = layer.run(*by_path)
        for name, mlp in by_path.items():
            rows = seen[name][0] if name in seen else torch.zeros(1, mlp.units)  # an expert without tokens
            activity[mlp.path] = _activity(rows.reshape(-1, *rows.shape[-2:], 1))
    return activity


def _activity(outputs: torch.Tensor) -> Wide:
    """Return the activity of each unit or head, (parts,), from outputs (sequences, tokens, parts, elements).

    It is the norm over the tokens of a sequence and over elements, averaged over sequences.
    """
    return np.asarray(outputs.double().square().sum(dim=(1, 3)).sqrt().mean(dim=0).numpy())


# --- heads ------------------------------------------------------------------------------------------------------------


def _columns(heads: Sequence[int] | Index, size: int, old: Wide) -> Index:
    """Return the columns of o_proj (`old`) for some heads of `size` elements, and the column of its bias, if any."""
    whole = old.shape[1] // size * size
    columns = by_head(np.asarray(heads), np.arange(size), size)
    return np.append(columns, np.arange(whole, old.shape[1])).astype(np.int64)


def _by_need(old: Wide, moments: Wide, size: int, ridge: float) -> Callable[[list[int]], Callable[[Index], float]]:
    """Return the cost function for `layerwise.remaining`: of the remaining heads, and then of a unit of heads.

    The cost of a unit is the mean squared error of o_proj's output if the unit is removed and the other heads are
    refitted. `old` is o_proj [hidden, heads · size], with one more column for a bias, and `moments` is the second
    moment of its inputs.
    """

    def costs(heads: list[int]) -> Callable[[Index], float]:
        index = _columns(heads, size, old)
        weight, inverse = refit(old, moments, index, ridge), np.linalg.inv(with_ridge(moments, index, ridge))

        def cost(unit: Index) -> float:
            columns = np.concatenate([np.arange(size) + heads.index(head) * size for head in unit.tolist()])
            removed = weight[:, columns]
            return float((removed * np.linalg.solve(inverse[np.ix_(columns, columns)], removed.T).T).sum())

        return cost

    return costs


def head_activity(model: Model, calibration: Calibration, layers: Mapping[int, int]) -> dict[int, Wide]:
    """Return the activity of each query head on the text, by layer. `layers` gives each layer's number of heads."""
    activity = {}
    for layer in calibration.walk(model, layers):
        rows = layer.run("attention.o_proj")[1]["attention.o_proj"][0]
        activity[layer.index] = _activity(rows.reshape(*rows.shape[:2], layers[layer.index], -1))
    return activity


def _needed_heads(
    old: Wide, rows: Wide, size: int, attention: Grouped, remaining: Callable[..., list[int]]
) -> tuple[HeadChoice, Wide]:
    """Choose the query heads that are most needed, and refit o_proj to them.

    Args:
        old: o_proj [hidden, n].
        rows: Its inputs on the text, [tokens, n].
        size: The number of elements of a head.
        attention: The attention with all heads.
        remaining: A function of the cost function, which returns the heads that stay (`layerwise.remaining`).

    Returns:
        The heads that stay, and the new o_proj.
    """
    moments = rows.T @ rows / len(rows)

    def chosen(ridge: float) -> HeadChoice:
        return choice_of(attention, remaining(_by_need(old, moments, size, ridge)))

    first = _columns(chosen(_RIDGES[0]).heads, size, old)
    ridge = ridge_for(old, rows, lambda *_: first)
    choice = chosen(ridge)
    return choice, refit(old, moments, _columns(choice.heads, size, old), ridge)


def heads(
    model: Model, calibration: Calibration, fitting: Mapping[int, tuple[int, Sequence[Index]]], new: int
) -> Iterator[dict[str, Wide]]:
    """Yield the tensors of each layer's attention with only its most needed query heads, and o_proj fitted to them.

    `fitting` has for each layer the new number of key-value heads, and the units of heads that may be removed together.
    `new` is the number of query heads that stay.
    """
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
            entries = by_head(choice.keys if part.keys else choice.heads, np.arange(part.size), part.size)
            arrays[part.name] = gather(model.wide(part.name), entries, part.axis)
        arrays[output.name] = fresh[:, : new * output.size]
        yield arrays | ({bias: fresh[:, -1]} if bias else {})


# --- experts ----------------------------------------------------------------------------------------------------------


def expert_saliency(model: Model, calibration: Calibration, layers: Collection[int]) -> dict[int, Wide]:
    """Return REAP's score of each expert, (experts,), by layer.

    The score is the router's weight of the expert times the norm of the expert's output, averaged over the tokens that
    it gets. An expert without tokens gets 0.
    """
    saliency = {}
    for layer in calibration.walk(model, layers):
        module = layer.module.feed_forward
        assert isinstance(module, MixtureOfExpertsModule)
        x = layer.run("feed_forward")[1]["feed_forward"][0].flatten(0, 1)
        scores = np.zeros(module.spec.experts)
        with torch.no_grad():
            weights, chosen = module.route(x)
            states = x if module.expert_norm is None else module.expert_norm(x)
            for number, expert in enumerate(module.experts):
                tokens, places = torch.where(chosen == number)
                weight = weights[tokens, places, None]
                if len(tokens):
                    inputs = module.spec.weighs == "inputs"
                    answer = expert(states[tokens] * weight) if inputs else expert(states[tokens]) * weight
                    scores[number] = float(answer.double().norm(dim=-1).mean())
        saliency[layer.index] = scores
    return saliency
