"""What other programs do with models of some families: what they refuse, and what they compute otherwise.

The rules are data: the families, a condition, what the program does, and the file of the program that shows it.
`gptkit audit --for PROGRAM` reports them. Most of them were found by comparing the programs with transformers 5
(`make loaders`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..components import ModelSpec
from .base import Architecture
from .rope import PART


@dataclass(frozen=True)
class LoaderView:
    """What the rules look at."""

    config: Mapping[str, Any]
    """The config of the language model."""
    spec: ModelSpec | None
    """The language model, if gptkit knows the family."""
    family: Architecture | None

    @property
    def rope(self) -> Mapping[str, Any]:
        """The RoPE parameters that transformers 5 uses."""
        old = self.config.get("rope_scaling")
        found = old if isinstance(old, dict) and old else self.config.get("rope_parameters")
        return found if isinstance(found, dict) else {}

    @property
    def rope_type(self) -> Any:
        return self.rope.get("rope_type", self.rope.get("type"))

    def fields(self, name: str) -> set[Any]:
        """Return the values that a field of the mixers, or of what they contain, has in all layers."""
        mixers = [] if self.spec is None else [sub.mixer for block in self.spec.blocks for sub in block.sublayers]
        return {getattr(part, name) for mixer in mixers for part in _parts(mixer) if hasattr(part, name)}


def _parts(mixer: Any) -> list[Any]:
    """Return a mixer, and the components that are values of its fields."""
    values = [getattr(mixer, name) for name in getattr(mixer, "__struct_fields__", ())]
    return [mixer, *(value for value in values if hasattr(value, "__struct_fields__"))]


@dataclass(frozen=True)
class LoaderRule:
    """What a program does with some models."""

    program: str
    families: tuple[str, ...]
    """The families; empty for all."""
    applies: Callable[[LoaderView], bool]
    effect: Literal["refuses", "misreads"]
    words: str
    source: str


def _other_base(view: LoaderView) -> bool:
    """Return whether layers with and without a window have RoPE with different bases."""
    return len({position.base for position in view.fields("position") if hasattr(position, "base")}) > 1


def windowed(view: LoaderView) -> bool:
    """Return whether a layer has an attention window that is shorter than the model's context."""
    windows = view.fields("window") - {None}
    length = view.spec.context_length if view.spec is not None else None
    return any(length is None or window < length for window in windows)


_V4 = "transformers 4.57.6, "
_MLX = "mlx-lm 0.32.2, models/"
ABSENT = frozenset(
    {
        *("afmoe", "axk1", "cohere2_moe", "cohere_compass_text", "cwm", "exaone_moe", "flint", "gemma4_text"),
        *("gemma4_unified_text", "glm4_moe_lite", "granite_swa", "granitemoe_swa", "hy_v3", "hyperclovax", "internlm3"),
        *("iquestcoder", "jais2", "kolibri1", "lfm2_moe", "mellum", "minicpm3", "minimax_m2", "ministral3", "nanochat"),
        *("nemotron_h", "qwen3_5_moe_text", "qwen3_5_text", "solar_open", "youtu"),
    }
)
"""The families of gptkit whose model types transformers 4.57.6 does not have (models/auto/configuration_auto.py)."""

RULES = (
    LoaderRule(
        "transformers4", (), lambda view: view.family is not None and view.family.name in ABSENT, "refuses",
        "transformers 4.57.6 does not have this model type", _V4 + "models/auto/configuration_auto.py",
    ),
    LoaderRule(
        "transformers4", (), lambda view: view.rope_type == "proportional", "refuses",
        "transformers 4 does not have the RoPE type proportional", _V4 + "modeling_rope_utils.py, ROPE_INIT_FUNCTIONS",
    ),
    LoaderRule(
        "transformers4", ("deepseek_v2",),
        lambda view: bool(view.rope.get("mscale_all_dim")) and view.rope_type != "default", "misreads",
        "transformers 4 does not multiply attention scores by the square of YaRN's mscale",
        _V4 + "models/deepseek_v2/modeling_deepseek_v2.py, DeepseekV2Attention",
    ),
    LoaderRule(
        "transformers4", ("olmo3", "modernbert-decoder"), _other_base, "misreads",
        "transformers 4 uses one RoPE base for all layers, but this model has two",
        _V4 + "models/olmo3/modeling_olmo3.py; models/modernbert_decoder/modeling_modernbert_decoder.py",
    ),
    LoaderRule(
        "transformers4", ("phimoe",), lambda view: view.rope_type == "longrope", "misreads",
        "transformers 4 uses the long factors of LongRoPE for long texts, and transformers 5 never does",
        _V4 + "models/phimoe/modeling_phimoe.py, PhimoeRotaryEmbedding",
    ),
    LoaderRule(
        "transformers4", ("mamba2", "bamba", "granitemoehybrid"),
        lambda view: bool(view.fields("groups") - {None, 1}), "misreads",
        "transformers 4 computes the gated norm over all channels together, and transformers 5 by group",
        _V4 + "models/mamba2/modeling_mamba2.py, MambaRMSNormGated",
    ),
    LoaderRule(
        "transformers4", ("gpt_oss",), lambda view: view.config.get("swiglu_limit", 7.0) != 7.0, "misreads",
        "transformers 4 ignores swiglu_limit, and limits activations to 7", _V4 + "models/gpt_oss/modeling_gpt_oss.py",
    ),
    LoaderRule(
        "transformers4", ("apertus",), lambda view: view.config.get("hidden_act", "xielu") == "xielu", "misreads",
        "transformers 4 rounds the parameters of xIELU to bfloat16", _V4 + "activations.py, XIELUActivation",
    ),
    LoaderRule(
        "transformers4", ("recurrent_gemma", "zamba2"), lambda view: True, "misreads",
        "transformers 4 computes other logits for this family; the cause is not known", "measured: docs/loaders.md",
    ),
    LoaderRule(
        "vllm", (), lambda view: _conflict(view.rope), "refuses",
        "vLLM refuses RoPE parameters in which type and rope_type differ",
        "vLLM 0.33.0, transformers_utils/config.py, patch_legacy_rope_type",
    ),
    LoaderRule(
        "llama.cpp", ("cohere2", "gpt_neox"), lambda view: "rotary_pct" not in view.config, "refuses",
        "llama.cpp's convert_hf_to_gguf.py fails with: KeyError: 'rotary_pct'",
        "llama.cpp, conversion/command_r.py and conversion/gpt_neox.py",
    ),
    LoaderRule(
        "llama.cpp", ("gpt_neox",), lambda view: view.fields("base") - {10_000.0} != set(), "misreads",
        "llama.cpp's convert_hf_to_gguf.py does not write the base of RoPE for this family, and llama.cpp uses 10,000",
        "llama.cpp, conversion/gpt_neox.py",
    ),
    LoaderRule(
        "llama.cpp", ("gpt2",), lambda view: "n_ctx" not in view.config, "refuses",
        "llama.cpp's convert_hf_to_gguf.py fails with: KeyError: 'n_ctx'", "llama.cpp, conversion/gpt2.py",
    ),
    LoaderRule(
        "mlx", ("glm",), lambda view: view.rope.get(PART, view.config.get(PART, 0.5)) != 1, "misreads",
        "mlx-lm rotates whole heads, but RoPE rotates only a part of each head of this model", _MLX + "glm.py",
    ),
    LoaderRule(
        "mlx", ("ernie4_5_moe",), lambda view: True, "misreads",
        "mlx-lm ignores the biases with which the router chooses experts (e_score_correction_bias)",
        _MLX + "ernie4_5_moe.py, Ernie4_5_MoeMLP",
    ),
    LoaderRule(
        "mlx", ("deepseek_v2", "minicpm3"), lambda view: not view.config.get("rope_scaling"), "refuses",
        "mlx-lm fails for this family if RoPE is not scaled: 'NoneType' object has no attribute 'get'",
        _MLX + "deepseek_v2.py and minicpm3.py",
    ),
    LoaderRule(
        "mlx", ("mistral",), lambda view: windowed(view) and "layer_types" not in view.config, "misreads",
        "mlx-lm has no attention windows for this model, so it differs for texts longer than one", _MLX + "llama.py",
    ),
)  # fmt: skip
"""What programs do that no change of the files prevents, except where `--fix` adds a field."""


def _conflict(rope: Mapping[str, Any]) -> bool:
    both = rope.get("type"), rope.get("rope_type")
    return None not in both and both[0] != both[1] and both not in (("su", "longrope"), ("mrope", "default"))
