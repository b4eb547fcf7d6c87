"""Decoding with a static cache: the results of the cache that grows, the same operations in every step, and graphs."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.covering import examples, few, rest_slow
from helpers.families import (
    BLOOM,
    DECODERS,
    FALCON_RW,
    GEMMA2,
    GPT2,
    LLAMA,
    LONG_ROPE,
    MISTRAL,
    MIXTRAL,
    REPRESENTATIVES,
    TWO_STACKS,
    VOCAB,
    spec_of,
)
from helpers.generation import generate_ids
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gptkit.architectures import architecture_of
from gptkit.errors import UsageError
from gptkit.modules import Cache, Decoder
from gptkit.modules import steps as stepping
from gptkit.modules.cache import NotStatic, StaticCache
from gptkit.modules.generate import Beams, Sampling, generate
from gptkit.modules.layers import RMSNormModule
from gptkit.modules.load import load_random
from gptkit.modules.steps import HostFree, StaticSteps

UNTIED = {"tie_word_embeddings": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "num_key_value_heads": 2},
    "gpt2": {**GPT2, **UNTIED},
    "mistral-window-8": {**MISTRAL, "sliding_window": 8},
    "gemma2": {**GEMMA2, **UNTIED},
    "bloom": {**BLOOM, **UNTIED},
    "falcon-rw": {**FALCON_RW, **UNTIED},
    "mixtral": MIXTRAL,
    "llama-longrope": {**LLAMA, "max_position_embeddings": 160, "rope_scaling": LONG_ROPE},
}
BY_NAME = {variant.name: variant.config.get("text_config", variant.config) for variant in DECODERS} | CONFIGS
OTHERS = ("deepseek_v3", "lfm2", "qwen3_next", "gemma3n_text", "rwkv", "mamba2", "gpt_oss", "phi3")
GENERATED = [*CONFIGS, *(name for name in OTHERS if name in BY_NAME)]
PROMPT = [5, 90, 17, 3, 44, 44, 61, 8, 23, 72, 1, 35, 50]
ROUNDING = 3e-5
"""The largest difference of fp32 logits, as a fraction of the largest logit, that other orders of sums explain here."""


def model_of(name: str, dtype: str = "float32") -> Decoder:
    """Return a small model in which every parameter is random."""
    config = BY_NAME[name]
    model = load_random(spec_of(config), dtype, architecture_of(config).reference(spec_of(config))[0])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 90, (1, count), generator=torch.Generator().manual_seed(seed))


class Listed(HostFree):
    """HostFree that also lists the operations, with the shapes and numbers that they got."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append((str(func), _shapes(args), _shapes(tuple((kwargs or {}).items()))))
        return super().__torch_dispatch__(func, types, args, kwargs)


def _shapes(values: Any) -> Any:
    if isinstance(values, Tensor):
        return tuple(values.shape), str(values.dtype)
    if isinstance(values, list | tuple):
        return tuple(map(_shapes, values))
    return repr(values)


@pytest.mark.parametrize("name", rest_slow(BY_NAME))
def test_logits_are_those_of_the_growing_cache_up_to_rounding(name: str) -> None:
    """In all variants, over windows and chunks too; the operations of two steps are the same, and need no host."""
    model = model_of(name)
    with torch.inference_mode():
        grown = Cache(model.spec)
        model(tokens(21), cache=grown)
        static = StaticCache(grown, 64)
        lists = []
        for step in range(4):
            ids, listed = tokens(1, step + 1), Listed()
            with listed:
                ours = model(ids, cache=static)
            theirs = model(ids, cache=grown)
            lists.append(listed.operations)
            scale = theirs.abs().max()
            assert (ours - theirs).abs().max() <= ROUNDING * scale
        assert lists[1] == lists[2] == lists[3]


def on_meta(cache: Any) -> Any:
    """Return a copy of a cache without values."""
    other = copy.copy(cache)
    for name, value in vars(cache).items():
        if isinstance(value, Tensor):
            setattr(other, name, value.to("meta"))
        elif hasattr(value, "__dict__"):
            setattr(other, name, on_meta(value))
    return other


@few(6)
@pytest.mark.parametrize("name", [variant.name for variant in REPRESENTATIVES.values() if variant.name in BY_NAME])
def test_a_step_needs_no_values(name: str) -> None:
    """On the device "meta", which has none, tolist() and item() are errors."""
    model = model_of(name)
    with torch.inference_mode():
        cache = Cache(model.spec)
        model(tokens(9), cache=cache)
        for layer in cache.layers:
            layer.update({slot: on_meta(part) for slot, part in layer.items()})
        static = StaticCache(cache, 64)
    model.to("meta")
    with torch.inference_mode():
        logits = model(tokens(1).to("meta"), cache=static)
    assert logits.is_meta and logits.shape == (1, 1, model.spec.vocab_size)


def test_several_tokens_at_once() -> None:
    for name in ("llama", "mistral-window-8", "falcon-rw"):
        model = model_of(name)
        with torch.inference_mode():
            grown = Cache(model.spec)
            model(tokens(11), cache=grown)
            static = StaticCache(grown, 30)
            for step, count in enumerate((3, 1, 7)):
                ids = tokens(count, step)
                ours, theirs = model(ids, cache=static), model(ids, cache=grown)
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
            larger = StaticCache(static, 50)
            ours, theirs = model(tokens(20), cache=larger), model(tokens(20), cache=grown)
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_an_encoder_decoder() -> None:
    variant = next(variant for variant in TWO_STACKS if variant.family == "t5")
    config = variant.config
    model = load_random(spec_of(config), "float32", architecture_of(config).reference(spec_of(config))[0])
    with torch.inference_mode():
        grown = Cache(model.spec)
        model(tokens(4), cache=grown, encoded=model.encode(tokens(7)))
        static = StaticCache(grown, 64)
        for step in range(3):
            with HostFree():
                ours = model(tokens(1, step), cache=static)
            torch.testing.assert_close(ours, model(tokens(1, step), cache=grown), rtol=1e-4, atol=1e-4)
    ids = [generate_ids(model, PROMPT, 12, start=0, cache=cache) for cache in ("static", "dynamic")]
    assert ids[0] == ids[1]


# --- generate ---------------------------------------------------------------------------------------------------------


class Replayed:
    """In place of a CUDA graph: it runs the step again, and does not count its token."""

    def __init__(self, steps: StaticSteps) -> None:
        self.steps, self.replays = steps, 0

    def replay(self) -> None:
        length, self.replays = self.steps.cache.length, self.replays + 1
        self.steps._step()
        self.steps.cache.length = length


@pytest.fixture(params=["a step", "a replay"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run static steps as on a CPU, or in the order in which a GPU runs recorded ones."""
    if request.param == "a replay":
        monkeypatch.setattr(StaticSteps, "_record", lambda steps: setattr(steps, "graph", Replayed(steps)))
        monkeypatch.setattr(StaticSteps, "_aside", lambda _, work: work())
        monkeypatch.setattr(stepping, "_records", lambda _: True)
    return str(request.param)


@few(8)
@pytest.mark.parametrize("name", GENERATED)
def test_ids_are_those_of_the_growing_cache(name: str, way: str) -> None:
    model = model_of(name)
    drawn = {"sampling": Sampling(3.0, top_k=60, top_p=0.95, seed=7)}
    for options in ({}, drawn):
        for count in (1, 2, 40):
            ids = [generate_ids(model, PROMPT, count, cache=cache, **options) for cache in ("static", "dynamic")]
            assert ids[0] == ids[1] and len(ids[0]) == count, way
    stop = ids[1][17]
    end = ids[1].index(stop) + 1
    assert generate_ids(model, PROMPT, 40, cache="static", stop={stop}, **drawn) == ids[1][:end]


@pytest.fixture(scope="module")
def windowed() -> Decoder:
    return model_of("mistral-window-8")


@settings(max_examples=examples(60), deadline=None)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40),
    count=st.integers(0, 40),
    seed=st.integers(0, 9),
)
def test_texts_of_any_length(windowed: Decoder, prompt: list[int], count: int, seed: int) -> None:
    """With a cache that has to be made larger several times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stepping, "_AHEAD", 1)
        patch.setattr(stepping, "_ALIGNED", 1)
        sampling = Sampling(3.0, seed=seed)
        ids = [generate_ids(windowed, prompt, count, sampling=sampling, cache=cache) for cache in ("static", "dynamic")]
    assert ids[0] == ids[1]


def test_two_texts_at_once(way: str) -> None:
    model = model_of("llama")

    def stream(seed: int, cache: Any = "static") -> Any:
        return generate(model, PROMPT, 20, sampling=Sampling(3.0, seed=seed), cache=cache)

    both = list(zip(stream(1), stream(2), strict=True))
    assert [first for first, _ in both] == list(stream(1, "dynamic")), way
    assert [second for _, second in both] == list(stream(2, "dynamic"))


def test_the_table_of_positions_ends_the_text(way: str) -> None:
    model = model_of("gpt2")
    length = GPT2["n_positions"]
    told: list[str] = []
    ids = generate_ids(model, [7] * (length - 3), 100, cache="static", tell=told.append)
    assert ids == generate_ids(model, [7] * (length - 3), 4, cache="dynamic") and len(ids) == 4, way
    assert len(told) == 1


def test_logits_that_are_nan_are_an_error(way: str) -> None:
    for options in ({}, {"sampling": Sampling(1.0, seed=0)}):
        model = model_of("llama")
        stream = generate(model, PROMPT, 30, cache="static", **options)
        for _ in range(5):
            next(stream)
        with torch.no_grad():
            model.head.weight[7].fill_(float("nan"))
        with pytest.raises(Exception, match=r"new token \d are NaN"):
            list(stream)
    assert way


def test_a_step_that_needs_the_host_is_not_recorded(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text goes on with the growing cache, or with a static one without a graph if the caller asked for that."""
    model, forward = model_of("llama"), RMSNormModule.forward
    expected = generate_ids(model, PROMPT, 20, cache="dynamic")
    monkeypatch.setattr(RMSNormModule, "forward", lambda self, x: forward(self, x) * float(x.isfinite().all()))
    monkeypatch.setattr(StaticSteps, "_record", None)
    for cache in ("auto", "static", "auto", "static"):
        assert generate_ids(model, PROMPT, 20, cache=cache) == expected, way
    if way == "a replay":
        assert stepping._RECORDABLE[model] == ()


def test_hooks_run_for_every_token(way: str) -> None:
    model, calls = model_of("llama"), []
    model.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    generate_ids(model, PROMPT, 12, cache="auto")
    assert len(calls) == 12, way


def test_a_graph_that_cannot_be_recorded_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def capture_begin(self, **_: Any) -> None:
            raise RuntimeError("operation not permitted\nmore")

    model, told = model_of("llama"), list[str]()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Refusing)
    monkeypatch.setattr(StaticSteps, "_aside", lambda _, work: work())
    monkeypatch.setattr(stepping, "_records", lambda _: True)
    text = generate_ids(model, PROMPT, 20, cache="auto", tell=told.append)
    assert text == generate_ids(model, PROMPT, 20, cache="dynamic")
    reason = "the decoding step could not be recorded as a CUDA graph, so it is slower: operation not permitted"
    assert told == [reason]


def test_a_cpu_uses_the_growing_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepping, "StaticSteps", None)
    assert len(generate_ids(model_of("llama"), PROMPT, 20, cache="auto")) == 20


def test_experts_stay_where_today_s_path_reads_them() -> None:
    """Their weights become views of one tensor, in which the prompt's products find them."""
    for name in ("mixtral", *(name for name in ("gpt_oss", "deepseek_v3", "phimoe") if name in BY_NAME)):
        model = model_of(name)
        with torch.inference_mode():
            before = model(tokens(12))
        ids = generate_ids(model, PROMPT, 6, cache="static")
        with torch.inference_mode():
            assert torch.equal(model(tokens(12)), before)
        places = [parameter.data_ptr() for parameter in model.parameters()]
        assert generate_ids(model, PROMPT, 6, cache="static") == ids
        assert [parameter.data_ptr() for parameter in model.parameters()] == places
        assert not any(parameter.is_inference() for parameter in model.parameters())
        model(tokens(5)).sum().backward()


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama() -> Decoder:
    return model_of("llama")


def filled(model: Decoder, count: int = 4) -> Cache:
    cache = Cache(model.spec)
    with torch.inference_mode():
        model(tokens(count), cache=cache)
    return cache


def test_what_a_static_cache_cannot_do(llama: Decoder) -> None:
    with pytest.raises(UsageError, match="cannot be made of a cache with 0"):
        StaticCache(Cache(llama.spec), 4)
    with pytest.raises(UsageError, match="3 tokens cannot be made of a cache with 4"):
        StaticCache(filled(llama), 3)
    divided = filled(llama)
    divided.layers[-1] = {slot: on_meta(part) for slot, part in divided.layers[-1].items()}
    with pytest.raises(NotStatic, match="several devices"):
        StaticCache(divided, 5)
    static = StaticCache(filled(llama), 5)
    with pytest.raises(UsageError, match="gradients"):
        llama(tokens(1), cache=static)
    with torch.inference_mode():
        with pytest.raises(UsageError, match="attention_mask"):
            llama(tokens(1), torch.ones(1, 5), cache=static)
        with pytest.raises(UsageError, match="2 more tokens do not fit into a static cache that has 4 of 5"):
            llama(tokens(2), cache=static)
        llama(tokens(1), cache=static)
        with pytest.raises(UsageError, match="reordered"):
            static.reorder(torch.tensor([0]))
    with pytest.raises(UsageError, match="beam search"):
        generate(llama, PROMPT, 4, beams=Beams(2), cache="static")
    with pytest.raises(UsageError, match="'fast'"):
        generate(llama, PROMPT, 4, cache="fast")  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [lambda x: torch.cat((x, x), -1), lambda x: x.double(), lambda _: None])
def test_a_state_that_changes_its_size_is_not_static(change: Callable[[Tensor], Any]) -> None:
    model = model_of("lfm2")
    static = StaticCache(filled(model), 9)
    part, name, value = next(entry for entry in static._fixed if isinstance(entry[2], Tensor))
    setattr(part, name, change(value))
    with pytest.raises(NotStatic, match="does not keep its size"):
        static.end(1)


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.long().bincount(),
        lambda _: torch.tensor([1.0, 2.0]),
        lambda x: x.new_tensor(2.0),
        lambda x: x.to("meta"),
        lambda x: torch.empty(4, device="meta").copy_(x),
    ],
)
def test_what_needs_the_host_is_stopped(work: Callable[[Tensor], Any]) -> None:
    x = torch.arange(4.0)
    work(x)
    with pytest.raises(NotStatic, match="cannot be recorded"), HostFree():
        work(x)


def test_what_a_graph_can_record_is_not_stopped() -> None:
    x = torch.arange(4.0)
    with HostFree():
        found = torch.where(x > 2, x, -1.0) + x[torch.arange(4)] + torch.full((), 2.0)
        x[..., 1].fill_(0.0)  # not x[..., 1] = 0.0, which torch turns into a tensor first
    assert found.tolist() == [1.0, 2.0, 3.0, 8.0]


# --- a GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", GENERATED)
def test_recorded_steps_give_the_ids_of_the_growing_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the first token whose two best logits are as near as rounding. Nothing in a step waits for the device."""
    graphs: list[Any] = []
    record = StaticSteps._record

    def counted(steps: StaticSteps) -> None:
        record(steps)
        graphs.append(steps.graph)

    monkeypatch.setattr(StaticSteps, "_record", counted)
    monkeypatch.setattr(stepping, "_AHEAD", 30)
    monkeypatch.setattr(stepping, "_ALIGNED", 8)
    model, told = model_of(name).to("cuda"), list[str]()
    for count in (60, 60, 9):  # the second time nothing is new
        dynamic = generate_ids(model, PROMPT, count, cache="dynamic", tell=told.append)
        static = generate_ids(model, PROMPT, count, cache="auto", tell=told.append)
        assert len(static) == count
        _same_until_a_tie(model, dynamic, static)
    sampling = Sampling(3.0, top_k=60, top_p=0.95, seed=7)
    drawn = [generate_ids(model, PROMPT, 40, sampling=sampling, cache=cache) for cache in ("auto", "dynamic")]
    assert drawn[0][:4] == drawn[1][:4]
    assert not any("recorded" in line for line in told)
    assert all(graphs) and len(graphs) >= 5


def _same_until_a_tie(model: Decoder, dynamic: list[int], static: list[int]) -> None:
    """Assert that two texts are the same, or that the first token that differs was nearly a tie."""
    other = next((place for place, pair in enumerate(zip(dynamic, static, strict=True)) if pair[0] != pair[1]), None)
    if other is None:
        return
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT + dynamic[:other]], device="cuda"), last_only=True)[0, -1]
    first, second = logits[dynamic[other]], logits[static[other]]
    assert (first - second).abs() <= 10 * ROUNDING * logits.abs().max(), (other, first, second)
