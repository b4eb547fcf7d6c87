"""Recommending: sizes that are hit, costs as they are by hand, families that hold it, and what the costs contradict."""

import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from helpers.covering import examples, few
from helpers.processes import imported
from hypothesis import given, settings
from hypothesis import strategies as st

import gptkit
from gptkit.analysis.costs import costs
from gptkit.analysis.design import BASELINE, Design, Shape, aspect_ratio, build, fit, rotary_base, usual_vocabulary
from gptkit.analysis.papers import PAPERS
from gptkit.analysis.parameters import count
from gptkit.analysis.recommend import _WHY, GOALS, Goal, Recommendation, parse_budget, recommend
from gptkit.architectures import ARCHITECTURES, expressed
from gptkit.components import Rotary, YarnScaling, from_json
from gptkit.errors import UsageError
from gptkit.modules import Decoder

VOCABULARY = 32_000
FAMILIES = {
    "quality": "llama",
    "speed": "falcon",
    "memory": "llama",
    "context": "llama",
    "simplicity": "falcon",
    "balance": "arcee",
}

WINDOWED = Design("rope", "rmsnorm", "gelu", "gqa", "serial", bias=False, tied=False, window=4096)
"""What no family has: Arcee has no windows, Mistral no plain feed-forward, StarCoder2 no RMSNorm."""


@pytest.fixture
def windowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A goal whose components no family has together, but for one of them: of the goals as they are none is so."""
    monkeypatch.setitem(GOALS, "balance", Goal("a way of its own", WINDOWED, False))  # type: ignore[misc]


def choice(found: Recommendation, kind: str, words: str = "") -> Any:
    named = [each for each in (*found.choices, *found.considered) if each.kind == kind and words in each.alone]
    return named[0]


# --- sizes ---


@few(2)
@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("budget", ["10M", "30M", "124M", "774M", "1.3B", "7B", "13B", "70B", "175B", "1T"])
def test_the_budget_is_hit(goal: str, budget: str) -> None:
    context = 8192 if goal == "context" else None
    found = recommend(goal, budget, context=context)
    assert abs(found.parameters / found.budget - 1) < 0.03
    positions = found.baseline.positions
    assert positions is not None and positions.length == found.context
    beside = found.baseline_costs.parameters - positions.length * positions.size
    assert abs(beside / found.budget - 1) < 0.03
    assert found.parameters == count(found.spec).total == sum(p.count for p in found.spec.parameters())
    shape = found.shape
    assert shape.heads * shape.head_dim == found.spec.hidden_size == shape.hidden
    assert shape.hidden % 64 == 0 and (shape.heads < 24 or shape.heads % 8 == 0)


@given(st.sampled_from(list(GOALS)), st.integers(10**5, 10**7 - 1))
@settings(max_examples=examples(12))
def test_small_models_are_recommended_too(goal: str, budget: int) -> None:
    """Below 10M parameters, with a vocabulary of their own size and narrower heads, shapes are further apart."""
    found = recommend(goal, budget)
    assert abs(found.parameters / budget - 1) < 0.10
    assert found.spec.vocab_size * found.shape.hidden < 0.5 * budget
    assert found.shape.heads * found.shape.head_dim == found.spec.hidden_size


def test_the_shapes_are_those_that_were_published() -> None:
    # GPT-3 (2005.14165, table 2.1): 6.7B has 32 layers of 4,096, 175B 96 layers of 12,288.
    assert fit(BASELINE, 6_658_404_352, 50_257, 2_048) == Shape(4096, 32)
    assert fit(BASELINE, 174_604_259_328, 50_257, 2_048) == Shape(12288, 96)
    # LLaMA 7B and 13B (2302.13971, table 2), whose widths are 11,008 and 13,824.
    llama = Design("rope", "rmsnorm", "swiglu", "mha", bias=False, tied=False)
    assert fit(llama, 6_738_415_616, 32_000, 2_048) == Shape(4096, 32)
    assert fit(llama, 13_015_864_320, 32_000, 2_048) == Shape(5120, 40)
    assert (Shape(4096, 32).gated_width, Shape(5120, 40).gated_width) == (11_008, 13_824)
    assert count(build(llama, Shape(4096, 32), 32_000, 2_048)).total == 6_738_415_616
    assert Shape(8192, 80).kv_heads == 8  # LLaMA-2 70B


def test_the_rule() -> None:
    assert aspect_ratio(10**7) == aspect_ratio(125 * 10**6) == 64
    assert aspect_ratio(67 * 10**8) == pytest.approx(128) == aspect_ratio(10**12)
    assert 64 < aspect_ratio(10**9) < 128


def test_heads_share_keys_and_values_out() -> None:
    for heads in (1, 2, 3, 4, 6, 8, 9, 12, 16, 20, 24, 40, 184):
        shape = Shape(heads * (64 if heads < 16 else 128), 1)
        assert shape.heads == heads and heads % shape.kv_heads == 0
        assert shape.kv_heads == 1 or heads // shape.kv_heads >= 3
    assert [Shape(64 * n, 1).kv_heads for n in (3, 9, 12)] == [1, 3, 4]


# --- costs, by hand ---


def test_what_each_choice_costs_alone() -> None:
    found = recommend("quality", "7B")
    d, layers = found.baseline.hidden_size, len(found.baseline.blocks)
    heads, length, vocab = d // 128, 4096, 32_000
    two = 2  # FLOPs a weight, bytes per number, keys and values
    assert choice(found, "placement").cost.parameters == 0
    assert choice(found, "positions").cost.parameters == -length * d
    assert choice(found, "norm").cost.parameters == -(2 * layers + 1) * d
    gated = choice(found, "feed-forward").cost
    extra = layers * (3 * d * 11_008 - 2 * d * 4 * d)
    assert gated.parameters == extra + layers * (2 * 11_008 - 4 * d)  # biases of the gate and of up
    assert gated.flops == two * extra and gated.cache == 0
    grouped = choice(found, "attention", "GQA").cost
    fewer = layers * 2 * (heads - 8) * 128
    assert grouped.parameters == -fewer * (d + 1)
    assert grouped.flops == -two * fewer * d
    assert grouped.cache == -two * fewer * length
    assert choice(found, "bias").cost.parameters == -layers * (3 * d + d + 4 * d + d)
    assert choice(found, "tied").cost.parameters == vocab * d
    latent = choice(found, "attention", "MLA").cost
    # Queries of 192 a head, a latent of 512 with its norm, 64 rotated, keys and values made of it: for q, k and v.
    read = heads * 192 + 512 + 64
    assert latent.parameters == layers * (read * (d + 1) + 2 * d * 512 + 512 - 3 * d * (d + 1))
    assert latent.cache == two * layers * length * (512 + 64 - 2 * d)  # 2405.04434: 4 heads and half a head of keys


def test_a_window_caps_the_cache() -> None:
    found = recommend("memory", "1B", context=65_536)
    assert {block.attention.window for block in found.spec.blocks} == {4096}
    layers, d = len(found.baseline.blocks), found.baseline.hidden_size
    window = choice(found, "window").cost
    assert window.parameters == 0
    assert window.cache == -2 * 2 * layers * d * (65_536 - 4095)  # the step's own token takes the window's last place
    assert window.flops == -4 * layers * d * (65_536 - 4096)
    assert all(block.attention.window is None for block in recommend("memory", "1B").spec.blocks)


@pytest.mark.exhaustive
def test_memory_is_the_goal_that_keeps_least() -> None:
    kept = {goal: recommend(goal, "7B", context=32_768).costs.cache_bytes_at_context() for goal in GOALS}
    assert min(kept, key=lambda goal: kept[goal]) == "memory"
    assert max(kept, key=lambda goal: kept[goal]) == "simplicity"


def test_why_memory_takes_one_key_value_head() -> None:
    found = about(recommend("memory", "7B"), "cache")
    # Of heads of 128: one key and one value; eight of each; a latent of four heads and half a head of rotated keys.
    assert found.figures == {"times_mqa": 1.0, "times_gqa": 8.0, "times_mla": (4 * 128 + 64) / 256}
    assert "caches the least per token, GQA 8.00 times" in found.words


# --- what it is ---


def test_the_usual_advice() -> None:
    told = {goal: [each.words for each in recommend(goal, "7B").choices] for goal in GOALS}
    assert told["quality"][:5] == ["pre-norm", "RoPE 10,000", "RMSNorm", "SwiGLU 11,008", "GQA 32/8"]
    assert told["speed"][:6] == [
        "pre-norm",
        "ALiBi, scaled",
        "LayerNorm",
        "GELU 16,384",
        "MQA 32/1",
        "parallel, one norm",
    ]
    assert told["simplicity"][:6] == ["pre-norm", "ALiBi, scaled", "LayerNorm", "GELU 16,384", "MHA 32", "serial"]
    assert told["balance"][:5] == ["pre-norm", "RoPE 10,000", "RMSNorm", "GELU 16,384", "GQA 32/8"]
    assert told["context"][1] == "RoPE 500,000, YaRN ×16"
    assert [each.usual for each in recommend("simplicity", "7B").choices].count(False) == 1


def test_stretched_positions_are_yarn_s() -> None:
    position = recommend("context", "1B").spec.blocks[0].attention.position
    assert isinstance(position, Rotary) and isinstance(position.scaling, YarnScaling)
    assert (position.scaling.factor, position.scaling.original_context) == (16.0, 8192)
    assert position.scaling.attention_factor == pytest.approx(1.27725887)  # 0.1 · ln 16 + 1 (2309.00071, section 3.4)
    plain = recommend("context", "1B", context=8192).spec.blocks[0].attention.position
    assert isinstance(plain, Rotary) and plain.scaling is None


def test_a_small_model_ties_its_head_and_a_large_one_need_not() -> None:
    assert recommend("quality", "124M").spec.head.tied
    assert not recommend("quality", "7B").spec.head.tied
    assert recommend("quality", "7B", vocab=256_000).spec.head.tied


@few(3)
@pytest.mark.parametrize("goal", GOALS)
def test_a_family_holds_it(goal: str) -> None:
    found = recommend(goal, "30M")
    assert found.family == FAMILIES[goal]
    architecture = ARCHITECTURES[found.family]
    config = architecture.config_for(found.spec)
    assert architecture.spec(config) == found.spec
    fields = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    with torch.device("meta"):
        model = getattr(transformers, architecture.hf_class)(getattr(transformers, architecture.hf_config)(**fields))
    assert sum(parameter.numel() for parameter in model.parameters()) == found.parameters


@pytest.mark.exhaustive
@pytest.mark.parametrize("goal", GOALS)
def test_it_computes(goal: str) -> None:
    found = recommend(goal, "10M", vocab=512)
    module = Decoder(found.spec)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    assert sum(parameter.numel() for parameter in module.parameters()) == found.parameters
    with torch.no_grad():
        logits = module(torch.tensor([[1, 5, 9, 2]]))
    assert logits.shape == (1, 4, 512) and bool(logits.isfinite().all())


def test_a_window_makes_it_a_mistral() -> None:
    assert recommend("memory", "1B", context=65_536).family == "mistral"
    assert expressed(recommend("memory", "1B", context=4096).spec)[0] == "llama"


# --- what the costs say ---


def about(found: Recommendation, what: str) -> Any:
    return next(each for each in found.findings if each.about == what)


def test_what_contradicts_the_advice_is_told() -> None:
    speed = recommend("speed", "7B")
    assert {each.about for each in speed.findings if each.against} == {"positions", "norm", "feed-forward"}
    assert "simpler, not cheaper" in about(speed, "feed-forward").words
    assert not [each for goal in ("quality", "simplicity") for each in recommend(goal, "7B").findings if each.against]
    assert "its gain costs nothing" in about(recommend("quality", "7B"), "feed-forward").words
    assert about(recommend("quality", "7B"), "attention").figures["cache"] == 8 / 32
    assert about(speed, "attention").figures["cache"] == 1 / 32


@few(3)
@pytest.mark.parametrize("goal", GOALS)
def test_advice_that_is_contradicted_is_named_as_what_was_chosen(goal: str) -> None:
    found = recommend(goal, "7B")
    chosen = " ".join(each.words for each in found.choices)
    for each in found.findings:
        advice = re.match(r"The usual advice is (\w+)\b.*; the costs say ", each.words)
        assert (advice is not None) == each.against
        assert advice is None or advice[1] in chosen


# --- where no family has all of it ---


@pytest.mark.exhaustive
@pytest.mark.usefixtures("windowed")
def test_one_component_away_a_family_has_it() -> None:
    found = recommend("balance", "7B", context=16_384)
    assert found.family is None
    assert found.notes[0].startswith("No transformers family")
    ways = replace(WINDOWED, feed_forward="geglu")
    other = build(ways, found.shape, VOCABULARY, found.context)
    more = count(other).total - found.parameters
    # Three matrices of 11,008 for two of 16,384, in each layer.
    assert more == len(found.spec.blocks) * 4096 * (3 * 11_008 - 2 * 16_384)
    flops = costs(other, found.context).total_flops / found.costs.total_flops - 1
    note = found.notes[0]
    assert "With GEGLU 11,008 instead of GELU 16,384, MistralForCausalLM can hold it" in note
    assert f"{more:+,} parameters" in note and f"{flops:+.1%} FLOPs per token and the same cache" in note
    assert "`convert --to hf:auto` refuses" in note and "--loadable" in note
    loadable = recommend("balance", "7B", context=16_384, loadable=True)
    assert loadable.family == "mistral" and abs(loadable.parameters / loadable.budget - 1) < 0.03
    gate = choice(loadable, "feed-forward")
    assert gate.words.startswith("GEGLU") and gate.paper is not None
    assert about(loadable, "feed-forward").words.startswith("GEGLU")


@few(2)
@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("context", [512, 16_384])
def test_loadable_is_what_transformers_loads(goal: str, context: int) -> None:
    found, plain = (recommend(goal, "124M", context=context, loadable=asked) for asked in (True, False))
    assert found.family is not None and abs(found.parameters / found.budget - 1) < 0.03
    assert plain.family is None or plain.spec == found.spec
    architecture = ARCHITECTURES[found.family]
    assert architecture.spec(architecture.config_for(found.spec)) == found.spec


def test_where_more_than_one_component_is_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    # ALiBi with RMSNorm and a plain feed-forward: any one of them exchanged leaves two that no family has together.
    design = Design("alibi", "rmsnorm", "swiglu", "mla", "parallel", bias=False)
    monkeypatch.setitem(GOALS, "balance", Goal("a way of its own", design, True))  # type: ignore[misc]
    told = recommend("balance", "124M").notes[0]
    assert "in its own format" in told and "--loadable" not in told
    with pytest.raises(UsageError, match="even if gptkit exchanges one of them") as refused:
        recommend("balance", "124M", loadable=True)
    assert "Leave out --loadable" in str(refused.value)


@few(3)
@pytest.mark.parametrize("goal", GOALS)
def test_findings_are_figures_of_these_trees(goal: str) -> None:
    found = recommend(goal, "1.3B")
    usual = found.baseline_costs
    gated = costs(
        build(
            Design(feed_forward="swiglu"),
            Shape(found.baseline.hidden_size, len(found.baseline.blocks)),
            32_000,
            found.context,
        ),
        found.context,
    )
    told = about(found, "feed-forward").figures
    assert told["parameters"] == pytest.approx(gated.parameters / usual.parameters - 1)
    assert told["flops"] == pytest.approx(gated.total_flops / usual.total_flops - 1)
    reading = about(found, "reading").figures
    assert reading["cache_bytes"] == 16 * found.costs.cache_bytes_at_context()
    assert reading["weight_bytes"] == 2 * found.parameters
    flops = about(found, "FLOPs").figures
    assert flops["scores"] == pytest.approx(found.costs.flops["scores"] / found.costs.total_flops)


@settings(max_examples=examples(25), deadline=None)
@given(st.sampled_from(list(GOALS)), st.integers(20_000_000, 10**12), st.integers(64, 60_000), st.integers(16, 200_000))
def test_any_size_is_near_or_refused(goal: str, budget: int, vocab: int, context: int) -> None:
    try:
        found = recommend(goal, budget, vocab=vocab, context=context)
    except UsageError:
        assert vocab * 64 > budget * 0.5  # the table alone takes half of it in the narrowest model
        return
    assert abs(found.parameters / budget - 1) < 0.101
    assert found.spec.vocab_size == vocab and found.spec.context_length == context
    json.dumps(found.as_json(), allow_nan=False)
    assert all(math.isfinite(value) for each in found.findings for value in each.figures.values())


def test_each_claim_has_its_paper() -> None:
    used = {paper for _, paper in _WHY.values() if paper is not None}
    assert used <= set(PAPERS)
    for paper in PAPERS.values():
        assert re.fullmatch(r"\d{4}\.\d{5}", paper.arxiv) and paper.authors and paper.title
    for goal in GOALS:
        found = recommend(goal, "124M", context=65_536)
        assert all(each.paper is not None or each.kind == "bias" for each in (*found.choices, *found.considered))


def test_json_has_integers_and_a_tree_that_is_read_again() -> None:
    found = recommend("quality", "124M")
    data = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert data["schema_version"] == 1 and data["parameters"] == found.parameters
    assert from_json(data["spec"]) == found.spec
    for each in data["choices"]:
        figures = {key: value for key, value in each["exchanged_alone"].items() if key != "words"}
        assert all(type(value) is int for value in figures.values())


# --- what is asked ---


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7B", 7 * 10**9),
        ("7b", 7 * 10**9),
        ("124M", 124 * 10**6),
        ("1.5e9", 15 * 10**8),
        ("1.3B", 13 * 10**8),
        ("0.5B", 5 * 10**8),
        ("1T", 10**12),
        ("10M", 10**7),
        ("124,439,808", 124_439_808),
        ("124_439_808", 124_439_808),
        ("8030261248", 8_030_261_248),
        (" 7 B ", 7 * 10**9),
        (7_000_000_000, 7 * 10**9),
    ],
)
def test_budgets(text: str | int, number: int) -> None:
    assert parse_budget(text) == number


@given(st.integers(10**7, 10**12))
def test_a_plain_number_is_itself(number: int) -> None:
    assert parse_budget(number) == parse_budget(f"{number:,}") == number


@pytest.mark.parametrize(
    "text",
    [
        *("", "B", "7X", "-7B", "nan", "inf", "1e99", "0", "99k", "1.1T", "7,00B", "1.5.3B", "٧B", "7 B B", "0x7B"),
        -7,
        0,
    ],
)
def test_no_budget(text: str | int) -> None:
    with pytest.raises(UsageError):
        recommend("quality", text)


@pytest.mark.parametrize(
    "wrong", [{"vocab": 0}, {"vocab": 2**30}, {"context": 0}, {"context": -1}, {"context": 2**40}, {"vocab": 10**7}]
)
def test_no_sizes(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        recommend("quality", "124M", **wrong)


def test_no_goal() -> None:
    with pytest.raises(UsageError, match="unknown goal 'fame'"):
        recommend("fame", "7B")


def test_it_imports_neither_torch_nor_numpy() -> None:
    assert not imported("import gptkit; gptkit.recommend('quality', '7B')")
    assert gptkit.recommend is recommend


def test_the_command_has_the_function_s_vocabulary() -> None:
    assert recommend("quality", "7B").spec.vocab_size == VOCABULARY == recommend("quality", "10M").spec.vocab_size
    assert recommend("quality", "260k").spec.vocab_size == usual_vocabulary(260_000) == 320
    assert recommend("quality", "260k", vocab=512).spec.vocab_size == 512


@pytest.mark.parametrize(
    ("context", "base"), [(4096, 10_000), (8192, 500_000), (16384, 500_000), (32768, 960_000), (131072, 9_100_000)]
)
def test_the_rotary_base_suits_the_context(context: int, base: int) -> None:
    """Men et al.: 0.0424 times the context to the power of 1.628 at least, where LLaMA's own are less."""
    assert rotary_base(context) == base
    assert context <= 4096 or base >= 0.0424 * context**1.628


def test_one_group_of_few_heads_is_told_as_what_it_is() -> None:
    found = recommend("quality", "10M")
    (attention,) = [each for each in found.choices if each.kind == "attention"]
    assert attention.words == "MQA 3/1"
    assert attention.paper is not None and attention.paper.arxiv == "1911.02150"
    assert about(found, "attention").words.startswith("MQA keeps")
    assert "GQA" not in about(recommend("memory", "10M"), "cache").words
