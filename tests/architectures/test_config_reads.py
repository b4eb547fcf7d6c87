"""What transformers' code reads of a config, gptkit reads too, refuses, or says why it is nothing to it.

The names are taken from the installed source, so that one which a new version reads is found here and not by a user.
"""

import ast
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.covering import few
from helpers.families import REPRESENTATIVES, hf_config, randomised_reference, spec_of

from gptkit.architectures import ARCHITECTURES
from gptkit.components import Block
from gptkit.errors import ConfigError

SOURCE = Path(transformers.__file__).parent
SHARED = ("masking_utils.py", "cache_utils.py", "integrations/sdpa_attention.py", "integrations/moe.py")
ROPE = "modeling_rope_utils.py"
CONFIGS = ("config", "effective_config", "layer_config", "decoder_config", "text_config")
"""What the code calls a config, as a name of its own or as an attribute."""

NOT_OF_A_FILE = {
    "_attn_implementation": "chosen when a model is loaded; a file's is not taken over",
    "_experts_implementation": "chosen when a model is loaded; a file's is not taken over",
    "_is_quantized": "set by quantisers, which are refused",
    "moe_intermediate_size": "of expert classes that no family here uses",
    "n_routed_experts": "of expert classes that no family here uses",
    "number_of_conv_states": "of layers of types that are refused",
    "text_config": "which makes the file one of a composite model",
}


def is_config(node: ast.expr) -> bool:
    return (isinstance(node, ast.Name) and node.id in CONFIGS) or (
        isinstance(node, ast.Attribute) and node.attr in CONFIGS
    )


def names_read(path: Path) -> Iterator[str]:
    """Every X of config.X, getattr(config, "X") and hasattr(config, "X") in a file, but for methods."""
    for node in ast.walk(ast.parse(path.read_text())):
        name: Any = None
        if isinstance(node, ast.Attribute) and is_config(node.value):
            name = node.attr
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "hasattr")
            and is_config(node.args[0])
            and isinstance(node.args[1], ast.Constant)
        ):
            name = node.args[1].value
        if name is not None and not callable(getattr(transformers.PreTrainedConfig, name, None)):
            yield name


def read_by_transformers(family: str) -> list[str]:
    config_class = getattr(transformers, ARCHITECTURES[family].hf_config)
    reference = getattr(transformers, ARCHITECTURES[family].base_class or ARCHITECTURES[family].hf_class)
    modeling = SOURCE.joinpath(*reference.__module__.split(".")[1:]).with_suffix(".py")
    shared = (*SHARED, ROPE) if "ROPE_INIT_FUNCTIONS" in modeling.read_text() else SHARED
    found = {name for path in shared for name in names_read(SOURCE / path)}
    found |= {*names_read(modeling)} - of_others(config_class)
    methods = {name for name in found if callable(getattr(config_class, name, None))}
    return sorted(found - methods - NOT_OF_A_FILE.keys() - within(family))


def of_others(config_class: Any) -> set[str]:
    """Fields of the configs of towers beside the language model, which are in the same file."""
    there = [each for each in vars(sys.modules[config_class.__module__]).values() if dataclasses.is_dataclass(each)]
    own = {field.name for field in dataclasses.fields(config_class)}
    beside = [each for each in there if each.__module__ == config_class.__module__]
    return {field.name for each in beside for field in dataclasses.fields(each)} - own


def within(family: str) -> set[str]:
    """Fields of objects in a config, which transformers reads of objects of their own."""
    fields = getattr(getattr(ARCHITECTURES[family].read, "__self__", None), "fields", ())
    return {part for name in fields if "." in name for part in name.split(".")}


@few(6)
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_nothing_that_transformers_reads_is_called_unread(family: str) -> None:
    """Whatever it holds: the field is read, refused, or declared irrelevant with a reason."""
    architecture, config = ARCHITECTURES[family], REPRESENTATIVES[family].config
    names = read_by_transformers(family)
    assert len(names) > 15
    assert {"is_causal", "sliding_window", "layer_types", "attention_chunk_size", "vocab_size"} <= set(names)
    unread = []
    for name in names:
        for value in (None, False, True, 3, 0.5, ["chunked_attention"], {"rope_type": "default"}):
            try:
                _, unknown = architecture.spec_and_unknown({**config, name: value})
            except ConfigError:
                continue
            unread += {name} & {*unknown}
    assert sorted(set(unread)) == []


@few(2)
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_what_was_taken_for_irrelevant_is_of_training_or_output(family: str) -> None:
    """A field that the forward code reads may be irrelevant only for a reason that a forward pass without gradients
    gives, or where another value of it changes no bit of transformers' logits.
    """
    reasons = ARCHITECTURES[family].ignored
    given = {name: reasons[name] for name in read_by_transformers(family) if name in reasons}
    known = (
        "training",
        "generation",
        "output",
        "classification",
        "heads other",
        "label",
        "computed from",
        "stored dtype",
        "slices",
        "dense layers",
        "images",
    )
    config, ids = REPRESENTATIVES[family].config, torch.arange(12)[None]
    for name in (name for name, reason in given.items() if not any(word in reason for word in known)):
        said = getattr(hf_config(config), name)
        for dtype in (torch.float32, torch.bfloat16):
            with torch.inference_mode():
                first, other = (
                    randomised_reference({**config, name: value}, dtype, "eager")(ids).logits
                    for value in (said, not said if isinstance(said, bool) else 1)
                )
            assert torch.equal(first, other), name


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("is_causal", False),
        ("is_causal", None),
        ("attention_chunk_size", 4),
        ("kv_sharing_modes", ["reuse"]),
        ("layer_types", ["chunked_attention"] * 3),
        ("layer_types", ["full_attention"]),
    ],
)
def test_what_changes_transformers_logits_is_refused_by_name(family: str, name: str, value: Any) -> None:
    config = REPRESENTATIVES[family].config
    value = -4 if name == "attention_chunk_size" and name in config else value  # Llama 4 has chunks
    with pytest.raises(ConfigError, match=name):
        spec_of({**config, name: value})


@pytest.mark.parametrize("family", ["gpt2", "llama", "bloom", "falcon"])
def test_a_window_that_a_family_has_not_changes_transformers_decoding_and_is_refused(family: str) -> None:
    config = REPRESENTATIVES[family].config
    windowed = {**config, "sliding_window": 4}
    attention = ARCHITECTURES[family].reference(spec_of(config))[0]
    plain, other = (randomised_reference(each, attention=attention) for each in (config, windowed))
    ids = torch.arange(12)[None]
    with torch.inference_mode():
        assert torch.equal(plain(ids).logits, other(ids).logits)
        ahead = [model(ids, use_cache=True).past_key_values for model in (plain, other)]
        decoded = [m(ids[:, :1], past_key_values=past).logits for m, past in zip((plain, other), ahead, strict=True)]
    assert not torch.equal(*decoded)
    with pytest.raises(ConfigError, match="sliding_window"):
        spec_of(windowed)


def layer_type(block: Block) -> str:
    if block.mixer("shared") is not None:
        return "hybrid"
    if block.mixer("attention") is None:
        return "conv" if block.mixer("convolution") is not None else "linear_attention"
    chunked = getattr(block.attention, "chunked", False)
    return "full_attention" if block.attention.window is None else f"{'chunked' if chunked else 'sliding'}_attention"


@pytest.mark.parametrize("family", [family for family in ARCHITECTURES if family not in ("mistral", "nemotron_h")])
def test_layer_types_that_say_what_is_so_are_taken(family: str) -> None:
    config = REPRESENTATIVES[family].config
    spec = spec_of(config)
    types = [layer_type(block) for block in spec.blocks]
    assert spec_of({**config, "layer_types": types}) == spec
    if "layer_types" not in ARCHITECTURES[family].stated:
        unsaid = {name: value for name, value in config.items() if name != "layer_types"}
        assert spec_of({**unsaid, "layer_types": None, "is_causal": True}) == spec_of(unsaid)
    with pytest.raises(ConfigError, match="layer_types"):
        spec_of({**config, "layer_types": types[1:]})
