"""Layouts are bijections: whatever the sizes, forward and inverse undo each other and lose nothing."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptkit.architectures import ARCHITECTURES
from gptkit.architectures.layout import IDENTITY, Layout

AXES = ("a", "b", "c", "d", "e")
DECLARED = sorted(
    {leaf.layout for architecture in ARCHITECTURES.values() for leaf in architecture.leaves} - {IDENTITY},
    key=repr,
)


@st.composite
def patterns(draw: st.DrawFn, axes: tuple[str, ...]) -> str:
    """The axes in some order, grouped into dimensions in some way."""
    order = draw(st.permutations(axes))
    dimensions, start = [], 0
    while start < len(order):
        width = draw(st.integers(1, len(order) - start))
        group = order[start : start + width]
        dimensions.append(f"({' '.join(group)})" if width > 1 or draw(st.booleans()) else group[0])
        start += width
    return " ".join(dimensions)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Layout, dict[str, int]]:
    """Any layout of up to five axes, split into up to four parts of any extents."""
    axes = AXES[: draw(st.integers(1, len(AXES)))]
    sizes = {axis: draw(st.integers(1, 4)) for axis in axes}
    checkpoint = draw(patterns(axes))
    shared = draw(st.one_of(st.just(""), patterns(axes)))
    if not draw(st.booleans()):
        return Layout(checkpoint, shared), sizes
    split = draw(st.sampled_from(axes))
    extents = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    parts = []
    for index, extent in enumerate(extents):
        if draw(st.booleans()):
            sizes[f"part{index}"] = extent
            parts.append(f"part{index}")
        else:
            parts.append(str(extent))
    del sizes[split]  # its extent is the parts' sum
    return Layout(checkpoint, shared, split, tuple(parts)), sizes


def check(layout: Layout, sizes: dict[str, int]) -> None:
    shared_shapes = layout.shared_shapes(sizes)
    shape = layout.checkpoint_shape(sizes, shared_shapes)
    count = math.prod(shape)
    assert count == sum(math.prod(s) for s in shared_shapes)
    source = np.arange(count, dtype=np.int32).reshape(shape)
    shared = layout.forward(source, sizes)
    assert [array.shape for array in shared] == shared_shapes
    assert sorted(np.concatenate([array.reshape(-1) for array in shared]).tolist()) == list(range(count))
    back = layout.inverse(shared, sizes)
    assert back.shape == shape
    assert back.tobytes() == source.tobytes()
    in_torch = layout.forward(torch.from_numpy(source), sizes)
    assert all(np.array_equal(ours, theirs.numpy()) for ours, theirs in zip(shared, in_torch, strict=True))
    assert torch.equal(layout.inverse(in_torch, sizes), torch.from_numpy(source))


@settings(max_examples=400, deadline=None)
@given(cases())
def test_any_layout_is_a_bijection(case):
    check(*case)


@settings(max_examples=200, deadline=None)
@given(cases())
def test_the_other_direction_is_the_identity_too(case):
    """Shared tensors with numbers of their own, so that swapped parts would show."""
    layout, sizes = case
    shared = [np.random.default_rng(i).random(shape) for i, shape in enumerate(layout.shared_shapes(sizes))]
    back = layout.forward(layout.inverse(shared, sizes), sizes)
    assert all(np.array_equal(a, b) for a, b in zip(shared, back, strict=True))


@pytest.mark.parametrize("layout", DECLARED, ids=lambda layout: layout.checkpoint)
@settings(max_examples=60, deadline=None)
@given(
    sizes=st.fixed_dictionaries(
        {name: st.integers(1, 5) for name in ("hidden", "kv_heads", "group", "head_dim", "intermediate")}
    )
)
def test_the_families_layouts_are_bijections_for_any_sizes(layout, sizes):
    check(layout, {**sizes, "heads": sizes["kv_heads"] * sizes["group"]})


@pytest.mark.parametrize("tensor", [np.arange(6).reshape(2, 3), torch.arange(6).reshape(2, 3)], ids=["numpy", "torch"])
def test_the_identity_hands_the_tensor_through(tensor):
    assert IDENTITY.is_identity
    assert IDENTITY.forward(tensor, {})[0] is tensor
    assert IDENTITY.inverse([tensor], {}) is tensor
    assert IDENTITY.checkpoint_shape({}, [(2, 3)]) == (2, 3)


def test_falcons_grouped_layout_by_hand():
    """Two key-value heads with three queries each, head_dim 1: q q q k v, then q q q k v."""
    layout = Layout("(kv_heads slot head_dim) hidden", split="slot", parts=("group", "1", "1"))
    sizes = {"kv_heads": 2, "group": 3, "head_dim": 1, "hidden": 1}
    q, k, v = layout.forward(np.arange(10)[:, None], sizes)
    assert (q.ravel().tolist(), k.ravel().tolist(), v.ravel().tolist()) == ([0, 1, 2, 5, 6, 7], [3, 8], [4, 9])


def test_gpt2s_transposed_layout_by_hand():
    """c_attn is [in, out] with q, k and v side by side; shared weights are [out, in]."""
    layout = Layout("hidden (part heads head_dim)", "(part heads head_dim) hidden", "part", ("1", "1", "1"))
    whole = np.arange(12).reshape(2, 6)
    q, k, v = layout.forward(whole, {"hidden": 2, "heads": 1, "head_dim": 2})
    assert [each.tolist() for each in (q, k, v)] == [whole[:, i : i + 2].T.tolist() for i in (0, 2, 4)]


def test_forward_makes_views_where_it_can():
    """A rename or a split along the first axis copies nothing; transposing is a view as well."""
    fused = Layout("(part heads head_dim)", split="part", parts=("1", "1", "1"))
    source = np.arange(12)
    assert all(np.shares_memory(source, piece) for piece in fused.forward(source, {"heads": 2, "head_dim": 2}))
    transposed = Layout("(rows) (columns)", "(columns) (rows)")
    matrix = torch.zeros(3, 4)
    (turned,) = transposed.forward(matrix, {"rows": 3, "columns": 4})
    assert turned.data_ptr() == matrix.data_ptr()


def test_a_tensor_of_another_size_is_an_error():
    layout = Layout("(rows) (columns)", "(columns) (rows)")
    with pytest.raises(ValueError):
        layout.forward(np.zeros((3, 5)), {"rows": 3, "columns": 4})
