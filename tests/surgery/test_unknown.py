"""Swaps that meet a component of a kind that they do not know: they go by roles, or refuse by its name."""

import subprocess
import sys

import msgspec
import pytest
from helpers.families import CONFIGS, spec_of

from gptkit.components import Component, Mixer, ModelSpec, SubLayer, Weight
from gptkit.components.base import Size
from gptkit.errors import SwapRefused
from gptkit.surgery.layerwise import readers, writers
from gptkit.surgery.registry import Step, all_options, all_swaps, swap_for
from gptkit.surgery.shapes import Reshaped, steps_from, swapped


class StrangeRecurrence(Mixer, Component, frozen=True):
    """A mixer that gptkit does not have."""

    label = "recurrence"
    slot = "recurrence"

    hidden_size: Size
    state_size: Size

    def weights(self) -> dict[str, Weight]:
        return {
            "in_proj.weight": Weight((self.state_size, self.hidden_size), "reads"),
            "out_proj.weight": Weight((self.hidden_size, self.state_size), "writes"),
        }


VALUES = {
    "norm": "layernorm",
    "block": "parallel",
    "layers": "+1",
    "hidden": "96",
    "attention": "mqa",
    "heads": "2",
    "head_dim": "32",
    "position": "none",
    "rope_scaling": "yarn:2",
    "rotary_dim": "4",
    "rope_pairs": "adjacent",
    "context": "512",
    "window": "16",
    "mlp": "moe:4x2",
    "experts": "2",
    "activation": "gelu",
    "intermediate": "160",
    "vocab": "multiple:64",
    "tie": "",
    "untie": "",
    "drop": "biases",
    "fold": "norm",
    "quantize": "int8",
    "merge_lora": "",
}
"""A value of every option."""

ELSEWHERE = (
    "layers",
    "hidden",
    "norm",
    "context",
    "window",
    "vocab",
    "tie",
    "quantize",
    "mlp",
    "activation",
    "intermediate",
    "fold",
)
"""The options that look at nothing inside such a mixer but the roles of its parameters."""


def mixed() -> ModelSpec:
    """LLaMA with a recurrence in place of attention in its second layer."""
    spec = spec_of(CONFIGS["llama"])
    first, second, *others = spec.blocks
    inner = StrangeRecurrence(hidden_size=spec.hidden_size, state_size=40)
    attention, feed_forward = second.sublayers
    second = msgspec.structs.replace(second, sublayers=(SubLayer(mixer=inner, norm=attention.norm), feed_forward))
    return msgspec.structs.replace(spec, blocks=(first, second, *others))


def asked(option: str) -> Reshaped | SwapRefused:
    try:
        return swapped(mixed(), [Step(option, VALUES[option])])
    except SwapRefused as error:
        return error


def test_every_option_has_a_value() -> None:
    assert set(VALUES) == {option.name for option in all_options()}


@pytest.mark.parametrize(
    "option", [option for option in VALUES if option not in ("merge_lora", "drop", "untie", "experts")]
)
def test_it_is_moved_by_its_roles_or_refused_by_its_name(option: str) -> None:
    found = asked(option)
    if option in ELSEWHERE:
        assert isinstance(found, Reshaped), found
        assert any(isinstance(block.mixer("recurrence"), StrangeRecurrence) for block in found.spec.blocks)
    else:
        assert isinstance(found, SwapRefused) and "StrangeRecurrence" in found.message, found


def test_its_parameters_are_readers_and_writers() -> None:
    block = mixed().blocks[1]
    read, write = readers(block, "b")[0], writers(block, "b")[0]
    assert (read.path, read.norm, write.path) == ("b.recurrence.in_proj", "b.recurrence_norm", "b.recurrence.out_proj")
    wider = asked("hidden")
    assert isinstance(wider, Reshaped)
    inner = wider.spec.blocks[1].mixer("recurrence")
    assert inner is not None and inner.hidden_size == 96


def test_layers_without_it_may_be_changed() -> None:
    found = swapped(mixed(), [Step("attention", "mqa", blocks="0")])
    assert found.spec.blocks[0].attention.kv_heads == 1  # type: ignore[union-attr]


def test_an_option_of_two_steps_is_named_as_it_was_written() -> None:
    with pytest.raises(SwapRefused, match=r"^--mlp swiglu \(its step --mlp gated\): these feed-forwards"):
        swapped(spec_of(CONFIGS["llama"]), steps_from(["mlp=swiglu"]))
    with pytest.raises(SwapRefused, match=r"^step 2 \(--mlp SwiGLU\): these feed-forwards"):
        swapped(spec_of(CONFIGS["llama"]), steps_from(["norm=layernorm", "mlp=SwiGLU"]))


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("heads", "8", "8 query heads"),
        ("mlp", "moe:4x2", "4 experts, copies of the old feed-forward, with 2 per token"),
        ("head_dim", "partial:28", "heads of 28 dimensions"),
        ("vocab", "multiple:64", "a multiple of 64"),
        ("norm", "rmsnorm", "RMSNorm"),
    ],
)
def test_what_a_value_gives(option: str, value: str, words: str) -> None:
    assert swap_for(option, value).gives_for(value) == words


def test_no_source_is_a_file_of_ours() -> None:
    assert not [each.source for each in all_swaps() if ".py" in each.source and "transformers" not in each.source]
    assert not [each.source for each in all_swaps() if each.source.startswith("own")]


def test_shapes_need_no_torch() -> None:
    code = (
        "import sys\n"
        "from gptkit.architectures import architecture_of\n"
        "from gptkit.architectures.presets import presets\n"
        "from gptkit.surgery.shapes import steps_from, swapped\n"
        "config = presets()['llama-2-7b'].config\n"
        "steps = steps_from(['attention=mqa', 'norm=layernorm', 'mlp=moe:4x2', 'layers=+1'])\n"
        "swapped(architecture_of(config).spec(config), steps)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
