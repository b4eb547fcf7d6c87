"""The closed forms: what they must recover exactly, what they may never be worse than, and that mistakes are seen."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from helpers.covering import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from gptkit.components import ALiBi, Attention, Rotary
from gptkit.modules.attention import AttentionModule
from gptkit.modules.context import Context
from gptkit.modules.positions import apply_rotary, inverse_frequencies, rotary_tables
from gptkit.surgery.fits.regression import (
    Moment,
    augment,
    balanced,
    best_slope,
    block_influence,
    contiguous_groups,
    fit_keys,
    fit_values,
    group_similar,
    head_similarity,
    mix_inputs,
    pool_mean,
    query_order,
    ridge,
    rotate,
    score_error,
    square_roots,
    value_error,
)
from gptkit.surgery.fits.scores import conjugate_gradients, refit_scores

HEAD, WIDTH = 8, 20
seeds = st.integers(0, 2**31 - 1)


def normal(seed):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)


def group(seed, old=3, readers=2):
    """A group with an uneven covariance: queries, keys, values, outputs, covariance."""
    new = normal(seed)
    mix = new(WIDTH, WIDTH) * torch.logspace(0, -2, WIDTH, dtype=torch.float64)
    n = old * readers
    return new(n, HEAD, WIDTH), new(old, HEAD, WIDTH), new(old, HEAD, WIDTH), new(n, 15, HEAD), mix @ mix.T


# --- one head from several -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotary_dim", [0, 4, 8])
def test_one_head_is_fitted_without_loss(rotary_dim):
    q, k, v, o, covariance = group(1, old=1)
    new_q, new_k = fit_keys(q, k, covariance, rotary_dim)
    assert score_error(q, k, new_q, new_k, covariance, rotary_dim) < 1e-14
    assert torch.allclose(new_q.mT[..., rotary_dim:] @ new_k[rotary_dim:], q.mT[..., rotary_dim:] @ k[0, rotary_dim:])
    new_v, new_o = fit_values(v, o, covariance)
    assert torch.allclose(new_o @ new_v, o @ v, rtol=0, atol=1e-9)


@pytest.mark.parametrize("rank", [HEAD, 3])
def test_a_product_is_shared_out_evenly(rank):
    """Also one of lower rank; the elements that the closed form leaves differ a thousandfold."""
    _, _, v, o, covariance = group(3)
    value, outputs = fit_values(v, o, covariance * 1e-6)
    value[rank:] = 0
    new, more = balanced(value, outputs.flatten(0, 1))
    assert torch.allclose(more @ new, outputs.flatten(0, 1) @ value, rtol=0, atol=1e-10)
    assert value.std() > 100 * outputs.std()
    assert torch.isclose(new.square().mean(), more.square().mean())
    size = new.norm(dim=1) / more.norm(dim=0)
    assert torch.allclose(size[:rank], size[0].expand(rank))


def test_a_product_of_fewer_columns_than_stand_between_stays():
    new = normal(4)
    value, outputs = new(HEAD, 5), new(30, HEAD)
    assert balanced(value, outputs) == (value, outputs)


def test_a_floor_far_below_the_smallest_eigenvalue_changes_nothing_and_zero_is_refused():
    covariance = group(2)[4]
    root, inverse = square_roots(covariance, 0.0)
    assert torch.allclose(root @ root, covariance) and torch.allclose(root @ inverse, torch.eye(WIDTH).double())
    with pytest.raises(ValueError, match="no activations"):
        square_roots(torch.zeros(3, 3))


def test_values_that_share_a_space_are_merged_without_loss():
    _, _, v, o, covariance = group(3)
    shared = v[0]
    turns = normal(4)(3, HEAD, HEAD)
    new_v, new_o = fit_values(turns @ shared, o, covariance)
    old = o @ (turns @ shared).repeat_interleave(2, 0)
    assert torch.allclose(new_o @ new_v, old, rtol=0, atol=1e-8)
    assert value_error(turns @ shared, o, pool_mean(turns @ shared), o, covariance) > 0.1


@settings(max_examples=examples(25), deadline=None)
@given(seeds)
def test_values_are_never_worse_than_the_naive_forms(seed):
    _, _, v, o, covariance = group(seed)
    fitted = value_error(v, o, *fit_values(v, o, covariance), covariance)
    # also than each naive head with the best outputs for it
    for naive in (pool_mean(v), v[0]):
        assert fitted <= value_error(v, o, naive, o, covariance) + 1e-9
        best = torch.linalg.solve(naive @ covariance @ naive.T, naive @ covariance @ (o @ v.repeat_interleave(2, 0)).mT)
        assert fitted <= value_error(v, o, naive, best.mT, covariance) + 1e-9


@settings(max_examples=examples(25), deadline=None)
@given(seeds, st.sampled_from([0, 4, 8]))
def test_keys_are_never_worse_than_the_naive_forms(seed, rotary_dim):
    q, k, _, _, covariance = group(seed)
    fitted = score_error(q, k, *fit_keys(q, k, covariance, rotary_dim), covariance, rotary_dim)
    assert 0 <= fitted < 1
    for naive in (pool_mean(k), k[0]):
        assert fitted <= score_error(q, k, q, naive, covariance, rotary_dim) + 1e-9


@settings(max_examples=examples(15), deadline=None)
@given(seeds, st.sampled_from([0, 4, 8]))
def test_no_small_change_of_a_fit_makes_it_better(seed, rotary_dim):
    q, k, v, o, covariance = group(seed)
    new = normal(seed + 1)
    fits = [
        (fit_keys(q, k, covariance, rotary_dim, 1e-12), lambda *fit: score_error(q, k, *fit, covariance, rotary_dim)),
        (fit_values(v, o, covariance, 1e-12), lambda *fit: value_error(v, o, *fit, covariance)),
    ]
    for fit, error in fits:
        for part in (0, 1):
            change = 1e-5 * new(*fit[part].shape) * fit[part].norm() / fit[part].numel() ** 0.5
            for sign in (1, -1):
                moved = [each + sign * change if index == part else each for index, each in enumerate(fit)]
                assert error(*moved) >= error(*fit) - 1e-11


def test_the_score_error_is_the_mean_over_all_distances():
    q, k, _, _, covariance = group(5, old=2, readers=1)
    root = square_roots(covariance, 0.0)[0]
    # The means of cos² and of sin·cos over these points are those over the whole circle.
    points = torch.arange(8, dtype=torch.float64)[:, None] * torch.tensor([1, 2, 3, 5], dtype=torch.float64)
    angles = points * (2 * math.pi / 8)
    new_q, new_k = fit_keys(q, k, covariance, 8)
    old = new = 0.0
    for turn in angles:  # E (q·R k)² = |Wq' R Wk|² in Σ's metric

        def product(a, b, turn=turn):
            return (a @ root).mT @ rotate((b @ root).mT[..., None, :], turn[None])[..., 0, :].mT

        for pair in range(4):  # each pair for itself
            keep = torch.zeros(8, 1).double()
            keep[[pair, pair + 4]] = 1
            full = product(q * keep, k)
            old += full.square().sum()
            new += (full - product(new_q * keep, new_k.expand_as(k))).square().sum()
    assert score_error(q, k, new_q, new_k, covariance, 8) == pytest.approx(float(new / old), rel=1e-9)


# --- positions -------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(20), deadline=None)
@given(seeds)
def test_the_rotation_commutes_with_a_complex_factor(seed):
    new = normal(seed)
    x, factor, angles = new(5, 8), torch.complex(new(4), new(4)), new(5, 4)

    def times(y):
        y = torch.complex(*y.chunk(2, -1)) * factor
        return torch.cat((y.real, y.imag), -1)

    assert torch.allclose(rotate(times(x), angles), times(rotate(x, angles)))
    assert torch.allclose(rotate(rotate(x, angles), -angles), x)


def test_the_rotation_is_the_modules():
    rotary, positions, x = Rotary(dim=6, base=100.0), torch.arange(7)[None], normal(0)(1, 2, 7, 8)
    angles = positions[0, :, None] * inverse_frequencies(rotary, 7, torch.float64)
    expected = apply_rotary(x, rotary_tables(rotary, positions, torch.float64))
    assert torch.allclose(rotate(x, angles), expected, rtol=0, atol=1e-14)


# --- in an attention module ------------------------------------------------------------------------------------------

POSITIONS = [Rotary(dim=8, base=50.0), Rotary(dim=4, base=50.0), ALiBi(), None]


def equivalent_heads(seed, position, kv=4, heads=8):
    """Attention in which old heads (0, 2) and (1, 3) say the same in other words, biases included."""
    new = normal(seed)
    dim = position.dim if isinstance(position, Rotary) else 0
    q, o = new(heads, HEAD, WIDTH + 1), new(heads, WIDTH, HEAD)
    k, v = new(2, HEAD, WIDTH + 1).repeat(2, 1, 1), new(2, HEAD, WIDTH + 1).repeat(2, 1, 1)
    factor = torch.complex(new(kv, dim // 2), new(kv, dim // 2))
    pairs = torch.complex(*k[:, :dim].chunk(2, 1)) * factor[..., None]
    turned = torch.cat((pairs.real, pairs.imag, new(kv, HEAD - dim, HEAD - dim) @ k[:, dim:]), 1)
    return q, turned, new(kv, HEAD, HEAD) @ v, o, dim


def run(q, k, v, o, position, x):
    spec = Attention(
        hidden_size=WIDTH, heads=len(q), kv_heads=len(k), head_dim=HEAD, scale=0.1, position=position, qkv_bias=True
    )
    module = AttentionModule(spec).double()
    with torch.no_grad():
        for name, weight in (("q_proj", q), ("k_proj", k), ("v_proj", v)):
            getattr(module, name).weight.copy_(weight[..., :-1].flatten(0, 1))
            getattr(module, name).bias.copy_(weight[..., -1].flatten())
        module.o_proj.weight.copy_(torch.cat(tuple(o), dim=1))
        steps = x.shape[1]
        return module(x, Context(len(x), steps, 0, False, torch.arange(steps)[None], None, x.dtype))


def merged(q, k, v, o, dim, covariance, groups, keys=fit_keys, **change):
    order = query_order(groups, len(q) // len(k))
    q, o = q[order].chunk(len(groups)), o[order].chunk(len(groups))
    fits = [keys(a, k[list(each)], covariance, dim, 1e-13) for a, each in zip(q, groups, strict=True)]
    more = [fit_values(v[list(each)], b, covariance, 1e-13) for b, each in zip(o, groups, strict=True)]
    new_q, new_k = torch.cat([a for a, _ in fits]), torch.stack([b for _, b in fits])
    return new_q, new_k, torch.stack([a for a, _ in more]), torch.cat([b for _, b in more])


@pytest.mark.parametrize("position", POSITIONS, ids=["rotary", "partial", "alibi", "none"])
def test_equivalent_heads_are_merged_exactly_found_by_similarity_biases_included(position):
    q, k, v, o, dim = equivalent_heads(6, position)
    x = normal(7)(2, 9, WIDTH)
    text = torch.cat((normal(8)(400, WIDTH), torch.ones(400, 1, dtype=torch.float64)), 1)
    moment = Moment.of(text)
    groups = group_similar(head_similarity(q, k, v, o, moment.covariance, dim), 2)
    assert groups == ((0, 2), (1, 3))
    if isinstance(position, ALiBi):  # its slopes belong to the heads' places, so that heads must keep theirs
        order = [0, 2, 1, 3]
        q, o = q[query_order(((0, 2), (1, 3)), 2)], o[query_order(((0, 2), (1, 3)), 2)]
        k, v, groups = k[order], v[order], ((0, 1), (2, 3))
    expected = run(q, k, v, o, position, x)
    scale = expected.abs().max()
    good = merged(q, k, v, o, dim, moment.covariance, groups)
    assert (run(*good, position, x) - expected).abs().max() / scale < 1e-9
    # the mistakes: the wrong groups, a rotated pair cut as if it were none, biases forgotten, the mean
    mistakes = {
        "groups": merged(q, k, v, o, dim, moment.covariance, ((0, 3), (1, 2))),
        "bias": [torch.cat((each[..., :-1], each[..., -1:] * (index != 1)), -1) for index, each in enumerate(good[:3])]
        + [good[3]],
        "mean": [*good[:2], torch.stack([pool_mean(v[list(each)]) for each in groups]), good[3]],
    }
    if dim:
        mistakes["pairs"] = merged(q, k, v, o, 0, moment.covariance, groups)

        def conjugated(*a):
            new_q, new_k = fit_keys(*a)
            return new_q, new_k * (1 - 2.0 * (torch.arange(HEAD) == dim - 1)[:, None])

        mistakes["conjugate"] = merged(q, k, v, o, dim, moment.covariance, groups, conjugated)
    else:
        mistakes.pop("bias")  # without rotation softmax does not see a shift of the key's bias
    for name, wrong in mistakes.items():
        assert (run(*wrong, position, x) - expected).abs().max() / scale > 1e-3, name


# --- groups ----------------------------------------------------------------------------------------------------------


def test_groups_in_order_and_the_query_heads_that_follow():
    assert contiguous_groups(6, 2) == ((0, 1, 2), (3, 4, 5))
    assert query_order(((0, 2), (1, 3)), 2) == [0, 1, 4, 5, 2, 3, 6, 7]
    for heads, groups in ((9, 2), (4, 0), (3, 6)):
        with pytest.raises(ValueError, match="dealt out"):
            contiguous_groups(heads, groups)


@settings(max_examples=examples(30), deadline=None)
@given(seeds, st.sampled_from([(4, 2), (6, 2), (6, 3), (8, 4), (5, 1), (3, 3)]))
def test_groups_by_similarity_hold_every_head_once_and_are_no_worse_than_in_order(seed, shape):
    heads, count = shape
    similarity = normal(seed)(heads, heads)

    def within(groups):
        return sum(similarity[a, b] for group in groups for a in group for b in group if a != b)

    found = group_similar(similarity, count)
    assert sorted(head for group in found for head in group) == list(range(heads))
    assert {len(group) for group in found} == {heads // count}
    assert within(found) >= within(contiguous_groups(heads, count)) - 1e-9


# --- scores ----------------------------------------------------------------------------------------------------------


def teacher(seed, rotary, n=3, length=12, batch=3):
    new = normal(seed)
    x, q, k = new(batch, length, WIDTH), new(n, HEAD, WIDTH) * 0.4, new(HEAD, WIDTH) * 0.4
    angles = torch.arange(length)[:, None] * torch.tensor([1.0, 0.2, 0.05]).double() if rotary else None
    turn = (lambda y: rotate(y, angles)) if rotary else (lambda y: y)
    scores = turn(x[:, None] @ q.mT) @ turn(x @ k.T)[:, None].mT * 0.3
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    return q, k, x, scores.masked_fill(~causal, -math.inf).softmax(-1), scores, angles


@pytest.mark.parametrize("rotary", [True, False])
def test_scores_that_can_be_had_are_found_again(rotary):
    q, k, x, p, scores, angles = teacher(9, rotary)
    start = q + 0.1 * normal(1)(*q.shape), k + 0.1 * normal(2)(*k.shape)
    fit = refit_scores(*start, x, p, scores, 0.3, angles, rounds=4, steps=100, strength=1e-12)
    assert fit.before > 1e-3 and fit.after < 1e-5 * fit.before
    if rotary:  # with the rotation left out there is no such fit
        assert (
            refit_scores(*start, x, p, scores, 0.3, None, rounds=4, steps=100, strength=1e-12).after > 1e-2 * fit.before
        )
    again = refit_scores(q, k, x, p, scores, 0.3, angles)
    assert again.before < 1e-25 and torch.allclose(again.queries, q)


def test_the_scores_error_is_twice_the_divergence_for_small_differences_and_blind_to_shifts():
    q, k, x, p, scores, angles = teacher(10, True)
    near = q + 1e-3 * normal(3)(*q.shape)
    error = refit_scores(near, k, x, p, scores, 0.3, angles, rounds=0).before
    trial = rotate(x[:, None] @ near.mT, angles) @ rotate(x @ k.T, angles)[:, None].mT * 0.3
    other = trial.masked_fill(p == 0, -math.inf).log_softmax(-1)
    divergence = (p * (p.log() - other)).masked_fill(p == 0, 0).sum(-1).mean()
    assert error == pytest.approx(2 * float(divergence), rel=1e-2)
    shifted = scores + normal(4)(*scores.shape[:-1], 1)
    assert refit_scores(near, k, x, p, shifted, 0.3, angles, rounds=0).before == pytest.approx(error, rel=1e-9)
    hidden = scores.masked_fill(p == 0, math.nan)  # nobody reads what attention must not look at
    assert refit_scores(near, k, x, p, hidden, 0.3, angles, rounds=0).before == pytest.approx(error, rel=1e-9)


@settings(max_examples=examples(10), deadline=None)
@given(seeds, st.booleans())
def test_a_refit_never_makes_scores_worse(seed, rotary):
    q, _, x, p, scores, angles = teacher(seed, rotary)
    start = normal(seed + 1)(HEAD, WIDTH)
    fit = refit_scores(q, start, x, p, scores, 0.3, angles)
    assert fit.after < fit.before
    assert fit.after == pytest.approx(refit_scores(fit.queries, fit.key, x, p, scores, 0.3, angles, rounds=0).before)


def test_conjugate_gradients_solve():
    new = normal(11)
    root, wanted = new(6, 6), new(6)
    matrix = root @ root.T
    assert torch.allclose(conjugate_gradients(lambda v: matrix @ v, wanted, 40), torch.linalg.solve(matrix, wanted))
    assert not conjugate_gradients(lambda v: matrix @ v, torch.zeros(6).double(), 5).any()


# --- linears, activations, blocks ------------------------------------------------------------------------------------


def test_a_ridge_goes_from_where_it_starts_to_least_squares():
    new = normal(12)
    x, y, start = new(50, 6), new(50, 3), new(3, 6)
    moment = Moment.of(x, y)
    assert moment.count == 50 and torch.allclose(moment.covariance, x.T @ x / 50)
    least = torch.linalg.lstsq(x, y).solution.T
    assert torch.allclose(ridge(start, moment, 1e-12), least)
    assert torch.allclose(ridge(start, moment, 1e12), start)
    between = ridge(start, moment, 0.3)
    penalty = 0.3 * moment.gram.diagonal().mean()
    gradient = (between @ x.T - y.T) @ x + penalty * (between - start)
    assert gradient.abs().max() < 1e-10
    assert torch.allclose(ridge(between, moment, 1e-12), least)


def test_a_ridge_without_targets_or_strength_is_refused():
    with pytest.raises(ValueError, match="targets"):
        ridge(torch.zeros(1, 2), Moment.of(torch.zeros(1, 2)), 1.0)
    with pytest.raises(ValueError, match="strength"):
        ridge(torch.zeros(1, 2), Moment.of(torch.zeros(1, 2), torch.zeros(1, 1)), 0.0)


def test_a_weight_of_two_counts_a_token_twice():
    new = normal(13)
    x, y = new(4, 5), new(4, 2)
    once = Moment.of(x, y, torch.tensor([1.0, 2, 1, 1]))
    twice = Moment.of(torch.cat((x, x[1:2])), torch.cat((y, y[1:2])))
    assert torch.allclose(once.gram, twice.gram) and torch.allclose(once.cross, twice.cross)


def test_a_bias_is_a_weight_on_one():
    new = normal(14)
    x, weight, bias = new(7, 5), new(2, 3, 5), new(2, 3)
    ones = torch.cat((x, torch.ones(7, 1).double()), 1)
    assert torch.allclose(ones @ augment(weight, bias).mT, x @ weight.mT + bias[:, None])
    assert torch.allclose(ones @ augment(weight, None).mT, x @ weight.mT)


def test_mixed_inputs_are_what_the_values_are_mixed_of():
    new = normal(15)
    p, x, v = new(2, 3, 4, 4).softmax(-1), new(2, 4, 5), new(6, 5)
    assert torch.allclose(mix_inputs(p, x) @ v.T, p @ (x @ v.T)[:, None])


def test_the_slope_of_an_activation_is_found():
    samples = normal(16)(4000)
    slope, left = best_slope(lambda x: F.silu(1.3 * x) / 1.3, F.silu, samples)
    assert slope == pytest.approx(1.3, rel=1e-6) and left < 1e-8
    slope, left = best_slope(F.gelu, F.silu, samples)
    assert 1.65 < slope < 1.8 and left < 0.02
    wanted = F.gelu(samples)
    for other in (1.0, slope * 0.99, slope * 1.01):
        assert (F.silu(other * samples) / other - wanted).square().mean().sqrt() > left
    # where it matters depends on the samples
    assert abs(best_slope(F.gelu, F.silu, samples * 4)[0] - slope) > 1e-2
    for bad in (torch.zeros(0), torch.tensor([1.0, math.nan])):
        with pytest.raises(ValueError, match="finite samples"):
            best_slope(F.gelu, F.silu, bad)


def test_the_influence_of_a_block():
    x = normal(17)(3, 6)
    assert block_influence(x, 2 * x).abs().max() < 1e-15
    assert torch.allclose(block_influence(x, -x), torch.full((3,), 2.0).double())
    other = normal(18)(3, 6)
    expected = 1 - (x * other).sum(-1) / x.norm(dim=-1) / other.norm(dim=-1)
    assert torch.allclose(block_influence(x, other), expected)
