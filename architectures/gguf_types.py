"""The types and sizes that llama.cpp gives to tensors when it quantises a model.

Source: llama.cpp, src/llama-quant.cpp (tensor_allows_quantization, llama_tensor_get_type_impl, tensor_type_fallback),
for llama-quantize without an importance matrix and without options. The sizes do not include the header of a file,
which contains the vocabulary.
"""

from ..components import ModelSpec, Parameter
from ..errors import CannotExpress
from .ggml import TYPES
from .gguf_table import GGUF

FILE_TYPES = {"q8_0": "Q8_0", "q4_k_m": "Q4_K", "q4_0": "Q4_0"}
"""llama-quantize's names of file types -> the element type that most tensors of such a file have."""

BLOCKS = {quant.name: (quant.block, quant.nbytes) for quant in TYPES.values()}
"""ggml's element types -> the number of weights in a block, and the size of a block in bytes, with scales and
minima."""

_KNOWN = ("llama", "qwen2", "qwen3", "gpt2", "bloom", "falcon")
"""llama.cpp's architectures for which the element types here were compared with files that llama-quantize wrote."""

_NARROWER = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""Element types with blocks of 256 weights -> the type with blocks of 32 weights that llama.cpp uses instead if the
number of weights in a matrix row is not divisible by 256."""


def gguf_types(spec: ModelSpec, family: str, kind: str) -> list[tuple[Parameter, str]]:
    """Return all parameters of a model with the element types that they have in a quantised GGUF file.

    Queries, keys and values are listed separately. A file may store them as one tensor, with the same type and size.

    Args:
        spec: the model.
        family: the model's family.
        kind: the type of the file, a key of `FILE_TYPES`.

    Raises:
        CannotExpress: llama.cpp has no architecture for the family, or no type for the shape of a tensor.
    """
    name = next((row.name for row in GGUF.values() if family in row.written), "")
    latent = any(hasattr(node, "kv_rank") for node in spec.components())
    if name not in _KNOWN or latent:
        what = "latent attention" if latent else family or "a model without a transformers architecture"
        raise CannotExpress(
            f"gptkit does not know which quantisation types llama.cpp uses for the tensors of {what}",
            "Choose --dtype nf4, int8 or int4, which work for every model.",
        )
    return [(parameter, _type(parameter, spec, name, kind)) for parameter in spec.parameters()]


def _type(parameter: Parameter, spec: ModelSpec, name: str, kind: str) -> str:
    """Return the element type of a parameter in a quantised file.

    Tensors that llama.cpp's tensor_allows_quantization excludes are fp32: those of one dimension, positions and
    routers.

    Args:
        parameter: the parameter.
        spec: the model.
        name: llama.cpp's name of the architecture.
        kind: the type of the file, a key of `FILE_TYPES`.
    """
    if len(parameter.shape) < 2 or parameter.component in ("router", "positions"):
        return "F32"
    chosen, row = _wanted(parameter, spec, name, kind), parameter.shape[-1]
    if row % BLOCKS[chosen][0] == 0:
        return chosen
    if chosen in _NARROWER:
        return _NARROWER[chosen] if row % 32 == 0 else "F16"
    if chosen == "Q8_0":  # as convert_hf_to_gguf.py does; llama-quantize fails
        return "F16"
    raise CannotExpress(
        f"llama.cpp cannot store {parameter.name} as {chosen}: its rows have {row:,} weights, not a multiple "
        f"of {BLOCKS[chosen][0]}"
    )


def _wanted(parameter: Parameter, spec: ModelSpec, name: str, kind: str) -> str:
    """Return the element type that llama.cpp prefers for a parameter, before it checks the size of the rows.

    The arguments are those of `_type`.
    """
    role = ".".join(parameter.name.split(".")[-2:])
    usual, medium, layers, layer = FILE_TYPES[kind], kind == "q4_k_m", len(spec.blocks), parameter.layer or 0
    if role == "head.weight" or (role == "embedding.weight" and spec.tied):
        if name == "falcon" or parameter.shape[-1] % BLOCKS[usual][0]:
            return "Q8_0"
        return usual if usual == "Q8_0" else "Q6_K"
    more = medium and _gets_more_bits(layer, layers)
    eight = getattr(spec.blocks[layer].feed_forward, "experts", 1) == 8
    fused = any(leaf.checkpoint.endswith("attn_qkv.weight") for leaf in GGUF[name].leaves)
    if role == "v_proj.weight" or (fused and role in ("q_proj.weight", "k_proj.weight")):
        preferred = "Q6_K" if more else usual
        return "Q8_0" if eight else "Q5_K" if preferred == "Q4_K" and _is_70b(spec, name) else preferred
    if role == "k_proj.weight" and eight:
        return "Q8_0"
    if role == "o_proj.weight" and eight and medium:
        return "Q5_K"
    if role == "down_proj.weight" and name == "falcon" and medium:
        return "Q6_K" if layer < layers // 16 else "Q5_K" if more else usual
    return "Q6_K" if role == "down_proj.weight" and more else usual


def _gets_more_bits(layer: int, layers: int) -> bool:
    """Return whether llama.cpp stores some weights of a layer with more bits than those of other layers.

    These layers are the first eighth, the last eighth, and every third layer between them.
    """
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _is_70b(spec: ModelSpec, name: str) -> bool:
    """Return whether llama.cpp treats a model as LLM_TYPE_70B, which it recognises by the number of layers."""
    grouped = getattr(spec.blocks[0].attention, "group", 1) > 1
    return len(spec.blocks) == 80 and (name == "qwen2" or (name == "llama" and grouped))
