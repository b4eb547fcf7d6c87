"""--config transformers4: config.json and the tokenizer's files have the names of version 4 too, and mean the same."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.command import call
from helpers.covering import few
from helpers.families import CONFIGS, VARIANTS, Variant, save_hf, spec_of
from helpers.unknown import composite
from tokenizers import Tokenizer, models, pre_tokenizers

import gptkit
from gptkit.architectures import architecture_of
from gptkit.converter.compatibility import compatible_config
from gptkit.converter.extract import extract
from gptkit.converter.targets import target
from gptkit.errors import CannotExpress, UsageError

LONG = {"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}
FORMS: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "llama3": (
        CONFIGS["llama-3"],
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", "rope_type": "llama3", "factor": 8.0}},
    ),
    "per type": (
        CONFIGS["gemma3_text-v5"],
        {"rope_theta": 1e5, "rope_local_base_freq": 1e3, "rope_scaling": {"type": "linear", "factor": 8.0}},
    ),
    "one scaled type": (CONFIGS["olmo3"], {"rope_theta": 500_000.0, "rope_scaling": {"type": "yarn", "factor": 4.0}}),
    "longrope": (
        {
            **CONFIGS["phi3"],
            "max_position_embeddings": 160,
            "rope_scaling": LONG,
            "original_max_position_embeddings": 40,
        },
        {"rope_scaling": LONG, "original_max_position_embeddings": 40},
    ),
    "a part of a head": (CONFIGS["gpt_neox"], {"rotary_pct": 0.5, "rotary_emb_base": 5000.0, "rope_scaling": None}),
    "other names": (CONFIGS["qwen3_moe"], {"num_experts": 4}),
    "types of layers": (CONFIGS["granitemoehybrid"], {"layer_types": ["mamba", "attention", "mamba"]}),
    "parts": (CONFIGS["dbrx"], {"attn_config": {"clip_qkv": 0.5, "kv_n_heads": 2, "rope_theta": 10_000.0}}),
}


INEXPRESSIBLE = ("phi3-long", "phi3-v5")
"""Variants with parameters of LongRoPE that transformers 4 does not read."""


def config_in(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


def has(config: Mapping[str, Any], fields: Mapping[str, Any]) -> bool:
    """Whether these fields are in a config; objects may have more."""
    return all(
        has(config[name], value) if isinstance(value, dict) else config[name] == value for name, value in fields.items()
    )


@pytest.mark.parametrize("form", FORMS)
def test_the_fields_of_version_4_stand_beside_and_mean_the_same(form: str, tmp_path: Path) -> None:
    config, fields = FORMS[form]
    model = save_hf(config, tmp_path / "in")
    assert (
        call(
            "convert", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "hf", "--config", "transformers4"
        ).exit_code
        == 0
    )
    written, before = config_in(tmp_path / "out"), config_in(tmp_path / "in")
    assert has(written, {**fields, "torch_dtype": "float32"}), written
    assert written.get("rope_parameters") == before.get("rope_parameters")
    family = architecture_of(config)
    assert family.spec(written) == family.spec(before)
    assert not set(family.spec_and_unknown(written)[1]) - set(family.spec_and_unknown(before)[1])
    ids = torch.arange(3, 83).reshape(1, 80)
    same = type(model).from_pretrained(tmp_path / "out", attn_implementation=model.config._attn_implementation)
    with torch.inference_mode():
        assert torch.equal(same(ids).logits, model(ids).logits)
    again = gptkit.convert(tmp_path / "out", tmp_path / "again", "hf", config="transformers4")
    assert config_in(again.target) == written
    gptkit.convert(tmp_path / "out", tmp_path / "own")
    gptkit.convert(tmp_path / "own", tmp_path / "back", "hf")
    assert (tmp_path / "back" / "config.json").read_bytes() == (tmp_path / "out" / "config.json").read_bytes()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@few(40)
def test_every_config_stays_the_same_model(variant: Variant) -> None:
    family = architecture_of(variant.config)
    for config in (variant.config, family.config_for(spec_of(variant.config))):
        if variant.name in INEXPRESSIBLE:
            with pytest.raises(CannotExpress, match="transformers 4"):
                compatible_config(config, family)
            continue
        written, changes = compatible_config(config, family)
        assert family.spec(written) == spec_of(config)
        assert compatible_config(written, family) == (written, [])
        assert bool(changes) == (written != config)


def _tokenizer(folder: Path) -> transformers.PreTrainedTokenizerFast:
    tokens = ["<s>", "<|user|>", "<|end|>", *"abcdefgh"]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        extra_special_tokens=["<|user|>", "<|end|>"],
        chat_template="{{ 1 }}",
    )
    made.save_pretrained(folder)
    return made


def test_the_tokenizer_has_a_class_of_version_4(tmp_path: Path) -> None:
    save_hf(CONFIGS["llama"], tmp_path / "in")
    before = _tokenizer(tmp_path / "in")
    gptkit.convert(tmp_path / "in", tmp_path / "out", "hf", config="transformers4")
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["additional_special_tokens"] == ["<|user|>", "<|end|>"]
    assert "extra_special_tokens" not in settings
    assert settings["chat_template"] == (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ 1 }}"
    after = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert after.extra_special_tokens == before.extra_special_tokens
    for text in ("abc <|user|> d<|end|>", "<s>h"):
        assert after(text).input_ids == before(text).input_ids
    gptkit.convert(tmp_path / "in", tmp_path / "plain", "hf")
    name = "tokenizer_config.json"
    assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "in" / name).read_bytes()


def test_a_composite_config_has_the_fields_for_its_language_model(tmp_path: Path) -> None:
    composite("gemma3").save_pretrained(tmp_path / "in")
    gptkit.convert(tmp_path / "in", tmp_path / "whole", "hf", config="transformers4")
    extract("text", tmp_path / "in", tmp_path / "text", config="transformers4")
    bases = {"rope_theta": 1e6, "rope_local_base_freq": 1e4}
    whole = config_in(tmp_path / "whole")
    assert has(whole["text_config"], bases), whole
    assert "torch_dtype" in whole
    assert has(config_in(tmp_path / "text"), {**bases, "torch_dtype": "float32"})


def test_every_command_that_writes_hugging_face_files_has_the_option(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question. " * 200)
    short = ("--tokens", "512", "--context", "64", "--batch", "64")
    form = ("--config", "transformers4")
    calls = {
        "converted": ("convert", "sample:llama", "OUT", "--to", "hf"),
        "swapped": ("swap", "sample:llama", "OUT", "--as", "hf", "--attention", "mha", "--no-measure"),
        "trained": ("train", "sample:llama", "OUT", "--data", str(text), *short),
        "healed": (
            *("heal", "sample:llama", "OUT", "--teacher", "sample:llama", "--data", str(text), "--alone"),
            *("--lr", "1e-4", *short),
        ),
    }
    for name, arguments in calls.items():
        words = [str(tmp_path / name) if word == "OUT" else word for word in arguments]
        done = call(*words, *form)
        assert done.exit_code == 0, (name, done.output)
        config = config_in(tmp_path / name)
        assert config["torch_dtype"] == config["dtype"], name
        assert config["rope_theta"] == 10_000, name
        settings = json.loads((tmp_path / name / "tokenizer_config.json").read_text())
        assert settings["tokenizer_class"] == "PreTrainedTokenizerFast", name
    model = gptkit.load("sample:llama")
    gptkit.save(model, tmp_path / "saved", "hf", config="transformers4")
    assert config_in(tmp_path / "saved")["torch_dtype"] == "bfloat16"


def test_a_recipe_remembers_the_form(tmp_path: Path) -> None:
    form = ("--as", "hf", "--config", "transformers4")
    call("swap", "sample:llama", str(tmp_path / "a"), "--attention", "mha", *form, "--no-measure")
    call("swap", "sample:llama", str(tmp_path / "b"), "--recipe", str(tmp_path / "a"), "--no-measure")
    assert config_in(tmp_path / "a") == config_in(tmp_path / "b")
    assert config_in(tmp_path / "b")["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--to", "hf", "--config", "v4"), "--config 'v4': gptkit does not know this form"),
        (
            ("--to", "local", "--config", "transformers4"),
            "works only with Hugging Face files, not with the format 'local'",
        ),
        (
            ("--to", "gguf", "--config", "transformers4"),
            "works only with Hugging Face files, not with the format 'gguf'",
        ),
    ],
)
def test_a_form_that_cannot_be_is_refused(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = call("convert", "sample:llama", str(tmp_path / "out"), *arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()


def test_the_form_in_a_format_is_checked() -> None:
    assert str(target("hf:llama@transformers4")) == "hf:llama@transformers4"
    for wrong in ("hf@4", "local@transformers4", "gguf@transformers4"):
        with pytest.raises(UsageError):
            target(wrong)


def test_what_version_4_has_no_fields_for_is_refused(tmp_path: Path) -> None:
    config = {**CONFIGS["phi3"], "max_position_embeddings": 160, "rope_scaling": {**LONG, "factor": 2.0}}
    save_hf({**config, "original_max_position_embeddings": 40}, tmp_path / "in")
    done = call("convert", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "hf", "--config", "transformers4")
    assert done.exit_code == CannotExpress.exit_code, done.stderr
    assert "transformers 4" in done.stderr
    assert not (tmp_path / "out").exists()
