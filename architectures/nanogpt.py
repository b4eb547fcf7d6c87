"""nanoGPT (github.com/karpathy/nanoGPT): the tensors of its ckpt.pt, and the models that it can express.

nanoGPT's model is GPT-2 with linear weights stored as [out, in], and with or without biases. Its model.py fixes
pre-norms with eps 1e-5, a feed-forward of four times the hidden size, and a tied head. Newer versions use
torch.nn.GELU, which is exact. Older ones had GPT-2's tanh formula. A checkpoint does not state the version.

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
"""The names of the head's and the embedding's weight. They are tied, and a checkpoint stores both."""

ARGUMENTS = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")  # the sizes among `model_args`

_FUSED_WEIGHT = Layout("(part heads head_dim) hidden", split="part", parts=("1", "1", "1"))


def _untransposed(leaf: Leaf) -> Leaf:
    """Return an entry of GPT-2's tensor table, changed so that its weight is stored as [out, in]."""
    if isinstance(leaf.shared, tuple):
        return replace(leaf, layout=FUSED_BIAS if leaf.checkpoint.endswith("bias") else _FUSED_WEIGHT)
    return replace(leaf, layout=IDENTITY)


LEAVES = tuple(_untransposed(leaf) for leaf in GPT2.leaves if leaf.checkpoint != HEAD)


def is_buffer(name: str) -> bool:
    """Return whether a tensor of a checkpoint is the causal mask, which models for older torch versions store."""
    return name.endswith((".attn.bias", ".attn.masked_bias"))


def config_of(arguments: Mapping[str, int], activation: Activation) -> dict[str, Any]:
    """Return GPT-2's config.json for a nanoGPT checkpoint.

    If the vocabulary contains GPT-2's end-of-text token, the config names it as the first and last token of texts.

    Args:
        arguments: the checkpoint's `model_args`.
        activation: the kind of GELU in model.py.
    """
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
    """Return the ModelSpec for a nanoGPT checkpoint. Raises ConfigError for impossible sizes.

    Args:
        arguments: the checkpoint's `model_args`.
        activation: the kind of GELU in model.py.
        bias: whether linears and norms have biases.
    """
    spec = GPT2.spec(config_of(arguments, activation))
    return spec if bias else without_biases(spec, {parameter.name for parameter in spec.parameters()})


@dataclass(frozen=True)
class _NanoGPT:
    """The format of nanoGPT as a target for conversions (`obstacles.Destination`).

    `activation` is the exact GELU, or the tanh formula of older versions of model.py.
    """

    activation: Activation
    owner = "nanoGPT"
    kinds = GPT2.kinds
    usual = GPT2.usual

    def arguments(self, spec: ModelSpec) -> dict[str, Any]:
        """Return the `model_args` of a nanoGPT checkpoint for a model."""
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
        """Return the ModelSpec that gptkit reads from a checkpoint with the `model_args` of this model.

        Raises CannotExpress, ConfigError.
        """
        arguments = self.arguments(spec)
        return spec_of(arguments, self.activation, arguments["bias"])

    def bind(self, spec: ModelSpec) -> list[BoundLeaf]:
        """Return which tensors a checkpoint has, and which parameters every tensor contains.

        Raises CannotExpress if a parameter has no name in nanoGPT.
        """
        return bind(self.owner, LEAVES, spec)


def expressed(spec: ModelSpec, activation: Activation) -> tuple[dict[str, Any], list[BoundLeaf]]:
    """Return what a nanoGPT checkpoint contains for a model: `model_args` and the tensors.

    Args:
        spec: the model.
        activation: the kind of GELU in the model.py that will read the checkpoint.

    Raises:
        CannotExpress: nanoGPT cannot compute the model. The message lists the components that prevent it.
    """
    target = _NanoGPT(activation)
    expression = express(target, spec, clear=("rounding",))
    if expression.tree is not None:
        return target.arguments(spec), target.bind(spec)
    if activation == "gelu" and express(_NanoGPT("gelu_new"), spec, clear=("rounding",)).tree is not None:
        raise expression.refusal(_TANH)
    raise expression.refusal()


_TANH = "For a model.py with the tanh formula, as nanoGPT had it before torch.nn.GELU: --to nanogpt_tanh"
