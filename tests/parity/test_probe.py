"""The probe: inputs that reach every window, context, table end and region of the vocabulary, and never none at all."""

from typing import Any

import msgspec
import pytest
import torch
from helpers.covering import examples
from helpers.families import BLOOM, CONFIGS, GPT2, LLAMA, MISTRAL, REPRESENTATIVES, VARIANTS, Variant, spec_of
from hypothesis import given, settings
from hypothesis import strategies as st

from gptkit.components import LearnedPositions, ModelSpec
from gptkit.errors import ConfigError, UsageError
from gptkit.parity.probe import AFFORDABLE, KEPT, ProbeBatch, limited_to, limits, longest, probe, text_batch, vocabulary

replace = msgspec.structs.replace


def windowed(*windows: int | None) -> ModelSpec:
    """A mistral with those windows, one a layer."""
    spec = spec_of({**MISTRAL, "num_hidden_layers": len(windows), "sliding_window": 16})
    blocks = (b.replaced(attention=replace(b.attention, window=w)) for b, w in zip(spec.blocks, windows, strict=True))
    return replace(spec, blocks=tuple(blocks))


def gpt2(vocabulary: int, positions: int) -> ModelSpec:
    return spec_of({**GPT2, "vocab_size": vocabulary, "n_positions": positions})


def lengths(batches: list[ProbeBatch]) -> list[int]:
    return [batch.input_ids.shape[1] for batch in batches]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_it_reaches_what_the_tree_does_differently_far_out(variant: Variant) -> None:
    spec = spec_of(variant.config)
    batches = probe(spec)
    for limit in limits(spec):
        if limit.tokens <= AFFORDABLE:
            assert max(lengths(batches)) > limit.tokens + limit.tokens // 5
    assert max(lengths(batches)) >= 200 or max(lengths(batches)) >= spec.context_length


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_padding_on_both_sides(variant: Variant) -> None:
    masked = {b.name: b for b in probe(spec_of(variant.config)) if b.attention_mask is not None}
    left, right = masked["left padding"].attention_mask, masked["right padding"].attention_mask
    assert left is not None and right is not None
    for mask, edge in ((left, 0), (right, -1)):
        assert set(mask.unique().tolist()) == {0, 1}
        assert 0 < int((mask[:, edge] == 0).sum()) < len(mask)  # rows with and without
        assert bool((mask.diff(dim=1).abs().sum(dim=1) <= 1).all())  # one run of padding a row
    assert bool(left[:, -1].all()) and bool(right[:, 0].all())


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_ends_of_the_vocabulary(variant: Variant) -> None:
    spec = spec_of(variant.config)
    regions = next(b for b in probe(spec) if b.name == "vocabulary regions").input_ids
    assert (int(regions.min()), int(regions.max())) == (0, vocabulary(spec) - 1)
    assert vocabulary(spec) >= spec.vocab_size
    gaps = regions.flatten().sort().values.diff()
    assert int(gaps.max()) <= vocabulary(spec) // 64 + 1


def test_the_ends_of_a_large_vocabulary() -> None:
    regions = next(b for b in probe(spec_of({**BLOOM, "vocab_size": 250_880})) if b.name == "vocabulary regions")
    assert regions.input_ids[0, [0, -1]].tolist() == [0, 250_879]


def test_every_window_is_passed_not_the_largest_alone() -> None:
    spec = windowed(16, 100, None, 16)
    assert [limit.tokens for limit in limits(spec)] == [16, 100]
    assert {28, 133} <= set(lengths(probe(spec)))


def test_a_window_out_of_reach_leaves_the_others_and_a_long_batch() -> None:
    spec = windowed(16, 4096)
    assert {28, 200} <= set(lengths(probe(spec)))
    assert max(lengths(probe(spec))) == 200
    assert max(lengths(probe(spec, long=True))) == 4096 + 1024 + 8
    assert max(lengths(probe(windowed(AFFORDABLE)))) == 1288


def test_both_trees_count() -> None:
    free, narrow = windowed(None), windowed(300)
    assert 383 in lengths(probe(free, narrow))
    assert 383 in lengths(probe(narrow, free))
    assert max(lengths(probe(gpt2(97, 64), gpt2(97, 40)))) == 40
    assert longest(gpt2(97, 64), free, gpt2(97, 40)) == 40
    assert longest(free) is None


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 53])
@pytest.mark.parametrize("positions", range(1, 9))
def test_small_vocabularies_and_short_tables(vocabulary: int, positions: int) -> None:
    batches = probe(gpt2(vocabulary, positions))
    assert len(batches) >= 3
    for batch in batches:
        assert batch.input_ids.numel() > 0
        assert batch.input_ids.shape[1] <= positions
        assert int(batch.input_ids.min()) >= 0 and int(batch.input_ids.max()) < vocabulary
        assert len(batch.valid(torch.zeros(*batch.input_ids.shape, vocabulary))) > 0
    assert {int(i) for b in batches for i in b.input_ids.flatten()} >= {0, vocabulary - 1}
    assert max(lengths(batches)) == positions
    sides = {batch.name for batch in batches if batch.attention_mask is not None}
    assert sides == (set() if positions == 1 else {"left padding", "right padding"})


@settings(max_examples=examples(100), deadline=None)
@given(data=st.data())
def test_any_tree_gets_batches_that_it_can_take(data: st.DataObject) -> None:
    spec = windowed(*data.draw(st.lists(st.none() | st.integers(1, 2000), min_size=1, max_size=4)))
    vocabulary = data.draw(st.integers(1, 300))
    spec = replace(
        spec,
        embedding=replace(spec.embedding, vocab_size=vocabulary),
        head=replace(spec.head, vocab_size=vocabulary),
        context_length=data.draw(st.none() | st.integers(1, 300)),
    )
    table = data.draw(st.none() | st.integers(1, 2500))
    if table is not None:
        spec = replace(spec, positions=LearnedPositions(length=table, size=spec.hidden_size))
    batches = probe(spec, long=data.draw(st.booleans()))
    assert batches
    names = [batch.name for batch in batches]
    assert len(set(names)) == len(names)
    for batch in batches:
        assert batch.input_ids.dim() == 2 and batch.input_ids.numel() > 0
        assert table is None or batch.input_ids.shape[1] <= table
        assert 0 <= int(batch.input_ids.min()) <= int(batch.input_ids.max()) < vocabulary
        if batch.attention_mask is not None:
            assert batch.attention_mask.shape == batch.input_ids.shape
            assert bool((batch.attention_mask.sum(1) > 0).all())


def test_the_same_every_time_unless_asked_otherwise() -> None:
    spec = spec_of(LLAMA)
    first, again, other = probe(spec), probe(spec), probe(spec, seed=1)
    assert all(torch.equal(a.input_ids, b.input_ids) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a.input_ids, b.input_ids) for a, b in zip(first, other, strict=True))


def test_only_real_tokens_are_compared() -> None:
    ids = torch.zeros(2, 3, dtype=torch.long)
    logits = torch.arange(12.0).reshape(2, 3, 2)
    batch = ProbeBatch("padded", ids, torch.tensor([[0, 1, 1], [1, 1, 0]]))
    assert batch.valid(logits).tolist() == [[2, 3], [4, 5], [6, 7], [8, 9]]
    assert ProbeBatch("whole", ids).valid(logits).shape == (6, 2)


def test_of_a_long_row_some_positions_are_compared() -> None:
    steps = 10 * KEPT + 3
    logits = torch.arange(float(steps))[None, :, None]
    kept = ProbeBatch("long", torch.zeros(1, steps, dtype=torch.long)).valid(logits).flatten()
    assert len(kept) == KEPT
    assert (kept[0], kept[-1]) == (0, steps - 1)
    assert kept.diff().min() > 0 and kept.diff().max() <= 11


@pytest.mark.parametrize(
    ("ids", "config", "words"),
    [
        ([], GPT2, "no tokens"),
        ([0, 97], GPT2, "token id 97, but the vocabulary has 97"),
        ([1] * 257, GPT2, "257 tokens, but the model supports at most 256"),
    ],
)
def test_prompts_that_cannot_be_compared(ids: list[int], config: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        text_batch("a prompt", ids, spec_of(config))


def test_a_prompt() -> None:
    batch = text_batch("KING", [5, 9], spec_of(CONFIGS["llama"]))
    assert (batch.name, batch.input_ids.tolist(), batch.attention_mask) == ("KING", [[5, 9]], None)


@pytest.mark.parametrize("family", REPRESENTATIVES)
def test_a_window_in_any_layer_limits_what_a_verdict_speaks_of(family: str) -> None:
    """Whichever layers have attention, and whatever comes first in them."""
    spec = spec_of(REPRESENTATIVES[family].config)
    attending = [i for i, block in enumerate(spec.blocks) if getattr(block.mixer("attention"), "window", "") is None]
    if not attending:
        pytest.skip("no layer has attention without a window")
    last = spec.blocks[attending[-1]]
    mixer = last.mixer("attention")
    try:
        windowed = last.replaced(attention=replace(mixer, window=64))
    except ConfigError:
        pytest.skip("attention of this kind takes no window")
    blocks = (*spec.blocks[: attending[-1]], windowed, *spec.blocks[attending[-1] + 1 :])
    reach, words = limited_to(spec, replace(spec, blocks=blocks), 32, None)
    assert reach == 64
    assert "windows of none and 64 tokens" in words[0]
