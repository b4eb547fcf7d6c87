"""Large models get their score too: on a small copy of the tree, in which the same mistakes can be made."""

from typing import Any

import pytest
import torch
from helpers.covering import chosen, covered, few, functions
from helpers.families import VARIANTS, spec_of

from gptkit.architectures import architecture_of
from gptkit.architectures.presets import presets
from gptkit.parity import score as scoring
from gptkit.parity.card import card, markdown
from gptkit.parity.mutations import MUTATIONS
from gptkit.parity.probe import ProbeBatch, limits, probe
from gptkit.parity.score import miniature, narrow_batches, random_weights, score
from gptkit.parity.verify import verify

WELL_KNOWN = ("gpt2", "llama-3.2-1b", "qwen2-0.5b", "qwen3-0.6b", "bloom-176b", "falcon-40b", "falcon-rw-1b")


def mistakes(spec):
    """The names of mutations that have an object in a tree, told by shapes alone."""
    weights = {each.name: torch.empty(each.shape, device="meta") for each in spec.parameters()}
    found = []
    for mutation in MUTATIONS:
        mutant = mutation.apply(spec, weights)
        if mutant is not None and (
            mutant[0] != spec or any(mutant[1].get(name) is not each for name, each in weights.items())
        ):
            found.append(mutation.name)
    return found


def largest() -> list[str]:
    """Return the largest preset of every family and kind of tree: models of other sizes have the same components."""
    kinds = {name: architecture_of(preset.config).spec(preset.config) for name, preset in presets().items()}
    names = sorted(kinds, key=lambda name: (len(kinds[name].blocks), kinds[name].hidden_size))
    return sorted(
        {(presets()[name].config["model_type"], frozenset(functions(kinds[name]))): name for name in names}.values()
    )


def largest_needed() -> list[Any]:
    """Return `largest` as parameters. Presets whose facts all occur in others are slow."""
    names = largest()
    configs = [presets()[name].config for name in names]
    kept = chosen([functions(architecture_of(config).spec(config)) for config in configs])
    return [pytest.param(name, marks=() if place in kept else pytest.mark.slow) for place, name in enumerate(names)]


@few(1)
@pytest.mark.parametrize("name", largest_needed())
def test_the_same_mistakes_can_be_made_in_the_small_copy(name):
    config = presets()[name].config
    spec = architecture_of(config).spec(config)
    copy = miniature(spec, 200)
    assert mistakes(copy) == mistakes(spec)
    assert limits(copy) == limits(spec)
    # Four heads of 256 that write a stream as wide make the widest layers, and Gemma 3n has six kinds of these.
    assert sum(each.count for each in copy.parameters()) < 45e6
    # Two layers of one kind stand beside one of each other; a shared block is stored in one layer and run in another.
    assert len(copy.blocks) <= 7
    assert len(copy.blocks) <= max(len(spec.blocks), 3)


@few(1)
@pytest.mark.parametrize("name", WELL_KNOWN)
def test_every_mistake_shows_on_the_small_copy(name):
    config = presets()[name].config
    spec = architecture_of(config).spec(config)
    batches = probe(spec)
    copy = miniature(spec, max(batch.input_ids.shape[1] for batch in batches))
    marks = score(copy, random_weights(copy), narrow_batches(batches, copy))
    assert marks.missed == ()
    assert marks.tried >= 11


@covered("variant", by=lambda variant: functions(spec_of(variant.config)))
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_kind_of_layer_is_in_the_small_copy(variant):
    spec = spec_of(variant.config)
    copy = miniature(spec, 64)
    kinds = [{tuple(each.mixer.slot for each in block.sublayers) for block in tree.blocks} for tree in (copy, spec)]
    assert kinds[0] == kinds[1]
    mixers = [[block.mixer("attention") for block in tree.blocks] for tree in (copy, spec)]
    seen = [{(each.window, each.position) for each in found if each is not None} for found in mixers]
    assert seen[0] == seen[1]
    assert seen[0] or not any("attention" in slots for slots in kinds[1])
    assert mistakes(copy) == mistakes(spec)


def test_the_probe_keeps_its_lengths_and_padding():
    spec = spec_of(VARIANTS[0].config)
    batch = ProbeBatch("x", torch.tensor([[1, 700, 1030]]), torch.tensor([[0, 1, 1]]))
    (narrow,) = narrow_batches([batch], spec)
    assert narrow.input_ids.shape == batch.input_ids.shape
    assert int(narrow.input_ids.max()) < spec.vocab_size
    assert narrow.attention_mask is batch.attention_mask


def test_a_large_model_is_scored_on_a_copy_unless_asked(monkeypatch):
    monkeypatch.setattr(scoring, "SMALL", 10)
    unasked, asked, unwanted = (verify("sample:llama", mutations=wanted) for wanted in (None, True, False))
    assert unasked.score.small_copy
    assert (unasked.score.missed, unasked.passed) == ((), True)
    said = [note for note in unasked.notes if "in a small copy of the model with random weights" in note]
    assert said == [
        "the mistakes were made on purpose in a small copy of the model with random weights; --mutations makes them in "
        "the model itself"
    ]
    assert not asked.score.small_copy
    assert asked.score.tried == unasked.score.tried
    assert unwanted.score is None
    assert "deliberate mistakes caught (on a small copy of this tree with random weights)" in markdown(card(unasked))


def test_a_probe_that_misses_a_mistake_on_the_copy_fails(monkeypatch):
    """Eight tokens see no window of 16."""
    monkeypatch.setattr(scoring, "unprobed", lambda *_: [])
    spec = spec_of({**next(v for v in VARIANTS if v.name == "mistral").config})
    copy = miniature(spec, 8)
    short = [ProbeBatch("short", torch.arange(8)[None] % copy.vocab_size)]
    assert "window ignored" in score(copy, random_weights(copy), short).missed
