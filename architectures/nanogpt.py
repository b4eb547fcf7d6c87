"""nanoGPT (github.com/karpathy/nanoGPT): the names and layouts of its ckpt.pt, and the trees that its GPT can hold.

It is GPT-2 with linear layers that lie [out, in], and with or without biases. What its model.py fixes: pre-norms with
eps 1e-5, a feed-forward of four times the width, a tied head. Its GELU is the exact one since it uses torch.nn.GELU;
before, it was GPT-2's tanh formula, and a checkpoint does not say which.

Source: nanoGPT, model.py (GPT, GPTConfig, GPT.from_pretrained) and train.py (what is saved).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..components import Activation, ModelSpec
from .base import BoundLeaf, Leaf, bind, usual_layer
from .families.gpt2 import FUSED_BIAS, GPT2
from .fields import name_of
from .layout import IDENTITY, Layout
from .obstacles import express, without_biases

HEAD, EMBEDDING = "lm_head.weight", "transformer.wte.weight"
"""The head, which a checkpoint stores beside the embedding it is tied to."""

ARGUMENTS = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")  # the sizes among `model_args`

_FUSED_WEIGHT = Layout("(part heads head_dim) hidden", split="part", parts=("1", "1", "1"))


def _untransposed(leaf: Leaf) -> Leaf:
    """GPT-2's leaf with its weight [out, in]."""
    if isinstance(leaf.shared, tuple):
        return replace(leaf, layout=FUSED_BIAS if leaf.checkpoint.endswith("bias") else _FUSED_WEIGHT)
    return replace(leaf, layout=IDENTITY)


LEAVES = tuple(_untransposed(leaf) for leaf in GPT2.leaves if leaf.checkpoint != HEAD)


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
        "activation_function": name_of(activation),
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": end,
        "eos_token_id": end,
    }


def spec_of(arguments: Mapping[str, int], activation: Activation, bias: bool) -> ModelSpec:
    """The tree of these `model_args`. Raises ConfigError for sizes that are none."""
    spec = GPT2.spec(config_of(arguments, activation))
    return spec if bias else without_biases(spec, {parameter.name for parameter in spec.parameters()})


@dataclass(frozen=True)
class _NanoGPT:
    """A model.py with one GELU or the other, as what may hold a tree: see `obstacles.Target`."""

    activation: Activation
    owner = "nanoGPT"
    kinds = GPT2.kinds
    usual = GPT2.usual

    def arguments(self, spec: ModelSpec) -> dict[str, Any]:
        """A tree as `model_args`."""
        _, attention, _ = usual_layer(spec)
        return {
            "n_layer": len(spec.blocks),
            "n_head": attention.heads,
            "n_embd": spec.hidden_size,
            "block_size": spec.context_length or (spec.positions.length if spec.positions is not None else 0),
            "vocab_size": spec.vocab_size,
            "bias": attention.qkv_bias,
            "dropout": 0.0,
        }

    def back(self, spec: ModelSpec) -> ModelSpec:
        """The tree of a checkpoint with this one's `model_args`. Raises CannotExpress, ConfigError."""
        arguments = self.arguments(spec)
        return spec_of(arguments, self.activation, arguments["bias"])

    def bind(self, spec: ModelSpec) -> list[BoundLeaf]:
        """The tensors of a checkpoint. Raises CannotExpress: one has no name."""
        return bind(self.owner, LEAVES, spec)


def expressed(spec: ModelSpec, activation: Activation) -> tuple[dict[str, Any], list[BoundLeaf]]:
    """A tree as `model_args` and the tensors of a checkpoint, for a model.py with that GELU. Raises CannotExpress:
    nanoGPT's model is no such tree; the components in the way are listed.
    """
    target = _NanoGPT(activation)
    found = express(target, spec, clear=("rounding",))
    if found.found is not None:
        return target.arguments(spec), target.bind(spec)
    if activation == "gelu" and express(_NanoGPT("gelu_new"), spec, clear=("rounding",)).found is not None:
        raise found.refusal(_TANH)
    raise found.refusal()


_TANH = "For a model.py with the tanh formula, as nanoGPT had it before torch.nn.GELU: --to nanogpt_tanh"
