"""Layouts are bijections: whatever the sizes, forward and inverse undo each other and lose nothing."""

import math

import msgspec
import numpy as np
import pytest
import torch
from helpers.covering import examples
from helpers.families import CONFIGS, spec_of
from helpers.trees import ATTENTIONS
from helpers.trees import EXPERTS as TREES_EXPERTS
from hypothesis import given, settings
from hypothesis import strategies as st

from gptkit.architectures import ARCHITECTURES
from gptkit.architectures.base import Leaf, bind
from gptkit.architectures.families.llama import LLAMA
from gptkit.architectures.layout import IDENTITY, Layout

AXES = ("a", "b", "c", "d", "e")
DECLARED = sorted(
    {leaf.layout for architecture in ARCHITECTURES.values() for leaf in architecture.leaves} - {IDENTITY}, key=repr
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
    each = draw(st.sampled_from([None, *(axis for axis in axes if axis != split)]))
    if each is not None:
        rest = tuple(axis for axis in axes if axis != each)
        shared = draw(st.one_of(st.just(""), patterns(rest)))
    extents = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    parts = []
    for index, extent in enumerate(extents):
        if draw(st.booleans()):
            sizes[f"part{index}"] = extent
            parts.append(f"part{index}")
        else:
            parts.append(str(extent))
    del sizes[split]  # its extent is the parts' sum
    return Layout(checkpoint, shared, split, tuple(parts), each), sizes


STACKED = (
    Layout(
        "experts hidden (intermediate part)", "(part intermediate) hidden", "part", ("1", "1"), "experts"
    ),  # gpt-oss
    Layout("experts (intermediate part)", "(part intermediate)", "part", ("1", "1"), "experts"),  # its biases
    Layout(
        "experts hidden (part intermediate)", "(part intermediate) hidden", "part", ("1", "1"), "experts"
    ),  # Llama 4
    Layout(
        "experts (part intermediate) hidden", split="part", parts=("1", "1"), stack="experts"
    ),  # Qwen3-MoE in memory
    Layout("experts intermediate hidden", "hidden intermediate", stack="experts"),
    Layout("hidden (experts intermediate)", "intermediate hidden", stack="experts"),
)
"""Tensors that hold those of all experts."""

LATENT = (
    Layout("(slot) hidden", split="slot", parts=("kv_rank", "rope_dim")),  # DeepSeek's kv_a_proj_with_mqa
    Layout("(heads slot) kv_rank", split="slot", parts=("nope_dim", "value_dim")),  # its kv_b_proj
    Layout("(heads half two) hidden", "(heads two half) hidden"),
)


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


@settings(max_examples=examples(400), deadline=None)
@given(cases())
def test_any_layout_is_a_bijection(case):
    check(*case)


@settings(max_examples=examples(200), deadline=None)
@given(cases())
def test_the_other_direction_is_the_identity_too(case):
    """Shared tensors with numbers of their own, so that swapped parts would show."""
    layout, sizes = case
    shared = [np.random.default_rng(i).random(shape) for i, shape in enumerate(layout.shared_shapes(sizes))]
    back = layout.forward(layout.inverse(shared, sizes), sizes)
    assert all(np.array_equal(a, b) for a, b in zip(shared, back, strict=True))


@pytest.mark.parametrize("layout", DECLARED, ids=lambda layout: layout.checkpoint)
@settings(max_examples=examples(60), deadline=None)
@given(
    sizes=st.fixed_dictionaries(
        {
            name: st.integers(1, 5)
            for name in ("hidden", "kv_heads", "group", "head_dim", "intermediate", "experts", "shared")
        }
    )
)
def test_the_families_layouts_are_bijections_for_any_sizes(layout, sizes):
    kv_heads, group, head_dim, width = (sizes[name] for name in ("kv_heads", "group", "head_dim", "intermediate"))
    latent = {"kv_rank": width, "rope_dim": group, "nope_dim": head_dim, "value_dim": kv_heads}
    delta = {"key_heads": kv_heads, "key_dim": head_dim, "group_values": width, "keys": width, "values": head_dim}
    delta |= {"inner": width, "states": group}
    convolution = {"channels": width, "kernel": group, "units": head_dim}
    more = {"rank": kv_heads, "state": head_dim, "vocab": width, "heads": kv_heads * group, "one": 1, "two": 2}
    check(layout, {**sizes, **latent, **delta, **convolution, **more})


@pytest.mark.parametrize("layout", [*STACKED, *LATENT], ids=lambda layout: layout.checkpoint)
@settings(max_examples=examples(60), deadline=None)
@given(
    sizes=st.fixed_dictionaries(
        {
            name: st.integers(1, 5)
            for name in (
                "experts",
                "hidden",
                "intermediate",
                "heads",
                "half",
                "kv_rank",
                "rope_dim",
                "nope_dim",
                "value_dim",
            )
        }
    )
)
def test_layouts_over_experts_and_latents_are_bijections_for_any_sizes(layout, sizes):
    check(layout, {**sizes, "two": 2})


def test_gate_and_up_of_all_experts_by_hand():
    """gpt-oss: [experts, hidden, 2 · intermediate], gate and up beside each other."""
    whole = np.arange(2 * 1 * 4).reshape(2, 1, 4)
    parts = STACKED[0].forward(whole, {"experts": 2, "hidden": 1, "intermediate": 2})
    assert [part.ravel().tolist() for part in parts] == [[0, 2], [1, 3], [4, 6], [5, 7]]


EXPERTS = tuple(f"blocks.{{layer}}.feed_forward.experts.{{expert}}.{name}_proj.weight" for name in ("gate", "up"))


@pytest.mark.parametrize("layout", STACKED[:4:2], ids=lambda layout: layout.checkpoint)
@settings(max_examples=examples(30), deadline=None)
@given(experts=st.integers(1, 4), seed=st.integers(0, 9))
def test_a_leaf_holds_the_tensors_of_all_experts(layout, experts, seed):
    """Both ways, in a tree of layers that have them and layers that have not."""
    mixture = msgspec.structs.replace(TREES_EXPERTS["gated"], experts=experts, top_k=1)
    dense = spec_of(CONFIGS["llama-2"])
    blocks = [block.replaced(feed_forward=mixture) for block in dense.blocks]
    spec = msgspec.structs.replace(dense, blocks=(*blocks, dense.blocks[0]))
    leaves = (*LLAMA.leaves, Leaf("model.layers.{layer}.router", "blocks.{layer}.feed_forward.router.weight"))
    leaves += (Leaf("model.layers.{layer}.experts.gate_up_proj", EXPERTS, layout),)
    down = "blocks.{layer}.feed_forward.experts.{expert}.down_proj.weight"
    leaves += (Leaf("model.layers.{layer}.experts.down_proj", down, STACKED[4]),)
    bound = {leaf.checkpoint: leaf for leaf in bind("it", leaves, spec)}
    leaf = bound["model.layers.0.experts.gate_up_proj"]
    assert leaf.shape[0] == experts and leaf.shared[:2] == tuple(each.format(layer=0, expert=0) for each in EXPERTS)
    assert f"model.layers.{len(blocks)}.experts.down_proj" not in bound
    shared = [np.random.default_rng(seed + i).random(shape) for i, shape in enumerate(leaf.shared_shapes)]
    whole = leaf.to_checkpoint(shared)
    assert whole.shape == leaf.shape
    assert all(np.array_equal(a, b) for a, b in zip(leaf.to_shared(whole), shared, strict=True))
    assert leaf.to_checkpoint(leaf.to_shared(whole)).tobytes() == whole.tobytes()


def test_deepseeks_latent_tensors_are_leaves():
    """kv_a_proj_with_mqa holds the latent and the rotary key, kv_b_proj a head's key and its value."""
    attention = ATTENTIONS["deepseek"]
    dense = spec_of(CONFIGS["llama-2"])
    spec = msgspec.structs.replace(dense, blocks=tuple(block.replaced(attention=attention) for block in dense.blocks))
    base = "blocks.{layer}.attention."
    leaves = (
        *(leaf for leaf in LLAMA.leaves if ".self_attn." not in leaf.checkpoint or ".o_proj." in leaf.checkpoint),
        Leaf("model.layers.{layer}.q", base + "q_proj.weight"),
        Leaf("model.layers.{layer}.a", (base + "kv_down_proj.weight", base + "k_rope_proj.weight"), LATENT[0]),
        Leaf("model.layers.{layer}.norm", base + "kv_norm.weight"),
        Leaf("model.layers.{layer}.b", (base + "k_up_proj.weight", base + "v_up_proj.weight"), LATENT[1]),
    )
    bound = {leaf.checkpoint: leaf for leaf in bind("it", leaves, spec)}
    assert bound["model.layers.0.a"].shape == (attention.kv_rank + attention.rope_dim, spec.hidden_size)
    assert bound["model.layers.0.b"].shape == (attention.heads * (8 + 12), attention.kv_rank)
    shared = [np.random.default_rng(i).random(s) for i, s in enumerate(bound["model.layers.0.b"].shared_shapes)]
    whole = bound["model.layers.0.b"].to_checkpoint(shared)
    assert np.array_equal(whole[:8], shared[0][:8]) and np.array_equal(whole[8:20], shared[1][:12])


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
