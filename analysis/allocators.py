"""The memory that vLLM and llama.cpp allocate for a model's KV cache. This file needs no torch.

vLLM allocates blocks of 16 tokens. A layer with a sliding window frees blocks that no later token reads. Layers with
the same kind of cache form groups with an equal number of layers (the last one is padded). All groups share one pool of
blocks (v1/core/kv_cache_utils.py, get_kv_cache_groups; v1/core/single_type_kv_cache_manager.py, get_num_skipped_tokens;
v1/kv_cache_interface.py).

llama.cpp allocates the whole cache before the first token, in float16 by default. A sequence has one cell per token of
its context, rounded up to a multiple of 256. Layers with a sliding window have a cache of their own, with cells for the
window and a batch of 512 tokens, also rounded up. For latent attention, it stores the latents as keys and no values
(src/llama-context.cpp, src/llama-kv-cache.cpp and src/llama-kv-cache-iswa.cpp).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..architectures.gguf import gguf_keeps
from ..components import ModelSpec
from .costs import CacheSize, work_of
from .sizes import itemsize

_BLOCK = 16
"""The number of tokens in a block of vLLM, unless a backend needs another size (config/cache.py)."""
_PADDED = 256
"""llama.cpp pads contexts to a multiple of this number of tokens."""
_BATCH = 512
"""The number of tokens that llama.cpp computes at once (n_ubatch)."""
_FP16 = 2
_MUCH = 1.5
"""Decides how many layers a group of vLLM has. Call the most frequent kind of layer A and the rarest B. If A has at
least 1.5 times as many layers as B, a group has the number of layers of B, and otherwise that of A."""


@dataclass(frozen=True)
class CachedLayer:
    """The size of one layer's cache."""

    per_token: int  # the number of elements stored per token
    window: int | None = None  # only the last `window` tokens are stored; None for all
    chunked: bool = False  # only the tokens of the current chunk of `window` tokens are stored
    state: int = 0  # the number of elements stored once per sequence, such as a recurrent state


Layers = Mapping[CachedLayer, int]
"""The number of layers for every kind of cache."""


def layers_of(spec: ModelSpec) -> Layers:
    """Return how many of a model's layers have a cache of each size. Layers without a cache are left out."""
    layers: Counter[CachedLayer] = Counter()
    for block, number in Counter(spec.blocks).items():
        works = [work_of(operation) for operation in spec.block_operations(block)]
        cached = [work for work in works if work.cached_per_token]
        window = max((work.window for work in cached if work.window is not None), default=None)
        chunked = window is not None and any(work.chunked for work in works)
        state = sum(work.state for work in works)
        if cached or state:
            layers[CachedLayer(sum(work.cached_per_token for work in cached), window, chunked, state)] += number
    return layers


def in_vllm(layers: Layers, context: int, itemsize: int, batch: int = 1) -> int | None:
    """Return the bytes of the blocks that vLLM allocates for `batch` sequences of `context` tokens.

    The result is None if a layer has a recurrent state, or if the block size of one layer does not divide the largest
    block size.

    Args:
        layers: the caches of the model's layers -> the number of layers with this cache, as `layers_of` returns them.
        context: tokens per sequence.
        itemsize: the size in bytes of one cached number.
        batch: the number of sequences.
    """
    if any(layer.state for layer in layers):
        return None
    page = {layer: _BLOCK * layer.per_token * itemsize for layer in layers}
    if len({(layer.window, layer.chunked) for layer in layers}) <= 1:
        return batch * sum(number * page[layer] * _blocks(layer, context, _BLOCK) for layer, number in layers.items())
    largest = max(page.values())
    if any(largest % nbytes for nbytes in page.values()):
        return None
    fewest, most = min(layers.values()), max(layers.values())
    size = most if most < fewest * _MUCH else fewest
    blocks = sum(
        -(-number // size) * _blocks(layer, context, _BLOCK * largest // page[layer])
        for layer, number in layers.items()
    )
    return batch * size * largest * blocks


def _blocks(layer: CachedLayer, context: int, block: int) -> int:
    """Return the number of blocks that a layer uses after `context` tokens, without freed blocks outside of its window.

    `block` is the number of tokens per block.
    """
    skipped = 0
    if layer.window is not None:
        skipped = context // layer.window * layer.window if layer.chunked else max(0, context - layer.window + 1)
    return -(-context // block) - skipped // block


def in_llama_cpp(layers: Layers, context: int, batch: int = 1) -> int | None:
    """Return the bytes of the cache that llama.cpp allocates for `batch` sequences of `context` tokens.

    The result is None if a layer has a recurrent state.
    """
    if any(layer.state for layer in layers):
        return None
    most = _padded(context)
    cells = {layer: _padded(min(most, layer.window + _BATCH)) if layer.window else most for layer in layers}
    return batch * _FP16 * sum(number * layer.per_token * cells[layer] for layer, number in layers.items())


def _padded(tokens: int) -> int:
    return -(-tokens // _PADDED) * _PADDED


def allocated(spec: ModelSpec, size: CacheSize, family: str = "") -> CacheSize:
    """Return a copy of `size` in which `in_vllm` and `in_llama_cpp` are set.

    `in_llama_cpp` is None for a family that gptkit cannot write as GGUF, or whose sliding windows llama.cpp ignores.
    """
    if spec.encoder is not None:  # vLLM does not run such a model, and gptkit knows no llama.cpp architecture for it
        return size
    layers = layers_of(spec)
    known = gguf_keeps(family, any(layer.window is not None for layer in layers))
    return replace(
        size,
        in_vllm=in_vllm(layers, size.context, itemsize(size.dtype), size.batch),
        in_llama_cpp=in_llama_cpp(layers, size.context, size.batch) if known else None,
    )


def cached_numbers(layers: Layers, context: int) -> int:
    """Return the number of elements in transformers' cache after `context` tokens.

    For a layer with a window w, the cache has at most w - 1 tokens, because the next token is the last of its window.
    """
    tokens = {layer: context if layer.window is None else min(context, layer.window - 1) for layer in layers}
    return sum(number * (layer.per_token * tokens[layer] + layer.state) for layer, number in layers.items())
