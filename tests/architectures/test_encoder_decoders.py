"""Models of two stacks: a source that an encoder reads, and a text that a decoder writes. What they share with all
families is proved with these; here is what two texts add.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from helpers.covering import covered, few
from helpers.families import (
    REPRESENTATIVES,
    TWO_STACKS,
    VOCAB,
    Variant,
    decoder_from,
    randomised_reference,
    save_hf,
    spec_of,
)
from typer.testing import CliRunner

import gptkit
from gptkit.analysis.costs import cache_bytes, costs, forward_flops
from gptkit.architectures import architecture_of
from gptkit.cli import app
from gptkit.components import from_json, to_json
from gptkit.errors import CannotExpress, ConfigError, MissingComponent, SwapRefused, UsageError
from gptkit.modules import Cache
from gptkit.modules.context import Encoded
from gptkit.modules.generate import Beams, generate
from gptkit.testing import largest_difference, probes
from gptkit.training.evaluate import evaluate
from gptkit.training.train import require_trainable

FIRST = [variant for variant in TWO_STACKS if variant.representative]
DTYPES = (torch.float32, torch.bfloat16)

CASES = [
    pytest.param(variant, dtype, attention, id=f"{variant}-{dtype}-{attention}")
    for variant in TWO_STACKS
    for dtype in DTYPES
    for attention in architecture_of(variant.config).reference(spec_of(variant.config))
]


@covered("variant", "dtype", "attention", by=lambda variant, dtype, attention: {variant.family, dtype, attention})
@pytest.mark.parametrize(("variant", "dtype", "attention"), CASES)
def test_what_an_encoder_gives_and_every_step_of_decoding_are_transformers_to_the_bit(
    variant: Variant, dtype: torch.dtype, attention: str
) -> None:
    """Of sources with padding too; keys of the source are made once."""
    reference = randomised_reference(variant.config, dtype, attention, seed=1)
    decoder = decoder_from(reference, variant.config, attention)
    worst = []
    for probe in probes(12, 3, ("left", "right"), VOCAB):
        ids, mask, past, cache = torch.zeros(3, 1, dtype=torch.long), probe.attention_mask, None, Cache(decoder.spec)
        real = torch.ones_like(probe.input_ids, dtype=torch.bool) if mask is None else mask.bool()
        with torch.inference_mode():
            encoded = decoder.encode(probe.input_ids, mask)
            states = reference.get_encoder()(input_ids=probe.input_ids, attention_mask=mask)
            worst.append(largest_difference(encoded.states[real], states.last_hidden_state[real]))
            for step in range(14):
                theirs = reference(
                    encoder_outputs=states, attention_mask=mask, decoder_input_ids=ids, past_key_values=past
                )
                ours = decoder(ids, cache=cache, encoded=None if step else encoded)
                worst.append(largest_difference(ours, theirs.logits))
                ids, past = theirs.logits[:, -1:].argmax(-1), theirs.past_key_values
    assert worst == [0.0] * len(worst)


@few(1)
@pytest.mark.parametrize("variant", FIRST, ids=str)
def test_greedy_decoding_and_beams_are_transformers_own(variant: Variant) -> None:
    reference = randomised_reference(variant.config, seed=3)
    decoder = decoder_from(reference, variant.config)
    source = next(probes(17, 1, (), VOCAB)).input_ids
    asked: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "decoder_start_token_id": 0}
    asked |= {"eos_token_id": 1, "forced_eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    searches = {None: {}, Beams(3): {"num_beams": 3}}
    searches[Beams(2, 0.3, True)] = {"num_beams": 2, "length_penalty": 0.3, "early_stopping": True}
    for beams, options in searches.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = reference.generate(source, **asked, **options)[0].tolist()[1:]
        assert list(generate(decoder, source, 20, stop=(1,), start=0, beams=beams)) == theirs


@pytest.mark.parametrize("variant", FIRST, ids=str)
def test_the_cache_is_as_large_as_told(variant: Variant) -> None:
    """What grows with the text, and what is there once of the source, each as transformers' two caches."""
    reference = randomised_reference(variant.config)
    spec = spec_of(variant.config)
    source, text = (next(probes(length, 2, (), VOCAB)).input_ids for length in (9, 9))
    past = reference(input_ids=source, decoder_input_ids=text, use_cache=True).past_key_values

    def size(cache: Any) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)

    found = cache_bytes(spec, 9, "float32", 2)
    assert found.of_source == size(past.cross_attention_cache)
    assert found.nbytes - found.of_source == size(past.self_attention_cache) == 2 * 9 * found.bytes_per_token
    assert found.in_transformers == found.nbytes
    assert costs(spec, 9).cached_at_context == found.nbytes // 8


def test_an_encoder_costs_nothing_a_token() -> None:
    spec = spec_of(REPRESENTATIVES["t5"].config)
    found = forward_flops(spec, 16)
    assert {name for name in found.products if name.startswith("encoder ")} == {
        "encoder attention",
        "encoder feed-forward",
    }
    assert not any(name.startswith("encoder ") for name in costs(spec, 16).flops)


def test_trees_go_through_json() -> None:
    for variant in TWO_STACKS:
        spec = spec_of(variant.config)
        assert from_json(json.loads(json.dumps(to_json(spec)))) == spec


MISTAKES = {
    "t5": {
        "a causal mask, which hides what comes later",
        "buckets of one direction",
        "buckets up to half the distance",
        "keys of the decoder's own text in cross-attention",
        "logits not scaled",
        "relative biases off by one",
        "tables of biases exchanged between encoder and decoder",
    },
    "bart": {
        "a causal mask, which hides what comes later",
        "embedding not scaled",
        "head bias dropped",
        "keys of the decoder's own text in cross-attention",
        "QKV bias of cross-attention dropped",
        "norm of what is embedded left out",
        "norms of sums left out",
        "positions off by one",
        "tables of positions exchanged between encoder and decoder",
    },
    "mbart": {
        "a causal mask, which hides what comes later",
        "embedding not scaled",
        "norm of what is embedded left out",
        "norm of the last output left out",
        "positions off by one",
    },
    "marian": {"a causal mask, which hides what comes later", "embedding not scaled", "head bias dropped"},
}


@few(1)
@pytest.mark.parametrize("variant", FIRST, ids=str)
def test_verify_catches_what_is_mistaken_in_two_stacks(variant: Variant, tmp_path: Path) -> None:
    save_hf(variant.config, tmp_path)
    found = gptkit.verify(tmp_path, bisected=False)
    assert found.passed and found.verdict == "identical"
    score = found.score
    assert score is not None and not score.missed
    assert set(score.caught) >= MISTAKES[variant.family]


@few(1)
@pytest.mark.parametrize("variant", FIRST, ids=str)
def test_convert_there_and_back_byte_for_byte(variant: Variant, tmp_path: Path) -> None:
    model = save_hf(variant.config, tmp_path / "hf")
    gptkit.convert(tmp_path / "hf", tmp_path / "local", to="local")
    gptkit.convert(tmp_path / "local", tmp_path / "back", to="hf")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()
    ids = next(probes(7, 1, (), VOCAB)).input_ids
    decoder = gptkit.load(tmp_path / "local")
    with torch.inference_mode():
        ours = decoder(ids, encoded=decoder.encode(ids.flip(-1)))
        assert torch.equal(ours, model(input_ids=ids.flip(-1), decoder_input_ids=ids).logits)


def test_files_of_the_class_without_a_head_have_no_bias_of_logits(tmp_path: Path) -> None:
    """transformers' class with one takes it for zeros, as bart-base's files are read."""
    config = transformers.BartConfig(**{k: v for k, v in REPRESENTATIVES["bart"].config.items() if k != "model_type"})
    model = transformers.BartModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    model.save_pretrained(tmp_path)
    assert gptkit.verify(tmp_path, bisected=False, mutations=False).verdict == "identical"
    assert not gptkit.load(tmp_path).spec.head.bias


def test_a_head_of_its_own_that_transformers_calls_tied_is_read(tmp_path: Path) -> None:
    """Whatever files hold, transformers writes that T5's head is tied."""
    config = {**next(each.config for each in TWO_STACKS if each.name == "t5-gated"), "tie_word_embeddings": False}
    model = randomised_reference(config)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0).clone())
    model.all_tied_weights_keys.pop("lm_head.weight", None)
    model.save_pretrained(tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["tie_word_embeddings"] is True
    assert not gptkit.load(tmp_path / "hf").spec.tied
    assert gptkit.verify(tmp_path / "hf", mutations=False, bisected=False).verdict == "identical"
    gptkit.convert(tmp_path / "hf", tmp_path / "local", to="local")
    gptkit.convert(tmp_path / "local", tmp_path / "back", to="hf")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()


def test_tables_of_sines_in_files_are_carried_along(tmp_path: Path) -> None:
    """Older files of Marian have them, those that transformers writes now have not."""
    config = REPRESENTATIVES["marian"].config
    model = save_hf(config, tmp_path / "without")
    kept = type(model)._keys_to_ignore_on_save
    try:
        model._keys_to_ignore_on_save = None
        model.save_pretrained(tmp_path / "with")
    finally:
        model._keys_to_ignore_on_save = kept
    gptkit.convert(tmp_path / "with", tmp_path / "local", to="local")
    gptkit.convert(tmp_path / "local", tmp_path / "back", to="hf")
    names = safetensors.torch.load_file(tmp_path / "back" / "model.safetensors")
    assert torch.equal(names["model.encoder.embed_positions.weight"], model.model.encoder.embed_positions.weight)
    ids = next(probes(30, 1, (), VOCAB)).input_ids
    given = [gptkit.load(tmp_path / each) for each in ("with", "without")]
    with torch.inference_mode():
        first, second = (each(ids, encoded=each.encode(ids)) for each in given)
    assert torch.equal(first, second)


@few(1)
@pytest.mark.parametrize("name", ["t5-gated", "bart", "marian"])
def test_a_layer_at_a_time_it_is_the_same(name: str, tmp_path: Path) -> None:
    save_hf(next(each.config for each in TWO_STACKS if each.name == name), tmp_path)
    assert gptkit.verify(tmp_path, stream=True, mutations=False, bisected=False).verdict == "identical"


def test_what_the_cache_holds_of_the_source_is_told() -> None:
    told = CliRunner().invoke(app, ["params", "t5-small", "--kv", "512"], env={"COLUMNS": "100"}).output
    assert "of which the source's 512" in told and "6.291 MB" in told and "a source with as many tokens" in told
    costs_told = CliRunner().invoke(app, ["params", "t5-small", "--flops", "--context", "512"]).output
    assert "encoder feed-forward" in costs_told


def test_the_command_writes_another_text(tmp_path: Path) -> None:
    config = REPRESENTATIVES["t5"].config
    model = save_hf(config, tmp_path)
    runner = CliRunner()
    asked = ["generate", str(tmp_path), "--ids", "5 9 31 2", "-n", "6"]
    refused = runner.invoke(app, asked)
    assert refused.exit_code == 2 and "decoder_start_token_id" in refused.output
    written = json.loads((tmp_path / "config.json").read_text()) | {"decoder_start_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(written))
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        told = model.generate(
            torch.tensor([[5, 9, 31, 2]]), max_new_tokens=6, do_sample=False, decoder_start_token_id=0
        )[0].tolist()[1:]
    assert runner.invoke(app, asked).output.split() == list(map(str, told))


def test_what_one_stack_alone_knows_is_refused_by_name(tmp_path: Path) -> None:
    spec = spec_of(REPRESENTATIVES["t5"].config)
    decoder = gptkit.load(save_hf(REPRESENTATIVES["t5"].config, tmp_path) and tmp_path)
    ids = torch.zeros(1, 3, dtype=torch.long)
    with pytest.raises(UsageError, match="this model has an encoder, but the call has no argument encoded"):
        decoder(ids)
    with pytest.raises(UsageError, match="encoded has 2 rows, but the token ids have 1"):
        decoder(ids, encoded=Encoded(torch.zeros(2, 3, spec.hidden_size)))
    with pytest.raises(UsageError, match="does not know the first token of the decoder"):
        generate(decoder, ids, 3)
    llama = gptkit.load("sample:llama")
    with pytest.raises(UsageError, match="encoded is only for models with an encoder"):
        llama(ids, encoded=decoder.encode(ids))
    with pytest.raises(UsageError, match="this model has no encoder"):
        llama.encode(ids)
    with pytest.raises(SwapRefused, match="--attention needs a decoder-only model"):
        gptkit.swap(tmp_path, tmp_path / "out", attention="mqa")
    with pytest.raises(CannotExpress, match="cross_attention"):
        gptkit.convert(tmp_path, tmp_path / "out.gguf", to="gguf")
    with pytest.raises(MissingComponent, match="eval needs a decoder-only model"):
        evaluate(tmp_path, tmp_path)
    with pytest.raises(MissingComponent, match="gptkit train needs a decoder-only model"):
        require_trainable(spec, True, False)
    blocks = spec_of(REPRESENTATIVES["llama"].config).blocks
    with pytest.raises(ConfigError, match="layer 0 has no cross-attention, but the model has an encoder"):
        spec.__class__(embedding=spec.embedding, encoder=spec.encoder, blocks=(blocks[0],), head=spec.head)
