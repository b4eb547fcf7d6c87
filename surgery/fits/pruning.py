"""Choose on a text which parts to keep: intermediate elements (units) of a feed-forward, query heads, or experts.

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
_ROUNDS = 8  # the number of rounds of a removal; on the trained samples, 8 cost a sixth to a quarter less than one


def refit(old: Wide, moments: Wide, index: Index, ridge: float) -> Wide:
    """Fit a projection that gets only some of its inputs, so that its output is near to that with all inputs.

    Args:
        old: The old projection W [out, n].
        moments: The second moment of its inputs on the text, the mean of a·aᵀ [n, n].
        index: The inputs that stay.
        ridge: The strength of the ridge, which pulls towards W.

    Returns:
        The new projection [out, len(index)].
    """
    gram = with_ridge(moments, index, ridge)
    target = old @ moments[:, index] + old[:, index] * (gram - moments[np.ix_(index, index)]).diagonal()
    return np.asarray(np.linalg.solve(gram, target.T).T, dtype=np.float64)


def with_ridge(moments: Wide, index: Index, ridge: float) -> Wide:
    """Return the rows and columns `index` of a second moment, with `ridge` times their mean added to the diagonal."""
    gram: Wide = moments[np.ix_(index, index)]
    return gram + ridge * max(float(np.trace(gram)) / len(index), 1e-30) * np.eye(len(index))


def ridge_for(old: Wide, rows: Wide, stay: Callable[[Wide, float], Index]) -> float:
    """Choose the ridge strength for which a projection, refitted to fewer inputs, has the least error on new tokens.

    Args:
        old: The old projection [out, n].
        rows: Its inputs on the text, [tokens, n]. The fits use the first three quarters, and the errors the others.
        stay: A function of the inputs' second moment and a ridge strength, which returns the inputs that stay.
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
    """Return a projection and its inputs on the text (`activations`), with the bias as an additional input.

    The bias becomes the last column of the matrix, for an input that is always 1. `bias` is its name, or "" for none.
    """
    if not bias:
        return model.wide(weight), activations
    old = np.concatenate([model.wide(weight), model.wide(bias)[:, None]], axis=1)
    return old, np.concatenate([activations, np.ones((len(activations), 1))], axis=1)


# --- intermediate elements --------------------------------------------------------------------------------------------


def least_needed(old: Wide, moments: Wide, units: int, size: int, ridge: float, rounds: int = _ROUNDS) -> Index:
    """Choose the `size` most needed of the first `units` inputs of a projection. Other inputs, such as a bias, stay.

    If input j is removed and W is refitted to the others, the mean squared error of the output is ‖W_j‖² / (M⁻¹)_jj.
    The least needed inputs are removed in several rounds, because every removal changes how much the others are needed.

    Args:
        old: The projection W [out, n].
        moments: M, the second moment of its inputs on the text, [n, n].
        units: The number of inputs to choose from.
        size: The number of inputs to choose.
        ridge: The ridge strength.
        rounds: The number of rounds.
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
    """Choose the most needed inputs of a projection, and refit the projection to them.

    Return the numbers of the chosen inputs, and the new projection. The inputs that come after the first `units`, such
    as a bias, are not chosen but stay in the projection. `least_needed` says which inputs are needed.

    Args:
        old: The old projection [out, n].
        rows: Its inputs on the text, [tokens, n].
        units: The number of inputs to choose from.
        size: The number of inputs to choose.
    """
    rest = np.arange(units, old.shape[1])

    def at_once(moments: Wide, ridge: float) -> Index:
        return np.append(least_needed(old, moments, units, size, ridge, rounds=1), rest)

    ridge, moments = ridge_for(old, rows, at_once), rows.T @ rows / len(rows)
    index = least_needed(old, moments, units, size, ridge)
    return index, refit(old, moments, np.append(index, rest), ridge)


def units(model: Model, calibration: Calibration, inner: Sequence[Inner], size: int) -> Iterator[dict[str, Wide]]:
    """Reduce feed-forwards to their `size` most needed intermediate elements. Yield the tensors of each feed-forward.

    down_proj is fitted to the remaining elements. `inner` has the feed-forwards or experts.
    """
    for layer in calibration.walk(model, {mlp.layer for mlp in inner}):
        by_path = {mlp.down.split(".", 2)[2].removesuffix(".weight"): mlp for mlp in inner if mlp.layer == layer.index}
        _, seen = layer.run(*by_path)
        for name, mlp in by_path.items():
            # An expert that gets no tokens has no inputs to fit on.
            rows = (
                seen[name][0].reshape(-1, mlp.units).double().cpu().numpy()
                if name in seen
                else np.zeros((0, mlp.units))
            )
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
    """Return the activity of each intermediate element on the text, by the path of its feed-forward or expert.

    The activity is the norm of the element's values over a sequence, averaged over sequences (Minitron). All tokens
    that the router sends to an expert count as one sequence.
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
    """Return the activity of each part of a layer (a head or an intermediate element), (parts,).

    It is the norm of a part's output over the tokens of a sequence, averaged over sequences (Minitron). `outputs` is
    (sequences, tokens, parts, elements of a part).
    """
    return np.asarray(outputs.double().square().sum(dim=(1, 3)).sqrt().mean(dim=0).cpu().numpy())


# --- heads ------------------------------------------------------------------------------------------------------------


def _columns(heads: Sequence[int] | Index, size: int, old: Wide) -> Index:
    """Return the columns of o_proj that some heads of `size` elements use, and the column of its bias, if any.

    `old` is o_proj, with its bias as a last column if it has one.
    """
    whole = old.shape[1] // size * size
    columns = by_head(np.asarray(heads), np.arange(size), size)
    return np.append(columns, np.arange(whole, old.shape[1])).astype(np.int64)


def _by_need(old: Wide, moments: Wide, size: int, ridge: float) -> Callable[[list[int]], Callable[[Index], float]]:
    """Return the function by which `layerwise.remaining` finds the cost of removing query heads.

    It is called with the heads that remain so far, and returns a second function. That is called with a set of heads,
    and returns the cost of removing them: the mean squared error of o_proj's output after o_proj is refitted to the
    other heads.

    Args:
        old: o_proj [hidden, heads · size], with one more column for a bias.
        moments: The second moment of its inputs on the text.
        size: The number of elements of a head.
        ridge: The ridge strength.
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
    """Return the activity of each query head on the text, by layer. `layers` has the number of heads of each layer.

    The activity is the norm of the head's output over a sequence, averaged over sequences (Minitron).
    """
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
        remaining: A function that gets the result of `_by_need` and returns the heads that stay.

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
    """Reduce attention to its `new` most needed query heads. Yield the tensors of each layer's attention.

    o_proj is fitted to the remaining heads. `fitting` has for each layer the number of key-value heads that stay, and
    the sets of query heads that can be removed together.
    """
    for layer in calibration.walk(model, fitting):
        rows = layer.run("attention.o_proj")[1]["attention.o_proj"][0]
        path, (keys, candidates) = f"blocks.{layer.index}.attention", fitting[layer.index]
        attention: Grouped = model.spec.blocks[layer.index].attention
        *before, output = parts(path, attention)
        bias = f"{path}.o_proj.bias" if attention.output_bias else ""
        old, seen = _reads(model, output.name, bias, rows.reshape(-1, rows.shape[-1]).double().cpu().numpy())
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
    """Return REAP's score for the importance of each expert, (experts,), by layer.

    The score is the router's weight of the expert times the norm of the expert's output, averaged over the tokens that
    the router sends to the expert. An expert without tokens gets 0.
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
