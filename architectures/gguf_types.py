"""Which type llama.cpp gives each tensor when it quantises a model, and the bytes that this takes.

Source: llama.cpp, src/llama-quant.cpp (tensor_allows_quantization, llama_tensor_get_type_impl, tensor_type_fallback),
as llama-quantize runs without an importance matrix and without options. A file has a header beside its tensors, with
the vocabulary, which is not counted here.
"""

from ..components import ModelSpec, Parameter
from ..errors import CannotExpress
from .ggml import TYPES
from .gguf_table import GGUF

FILE_TYPES = {"q8_0": "Q8_0", "q4_k_m": "Q4_K", "q4_0": "Q4_0"}
"""llama-quantize's names, each with the type that most of its tensors have."""

BLOCKS = {each.name: (each.block, each.nbytes) for each in TYPES.values()}
"""Weights of a block, which lie side by side in a row, and its bytes, scales and minima among them."""

_KNOWN = ("llama", "qwen2", "qwen3", "gpt2", "bloom", "falcon")
"""The architectures whose types were compared with what llama-quantize makes."""

_NARROWER = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""What stands in where rows are no multiple of 256: types whose blocks have 32 weights."""


def gguf_types(spec: ModelSpec, family: str, kind: str) -> list[tuple[Parameter, str]]:
    """The type of each of a tree's parameters in a file of `FILE_TYPES`. Queries, keys and values are apart here, which
    a file may hold in one tensor, of one type and as many bytes. Raises CannotExpress: llama.cpp has no architecture
    for the family, or gives a tensor of such a shape no type.
    """
    name = next((each.name for each in GGUF.values() if family in each.written), "")
    latent = any(hasattr(node, "kv_rank") for node in spec.components())
    if name not in _KNOWN or latent:
        what = "latent attention" if latent else family or "a model without a transformers architecture"
        raise CannotExpress(
            f"gptkit does not know which types llama.cpp uses for the tensors of {what}",
            "Choose --dtype nf4, int8 or int4, which work for every model.",
        )
    return [(each, _type(each, spec, name, kind)) for each in spec.parameters()]


def _type(parameter: Parameter, spec: ModelSpec, name: str, kind: str) -> str:
    """The type of a parameter in a file of llama.cpp's architecture `name`. What tensor_allows_quantization leaves
    alone is fp32 in the file that is quantised: what has one dimension, positions, routers.
    """
    if len(parameter.shape) < 2 or parameter.component in ("router", "positions"):
        return "F32"
    chosen, row = _wanted(parameter, spec, name, kind), parameter.shape[-1]
    if row % BLOCKS[chosen][0] == 0:
        return chosen
    if chosen in _NARROWER:
        return _NARROWER[chosen] if row % 32 == 0 else "F16"
    if chosen == "Q8_0":  # as convert_hf_to_gguf.py writes it; llama-quantize gives up
        return "F16"
    raise CannotExpress(
        f"llama.cpp cannot store {parameter.name} as {chosen}: its rows have {row:,} weights, not a multiple "
        f"of {BLOCKS[chosen][0]}"
    )


def _wanted(parameter: Parameter, spec: ModelSpec, name: str, kind: str) -> str:
    """The type by what a tensor is for and the layer it is in."""
    role = ".".join(parameter.name.split(".")[-2:])
    usual, medium, layers, layer = FILE_TYPES[kind], kind == "q4_k_m", len(spec.blocks), parameter.layer or 0
    if role == "head.weight" or (role == "embedding.weight" and spec.tied):
        if name == "falcon" or parameter.shape[-1] % BLOCKS[usual][0]:
            return "Q8_0"
        return usual if usual == "Q8_0" else "Q6_K"
    eighth = layers // 8  # the first and the last one of the layers, and every third between, get more bits
    more = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
    eight = getattr(spec.blocks[layer].feed_forward, "experts", 1) == 8
    fused = any(leaf.checkpoint.endswith("attn_qkv.weight") for leaf in GGUF[name].leaves)
    if role == "v_proj.weight" or (fused and role in ("q_proj.weight", "k_proj.weight")):
        found = "Q6_K" if medium and more else usual
        # What it calls LLM_TYPE_70B, by the number of layers.
        grouped = getattr(spec.blocks[0].attention, "group", 1) > 1
        large = layers == 80 and (name == "qwen2" or (name == "llama" and grouped))
        return "Q8_0" if eight else "Q5_K" if found == "Q4_K" and large else found
    if role == "k_proj.weight" and eight:
        return "Q8_0"
    if role == "o_proj.weight" and eight and medium:
        return "Q5_K"
    if role == "down_proj.weight" and medium:
        if name == "falcon":
            return "Q6_K" if layer < layers // 16 else "Q5_K" if more else usual
        return "Q6_K" if more else usual
    return usual
