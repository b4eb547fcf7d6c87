"""What transformers stores as buffers, and does not count as parameters, is known of every family."""

import json

import pytest
import torch
from helpers.command import call
from helpers.families import VARIANTS, Variant, auto_class, hf_config, spec_of

from gptkit.analysis.parameters import buffers, count
from gptkit.architectures import architecture_of


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_counted_as_transformers_counts(variant: Variant) -> None:
    """Our total less the buffers is transformers' `num_parameters`, and every stored buffer is a leaf called one."""
    spec, architecture = spec_of(variant.config), architecture_of(variant.config)
    with torch.device("meta"):
        model = auto_class(variant.config).from_config(hf_config(variant.config))
    kept = model.state_dict()
    stored = sum(buffer.numel() for name, buffer in model.named_buffers() if name in kept)
    assert buffers(spec, architecture) == stored
    theirs = {name: each for name, each in model.named_parameters() if each.requires_grad or name.endswith("bias")}
    # T5's class ties the head whatever config.json says, and unties it where a checkpoint has both.
    untied = "head" in count(spec).by_component and model.get_output_embeddings() is not None and not spec.tied
    tied = untied and model.get_output_embeddings().weight is model.get_input_embeddings().weight
    more = model.get_output_embeddings().weight.numel() if tied else 0
    assert count(spec).total - stored == sum(each.numel() for each in theirs.values()) + more


def test_the_table_and_json_say_both_numbers() -> None:
    run = call("params", "deepseek-v3")
    assert run.exit_code == 0
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("buffers")]
    found = json.loads(call("params", "deepseek-v3", "--json").stdout)["models"][0]
    assert found["buffers"] == 58 * 256
    assert f"{found['buffers']:,}" in line
    assert "buffers" not in call("params", "gpt2").stdout
