"""What swaps that are asked for by layer share."""

import pytest

from gptkit.surgery import layerwise as module


def test_the_guarantee_goes_by_how_many_layers() -> None:
    found = [module.guarantee_of(n, 8) for n in range(9)]
    assert found == ["exact", *["approximate"] * 2, *["retrained"] * 6]
    assert module.guarantee_of(1, 1) == module.guarantee_of(1, 3) == "approximate"


@pytest.mark.parametrize(
    ("layers", "words"), [([3], "layer 3"), ([0, 2], "layers 0, 2"), ([*range(9)], "layers 0, 1, 2, 3, 4 and 4 others")]
)
def test_layers_in_words(layers: list[int], words: str) -> None:
    assert module.in_words(layers) == words
