"""Random legal configs against transformers: read, computed to the bit, written and written back, verified.

A few of every family here, and 300 of each in `make test-slow`. Families draw them: `Architecture.drawn`.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.covering import few, rest_slow
from helpers.families import (
    VOCAB,
    continued,
    decoder_from,
    has_cache,
    hf_config,
    randomised_reference,
    save_hf,
    spec_of,
)
from torch import Tensor

import gptkit
from gptkit.architectures import ARCHITECTURES
from gptkit.architectures.base import Architecture
from gptkit.architectures.draws import Config
from gptkit.modules import Cache, Decoder
from gptkit.parity.outputs import computed_rightly, outputs_of
from gptkit.parity.probe import ProbeBatch
from gptkit.parity.sides import begin_anew
from gptkit.parity.verify import verify

FEW, MANY, APIECE = 1, 300, 15
families = pytest.mark.parametrize("family", ARCHITECTURES)


def drawn(family: str, number: int) -> Config:
    """The config of that number, always the same."""
    return ARCHITECTURES[family].drawn(number)


def obeys_the_law(family: str, number: int) -> bool:
    """Return whether transformers takes a drawn config, and the config that is written of its tree is read as it."""
    config, definition = drawn(family, number), ARCHITECTURES[family]
    hf_config(config)
    spec = spec_of(config)
    return definition.spec(definition.config_for(spec)) == spec


@families
def test_a_drawn_config_is_read_and_written_back(family: str) -> None:
    assert [number for number in range(8) if not obeys_the_law(family, number)] == []


@pytest.mark.slow
@families
def test_300_drawn_configs_are_read_and_written_back(family: str) -> None:
    assert [number for number in range(MANY) if not obeys_the_law(family, number)] == []


def padded(ids: Tensor, chosen: random.Random) -> Tensor | None:
    """A mask with padding on one side of some rows, or none."""
    side = chosen.choice(("none", "left", "right"))
    if side == "none" or ids.shape[1] == 1:
        return None
    mask = torch.ones_like(ids)
    for row in range(1, len(ids)):
        count = chosen.randint(1, ids.shape[1] - 1)
        mask[row, slice(count) if side == "left" else slice(-count, None)] = 0
    return mask


def tokens(chosen: random.Random, batch: int, length: int) -> Tensor:
    return torch.tensor([[chosen.randrange(VOCAB) for _ in range(length)] for _ in range(batch)])


def prefill(reference: Any, decoder: Decoder, chosen: random.Random, family: Architecture) -> bool:
    """Whether the logits of a batch, padded or not, are the same to the bit."""
    ids = tokens(chosen, chosen.choice((1, 3)), chosen.choice((1, 2, 5, 9, 17, 33, 70)))
    mask = padded(ids, chosen)
    if not computed_rightly(family, ProbeBatch("", ids, mask)):
        ids, mask = ids[:1], None
    # A length below every original context forgets longer ones.
    outputs_of(reference, ProbeBatch("", torch.zeros(1, 1, dtype=torch.long)))
    theirs, ours = (outputs_of(model, ProbeBatch("", ids, mask)) for model in (reference, decoder))
    if mask is not None:
        theirs, ours = theirs[mask.bool()], ours[mask.bool()]
    assert bool(theirs.isfinite().all())
    return torch.equal(ours, theirs)


def decoding(reference: Any, decoder: Decoder, chosen: random.Random, family: Architecture) -> bool:
    """Whether six tokens that are decoded from a cache have the same logits to the bit."""
    ids, past, cache = tokens(chosen, chosen.choice((1, 2)), chosen.choice((1, 3, 7, 20))), None, Cache(decoder.spec)
    ids = ids[:1] if family.wrong_batches else ids
    mask = torch.ones_like(ids)
    if len(ids) > 1:
        mask[1, : ids.shape[1] // 3] = 0
    begin_anew(reference, family)
    same = []
    for _ in range(6):
        outputs = continued(reference, ids, past, mask)
        ours, past = decoder(ids, mask, cache=cache), outputs.past_key_values
        same.append(torch.equal(ours[:, -1], outputs.logits[:, -1]))
        ids = tokens(chosen, len(ids), 1)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
    return all(same)


def computed(config: Config, number: int) -> list[str]:
    """What of a config's logits is not transformers' to the bit, on weights and tokens of that number."""
    spec, family, wrong = spec_of(config), config["model_type"], []
    keeps_all = any(getattr(block.mixer("attention"), "window", None) == 1 for block in spec.blocks)
    for attention in ARCHITECTURES[family].reference(spec):
        for dtype in (torch.float32, torch.bfloat16):
            chosen = random.Random(number)
            reference = randomised_reference(config, dtype, attention, seed=number)
            decoder = decoder_from(reference, config, attention)
            with torch.inference_mode():
                if not all(prefill(reference, decoder, chosen, ARCHITECTURES[family]) for _ in range(3)):
                    wrong.append(f"{number} {attention} {dtype} prefill")
                # Of a window of 1 transformers' cache keeps everything; see the test of it.
                if (
                    not keeps_all
                    and spec.causal
                    and spec.encoder is None
                    and has_cache(reference)
                    and not all(decoding(reference, decoder, chosen, ARCHITECTURES[family]) for _ in range(2))
                ):
                    wrong.append(f"{number} {attention} {dtype} decoding")
    return wrong


def filed(family: str, number: int, folder: Path) -> list[str]:
    """What does not come back from gptkit's format byte for byte, or is not verified."""
    config, wrong = drawn(family, number), []
    shards = random.Random(number).choice(("5GB", 3000, 20_000))
    save_hf(config, folder / "hf", seed=number, max_shard_size=shards)
    gptkit.convert(folder / "hf", folder / "local")
    gptkit.convert(folder / "local", folder / "back", "hf")
    before, after = ({p.name: p.read_bytes() for p in (folder / name).iterdir()} for name in ("hf", "back"))
    after.pop("manifest.json")
    before.pop("generation_config.json", None), after.pop("generation_config.json", None)
    if before != after:
        wrong.append(f"{number} came back otherwise")
    # Mistakes take most of the time, and other tests make them in every family.
    result = verify(folder / "hf", folder / "local", mutations=None if number % 5 == 0 else False)
    if (result.verdict, result.passed) != ("identical", True):
        wrong.append(f"{number} {result.verdict}")
    return wrong


@few(1)
@families
def test_a_few_random_configs_are_computed_to_the_bit(family: str) -> None:
    assert [wrong for number in range(FEW) for wrong in computed(drawn(family, number), number)] == []


def test_one_key_head_that_is_cached_for_every_query_head_decodes_to_the_bit() -> None:
    """transformers' cache holds it as often as there are query heads: in products it is not what a view of one is."""
    one = {"num_attention_heads": 3, "num_kv_heads": 1, "new_decoder_architecture": True, "alibi": True}
    config = {"model_type": "falcon", "vocab_size": VOCAB, "hidden_size": 18, "num_hidden_layers": 1, **one}
    assert [wrong for number in range(3) for wrong in computed(config, number)] == []


WIDTHS = {"n_embd": 18, "n_layer": 1, "n_head": 2, "n_positions": 256, "rotary_dim": 2, "n_inner": 1}
CLIPPED = {"clip_qkv": 8, "rope_theta": 1e4}
ORDERS: dict[str, Config] = {
    "queries joined by token": {"model_type": "gptj", **WIDTHS},
    "fused queries joined by token": {"model_type": "codegen", **WIDTHS, "n_embd": 72, "n_head": 4},
    "queries joined of halves": {
        "model_type": "gpt_oss",
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 22,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "one product of queries, keys and values": {
        "model_type": "dbrx",
        "d_model": 24,
        "n_layers": 1,
        "n_heads": 3,
        "attn_config": {**CLIPPED, "kv_n_heads": 1},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 1},
    },
    "weights divided by a norm of five": {
        "model_type": "dbrx",
        "d_model": 8,
        "n_layers": 1,
        "n_heads": 2,
        "attn_config": {**CLIPPED, "kv_n_heads": 2},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 5, "moe_top_k": 5},
    },
    "queries, keys and values clipped together": {
        "model_type": "mpt",
        "d_model": 17,
        "n_layers": 1,
        "n_heads": 1,
        "attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.3},
    },
}
"""The least configs in which another order of sums, or another place in memory, shows."""


@few(3)
@pytest.mark.parametrize("what", ORDERS)
def test_the_order_of_sums_is_transformers(what: str) -> None:
    assert computed({"vocab_size": VOCAB, **ORDERS[what]}, 8) == []


@few(1)
@pytest.mark.parametrize("family", rest_slow(ARCHITECTURES))
def test_a_random_config_comes_back_and_is_verified(family: str, tmp_path: Path) -> None:
    assert filed(family, 0, tmp_path) == []


def test_a_feed_forward_of_one_unit_is_loaded_to_the_bit(tmp_path: Path) -> None:
    """Its matrices are a row and a column, which lie in memory as [out, in] and as [in, out] at once."""
    config = {"model_type": "gpt2", "vocab_size": VOCAB, "n_embd": 66, "n_layer": 2, "n_head": 2, "n_inner": 1}
    reference = save_hf({**config, "n_positions": 64}, tmp_path / "hf")
    decoder = gptkit.load(tmp_path / "hf")
    with torch.inference_mode():
        for ids in tokens(random.Random(0), 1, 24)[0][:, None, None]:
            assert torch.equal(decoder(ids), reference(ids).logits)


PARTS = [
    pytest.param(family, first, id=f"{family}-{first}") for family in ARCHITECTURES for first in range(0, MANY, APIECE)
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "first"), PARTS)
def test_random_configs_are_computed_to_the_bit(family: str, first: int) -> None:
    assert [wrong for number in range(first, first + APIECE) for wrong in computed(drawn(family, number), number)] == []


@pytest.mark.slow
@pytest.mark.parametrize(("family", "first"), PARTS)
def test_random_configs_come_back_and_are_verified(family: str, first: int, tmp_path: Path) -> None:
    numbers = range(first, first + APIECE)
    assert [wrong for number in numbers for wrong in filed(family, number, tmp_path / str(number))] == []


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_window_of_one_token_is_one_in_decoding_too(attention: str) -> None:
    """transformers' cache drops all but the last window - 1 tokens by a slice from -0, which is from the first: what is
    decoded there sees everything, and differs from the same model's own logits of the whole text.
    """
    config = {**drawn("qwen2", 0), "use_sliding_window": True, "sliding_window": 1, "max_window_layers": 0}
    config.pop("layer_types", None)
    reference = randomised_reference(config, torch.float32, attention)
    decoder = decoder_from(reference, config, attention)
    ids, cache, past = tokens(random.Random(0), 1, 6), Cache(decoder.spec), None
    with torch.inference_mode():
        whole = reference(input_ids=ids).logits
        assert torch.equal(decoder(ids), whole)
        for at in range(6):
            ours = decoder(ids[:, at : at + 1], cache=cache)
            outputs = reference(input_ids=ids[:, at : at + 1], past_key_values=past, use_cache=True)
            past = outputs.past_key_values
            torch.testing.assert_close(ours[:, -1], whole[:, at], rtol=1e-5, atol=1e-5)
    assert past.layers[0].keys.shape[2] == 6
    assert (outputs.logits[:, -1] - whole[:, -1]).abs().max().item() > 0.1
