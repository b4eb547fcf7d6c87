"""Trees that only a swap makes: what knows no latent attention or no experts says so, by the component's name."""

import dataclasses
import io
import re
from typing import Any

import msgspec
import pytest
from helpers.covering import few
from helpers.families import CONFIGS, spec_of
from helpers.trees import TREES
from rich.console import Console
from typer.testing import CliRunner

from gptkit.analysis.aspects import describe
from gptkit.analysis.parameters import count
from gptkit.analysis.params import ModelCount
from gptkit.architectures import ARCHITECTURES, expressed, gguf, llama2c, nanogpt
from gptkit.architectures.families.llama import LLAMA
from gptkit.cli import app
from gptkit.components import (
    ALiBi,
    Attention,
    Embedding,
    Head,
    LatentAttention,
    MixtureOfExperts,
    ModelSpec,
    without_rounding,
)
from gptkit.errors import CannotExpress
from gptkit.report.counts import parameter_table


def unknown(spec: ModelSpec) -> str:
    """What of a tree no other format has."""
    mixed = spec.blocks[0].sublayers[0].mixer
    plain = isinstance(mixed, Attention)
    return type(spec.blocks[0].mixer("feed_forward") if plain else mixed).__name__


OTHERS = [name for name in TREES if name != "rotary-adjacent"]


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("name", TREES)
def test_a_family_refuses_by_the_component_or_expresses(name, family):
    spec = TREES[name]
    try:
        config = ARCHITECTURES[family].config_for(spec)
    except CannotExpress as refused:
        said = str(refused)
        assert "object has no attribute" not in said
        assert len(said) < 2000
        llama_like = family in ("llama", "mistral", "mixtral", "qwen2", "qwen3")
        if llama_like and name in ("latent-deepseek", "latent-two-keys", "both"):
            assert "LatentAttention" in said or "GatedFeedForward" in said
    else:
        assert (family, ARCHITECTURES[family].spec(config)) == ("mixtral", spec)
        ARCHITECTURES[family].bind(spec)


@pytest.mark.parametrize("family", ["dots1", "deepseek_v2"])
def test_numbers_of_experts_that_no_class_has_are_not_wanted_where_all_layers_are_dense(family: str) -> None:
    config = CONFIGS[family]
    dense = {**config, "first_k_dense_replace": config["num_hidden_layers"], "num_experts_per_tok": None}
    spec = ARCHITECTURES[family].spec(dense)
    assert not any(hasattr(block.mixer("feed_forward"), "experts") for block in spec.blocks)
    assert ARCHITECTURES[family].back(spec) == spec


def test_mixtral_expresses_a_mixture_that_is_one_of_its_own():
    assert ARCHITECTURES["mixtral"].config_for(TREES["experts-gated-fused"])["num_local_experts"] == 5


@pytest.mark.parametrize("name", TREES)
def test_binding_names_what_has_no_name(name):
    for architecture in ARCHITECTURES.values():
        if MixtureOfExperts in architecture.kinds and (
            name.startswith("experts") or (name == "both" and LatentAttention in architecture.kinds)
        ):
            continue  # the names are there, or most of them: what else is in the way its config says
        if name == "rotary-adjacent" or (name.startswith("latent") and LatentAttention in architecture.kinds):
            continue
        with pytest.raises(CannotExpress):
            architecture.bind(TREES[name])


@pytest.mark.parametrize("name", OTHERS)
def test_formats_refuse_by_the_component(name):
    spec = TREES[name]
    with pytest.raises(CannotExpress, match=unknown(spec)):
        llama2c.expressed(spec)
    with pytest.raises(CannotExpress):
        nanogpt.expressed(spec, "gelu")


@few(8)
@pytest.mark.parametrize("name", TREES)
def test_gguf_refuses_by_a_component_or_has_the_same_function(name):
    spec = TREES[name]
    try:
        found = gguf.expressed(spec)
    except CannotExpress as refused:
        told = refused.message
    else:
        assert without_rounding(found.architecture.back(spec)) == without_rounding(spec)
        return
    assert re.search(r"blocks\.|embedding|head", told) and "no attribute" not in told


def test_neighbours_for_rotary_pairs_are_refused_where_there_are_none():
    spec = TREES["rotary-adjacent"]
    for family in ("llama", "mistral"):
        with pytest.raises(CannotExpress, match='pairs: "adjacent"'):
            ARCHITECTURES[family].config_for(spec)
    with pytest.raises(CannotExpress, match="pairs"):
        llama2c.expressed(spec)
    assert gguf.expressed(spec).architecture.name == "chatglm"  # of the tables that permute no rows for llama.cpp


@pytest.mark.parametrize("name", TREES)
def test_a_tree_is_counted_and_described(name):
    spec = TREES[name]
    found, words = count(spec), describe(spec)
    assert found.total == sum(found.by_component.values()) == sum(each.count for each in spec.parameters())
    assert found.total == sum(each.total for each in found.by_layer) + sum(found.outside.values())
    if name.startswith(("latent", "both")):
        attention = spec.blocks[0].attention
        assert isinstance(attention, LatentAttention)
        assert words["attention"].startswith(f"MLA, 4 heads, latent {attention.kv_rank}, query dim ")
    if name.startswith(("experts", "both")):
        assert " experts" in words["feed-forward"]
        assert (
            found.by_component["router"]
            == len(spec.blocks) * spec.blocks[0].feed_forward.shapes()["router.weight"][0] * spec.hidden_size
        )


@pytest.mark.parametrize("name", TREES)
def test_a_tree_has_its_table(name):
    file = io.StringIO()
    for by_layer in (False, True):
        table = parameter_table([ModelCount(name, "local", TREES[name])], by_layer)
        Console(file=file, width=80).print(table)
    assert ("a row for each expert" in file.getvalue()) == name.startswith(("experts", "both"))


def test_words_for_what_is_new():
    assert describe(TREES["latent-deepseek"])["positions"] == (
        "rotary, base 10,000, on 1 key of 6 dimensions for all heads, pairs of neighbours"
    )
    assert describe(TREES["latent-deepseek"])["q/k norm"] == "RMSNorm on the latent, eps 1e-06"
    assert describe(TREES["latent-biases"])["biases"] == "q and latent, attention output"
    assert describe(TREES["rotary-adjacent"])["positions"] == "rotary, base 10,000, pairs of neighbours"
    assert describe(TREES["experts-plain"])["feed-forward"] == (
        "3 of 4 experts, weights as the router gives them, each plain, gelu, 40"
    )


# --- what is a mistake, and no refusal --------------------------------------------------------------------------------


def mistaken(spec: ModelSpec) -> dict[str, Any]:
    """llama's `write` with a typo in it."""
    return {"num_attention_heads": spec.blocks[0].attention.haeds}  # type: ignore[union-attr]


def test_a_typo_in_a_familys_write_is_told_as_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """With where it is; never as a tree that the family cannot express."""
    broken = dataclasses.replace(ARCHITECTURES["llama"], write=mistaken)
    for config in (CONFIGS["llama"], CONFIGS["mistral"]):
        with pytest.raises(AttributeError, match="haeds") as caught:
            broken.config_for(spec_of(config))
        assert caught.traceback[-1].name == "mistaken"
    monkeypatch.setitem(ARCHITECTURES, "llama", broken)
    with pytest.raises(AttributeError, match="haeds"):
        expressed(TREES["rotary-adjacent"])
    done = CliRunner().invoke(app, ["recommend", "--goal", "quality", "--params", "30M"])
    assert done.exit_code == 1 and "This is a bug in gptkit" in done.stderr and "haeds" in done.stderr
    assert "cannot express" not in done.stderr


def test_a_tree_of_other_kinds_is_never_handed_to_write() -> None:
    """It is refused by their names; a family that has the kinds in other places is told of those too."""
    asked: list[ModelSpec] = []

    def write(spec: ModelSpec) -> dict[str, Any]:
        asked.append(spec)
        return LLAMA.write(spec)

    watched = dataclasses.replace(LLAMA, write=write)
    for name in ("gpt2", "bloom", "falcon-40b", "mixtral"):
        with pytest.raises(CannotExpress):
            watched.config_for(spec_of(CONFIGS[name]))
    kinds = {type(node) for spec in asked for _, node in spec.nodes()}
    assert asked and kinds <= {*LLAMA.kinds, Embedding, Head}


def test_how_alibi_rounds_is_nothing_to_gguf() -> None:
    """Its table of what only rounds is that of the components."""
    spec = spec_of(CONFIGS["bloom"])
    attention = spec.blocks[0].attention
    rounded = msgspec.structs.replace(attention, position=ALiBi(rounding="bfloat16"))
    blocks = tuple(block.replaced(attention=rounded) for block in spec.blocks)
    found = gguf.expressed(msgspec.structs.replace(spec, blocks=blocks))
    assert found.architecture.name == "bloom" and found.metadata == gguf.expressed(spec).metadata
    scaled = msgspec.structs.replace(attention, position=ALiBi(scaled=True))
    other = tuple(block.replaced(attention=scaled) for block in spec.blocks)
    with pytest.raises(CannotExpress, match=r"position\.scaled: true"):
        gguf.expressed(msgspec.structs.replace(spec, blocks=other))
