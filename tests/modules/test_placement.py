"""A model that is divided over several devices: which layer is where, as data, and that it computes the same."""

import itertools
import random
from typing import Any

import pytest
import torch
from helpers.covering import few, rest_slow
from helpers.families import REPRESENTATIVES, spec_of
from helpers.pretend import NAME, pretended

import gptkit
from gptkit.architectures.presets import presets
from gptkit.errors import UsageError
from gptkit.modules.load import build
from gptkit.modules.placement import _ranges, placement
from gptkit.parity.score import random_weights

CPU = torch.device("cpu")
GPUS = [torch.device("cuda", number) for number in range(4)]
IDS = torch.arange(1, 40)[None] % 50


def test_ranges_are_the_best_there_are() -> None:
    """Compared with all divisions into ranges."""
    generator = random.Random(0)
    for _ in range(150):
        count = generator.randint(1, 8)
        sizes = [generator.randint(1, 50) for _ in range(count)]
        ends, parts = (generator.randint(0, 80), generator.randint(0, 80)), generator.randint(1, count)

        def largest(counts: Any, sizes: list[int] = sizes, ends: tuple[int, int] = ends) -> int:
            starts = [sum(counts[:number]) for number in range(len(counts) + 1)]
            sums = [sum(sizes[first:last]) for first, last in itertools.pairwise(starts)]
            sums[0] += ends[0]
            sums[-1] += ends[1]
            return max(sums)

        cuts = itertools.combinations(range(1, count), parts - 1)
        best = min(largest([b - a for a, b in itertools.pairwise((0, *cut, count))]) for cut in cuts)
        counts = _ranges(sizes, ends, parts)
        assert sum(counts) == count
        assert min(counts) > 0
        assert largest(counts) == best


def test_a_model_of_eight_billion_parameters() -> None:
    spec = spec_of(presets()["qwen3-8b"].config)
    places = placement(spec, 2, GPUS)
    assert list(places.blocks) == sorted(places.blocks, key=str)
    assert (places.front, places.back) == (GPUS[0], GPUS[3])
    assert sum(places.nbytes) == sum(parameter.count for parameter in spec.parameters()) * 2
    assert max(places.nbytes) < 1.15 * sum(places.nbytes) / 4
    assert places.of("embedding") == places.of("blocks.0.attention.q_proj.weight") == GPUS[0]
    assert places.of("blocks.35") == places.of("head") == places.of("final_norm") == GPUS[3]


def test_a_tied_head_is_where_the_embedding_is() -> None:
    places = placement(spec_of(presets()["gpt2"].config), 4, GPUS[:2])
    assert places.front == places.back == GPUS[0]
    assert places.blocks[-1] == GPUS[1]


@pytest.mark.parametrize(
    ("name", "devices", "said"),
    [
        ("llama", 9, "layers cannot be divided over 9 devices"),
        ("zamba2", 2, "share their weights"),
        ("marian", 2, "an encoder and a decoder"),
    ],
)
def test_models_that_cannot_be_divided(name: str, devices: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        placement(spec_of(REPRESENTATIVES[name].config), 4, [CPU] * devices)


@pytest.mark.parametrize("sample", ["gpt2", "llama", "bloom"])
def test_two_parts_compute_what_one_does(sample: str) -> None:
    whole, parts = (gptkit.load(f"sample:{sample}", device=device) for device in ("cpu", "cpu,cpu"))
    assert whole.placement is None
    assert parts.placement is not None
    with torch.no_grad():
        assert torch.equal(whole(IDS), parts(IDS))
    texts = ["".join(gptkit.generate(model, "ROMEO:", 12)) for model in (whole, parts)]
    beams = ["".join(gptkit.generate(model, "ROMEO:", 6, beams=2)) for model in (whole, parts)]
    assert texts[0] == texts[1] == "".join(gptkit.generate(f"sample:{sample}", "ROMEO:", 12, device=["cpu", "cpu"]))
    assert beams[0] == beams[1]


@few(6)
@pytest.mark.parametrize("family", rest_slow(REPRESENTATIVES))
def test_tensors_move_at_the_border(family: str) -> None:
    """With two devices between which no operation works. A tensor that stayed behind would be an error."""
    spec = spec_of(REPRESENTATIVES[family].config)
    weights = random_weights(spec)
    ids = IDS % spec.vocab_size
    mask = torch.ones_like(ids).repeat(2, 1)
    mask[1, :7] = 0

    def model(device: Any) -> Any:
        values = ((key, value.float().numpy(), "F32") for key, value in weights.items())
        return build(spec, values, torch.float32, "eager", device=device)

    def outputs(device: Any) -> list[torch.Tensor]:
        part = model(device)
        with torch.no_grad():
            if part.encoder is not None:
                place = part.embedding.weight.device
                source = (ids % part.encoder.spec.vocab_size).to(place)
                return [part(ids.to(place), encoded=part.encode(source))]
            place = part.embedding.weight.device
            results = [part(ids.to(place)), part(ids.repeat(2, 1).to(place), mask.to(place))]
            if spec.head is None or not spec.causal:
                return results
            tokens = "".join(gptkit.generate(part, ids[0].tolist(), 4, stop_at_eos=False))
            return [*results, torch.tensor([int(token) for token in tokens.split()])]

    whole = outputs("cpu")
    divided = spec.encoder is None and not spec.has_shared_blocks
    with pretended() as device:
        for places in (device, [device, f"{NAME}:1"]) if divided else (device,):
            for one, other in zip(whole, outputs(places), strict=True):
                assert torch.allclose(one, other.cpu(), rtol=1e-4, atol=1e-4, equal_nan=True)
