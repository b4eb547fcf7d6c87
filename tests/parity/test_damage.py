"""The damage report says what whole modules say, and finds a change where it was made."""

import json
import math
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from helpers.families import CONFIGS
from helpers.held import Held, fewer_tokens, held
from helpers.trees import TREES, random_weights
from torch import Tensor

from gptkit.errors import GptkitError
from gptkit.parity import damage as module
from gptkit.parity.compare import kl_divergence
from gptkit.parity.damage import Damage, damage

TEXT = torch.randint(97, (90,), generator=torch.Generator().manual_seed(3)).tolist()
replace = msgspec.structs.replace


def places(found: Damage) -> dict[str, float]:
    return {place.name: place.relative for place in found.places}


def lens(tree: Held, text: list[int]) -> list[Tensor]:
    """The logits of whole modules after each layer, with the last norm and the head."""
    model = tree.decoder(torch.float64)
    found: list[Tensor] = []

    def see(_: object, __: object, output: Tensor) -> None:
        found.append(model.head(model.final_norm(output), model.embedding.weight)[0])

    hooks = [block.register_forward_hook(see) for block in model.blocks]
    with torch.inference_mode():
        model(torch.tensor([text]))
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("name", ["gpt2", "llama-v5", "bloom", "falcon-7b"])
def test_it_says_what_whole_modules_say(name: str) -> None:
    before, after = held(name), held(name, seed=1)
    found = damage(before, after, text=TEXT)
    assert found.dtype == "float64"
    sides = lens(before, TEXT[:-1]), lens(after, TEXT[:-1])
    for layer, a, b in zip(found.layers, *sides, strict=True):
        kl = kl_divergence(a, b)
        assert layer.kl == pytest.approx(kl.mean().item(), rel=1e-9)
        assert layer.top1 == (a.argmax(-1) == b.argmax(-1)).double().mean().item()
        follow = torch.tensor(TEXT[1:])
        assert layer.perplexity_before == pytest.approx(F.cross_entropy(a, follow).exp().item(), rel=1e-9)
        assert layer.perplexity_after == pytest.approx(F.cross_entropy(b, follow).exp().item(), rel=1e-9)
        for each, value in zip(found.bins, layer.by_bin, strict=True):
            assert value == pytest.approx(kl[each.first : each.last + 1].mean().item(), rel=1e-9)
    last = found.layers[-1]
    assert found.total.kl == pytest.approx(last.kl, rel=1e-9)
    assert found.total.before == pytest.approx(last.perplexity_before)
    assert [(each.first, each.last) for each in found.bins[:4]] == [(0, 0), (1, 1), (2, 3), (4, 7)]
    assert sum(each.positions for each in found.bins) == found.total.positions == 89
    weighted = sum(each.kl * each.positions for each in found.bins) / 89
    assert weighted == pytest.approx(found.total.kl, rel=1e-9)
    assert found.bins[-1].last == 88


@pytest.mark.parametrize("name", ["gpt2", "falcon-40b", "experts-gated", "latent-deepseek"])
def test_a_tree_against_itself_has_none(name: str) -> None:
    tree = held(name) if name in CONFIGS else Held(TREES[name], random_weights(TREES[name]))
    found = damage(tree, tree, text=TEXT)
    assert found.total.kl < 1e-14
    assert found.total.top1 == 1
    assert found.total.before == found.total.after
    assert all(layer.stream == 0 and layer.kl < 1e-14 for layer in found.layers)
    assert set(places(found).values()) == {0.0}
    assert found.first is found.born is None


@pytest.mark.parametrize(
    ("weight", "place"),
    [
        ("blocks.1.attention.v_proj.weight", "layer 1 attention"),
        ("blocks.1.attention_norm.weight", "layer 1 attention"),
        ("blocks.2.feed_forward.down_proj.bias", "layer 2 feed-forward"),
        ("blocks.0.feed_forward.up_proj.weight", "layer 0 feed-forward"),
        ("final_norm.bias", "final norm and head"),
        ("head.weight", "final norm and head"),
    ],
)
def test_a_change_is_found_where_it_was_made(weight: str, place: str) -> None:
    before = held("gpt2-untied")
    found = damage(before, before.changed(weight, lambda w: w * 1.1), text=TEXT)
    assert found.first is not None
    assert found.first.name == found.born.name == place  # type: ignore[union-attr]
    assert found.as_json()["first"] == place
    layer = found.first.layer
    for each in found.places:
        # What a part of a layer does differently, the parts after it in that layer meet; other layers do not.
        assert each.differs == (each.relative > 1e-9)
        assert not each.differs or each.layer == layer
    if layer is not None:
        assert all(each.stream == 0 for each in found.layers[:layer])
        assert all(each.stream > 1e-4 for each in found.layers[layer:] if each.stream is not None)
        assert found.layers[layer].kl > 1e-6


def test_two_changes_are_both_found() -> None:
    before = held("llama")
    after = before.changed("blocks.0.attention.q_proj.weight", lambda w: w * 1.05)
    after = after.changed("blocks.2.feed_forward.gate_proj.weight", lambda w: w * 1.5)
    found = damage(before, after, text=TEXT)
    assert found.first is not None
    assert found.born is not None
    assert found.first.name == "layer 0 attention"
    assert found.born.name == "layer 2 feed-forward"
    assert places(found)["layer 1 attention"] < 1e-12


def test_a_rounded_table_is_a_place_and_no_other_basis() -> None:
    before = held("llama")
    after = before.changed("embedding.weight", lambda w: w * (1 + 0.01 * torch.randn_like(w)))
    found = damage(before, after, text=TEXT)
    assert found.first is not None
    assert found.first.name == "embedding"
    assert places(found)["embedding"] == pytest.approx(0.01, rel=0.2)
    assert places(found)["layer 1 attention"] < 1e-12


def test_by_position() -> None:
    before = held("gpt2")
    after = before.changed("positions.weight", lambda w: torch.cat([w[:16], w[16:].flip(0)]))
    found = damage(before, after, text=TEXT)
    for each, lens_kl in zip(found.bins, found.layers[0].by_bin, strict=True):
        assert (each.kl > 1e-4) == (each.first >= 16)
        assert (lens_kl > 1e-4) == (each.first >= 16)
        assert each.before is not None
        assert (each.before == pytest.approx(each.after, rel=1e-9)) == (each.first < 16)


# --- streams that are not alike ---------------------------------------------------------------------------------------


def turned(tree: Held) -> Held:
    """The same function of a stream in another basis: llama-like, its norms' weights at 1 first."""
    weights = {name: w.double() for name, w in tree.weights.items()}
    for name in weights:
        if name.endswith("norm.weight"):
            weights[name] = torch.ones_like(weights[name])
    plain = Held(tree.spec, weights)
    width = tree.spec.hidden_size
    turn, _ = torch.linalg.qr(
        torch.randn(width, width, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    )
    new = dict(weights)
    for name, w in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "o_proj.bias", "down_proj.bias")):
            new[name] = turn @ w
        elif w.ndim == 2:
            new[name] = w @ turn.T
    tree.weights = plain.weights
    return Held(tree.spec, new)


def test_another_basis_is_no_damage() -> None:
    before = held("llama")
    after = turned(before)
    found = damage(before, after, text=TEXT)
    assert found.total.kl < 1e-13
    assert all(layer.kl < 1e-13 for layer in found.layers)
    assert found.places == ()
    assert any("different bases" in note for note in found.notes)


def test_another_width_is_compared_by_what_it_says() -> None:
    before = held("llama")
    hidden = before.spec.hidden_size + 8
    tree = Held(before.spec, before.weights)

    def wider(node: Any, _: str) -> Any:
        names = (name for name in ("hidden_size", "size") if getattr(node, name, None) == before.spec.hidden_size)
        return msgspec.structs.replace(node, **dict.fromkeys(names, hidden))

    spec = tree.spec.mapped(wider)
    after = Held(spec, random_weights(spec))  # type: ignore[arg-type]
    found = damage(before, after, text=TEXT)
    assert found.places == ()
    assert all(layer.stream is None and layer.kl > 0 for layer in found.layers)
    assert any("the hidden sizes differ, 48 and 56" in note for note in found.notes)


def test_fewer_layers_need_to_be_told_apart() -> None:
    before = held("gpt2")
    kept = {name.replace("blocks.2.", "blocks.1."): w for name, w in before.weights.items() if "blocks.1." not in name}
    after = Held(replace(before.spec, blocks=(before.spec.blocks[0], before.spec.blocks[2])), kept)
    found = damage(before, after, text=TEXT)
    assert found.layers == found.places == ()
    assert found.total.kl > 0.01
    assert any("3 layers before, 2 after" in note for note in found.notes)
    found = damage(before, after, text=TEXT, layers=[(0, 0), (2, 1)])
    assert [(each.before, each.after) for each in found.layers] == [(0, 0), (2, 1)]
    assert "not compared: the original's layer 1" in found.notes
    assert found.layers[0].kl < 1e-14
    assert found.layers[1].kl == pytest.approx(found.total.kl, rel=1e-9)
    assert places(found)["layer 1 attention"] == 0  # the layer that was kept is what it was


# --- what they are given ----------------------------------------------------------------------------------------------


def test_a_vocabulary_that_was_trimmed() -> None:
    before = held("llama")
    kept = torch.randperm(97, generator=torch.Generator().manual_seed(1))[:60].tolist()
    tokens = (kept, list(range(60)))
    after = fewer_tokens(before, kept)
    text = [kept[i % 60] for i in TEXT]
    found = damage(before, after, text=text, tokens=tokens)
    assert found.total.kl < 1e-13
    assert found.total.before == pytest.approx(found.total.after, rel=1e-9)
    assert set(places(found).values()) == {0.0}
    spoilt = after.changed("blocks.1.attention.o_proj.weight", lambda w: -w)
    found = damage(before, spoilt, text=text, tokens=tokens)
    assert found.first is not None
    assert found.first.name == "layer 1 attention"
    with pytest.raises(GptkitError, match="vocabularies differ"):
        damage(before, after, text=text)


def test_without_text_there_is_kl_alone() -> None:
    before, after = held("mistral"), held("mistral", seed=1)
    for text in (None, [], [4]):
        found = damage(before, after, text=text)
        assert "of the probe" in found.on
        assert found.total.kl > 0.1
        assert found.total.before is None
        assert all(each.before is None for each in found.bins)
        assert all(each.perplexity_after is None for each in found.layers)
        assert any("no perplexity" in note for note in found.notes)


def test_a_length_that_is_promised_is_not_exceeded() -> None:
    before = held("gpt2")
    after = before.changed("positions.weight", lambda w: torch.cat([w[:16], w[16:].flip(0)]))
    for text in (TEXT, None):
        found = damage(before, after, text=text, most=16)
        assert found.bins[-1].last == 15
        assert found.total.kl == 0


def test_a_large_model_is_looked_at_in_fp32_and_on_fewer_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    before = held("llama")
    after = before.changed("blocks.1.attention.o_proj.weight", lambda w: w * 1.5)
    whole = damage(before, after, text=TEXT)
    spec = before.spec
    monkeypatch.setattr(module, "SMALL", 0)
    monkeypatch.setattr(module, "_LENS_WORK", 40 * len(spec.blocks) * spec.vocab_size * spec.hidden_size)
    found = damage(before, after, text=TEXT)
    assert found.dtype == "float32"
    assert any("40 of 89 positions" in note for note in found.notes)
    assert found.first is not None
    assert found.first.name == "layer 1 attention"
    assert found.total.kl == pytest.approx(whole.total.kl, rel=1e-4)
    assert found.layers[0].kl < 1e-9
    assert found.layers[2].kl == pytest.approx(whole.total.kl, rel=0.5)
    monkeypatch.setattr(module, "_STREAM_BYTES", 30 * 8 * 4 * 48)
    assert damage(before, after, text=TEXT).on == "30 tokens of text"


def test_nan_is_never_lost_and_has_no_word_in_json() -> None:
    before = held("gpt2")

    def spoil(weight: Tensor) -> Tensor:
        weight[0, 0] = math.nan
        return weight

    found = damage(before, before.changed("blocks.1.attention.v_proj.weight", spoil), text=TEXT)
    assert math.isnan(found.total.kl)
    assert math.isnan(found.layers[1].kl)
    assert found.layers[0].kl == 0
    assert found.first is not None
    assert found.first.name == "layer 1 attention"
    data = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert data["total"]["kl"] is None
    assert data["layers"][0]["kl"] == 0
