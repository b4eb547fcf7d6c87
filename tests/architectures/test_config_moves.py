"""A field that is read moves the tree: none is taken note of and then forgotten."""

from collections.abc import Iterator
from typing import Any

import pytest
from helpers.covering import few
from helpers.families import REPRESENTATIVES, VARIANTS, spec_of

from gptkit.architectures import ARCHITECTURES, BY_MODEL_TYPE
from gptkit.errors import ConfigError

OTHERS: tuple[Any, ...] = (1, 2, 3, 4, 8, 12, 48, 96, 0.5, 1.0, 1e-3, 2.5, True, False, None, "relu", "gelu")
OTHERS += ("rope", "softmax", "sigmoid", "average", "sum", "greedy", "group_limited_greedy")
MIXERS = ("linear_attention", "conv", "full_attention")
"""What may stand before a last layer of full attention."""
TYPES = ("sliding_attention", "full_attention")
SCALED = ({"rope_type": "yarn", "factor": 2.0}, {"rope_type": "proportional"})
"""Rotary positions under which fields beside them say something."""
SQUARE = [
    name for name, each in ARCHITECTURES.items() if getattr(getattr(each.read, "__self__", None), "square", False)
]
COMPARED = {
    (name, "head_dim"): "heads share out the width, and another value is refused"
    for name in ("falcon", "gpt_neox_japanese", *SQUARE)
}
COMPARED |= {("helium", name): "beside a head_dim" for name in ("hidden_size", "num_attention_heads")}
COMPARED |= {
    **dict.fromkeys(
        [("gpt_neo", name) for name in ("attention_layers", "num_layers", "num_hidden_layers")],
        "attention_types says it",
    )
}
COMPARED |= {("cohere2_moe", "rope_scaling"): "transformers looks at rope_parameters alone"}
COMPARED |= {("dbrx", "tie_word_embeddings"): "transformers' class refuses it"}
COMPARED |= {("zamba2", "tie_word_embeddings"): "blocks are shared only where embeddings are tied"}
COMPARED |= {("phimoe", "num_experts_per_tok"): "two, whatever is said"}
COMPARED |= {("mamba2", name): "heads share out so many times the width" for name in ("expand", "hidden_size")}
COMPARED |= {("mamba2", name): "heads share out so many times the width" for name in ("num_heads", "head_dim")}
ALIKE = ("mamba", "falcon_mamba", "mamba2", "jamba", "falcon_h1", "bamba")
COMPARED |= {(name, "mamba_d_head"): "as wide as others say" for name in ("bamba", "granitemoehybrid", "falcon_h1")}
COMPARED |= {(name, "layer_types"): "layers are what other fields say, or all alike" for name in ALIKE}
COMPARED |= {("phimoe", "partial_rotary_factor"): "whole heads turn"}
COMPARED |= {("bamba", "partial_rotary_factor"): "a half, whatever is said beside the rope parameters"}
COMPARED |= {("recurrent_gemma", "lru_width"): "as wide as the stream"}
COMPARED |= {("recurrent_gemma", "layer_types"): "the layer types that follow from block_types"}
COMPARED |= {
    ("recurrent_gemma", name): "nothing is scaled" for name in ("rope_scaling", "original_max_position_embeddings")
}
COMPARED |= {("rwkv", "attention_hidden_size"): "as wide as the stream", ("rwkv", "layer_types"): "recurrences"}
COMPARED |= {("modernbert", "head_dim"): "hidden_size over num_attention_heads"}
COMPARED |= {("marian", "decoder_vocab_size"): "as many as vocab_size"}
COMPARED |= {(name, "num_hidden_layers"): "as many as layer_types" for name in ("granitemoehybrid", "lfm2_moe")}
COMPARED |= {("zamba2", name): "made of layers_block_type" for name in ("layer_types", "hybrid_layer_ids")}
COMPARED |= {("zamba2", name): "made of other sizes" for name in ("head_dim", "attention_head_dim", "mamba_headdim")}
COMPARED |= {("zamba2", name): "made of other fields" for name in ("attention_hidden_size", "num_hidden_layers")}
COMPARED |= {("aria_text", "hidden_act"): "silu, which its routed experts have whatever is said"}
LATENT = ("youtu", "minicpm3", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "axk1")
COMPARED |= {
    (name, "num_attention_heads"): "as many as num_key_value_heads" for name in ("youtu", "glm4_moe_lite", "axk1")
}
COMPARED |= {(name, "num_key_value_heads"): "as many as num_attention_heads" for name in LATENT}
"""Fields that are read to be compared with what others say."""


def others(name: str, config: dict[str, Any]) -> Iterator[Any]:
    """Values that a field may have instead."""
    value = config.get(name)
    layers = config.get("num_hidden_layers", config.get("n_layer", config.get("num_layers", 1)))
    if isinstance(value, dict):
        yield from ({**value, key: other} for key in value for other in (0.25, 3.0, 1, None, "linear", "default"))
        inner = {name for each in value.values() if isinstance(each, dict) for name in each}
        yield from ({key: {**value[key], name: 40} for key in value} for name in inner)
    if name == "vocab_size_per_layer_input":
        yield from (101, 128)
    if isinstance(value, list):
        yield from ([each] * length for length in {layers, len(value)} for each in (0, 0.5, 1))
    if name == "time_step_limit":
        yield from ([0.0, 1.5], [0.1, 2.0])
    if name == "mlp_layer_types":
        yield from ([kind] * layers for kind in ("dense", "sparse"))
    if name == "layer_types":
        yield from ([kind] * layers for kind in TYPES)
    if name in ("layer_types", "layers_block_type"):
        length = len(value or range(layers))
        yield from ([*[kind] * (length - 1), "full_attention"] for kind in MIXERS)
        yield from ([*[kind] * (length - 1), "hybrid"] for kind in ("linear_attention", "hybrid"))
    if name == "block_types":
        yield from (["attention"], ["recurrent", "attention"])
    if name == "hybrid_override_pattern":
        yield from ("*", "*-", "M*")
    if name == "architectures":
        yield from (
            [each] for each in (ARCHITECTURES[config["model_type"]].hf_class, "BartModel", "MBartModel", "MarianModel")
        )
    if name == "attention_types":
        yield from ([[[kind], layers]] for kind in ("global", "local"))
    if name.startswith("rope_"):
        yield {"rope_type": "linear", "factor": 3.0}
        yield {kind: {"rope_type": "linear", "factor": 3.0} for kind in TYPES}
    yield from OTHERS


def read_names(family: str, config: dict[str, Any]) -> set[str]:
    """What the family's `read` asks a config for."""
    architecture = ARCHITECTURES[family]
    reader = architecture.reader(config)
    architecture.read(reader)
    return {name for name in reader.used if "." not in name}


NAMES = {
    family: sorted(
        set().union(*(read_names(family, each.config) for each in VARIANTS if each.family == family))
        - {"model_type", "text_config"}
    )
    for family in ARCHITECTURES
}


def moves(family: str, config: dict[str, Any], name: str) -> bool:
    """Whether some value of a field gives another tree than the config's own."""
    aliases = ARCHITECTURES[family].config_aliases
    spellings = {name} | set(aliases.get(name, ())) | {own for own, others in aliases.items() if name in others}
    bare = {key: value for key, value in config.items() if key not in spellings}
    scaled = () if "rope_parameters" in bare else ("rope_scaling", "rope_parameters")
    for rest in (bare, *({**bare, where: scaling} for where in scaled for scaling in SCALED)):
        trees = []
        for other in others(name, config):
            try:
                trees.append(spec_of({**rest, name: other}))
            except ConfigError:
                continue
        if any(tree != trees[0] for tree in trees):
            return True
    return False


@few(6)
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_field_that_is_read_moves_some_tree_of_the_family(family: str) -> None:
    configs = [each.config.get("text_config", each.config) for each in VARIANTS if each.family == family]
    configs = [each for each in configs if each.get("model_type") in BY_MODEL_TYPE]
    asked = {name: [each for each in configs if name in read_names(family, each)] for name in NAMES[family]}
    assert len(asked) > 8
    still = [name for name, where in asked.items() if not any(moves(family, each, name) for each in where)]
    assert [name for name in still if (family, name) not in COMPARED] == []


@pytest.mark.parametrize(("family", "name"), COMPARED)
def test_a_field_that_is_compared_is_refused_where_it_differs(family: str, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        spec_of({**REPRESENTATIVES[family].config, name: 6})
