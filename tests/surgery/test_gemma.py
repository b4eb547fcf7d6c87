"""Every swap on trees with caps, scales, norms by 1 + weight and norms of outputs: each holds what it promises of it, or
refuses by the name of what is in its way.
"""

from collections.abc import Iterator

import pytest
from helpers.families import CONFIGS, spec_of
from helpers.random_trees import steps_for
from helpers.weights import Weights, error

from gptkit.components import LayerNorm, ModelSpec
from gptkit.errors import SwapRefused, UsageError
from gptkit.surgery.base import SwappedModel
from gptkit.surgery.registry import Step, apply

NAMES = ("gemma", "gemma2", "gemma3_text")
KEPT = ("embedding.multiplier", "head.cap", "attention.cap")


def steps(spec: ModelSpec) -> Iterator[Step]:
    for step in steps_for(spec, blocks=str(len(spec.blocks) - 1)):
        yield step
        yield Step(step.option, step.value, step.blocks, approximate=True)


def fields(spec: ModelSpec) -> dict[str, object]:
    """What a swap of something else leaves as it is."""
    attention = spec.blocks[-1].attention
    return {
        "embedding.multiplier": spec.embedding.multiplier,
        "head.cap": spec.head.cap,
        "attention.cap": getattr(attention, "cap", None),
        "output norms": [each.output_norm is not None for each in spec.blocks[-1].sublayers],
        "gain": spec.final_norm.gain,
    }


@pytest.mark.parametrize("name", NAMES)
def test_every_swap_holds_or_refuses(name: str) -> None:
    """What is called exact is, in fp64; what is not loses no field on the way."""
    model, done = Weights(spec_of(CONFIGS[name])), 0
    for step in steps(model.spec):
        try:
            swapped = apply(model, step)
        except (SwapRefused, UsageError) as refused:
            assert refused.message, step
            continue
        done += 1
        assert fields(swapped.spec) == fields(model.spec), step
        if swapped.guarantee == "exact":
            assert error(model, SwappedModel(model, swapped), swapped) <= 1e-12, step
    assert done > 20
