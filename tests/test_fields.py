"""No field of a record can be forgotten: what changes the function moves the logits of some tree, and has a mistake
that the verifier makes.
"""

from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from helpers.families import CONFIGS, spec_of
from helpers.trees import TREES, random_weights

from gptkit.analysis.aspects import aspects
from gptkit.components import KINDS, Block, Component, ModelSpec, RMSNorm, SubLayer, YarnScaling
from gptkit.errors import ConfigError
from gptkit.parity.compare import largest_gap
from gptkit.parity.mutations import MUTATIONS, applicable, forgotten
from gptkit.parity.probe import probe
from gptkit.parity.score import run_tree

replace = msgspec.structs.replace

OURS = {kind.__name__: kind for kind in KINDS.values() if kind.__module__.startswith("gptkit.components.")}
FIELDS = sorted((name, field) for name, kind in OURS.items() for field in kind.choices())
SPECS: dict[str, ModelSpec] = {**{name: spec_of(config) for name, config in CONFIGS.items()}, **TREES}
MISTAKES = {each.name: each for each in (*MUTATIONS, *forgotten())}


@cache
def stated(spec: ModelSpec) -> frozenset[tuple[str, str]]:
    """The kinds and fields that stand in a tree at other values than their defaults."""
    nodes: dict[Component, None] = {}

    def look(node: Component, _: str) -> Component:
        nodes.setdefault(node)
        return node

    spec.mapped(look)
    fields = ((node, field, value) for node in nodes for field, value in node.choices().items())
    return frozenset((type(node).__name__, field) for node, field, value in fields if getattr(node, field) != value)


def has(spec: ModelSpec, kind: str, field: str) -> bool:
    """Whether a field stands in a tree at another value than its default."""
    return (kind, field) in stated(spec)


def changed(spec: ModelSpec, kind: str, **fields: Any) -> ModelSpec:
    """The tree with fields of all components of a kind at other values."""
    tree: ModelSpec = spec.mapped(lambda node, _: replace(node, **fields) if type(node).__name__ == kind else node)
    return tree


def post_normed(block: Block) -> Block:
    sublayers = (replace(each, norm=None, sum_norm=each.norm) for each in block.sublayers)
    return replace(block, sublayers=tuple(sublayers))


def yarn(**fields: Any) -> ModelSpec:
    """Heads of so many pairs that some lie on the ramp."""
    scaling = YarnScaling(factor=4.0, original_context=4096, attention_factor=1.2, **fields)
    return changed(spec_of({**CONFIGS["llama-yarn"], "head_dim": 32}), "Rotary", scaling=scaling)


def made() -> dict[tuple[str, str], ModelSpec]:
    """Trees with fields that no family here has."""
    post = SPECS["gpt2"]
    post = replace(post, blocks=tuple(map(post_normed, post.blocks)))
    return {
        ("SubLayer", "sum_norm"): post,
        ("SubLayer", "multiplier"): changed(SPECS["llama"], "SubLayer", multiplier=0.3),
        ("Head", "bias"): changed(SPECS["llama"], "Head", bias=True),
        ("LayerNorm", "bias"): changed(SPECS["gpt2"], "LayerNorm", bias=False),
        ("LayerNorm", "gain"): changed(SPECS["gpt2"], "LayerNorm", gain="1 + weight"),
        ("Rotary", "pairs"): changed(SPECS["llama"], "Rotary", pairs="adjacent"),
        ("YarnScaling", "beta_fast"): yarn(beta_fast=4.0),
        ("YarnScaling", "beta_slow"): yarn(beta_slow=3.0),
        ("YarnScaling", "truncate"): yarn(truncate=False),
        ("Block", "parallel"): SPECS["falcon-40b"],
        ("MixtureOfExperts", "normalise"): SPECS["experts-plain"],
        ("GatedFeedForward", "limit"): SPECS["gpt_oss-b"],
        ("MixtureOfExperts", "added"): changed(SPECS["lfm2_moe"], "MixtureOfExperts", added=0.3),
        ("Embedding", "blank"): changed(SPECS["llama-v5"], "Embedding", blank=3),
        ("MixtureOfExperts", "averaged"): changed(SPECS["qwen2_moe"], "MixtureOfExperts", averaged=True),
    }


MADE = made()
ASK_FOR_MORE = {
    ("LayerNorm", "bias"),
    ("LatentAttention", "position"),
    ("LatentAttention", "rope_heads"),
    ("Embedding", "width"),
    ("Head", "width"),
    ("MixtureOfExperts", "latent"),
    ("LatentAttention", "q_rank"),
    ("Attention", "kv_from"),
    ("ModelSpec", "layer_inputs"),
    ("ModelSpec", "streams"),
    ("ModelSpec", "joined"),
    ("Block", "altup"),
    ("ModelSpec", "encoder"),
    ("ModelSpec", "relative_bias"),
    ("Embedding", "shared"),
    ("SharedTransformer", "weights_from"),
}
"""Fields without which a tree asks for tensors that are not there, or is none: a bias, or keys of positions that no
other field names. Who forgets them finds no place for a tensor, and needs no verifier.
"""


@cache
def tree_with(kind: str, field: str) -> ModelSpec:
    return MADE.get((kind, field)) or next(spec for spec in SPECS.values() if has(spec, kind, field))


@cache
def computed(spec: ModelSpec) -> tuple[dict[str, torch.Tensor], list[torch.Tensor], float]:
    """Random weights of a tree, its logits on the probe, and twice what rounding makes of them."""
    weights, batches = random_weights(spec), probe(spec)
    exact = list(run_tree(spec, weights, batches))
    rounded = run_tree(spec, {name: each.float() for name, each in weights.items()}, batches)
    return weights, exact, 2 * max(float((a - b).abs().max()) for a, b in zip(exact, rounded, strict=True))


@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_a_field_moves_logits_and_has_a_mistake_that_is_caught(kind: str, field: str) -> None:
    spec = tree_with(kind, field)
    assert has(spec, kind, field)
    weights, exact, allowed = computed(spec)
    words = OURS[kind].forgotten[field]
    mutants = {mutation.name: mutant for mutation, mutant in applicable(spec, weights, words.__eq__)}
    if (kind, field) in ASK_FOR_MORE:
        assert words not in mutants
        return
    assert largest_gap(exact, run_tree(*mutants[words], probe(spec)), allowed) > allowed


@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_a_field_is_told_where_trees_are_compared(kind: str, field: str) -> None:
    spec = tree_with(kind, field)
    try:
        without = changed(spec, kind, **{field: OURS[kind].choices()[field]})
    except ConfigError:  # there is no such tree
        assert (kind, field) in ASK_FOR_MORE
        return
    assert [each.data for each in aspects(spec)] != [each.data for each in aspects(without)]


@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_a_mistake_has_one_name_that_says_what_it_is(kind: str, field: str) -> None:
    words = OURS[kind].forgotten[field]
    assert words in MISTAKES and 2 <= len(words.split()) < 10
    assert set(OURS[kind].forgotten) == set(OURS[kind].choices())


def test_a_kind_of_another_package_says_its_mistakes_itself() -> None:
    class Tilted(RMSNorm, frozen=True):
        def slips(self) -> dict[str, Any]:
            return super().slips() | {"tilted the other way": replace(self, eps=self.eps * 3)}

        def disorder(self) -> dict[str, dict[str, list[int]]]:
            return {"gain back to front": {"": [*range(self.size)][::-1]}}

    try:
        spec = SPECS["llama"]
        spec = replace(spec, final_norm=Tilted(size=spec.hidden_size, eps=1e-5))
        weights = random_weights(spec)
        made = {mutation.name: mutant for mutation, mutant in applicable(spec, weights)}
        assert made["tilted the other way"][0].final_norm.eps == 1e-5 * 3
        assert torch.equal(made["gain back to front"][1]["final_norm.weight"], weights["final_norm.weight"].flip(0))
    finally:
        del KINDS["Tilted"]


def test_a_kind_that_says_nothing_has_mistakes_all_the_same() -> None:
    """As a plugin's may be."""

    class Unsaid(Component, frozen=True):
        size: int
        offset: float = 0.0

    try:
        assert "offset of Unsaid forgotten" in {each.name for each in forgotten()}
    finally:
        del KINDS["Unsaid"]


@pytest.mark.parametrize(
    ("name", "mistakes"),
    [
        ("gemma", {"embedding not scaled", "weight of norms taken for their factor"}),
        (
            "gemma2",
            {
                "embedding not scaled",
                "weight of norms taken for their factor",
                "norms of sub-layers' outputs left out",
                "cap on scores dropped",
                "cap on logits dropped",
                "kinds of layers shifted by one",
            },
        ),
        (
            "glm4_moe",
            {
                "bias of the experts' choice dropped",
                "bias of the choice in the weights of experts",
                "experts chosen from all groups",
                "shared expert left out",
                "weights of experts normalised or not",
                "weights of experts not scaled",
            },
        ),
        ("gpt_oss", {"sinks left out", "router bias dropped", "up taken as it is, not one more"}),
        ("gemma3_text", {"norm of queries left out", "norm of keys left out", "kinds of layers shifted by one"}),
    ],
)
def test_the_mistakes_of_a_family_are_among_those_that_verify_makes(name: str, mistakes: set[str]) -> None:
    spec = SPECS[name]
    assert mistakes <= {mutation.name for mutation, _ in applicable(spec, random_weights(spec))}


def test_random_weights_start_a_norm_where_its_factor_is_one() -> None:
    from gptkit.modules.initialise import initialised

    spec = SPECS["gemma2"]
    weights = {name: torch.from_numpy(values) for name, values, _ in initialised(spec)}
    norms = {name: each for name, each in weights.items() if name.endswith("norm.weight")}
    assert len(norms) == 4 * len(spec.blocks) + 1
    assert all(bool((spec.final_norm.factor(each) == 1).all() and (each == 0).all()) for each in norms.values())


def test_a_sublayers_defaults_are_all_mistakes() -> None:
    norms = {"norm", "output_norm", "sum_norm"}
    assert set(SubLayer.choices()) == norms | {"multiplier", "low_rank", "onto", "input_multiplier", "beside"}
