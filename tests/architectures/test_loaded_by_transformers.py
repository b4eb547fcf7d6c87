"""transformers' classes load the weights that files hold, except for those that gptkit's tree says are changed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.covering import few
from helpers.families import REPRESENTATIVES, save_hf, spec_of

import gptkit
from gptkit import verify
from gptkit.architectures import ARCHITECTURES
from gptkit.errors import ConfigError
from gptkit.parity.sides import auto_class

PADDING = 1
FAMILIES = [name for name, family in ARCHITECTURES.items() if not family.model]


def padded(family: str, tied: bool) -> dict[str, Any]:
    """Return a family's tiny config with a padding token, its head tied or not where the family has both."""
    config = {**REPRESENTATIVES[family].config, "pad_token_id": PADDING}
    try:
        spec_of({**config, "tie_word_embeddings": tied})
    except ConfigError:
        return config
    return {**config, "tie_word_embeddings": tied}


@few(2)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_changes_no_weight_that_it_loads(family: str, tied: bool, tmp_path: Path) -> None:
    """A class that zeroes the padding token's row after loading says so in the tree (`Embedding.blank`)."""
    config = padded(family, tied)
    saved = save_hf(config, tmp_path).state_dict()
    loaded = auto_class(config).from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    blank = spec_of(config).embedding.blank
    for name, tensor in saved.items():
        expected = tensor.clone()
        if blank is not None and (name.endswith("embed_tokens.weight") or (tied and name == "lm_head.weight")):
            expected[blank] = 0
        assert torch.equal(loaded[name], expected), name


@pytest.mark.parametrize("tied", [True, False])
def test_a_row_that_transformers_zeroes_counts_as_zeros(tied: bool, tmp_path: Path) -> None:
    config = padded("youtu", tied)
    save_hf(config, tmp_path / "hf")
    reference = auto_class(config).from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    for parameter in reference.parameters():  # which is part of the mapped file, where products may sum otherwise
        parameter.data = parameter.data.clone()
    ids = torch.tensor([[5, PADDING, 9, 40, PADDING, 3]])
    gptkit.convert(tmp_path / "hf", tmp_path / "local")
    with torch.inference_mode():
        theirs = reference(ids).logits
        for folder in ("hf", "local"):
            assert torch.equal(gptkit.load(tmp_path / folder)(ids), theirs)
    assert bool((theirs[..., PADDING] == 0).all()) == tied
    for streamed in (False, True):
        result = verify(tmp_path / "hf", tmp_path / "local", mutations=False, stream=streamed)
        assert (result.verdict, result.passed) == ("identical", True)
