"""nanoGPT (github.com/karpathy/nanoGPT): the names and layouts of its ckpt.pt, and the trees that its GPT can hold.

It is GPT-2 with linear layers that lie [out, in], and with or without biases. What its model.py fixes: pre-norms with
eps 1e-5, a feed-forward of four times the width, a tied head. Its GELU is the exact one since it uses torch.nn.GELU;
before, it was GPT-2's tanh formula, and a checkpoint does not say which.

Source: nanoGPT, model.py (GPT, GPTConfig, GPT.from_pretrained) and train.py (what is saved).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ..components import Activation, FeedForward, LayerNorm, ModelSpec, differences, function_of, without_rounding
from ..errors import CannotExpress, ConfigError
from .base import BoundLeaf, Leaf, bind, collapse, qkv, short
from .gpt2 import ACTIVATION_NAMES, FUSED_BIAS, GPT2
from .layout import Layout

__all__ = ["ARGUMENTS", "HEAD", "LEAVES", "config_of", "expressed", "is_buffer", "spec_of"]

HEAD, EMBEDDING = "lm_head.weight", "transformer.wte.weight"
"""The head, which a checkpoint stores beside the embedding it is tied to."""

ARGUMENTS = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
"""The sizes among `model_args`."""

B, T = "blocks.{layer}.", "transformer.h.{layer}."

FUSED_WEIGHT = Layout("(part heads head_dim) hidden", split="part", parts=("1", "1", "1"))

LEAVES: tuple[Leaf, ...] = (
    Leaf(EMBEDDING, "embedding.weight"),
    Leaf("transformer.wpe.weight", "positions.weight"),
    Leaf(T + "ln_1.weight", B + "attention_norm.weight"),
    Leaf(T + "ln_1.bias", B + "attention_norm.bias"),
    Leaf(T + "attn.c_attn.weight", qkv("weight"), FUSED_WEIGHT),
    Leaf(T + "attn.c_attn.bias", qkv("bias"), FUSED_BIAS),
    Leaf(T + "attn.c_proj.weight", B + "attention.o_proj.weight"),
    Leaf(T + "attn.c_proj.bias", B + "attention.o_proj.bias"),
    Leaf(T + "ln_2.weight", B + "feed_forward_norm.weight"),
    Leaf(T + "ln_2.bias", B + "feed_forward_norm.bias"),
    Leaf(T + "mlp.c_fc.weight", B + "feed_forward.up_proj.weight"),
    Leaf(T + "mlp.c_fc.bias", B + "feed_forward.up_proj.bias"),
    Leaf(T + "mlp.c_proj.weight", B + "feed_forward.down_proj.weight"),
    Leaf(T + "mlp.c_proj.bias", B + "feed_forward.down_proj.bias"),
    Leaf("transformer.ln_f.weight", "final_norm.weight"),
    Leaf("transformer.ln_f.bias", "final_norm.bias"),
)

HINT = "gptkit's own format holds any tree: convert --to local"


def is_buffer(name: str) -> bool:
    """Whether a tensor of a checkpoint is the causal mask, which models of older torch versions keep."""
    return name.endswith((".attn.bias", ".attn.masked_bias"))


def config_of(arguments: Mapping[str, int], activation: Activation) -> dict[str, Any]:
    """A config.json for GPT-2 of these `model_args`. Ids of special tokens are GPT-2's where its vocabulary is."""
    end = 50256 if arguments["vocab_size"] > 50256 else None
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": arguments["vocab_size"],
        "n_positions": arguments["block_size"],
        "n_embd": arguments["n_embd"],
        "n_layer": arguments["n_layer"],
        "n_head": arguments["n_head"],
        "n_inner": None,
        "activation_function": ACTIVATION_NAMES[activation],
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": end,
        "eos_token_id": end,
    }


def spec_of(arguments: Mapping[str, int], activation: Activation, bias: bool) -> ModelSpec:
    """The tree of these `model_args`. Raises ConfigError for sizes that are none."""
    spec = GPT2.spec(config_of(arguments, activation))
    return spec if bias else _without_biases(spec)


def _without_biases(spec: ModelSpec) -> ModelSpec:
    def norm(found: Any) -> Any:
        return msgspec.structs.replace(found, bias=False) if isinstance(found, LayerNorm) else found

    blocks = tuple(
        block.replaced(
            attention_norm=norm(block.attention_norm),
            attention=msgspec.structs.replace(block.attention, qkv_bias=False, output_bias=False),
            feed_forward_norm=norm(block.feed_forward_norm),
            feed_forward=msgspec.structs.replace(block.feed_forward, up_bias=False, down_bias=False),
        )
        for block in spec.blocks
    )
    return msgspec.structs.replace(spec, blocks=blocks, final_norm=norm(spec.final_norm))


def expressed(spec: ModelSpec, activation: Activation) -> tuple[dict[str, Any], list[BoundLeaf]]:
    """A tree as `model_args` and the tensors of a checkpoint, for a model.py with that GELU.

    Raises:
        CannotExpress: nanoGPT's model is no such tree; the components in the way are listed.

    """
    first = spec.blocks[0]
    sizes = {
        "n_layer": len(spec.blocks),
        "n_head": first.attention.heads,
        "n_embd": spec.hidden_size,
        "block_size": spec.context_length or (spec.positions.length if spec.positions is not None else 0),
        "vocab_size": spec.vocab_size,
    }
    bias = first.attention.qkv_bias
    try:
        back = spec_of(sizes, activation, bias)
    except ConfigError as error:
        raise CannotExpress(f"nanoGPT cannot express this tree: {error.message}", HINT) from error
    found = differences(without_rounding(spec), without_rounding(back))
    if found:
        lines = [f"  {path}: {short(a)}; nanoGPT has {short(b)}" for path, a, b in collapse(found)]
        listed = "\n".join(lines[:12])
        raise CannotExpress(
            f"nanoGPT cannot express {len(lines)} of the tree's components:\n{listed}", _hint(spec, found, activation)
        )
    return {**sizes, "bias": bias, "dropout": 0.0}, bind("nanoGPT", LEAVES, spec)


def _hint(spec: ModelSpec, found: list[tuple[str, Any, Any]], activation: Activation) -> str:
    feed_forward = spec.blocks[0].feed_forward
    alone = all(path.endswith("feed_forward.activation") for path, _, _ in found)
    tanh = isinstance(feed_forward, FeedForward) and function_of(feed_forward.activation) == "gelu_tanh"
    if alone and activation == "gelu" and tanh:
        return "For a model.py with the tanh formula, as nanoGPT had it before torch.nn.GELU: --to nanogpt_tanh"
    return HINT
