"""Every swap on trees with caps, scales, norms by 1 + weight and norms of outputs: each holds what it promises, or
refuses by the name of what is in its way.
"""

import re
from collections.abc import Iterator

import pytest
from helpers import covering
from helpers.covering import few
from helpers.families import CONFIGS, spec_of
from helpers.random_trees import steps_for
from helpers.weights import Weights, error

from gptkit.components import LayerNorm, ModelSpec
from gptkit.errors import SwapRefused, UsageError
from gptkit.surgery.base import SwappedModel
from gptkit.surgery.registry import Step, apply

NAMES = ("gemma", "gemma2", "gemma3_text")


def steps(spec: ModelSpec) -> Iterator[Step]:
    for step in steps_for(spec, blocks=str(len(spec.blocks) - 1)):
        yield step
        yield Step(step.option, step.value, step.blocks, approximate=True)


def fields(spec: ModelSpec) -> dict[str, object]:
    """What a swap of something else leaves as it is."""
    attention = spec.blocks[-1].mixer("attention")
    return {
        "embedding.multiplier": spec.embedding.multiplier,
        "head.cap": spec.head.cap,
        "attention.cap": getattr(attention, "cap", None),
        "output norms": [each.output_norm is not None for each in spec.blocks[-1].sublayers],
        "gain": spec.final_norm.gain,
    }


@pytest.mark.exhaustive
@few(1)
@pytest.mark.parametrize("name", NAMES)
def test_every_swap_holds_or_refuses(name: str) -> None:
    """What is called exact is, in fp64; what is not loses no field on the way."""
    model, done, measured = Weights(spec_of(CONFIGS[name])), 0, set[str]()
    for step in steps(model.spec):
        try:
            swapped = apply(model, step)
        except (SwapRefused, UsageError):
            continue
        done += 1
        assert fields(swapped.spec) == fields(model.spec), step
        if swapped.guarantee == "exact" and not (covering.quick and step.option in measured):
            measured.add(step.option)
            assert error(model, SwappedModel(model, swapped), swapped) <= 1e-12, step
    assert done > 20


def test_layernorm_in_place_of_an_rmsnorm_keeps_its_one() -> None:
    """--approximate drops the mean, and nothing of the gain."""
    model = Weights(spec_of(CONFIGS["gemma"]))
    swapped = apply(model, Step("norm", "layernorm", approximate=True))
    norm = swapped.spec.final_norm
    assert isinstance(norm, LayerNorm) and norm.gain == "1 + weight" and not swapped.tensors


@pytest.mark.parametrize(
    ("name", "step", "said"),
    [
        ("gemma2", Step("norm", "layernorm"), "attention also has output_norm"),
        ("gemma2", Step("norm", "layernorm", approximate=True), "attention also has output_norm"),
        ("gemma2", Step("hidden", "96"), "attention also has output_norm"),
        ("gemma2", Step("fold", "norm"), "attention also has output_norm"),
        ("gemma", Step("fold", "norm"), "multiplies by 1 + weight"),
        ("gemma", Step("hidden", "96"), "multiplies by 1 + weight"),
        ("gemma2", Step("attention", "mla:full"), "soft-caps attention scores"),
    ],
)
def test_what_would_be_wrong_is_refused_by_name(name: str, step: Step, said: str) -> None:
    with pytest.raises(SwapRefused, match=re.escape(said)):
        apply(Weights(spec_of(CONFIGS[name])), step)
