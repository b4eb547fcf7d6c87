"""audit --for PROGRAM: what a program would refuse, misread or ignore in config.json and the tokenizer's files."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command import call
from helpers.families import CONFIGS, save_hf
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import gptkit
from gptkit.architectures import ARCHITECTURES, architecture_of
from gptkit.architectures.loaders import ABSENT, RULES
from gptkit.errors import InvalidInput, UsageError
from gptkit.parity.audit import LOADERS, audit, fix

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40}
MLX_LLAMA = """
class ModelArgs(BaseModelArgs):
    model_type: str
    head_dim: int
    qk_norm: bool
    rope_theta: float = 10000
    rope_scaling: dict = None

class Model:
    pass
"""


def loader_findings(result: Any) -> list[tuple[str, str]]:
    return [(finding.rule, finding.message) for finding in result.findings if finding.rule.startswith("loader-")]


def written(config: Mapping[str, Any], folder: Path) -> Path:
    """A folder with a config alone, and a tensor."""
    save_hf(config, folder)
    return folder


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder that transformers 5 wrote, with scaled RoPE and a tokenizer."""
    save_hf(CONFIGS["llama-3"], tmp_path / "saved")
    tokenizer = Tokenizer(models.BPE({"<s>": 0, "<|end|>": 1, "a": 2}, []))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", extra_special_tokens=["<|end|>"]
    ).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def test_what_transformers_4_would_do_is_told_and_repaired(saved: Path, tmp_path: Path) -> None:
    rules = {(rule, message.split(" (")[0]) for rule, message in loader_findings(audit(saved, loader="transformers4"))}
    assert {
        (
            "loader-misreads",
            "config.json: programs that do not read rope_parameters use the default base, and no scaling",
        ),
        (
            "loader-refuses",
            "tokenizer_config.json: transformers 4 has no class of this name, and does not load the tokenizer",
        ),
        ("loader-refuses", "tokenizer_config.json: transformers 4 fails with: 'list' object has no attribute 'keys'"),
    } <= rules
    assert call("audit", saved, "--for", "transformers4").exit_code == 3
    done = call("audit", saved, "--for", "transformers4", "--fix", tmp_path / "fixed")
    assert done.exit_code == 0, done.output
    assert loader_findings(audit(tmp_path / "fixed", loader="transformers4")) == []
    config = json.loads((tmp_path / "fixed" / "config.json").read_text())
    assert (config["rope_theta"], config["rope_scaling"]["type"], config["torch_dtype"]) == (5e5, "llama3", "float32")
    ids = torch.arange(3, 83).reshape(1, 80)
    assert torch.equal(gptkit.load(tmp_path / "fixed")(ids), gptkit.load(saved)(ids))
    plain = fix(saved, tmp_path / "plain")
    assert plain.clean
    assert (tmp_path / "plain" / "config.json").read_bytes() == (saved / "config.json").read_bytes()


def test_a_family_that_is_not_known_is_repaired_too(saved: Path, tmp_path: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**config, "model_type": "novel"}))
    assert any(rule == "loader-misreads" for rule, _ in loader_findings(audit(saved, loader="transformers4")))
    fix(saved, tmp_path / "fixed", loader="transformers4")
    written = json.loads((tmp_path / "fixed" / "config.json").read_text())
    assert (written["rope_theta"], written["rope_scaling"]["factor"], written["torch_dtype"]) == (5e5, 8.0, "float32")
    assert loader_findings(audit(tmp_path / "fixed", loader="transformers4")) == []


MISREAD: dict[str, tuple[str, Mapping[str, Any], str, str]] = {
    "a base": ("transformers4", CONFIGS["cohere"], "loader-misreads", "use the default base"),
    "two bases": ("transformers4", CONFIGS["modernbert-decoder"], "loader-misreads", "one RoPE base for all layers"),
    "mscale": (
        "transformers4",
        {
            **CONFIGS["deepseek_v2"],
            "max_position_embeddings": 160,
            "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
        },
        "loader-misreads",
        "mscale",
    ),
    "groups": ("transformers4", CONFIGS["mamba2"], "loader-misreads", "gated norm"),
    "no class": ("transformers4", CONFIGS["mellum"], "loader-refuses", "does not have this model type"),
    "another name": ("transformers4", CONFIGS["qwen3_moe"], "loader-misreads", "does not know the names"),
    "inexpressible": (
        "transformers4",
        CONFIGS["phi3-long"],
        "loader-refuses",
        "it reads only long_factor, short_factor, type",
    ),
    "rotary_pct": ("llama.cpp", CONFIGS["cohere2"], "loader-refuses", "KeyError: 'rotary_pct'"),
}


@pytest.mark.parametrize("case", MISREAD)
def test_what_a_program_does_with_a_family_is_told(case: str, tmp_path: Path) -> None:
    loader, config, rule, words = MISREAD[case]
    found = loader_findings(audit(written(config, tmp_path / "model"), loader=loader))
    assert any(finding == rule and words in message for finding, message in found), found


def test_usual_values_are_no_error(tmp_path: Path) -> None:
    found = loader_findings(audit(written(CONFIGS["llama-2"], tmp_path / "model"), loader="transformers4"))
    assert {rule for rule, _ in found} == {"loader-ignores"}, found


def test_types_that_contradict_are_refused_by_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptkit.parity.audit.RULES", [rule for rule in _rules() if rule.__name__ != "ask_program"])
    folder = written(CONFIGS["phi3-long"], tmp_path / "model")
    assert any("type and rope_type differ" in message for _, message in loader_findings(audit(folder, loader="vllm")))


def _rules() -> Any:
    from gptkit.parity.audit import RULES as ALL

    return ALL


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources in the idiom of mlx-lm and SGLang, which cannot be imported."""
    texts = {
        "mlx_lm/__init__.py": "raise ImportError",
        "mlx_lm/utils.py": 'MODEL_REMAPPING = {"mistral": "llama"}\n',
        "mlx_lm/models/llama.py": MLX_LLAMA,
        "sglang/__init__.py": "raise ImportError",
        "sglang/srt/models/llama.py": "EntryClass = [\n    LlamaForCausalLM,\n    Phi3ForCausalLM,\n]\n",
    }
    for name, text in texts.items():
        (tmp_path / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / name).write_text(text)
    for name in ("mlx_lm", "sglang"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path / "site")


@pytest.mark.usefixtures("sources")
def test_what_mlx_needs_is_read_from_its_source(tmp_path: Path) -> None:
    folder = written(CONFIGS["llama-3"], tmp_path / "model")
    found = dict(loader_findings(audit(folder, loader="mlx")))
    assert "qk_norm (mlx-lm, models/llama.py)" in found["loader-refuses"]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "qk_norm": True}))
    found = dict(loader_findings(audit(folder, loader="mlx")))
    assert "loader-refuses" not in found
    assert "uses its default of rope_theta" in found["loader-misreads"]
    assert call("audit", folder, "--for", "mlx", "--fix", tmp_path / "fixed").exit_code == 0
    assert [rule for rule, _ in loader_findings(audit(tmp_path / "fixed", loader="mlx"))] == ["loader-unread"]
    window = written(CONFIGS["mistral"], tmp_path / "window")
    assert any("no attention windows" in message for _, message in loader_findings(audit(window, loader="mlx")))
    other = written(CONFIGS["gpt_neo"], tmp_path / "other")
    message = "mlx-lm has no class for the model type 'gpt_neo'"
    assert loader_findings(audit(other, loader="mlx")) == [("loader-refuses", message)]


@pytest.mark.usefixtures("sources")
def test_which_classes_sglang_has_is_read_from_its_source(tmp_path: Path) -> None:
    assert loader_findings(audit(written(CONFIGS["llama"], tmp_path / "own"), loader="sglang")) == []
    folder = written(CONFIGS["gpt2"], tmp_path / "other")
    assert loader_findings(audit(folder, loader="sglang")) == [
        ("loader-architecture", "SGLang has no class of its own for 'GPT2LMHeadModel', and runs transformers' class")
    ]
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps(config))
    assert [rule for rule, _ in loader_findings(audit(folder, loader="sglang"))] == ["loader-refuses"]


@pytest.mark.parametrize("loader", ["mlx", "sglang"])
def test_a_program_that_is_not_installed_is_named(loader: str, tmp_path: Path) -> None:
    folder = written(CONFIGS["llama"], tmp_path / "model")
    with pytest.raises(UsageError, match="which is not installed") as told_why:
        audit(folder, loader=loader)
    assert "pip install --no-deps" in str(told_why.value.hint)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    written(CONFIGS["llama"], tmp_path / "model")
    (tmp_path / "model" / "config.json").unlink()
    for loader in ("transformers4", "mlx"):
        with pytest.raises(InvalidInput, match=r"no config\.json"):
            audit(tmp_path / "model", loader=loader)


def test_every_rule_is_of_a_known_program_and_family() -> None:
    assert {rule.program for rule in RULES} <= set(LOADERS)
    assert {name for rule in RULES for name in rule.families} | ABSENT <= ARCHITECTURES.keys()
    assert all(rule.source and not rule.words.endswith(".") for rule in RULES)
    assert architecture_of(CONFIGS["llama"]).rotaries[""].only == ()
