"""What programs allocate for a cache: beside a simulation of vLLM's blocks, and what llama.cpp reports of itself."""

import math
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from shutil import copy

import pytest
from helpers.covering import few
from helpers.families import CONFIGS, save_hf
from hypothesis import example, given
from hypothesis import strategies as st

import gptkit
from gptkit.analysis.allocators import CachedLayer, allocated, in_llama_cpp, in_vllm, layers_of
from gptkit.analysis.costs import cache_bytes, works
from gptkit.architectures import ARCHITECTURES, architecture_of
from gptkit.architectures.gguf import gguf_keeps
from gptkit.architectures.presets import presets

MIB = 2**20
SAMPLE = Path(gptkit.__file__).parent / "samples" / "llama"


def preset(name):
    config = presets()[name].config
    family = architecture_of(config)
    return family.spec(config), family.name


def blocks_after(context: int, window: int | None, chunked: bool, block: int) -> int:
    """A table of blocks, token by token: one is taken where a token needs it, and given back once no later token sees
    any of its tokens.
    """
    held: set[int] = set()
    for token in range(context):
        held.add(token // block)
        first = 0
        if window is not None:
            following = token + 1
            first = following // window * window if chunked else max(0, following - window + 1)
        held = {each for each in held if (each + 1) * block > first}
    return len(held)


@given(
    context=st.integers(1, 200),
    window=st.none() | st.integers(1, 80),
    chunked=st.booleans(),
    left=st.integers(1, 64),
    number=st.integers(1, 5),
)
def test_blocks_of_one_kind_are_those_of_a_table(context, window, chunked, left, number) -> None:
    kept = CachedLayer(left, window, chunked and window is not None)
    held = blocks_after(context, window, kept.chunked, 16)
    assert in_vllm({kept: number}, context, 2, 3) == 3 * number * held * 16 * left * 2


@given(context=st.integers(1, 300), window=st.integers(1, 80), near=st.integers(1, 9), far=st.integers(1, 9))
@example(context=16, window=1, near=3, far=2)  # what is padded holds no block
def test_layers_of_two_kinds_are_in_groups_of_one_size(context, window, near, far) -> None:
    """Their pool hands out a block for as many layers as a group has, whether it has them or is padded."""
    held = in_vllm({CachedLayer(8, window): near, CachedLayer(8): far}, context, 2)
    fewest, most = sorted((near, far))
    size = most if most < 1.5 * fewest else fewest
    groups = {window: math.ceil(near / size), None: math.ceil(far / size)}
    blocks = {each: blocks_after(context, each, False, 16) for each in groups}
    assert held == sum(number * blocks[each] for each, number in groups.items()) * size * 16 * 8 * 2
    alone = in_vllm({CachedLayer(8, window): near}, context, 2) + in_vllm({CachedLayer(8): far}, context, 2)
    assert held >= alone
    padded = [each for each, number in ((window, near), (None, far)) if number % size]
    assert (held > alone) == any(blocks[each] for each in padded)


def test_pages_are_made_equal_by_longer_blocks_or_not_at_all() -> None:
    """A layer whose tokens leave half as much has blocks of twice as many tokens."""
    assert in_vllm({CachedLayer(16, 64): 4, CachedLayer(32): 4}, 1000, 2) == 4 * 16 * 32 * 2 * (
        blocks_after(1000, 64, False, 32) + blocks_after(1000, None, False, 16)
    )
    assert in_vllm({CachedLayer(16, 64): 4, CachedLayer(24): 4}, 1000, 2) is None
    # Without windows there are no groups.
    assert in_vllm({CachedLayer(16): 4, CachedLayer(24): 4}, 1000, 2) == 63 * 16 * 2 * 4 * (16 + 24)
    assert in_vllm({CachedLayer(16, state=5): 4}, 1000, 2) is None
    assert in_llama_cpp({CachedLayer(16, state=5): 4}, 1000) is None


@pytest.mark.parametrize(
    ("name", "context", "mib"),
    [
        ("llama-2-7b", 4096, 2048),  # "KV self size = 2048.00 MiB, K (f16): 1024.00 MiB, V (f16): 1024.00 MiB"
        ("llama-3-8b", 8192, 1024),  # "KV self size = 1024.00 MiB, K (f16): 512.00 MiB, V (f16): 512.00 MiB"
        ("llama-3-8b", 8000, 1024),  # padded
        ("llama-3-8b", 512, 64),  # "KV self size = 64.00 MiB"
    ],
)
def test_llama_cpp_says_so_of_itself(name: str, context: int, mib: int) -> None:
    spec, family = preset(name)
    assert allocated(spec, cache_bytes(spec, context), family).in_llama_cpp == mib * MIB


def test_layers_with_windows_are_apart_in_llama_cpp() -> None:
    """Gemma 2 9B: half of 42 layers see 4,096 tokens, which with a batch of 512 are 4,608 cells."""
    spec, family = preset("gemma-2-9b")
    each = 2 * 2 * 8 * 256  # keys and values in float16 of 8 heads
    assert allocated(spec, cache_bytes(spec, 8192), family).in_llama_cpp == 21 * each * (8192 + 4608)
    spec, family = preset("mistral-7b")  # which llama.cpp computes without its window
    assert allocated(spec, cache_bytes(spec, 8192), family).in_llama_cpp is None


@few(12)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_is_told_or_known_not_to_be(name: str) -> None:
    """Where windows give nothing back yet, both allocate what is needed, in whole blocks and cells."""
    config = CONFIGS[name]
    family = architecture_of(config)
    spec = family.spec(config)
    layers = layers_of(spec)
    left = sum(work.cached_per_token * number for _, work, number in works(spec))
    assert sum(layer.per_token * number for layer, number in layers.items()) == left
    found = allocated(spec, cache_bytes(spec, 16), family.name)
    assert found.in_llama_cpp in (None, left * 2 * 256)
    kinds = Counter((each.window, each.chunked) for each in layers)
    known = len(kinds) == 1 and spec.encoder is None and not any(each.state for each in layers)
    if known and min(each.window or 17 for each in layers) > 16:
        assert found.in_vllm == left * 2 * 16
    assert (found.in_vllm is not None) or not known


def test_llama_cpp_is_known_to_compute_most_families() -> None:
    told = [family.name for family in ARCHITECTURES.values() if gguf_keeps(family.name, windowed=False)]
    assert {"llama", "gpt2", "gemma3_text", "deepseek_v3", "qwen3_moe"} <= {*told}


REPORTED = {
    "llama": {},
    "gemma2": {"sliding_window": 100, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 100, "query_pre_attn_scalar": 16},
    "deepseek_v2": {},
    "deepseek_v3": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("context", [300, 1500])
@pytest.mark.parametrize("name", REPORTED)
def test_llama_cpp_reports_what_is_told(name: str, context: int, tmp_path) -> None:
    """Of layers that all see all, with windows, and of latents, as its own programs start it (swa_full=False)."""
    python = os.environ.get("GPTKIT_LLAMA_CPP_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import llama_cpp"], capture_output=True, check=False).returncode:
        pytest.skip("llama-cpp-python is not here")
    config = {**CONFIGS[name], "vocab_size": 512, "max_position_embeddings": 2048, **REPORTED[name]}
    save_hf(config, tmp_path / "model")
    for file in SAMPLE.glob("tokenizer*"):
        copy(file, tmp_path / "model")
    gptkit.convert(tmp_path / "model", tmp_path / "model.gguf", to="gguf")
    spec = architecture_of(config).spec(config)
    asked = f"import llama_cpp, sys; llama_cpp.Llama(sys.argv[1], n_ctx={context}, swa_full=False, verbose=True)"
    done = subprocess.run([python, "-c", asked, tmp_path / "model.gguf"], capture_output=True, text=True, check=True)
    sizes = [float(each) for each in re.findall(r"KV buffer size = +([0-9.]+) MiB", done.stderr)]
    told = allocated(spec, cache_bytes(spec, context), name).in_llama_cpp
    assert sum(sizes) == pytest.approx(told / MIB, abs=0.011)
