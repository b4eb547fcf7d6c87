"""Read adapters (LoRA, DoRA) as peft and mlx-lm save them.

adapter_config.json says how to read the tensors. gptkit refuses unsupported methods (IA3, AdaLoRA, LoHa) and settings,
and names them in the message.

Sources: LoRA 2106.09685; rsLoRA 2312.03732; DoRA 2402.09353; peft 0.21 (tuners/lora, utils/save_and_load.py); mlx-lm
(tuner/lora.py, tuner/dora.py, tuner/utils.py).
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Unpack

import numpy as np

from ...architectures.config import read_config_file
from ...converter.dtypes import to_float64
from ...converter.names import ADAPTER_CONFIG
from ...converter.opening import Opening
from ...converter.patterns import first_matches
from ...converter.weights import Weights
from ...errors import InvalidInput, SwapRefused, shown
from ..base import Wide
from .adapter_files import open_files

_REFUSED: Mapping[str, str] = {
    "alora_invocation_tokens": "it applies only after certain tokens, which merged weights cannot do",
    "arrow_config": "it chooses an adapter per token, which merged weights cannot do",
    "kasa_config": "it keeps only a part of the base model's singular values",
    "layer_replication": "it repeats layers of the base model",
    "monteclora_config": "its matrices are drawn at random",
    "use_bdlora": "its matrices are block-diagonal",
    "use_qalora": "it pools its input",
}
"""Settings of adapter_config.json that gptkit refuses, with the reasons."""
_INITIALISED = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base model unchanged."""
_LORA = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(\.(?!weight$|bias$)[^.]+)?(\.(?P<kind>weight|bias))?"
)
_ROWS = re.compile(r"(?P<module>.+)\.token_adapter\.trainable_tokens_delta(\.[^.]+)?")
_BASE = re.compile(r"(?P<module>.+?)(\.token_adapter)?\.(base_layer|original_module)\.(?P<kind>weight|bias)")
_SAVED = re.compile(r"(?P<module>.+?)(?P<wrapped>\.modules_to_save(\.[^.]+)?)?\.(?P<kind>[^.]+)")
_MLX = re.compile(r"(?P<module>.+)\.(?P<part>lora_a|lora_b|m)")


@dataclass
class Lora:
    """The names of an adapter's tensors for one module, in the adapter's file."""

    a: str = ""
    """The name of A (rank, in). If one tensor has A of all experts, peft stores it as (experts · rank, in), and mlx-lm
    as (experts, rank, in)."""
    b: str = ""
    """The name of B (out, rank). If one tensor has B of all experts, peft stores it as (out, rank · experts), and
    mlx-lm as (experts, out, rank)."""
    bias: str | None = None
    """The name of the bias of B."""
    magnitude: str | None = None
    """The name of DoRA's magnitude (out)."""
    embedding: bool = False
    """Whether this is peft's adapter of an embedding, with A as (rank, tokens) and B as (hidden, rank)."""
    turned: bool = False
    """Whether the matrices are stored transposed, as by mlx-lm: A as (in, rank), and B as (rank, out)."""


@dataclass(frozen=True)
class Adapter:
    """An adapter. The keys of its mappings are names of modules or tensors of the base model."""

    reference: str
    config: Mapping[str, Any]
    sha256: str  # of the file with the tensors
    lora: Mapping[str, Lora]  # the low-rank changes, by module
    saved: Mapping[str, str]  # by tensor of the base model, the name of the tensor in the file that replaces it
    base: Mapping[str, str]  # by tensor of the base model, the name of an unchanged copy in the file
    rows: Mapping[str, str]  # by embedding, the name of the tensor in the file with new rows for the tokens `indices`
    file: Weights = field(repr=False)
    mlx: bool = False  # whether mlx-lm wrote the adapter

    @property
    def trained_on(self) -> str | None:
        """Return the name of the base model that the adapter was trained on, according to its config."""
        base = self.config.get("model" if self.mlx else "base_model_name_or_path")
        return base if isinstance(base, str) and base else None

    @property
    def method(self) -> str:
        """Return the name of the method for the output's manifest: "lora" or "dora", with "+rslora" for rsLoRA."""
        dora = self.config.get("use_dora") or self.config.get("fine_tune_type") == "dora"
        return ("dora" if dora else "lora") + ("+rslora" if self.config.get("use_rslora") else "")

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor of the adapter's file."""
        return self.file.info[name][1]

    def read(self, name: str, part: int | None = None) -> Wide:
        """Return a tensor of the file in fp64. With `part`, return only that index of the first dimension.

        Raises InvalidInput for NaN or infinity.
        """
        array = self.file.read(name)
        return self._wide(name, array if part is None else array[part])

    def _wide(self, name: str, array: Any) -> Wide:
        values = to_float64(array, self.file.info[name][0])
        if not np.isfinite(values).all():
            raise InvalidInput(f"{self.reference}: {name} has values that are NaN or infinite")
        return values

    def factors(self, module: str, expert: int | None, experts: int) -> tuple[Wide, Wide]:
        """Return A (rank, in) and B (out, rank) of a module.

        If the module has A and B of all experts in one tensor each, return those of expert number `expert`. In such
        tensors, peft stores the rows of A by expert and then by rank, and the columns of B by rank and then by expert.
        `experts` is the number of experts.
        """
        lora = self.lora[module]
        if expert is None:
            a, b = self.read(lora.a), self.read(lora.b)
            return (a.T, b.T) if lora.turned else (a, b)
        if self.mlx:
            return self.read(lora.a, expert), self.read(lora.b, expert)
        a, b = self.file.read(lora.a), self.file.read(lora.b)
        matrices = a.reshape(experts, -1, a.shape[1])[expert], b.reshape(len(b), -1, experts)[:, :, expert]
        return self._wide(lora.a, matrices[0]), self._wide(lora.b, matrices[1])

    def factor_shapes(self, module: str, outputs: int, inputs: int, experts: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes that A and B of a module must have in the file to fit a weight (outputs, inputs).

        The keys are the names of A and B. If `experts` is not 0, they are for the weights of that number of experts.
        """
        lora = self.lora[module]
        dimensions = (*self.shape(lora.a), 0, 0)
        rank = dimensions[1 if self.mlx and (experts or lora.turned) else 0]
        if self.mlx and experts:
            return {lora.a: (experts, rank, inputs), lora.b: (experts, outputs, rank)}
        if lora.turned:
            return {lora.a: (inputs, rank), lora.b: (rank, outputs)}
        return {lora.a: (rank - rank % (experts or 1), inputs), lora.b: (outputs, rank)}

    def scale(self, module: str, parameter: str | None = None, experts: int = 0) -> float:
        """Return the factor by which B·A is multiplied: α / r, or with rsLoRA α / √r. mlx-lm stores it in its config.

        In peft's config, `rank_pattern` and `alpha_pattern` may give r and α for single modules. If the adapter trains
        a parameter that is not the weight of a linear, they are looked up by its name, `parameter`. Raises SwapRefused
        if the tensors have another rank than the config says.
        """
        if self.mlx:
            return self._mlx_scale
        name = parameter or module
        rank = self._patterns["rank_pattern"].get(name, self.config.get("r", 8))
        alpha = self._patterns["alpha_pattern"].get(name, self.config.get("lora_alpha", 8))
        own_rank = self.shape(self.lora[module].a)[0] // (experts or 1)
        if rank != own_rank or isinstance(rank, bool):
            rank_in_config = shown(rank)
            raise SwapRefused(
                f"{self.reference}: {module} has rank {own_rank}, but {ADAPTER_CONFIG} says {rank_in_config}"
            )
        if not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise SwapRefused(f"{self.reference}: lora_alpha of {module} is {shown(alpha)}, expected a number")
        return float(alpha) / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    @property
    def _mlx_scale(self) -> float:
        settings = self.config.get("lora_parameters")
        scale = settings.get("scale") if isinstance(settings, dict) else None
        if not isinstance(scale, int | float) or isinstance(scale, bool) or not math.isfinite(scale):
            raise SwapRefused(f"{self.reference}: the scale in lora_parameters of {ADAPTER_CONFIG} must be a number")
        return float(scale)

    @cached_property
    def _patterns(self) -> dict[str, dict[str, Any]]:
        """Return the values that `rank_pattern` and `alpha_pattern` give, by setting and by module or parameter."""
        names = [*self.lora, *(name for module in self.lora for name in self.parameters_of(module))]
        settings: dict[str, dict[str, Any]] = {}
        for setting in ("rank_pattern", "alpha_pattern"):
            patterns = self.config.get(setting) or {}
            if not isinstance(patterns, dict):
                raise InvalidInput(f"{ADAPTER_CONFIG}: {setting} is {shown(patterns)}, expected an object")
            matched = first_matches(f"{ADAPTER_CONFIG}: {setting}", list(patterns), names) if patterns else []
            settings[setting] = {n: patterns[key] for n, key in zip(names, matched, strict=False) if key is not None}
        return settings

    @property
    def target_parameters(self) -> list[str]:
        """Return peft's setting `target_parameters`: the ends of names of parameters that the adapter trains.

        These are parameters that are not the weight of a linear module, such as stacked weights of experts.
        """
        names = self.config.get("target_parameters") or []
        return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []

    def parameters_of(self, module: str) -> list[str]:
        """Return the names of a module's parameters that the setting `target_parameters` includes."""
        bare = without_wrappers(module)
        ends = dict.fromkeys(parameter.rpartition(".")[2] for parameter in self.target_parameters)
        return [f"{bare}.{end}" for end in ends if self.targets(f"{bare}.{end}")]

    def targets(self, parameter: str) -> bool:
        """Return whether `target_parameters` includes a parameter: one of its entries is the name or its end."""
        return any(parameter == target or parameter.endswith(f".{target}") for target in self.target_parameters)

    def indices(self, module: str) -> list[int]:
        """Return the ids of the tokens for which an embedding has new rows. Raises SwapRefused if they are unknown."""
        given = self.config.get("trainable_token_indices")
        if isinstance(given, dict):
            given = next((ids for name, ids in given.items() if f".{module}".endswith(f".{name}")), None)
        count = self.shape(self.rows[module])[0]
        if not isinstance(given, list) or not all(type(i) is int for i in given) or len(given) != count:
            listed = shown(given)
            raise SwapRefused(
                f"{self.reference} changes {count} rows of {module}, but trainable_token_indices in "
                f"{ADAPTER_CONFIG} is {listed}"
            )
        return given


_WRAPPER = ".base_layer"


def without_wrappers(module: str) -> str:
    """Return a module's name without all ".base_layer" at its end.

    peft appends one for every parameter of the module that it trains.
    """
    while module.endswith(_WRAPPER):
        module = module.removesuffix(_WRAPPER)
    return module


def wrappers(module: str) -> int:
    """Return the number of times that a module's name ends in ".base_layer"."""
    return (len(module) - len(without_wrappers(module))) // len(_WRAPPER)


def read_adapter(reference: str, **opening: Unpack[Opening]) -> Adapter:
    """Read an adapter from a folder, or from a repository on the hub (org/name, org/name@revision).

    Raises the errors of `open_files`, and SwapRefused if the adapter is not LoRA, or has settings that gptkit does not
    support.
    """
    config_path, file, sha256 = open_files(reference, **opening)
    config = read_config_file(config_path)[0]
    if "peft_type" not in config and ("lora_parameters" in config or "fine_tune_type" in config):
        return _read_mlx(reference, config, sha256, file)
    _require_understood(reference, config)
    lora: dict[str, Lora] = {}
    saved, base, rows, unknown = dict[str, str](), dict[str, str](), dict[str, str](), []
    whole = {*_texts(config.get("modules_to_save"))}
    for full in file.info:
        name = full.removeprefix("base_model.model.")
        if match := _LORA.fullmatch(name):
            entry, part = lora.setdefault(match["module"], Lora()), match["part"]
            if part == "lora_magnitude_vector":
                entry.magnitude = full
            elif match["kind"] == "bias":
                entry.bias = full
            else:
                entry.embedding = part.startswith("lora_embedding")
                setattr(entry, part[-1].lower(), full)
        elif match := _ROWS.fullmatch(name):
            rows[match["module"]] = full
        elif match := _BASE.fullmatch(name):
            base[f"{match['module']}.{match['kind']}"] = full
        elif (match := _SAVED.fullmatch(name)) and (
            match["kind"] in ("weight", "bias") or match["wrapped"] or not whole.isdisjoint(name.split("."))
        ):
            tensor = f"{match['module']}.{match['kind']}"
            if tensor not in saved or not match["wrapped"]:  # peft reads the name without the wrapper
                saved[tensor] = full
        else:
            unknown.append(name)
    # If a module was saved completely, the copies of its old tensors are not needed.
    base = {name: entry for name, entry in base.items() if name not in saved}
    _require_whole(reference, lora, unknown)
    return Adapter(reference, config, sha256, lora, saved, base, rows, file)


def _read_mlx(reference: str, config: Mapping[str, Any], sha256: str, file: Weights) -> Adapter:
    """Read an adapter that mlx-lm trained: LoRA, DoRA, or complete tensors after full fine-tuning."""
    kind = config.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora", "full"):
        raise SwapRefused(f"{reference} has the fine_tune_type {shown(kind)}, which gptkit does not know")
    if kind == "full":
        return Adapter(reference, config, sha256, {}, {name: name for name in file.info}, {}, {}, file, mlx=True)
    lora: dict[str, Lora] = {}
    unknown = []
    for name in file.info:
        match = _MLX.fullmatch(name)
        if match is None:
            unknown.append(name)
            continue
        entry = lora.setdefault(match["module"], Lora())
        if match["part"] == "m":
            entry.magnitude = name
        else:
            setattr(entry, match["part"][-1], name)
            entry.turned = len(file.info[name][1]) == 2
    _require_whole(reference, lora, unknown)
    return Adapter(reference, config, sha256, lora, {}, {}, {}, file, mlx=True)


def _require_whole(reference: str, lora: Mapping[str, Lora], unknown: Iterable[str]) -> None:
    """Raise SwapRefused if the file has tensors that do not belong to LoRA (`unknown`), or only one of A and B."""
    unknown = list(unknown)
    halves = [module for module, entry in lora.items() if not entry.a or not entry.b]
    if unknown or halves:
        problem = "tensors that are not part of LoRA" if unknown else "only one of lora_A and lora_B for"
        raise SwapRefused(f"{reference} has {problem}: {', '.join((unknown or halves)[:4])}")


def _texts(value: Any) -> list[str]:
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


def _require_understood(reference: str, config: Mapping[str, Any]) -> None:
    method = config.get("peft_type")
    if method != "LORA":
        hint = "gptkit merges LoRA adapters, also with rsLoRA, DoRA, patterns, trained biases and modules_to_save."
        raise SwapRefused(f"{reference} is an adapter of the type {shown(method, 40)}, which gptkit cannot merge", hint)
    for name, why in _REFUSED.items():
        if config.get(name):
            raise SwapRefused(f"gptkit cannot merge {reference}, which was trained with {name}: {why}")
    start = config.get("init_lora_weights", True)
    if not any(start is value or start == value for value in _INITIALISED):
        raise SwapRefused(
            f"{reference} was trained with init_lora_weights {shown(start, 40)}, which changes the base weights before"
            " the training, so gptkit cannot merge the adapter into the original base weights",
            "Convert the adapter with peft: save_pretrained(OUT, path_initial_model_for_weight_conversion=INITIAL).",
        )
