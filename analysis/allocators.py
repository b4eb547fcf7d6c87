"""What the programs that run a model take for its cache, each by its own way to lay it out. No torch.

vLLM hands out blocks of 16 tokens. A layer with a window gives blocks back that no later token looks into. Layers that
keep the same are in groups of one size, padded, which draw from one pool of blocks (v1/core/kv_cache_utils.py,
get_kv_cache_groups; v1/core/single_type_kv_cache_manager.py, get_num_skipped_tokens; v1/kv_cache_interface.py).

llama.cpp makes the whole cache before the first token, in float16 unless it is told otherwise: of every sequence as
many cells as its context padded to 256, and in layers with a window, which are apart, those of the window and of a
batch of 512 tokens, padded too; of latents keys alone (src/llama-context.cpp, src/llama-kv-cache.cpp and
src/llama-kv-cache-iswa.cpp).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..architectures.gguf import gguf_keeps
from ..components import ModelSpec
from .costs import CacheSize, work_of
from .sizes import itemsize

_BLOCK = 16
"""Tokens of a block in vLLM, where no backend asks for others (config/cache.py)."""
_PADDED = 256
"""Tokens that contexts are padded to in llama.cpp."""
_BATCH = 512
"""Tokens that llama.cpp computes at once (n_ubatch)."""
_FP16 = 2
_MUCH = 1.5
"""How many times as many layers one kind has as another before vLLM takes the smaller number for a group's size."""


@dataclass(frozen=True)
class CachedLayer:
    """What a layer keeps: numbers that every token leaves, and of which tokens: of the last `window`, or `chunked` of
    those of its chunk. state: numbers that are there once for a sequence.
    """

    left: int
    window: int | None = None
    chunked: bool = False
    state: int = 0


Layers = Mapping[CachedLayer, int]
"""What layers keep, and how many of them the same."""


def layers_of(spec: ModelSpec) -> Layers:
    """Those of a tree that keep anything."""
    found: Counter[CachedLayer] = Counter()
    for block, number in Counter(spec.blocks).items():
        works = [work_of(each) for each in spec.block_operations(block)]
        kept = [work for work in works if work.left]
        window = max((work.window for work in kept if work.window is not None), default=None)
        chunked = window is not None and any(work.chunked for work in works)
        state = sum(work.state for work in works)
        if kept or state:
            found[CachedLayer(sum(work.left for work in kept), window, chunked, state)] += number
    return found


def in_vllm(layers: Layers, context: int, bytes_each: int, batch: int = 1) -> int | None:
    """Bytes of the blocks that sequences of `context` tokens hold; None of a state, and of layers whose pages vLLM
    cannot make equal.
    """
    if any(each.state for each in layers):
        return None
    page = {each: _BLOCK * each.left * bytes_each for each in layers}
    if len({(each.window, each.chunked) for each in layers}) <= 1:
        return batch * sum(number * page[each] * _blocks(each, context, _BLOCK) for each, number in layers.items())
    largest = max(page.values())
    if any(largest % nbytes for nbytes in page.values()):
        return None
    fewest, most = min(layers.values()), max(layers.values())
    size = most if most < fewest * _MUCH else fewest
    held = sum(
        -(-number // size) * _blocks(each, context, _BLOCK * largest // page[each]) for each, number in layers.items()
    )
    return batch * size * largest * held


def _blocks(kept: CachedLayer, context: int, block: int) -> int:
    """Blocks that a sequence holds after so many tokens: those before what the next one looks at are given back."""
    skipped = 0
    if kept.window is not None:
        skipped = context // kept.window * kept.window if kept.chunked else max(0, context - kept.window + 1)
    return -(-context // block) - skipped // block


def in_llama_cpp(layers: Layers, context: int, batch: int = 1) -> int | None:
    """Bytes of the cache that is made for sequences of `context` tokens; None of a state."""
    if any(each.state for each in layers):
        return None
    cells = _padded(context)
    near = {each: _padded(min(cells, each.window + _BATCH)) if each.window else cells for each in layers}
    return batch * _FP16 * sum(number * each.left * near[each] for each, number in layers.items())


def _padded(tokens: int) -> int:
    return -(-tokens // _PADDED) * _PADDED


def allocated(spec: ModelSpec, size: CacheSize, family: str = "") -> CacheSize:
    """The cache of a tree with what vLLM and llama.cpp allocate for it; the latter of families that it is known to have
    an architecture for, and no windows that it would not see.
    """
    if spec.encoder is not None:  # vLLM runs none such, and no architecture of llama.cpp's is known here for one
        return size
    layers = layers_of(spec)
    known = gguf_keeps(family, any(each.window is not None for each in layers))
    return replace(
        size,
        in_vllm=in_vllm(layers, size.context, itemsize(size.dtype), size.batch),
        in_llama_cpp=in_llama_cpp(layers, size.context, size.batch) if known else None,
    )


def held(layers: Layers, context: int) -> int:
    """Numbers that are needed after so many tokens, and that transformers' cache holds: of a window all but one."""
    seen = {each: context if each.window is None else min(context, each.window - 1) for each in layers}
    return sum(number * (each.left * seen[each] + each.state) for each, number in layers.items())
