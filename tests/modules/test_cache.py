"""The cache: written in place or concatenated, the same bits as transformers', and memory that follows the tokens."""

import copy
import itertools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from helpers.covering import few
from helpers.families import (
    BLOOM,
    FALCON,
    GPT2,
    GROUPED,
    LLAMA,
    VOCAB,
    continued,
    decoder_from,
    randomised_reference,
    spec_of,
)

from gptkit.architectures import architecture_of
from gptkit.modules import Cache, Decoder
from gptkit.modules.cache import ROOM, LayerCache

# Heads of 32 and more, whose rows are whole cache lines in 16 bit too.
WIDE = {"hidden_size": 128, "num_attention_heads": 4}
CASES: dict[str, dict[str, Any]] = {
    "gpt2": {**GPT2, "n_embd": 128, "n_head": 2, "scale_attn_by_inverse_layer_idx": True},
    "gpt2-upcast": {**GPT2, "n_embd": 128, "n_head": 4, "reorder_and_upcast_attn": True},
    "llama": {**LLAMA, **WIDE, "head_dim": 64, "num_key_value_heads": 2},
    "llama-one-head": {**LLAMA, **WIDE, "num_key_value_heads": 1, "head_dim": 96},
    "mistral": {**LLAMA, **GROUPED, **WIDE, "model_type": "mistral", "sliding_window": 12},
    "qwen3": {**LLAMA, **GROUPED, **WIDE, "model_type": "qwen3", "head_dim": 128},
    "bloom": {**BLOOM, "hidden_size": 128, "n_head": 4},
    "falcon-7b": {**FALCON, **WIDE, "multi_query": True, "parallel_attn": True, "bias": False},
    "falcon-40b": {**FALCON, **WIDE, "num_kv_heads": 2, "new_decoder_architecture": True, "bias": True},
    "falcon-rw": {**FALCON, **WIDE, "multi_query": False, "parallel_attn": False, "alibi": True, "bias": True},
}


@few(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_decoding_in_place_is_transformers_to_the_bit(name: str, dtype: torch.dtype) -> None:
    """Past the room that was made, a padded batch included."""
    config = CASES[name]
    for attention in architecture_of(config).reference(spec_of(config)):
        reference = randomised_reference(config, dtype, attention)
        decoder = decoder_from(reference, config, attention)
        for mask in (torch.ones(1, 5, dtype=torch.long), torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])):
            ids = torch.randint(0, VOCAB, mask.shape, generator=torch.Generator().manual_seed(0))
            cache, past = Cache(decoder.spec), None
            with torch.inference_mode():
                for step in range(ROOM + 4):
                    theirs = continued(reference, ids, past, mask)
                    ours, past = decoder(ids, mask, cache=cache), theirs.past_key_values
                    assert torch.equal(ours[:, -1], theirs.logits[:, -1]), (attention, step)
                    ids = theirs.logits[:, -1:].argmax(-1)
                    mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)


def appended(cache: LayerCache, count: int, head_dim: int = 16) -> torch.Tensor:
    """Keys after `count` new tokens that are all of their position's value."""
    first = cache.keys.end - cache.keys.first
    new = (first + torch.arange(count, dtype=torch.float32))[None, None, :, None].expand(2, 3, count, head_dim)
    keys, values = cache.append(new, -new)
    assert torch.equal(keys, -values)
    return keys


@pytest.mark.parametrize("head_dim", [16, 10])
def test_tokens_lie_in_order(head_dim: int) -> None:
    cache, total = LayerCache(None), 0
    with torch.no_grad():
        for count in (5, 1, 1, ROOM, 1, 3 * ROOM, 2, 1):
            keys = appended(cache, count, head_dim)
            total += count
            assert keys.shape == (2, 3, total, head_dim)
            assert torch.equal(keys[0, 0, :, 0], torch.arange(float(total)))


def test_memory_is_made_once_in_so_many_steps() -> None:
    cache = LayerCache(None)
    with torch.inference_mode():
        places = [appended(cache, 1).data_ptr() for _ in range(4 * (ROOM + 1))]
    assert sum(a != b for a, b in itertools.pairwise(places)) <= 3


@pytest.mark.parametrize("window", [1, 2, 7, 40])
def test_a_window_bounds_the_memory(window: int) -> None:
    cache = LayerCache(window)
    with torch.no_grad():
        for step in range(100):
            new = torch.full((1, 1, 1, 16), float(step))
            keys, _ = cache.append(new, new)
            assert torch.equal(keys[0, 0, :, 0], torch.arange(max(0, step - window + 1), step + 1).float())
            assert cache.keys.memory is not None
            assert cache.keys.memory.shape[-2] <= window + ROOM


def test_what_was_handed_out_stays() -> None:
    cache = LayerCache(None)
    with torch.no_grad():
        handed_out = [appended(cache, 1) for _ in range(2 * ROOM)]
    for length, keys in enumerate(handed_out, start=1):
        assert torch.equal(keys[0, 0, :, 0], torch.arange(float(length)))


def test_a_deep_copy_goes_its_own_way() -> None:
    cache = LayerCache(None)
    with torch.no_grad():
        before = appended(cache, 3)
        other = copy.deepcopy(cache)
        cache.append(torch.full((2, 3, 1, 16), 7.0), torch.full((2, 3, 1, 16), 7.0))
        keys, _ = other.append(torch.full((2, 3, 1, 16), 9.0), torch.full((2, 3, 1, 16), 9.0))
    assert torch.equal(keys[:, :, :3], before)
    assert keys[0, 0, 3, 0] == 9


@pytest.fixture(scope="module")
def llama() -> Decoder:
    config = CASES["llama"]
    return decoder_from(randomised_reference(config), config)


MODES: dict[str, AbstractContextManager[Any]] = {
    "inference": torch.inference_mode(),
    "no gradients": torch.no_grad(),
    "gradients": nullcontext(),
}


@pytest.mark.parametrize("second", MODES)
@pytest.mark.parametrize("first", MODES)
def test_modes_may_change_between_steps(llama: Decoder, first: str, second: str) -> None:
    ids = torch.randint(0, VOCAB, (1, 9), generator=torch.Generator().manual_seed(0))
    cache, expected = Cache(llama.spec), Cache(llama.spec)
    for step in range(0, 9, 3):
        with MODES[second if step else first]:
            ours = llama(ids[:, step : step + 3], cache=cache)
        with torch.no_grad():
            theirs = llama(ids[:, step : step + 3], cache=expected)
        torch.testing.assert_close(ours.detach().clone(), theirs)


def test_gradients_pass_through_the_cache(llama: Decoder) -> None:
    ids = torch.randint(0, VOCAB, (1, 8), generator=torch.Generator().manual_seed(0))
    weight = llama.blocks[0].attention.k_proj.weight
    whole = torch.autograd.grad(llama(ids)[:, -1].sum(), weight)[0]
    cache = Cache(llama.spec)
    for step in range(8):
        logits = llama(ids[:, step : step + 1], cache=cache)
    torch.testing.assert_close(torch.autograd.grad(logits.sum(), weight)[0], whole, rtol=1e-3, atol=1e-4)
