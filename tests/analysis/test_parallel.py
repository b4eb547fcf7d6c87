"""A model on several GPUs, and what fits in a memory: shares sum to the whole, and one token more is too many."""

from contextlib import suppress

import pytest
from helpers.covering import examples
from helpers.families import CONFIGS, spec_of
from helpers.family_specs import family_specs, preset_spec
from helpers.trees import TREES
from hypothesis import given, settings
from hypothesis import strategies as st

from gptkit.analysis.costs import cache_bytes
from gptkit.analysis.figures import Scenario
from gptkit.analysis.fit import fit
from gptkit.analysis.memory import memory
from gptkit.analysis.parallel import shard, split
from gptkit.analysis.parameters import count
from gptkit.components import Attention, LayerNorm, ModelSpec, RMSNorm
from gptkit.errors import UsageError

BF16 = 2
LLAMA_OF_SIX = {"hidden_size": 96, "num_attention_heads": 24, "num_key_value_heads": 6, "intermediate_size": 96}


def on_all(spec: ModelSpec, tp: int) -> int:
    """What Megatron-LM puts on `tp` GPUs together, tensor by tensor: a rule by the role of each, in parameters."""
    found = 0
    for parameter in spec.parameters():
        name = parameter.name
        if parameter.component in ("norms", "router", "positions") or name.endswith(("o_proj.bias", "down_proj.bias")):
            found += tp * parameter.count
        elif parameter.component in ("embedding", "head"):
            rows = -(-spec.vocab_size // tp) * tp
            found += parameter.count // spec.vocab_size * rows
        elif ".k_proj" in name or ".v_proj" in name:
            node = spec.blocks[parameter.layer or 0].attention
            assert isinstance(node, Attention)
            found += parameter.count * max(tp // node.kv_heads, 1)
        else:
            found += parameter.count
    return found


@settings(max_examples=examples(60), deadline=None)
@given(family_specs(), st.sampled_from([1, 2, 3, 4, 6]))
def test_shares_are_those_of_megatron(spec: ModelSpec, tp: int) -> None:
    can = False
    with suppress(UsageError):
        can = bool(shard(spec, tp))
    if can:
        shares(spec, tp)


def shares(spec: ModelSpec, tp: int) -> None:
    """Hold what each of so many GPUs has of a tree to the rule."""
    found = split(spec, tp, context=2)
    (stage,) = found.stages
    assert found.together == tp * sum(stage.weights.values()) == BF16 * on_all(spec, tp)
    cache, heads = (
        cache_bytes(spec, 2),
        [b.attention.kv_heads for b in spec.blocks if isinstance(b.attention, Attention)],
    )
    if heads and len(set(heads)) == 1:
        assert stage.cache * tp == cache.nbytes * max(tp // heads[0], 1)


@settings(max_examples=examples(40), deadline=None)
@given(family_specs())
def test_one_gpu_is_no_other_case(spec: ModelSpec) -> None:
    (stage,) = split(spec, context=2, batch=3).stages
    there = memory(spec, context=2, batch=3)
    assert (sum(stage.weights.values()), stage.cache, stage.activations) == (
        there.weights,
        there.cache,
        there.activations,
    )


def test_stages_sum_to_the_model() -> None:
    spec = preset_spec("llama-3.1-70b")
    for pp in (2, 5, 80):
        found = split(spec, pp=pp, context=4096)
        assert found.together == BF16 * count(spec).total
        assert sum(stage.cache for stage in found.stages) == cache_bytes(spec, 4096).nbytes
        assert [stage.layers for stage in found.stages][-1] == (80 - 80 // pp, 79)
        assert "embedding" in found.stages[0].weights and "head" in found.stages[-1].weights
    tied = preset_spec("llama-3.2-1b")
    assert split(tied, pp=4, context=1).together == BF16 * (count(tied).total + tied.vocab_size * tied.hidden_size)


def test_what_does_not_divide_is_named() -> None:
    spec = preset_spec("llama-3-8b")
    for tp, pp, told in (
        (3, 1, "--tp 3: 32 query heads are not divisible"),
        (1, 5, "--pp 5: 32 layers cannot be split into 5 pipeline stages"),
        (64, 1, "--tp 64: 32 query heads"),
    ):
        with pytest.raises(UsageError, match=told):
            split(spec, tp, pp, context=1)
    with pytest.raises(UsageError, match="6 key-value heads can be neither split nor repeated evenly over 4"):
        split(spec_of({**CONFIGS["llama"], **LLAMA_OF_SIX}), 4, context=1)
    with pytest.raises(UsageError, match="units of the feed-forward"):
        shard(spec_of({**CONFIGS["llama"], **LLAMA_OF_SIX, "intermediate_size": 93}), 2)
    with pytest.raises(UsageError, match="not split over several GPUs"):
        Scenario("q4_k_m", tp=2)
    with pytest.raises(UsageError, match="--tp must be a whole number"):
        Scenario(tp=0)


def test_one_token_more_does_not_fit() -> None:
    for name, nbytes in (("llama-3-8b", 24 * 10**9), ("mistral-7b", 16 * 10**9), ("qwen2-0.5b", 4 * 10**9)):
        spec = preset_spec(name)
        for row in fit(spec, nbytes, family="llama", context=4096, batch=4).rows:
            more, most = row.context + 1, spec.context_length or 0
            assert row.context

            def total(tokens: int, sequences: int, weights: int = row.weights, spec: ModelSpec = spec) -> int:
                there = memory(spec, context=tokens, batch=sequences)
                return weights + there.cache + there.activations

            assert total(row.context, 4) <= nbytes and (row.context == most or total(more, 4) > nbytes)
            assert total(4096, row.batch) <= nbytes < total(4096, row.batch + 1)


def test_what_does_not_fit_at_all() -> None:
    spec = preset_spec("llama-2-70b")
    rows = {row.dtype: row for row in fit(spec, 24 * 10**9, family="llama", context=4096).rows}
    assert all(row.context == row.batch == 0 for row in rows.values())
    spread = fit(spec, 24 * 10**9, context=4096, tp=8)
    assert {row.dtype for row in spread.rows} == {"bfloat16", "int8", "int4"}
    assert all(row.context == 4096 and row.batch for row in spread.rows)


@pytest.mark.parametrize("name", TREES)
def test_norms_are_whole_wherever_they_are(name: str) -> None:
    spec = TREES[name]
    try:
        one = shard(spec, 2)
    except UsageError:
        return
    norms = [(path, node.size) for path, node in spec.nodes() if isinstance(node, LayerNorm | RMSNorm)]
    assert norms == [(path, node.size) for path, node in one.nodes() if isinstance(node, LayerNorm | RMSNorm)]
