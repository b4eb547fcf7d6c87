"""The tiny config of transformers' own tests, put into every family's config class by the names of its fields, all
parameters random: to the bit, or refused by the name of a field.

Source: transformers' repository, tests/causal_lm_tester.py, CausalLMModelTester, whose numbers these are. Which of them
a class has is for its signature to say, as there.
"""

import inspect
from typing import Any

import pytest
import torch
import transformers
from helpers.covering import few
from helpers.families import VOCAB, decoder_from, randomised_reference, spec_of

from gptkit.architectures import ARCHITECTURES
from gptkit.components import ModelSpec
from gptkit.errors import ConfigError
from gptkit.parity.outputs import computed_rightly, outputs_of
from gptkit.parity.probe import ProbeBatch

TINY: dict[str, Any] = {
    "vocab_size": 99,
    "vocab_size_per_layer_input": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 37,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "initializer_range": 0.02,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 36,
    "num_experts_per_tok": 2,
    "num_experts": 8,
}
REFUSED = {
    "gpt_neo": ("attention_types",),
    "gptj": ("rotary_dim",),
    "codegen": ("n_head",),
    "aria_text": ("hidden_act",),
}
"""Families whose class takes what has no tree, and the fields that say so."""
WHOLE = {"intermediate_size": 40, "moe_intermediate_size": 16}
"""Widths of experts whose rows are whole 16 bytes, as transformers' product of all of them wants: its own tests have
another of each expert.
"""
MIXED = {"layer_types": ["linear_attention", "full_attention"]}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), MIXED),
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "n_groups": 2},
    "granitemoehybrid": {**MIXED, "mamba_n_heads": 16},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": 2 * ["full_attention", "sliding_attention"],
        "altup_num_inputs": 2,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "bamba": {"mamba_n_heads": 16, "attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
}
"""What a family's own tests there say beside: layers without attention, or with none to share, are refused."""
MADE = [name for name, each in ARCHITECTURES.items() if not each.model]


def tiny(family: str) -> dict[str, Any]:
    """The config of a family: what its class is called to say, and what every file of it states."""
    kind = getattr(transformers, ARCHITECTURES[family].hf_config)
    names = inspect.signature(kind.__init__).parameters
    mixed = any("experts" in name for name in names)
    values = {**TINY, **(WHOLE if mixed else {})}
    called = {name: name if name in names else kind.attribute_map.get(name, name) for name in values}
    found = {called[name]: value for name, value in values.items() if called[name] in names}
    return {"model_type": family, **ARCHITECTURES[family].stated, **found, **OWN.get(family, {})}


def read(config: dict[str, Any]) -> ModelSpec | str:
    """The tree, or the words of its refusal."""
    try:
        return spec_of(config)
    except ConfigError as error:
        return str(error)


@few(4)
@pytest.mark.parametrize("family", MADE)
def test_the_tiny_config_of_transformers_own_tests(family: str) -> None:
    config = tiny(family)
    spec = read(config)
    if isinstance(spec, str):
        assert any(name in spec for name in REFUSED.get(family, ("nothing",))), spec
        return
    ids = torch.randint(VOCAB, (3, 17), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :5] = mask[1, -4:] = 0
    for attention in ARCHITECTURES[family].reference(spec):
        for dtype in (torch.float32, torch.bfloat16):
            reference = randomised_reference(config, dtype, attention)
            if spec.embedding.blank is not None:  # as from_pretrained leaves that row
                reference.get_input_embeddings().weight.data[spec.embedding.blank] = 0
            decoder = decoder_from(reference, config, attention)
            with torch.inference_mode():
                for batch in (ProbeBatch("whole", ids), ProbeBatch("padded", ids, mask)):
                    if batch.attention_mask is not None and not computed_rightly(ARCHITECTURES[family], batch):
                        continue
                    ours, theirs = (batch.valid(outputs_of(model, batch)) for model in (decoder, reference))
                    assert torch.equal(ours, theirs), (attention, dtype, batch.name)
