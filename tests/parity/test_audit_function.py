"""audit beside a source: each field of config.json that changes what the model computes is named, with its effect."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command import call
from helpers.covering import few, rest_slow
from helpers.families import CONFIGS, save_hf
from safetensors.torch import load_file, save_file

import gptkit
from gptkit.architectures import architecture_of
from gptkit.components import ModelSpec, without_rounding
from gptkit.errors import GptkitError
from gptkit.parity.audit import audit
from gptkit.parity.audits import function
from gptkit.parity.audits.subject import Audit, Finding

SAMPLES = Path(gptkit.__file__).parent / "samples"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint of a variant with random weights, made once."""
    home = tmp_path_factory.mktemp("models")

    def made(variant: str) -> Path:
        if not (home / variant).exists():
            save_hf(CONFIGS[variant], home / variant)
        return home / variant

    return made


def edited(source: Path, out: Path, path: str, value: Any) -> Path:
    """A copy of a checkpoint with one field of its config.json changed."""
    shutil.copytree(source, out)
    config = json.loads((source / "config.json").read_text())
    inside, (*parents, key) = config, path.split(".")
    for each in parents:
        inside = inside[each]
    inside[key] = value(inside.get(key)) if callable(value) else value
    (out / "config.json").write_text(json.dumps(config))
    return out


def naming(result: Audit, path: str) -> list[Finding]:
    """The findings that are no notes and name a field."""
    word = re.compile(rf"\b{re.escape(path)}\b")
    return [each for each in result.findings if each.severity != "note" and word.search(each.message + each.remedy)]


SAME_TENSORS: list[tuple[str, str, Any]] = [
    ("llama-v5", "rope_parameters.rope_theta", 77_777.0),
    ("llama-v5", "rms_norm_eps", 0.01),
    ("llama", "hidden_act", "gelu"),
    ("llama", "rope_scaling", {"rope_type": "linear", "factor": 4.0}),
    ("gpt2", "activation_function", "relu"),
    ("gpt2", "layer_norm_epsilon", 0.1),
    ("gpt2", "scale_attn_weights", False),
    ("gpt2", "scale_attn_by_inverse_layer_idx", True),
    ("mistral", "sliding_window", 4),
    ("gemma2", "query_pre_attn_scalar", 100),
    ("gemma2", "attn_logit_softcapping", 0.5),
    ("gemma2", "final_logit_softcapping", 0.7),
    ("gemma2-layer-types", "layer_types", lambda kinds: [kinds[1]] * len(kinds)),
    ("bloom", "apply_residual_connection_post_layernorm", True),
    ("mixtral", "num_experts_per_tok", 1),
    ("deepseek_v3", "routed_scaling_factor", 9.0),
    ("deepseek_v3", "n_group", 2),
    ("deepseek_v3", "norm_topk_prob", False),
    ("granite", "embedding_multiplier", 7.0),
    ("granite", "attention_multiplier", 0.9),
    ("granite", "residual_multiplier", 0.3),
    ("granite", "logits_scaling", 5.0),
    ("cohere", "logit_scale", 0.9),
    ("gpt_neox", "use_parallel_residual", False),
    ("mpt-clipped", "attn_config.clip_qkv", 0.01),
]  # fmt: skip
OTHER_TENSORS: list[tuple[str, str, Any]] = [
    ("llama", "num_hidden_layers", 1),
    ("llama", "tie_word_embeddings", True),
    ("llama", "intermediate_size", 80),
    ("llama", "vocab_size", 90),
    ("llama", "attention_bias", False),
    ("llama", "num_key_value_heads", 3),
    ("mixtral", "num_local_experts", 3),
    ("deepseek_v3", "first_k_dense_replace", 2),
]


@pytest.mark.parametrize(("variant", "path", "value"), SAME_TENSORS, ids=[f"{x}-{y}" for x, y, _ in SAME_TENSORS])
def test_a_changed_field_is_named_with_its_effect(
    variant: str, path: str, value: Any, models: Callable[[str], Path], tmp_path: Path
) -> None:
    result = audit(edited(models(variant), tmp_path / "new", path, value), source=models(variant))
    assert not result.clean
    (finding,) = naming(result, path)
    assert finding.rule == "function"
    assert re.search(
        r"With only this field changed, logits differ by up to [\d.e-]+ of the largest, KL", finding.message
    )


@pytest.mark.parametrize(("variant", "path", "value"), OTHER_TENSORS, ids=[f"{x}-{y}" for x, y, _ in OTHER_TENSORS])
def test_a_changed_field_that_asks_for_other_tensors_is_named(
    variant: str, path: str, value: Any, models: Callable[[str], Path], tmp_path: Path
) -> None:
    result = audit(edited(models(variant), tmp_path / "new", path, value), source=models(variant))
    assert naming(result, path)
    assert any(each.severity == "error" for each in result.findings)


def paths(config: dict[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict) and not {*value} & {"0", "LABEL_0"}:
            yield from paths(value, f"{place}{key}.")
        else:
            yield f"{place}{key}", value


def other_value(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 + 1 if isinstance(value, int) else value * 1.5 + 0.25
    if isinstance(value, list):
        return value[:-1] if value and not isinstance(value[0], str) else value[::-1]
    names = {"silu": "gelu", "gelu": "relu", "gelu_new": "relu", "gelu_pytorch_tanh": "relu", "relu": "gelu"}
    return names.get(value) if isinstance(value, str) else None


@few(4)
@pytest.mark.parametrize("variant", rest_slow(CONFIGS))
def test_every_field_that_changes_the_tree_is_named(
    variant: str, models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each field by itself: if the family reads another function from it or refuses it, audit says so by its name."""
    monkeypatch.setattr(function, "_opened", lambda *_: None)  # the effect is measured in other tests
    source = models(variant)
    config = json.loads((source / "config.json").read_text())
    family = architecture_of(config)
    before = family.spec(config)
    for number, (path, value) in enumerate(paths(config)):
        other = other_value(value)
        if other in (None, value) or path == "model_type":
            continue
        new = edited(source, tmp_path / str(number), path, other)
        after: ModelSpec | None = None
        with suppress(GptkitError):
            after = family.spec(json.loads((new / "config.json").read_text()))
        result = audit(new, source=source)
        changes = after is None or without_rounding(after) != without_rounding(before)
        if changes:
            assert naming(result, path), (path, [each.message for each in result.findings])
        elif after == before:
            assert not [each for each in result.findings if each.rule == "function" and "_config" not in path], path
        shutil.rmtree(new)


def test_the_same_is_said_to_people(tmp_path: Path) -> None:
    new = edited(SAMPLES / "llama", tmp_path / "new", "rms_norm_eps", 0.01)
    told = call("audit", new, "--source", "sample:llama")
    assert told.exit_code == 3
    text = " ".join(told.stdout.split())
    assert "rms_norm_eps is 0.01, but 1e-06 in the original model: norm eps 1e-06 → 0.01" in text
    assert "Values were not read: NaN, infinities and zeros need --values" in text
    assert "not read" not in call("audit", new, "--values").stdout


def test_several_fields_have_an_effect_together(tmp_path: Path) -> None:
    new = edited(SAMPLES / "llama", tmp_path / "one", "rms_norm_eps", 0.01)
    new = edited(new, tmp_path / "both", "hidden_act", "gelu")
    rules = [(each.rule, each.severity) for each in audit(new, source="sample:llama").findings]
    assert rules == [("function", "warning")] * 2 + [("function-effect", "note")]


def test_what_says_nothing_of_the_function_is_no_finding(tmp_path: Path) -> None:
    for number, (path, value) in enumerate(
        {"attention_dropout": 0.5, "transformers_version": "9", "use_cache": False}.items()
    ):
        new = edited(SAMPLES / "llama", tmp_path / str(number), path, value)
        assert not audit(new, source="sample:llama").findings, path


def test_a_field_of_an_unknown_family_is_named(tmp_path: Path) -> None:
    for name, theta in (("old", 1.0), ("new", 2.0)):
        (tmp_path / name).mkdir()
        config = {"model_type": "nobody", "theta": theta, "attention_dropout": theta}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        save_file({"w": torch.ones(2, 3)}, tmp_path / name / "model.safetensors")
    result = audit(tmp_path / "new", source=tmp_path / "old")
    assert [each.message for each in result.findings if each.rule == "function"] == [
        "config.json: theta is 2.0, but 1.0 in the original model: it may change the function"
    ]


@pytest.mark.parametrize("tokens", [True, False])
def test_a_vocabulary_that_grew_with_its_tokenizer_is_right(tokens: bool, tmp_path: Path) -> None:
    new = edited(SAMPLES / "llama", tmp_path / "new", "vocab_size", 520)
    held = load_file(new / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        held[name] = torch.cat([held[name], torch.randn(8, held[name].shape[1]).to(held[name])])
    save_file(held, new / "model.safetensors", metadata={"format": "pt"})
    if tokens:
        tokenizer = json.loads((new / "tokenizer.json").read_text())
        tokenizer["model"]["vocab"] |= {f"<more {each}>": each for each in range(512, 520)}
        (new / "tokenizer.json").write_text(json.dumps(tokenizer))
    result = audit(new, source="sample:llama")
    (finding,) = [each for each in result.findings if each.rule == "vocabulary"]
    assert result.clean == tokens
    assert "has 520 rows, but 512 in the original" in finding.message
    assert not any("Export" in each.remedy for each in result.findings)
