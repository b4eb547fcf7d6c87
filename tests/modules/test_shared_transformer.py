"""Blocks that several layers run: stored once, computed as often as they stand, with what is each layer's own."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from helpers.families import CONFIGS, VOCAB, randomised_reference, save_hf, spec_of
from helpers.trees import filled, random_weights
from safetensors.torch import save_file

import gptkit
from gptkit.analysis.costs import costs
from gptkit.analysis.parallel import split
from gptkit.analysis.parameters import count
from gptkit.components import SharedTransformer, from_json, to_json
from gptkit.errors import CheckpointError, ConfigError, MissingComponent, SwapRefused, UsageError
from gptkit.modules.context import Context
from gptkit.modules.decoder import BlockModule
from gptkit.surgery.facts import Assumed
from gptkit.surgery.registry import Step, reshape
from gptkit.training.train import require_trainable

replace = msgspec.structs.replace
SPEC, ADAPTED = spec_of(CONFIGS["zamba2"]), spec_of(CONFIGS["zamba2-adapted"])
IDS = torch.randint(0, VOCAB, (2, 11), generator=torch.Generator().manual_seed(0))


def shared(layer: int) -> Any:
    return SPEC.blocks[layer].mixer("shared")


def with_shared(layer: int, **fields: Any) -> Any:
    """The tree with another shared block in a layer."""
    blocks = list(SPEC.blocks)
    blocks[layer] = blocks[layer].replaced(shared=replace(shared(layer), **fields))
    return replace(SPEC, blocks=tuple(blocks))


def test_blocks_come_in_turn_and_are_stored_where_they_stand_first() -> None:
    assert [(shared(n).number, shared(n).weights_from) for n in (1, 2, 4)] == [(0, "own"), (1, "own"), (0, "earlier")]
    assert SPEC.shared_block_sources == {1: 1, 2: 2, 4: 1}
    own = {each.name.removeprefix("blocks.4.shared.") for each in SPEC.parameters() if ".4.shared." in each.name}
    adapters = {"adapter_down.weight", "gate_adapter_up.weight", "up_adapter_up.weight"}
    assert own == {*adapters, "stream_proj.weight"}
    assert from_json(to_json(SPEC)) == SPEC


@pytest.mark.parametrize("spec", [SPEC, ADAPTED], ids=["zamba2", "zamba2-adapted"])
def test_weights_count_once_and_work_as_often_as_the_block_stands(spec: Any) -> None:
    name = "zamba2" if spec is SPEC else "zamba2-adapted"
    assert count(spec).total == randomised_reference(CONFIGS[name]).num_parameters()
    there = [block.mixer("shared") for block in spec.blocks if block.mixer("shared") is not None]
    stored = [replace(each, weights_from="own") for each in there]
    linears = sum(shape[0] * shape[1] for each in stored for shape in each.shapes().values() if len(shape) == 2)
    assert costs(spec, 1).flops["shared block"] == 2 * linears


def test_a_weight_that_is_shared_acts_in_all_layers_that_run_its_block() -> None:
    decoder = filled(SPEC, random_weights(SPEC))
    weight = decoder.get_submodule("blocks.1.shared.v_proj").weight
    largest = []
    for layer in (1, 4):  # which then passes nothing on
        decoder.get_submodule(f"blocks.{layer}.shared.stream_proj").weight.data.zero_()  # type: ignore[operator, union-attr]
        (found,) = torch.autograd.grad(decoder(IDS).square().sum(), weight)  # type: ignore[arg-type]
        largest.append(float(found.abs().max()))
    assert largest[0] > 0 == largest[1]


def test_a_tree_whose_block_is_stored_nowhere_or_is_another_is_none() -> None:
    for layer, fields in ((1, {"weights_from": "earlier"}), (4, {"number": 2}), (4, {"kv_heads": 3})):
        with pytest.raises(ConfigError, match="no earlier layer has this block"):
            with_shared(layer, **fields)
    assert with_shared(4, rank=5).shared_block_sources == SPEC.shared_block_sources  # adapters are each layer's own


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kv_heads": 4}, "not divisible by"),
        (
            {"norm": replace(SPEC.blocks[1].mixer("shared").norm, size=48)},
            "norm has size 48, but its input has size 96",
        ),  # type: ignore[union-attr]
        (
            {"inner_norm": replace(SPEC.blocks[1].mixer("shared").norm, size=50)},
            "inner_norm has size 50, but its input has size 48",
        ),  # type: ignore[union-attr]
        ({"position": CONFIGS and spec_of(CONFIGS["bloom"]).blocks[0].attention.position}, "a shared block needs RoPE"),
    ],
)
def test_records_that_fit_nothing_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(shared(1), **fields)


def test_what_goes_to_the_next_sub_layer_has_one() -> None:
    first, mamba = SPEC.blocks[1].sublayers
    with pytest.raises(ConfigError, match="goes only to the next sub-layer"):
        replace(SPEC.blocks[1], sublayers=(mamba, first))


def test_a_layer_by_itself_says_what_it_lacks() -> None:
    context = Context(1, 3, 0, False, torch.arange(3)[None], None, torch.float32)
    x = torch.randn(1, 3, 48)
    with pytest.raises(MissingComponent, match="uses shared block 0 ran before"):
        BlockModule(SPEC.blocks[4])(x, context)
    with pytest.raises(MissingComponent, match="needs the input of the first layer"):
        BlockModule(SPEC.blocks[1])(x, context)
    assert SPEC.extra_inputs == SharedTransformer.slot


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("norm", "layernorm", "SharedTransformer"),
        ("layers", "0-3", "SharedTransformer"),
        ("attention", "gqa:2", "SharedTransformer"),
        ("intermediate", "64", "one layer has only recurrence"),
        ("activation", "silu", "one layer has only recurrence"),
    ],
)
def test_swaps_refuse_it_by_its_name(option: str, value: str, said: str) -> None:
    with pytest.raises(SwapRefused, match=said):
        reshape(SPEC, Step(option, value, approximate=True), Assumed(SPEC))


def test_several_processes_do_not_train_it() -> None:
    require_trainable(SPEC, apart=False, several=False)
    with pytest.raises(UsageError, match="share the weights of one block"):
        require_trainable(SPEC, apart=False, several=True)


def test_devices_share_its_heads_and_units_and_stages_have_no_block_together() -> None:
    whole = split(SPEC, 1, 1, context=8)
    halves = split(SPEC, 2, 1, context=8)
    linears = 3 * 96 * 96 + 48 * 96 + 3 * 72 * 48  # of each of two blocks
    one, other = (each.stages[0].weights["shared block"] for each in (whole, halves))
    adapters = 2 * 72 * 6  # rows of units, in each of three layers
    assert one - other == 2 * (2 * linears + 3 * adapters) // 2
    with pytest.raises(UsageError, match="share the weights of one block"):
        split(SPEC, 1, 5, context=8)


def test_files_that_have_a_shared_weight_in_each_layer_are_read_where_all_are_one(tmp_path: Path) -> None:
    """As torch.save leaves a module's state."""
    reference = save_hf(CONFIGS["zamba2"], tmp_path)
    whole = {name: each.clone() for name, each in reference.state_dict().items()}
    assert len(whole) > 80
    save_file(whole, tmp_path / "model.safetensors", metadata={"format": "pt"})
    opened = gptkit.open_checkpoint(tmp_path)
    assert any("12 tensors are copies of weights that layers share: stored only once" in each for each in opened.notes)
    assert torch.equal(gptkit.load(tmp_path)(IDS), reference(IDS).logits)
    whole["model.layers.4.shared_transformer.self_attn.q_proj.weight"] += 1
    save_file(whole, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"some layers share weights, but .* model\.layers\.4\.shared_transformer"
    ):
        gptkit.open_checkpoint(tmp_path)
