"""Swaps on shapes alone: what they say of a tree is what the same swaps say of it with its weights."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import pytest
from helpers.covering import examples, exhaustive, few, rest_slow
from helpers.families import CONFIGS, spec_of
from helpers.processes import at_most
from helpers.random_trees import drawn_chain, drawn_source, least_done, possible, steps_for
from helpers.trees import TREES
from helpers.weights import Weights
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

import gptkit
from gptkit.analysis.parameters import count
from gptkit.architectures import architecture_of
from gptkit.architectures.presets import presets
from gptkit.components import ModelSpec
from gptkit.converter.resolve import SAMPLES
from gptkit.errors import GptkitError, InvalidInput, SwapRefused, UsageError
from gptkit.surgery.base import Guarantee, Model, StoredModel, SwappedModel, weakest
from gptkit.surgery.chain import chain
from gptkit.surgery.facts import Assumed
from gptkit.surgery.listing import values_of
from gptkit.surgery.registry import Step, all_swaps, apply
from gptkit.surgery.shapes import DEPENDS, Reshaped, steps_from, swapped

T = TypeVar("T")

SPECS: dict[str, ModelSpec] = {**{name: spec_of(config) for name, config in CONFIGS.items()}, **TREES}


def told(spec: ModelSpec, steps: Sequence[Step], **given: Any) -> Reshaped | SwapRefused:
    """What shapes say; a refusal is an answer too."""
    try:
        return swapped(spec, steps, **given)
    except SwapRefused as error:
        return error


def attempted(work: Callable[[], T]) -> T | GptkitError:
    """What weights say; that a text is wanted is an answer too."""
    try:
        return work()
    except (SwapRefused, UsageError) as error:
        return error


def agree(answer: Reshaped | SwapRefused, spec: ModelSpec, guarantee: str) -> bool:
    """Whether what shapes say leaves room for what the weights gave, and is as certain as it claims to be."""
    if isinstance(answer, SwapRefused):
        return "judged by the shapes" in answer.message
    tree = answer.spec == spec or not answer.settled
    return tree and answer.guarantee in (guarantee, DEPENDS)


# --- with weights, and without ----------------------------------------------------------------------------------------


@few(3)
@pytest.mark.parametrize("name", rest_slow(SPECS))
def test_random_weights_are_what_is_usual(name: str) -> None:
    """Tree and guarantee are those of random weights, and so are refusals."""
    model = Weights(SPECS[name])
    done = 0
    for step in steps_for(model.spec, blocks=str(len(model.spec.blocks) - 1)):
        for asked in (step, Step(step.option, step.value, step.blocks, approximate=True)):
            answer = told(model.spec, [asked])
            real = attempted(lambda asked=asked: apply(model, asked))
            if isinstance(real, GptkitError):
                fitted = isinstance(answer, Reshaped) and any("fitted on a text" in note for note in answer.notes)
                assert fitted or real.message in str(answer), asked
                continue
            assert isinstance(answer, Reshaped), (asked, answer)
            assert (answer.spec, answer.usual) == (real.spec, real.guarantee), asked
            assert agree(answer, real.spec, real.guarantee)
            done += 1
    assert done >= least_done(model.spec)


@exhaustive
@pytest.mark.parametrize("name", SAMPLES)
def test_every_swap_of_a_sample_gives_the_tree_that_shapes_tell(name: str) -> None:
    """Those that are fitted on a text too: the checkpoint's own, with the text that comes along."""
    source = gptkit.open_checkpoint(f"sample:{name}")
    given = {"family": source.origin.family, "files": source.folder, "texts": source.texts}
    done = 0
    for swap in all_swaps():
        for value in values_of(swap, source.spec):
            step = Step(swap.option, value)
            answer = told(source.spec, [step], **given)
            real = attempted(lambda step=step: chain(source, [step]))
            if isinstance(real, GptkitError):
                assert real.message in str(answer), step
                continue
            assert agree(answer, real.spec, real.guarantee), (step, answer)
            assert isinstance(answer, Reshaped)
            assert answer.spec == real.spec
            done += 1
    assert done > 30


@settings(max_examples=examples(20), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_chains_of_exact_swaps(data: st.DataObject) -> None:
    """Trees whose weights may be special (zeros, heads that are alike): what is claimed for certain holds for them."""
    with TemporaryDirectory() as parent:
        drawn = drawn_chain(lambda things: data.draw(st.sampled_from(things)), Path(parent))
        if not drawn.steps:
            return
        source = drawn.source
        answer = told(source.spec, drawn.steps, files=source.folder, texts=source.texts)
        note(f"{[str(step) for step in drawn.steps]}: {answer}")
        guarantee = weakest(each.guarantee for each in drawn.swapped)
        assert agree(answer, drawn.models[-1].spec, guarantee)


@few(2)
@pytest.mark.parametrize("seed", range(20))
def test_chains_of_any_swaps(seed: int, tmp_path: Path) -> None:
    """Those that are not exact too, and plain forms, on such trees."""
    rng = random.Random(seed)
    source = gptkit.open_checkpoint(drawn_source(lambda things: rng.choice(list(things)), tmp_path))
    model: Model = StoredModel(source)
    texts, steps, guarantees = dict(source.texts), list[Step](), list[Guarantee]()
    for _ in range(3):
        plain = rng.random() < 0.5
        asked = [replace(step, approximate=plain) for step in steps_for(model.spec, tmp_path, rng.choice((None, "0")))]
        rng.shuffle(asked)
        found = next(possible(model, asked, lambda _: True, files=source.folder, texts=texts), None)
        if found is None:
            break
        steps.append(found[0])
        guarantees.append(found[1].guarantee)
        texts |= {name: text for name, text in found[1].texts.items() if text is not None}
        model = SwappedModel(model, found[1])
    answer = told(source.spec, steps, files=source.folder, texts=source.texts)
    assert agree(answer, model.spec, weakest(guarantees)), ([str(step) for step in steps], answer)


def test_a_wrong_answer_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above would not see it if nothing hung on what values are said to be."""
    monkeypatch.setattr(Assumed, "filled", lambda self, value, *names: True)
    with pytest.raises(AssertionError):
        test_random_weights_are_what_is_usual("gpt2")


def test_what_is_certain_is_not_said_to_hang_on_weights() -> None:
    """Copies that write nothing may be dropped again, a gate of zeros be taken away, a table be tied to itself."""
    gpt2, llama = SPECS["gpt2"], SPECS["llama"]
    layers = len(gpt2.blocks)
    for spec, steps in (
        (gpt2, [Step("layers", "+1"), Step("layers", f"0-{layers - 1}")]),
        (gpt2, [Step("mlp", "gated"), Step("mlp", "plain")]),
        (gpt2, [Step("untie", ""), Step("tie", "")]),
        (llama, [Step("mlp", "moe:2x2"), Step("mlp", "moe:2x2")][:1]),
    ):
        found = swapped(spec, steps)
        assert (found.guarantee, found.usual, found.settled) == ("exact", "exact", True), steps


def test_what_weights_decide_is_said_to() -> None:
    fewer = swapped(spec_of(CONFIGS["llama-2"]), steps_from(["attention=mqa"]))
    assert (fewer.guarantee, fewer.usual, fewer.settled) == (DEPENDS, "approximate", True)
    assert any("fitted on a text" in note for note in fewer.notes)
    # One dimension more, unless nothing in the stream has a mean.
    norm = swapped(spec_of(CONFIGS["llama-2"]), steps_from(["norm=layernorm"]))
    assert (norm.guarantee, norm.settled) == ("exact", False)
    assert norm.spec.hidden_size == norm.before.hidden_size + 1
    with pytest.raises(SwapRefused, match="judged by the shapes"):
        swapped(spec_of(CONFIGS["llama-2"]), steps_from(["head-dim=2"]))
    # A second step that is certain to be approximate makes the whole certain.
    both = swapped(spec_of(CONFIGS["llama-2"]), steps_from(["attention=mqa", "quantize=int4"]))
    assert both.guarantee == "approximate"


def test_tokens_that_cannot_go_are_told_where_there_is_a_tokenizer() -> None:
    """As the checkpoint itself tells them; without one beside the tree a note says that nobody looked."""
    source = gptkit.open_checkpoint("sample:llama")
    few = steps_from(["vocab=100"])
    real = attempted(lambda: chain(source, few))
    assert isinstance(real, SwapRefused)
    with pytest.raises(SwapRefused) as raised:
        swapped(source.spec, few, "llama", files=source.folder)
    assert raised.value.message == real.message
    assert any("has no tokenizer" in note for note in swapped(source.spec, few).notes)


@pytest.mark.exhaustive
def test_no_number_of_made_up_values_is_told() -> None:
    """How many rows of two tables differ is for weights to say."""
    for steps in (["tie"], ["drop=biases"], ["hidden=2"]):
        for spec in SPECS.values():
            answer = told(spec, steps_from(steps))
            text = str(answer) if isinstance(answer, SwapRefused) else " ".join(answer.notes)
            assert " rows" not in text and "not zero" not in text


# --- any size ---------------------------------------------------------------------------------------------------------

LARGE = ("bloom-176b", "llama-3.1-405b", "falcon-180b", "mixtral-8x22b")


@few(1)
@pytest.mark.parametrize("name", LARGE)
def test_the_largest_presets_take_a_second(name: str) -> None:
    config = presets()[name].config
    spec = architecture_of(config).spec(config)
    rng = random.Random(1)
    values = [(swap.option, value) for swap in all_swaps() for value in values_of(swap, spec)]
    for option, value in [*rng.sample(values, 12), ("attention", "mqa"), ("hidden", "2048"), ("attention", "mla:full")]:
        with at_most(5, (option, value)):
            told(spec, [Step(option, value)])


def test_a_70b_with_fewer_heads() -> None:
    config = presets()["llama-2-70b"].config
    found = swapped(architecture_of(config).spec(config), steps_from(["attention=gqa:1/2"]), "llama", "llama-2-70b")
    assert found.steps == (Step("attention", "gqa:4"),)
    before, after = found.costs()
    assert before.parameters == count(found.before).total == 68_976_648_192
    # k and v of 80 layers, 8192 wide, lose half of their 8 heads of 128.
    assert before.parameters - after.parameters == 80 * 2 * 8192 * 4 * 128
    assert after.cached * 2 == before.cached and after.context == before.context
    assert found.as_json()["steps"] == [{"attention": "gqa:4"}]


# --- how it is asked for ----------------------------------------------------------------------------------------------


def test_steps_from_swaps_and_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text('[[step]]\nattention = "mqa"\nblocks = "0"\n[[step]]\nnorm = "rmsnorm"\n')
    assert steps_from(["norm=rmsnorm", "untie", "rope-scaling=yarn:4"]) == [
        Step("untie", ""),
        Step("norm", "rmsnorm"),
        Step("rope_scaling", "yarn:4"),
    ]
    recipe = steps_from(["--norm=layernorm"], tmp_path / "two.toml")
    assert recipe == [Step("attention", "mqa", "0"), Step("norm", "rmsnorm"), Step("norm", "layernorm")]


@pytest.mark.parametrize("text", ["attention", "attention=", "atention=mqa", "tie=yes", "", "norm=batchnorm", "=mqa"])
def test_a_swap_that_is_none(text: str) -> None:
    with pytest.raises(UsageError) as raised:
        steps_from([text])
    assert raised.value.hint


def test_errors_name_the_step() -> None:
    with pytest.raises(SwapRefused, match=r"^step 2 \(--attention gqa:3\): 3 key-value heads cannot be shared"):
        swapped(spec_of(CONFIGS["gpt2"]), [Step("untie", ""), Step("attention", "gqa:3")])
    with pytest.raises(UsageError, match="no swap was given"):
        swapped(spec_of(CONFIGS["gpt2"]), [])
    with pytest.raises(InvalidInput):
        swapped(spec_of(CONFIGS["gpt2"]), [Step("merge_lora", "sample:gpt2")], "gpt2", offline=True)
