"""Which old key-value heads become one: in order, or by how well one head can stand for several."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from .regression import fit_keys, fit_values, score_error, value_error

Groups = tuple[tuple[int, ...], ...]


def contiguous_groups(heads: int, groups: int) -> Groups:
    """Old heads 0 … heads-1 dealt out in order, as many to each group. Raises ValueError where they do not go up."""
    if groups < 1 or heads % groups:
        raise ValueError(f"{heads} heads cannot be dealt out to {groups} groups of one size")
    size = heads // groups
    return tuple(tuple(range(start, start + size)) for start in range(0, heads, size))


def group_similar(similarity: Tensor, groups: int) -> Groups:
    """Old heads in groups of one size, so that the similarities (heads, heads) within groups add up to much.

    From the contiguous groups, the best exchange of two heads is made until none helps: a local optimum, never worse
    than where it starts from, and the same every time. Heads in a group, and groups, are in order.
    """
    heads = len(similarity)
    found = [list(group) for group in contiguous_groups(heads, groups)]
    table: list[list[float]] = ((similarity + similarity.T) / 2).tolist()

    def gain(one: list[int], i: int, two: list[int], j: int) -> float:
        a, b = one[i], two[j]
        lost = sum(table[a][x] for x in one if x != a) + sum(table[b][x] for x in two if x != b)
        return sum(table[b][x] for x in one if x != a) + sum(table[a][x] for x in two if x != b) - lost

    size, margin = heads // groups, 1e-12 * (1 + float(similarity.abs().max()))
    while True:
        pairs = (
            (gain(one, i, two, j), one, i, two, j)
            for one, two in itertools.combinations(found, 2)
            for i in range(size)
            for j in range(size)
        )
        best = max(pairs, key=lambda found: found[0], default=None)
        if best is None or best[0] <= margin:
            return tuple(sorted(tuple(sorted(group)) for group in found))
        _, one, i, two, j = best
        one[i], two[j] = two[j], one[i]


def query_order(groups: Groups, per_head: int) -> list[int]:
    """Old indices of the query heads in their new order: those of the first group's old key-value heads, and so on.
    Rows of W_q and columns of W_o are taken in this order.
    """
    return [old * per_head + each for group in groups for old in group for each in range(per_head)]


def head_similarity(
    queries: Tensor, keys: Tensor, values: Tensor, outputs: Tensor, covariance: Tensor, rotary_dim: int = 0
) -> Tensor:
    """How much of two old heads' work one head in their place can do, for every two: (m, m), 1 on the diagonal.

    The share of the squared products q·k and O·v that `fit_keys` and `fit_values` keep of a pair, the mean of both.
    Queries (n, d, e), keys and values (m, d, e), outputs (n, hidden, d), covariance (e, e) of the layer's input.
    """
    heads = len(keys)
    readers = len(queries) // heads
    q, o = (each.reshape(heads, readers, *each.shape[1:]) for each in (queries, outputs))
    result = torch.eye(heads, dtype=keys.dtype)
    for a, b in itertools.combinations(range(heads), 2):
        pair = [a, b]
        both_q, both_o = q[pair].flatten(0, 1), o[pair].flatten(0, 1)
        new_q, new_k = fit_keys(both_q, keys[pair], covariance, rotary_dim)
        kept = 1 - score_error(both_q, keys[pair], new_q, new_k, covariance, rotary_dim)
        new_v, new_o = fit_values(values[pair], both_o, covariance)
        kept += 1 - value_error(values[pair], both_o, new_v, new_o, covariance)
        result[a, b] = result[b, a] = kept / 2
    return result
