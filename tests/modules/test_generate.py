"""generate: transformers' tokens one for one, its filters value for value, and an end where there is one."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.covering import examples, few, rest_slow
from helpers.families import (
    BLOOM,
    DECODERS,
    FALCON_7B,
    FALCON_RW,
    GPT2,
    LLAMA,
    LONG_ROPE,
    MISTRAL,
    QWEN2,
    QWEN3,
    VOCAB,
    WINDOWED,
    decoder_from,
    randomised_reference,
    shared_weights,
    spec_of,
)
from helpers.generation import generate_ids
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from gptkit.architectures import architecture_of
from gptkit.errors import GptkitError, UsageError
from gptkit.modules import Decoder
from gptkit.modules.generate import Beams, Sampling, generate

SHARED = Path(__file__).parents[2].parent / "shared"
STORIES = SHARED / "checkpoints" / "stories260K-llama"
GOLDEN = (
    # expected_stdout of llama2.c's test_all.py: 200 steps of its own C code
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a "
    "big, red ball. She wanted to play with it, but it was too high.\n"
    "Lily's mom said, \"Lily, let's go to the park.\" Lily was sad and didn't know what to do. She said, \"I want to "
    "play with your ball, but I can't find it.\"\n"
    "Lily was sad and didn't know what to do. She said, \"I'm sorry, Lily. I didn't know what to do.\"\n"
    "Lily didn't want to help her mom, so she"
)

# Heads of their own: a random model that shares its embedding with its head answers every token with itself.
UNTIED = {"tie_word_embeddings": False}
CASES: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "num_key_value_heads": 2},
    "llama-dynamic": {**LLAMA, "max_position_embeddings": 40, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "llama-longrope": {**LLAMA, "max_position_embeddings": 160, "rope_scaling": LONG_ROPE},
    "gpt2": {**GPT2, **UNTIED},
    "bloom": {**BLOOM, **UNTIED},
    "falcon-7b": {**FALCON_7B, **UNTIED},
    "falcon-rw": {**FALCON_RW, **UNTIED},
    "mistral-window-8": {**MISTRAL, "sliding_window": 8},
    "qwen2-window": {**QWEN2, **WINDOWED},
    "qwen3": QWEN3,
}
TIED = ("zamba2",)  # families that know no other head
EVERY = {
    each.name: each.config.get("text_config", each.config) | ({} if each.family in TIED else UNTIED)
    for each in DECODERS
} | CASES
"""All variants of all families: the prompt and what follows go beyond their windows and original contexts."""
CASES_BY_DTYPE = [
    *((name, torch.float32) for name in EVERY),
    *((name, torch.bfloat16) for name in (*CASES, *(each.name for each in DECODERS if each.representative))),
]
PROMPT = [5, 90, 17, 3, 44, 44, 61, 8, 23, 72, 1, 35, 50]


def sampled_cases() -> list[Any]:
    """Return the cases as parameters, with the marks of `rest_slow`."""
    kept = {*CASES, *(case.values[0] for case in rest_slow(each.name for each in DECODERS) if not case.marks)}
    return [
        pytest.param(*case, id="-".join(map(str, case)), marks=[] if case[0] in kept else [pytest.mark.slow])
        for case in dict.fromkeys(CASES_BY_DTYPE)
    ]


def pair(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> tuple[Any, Decoder]:
    """transformers' random model and gptkit's with the same weights, on an attention path that both compute."""
    attention = architecture_of(config).reference(spec_of(config))[0]
    reference = randomised_reference(config, dtype, attention)
    return reference, decoder_from(reference, config, attention)


def expected(reference: Any, prompt: list[int], count: int, **options: Any) -> list[int]:
    """transformers' own continuation, past any end-of-sequence token."""
    ids = torch.tensor([prompt])
    out = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        use_cache=True,
        **{"do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options},
    )
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def gpt2() -> Decoder:
    return pair({**GPT2, **UNTIED})[1]


@few(9)
@pytest.mark.parametrize(("name", "dtype"), sampled_cases())
def test_sampled_tokens_are_those_of_transformers(name: str, dtype: torch.dtype) -> None:
    """Greedy ones too, which soon repeat themselves; sampled ones do not, so that a cache that forgets must show."""
    reference, decoder = pair(EVERY[name], dtype)
    assert generate_ids(decoder, PROMPT, 16) == expected(reference, PROMPT, 16)
    sampling = Sampling(temperature=3.0, top_k=60, top_p=0.95, seed=7)
    ours = generate_ids(decoder, torch.tensor([PROMPT]), 64, sampling=sampling)
    torch.manual_seed(7)
    options = {"do_sample": True, "temperature": 3.0, "top_k": 60, "top_p": 0.95}
    assert len(set(ours)) > 10
    assert ours == expected(reference, PROMPT, 64, **options)


@settings(max_examples=examples(200), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    temperature=st.floats(0.05, 20),
    top_k=st.none() | st.integers(1, 80),
    top_p=st.none() | st.floats(0, 1),
    rounded=st.booleans(),
)
def test_filters_are_those_of_transformers(
    seed: int, temperature: float, top_k: int | None, top_p: float | None, rounded: bool
) -> None:
    logits = 4 * torch.randn(2, 64, generator=torch.Generator().manual_seed(seed))
    if rounded:
        logits = logits.round()  # many ties
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k is not None:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p is not None and top_p < 1:  # transformers leaves the warper out at 1
        scores = TopPLogitsWarper(top_p)(None, scores)
    before = logits.clone()
    assert torch.equal(Sampling(temperature, top_k, top_p).filtered(logits), scores)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("top_p", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_the_set_that_reaches_top_p_exactly_is_enough(top_p: float) -> None:
    logits = torch.zeros(1, 4)
    kept = Sampling(1.0, top_p=top_p).filtered(logits)
    assert int(kept.isfinite().sum()) == max(1, round(4 * top_p))
    assert torch.equal(kept, TopPLogitsWarper(top_p)(None, logits))


def test_filters_run_in_single_precision() -> None:
    logits = torch.randn(1, 64, dtype=torch.bfloat16)
    filtered = Sampling(0.7, top_p=0.5).filtered(logits)
    assert filtered.dtype == torch.float32
    assert torch.equal(filtered, Sampling(0.7, top_p=0.5).filtered(logits.float()))


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 1e-30},
        {"temperature": 1, "top_k": 0},
        {"temperature": 1, "top_k": -3},
        {"temperature": 1, "top_p": 1.5},
        {"temperature": 1, "top_p": -0.1},
        {"temperature": 1, "top_p": float("nan")},
        {"top_k": 5},
        {"top_p": 0.9},
        {"seed": -1},
        {"seed": 2**64},
    ],
)
def test_sampling_out_of_range_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Sampling(**fields)


def test_a_seed_repeats_and_another_does_not(gpt2: Decoder) -> None:
    def drawn(seed: int | None) -> list[int]:
        return generate_ids(gpt2, PROMPT, 40, sampling=Sampling(3.0, seed=seed))

    assert drawn(2**64 - 1) == drawn(2**64 - 1)
    assert drawn(1) != drawn(2)
    assert drawn(None) != drawn(None)


def test_global_state_is_left_alone(gpt2: Decoder) -> None:
    before = torch.random.get_rng_state()
    stream = generate(gpt2, PROMPT, 5, sampling=Sampling(1.0))
    next(stream)
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
    generate_ids(gpt2, PROMPT, 5, sampling=Sampling(1.0, seed=3))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_model_can_be_trained_after_it_generated() -> None:
    decoder = pair({**GPT2, **UNTIED})[1]
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_("norm" in name)
    generate_ids(decoder, PROMPT, 2)
    assert not any(parameter.is_inference() for parameter in decoder.parameters())
    decoder(torch.tensor([PROMPT])).sum().backward()


def test_two_streams_do_not_disturb_each_other(gpt2: Decoder) -> None:
    def stream(seed: int) -> Any:
        return generate(gpt2, PROMPT, 20, sampling=Sampling(3.0, seed=seed))

    together = list(zip(stream(1), stream(2), strict=True))
    assert [a for a, _ in together] == list(stream(1))
    assert [b for _, b in together] == list(stream(2))


def test_tokens_are_computed_as_they_are_asked_for(gpt2: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[int] = []
    forward = Decoder.forward

    def counted(self: Decoder, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        fed.append(input_ids.shape[1])
        return forward(self, input_ids, **options)

    monkeypatch.setattr(Decoder, "forward", counted)
    stream = generate(gpt2, PROMPT, 10)
    assert fed == []
    next(stream)
    assert fed == [len(PROMPT)]
    next(stream)
    assert fed == [len(PROMPT), 1]


def test_stop_ids_end_the_stream_and_are_given_out(gpt2: Decoder) -> None:
    free = generate_ids(gpt2, PROMPT, 30, sampling=Sampling(3.0, seed=1))
    end = free.index(free[9])
    stopped = generate_ids(gpt2, PROMPT, 30, sampling=Sampling(3.0, seed=1), stop=[free[9], 50256])
    assert stopped == free[: end + 1]


def test_end_of_sequence_ends_as_in_transformers() -> None:
    reference, decoder = pair(CASES["llama"])
    eos = generate_ids(decoder, PROMPT, 12)[11]
    assert generate_ids(decoder, PROMPT, 64, stop={eos}) == expected(reference, PROMPT, 64, eos_token_id=eos)


def test_learned_positions_end_the_stream(gpt2: Decoder) -> None:
    length = GPT2["n_positions"]
    prompt = (PROMPT * 30)[: length - 3]
    told: list[str] = []
    # Three are read, the fourth is predicted from a full table.
    assert len(list(generate(gpt2, prompt, 4, tell=told.append))) == 4
    assert told == []
    assert len(list(generate(gpt2, prompt, 100, tell=told.append))) == 4
    assert told == [f"generation stopped: the model has {length:,} positions, and all are used"]
    full = (PROMPT * 30)[:length]
    with pytest.warns(UserWarning, match="positions, and all are used") as warned:
        assert len(generate_ids(gpt2, full, 100)) == 1
    assert len(warned) == 1
    with pytest.raises(UsageError, match=f"{length + 1} tokens.*{length} rows"):
        generate(gpt2, [*full, 1], 1)


def test_rotary_positions_do_not_and_say_where_their_context_ends() -> None:
    """Once, whether the text grows past it or begins there; scaling that grows with the text has no such end."""
    config = {**LLAMA, "max_position_embeddings": 16}
    decoder = pair(config)[1]
    long = (PROMPT * 30)[:40]
    for prompt, new, lines in ((PROMPT, 16 - len(PROMPT) + 1, 0), (PROMPT, 30, 1), (long, 30, 1)):
        told: list[str] = []
        assert len(list(generate(decoder, prompt, new, tell=told.append))) == new
        assert len(told) == lines
        assert all("context of 16 tokens" in line for line in told)
    told = []
    dynamic = pair({**config, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}})[1]
    alibi = pair({**CASES["falcon-rw"], "max_position_embeddings": 16})[1]
    for model in (dynamic, alibi):
        assert len(list(generate(model, PROMPT, 30, tell=told.append))) == 30
    assert told == []


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        (torch.empty(1, 0, dtype=torch.long), "empty"),
        ([1, VOCAB], f"vocabulary of {VOCAB} tokens: {VOCAB}"),
        ([-1], "-1"),
        ([1, 2**70], str(2**70)),
        (list(range(VOCAB, VOCAB + 20)), "and 15 more"),
        (torch.ones(2, 4, dtype=torch.long), "shape"),
        (torch.ones(1, 1, 4, dtype=torch.long), "shape"),
        (torch.ones(1, 4), "float32"),
        (["a"], "'a'"),
        ([1.0], "1.0"),
        ([True], "True"),
    ],
)
def test_unusable_prompts_are_refused_before_anything_is_computed(gpt2: Decoder, prompt: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        generate(gpt2, prompt, 5)


def test_forms_of_a_prompt(gpt2: Decoder) -> None:
    forms = [PROMPT, tuple(PROMPT), torch.tensor(PROMPT), torch.tensor([PROMPT], dtype=torch.int32)]
    assert len({tuple(generate_ids(gpt2, form, 6)) for form in forms}) == 1


def test_how_many(gpt2: Decoder) -> None:
    assert generate_ids(gpt2, PROMPT, 0) == []
    with pytest.raises(UsageError, match="max_new_tokens"):
        generate(gpt2, PROMPT, -1)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=0)], ids=["greedy", "sampled"])
def test_logits_that_are_not_numbers_are_an_error(sampling: Sampling) -> None:
    decoder = pair(CASES["llama"])[1]
    with torch.no_grad():
        decoder.head.weight[7].fill_(float("nan"))
    with pytest.raises(GptkitError, match="NaN"):
        generate_ids(decoder, PROMPT, 3, sampling=sampling)


@pytest.mark.skipif(not STORIES.is_dir(), reason="needs the project's shared checkpoints")
def test_stories_are_token_for_token_those_of_transformers() -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(STORIES).eval()
    config = reference.config.to_dict()
    decoder = decoder_from(reference, {**config, "rope_theta": 10000.0})
    ours = generate_ids(decoder, [1], 200)
    assert ours == expected(reference, [1], 200)
    sampling = Sampling(1.0, top_k=100, top_p=0.9, seed=11)
    torch.manual_seed(11)
    theirs = expected(reference, [1], 200, do_sample=True, temperature=1.0, top_k=100, top_p=0.9)
    assert generate_ids(decoder, [1], 200, sampling=sampling) == theirs


@pytest.mark.skipif(not STORIES.is_dir(), reason="needs the project's shared checkpoints")
def test_the_golden_story() -> None:
    from gptkit.architectures.config import read_config_file
    from gptkit.converter.tokenizer import StreamDecoder, load_tokenizer

    # Without transformers: gptkit's own reading of config, weights and tokenizer.
    config, _ = read_config_file(STORIES / "config.json")
    weights = torch.nn.Module()
    weights.state_dict = lambda: load_file(STORIES / "model.safetensors")  # type: ignore[assignment, method-assign]
    decoder = Decoder(spec_of(config)).eval()
    decoder.load_state_dict(shared_weights(weights, config))
    tokenizer = load_tokenizer(STORIES)
    assert tokenizer is not None
    stream = StreamDecoder(tokenizer, skip_special_tokens=True)
    pieces = [stream.push(token) for token in generate(decoder, tokenizer.encode(""), 200)]
    assert "".join(pieces) + stream.finish() == GOLDEN


# --- beams ------------------------------------------------------------------------------------------------------------

SEARCHED = [
    "llama",
    "mistral-window-8",
    "falcon-7b",
    "llama-longrope",
    "deepseek_v3",
    "lfm2",
    "qwen3_next",
    "gemma3n_text",
]
"""Every kind of cache: of keys and values, of windows, of latents, of convolutions and states, of earlier layers."""


@few(2)
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("count", "penalty"), [(2, 1.0), (4, 0.3), (3, -1.0)])
@pytest.mark.parametrize("name", SEARCHED)
def test_beams_are_those_of_transformers(name: str, count: int, penalty: float, early: bool) -> None:
    reference, decoder = pair(EVERY[name])
    options = {"num_beams": count, "length_penalty": penalty, "early_stopping": early}
    lengths = set()
    for stop in ([], [7, 11, *range(40, 60)]):  # which end some of them soon
        wanted = expected(reference, PROMPT, 24, **options, eos_token_id=stop or None)
        found = generate_ids(decoder, PROMPT, 24, beams=Beams(count, penalty, early), stop=stop)
        assert found == wanted
        lengths.add(len(found))
    assert 24 in lengths and (len(lengths) == 2 or penalty > 0)


def test_beams_find_what_is_likelier_than_the_likeliest_tokens() -> None:
    decoder = pair(CASES["llama"])[1]

    def likely(ids: list[int]) -> float:
        with torch.no_grad():
            logs = decoder(torch.tensor([PROMPT + ids]))[0, len(PROMPT) - 1 : -1].log_softmax(-1)
        return float(logs.gather(-1, torch.tensor(ids)[:, None]).sum())

    found, greedy = generate_ids(decoder, PROMPT, 12, beams=Beams(8)), generate_ids(decoder, PROMPT, 12)
    assert found != greedy and likely(found) > likely(greedy)


def test_beams_that_cannot_be() -> None:
    decoder = pair(CASES["llama"])[1]
    for fields in ({"count": 1}, {"count": 2, "length_penalty": float("nan")}):
        with pytest.raises(UsageError):
            Beams(**fields)
    with pytest.raises(UsageError, match="does not sample"):
        generate(decoder, PROMPT, 4, beams=Beams(2), sampling=Sampling(1.0))
    assert generate_ids(decoder, PROMPT, 0, beams=Beams(2)) == []


def test_beams_end_where_the_table_of_positions_does(gpt2: Decoder) -> None:
    told: list[str] = []
    length = gpt2.spec.context_length or 0
    prompt = [5] * (length - 3)
    found = generate_ids(gpt2, prompt, 50, beams=Beams(2), tell=told.append)
    assert len(found) == 4 and told == [f"generation stopped: the model has {length:,} positions, and all are used"]
