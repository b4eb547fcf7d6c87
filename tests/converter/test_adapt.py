"""Another family's checkpoint of the same function: zero biases come and go, rounding changes, all else is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.families import CONFIGS, randomised_reference

from gptkit.converter.convert import convert
from gptkit.errors import CannotExpress

IDS = torch.tensor([[5, 9, 1, 77, 40, 3, 3, 60, 12]])


def saved(name: str, folder: Path, *, zero: str | None = None, **changes: Any) -> Any:
    """A random model of a variant, saved; the parameters whose names end with `zero` are zero."""
    model = randomised_reference({**CONFIGS[name], **changes}, torch.float32, "eager")
    for key, parameter in model.named_parameters():
        if zero is not None and key.endswith(zero):
            torch.nn.init.zeros_(parameter)
    model.save_pretrained(folder)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def loaded(folder: Path, kind: str) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    assert type(model).__name__ == kind
    return model


@pytest.mark.parametrize(
    ("source", "zero", "family", "kind"),
    [
        ("llama-3", None, "qwen2", "Qwen2ForCausalLM"),
        ("llama-3", None, "mistral", "MistralForCausalLM"),
        ("mistral-no-window", None, "llama", "LlamaForCausalLM"),
        ("mistral-no-window", None, "qwen2", "Qwen2ForCausalLM"),
        ("qwen2-no-window", "proj.bias", "llama", "LlamaForCausalLM"),
        ("qwen2-no-window", "proj.bias", "mistral", "MistralForCausalLM"),
        ("qwen2-no-window", None, "llama", "LlamaForCausalLM"),  # its attention_bias, with an output bias of zeros
    ],
)
def test_the_same_function_in_another_family(source, zero, family, kind, tmp_path):
    model = saved(source, tmp_path / "source", zero=zero)
    convert(tmp_path / "source", tmp_path / "out", f"hf:{family}")
    assert torch.equal(logits(loaded(tmp_path / "out", kind)), logits(model))


def test_what_was_added_and_left_out_is_said(tmp_path):
    saved("llama-3", tmp_path / "llama")
    notes = convert(tmp_path / "llama", tmp_path / "qwen2", "hf:qwen2").source.notes
    assert notes == [
        "added as zeros, which change nothing, because qwen2 needs them: attention.q_proj.bias, "
        "attention.k_proj.bias, attention.v_proj.bias"
    ]
    notes = convert(tmp_path / "qwen2", tmp_path / "back", "hf:llama").source.notes
    assert notes == [
        "left out, because they are all zero and llama has no such parameters: "
        "attention.k_proj.bias, attention.q_proj.bias, attention.v_proj.bias"
    ]
    before, after = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("llama", "back"))
    assert before == after


def test_a_bias_that_is_not_zero_stands_in_the_way(tmp_path):
    model = saved("qwen2-no-window", tmp_path / "source", zero="proj.bias")
    last = model.model.layers[-1].self_attn.k_proj.bias
    with torch.no_grad():
        last[-1] = 1e-30
    model.save_pretrained(tmp_path / "source")
    with pytest.raises(CannotExpress, match="qkv_bias"):
        convert(tmp_path / "source", tmp_path / "out", "hf:mistral")
    assert not (tmp_path / "out").exists()


def test_what_is_in_the_way_is_told_without_what_only_rounds(tmp_path):
    """Falcon-rw and bloom: bloom's norm of the embedding and the size of its biases differ, and arithmetic as well."""
    saved("falcon-rw", tmp_path / "source")
    with pytest.raises(CannotExpress, match=r"embedding\.norm: none, bloom has LayerNorm") as caught:
        convert(tmp_path / "source", tmp_path / "out", "hf:bloom")
    assert "arithmetic" not in caught.value.message


@pytest.mark.parametrize(
    ("source", "family", "way"),
    [
        ("gpt2", "llama", r"attention\.position: none, llama has Rotary"),
        ("qwen3", "llama", "norm"),
        ("mistral", "llama", "window"),
        ("falcon-7b", "bloom", "Rotary"),
    ],
)
def test_what_no_other_family_computes_is_refused(source, family, way, tmp_path):
    saved(source, tmp_path / "source")
    with pytest.raises(CannotExpress, match=way):
        convert(tmp_path / "source", tmp_path / "out", f"hf:{family}")
    assert not (tmp_path / "out").exists()
