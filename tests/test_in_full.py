"""Of the newer families with most checkpoints, each variant in full: there and back with equal bytes, verified, and 64
tokens as transformers continues them. What their swaps do is in surgery/test_listing.py, their GGUFs in
converter/test_gguf_write.py.
"""

from pathlib import Path

import pytest
import torch
from helpers.families import VARIANTS, Variant, decoder_from, randomised_reference, save_hf, spec_of
from helpers.generation import generate_ids

from gptkit.architectures import architecture_of
from gptkit.converter.convert import convert
from gptkit.parity.verify import verify

TEN = ("gemma3_text", "gemma4_text", "gpt_neox", "phi3", "olmo2", "gpt_oss", "glm4_moe", "opt", "llama4_text", "mpt")
FULL = [each for each in VARIANTS if each.family in TEN and "text_config" not in each.config]
"""Composite models, with what lies beside their language model, are in converter/test_convert.py."""
PROMPT = [5, 90, 17, 3, 44, 44, 61, 8, 23, 72, 1, 35, 50]


def contents(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in folder.iterdir() if each.name != "manifest.json"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", FULL, ids=lambda each: each.name)
def test_a_family_in_full(variant: Variant, dtype: torch.dtype, tmp_path: Path) -> None:
    save_hf(variant.config, tmp_path / "hf", dtype)
    for form in ("local", "dcp"):
        convert(tmp_path / "hf", tmp_path / form, form)
        convert(tmp_path / form, tmp_path / f"{form}-back", "hf", allow_pickle=True)
        assert contents(tmp_path / f"{form}-back") == contents(tmp_path / "hf"), form
    assert verify(tmp_path / "hf").verdict == "identical"
    config = {**variant.config, "tie_word_embeddings": False}
    kernel = architecture_of(config).reference(spec_of(config))[0]
    reference = randomised_reference(config, dtype, kernel)
    ids = torch.tensor([PROMPT])
    wanted = reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert generate_ids(decoder_from(reference, config, kernel), PROMPT, 64) == wanted[0, len(PROMPT) :].tolist()
