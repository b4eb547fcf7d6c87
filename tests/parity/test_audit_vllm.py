"""audit --for vllm: what is told by models in vLLM's idiom, and by those of an installed one."""

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command import call
from helpers.families import CONFIGS, save_hf
from safetensors.torch import load_file, save_file

from gptkit.converter import transformers_process, vllm_process
from gptkit.errors import InvalidInput, UsageError
from gptkit.parity.audit import audit
from gptkit.parity.audits import programs
from gptkit.parity.audits.subject import Audit

SOURCE = {
    "__init__.py": "raise ImportError('only its models are run')",
    "model_executor/models/registry.py": """
_VLLM_MODELS = {
    "LlamaForCausalLM": ("tiny", "TinyForCausalLM"),
    "OddForCausalLM": ("tiny", "OddForCausalLM"),
    "UntoldForCausalLM": ("tiny", "UntoldForCausalLM"),
    "PhiForCausalLM": ("transformers", "TransformersForCausalLM"),
}
_PREVIOUSLY_SUPPORTED_MODELS = {"GoneForCausalLM": "0.9.2"}
""",
    "model_executor/models/utils.py": """
import itertools
from dataclasses import dataclass, field
from torch import nn
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

@dataclass
class WeightsMapper:
    stacked: dict = field(default_factory=dict)
    dropped: tuple = ()
    def apply(self, weights):
        for name, tensor in weights:
            for old, (new, shard) in self.stacked.items():
                if old in name:
                    name, tensor.shard_id = name.replace(old, new), shard
            if not name.startswith(self.dropped):
                yield name, tensor

class AutoWeightsLoader:
    def __init__(self, module, ignored=()):
        self.module, self.ignored = module, ignored
    def load_weights(self, weights, mapper=None):
        return set(self.within("", self.module, weights if mapper is None else mapper.apply(weights)))
    def within(self, path, module, weights):
        if module is not self.module and callable(getattr(module, "load_weights", None)):
            yield from module.load_weights(weights)
        children = dict(module.named_children())
        parameters = dict(module.named_parameters(recurse=False))
        parts = ((name.split(".", 1), tensor) for name, tensor in weights)
        for head, group in itertools.groupby(parts, key=lambda each: each[0][0]):
            inner = (("" if len(names) == 1 else names[1], tensor) for names, tensor in group)
            if head in children:
                yield from self.within(f"{path}{head}.", children[head], inner)
            elif head in parameters:
                for name, tensor in inner:
                    getattr(parameters[head], "weight_loader", default_weight_loader)(parameters[head], tensor)
                    yield f"{path}{head}"
            else:
                for name, tensor in inner:
                    full = f"{path}{head}.{name}".rstrip(".")
                    if not full.startswith(self.ignored) and not full.endswith(".bias"):
                        raise ValueError(f"There is no module or parameter named {full!r}")

def make_layers(number, maker, prefix):
    return 0, number, nn.ModuleList([maker(prefix=f"{prefix}.{place}") for place in range(number)])
""",
    "model_executor/models/tiny.py": """
import torch
from torch import nn
from vllm import kernels
from vllm.distributed import get_pp_group
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from .utils import AutoWeightsLoader, WeightsMapper, make_layers

def with_model(weights):
    for name, tensor in weights:
        if not name.startswith(("model.", "lm_head.", "value_head.")):
            name = "model." + name
        yield name, tensor

class Attention(nn.Module):
    def __init__(self, config, quant_config, bias=False):
        super().__init__()
        self.qkv_proj = QKVParallelLinear(config.hidden_size, bias=bias, quant_config=quant_config)
        self.o_proj = ColumnParallelLinear(config.hidden_size, bias=False, quant_config=quant_config)
        if config.num_attention_heads > 1000:
            self.scale = nn.Parameter(torch.ones(1))

class Gated(nn.Module):
    def __init__(self, config, quant_config):
        super().__init__()
        self.gate_up_proj = ColumnParallelLinear(config.hidden_size, bias=False, quant_config=quant_config)
        self.down_proj = ColumnParallelLinear(config.intermediate_size, bias=False, quant_config=quant_config)

class Layer(nn.Module):
    def __init__(self, vllm_config, prefix="", attention=Attention):
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.self_attn = attention(config, vllm_config.quant_config, bias=getattr(config, "attention_bias", False))
        self.mlp = Gated(config, quant_config=vllm_config.quant_config)
        self.input_layernorm = RMSNorm(config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size)

class Tiny(nn.Module):
    hf_to_vllm_mapper = WeightsMapper(
        stacked={f".{x}_proj": (".qkv_proj", x) for x in ("q", "k", "v")}
        | {".gate_proj": (".gate_up_proj", 0), ".up_proj": (".gate_up_proj", 1)},
        dropped=("drafts.", "rotary_emb."),
    )
    def __init__(self, *, vllm_config, prefix="", layer_type=Layer):
        super().__init__()
        config = vllm_config.model_config.hf_config
        if get_pp_group().is_first_rank:
            self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        make = lambda prefix: layer_type(vllm_config, prefix)
        _, _, self.layers = make_layers(config.num_hidden_layers, make, prefix)
        self.norm = RMSNorm(config.hidden_size)
    def load_weights(self, weights):
        loader = AutoWeightsLoader(self)
        return loader.load_weights(weights, mapper=self.hf_to_vllm_mapper)

class TinyForCausalLM(nn.Module):
    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()
        config = vllm_config.model_config.hf_config
        if config.hidden_act != "silu":
            raise ValueError(f"Unsupported activation: {config.hidden_act}")
        self.model = self.make(vllm_config)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
    def make(self, vllm_config):
        return Tiny(vllm_config=vllm_config)
    def load_weights(self, weights):
        loader = AutoWeightsLoader(self, ignored=("value_head.",))
        return loader.load_weights(with_model(weights))

class OddForCausalLM(TinyForCausalLM):
    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            for old, new, shard in [(".gate_proj", ".gate_up_proj", 0), (".up_proj", ".gate_up_proj", 1)]:
                if old in name:
                    parameter = parameters[name.replace(old, new)]
                    parameter.weight_loader(parameter, tensor, shard)
                    break
            else:
                for shard in "qkv":
                    name = name.replace(f".{shard}_proj", ".qkv_proj")
                default_weight_loader(parameters[name], tensor)

class UntoldForCausalLM(TinyForCausalLM):
    def __init__(self, *, vllm_config):
        super().__init__(vllm_config=vllm_config)
        if kernels.are_fast():
            self.more = nn.Linear(3, 3)
""",
    "model_executor/layers/quantization/__init__.py": 'QuantizationMethods = Literal["fp8"]',
}
QUERIES, OUTPUT, NORM = (
    f"model.layers.1.{name}.weight" for name in ("self_attn.q_proj", "self_attn.o_proj", "input_layernorm")
)
PART = "model.layers.1.self_attn.qkv_proj.weight (q)"
BEYOND, BIAS = OUTPUT.replace(".1.", ".9."), QUERIES.replace("weight", "bias")
CASES: dict[str, tuple[list[str], dict[str, Any], list[tuple[str, str, tuple[str, ...]]]]] = {
    "nothing": ([], {}, []),
    "a part of a matrix is gone": ([QUERIES], {}, [("loader-draws", "uninitialised memory", (PART,))]),
    "a matrix is gone": ([OUTPUT], {}, [("loader-draws", "uninitialised memory", (OUTPUT,))]),
    "a norm is gone": ([NORM], {}, [("loader-draws", "does not load", (NORM,))]),
    "a tensor too many": ([], {"model.extra.w": 1}, [("loader-ignores", "does not load", ("model.extra.w",))]),
    "a layer too many": ([], {BEYOND: 1}, [("loader-ignores", "does not load", (BEYOND,))]),
    "a bias too many": ([], {BIAS: 1}, [("loader-ignores", "without a warning", (BIAS,))]),
    "what is left out": ([], {"drafts.w": 1, "value_head.w": 1, "model.rotary_emb.w": 1},
                         [("loader-ignores", "without a warning", ("drafts.w", "model.rotary_emb.w", "value_head.w"))]),
}  # fmt: skip


class InProcess:
    """`Confined` without a process, whose libraries take seconds to import."""

    def __init__(self, worker: str) -> None:
        self.worker: Any = {"transformers_process": transformers_process, "vllm_process": vllm_process}[worker]

    def ask(self, question: Any) -> Any:
        loaded = {name: each for name, each in sys.modules.items() if name.split(".")[0] in ("torch", "vllm")}
        if self.worker is vllm_process:
            for name in loaded:
                del sys.modules[name]
        try:
            return self.answered(question)
        finally:
            for name in [name for name in sys.modules if name.split(".")[0] in ("torch", "vllm")]:
                del sys.modules[name]
            sys.modules.update(loaded)
            sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, vllm_process._Finder)]
            vllm_process._LOG.__init__()

    def answered(self, question: Any) -> Any:
        return {"answer": self.worker.answer(json.loads(json.dumps(question | {"libraries": []})))}


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source in vLLM's idiom, which cannot be imported."""
    for name, text in SOURCE.items():
        file = tmp_path / "site" / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr(programs, "Confined", InProcess)
    monkeypatch.setattr(tempfile, "tempdir", tempfile.gettempdir())
    for worker in (transformers_process, vllm_process):
        monkeypatch.setattr(worker, "allow", lambda *_: None)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)  # a checkout may be called so
    monkeypatch.syspath_prepend(tmp_path / "site")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_hf(CONFIGS["llama-2"], folder)
    return folder


def changed(model: Path, folder: Path, without: list[str], added: dict[str, Any], **fields: Any) -> Path:
    held = load_file(model / "model.safetensors")
    kept = {name: each for name, each in held.items() if name not in without}
    folder.mkdir()
    save_file({**kept, **{name: torch.ones(3) for name in added}}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def told(result: Audit) -> list[tuple[str, str, tuple[str, ...]]]:
    found = [(each.rule, each.message, each.tensors) for each in result.findings if each.rule.startswith("loader-")]
    return [(rule, message, tuple(sorted(tensors))) for rule, message, tensors in found]


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("case", CASES)
def test_what_vllm_does_with_names_is_told_by_its_source(case: str, model: Path, tmp_path: Path) -> None:
    without, added, wanted = CASES[case]
    found = told(audit(changed(model, tmp_path / "new", without, added), loader="vllm"))
    by_names = sorted(found, key=lambda each: each[2])
    assert [(rule, names) for rule, _, names in by_names] == [(rule, names) for rule, _, names in wanted], found
    assert all(words in message for (_, message, _), (_, words, _) in zip(by_names, wanted, strict=True))
    assert "vllm" not in sys.modules


@pytest.mark.usefixtures("vllm")
def test_what_vllm_has_no_class_for_is_told(model: Path, tmp_path: Path) -> None:
    refusals: dict[str, tuple[dict[str, Any], str, str]] = {
        "gone": ({"architectures": ["GoneForCausalLM"]}, "loader-refuses", "0.9.2"),
        "unknown": ({"architectures": ["NobodyForCausalLM"]}, "loader-refuses", "neither vLLM nor transformers"),
        "none": ({"architectures": None}, "loader-refuses", "has no field architectures"),
        "transformers": ({"architectures": ["PhiForCausalLM"]}, "loader-architecture", "runs transformers' class"),
        "fallback": ({"architectures": ["LlamaModel"]}, "loader-architecture", "supports vLLM's attention"),
        "untold": ({"architectures": ["UntoldForCausalLM"]}, "loader-unread", "vllm.kernels.are_fast"),
        "refused": ({"hidden_act": "gelu"}, "loader-refuses", "Unsupported activation: gelu"),
        "quantised": ({"quantization_config": {"quant_method": "secret"}}, "loader-refuses", "'secret'"),
    }
    for case, (fields, rule, words) in refusals.items():
        found = told(audit(changed(model, tmp_path / case, [], {}, **fields), loader="vllm"))
        assert [(x, words in message) for x, message, _ in found if x == rule] == [(rule, True)], (case, found)
        assert case == "quantised" or len(found) == 1, (case, found)
    assert told(audit(changed(model, tmp_path / "odd", [], {}, architectures=["OddForCausalLM"]), loader="vllm")) == []
    folder = changed(model, tmp_path / "untied", ["lm_head.weight"], {}, tie_word_embeddings=True)
    assert told(audit(folder, loader="vllm")) == []
    changed(model, tmp_path / "tied", [], {})
    (tmp_path / "tied" / "config.json").unlink()
    with pytest.raises(InvalidInput, match=r"has no config\.json"):
        audit(tmp_path / "tied", loader="vllm")


def test_where_no_source_is_installed_that_is_said(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find(name))
    with pytest.raises(UsageError, match="not installed"):
        audit(model, loader="vllm")
    assert call("audit", model, "--for", "vllm").exit_code == 2


INSTALLED = importlib.util.find_spec("vllm.model_executor") if importlib.util.find_spec("vllm") else None


@pytest.mark.slow
@pytest.mark.skipif(INSTALLED is None, reason="vLLM's source is not installed")
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "gemma3_text", "mistral", "bloom", "opt"])
def test_vllms_own_source_finds_what_was_planted_and_nothing_else(name: str, tmp_path: Path) -> None:
    save_hf(CONFIGS[name], tmp_path / "model")
    assert told(audit(tmp_path / "model", loader="vllm")) == []
    held = load_file(tmp_path / "model" / "model.safetensors")
    lost = next(each for each in held if each.endswith(("q_proj.weight", "attn.weight", "query_key_value.weight")))
    found = told(audit(changed(tmp_path / "model", tmp_path / "lost", [lost], {"extra.w": 1}), loader="vllm"))
    assert {rule for rule, _, _ in found} == {"loader-draws", "loader-ignores"}
