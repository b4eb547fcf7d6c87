"""The shared readers: objects in a config.json, rotary positions by kind of layer and in part, composite configs."""

import dataclasses
import importlib
import json
from typing import Any

import msgspec
import pytest
import torch
import transformers
from helpers.covering import examples
from helpers.families import checkpoint_tensors
from hypothesis import given, settings
from hypothesis import strategies as st

from gptkit.architectures.base import TOKEN_IDS, Architecture
from gptkit.architectures.config import ConfigReader
from gptkit.architectures.families.gemma3 import GEMMA3 as GEMMA
from gptkit.architectures.families.gemma3 import KINDS
from gptkit.architectures.families.llama import LLAMA
from gptkit.architectures.rope import RotaryKind, read_rotaries, read_rotary, write_rotaries, write_rotary
from gptkit.components import LinearScaling, Rotary, YarnScaling
from gptkit.errors import ConfigError

TEXT = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 8,
    "max_position_embeddings": 512,
}
VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
VISION |= {"image_size": 28, "patch_size": 14}


def composite(**text: Any) -> transformers.Gemma3Config:
    return transformers.Gemma3Config(text_config={**TEXT, **text}, vision_config=VISION)


def saved(config: transformers.PreTrainedConfig) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return found


ROPES: dict[str, dict[str, Any]] = {
    "usual": {},
    "scaled": {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    },
    "other bases": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 2e4},
        }
    },
    "one kind alone": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 3e5}}},
    "of before": {
        "rope_theta": 7e5,
        "rope_local_base_freq": 2e4,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
}


@pytest.mark.parametrize("given_as", ["as given", "as saved"])
@pytest.mark.parametrize("name", ROPES)
def test_rotary_positions_by_kind_of_layer_are_transformers_own(name: str, given_as: str) -> None:
    """The frequencies of each layer's kind."""
    config = transformers.Gemma3TextConfig(**TEXT, **ROPES[name])
    theirs = transformers.models.gemma3.modeling_gemma3.Gemma3RotaryEmbedding(config)
    spec = GEMMA.spec({**TEXT, **ROPES[name]} if given_as == "as given" else saved(config))
    for layer, kind in enumerate(config.layer_types):
        rotary = spec.blocks[layer].attention.position
        assert isinstance(rotary, Rotary)
        factor = rotary.scaling.factor if isinstance(rotary.scaling, LinearScaling) else 1.0
        ours = 1 / (rotary.base ** (torch.arange(0, rotary.dim, 2, dtype=torch.float64) / rotary.dim)) / factor
        torch.testing.assert_close(ours.float(), getattr(theirs, f"{kind}_inv_freq"))
        assert spec.blocks[layer].attention.window == (8 if kind == "sliding_attention" else None)


def test_a_composite_config_is_read_as_its_text() -> None:
    """All of what transformers saves is accounted for, and what is not is named with where it stands."""
    config = saved(composite())
    assert config["model_type"] == "gemma3" and "hidden_size" not in config
    spec, unknown = GEMMA.spec_and_unknown(config)
    assert (spec, unknown) == (GEMMA.spec(config["text_config"]), [])
    config["text_config"]["softcap"] = 3
    config["text_config"]["rope_parameters"]["full_attention"]["stretch"] = 2
    config["towers"] = 1
    _, unknown = GEMMA.spec_and_unknown(config)
    assert unknown == ["towers", "text_config.softcap", "text_config.rope_parameters.full_attention.stretch"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": "wide"}, "text_config.hidden_size is 'wide'"),
        ({"is_encoder_decoder": True}, "text_config.is_encoder_decoder is True"),
        ({"layer_types": ["full_attention"]}, "text_config.layer_types"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": -1}}},
            "text_config.rope_parameters.full_attention.factor is -1",
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_parameters.rope_type is 'default'"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "yarn", "factor": 4.0, "truncate": False}}},
            "text_config.rope_parameters.sliding_attention.truncate is False",
        ),
    ],
)
def test_what_is_wrong_in_a_part_is_told_with_where_it_stands(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GEMMA.spec({"model_type": "gemma3", "text_config": {**TEXT, **change}})
    assert said in caught.value.message


def test_what_a_composite_config_says_beside_the_text_does_not_leave_with_it() -> None:
    config = {**saved(composite()), "eos_token_id": [1, 106]}
    spec = LLAMA.spec({**TEXT, "model_type": "llama", "num_hidden_layers": 2, "sliding_window": None})
    found = dataclasses.replace(GEMMA, read=LLAMA.read, write=LLAMA.write).export_config(
        spec, {**config, "text_config": {"foo": 1}}
    )
    assert found is not None
    assert found["foo"] == 1 and "vision_config" not in found and "text_config" not in found
    assert found["eos_token_id"] == [1, 106] and set(TOKEN_IDS) & found.keys()


def test_names_under_every_prefix_are_the_text_models() -> None:
    """What transformers saves of a composite model, and the names that its modules have in memory."""
    with torch.device("meta"):
        whole = transformers.Gemma3ForConditionalGeneration(composite())
        text = transformers.Gemma3ForCausalLM(composite().text_config)
    known = dict.fromkeys(text.state_dict())
    for names in (checkpoint_tensors(whole), whole.state_dict()):
        ours = {name: GEMMA.canonical_name(name, known, 6) for name in names}
        beside = {name for name in names if ours[name] not in known}
        assert {ours[name] for name in names if name not in beside} == set(known)
        assert beside
        assert all("vision_tower" in name or "projector" in name for name in beside)
        assert {GEMMA.carries(name, 6) for name in beside} == {("vision", name) for name in beside}


# --- in part ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [0.25, 0.4, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("family", ["Phi", "StableLm", "GPTNeoX"])
def test_the_part_of_a_head_that_turns_is_transformers_own(family: str, part: float) -> None:
    sizes = {"hidden_size": 160, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = getattr(transformers, f"{family}Config")(**sizes, partial_rotary_factor=part, num_hidden_layers=1)
    name = {"GPTNeoX": "gpt_neox"}.get(family, family.lower())
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    theirs = getattr(module, f"{family}RotaryEmbedding")(config)
    ours = read_rotary(ConfigReader(saved(config)), 40, 512, RotaryKind(part="partial_rotary_factor"))
    assert ours.dim == 2 * len(theirs.inv_freq)
    again = read_rotary(
        ConfigReader(write_rotary(ours, 40, RotaryKind(part="partial_rotary_factor"))),
        40,
        512,
        RotaryKind(part="partial_rotary_factor"),
    )
    assert again == ours


ROTARY = st.builds(
    Rotary,
    dim=st.integers(1, 32).map(lambda half: 2 * half),
    base=st.floats(100, 1e7),
    scaling=st.one_of(
        st.none(),
        st.builds(LinearScaling, factor=st.floats(0.5, 64)),
        st.builds(
            YarnScaling,
            factor=st.floats(1, 64),
            original_context=st.integers(1, 4096),
            attention_factor=st.floats(0.1, 4),
        ),
    ),
)


@settings(max_examples=examples(100), deadline=None)
@given(full=ROTARY, sliding=ROTARY)
def test_what_is_written_by_kind_is_read_again(full: Rotary, sliding: Rotary) -> None:
    both = {"full_attention": full, "sliding_attention": sliding}
    by_kind = {kind: msgspec.structs.replace(each, joined=True) for kind, each in both.items()}
    written = json.loads(json.dumps(write_rotaries(by_kind, 64)))
    kinds = {name: kind._replace(part="partial_rotary_factor") for name, kind in KINDS.items()}
    assert read_rotaries(ConfigReader(written), 64, 4096, kinds) == by_kind


# --- objects ----------------------------------------------------------------------------------------------------------


def test_fields_of_an_object_are_accounted_for_under_their_dotted_name() -> None:
    reader = ConfigReader({"a": {"b": 1, "c": {"d": 2, "e": 3}}, "f": None})
    inner = reader.inner("a")
    assert (inner.integer("b"), inner.inner("c").integer("d"), reader.inner("f").integer("g", 5)) == (1, 2, 5)
    assert {"a", "a.b", "a.c", "a.c.d", "f"} <= reader.used
    assert reader.unknown({}) == ["a.c.e"]
    with pytest.raises(ConfigError, match=r"a\.b is 1, expected an object or null"):
        inner.inner("b")


def test_the_parts_of_a_family_that_is_not_composite_are_itself() -> None:
    reader = ConfigReader({"text_config": 3})
    assert reader.part("text_config") is reader and reader.part("") is reader
    assert isinstance(GEMMA, Architecture)
