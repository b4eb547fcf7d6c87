"""PEFT's adapter files: what of a model a LoRA adapter changes, by the names of the base model's own modules.

adapter_config.json says how the tensors of adapter_model.safetensors are to be read. What is not understood is refused
by name: another method (IA3, AdaLoRA, LoHa), or a setting with which base and adapter compute something else.

Sources: LoRA 2106.09685; rsLoRA 2312.03732; DoRA 2402.09353; peft 0.21 (tuners/lora, utils/save_and_load.py).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...architectures.config import read_config_file
from ...converter.dtypes import to_float64
from ...converter.files import sha256_file
from ...converter.index import single
from ...converter.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from ...converter.safetensors import read_header
from ...converter.weights import Weights
from ...errors import InvalidInput, Offline, SwapRefused, UntrustedInput
from ..base import Wide

_PICKLE = "adapter_model.bin"
_REFUSED: Mapping[str, str] = {
    "alora_invocation_tokens": "it acts from certain tokens on, which no merged weight does",
    "arrow_config": "it chooses among adapters for each token, which no merged weight does",
    "kasa_config": "it keeps a part of the base model's singular values alone",
    "layer_replication": "it repeats layers of the base model",
    "monteclora_config": "its matrices are drawn at random",
    "target_parameters": "it changes parameters that belong to no linear",
    "use_bdlora": "its matrices are block-diagonal",
    "use_qalora": "it pools its input",
}
"""Settings that change what an adapter computes, and how."""
_INITIALISED = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights with which the base model stays as it is."""
_LORA = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(\.(?!weight$|bias$)[^.]+)?(\.(?P<kind>weight|bias))?"
)
_ROWS = re.compile(r"(?P<module>.+)\.token_adapter\.trainable_tokens_delta(\.[^.]+)?")
_BASE = re.compile(r"(?P<module>.+)\.base_layer\.(?P<kind>weight|bias)")
_SAVED = re.compile(r"(?P<module>.+?)(\.modules_to_save(\.[^.]+)?)?\.(?P<kind>weight|bias)")


@dataclass
class _Lora:
    """The tensors of one module, by their names in the file: A (rank, in), B (out, rank), the bias of B, and DoRA's
    magnitude (out). Of an embedding A is (rank, tokens) and B (hidden, rank).
    """

    embedding: bool = False
    a: str = ""
    b: str = ""
    bias: str | None = None
    magnitude: str | None = None


@dataclass(frozen=True)
class Adapter:
    """An adapter; modules and tensors by the names that they have in the base model.

    lora: the low-rank changes of modules. saved: tensors that stand in for the base model's. base: copies of the base
    model's that came along. rows: modules (embeddings) of which `indices` have new rows.
    """

    reference: str
    config: Mapping[str, Any]
    sha256: str
    lora: Mapping[str, _Lora]
    saved: Mapping[str, str]
    base: Mapping[str, str]
    rows: Mapping[str, str]
    file: Weights = field(repr=False)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's, by its name in the file."""
        return self.file.info[name][1]

    def read(self, name: str) -> Wide:
        """A tensor in fp64. Raises InvalidInput where it holds NaN or infinity."""
        values = to_float64(self.file.read(name), self.file.info[name][0])
        if not np.isfinite(values).all():
            raise InvalidInput(f"{self.reference}: {name} is not finite")
        return values

    def scale(self, module: str) -> float:
        """α / r, or α / √r: what B·A is multiplied by. `rank_pattern` and `alpha_pattern` are by module. Raises
        SwapRefused where the rank is not that of the module's tensors.
        """
        rank = _by_pattern(self.config.get("rank_pattern"), module, self.config.get("r", 8))
        alpha = _by_pattern(self.config.get("alpha_pattern"), module, self.config.get("lora_alpha", 8))
        found = self.shape(self.lora[module].a)[0]
        if rank != found:
            raise SwapRefused(f"{self.reference}: {module} has rank {found}, its {ADAPTER_CONFIG} says {rank}")
        return float(alpha) / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def indices(self, module: str) -> list[int]:
        """The tokens whose rows `rows` holds. Raises SwapRefused where the config does not say."""
        given = self.config.get("trainable_token_indices")
        if isinstance(given, dict):
            given = next((ids for name, ids in given.items() if f".{module}".endswith(f".{name}")), None)
        count = self.shape(self.rows[module])[0]
        if not isinstance(given, list) or not all(type(i) is int for i in given) or len(given) != count:
            raise SwapRefused(f"{self.reference}: {count} rows for {module}, trainable_token_indices are {given!r:.60}")
        return given


def _by_pattern(patterns: Any, module: str, default: Any) -> Any:
    """peft's own rule (utils/other.py, get_pattern_key): the first whose regular expression ends the module's name."""
    for pattern, value in (patterns or {}).items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        except re.error as error:
            raise InvalidInput(f"{ADAPTER_CONFIG}: {pattern!r:.60} is no regular expression: {error}") from error
    return default


def read_adapter(reference: str, *, offline: bool = False) -> Adapter:
    """Read an adapter's folder, or a repository on the hub (org/name, org/name@revision). Raises InvalidInput where
    there is none, or its files are broken, UntrustedInput for a pickle, Offline where it is on the hub and there is no
    network, and SwapRefused where it is no LoRA adapter, or one of a kind that is not understood.
    """
    config_path, path = _files(reference, offline)
    config = read_config_file(config_path)[0]
    _require_understood(reference, config)
    file = Weights(single(path, read_header(path)).tensors)
    lora: dict[str, _Lora] = {}
    saved, base, rows, unknown = dict[str, str](), dict[str, str](), dict[str, str](), []
    for full in file.info:
        name = full.removeprefix("base_model.model.")
        if match := _LORA.fullmatch(name):
            own, part = lora.setdefault(match["module"], _Lora()), match["part"]
            if part == "lora_magnitude_vector":
                own.magnitude = full
            elif match["kind"] == "bias":
                own.bias = full
            else:
                own.embedding = part.startswith("lora_embedding")
                setattr(own, part[-1].lower(), full)
        elif match := _ROWS.fullmatch(name):
            rows[match["module"]] = full
        elif match := _BASE.fullmatch(name) or _SAVED.fullmatch(name):
            (base if match.re is _BASE else saved)[f"{match['module']}.{match['kind']}"] = full
        else:
            unknown.append(name)
    halves = [module for module, each in lora.items() if not each.a or not each.b]
    if unknown or halves:
        what = "tensors that are not LoRA's" if unknown else "only A or only B for"
        raise SwapRefused(f"{reference} has {what}: {', '.join((unknown or halves)[:4])}")
    return Adapter(reference, config, sha256_file(path), lora, saved, base, rows, file)


def _require_understood(reference: str, config: Mapping[str, Any]) -> None:
    method = config.get("peft_type")
    if method != "LORA":
        hint = "LoRA adapters are: also with rslora, DoRA, patterns, trained biases, modules_to_save."
        raise SwapRefused(f"{reference} is an adapter of the kind {method!r:.40}, which is not merged here", hint)
    for name, why in _REFUSED.items():
        if config.get(name):
            raise SwapRefused(f"{reference} is trained with {name}: {why}")
    start = config.get("init_lora_weights", True)
    if not any(start is each or start == each for each in _INITIALISED):
        raise SwapRefused(
            f"{reference} is trained with init_lora_weights {start!r:.40}: it starts from weights that are not the"
            " base model's",
            "peft writes it as a plain adapter: save_pretrained(…, path_initial_model_for_weight_conversion=…).",
        )


def _files(reference: str, offline: bool) -> tuple[Path, Path]:
    """The paths of config and weights."""
    from huggingface_hub import constants

    from ...converter.hub import Repository

    folder, hub = Path(reference).expanduser(), None
    repo, _, revision = reference.removeprefix("hf://").partition("@")
    if not folder.is_dir():
        if repo.count("/") != 1 or repo.startswith((".", "/", "~")):
            raise InvalidInput(f"no such folder: {reference}", "An adapter on the hub is named org/name.")
        cached = Repository(repo, revision or None, "", online=False)  # whichever commit the cache has
        hub = cached if offline or constants.HF_HUB_OFFLINE else Repository.open(repo, revision or None)

    def path_of(name: str) -> Path | None:
        if hub is None:
            return folder / name if (folder / name).is_file() else None
        return hub.fetch(name) if hub.commit else hub.cached(name, hub.revision)

    config, weights = path_of(ADAPTER_CONFIG), path_of(ADAPTER_WEIGHTS)
    if config is None and hub is not None and not hub.commit:
        raise Offline(f"{repo} is not in the local cache, and the network is off limits", "Leave --offline out.")
    if config is None:
        raise InvalidInput(f"{reference} is no adapter: there is no {ADAPTER_CONFIG} in it")
    if weights is not None:
        return config, weights
    if path_of(_PICKLE) is not None:
        hint = f"peft writes {ADAPTER_WEIGHTS} where it loads and saves it again."
        raise UntrustedInput(f"{reference} has its weights as {_PICKLE}, a pickle, which can run code", hint)
    raise InvalidInput(f"{reference} has no {ADAPTER_WEIGHTS}")
