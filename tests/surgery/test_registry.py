"""What the registry says of every swap holds for it on every tree: how it is asked for, what refusals look like, that
nothing is computed before it is written, that what is called exact is, and that its inverse undoes it.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from helpers import covering
from helpers.covering import examples, few, rest_slow
from helpers.families import CONFIGS, spec_of
from helpers.held import Held
from helpers.inverses import INVERSES, inverse
from helpers.processes import at_most
from helpers.random_trees import STATES, alike, least_done, steps_for
from helpers.trees import TREES
from helpers.weights import Weights, error
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from gptkit.cli import app
from gptkit.components import ModelSpec
from gptkit.errors import SwapRefused, UsageError
from gptkit.surgery import registry
from gptkit.surgery.base import Computed, Filled, Moved, Swapped, SwappedModel
from gptkit.surgery.listing import values_of
from gptkit.surgery.recipe import parse
from gptkit.surgery.registry import Step, Swap, all_options, all_swaps, apply, options, swap_for

SPECS: dict[str, ModelSpec] = {**{name: spec_of(config) for name, config in CONFIGS.items()}, **TREES}
GUARANTEES = ("exact", "approximate", "retrained")


def asked_of(spec: ModelSpec) -> Iterator[Step]:
    """Every example of every swap, for all layers and for the last alone, in its best form and plainly."""
    last = str(len(spec.blocks) - 1)
    for step in steps_for(spec, blocks=last):
        yield step
        yield Step(step.option, step.value, step.blocks, approximate=True)


def attempt(model: Weights, step: Step) -> Swapped | None:
    """The tree after a step, None where it is refused as swaps refuse; whatever else happens is raised."""
    refused: SwapRefused | UsageError
    try:
        return apply(model, step)
    except (SwapRefused, UsageError) as error:
        refused = error
    assert refused.message and refused.message.strip(" .") == refused.message, refused
    if isinstance(refused, UsageError):  # of values that a swap itself names as worth trying
        assert swap_for(step.option, step.value).calibrated and not step.approximate, step
        assert "text" in refused.message and "--calibrate FILE" in str(refused.hint), refused
    return None


# --- what is said -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("swap", all_swaps(), ids=lambda swap: f"{swap.option}-{swap.form}")
def test_an_entry_says_what_it_is(swap: Swap) -> None:
    for text in (swap.source, swap.needs, swap.takes, swap.gives):
        assert text == text.strip() and len(text) > 2 and not text.endswith("."), text
    assert swap.guarantee in GUARANTEES
    assert [option.name for option in all_options()].count(swap.option) == 1
    assert [(each.option, each.form) for each in all_swaps()].count((swap.option, swap.form)) == 1


@pytest.mark.parametrize("swap", all_swaps(), ids=lambda swap: f"{swap.option}-{swap.form}")
def test_no_earlier_form_takes_what_is_meant_for_a_later_one(swap: Swap) -> None:
    """The form with something in place of its words, and every example, lead to this entry and to no other."""
    value = "".join("7" if letter.isupper() else letter for letter in swap.form)
    assert swap_for(swap.option, value) is swap
    for name in [*SPECS][:: 12 if covering.quick else 1]:
        for value in values_of(swap, SPECS[name]):
            assert swap.matches(value) and swap_for(swap.option, value) is swap


def test_a_form_is_matched_whole() -> None:
    for option, swaps in options().items():
        if all(swap.form for swap in swaps) and not any(swap.form.isupper() for swap in swaps):
            with pytest.raises(UsageError, match="is unknown"):
                swap_for(option, "\x00")
    for option, value in (("attention", "mha "), ("attention", "gqa:"), ("norm", "rmsnorm:2"), ("tie", "x")):
        with pytest.raises(UsageError, match="is unknown"):
            swap_for(option, value)


MIRROR = """
from gptkit.surgery.base import Swapped
from gptkit.surgery.options import NORMS, Option
from gptkit.surgery.registry import Swap

ORDER = 5
OPTIONS = (Option("mirror", NORMS, 9, "Leave it as it is.", "plain", words="plain = simple"),)
SWAPS = (
    Swap(
        option="mirror",
        form="plain",
        takes="a model",
        gives="the same",
        needs="It is always possible",
        source="this test",
        reshape=lambda spec, asked: Swapped(spec, "exact", {}),
    ),
)
"""


def test_a_new_swap_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And CONTRIBUTING.md says so: with it there are its option, its help, its synonyms and its step of a recipe."""
    (tmp_path / "mirror_of_nothing.py").write_text(MIRROR)
    caches = (registry._modules, registry.all_options, registry.all_swaps)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(registry.swaps, "__path__", [*registry.swaps.__path__, str(tmp_path)])
            for each in caches:
                each.cache_clear()
            assert all_swaps()[0].option == "mirror" and "mirror" in [option.name for option in all_options()]
            assert "--mirror" in CliRunner().invoke(app, ["swap", "--help"]).stdout
            recipe = parse({"step": [{"mirror": "Simple"}]}, "here")
            assert recipe.steps == (Step("mirror", "plain"),)
            assert apply(Weights(SPECS["gpt2"]), recipe.steps[0]).guarantee == "exact"
    finally:
        for each in caches:
            each.cache_clear()
    table = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    assert "| a swap | 1 | a file in `surgery/swaps/`, which also declares its option |" in table


# --- on every tree ----------------------------------------------------------------------------------------------------


@few(4)
@pytest.mark.parametrize("name", rest_slow(SPECS))
def test_examples_are_done_or_refused(name: str) -> None:
    """And what is done says for each tensor of the new tree how it is made, of tensors that there are."""
    model = Weights(SPECS[name])
    there = {parameter.name for parameter in model.spec.parameters()}
    done = 0
    for step in asked_of(model.spec):
        swapped = attempt(model, step)
        if swapped is None:
            continue
        done += 1
        new = {parameter.name for parameter in swapped.spec.parameters()}
        assert new <= set(swapped.tensors) | there and set(swapped.tensors) <= new, step
        for made in swapped.tensors.values():
            assert isinstance(made, Computed | Moved | Filled)
            sources = made.names if isinstance(made, Moved) else (made.like,) if isinstance(made, Filled) else ()
            assert set(sources) <= there, step
        assert swapped.guarantee in GUARANTEES and swapped.summary["guarantee"] == swapped.guarantee
        assert swapped.summary["swap"] == step.option
        if step.option != "rope_scaling":  # of a tiny head's angles there may be none that is slow enough to change
            best = swap_for(step.option, step.value).guarantee
            assert GUARANTEES.index(swapped.guarantee) >= GUARANTEES.index(best), step
    assert done >= least_done(model.spec)


@few(5)
@pytest.mark.parametrize("name", rest_slow(SPECS))
def test_the_inverse_of_an_exact_swap_is_exact_and_gives_the_tree_back(name: str) -> None:
    model = Weights(SPECS[name])
    for step in asked_of(model.spec):
        swapped = attempt(model, step)
        undo = inverse(step, model.spec) if swapped is not None and swapped.guarantee == "exact" else None
        if swapped is None or undo is None:
            continue
        back = apply(SwappedModel(model, swapped), undo)
        assert back.guarantee == "exact", (step, undo)
        # A norm's inverse gives back the function: the stream may stay wider, and biases where they were folded to. So
        # does that of a wider stream whose embedding took in its norm.
        folded = step.option == "norm" or (step.option == "hidden" and model.spec.embedding.norm is not None)
        assert folded or alike(back.spec, model.spec), (step, undo)


def test_inverses_are_of_swaps_that_there_are() -> None:
    assert INVERSES.keys() <= {(swap.option, swap.form) for swap in all_swaps()}


class Large(Weights):
    """A tree of many parameters that take no memory: each tensor is one number, over and over."""

    def __init__(self, spec: ModelSpec) -> None:
        Held.__init__(self, spec, {})
        self.values = {
            each.name: np.broadcast_to(np.float64(0.01 + index / 1e4), each.shape)
            for index, each in enumerate(spec.parameters())
        }


SIZES = {"num_hidden_layers": 2, "num_attention_heads": 16, "hidden_size": 2048, "vocab_size": 4096}
LARGE = {
    "gpt2": {**CONFIGS["gpt2"], "n_embd": 2048, "n_head": 16, "n_layer": 2, "vocab_size": 4096},
    "llama": {**CONFIGS["llama-2"], **SIZES, "num_key_value_heads": 4, "intermediate_size": 5504},
    "falcon": {**CONFIGS["falcon-rw"], **SIZES},
    "mixtral": {
        **CONFIGS["mixtral"],
        **SIZES,
        "num_key_value_heads": 4,
        "intermediate_size": 2752,
        "num_local_experts": 2,
    },
}


@pytest.mark.exhaustive
@few(1)
@pytest.mark.parametrize("name", LARGE)
def test_nothing_is_computed_before_it_is_written(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are looked at for what decides a guarantee, which takes less than a product of two of these. Only what a
    plain form takes away by its size is found with more work.
    """
    made = list[str]()
    right = Computed.__init__

    def noting(self: Computed, make: object) -> None:
        def told(model: object) -> object:
            made.append("computed")
            return make(model)  # type: ignore[operator]

        right(self, told)  # type: ignore[arg-type]

    monkeypatch.setattr(Computed, "__init__", noting)
    model = Large(spec_of(LARGE[name]))
    for step in asked_of(model.spec):
        with nullcontext() if step.approximate else at_most(0.5, step):
            attempt(model, step)
    assert not made


# --- what is called exact ---------------------------------------------------------------------------------------------

PLAIN = ("gpt2-by-layer", "llama", "mixtral-one", "bloom", "llama-dynamic")


@few(1)
@pytest.mark.parametrize("name", PLAIN)
def test_the_plain_form_is_called_exact_only_where_it_is(name: str) -> None:
    """--approximate changes the form and not the truth: in fp64, before any rounding for storage."""
    model = Weights(SPECS[name])
    held = set()
    for step in asked_of(model.spec):
        swapped = attempt(model, step) if step.approximate and step.blocks is None else None
        if swapped is not None and swapped.guarantee == "exact" and step.option not in held:
            assert error(model, SwappedModel(model, swapped), swapped) <= 1e-12, step
            held.add(step.option)
    assert len(held) > 6


@settings(max_examples=examples(15), deadline=None, derandomize=True)
@given(data=st.data())
def test_what_weights_allow_is_exact(data: st.DataObject) -> None:
    """Zero biases, layers that write nothing, heads that are alike: labels that hang on them are measured."""

    def choose(things: object) -> object:
        return data.draw(st.sampled_from(things))  # type: ignore[arg-type]

    name = choose(sorted(SPECS))
    model = Weights(SPECS[str(name)])
    usual = {str(step) for step in asked_of(model.spec) if exact(model, step)}
    choose(STATES)(model.spec, model.values, choose)  # type: ignore[operator]
    model = Weights(model.spec, model.values)
    for step in asked_of(model.spec):
        swapped = exact(model, step)
        if swapped is not None and str(step) not in usual:
            assert error(model, SwappedModel(model, swapped), swapped) <= 1e-12, (name, step)


def exact(model: Weights, step: Step) -> Swapped | None:
    """What is called exact."""
    swapped = attempt(model, step)
    return swapped if swapped is not None and swapped.guarantee == "exact" else None
