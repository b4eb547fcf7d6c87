"""llama2.c (github.com/karpathy/llama2.c): the tensors of its .bin files, and the models that these files can express.

A file has a header of seven sizes, and fp32 tensors without names. The tensors of one kind are stacked over the layers.
llama2.c's programs fix everything else: RMSNorm with eps 1e-5, RoPE of base 10000 on whole heads, SwiGLU, and no
biases. gptkit uses the tensor names of llama2.c's model.py, which are Meta's. Rows of wq and wk are in Meta's order, in
which RoPE rotates adjacent rows together.

Source: llama2.c, export.py (legacy_export, version1_export, version2_export), run.c, runq.c.
"""

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any

from ..components import Attention, GatedFeedForward, ModelSpec, RMSNorm, Rotary
from ..errors import CannotExpress
from .base import BoundLeaf, Leaf, bind, usual_layer
from .families.llama import LLAMA
from .layout import Layout, Shape
from .obstacles import Kinds, express

BASE, _EPS = 10000.0, 1e-5  # the base of RoPE and the eps of RMSNorm in run.c

_B, _T = "blocks.{layer}.", "layers.{layer}."


def _paired(heads: str) -> Layout:
    """Return the layout of query or key projections in which the two rows of a RoPE pair are adjacent.

    In gptkit's parameters, the two rows are row i and row i + head_dim / 2 of a head. `heads` is "heads" for queries
    and "kv_heads" for keys.
    """
    return Layout(f"({heads} half two) hidden", f"({heads} two half) hidden")


LEAVES: tuple[Leaf, ...] = (
    Leaf("tok_embeddings.weight", "embedding.weight"),
    Leaf(_T + "attention_norm.weight", _B + "attention_norm.weight"),
    Leaf(_T + "attention.wq.weight", _B + "attention.q_proj.weight", _paired("heads")),
    Leaf(_T + "attention.wk.weight", _B + "attention.k_proj.weight", _paired("kv_heads")),
    Leaf(_T + "attention.wv.weight", _B + "attention.v_proj.weight"),
    Leaf(_T + "attention.wo.weight", _B + "attention.o_proj.weight"),
    Leaf(_T + "ffn_norm.weight", _B + "feed_forward_norm.weight"),
    Leaf(_T + "feed_forward.w1.weight", _B + "feed_forward.gate_proj.weight"),
    Leaf(_T + "feed_forward.w2.weight", _B + "feed_forward.down_proj.weight"),
    Leaf(_T + "feed_forward.w3.weight", _B + "feed_forward.up_proj.weight"),
    Leaf("norm.weight", "final_norm.weight"),
    Leaf("output.weight", "head.weight"),
)

TABLES = ("freqs_cos", "freqs_sin")
"""RoPE's cosines and sines at every position, [max_seq_len, head_dim / 2]. They are not weights."""

_MATRICES = tuple(_T + name for name in ("attention.wq.weight", "attention.wk.weight", "attention.wv.weight",
                                       "attention.wo.weight", "feed_forward.w1.weight", "feed_forward.w2.weight",
                                       "feed_forward.w3.weight"))  # fmt: skip
_NORMS = (_T + "attention_norm.weight", _T + "ffn_norm.weight", "norm.weight")
QUANTISED = ("tok_embeddings.weight", *_MATRICES, "output.weight")
"""The tensors that files of version 2 store with 8 bits per weight. First come the bytes of a tensor, and then the
scales of its groups."""

_LEGACY = (
    "tok_embeddings.weight",
    _NORMS[0],
    *_MATRICES[:4],
    _NORMS[1],
    *_MATRICES[4:],
    _NORMS[2],
    *TABLES,
    "output.weight",
)
"""The tensors of a file of version 0, in order. A name with {layer} stands for the tensors of all layers."""


@dataclass(frozen=True)
class Sizes:
    """The seven sizes in the header of a file, in this order.

    `shared` says whether the head is tied to the embedding.
    """

    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    max_seq_len: int
    shared: bool = False

    @property
    def plausible(self) -> bool:
        """Whether a model can have these sizes. Callers check this before they allocate memory."""
        bounds = (2**20, 2**22, 2**14, 2**16, 2**16, 2**26, 2**26)
        return (
            all(0 < value <= most for value, most in zip(astuple(self)[:7], bounds, strict=True))
            and self.dim % self.n_heads == 0
            and self.n_heads % self.n_kv_heads == 0
            and self.head_dim % 2 == 0
        )

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    def shape(self, name: str) -> Shape:
        """Return the shape of the tensor with this name.

        For a tensor that is stacked over the layers, it is that of one layer.
        """
        dim, inner, kv_dim = self.dim, self.hidden_dim, self.n_kv_heads * self.head_dim
        if name in TABLES:
            return self.max_seq_len, self.head_dim // 2
        if name.endswith("norm.weight"):
            return (dim,)
        return {
            "tok_embeddings": (self.vocab_size, dim),
            "output": (self.vocab_size, dim),
            "wq": (dim, dim),
            "wk": (kv_dim, dim),
            "wv": (kv_dim, dim),
            "wo": (dim, dim),
            "w1": (inner, dim),
            "w2": (dim, inner),
            "w3": (inner, dim),
        }[name.removesuffix(".weight").split(".")[-1]]

    def stacked(self, version: int) -> Iterator[tuple[str, Shape, int]]:
        """Yield the tensors of a file in order, as (name template, shape of one layer, number of stacked layers)."""
        for name in (*_NORMS, *QUANTISED) if version else _LEGACY:
            if name != "output.weight" or not self.shared:
                yield name, self.shape(name), self.n_layers if "{layer}" in name else 1


def config_of(sizes: Sizes) -> dict[str, Any]:
    """Return a config.json of the llama family for the model in a file.

    It has the ids 1 and 2 for <s> and </s>, as llama2.c's programs do.
    """
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.dim,
        "intermediate_size": sizes.hidden_dim,
        "num_hidden_layers": sizes.n_layers,
        "num_attention_heads": sizes.n_heads,
        "num_key_value_heads": sizes.n_kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": sizes.max_seq_len,
        "rms_norm_eps": _EPS,
        "rope_theta": BASE,
        "tie_word_embeddings": sizes.shared,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
    }


def _sizes_of(spec: ModelSpec) -> Sizes:
    """Return the sizes of a model for the header of a file. Raises CannotExpress if no file can have these sizes."""
    _, attention, feed_forward = usual_layer(spec)
    if spec.context_length is None:
        raise CannotExpress("the model has no context length, which the llama2.c format needs")
    sizes = Sizes(
        dim=spec.hidden_size,
        hidden_dim=feed_forward.intermediate_size,
        n_layers=len(spec.blocks),
        n_heads=attention.heads,
        n_kv_heads=attention.kv_heads,
        vocab_size=spec.vocab_size,
        max_seq_len=spec.context_length,
        shared=spec.tied,
    )
    if not sizes.plausible:
        raise CannotExpress(
            f"the llama2.c format cannot store hidden size {sizes.dim} with {sizes.n_heads} heads"
            f" and context length {sizes.max_seq_len:,}"
        )
    return sizes


class _Llama2c:
    """The format of llama2.c as a target for conversions (`obstacles.Destination`)."""

    owner = "llama2.c"
    kinds: Kinds = frozenset({RMSNorm, Attention, GatedFeedForward, Rotary})
    usual = property(lambda self: LLAMA.usual)

    def back(self, spec: ModelSpec) -> ModelSpec:
        """Return the ModelSpec that gptkit reads from a file with the sizes of this model.

        Raises CannotExpress, ConfigError.
        """
        return LLAMA.spec(config_of(_sizes_of(spec)))

    def bind(self, spec: ModelSpec) -> list[BoundLeaf]:
        """Return which tensors a file has, and which parameters every tensor contains.

        Raises CannotExpress if a parameter has no name in llama2.c.
        """
        return bind(self.owner, LEAVES, spec)


def expressed(spec: ModelSpec) -> tuple[Sizes, list[BoundLeaf]]:
    """Return what a file contains for a model: the sizes in the header, and the tensors.

    Raises:
        CannotExpress: llama2.c cannot compute the model. The message lists the components that prevent it.
    """
    expression = express(_Llama2c(), spec, clear=("rounding",))
    if expression.tree is None:
        raise expression.refusal()
    return _sizes_of(spec), bind(_Llama2c.owner, LEAVES, spec)
