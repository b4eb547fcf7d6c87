"""T5 (Raffel et al. 1910.10683): an encoder and a decoder with relative position biases, unscaled scores and RMSNorms.
v1.1 and FLAN have gated feed-forwards and an untied head. The original T5 has a tied head that reads scaled hidden
states.

transformers ties the head unless the files contain a separate one.

Source: transformers models/t5/{configuration,modeling}_t5.py.
"""

from typing import Any

from ...components import Block, Buckets, FeedForward, GatedFeedForward, ModelSpec, RelativeBias
from ...errors import CannotExpress
from ..base import Architecture, Leaf, leaves_of
from ..config import ConfigReader
from ..decoder import DecoderFamily
from ..draws import among
from ..encoder_decoder import GENERATION, OF_BOTH, EncoderDecoder
from ..fields import ACTIVATIONS, Field, name_of


def _decoder_layers(config: ConfigReader, name: str, default: int) -> int:
    """Return the number of decoder layers. The default is the number of encoder layers."""
    return config.layers("num_layers", default) if config.raw(name) is None else config.layers(name)


def _scale(config: ConfigReader, name: str, _: Any) -> float:
    """Return the factor of the hidden states before the head. By default, it is 1 unless the head is tied."""
    scaled = config.boolean(name, config.boolean("tie_word_embeddings", True))
    return float(config.integer("d_model", 512) ** -0.5) if scaled else 1.0


def _activation(config: ConfigReader, name: str, default: str) -> Any:
    """Return the activation that the config field `dense_act_fn` states, or else the field `name`.

    In the latter, the activation may have the prefix "gated-". With this prefix, gelu means its tanh approximation.
    """
    stated = config.string(name, default)
    gated, _, function = stated.rpartition("-")
    usual = "gelu_new" if stated == "gated-gelu" else function
    if gated not in ("", "gated"):
        raise config.fail(name, stated, "the name of an activation, with or without the prefix gated-")
    return config.choice("dense_act_fn", usual, ACTIVATIONS)


def _named(activation: Any, gated: bool) -> str:
    """Return the value of the field that `_activation` reads. Raises CannotExpress for a gated exact GELU."""
    name = "gelu" if gated and activation == "gelu_new" else name_of(activation)
    if gated and activation == "gelu":
        raise CannotExpress(
            'T5 cannot express a gated feed-forward with exact GELU: its "gated-gelu" means the tanh approximation'
        )
    return f"gated-{name}" if gated else name


def _stack(gated: bool, both: bool) -> DecoderFamily:
    """Return the description of the encoder or the decoder. With `both`, attention is bidirectional."""
    return DecoderFamily(
        {
            "vocab_size": Field("vocab", 32128),
            "d_model": Field("hidden", 512),
            "d_kv": Field("head_dim", 64),
            "d_ff": Field("intermediate", 2048),
            **(
                {"num_layers": Field("layers", 6)}
                if both
                else {"num_decoder_layers": Field("layers", 6, _decoder_layers)}
            ),
            "num_heads": Field("heads", 8),
            "relative_attention_num_buckets": Field("position.buckets", 32, draw=among(4, 7, 13, 32)),
            "relative_attention_max_distance": Field("position.furthest", 128, draw=among(20, 50)),
            "layer_norm_epsilon": Field("eps", 1e-6),
            "feed_forward_proj": Field(
                "activation",
                "relu",
                _activation,
                lambda activation: _named(activation, gated),
                draw=among("gated-gelu", "gated-silu") if gated else among("relu", "gelu"),
            ),
            "n_positions": Field("context"),
            "tie_word_embeddings": Field("tied", True),
            "scale_decoder_outputs": Field(
                "head.multiplier", 1.0, _scale, lambda factor: factor != 1, draw=among(True, False)
            ),
        },
        inner=GatedFeedForward if gated else FeedForward,
        fixed={
            "attention.scale": 1.0,
            "attention.causal": not both,
            "attention.lie": "as projected" if both else "as cached",
            "attention.softmax": "input",
            "attention.position": lambda values: Buckets(
                buckets=values["position.buckets"], furthest=values["position.furthest"], both=both
            ),
            "head.scaling": "multiply states",
        },
        rotary=None,
    )


_STACKS = {gated: EncoderDecoder(_stack(gated, True), _stack(gated, False)) for gated in (False, True)}


def _read(config: ConfigReader) -> ModelSpec:
    """Return the ModelSpec that a config.json describes."""
    gated = config.string("feed_forward_proj", "relu").startswith("gated-")
    return _STACKS[config.boolean("is_gated_act", gated)].read(config)


def _write(spec: ModelSpec) -> dict[str, Any]:
    """Return the config fields that describe a model."""
    return _STACKS[isinstance(spec.blocks[0].feed_forward, GatedFeedForward)].write(spec)


def _is_gated(block: Block) -> bool:
    """Return whether a layer's feed-forward is gated."""
    return isinstance(block.mixer("feed_forward"), GatedFeedForward)


def _layers(stack: str, shared: str, parts: tuple[str, ...]) -> tuple[Leaf, ...]:
    """Return the leaves (entries of the tensor table) of a stack: the encoder or the decoder.

    Args:
        stack: the prefix of its names in checkpoints.
        shared: the prefix of gptkit's names.
        parts: the sub-layers of a layer. Checkpoints number them in this order.
    """
    leaves: tuple[Leaf, ...] = ()
    names = {"attention": "SelfAttention", "cross_attention": "EncDecAttention"}
    for index, part in enumerate(parts):
        theirs, ours = f"{stack}.block.{{layer}}.layer.{index}.", f"{shared}blocks.{{layer}}.{part}"
        if part == "feed_forward":
            theirs_wi = f"{theirs}DenseReluDense.wi"
            leaves += leaves_of({theirs_wi: f"{ours}.up_proj"}, lambda block: not _is_gated(block))
            gated = {f"{theirs_wi}_0": f"{ours}.gate_proj", f"{theirs_wi}_1": f"{ours}.up_proj"}
            leaves += leaves_of(gated, _is_gated)
            leaves += leaves_of({f"{theirs}DenseReluDense.wo": f"{ours}.down_proj"})
        else:
            leaves += leaves_of({f"{theirs}{names[part]}.{name}": f"{ours}.{name}_proj" for name in "qkvo"})
            if part == "attention":  # only the first layer stores it, and all layers use it
                name = f"{stack}.block.0.layer.{index}.SelfAttention.relative_attention_bias"
                leaves += leaves_of({name: f"{shared}relative_bias"})
        leaves += leaves_of({f"{theirs}layer_norm": f"{ours}_norm"})
    return (*leaves, *leaves_of({f"{stack}.final_layer_norm": f"{shared}final_norm"}))


T5 = Architecture(
    name="t5",
    model_types=("t5",),
    hf_class="T5ForConditionalGeneration",
    hf_config="T5Config",
    kinds=_STACKS[False].kinds | _STACKS[True].kinds | {Buckets, RelativeBias},
    read=_read,
    write=_write,
    draw=lambda chosen: _STACKS[chosen.choice((True, False))].draw(chosen),
    leaves=(
        *leaves_of({"shared": "embedding"}),
        *_layers("encoder", "encoder.", ("attention", "feed_forward")),
        *_layers("decoder", "", ("attention", "cross_attention", "feed_forward")),
        *leaves_of({"lm_head": "head"}),
    ),
    released="2019-10",
    own_head=lambda spec: spec.tied and spec.has_head().multiplier == 1,
    token_ids={"pad_token_id": 0, "eos_token_id": 1},
    config_aliases={
        "d_model": ("hidden_size",),
        "num_heads": ("num_attention_heads",),
        "num_layers": ("num_hidden_layers",),
        "d_kv": ("head_dim",),
    },
    repeated={"encoder.embed_tokens.weight": "shared.weight", "decoder.embed_tokens.weight": "shared.weight"},
    carried={
        "unused": (
            "encoder.embed_tokens.weight",
            "decoder.embed_tokens.weight",
            "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
        )
    },
    irrelevant={**GENERATION, "output_past": "output format"},
    refused=OF_BOTH,
)
