"""The formulas for fits, on tensors alone: key-value heads, linears, activation slopes and block influence.

One new key-value head replaces a group of m old ones, each of which is read by some query heads. A function about heads
gets the tensors of one such group. Notation: n query heads in a group, d = head_dim, e = width of the input.

A bias is treated as a weight on a constant input of 1. `augment` appends the bias to the weight; then e = hidden + 1,
and the inputs end in a column of ones. The bias of the values passes through attention unchanged, because attention
weights sum to 1.

A fit of a layer needs the second moment of its inputs on the calibration text (`Moment`), and `scores.refit_scores`
needs the inputs themselves. All functions compute in the dtype of their arguments, which should be fp64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moment:
    """Sums over tokens in fp64, for the fit of a linear from inputs x to targets y."""

    gram: Tensor  # the sum of x xᵀ, (e, e)
    cross: Tensor | None  # the sum of y xᵀ, (out, e); None without targets
    count: int  # the number of tokens

    @classmethod
    def of(cls, x: Tensor, y: Tensor | None = None, weight: Tensor | None = None) -> Moment:
        """Return the sums for inputs x (..., e) and targets y (..., out). A token counts with its `weight` (...)."""
        flat = x.reshape(-1, x.shape[-1]).double()
        scaled = flat if weight is None else flat * weight.reshape(-1, 1).to(flat)
        cross = None if y is None else y.reshape(-1, y.shape[-1]).to(flat).T @ scaled
        return cls(flat.T @ scaled, cross, len(flat))

    @property
    def covariance(self) -> Tensor:
        """Return the mean of x xᵀ, (e, e). The mean of x is not subtracted."""
        return self.gram / self.count


def augment(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Append a bias (..., out) to its weight (..., out, hidden) as a last column. The inputs then end in a 1."""
    column = torch.zeros_like(weight[..., 0]) if bias is None else bias
    return torch.cat((weight, column[..., None]), dim=-1)


def square_roots(covariance: Tensor, floor: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Return Σ^½ and Σ^-½ (both symmetric) of a positive semidefinite matrix.

    `floor` times the largest eigenvalue is added to each eigenvalue. Otherwise directions that do not occur in the text
    would be divided by zero. Raises ValueError for a matrix of zeros, for which nothing can be fitted.
    """
    values, vectors = torch.linalg.eigh(covariance)
    if not values[-1] > 0:
        raise ValueError("the covariance is zero: the calibration text gave no activations")
    values = values.clamp_min(0) + floor * values[-1]
    return (vectors * values.sqrt()) @ vectors.T, (vectors * values.rsqrt()) @ vectors.T


def pool_mean(weights: Tensor) -> Tensor:
    """Return the mean of the heads of a group, (m, d, e) -> (d, e) (mean-pooling; Ainslie et al. 2305.13245)."""
    return weights.mean(dim=0)


def fit_values(values: Tensor, outputs: Tensor, covariance: Tensor, floor: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Return one value head V (d, e) that replaces a group's, and the output projection's columns that read it.

    These columns are O' (n, hidden, d). The fit is a reduced-rank regression. With M = [O_g V_h(g)] Σ^½ stacked over
    the query heads g and B the first d right singular vectors of M, V = Bᵀ Σ^-½ and O_g' = O_g V_h(g) Σ^½ B. This
    minimises Σ_g E|(O_g V_h(g) - O_g' V) z|² over all V with d rows (Eckart-Young; Izenman 1975). It is lossless if the
    O_g V_h(g) together have rank d.

    Args:
        values: The old value heads V_h, (m, d, e).
        outputs: The columns O_g of the output projection by query head, (n, hidden, d). The n/m query heads that read
            the same value head are next to each other.
        covariance: Σ (e, e), the second moment of z. This is the layer's input, mixed by the attention weights
            (`mix_inputs`), averaged over query heads. The second moment of the input itself is nearly as good.
        floor: As in `square_roots`.
    """
    root, inverse = square_roots(covariance, floor)
    readers = outputs.shape[0] // values.shape[0]
    products = outputs @ (values @ root).repeat_interleave(readers, dim=0)  # (n, hidden, e)
    basis = leading(gram_of(products), values.shape[1])  # (e, d)
    return basis.T @ inverse, products @ basis


def balanced(inner: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
    """Return two matrices (r, e) and (n, r) with the same product outer @ inner, and with elements of about one size.

    Each gets the square roots of the product's singular values. A fit may give one matrix large elements and the other
    tiny ones. Adam takes equal steps for all elements, so training would destroy the tiny ones before the large ones
    had changed. Matrices whose product has fewer than r rows or columns are unchanged.
    """
    rank = len(inner)
    if min(inner.shape[1], len(outer)) < rank:
        return inner, outer
    (q, inner_basis), (p, outer_basis) = torch.linalg.qr(inner.T), torch.linalg.qr(outer)
    u, s, vh = torch.linalg.svd(outer_basis @ inner_basis.T)
    size = (outer.shape[0] / inner.shape[1]) ** 0.25  # equal norms, with different numbers of elements
    root = s.sqrt()
    return (root[:, None] / size * vh) @ q.T, p @ (u * root * size)


def mix_inputs(probabilities: Tensor, inputs: Tensor) -> Tensor:
    """Return the layer's inputs, mixed by the attention weights of each query head: Σ_j p_ij x_j, (B, n, T, e).

    The attention weights p are (B, n, T, S), and the inputs x are (B, S, e).
    """
    return probabilities @ inputs[:, None]


def gram_of(products: Tensor, between: Tensor | None = None) -> Tensor:
    """Return the sum over heads of PᵀP, or with `between` = B of PᵀBP, (e, e). P is (n, k, e), and B is (n, k, k)."""
    return (products.transpose(-1, -2) @ (products if between is None else between @ products)).sum(dim=0)


def leading(gram: Tensor, rank: int) -> Tensor:
    """Return the eigenvectors of the largest `rank` eigenvalues, (e, rank), padded with zeros if there are fewer."""
    vectors = torch.linalg.eigh(gram)[1].flip(-1)[:, :rank]
    return torch.nn.functional.pad(vectors, (0, rank - vectors.shape[1]))


# --- keys ------------------------------------------------------------------------------------------------------------


def fit_keys(
    queries: Tensor, keys: Tensor, covariance: Tensor, rotary_dim: int = 0, floor: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Fit one key head (d, e) for a group, and new queries (n, d, e) that compensate for the change of the key.

    Each rotary pair (i, i + rotary_dim/2) is read as a complex number, because a complex factor commutes with the
    rotation. The new key row is the first complex singular vector of √E|q|² · K_h Σ^½, stacked over the old heads h.
    The coefficient of an old head, conjugated, is multiplied into its queries. (Mean-pooling fixes the coefficient at
    1, and Jin et al. 2412.20677 fix its modulus.)

    For elements without rotation, the new rows are the first right singular vectors of (E q qᵀ)^½ K_h Σ^½, stacked over
    the query heads.

    Args:
        queries: The query heads, (n, d, e). The n/m query heads that read the same key head are next to each other.
        keys: The old key heads K_h, (m, d, e).
        covariance: Σ, the second moment of the layer's input, (e, e).
        rotary_dim: The number of elements of a head that are rotated. They come first.
        floor: As in `square_roots`.
    """
    new_queries, new_key = queries.clone(), keys[0].clone()
    if rotary_dim:
        cut = slice(0, rotary_dim)
        new_queries[:, cut], new_key[cut] = _fit_pairs(queries[:, cut], keys[:, cut], covariance, floor)
    if rotary_dim < keys.shape[1]:
        cut = slice(rotary_dim, None)
        new_queries[:, cut], new_key[cut] = _fit_plain(queries[:, cut], keys[:, cut], covariance, floor)
    return new_queries, new_key


def _fit_pairs(queries: Tensor, keys: Tensor, covariance: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Return new queries (n, d, e) and one key head (d, e) for a group of heads that are rotated as a whole.

    `fit_keys` calls this for the rotated part of heads. Its docstring describes the arguments and the method.
    """
    root, inverse = square_roots(covariance, floor)
    readers = queries.shape[0] // keys.shape[0]
    q, k = _pairs(queries), _pairs(keys)  # complex: (n, p, e), (m, p, e)
    power = ((queries @ covariance) * queries).sum(dim=-1)  # E q², (n, d)
    power = power.reshape(keys.shape[0], readers, 2, -1).sum(dim=(1, 2))  # E|q|² of each old head's readers, (m, p)
    weight = power.clamp_min(torch.finfo(power.dtype).tiny).sqrt()
    stacked = (weight[..., None] * (k @ root.to(k.dtype))).transpose(0, 1)  # (p, m, e)
    u, s, vh = torch.linalg.svd(stacked, full_matrices=False)
    factor = u[:, :, 0] * s[:, :1] / weight.T  # (p, m): K_h ≈ factor_h · the row
    # The sizes are shared so that keys stay as large as before.
    size = factor.abs().square().mean(dim=1, keepdim=True).sqrt().clamp_min(torch.finfo(power.dtype).tiny)
    row = (vh[:, 0] @ inverse.to(vh.dtype)) * size  # (p, e)
    turned = q * (factor / size).T.conj().repeat_interleave(readers, dim=0)[..., None]
    return _elements(turned), _elements(row)


def _fit_plain(queries: Tensor, keys: Tensor, covariance: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Return new queries (n, d, e) and one key head (d, e) for a group of heads without rotation.

    `fit_keys` calls this for the part of heads that is not rotated. Its docstring describes the arguments and the
    method.
    """
    root, inverse = square_roots(covariance, floor)
    readers = queries.shape[0] // keys.shape[0]
    factors = queries @ root  # a root of E q qᵀ is enough: (n, d, e), its Gram is used
    product = (keys @ root).repeat_interleave(readers, dim=0)  # K_h Σ^½, (n, d, e)
    basis = leading(gram_of(product, factors @ factors.transpose(-1, -2)), keys.shape[1])
    coefficients = product @ basis  # (n, d, d): K_h ≈ coefficients_h · the new head
    return coefficients.transpose(-1, -2) @ queries, basis.T @ inverse


def _pairs(weight: Tensor) -> Tensor:
    """Return rotary pairs as complex numbers: elements i and i + dim/2 of (..., dim, e) become (..., dim/2, e)."""
    real, imaginary = weight.chunk(2, dim=-2)
    return torch.complex(real, imaginary)


def _elements(pairs: Tensor) -> Tensor:
    """Return the real (..., dim, e) for complex rotary pairs (..., dim/2, e): the inverse of `_pairs`."""
    return torch.cat((pairs.real, pairs.imag), dim=-2)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the pairs (i, i + p) of (..., T, d) by angles (T, p). Elements from 2p on stay (Su et al. 2104.09864)."""
    pairs = angles.shape[-1]
    a, b, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    cos, sin = angles.cos().to(x), angles.sin().to(x)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


# --- the errors that the fits minimise --------------------------------------------------------------------------------


def value_error(values: Tensor, outputs: Tensor, value: Tensor, new_outputs: Tensor, covariance: Tensor) -> float:
    """Return the relative squared error of `fit_values`: Σ_g E|(O_g V_h - O_g' V) z|² / Σ_g E|O_g V_h z|²."""
    old = outputs @ values.repeat_interleave(len(outputs) // len(values), dim=0)
    lost, whole = (float(((x @ covariance) * x).sum()) for x in (old - new_outputs @ value, old))
    return lost / max(whole, torch.finfo(old.dtype).tiny)


def score_error(
    queries: Tensor, keys: Tensor, new_queries: Tensor, key: Tensor, covariance: Tensor, rotary_dim: int = 0
) -> float:
    """Return the mean square of the change of scores by `fit_keys`, divided by the mean square of the old scores.

    A score is the product of a query with the key of an independent token. Squares are summed over query heads. Each
    rotary pair counts separately, averaged over all distances.
    """
    keys = keys.repeat_interleave(len(queries) // len(keys), dim=0)
    repeated_key = key.expand_as(keys)
    lost = whole = 0.0
    if rotary_dim:
        cut = slice(0, rotary_dim)
        q, k, q2, k2 = (_pairs(heads[:, cut]) for heads in (queries, keys, new_queries, repeated_key))
        wide = covariance.to(q.dtype)
        # The mean square of the old products q̄k, and of their change q̄k - q̄'k', which has two terms.
        lost += _product_power((q, q2), (k, k2), wide)
        whole += _product_power((q,), (k,), wide)
    if rotary_dim < queries.shape[1]:
        root = square_roots(covariance)[0]
        cut = slice(rotary_dim, None)
        old = (queries[:, cut] @ root).transpose(-1, -2) @ (keys[:, cut] @ root)
        new = (new_queries[:, cut] @ root).transpose(-1, -2) @ (repeated_key[:, cut] @ root)
        lost += float((old - new).square().sum())
        whole += float(old.square().sum())
    return lost / max(whole, torch.finfo(keys.dtype).tiny)


def _product_power(queries: Sequence[Tensor], keys: Sequence[Tensor], covariance: Tensor) -> float:
    """Return E|Σ_t ±q̄_t k_t|² over independent tokens, summed over heads and rotary pairs.

    `queries` and `keys` have one entry per term t. The signs of the terms alternate, so with two terms, this is the
    mean square of the difference of two products.
    """
    total = 0.0
    for (s, (q, k)), (t, (q2, k2)) in itertools.product(enumerate(zip(queries, keys, strict=True)), repeat=2):
        of_q = ((q2 @ covariance) * q.conj()).sum(dim=-1)  # E q̄ q'
        of_k = ((k @ covariance) * k2.conj()).sum(dim=-1)  # E k k̄'
        total += (-1.0) ** (s + t) * float((of_q * of_k).real.sum())
    return total


# --- linears, activations, blocks ------------------------------------------------------------------------------------


def ridge(start: Tensor, moment: Moment, strength: float) -> Tensor:
    """Return the weight W from x to y by ridge regression around `start`: argmin Σ|y - W x|² + λ|W - start|².

    For inputs in directions that do not occur in the text, W equals `start` (out, e). `strength` is λ divided by the
    mean of the Gram matrix's diagonal. Raises ValueError if it is not positive, or if the moment has no targets.
    """
    if not strength > 0 or moment.cross is None:
        raise ValueError(f"a ridge of strength {strength} needs more than 0, and a moment with targets")
    gram = moment.gram
    penalty = strength * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    missing = moment.cross - start @ gram
    result: Tensor = start + torch.linalg.solve(gram + penalty, missing.T).T
    return result


def ridge_by_held_out(start: Tensor, x: Tensor, y: Tensor, weight: Tensor | None = None, first: float = 1.0) -> Tensor:
    """Fit a weight from x (..., e) to y (..., out) by `ridge`, with the strength that is best on tokens left out.

    To choose the strength, the last quarter of the tokens is left out. The search starts at `first`, and changes the
    strength by powers of ten while the error on these tokens falls, up to a factor of 10^4. Then all tokens are fitted
    with this strength. Each token counts with its `weight` (...).
    """
    x, y = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
    weight = torch.ones(len(x), device=x.device) if weight is None else weight.reshape(-1)
    cut = len(x) - len(x) // 4
    seen, unseen = (Moment.of(x[part], y[part], weight[part]) for part in (slice(cut), slice(cut, None)))
    cross = unseen.cross
    assert seen.cross is not None and cross is not None
    whole = Moment(seen.gram + unseen.gram, seen.cross + cross, len(x))
    if not unseen.gram.any():
        return ridge(start, whole, first)

    @cache
    def error(power: int) -> float:
        """Return the squared error on the tokens left out, without the constant Σ|y|²: Σ|W x|² - 2 y·W x."""
        new = ridge(start, seen, first * 10.0**power)
        return float((new * (new @ unseen.gram - 2 * cross)).sum())

    way = 1 if error(1) < error(0) else -1
    power = 0
    while abs(power) < 4 and error(power + way) < error(power):
        power += way
    return ridge(start, whole, first * 10.0**power)


def best_slope(
    old: Callable[[Tensor], Tensor],
    new: Callable[[Tensor], Tensor],
    samples: Tensor,
    low: float = 0.25,
    high: float = 4.0,
) -> tuple[float, float]:
    """Return the slope a for which new(a·x)/a is nearest to old(x), and the root mean squared error.

    `samples` are values of x, the input of the activation function. From GELU to SiLU, a is near 1.702 if x is about 1
    in size (Hendrycks & Gimpel 1606.08415). The minimum is searched on a grid over log a between `low` and `high`, and
    then by golden sections. Raises ValueError without samples, or if some are not finite.
    """
    if not samples.numel() or not bool(samples.isfinite().all()):
        raise ValueError("the slope of an activation needs finite samples of what goes into it")
    x = samples.reshape(-1).to(torch.float64)
    wanted = old(x)

    def error(log_slope: float) -> float:
        a = math.exp(log_slope)
        return float((new(a * x) / a - wanted).square().mean())

    grid = torch.linspace(math.log(low), math.log(high), 41, dtype=torch.float64).tolist()
    middle = min(range(len(grid)), key=lambda index: error(grid[index]))
    low_end, high_end = grid[max(middle - 1, 0)], grid[min(middle + 1, len(grid) - 1)]
    golden = (math.sqrt(5) - 1) / 2
    while high_end - low_end > 1e-9:
        inner, outer = high_end - golden * (high_end - low_end), low_end + golden * (high_end - low_end)
        if error(inner) <= error(outer):
            high_end = outer
        else:
            low_end = inner
    best = min((low_end + high_end) / 2, grid[middle], key=error)
    return math.exp(best), math.sqrt(error(best))


def block_influence(before: Tensor, after: Tensor) -> Tensor:
    """Return 1 minus the cosine between a block's input and output (..., hidden) for each token (...).

    The mean over tokens is ShortGPT's block influence (Men et al. 2403.03853). ShortGPT removes the block with the
    lowest value first.
    """
    inputs, outputs = before.to(torch.float64), after.to(torch.float64)
    result: Tensor = 1 - torch.nn.functional.cosine_similarity(inputs, outputs, dim=-1)
    return result


# --- groups of heads that become one ----------------------------------------------------------------------------------


Groups = tuple[tuple[int, ...], ...]


def contiguous_groups(heads: int, groups: int) -> Groups:
    """Divide the heads 0 … heads-1 into groups of equal size, in order. Raises ValueError if that is not possible."""
    if groups < 1 or heads % groups:
        raise ValueError(f"{heads} heads cannot be dealt out to {groups} groups of one size")
    size = heads // groups
    return tuple(tuple(range(start, start + size)) for start in range(0, heads, size))


def group_similar(similarity: Tensor, groups: int) -> Groups:
    """Divide heads into groups of equal size, so that the sum of similarities within groups is large.

    `similarity` is (heads, heads). The search starts with contiguous groups, and makes the exchange of two heads that
    helps most, until none helps. This is a local optimum that is never worse than the start, and deterministic. Heads
    in a group, and groups, are sorted.
    """
    heads = len(similarity)
    grouped = [list(group) for group in contiguous_groups(heads, groups)]
    table: list[list[float]] = ((similarity + similarity.T) / 2).tolist()

    def gain(first: list[int], i: int, second: list[int], j: int) -> float:
        a, b = first[i], second[j]
        lost = sum(table[a][x] for x in first if x != a) + sum(table[b][x] for x in second if x != b)
        return sum(table[b][x] for x in first if x != a) + sum(table[a][x] for x in second if x != b) - lost

    size, margin = heads // groups, 1e-12 * (1 + float(similarity.abs().max()))
    while True:
        pairs = (
            (gain(first, i, second, j), first, i, second, j)
            for first, second in itertools.combinations(grouped, 2)
            for i in range(size)
            for j in range(size)
        )
        best = max(pairs, key=lambda grouped: grouped[0], default=None)
        if best is None or best[0] <= margin:
            return tuple(sorted(tuple(sorted(group)) for group in grouped))
        _, first, i, second, j = best
        first[i], second[j] = second[j], first[i]


def query_order(groups: Groups, per_head: int) -> list[int]:
    """Return the query heads in their new order, group by group, by their old numbers.

    `per_head` is the number of query heads that read a key-value head.
    """
    return [old * per_head + reader for group in groups for old in group for reader in range(per_head)]


def head_similarity(
    queries: Tensor, keys: Tensor, values: Tensor, outputs: Tensor, covariance: Tensor, rotary_dim: int = 0
) -> Tensor:
    """Return for every two key-value heads how well one head can replace them: (m, m), with 1 on the diagonal.

    This is 1 minus the mean of `score_error` and `value_error`, if `fit_keys` and `fit_values` merge the two heads.
    Queries are (n, d, e), keys and values (m, d, e), outputs (n, hidden, d), and the covariance (e, e) is the second
    moment of the layer's input.
    """
    heads = len(keys)
    readers = len(queries) // heads
    q, o = (projections.reshape(heads, readers, *projections.shape[1:]) for projections in (queries, outputs))
    result = torch.eye(heads, dtype=keys.dtype)
    for a, b in itertools.combinations(range(heads), 2):
        pair = [a, b]
        both_q, both_o = q[pair].flatten(0, 1), o[pair].flatten(0, 1)
        new_q, new_k = fit_keys(both_q, keys[pair], covariance, rotary_dim)
        share = 1 - score_error(both_q, keys[pair], new_q, new_k, covariance, rotary_dim)
        new_v, new_o = fit_values(values[pair], both_o, covariance)
        share += 1 - value_error(values[pair], both_o, new_v, new_o, covariance)
        result[a, b] = result[b, a] = share / 2
    return result
