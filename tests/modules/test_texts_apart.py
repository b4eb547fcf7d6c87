"""Several texts at once, of families whose class in transformers computes these wrongly: each is as it is by itself."""

import pytest
import torch
from helpers.families import REPRESENTATIVES, VOCAB, spec_of
from helpers.trees import filled, random_weights

from gptkit.architectures import ARCHITECTURES
from gptkit.modules import Cache

APART = [name for name, family in ARCHITECTURES.items() if family.wrong_batches]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", APART)
def test_a_text_among_others_is_the_text_alone(family: str, side: str) -> None:
    """Padded on a side, read at once and then token by token."""
    spec = spec_of(REPRESENTATIVES[family].config)
    model = filled(spec, random_weights(spec), torch.float64)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(VOCAB, (length,), generator=generator) for length in (20, 1, 3, 13)]
    more = torch.randint(VOCAB, (len(texts), 5), generator=generator)
    ids, mask = torch.full((len(texts), 20), 7), torch.zeros(len(texts), 20, dtype=torch.long)
    for row, text in enumerate(texts):
        place = slice(20 - len(text), 20) if side == "left" else slice(len(text))
        ids[row, place], mask[row, place] = text, 1
    with torch.inference_mode():
        cache = Cache(spec)
        found = [model(ids, mask, cache=cache)]
        for step in range(more.shape[1] if side == "left" else 0):
            mask = torch.cat((mask, torch.ones_like(mask[:, :1])), dim=1)
            found.append(model(more[:, step : step + 1], mask, cache=cache))
        logits, steps = torch.cat(found, dim=1), mask.shape[1] - 20
        for row, text in enumerate(texts):
            alone = model(torch.cat((text, more[row, :steps]))[None])[0]
            assert torch.allclose(logits[row][mask[row].bool()], alone, rtol=0, atol=1e-12 * alone.abs().max()), row


@pytest.mark.parametrize("family", APART)
def test_several_tokens_go_on_from_a_state(family: str) -> None:
    spec = spec_of(REPRESENTATIVES[family].config)
    model, ids = filled(spec, random_weights(spec), torch.float64), torch.arange(40).reshape(2, 20)
    with torch.inference_mode():
        cache, whole = Cache(spec), model(ids)
        parts = [model(part, cache=cache) for part in ids.split((6, 1, 2, 7, 4), dim=1)]
    assert torch.allclose(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-12 * float(whole.abs().max()))
