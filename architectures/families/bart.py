"""BART (Lewis et al. 1910.13461): an encoder and a decoder with post-norm, position tables that start at their third
row, and a bias that is added to the logits.

Files of the class without a head lack this bias. transformers' class with a head then uses zeros.

Source: transformers models/bart/{configuration,modeling}_bart.py.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ...components import FeedForward, LayerNorm
from ..base import Leaf, leaves_of
from ..decoder import DecoderFamily
from ..draws import among
from ..encoder_decoder import GENERATION, OF_BOTH, EncoderDecoder
from ..fields import BIASED, SUM_NORMS, Field, is_scaled, root_of
from ..layout import Layout


def stack(
    name: str, positions: Mapping[str, Any] = MappingProxyType({"offset": 2}), tokens: int = 50265, **other: Any
) -> DecoderFamily:
    """Return the description of the encoder or the decoder of a family like BART.

    Args:
        name: "encoder" or "decoder".
        positions: values for fields of the position embeddings' component.
        tokens: the default size of the vocabulary.
        other: further fields of `DecoderFamily`.
    """
    encoder = name == "encoder"
    fixed = {
        **BIASED,
        "eps": 1e-5,
        "attention.causal": not encoder,
        "attention.lie": "as projected" if encoder else "as cached",
        "attention.softmax": "input",
        "final_norm": other.get("norms", SUM_NORMS) is not SUM_NORMS,
        **{f"positions.{field}": value for field, value in positions.items()},
    }
    usual: dict[str, Any] = {
        "fields": {
            "vocab_size": Field("vocab", tokens),
            "d_model": Field("hidden", 1024),
            f"{name}_layers": Field("layers", 12),
            f"{name}_attention_heads": Field("heads", 16),
            f"{name}_ffn_dim": Field("intermediate", 4096),
            "activation_function": Field("activation", "gelu"),
            "max_position_embeddings": Field("context", 1024),
            "scale_embedding": Field("embedding.multiplier", False, root_of("d_model", 1024), is_scaled),
            # If untied, the stacks have separate tables in transformers. gptkit refuses files with such tables.
            "tie_word_embeddings": Field("tied", True, draw=among(True)),
        },
        "norm": LayerNorm,
        "inner": FeedForward,
        "norms": SUM_NORMS,
        "rotary": None,
        "learned": True,
        "fixed": fixed,
    }
    return DecoderFamily(**{**usual, **other})


_STACKS = EncoderDecoder(stack("encoder"), stack("decoder"), first_norm=True, headless="BartModel")


def leaves(norms: str = "sum_norm", ends: Mapping[str, str] = MappingProxyType({})) -> tuple[Leaf, ...]:
    """Return the leaves (entries of the tensor table) of families like BART.

    Args:
        norms: the end of gptkit's names of a block's norms: "sum_norm" for post-norm, "norm" for pre-norm.
        ends: further modules of both stacks: names in files -> gptkit's names.
    """
    modules: dict[str, str] = {"model.shared": "embedding"}
    for name, shared in (("encoder", "encoder."), ("decoder", "")):
        top, b = f"model.{name}.", f"{shared}blocks.{{layer}}."
        t = top + "layers.{layer}."
        modules |= {top + "embed_positions": f"{shared}positions"}
        parts = {"self_attn": "attention"} | ({} if shared else {"encoder_attn": "cross_attention"})
        for theirs, ours in parts.items():
            modules |= {f"{t}{theirs}.{name}_proj": f"{b}{ours}.{name}_proj" for name in "kvq"}
            modules |= {f"{t}{theirs}.out_proj": f"{b}{ours}.o_proj"}
            modules |= {f"{t}{theirs}_layer_norm": f"{b}{ours}_{norms}"}
        modules |= {t + "fc1": b + "feed_forward.up_proj", t + "fc2": b + "feed_forward.down_proj"}
        modules |= {t + "final_layer_norm": f"{b}feed_forward_{norms}"}
        modules |= {top + theirs: shared + ours for theirs, ours in ends.items()}
    bias = Leaf("final_logits_bias", "head.bias", Layout("1 vocab", "(1 vocab)"), buffer=True)
    return (bias, *leaves_of(modules), Leaf("lm_head.weight", "head.weight"))


OF_BART: dict[str, Any] = {
    "config_aliases": {
        "d_model": ("hidden_size",),
        "encoder_attention_heads": ("num_attention_heads",),
        "encoder_layers": ("num_hidden_layers",),
    },
    "repeated": {f"model.{stack}.embed_tokens.weight": "model.shared.weight" for stack in ("encoder", "decoder")},
    "carried": {"unused": ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")},
    "dropped": ("model.encoder.version", "model.decoder.version"),
    "prefix": "model.",
    "irrelevant": {**GENERATION, "architectures": None},
}
"""Fields of `Architecture` that families like BART share."""

BART = _STACKS.architecture(
    "bart",
    "BartForConditionalGeneration",
    leaves(ends={"layernorm_embedding": "first_norm"}),
    released="2019-10",
    token_ids={"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1},
    refused=OF_BOTH,
    **OF_BART,
)
