"""Reading config.json: every field typed and bounded, and every field accounted for.

A family's parser reads fields through `ConfigReader`, which remembers what was read. What a family does not read it
declares: irrelevant to the function (with a reason), or refused unless it has its harmless value. A field that is
neither is reported as unknown by `load`, since transformers ignores it too.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError, shown

MAX_LAYERS = 10_000
MAX_CONFIG_BYTES = 16 * 2**20
MAX_CONFIG_VALUES = 500_000
"""Of objects and lists together, and of keys, counted by their signs: each costs some hundred bytes of memory, however
short it is written."""

SUMMARIES = dict.fromkeys(
    (
        "summary_activation",
        "summary_first_dropout",
        "summary_last_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
    ),
    "heads other than the language model's",
)
"""What configs of GPT-2's kin say of a classifier's head, for a family's `irrelevant`."""
GPT2_ALIASES = {
    "n_embd": ("hidden_size",),
    "n_head": ("num_attention_heads",),
    "n_layer": ("num_hidden_layers",),
    "n_positions": ("max_position_embeddings",),
}


OF_GPT2 = {"n_ctx": "an old copy of n_positions", **SUMMARIES}
"""Fields of GPT-2's config class that others took over, and that change nothing."""

_TRAINING = (
    "activation_dropout attention_dropout attention_probs_dropout_prob attn_pdrop decoder_layerdrop dropout"
    " dropout_rate embd_pdrop emb_pdrop embed_dropout embedding_dropout encoder_layerdrop gradient_checkpointing"
    " hidden_dropout hidden_dropout_prob init_std initializer_factor initializer_range layerdrop mlp_dropout"
    " resid_dropout resid_pdrop residual_dropout router_aux_loss_coef"
)
"""Config fields that only matter in training."""
COMMON_IRRELEVANT: dict[str, str] = {
    **dict.fromkeys(_TRAINING.split(), "training only"),
    "num_logits_to_keep": "for which tokens of a prompt logits are computed",
    "output_router_logits": "output format",
    "task_specific_params": "generation",
    "_name_or_path": "where the file came from",
    "architectures": "the class to build; used to choose the family",
    "auto_map": "points at remote code, which gptkit never runs",
    "bos_token_id": "generation",
    "chunk_size_feed_forward": "computes the same in slices",
    "classifier_dropout": "classification heads",
    "dtype": "the stored dtype; read by the loader",
    "eos_token_id": "generation",
    "finetuning_task": "a label",
    "id2label": "classification heads",
    "keys_to_ignore_at_inference": "output format",
    "label2id": "classification heads",
    "model_type": "used to choose the family",
    "num_labels": "classification heads",
    "output_attentions": "output format",
    "output_hidden_states": "output format",
    "pad_token_id": "for generation; the padding token's embedding is used like any other",
    "pretraining_tp": "splits matrix products in training; transformers no longer does",
    "problem_type": "classification heads",
    "quantization": "how MLX stores the weights; read by the loader",
    "quantization_config": "how the weights are stored; read by the loader",
    "return_dict": "output format",
    "tokenizer_class": "tokenizer",
    "torch_dtype": "the stored dtype; read by the loader",
    "transformers_version": "a label",
    "use_cache": "generation",
}

COMMON_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "is_encoder_decoder": ((False, None), "gptkit supports only decoder-only models for this family"),
    "add_cross_attention": ((False, None), "gptkit does not support cross-attention for this family"),
    "per_layer_config": ((None,), "transformers fails for this family if layers have different values"),
    "is_causal": ((True,), "gptkit does not support bidirectional attention for this family"),
    "kv_sharing_modes": ((None,), "gptkit does not support layers that share keys and values for this family"),
}


QUANTISED = ("quantization_config", "quantization")
"""The fields that say that weights are stored as something else than floating-point numbers: transformers', MLX's."""

FLOAT32_MAX = 3.4028234663852886e38
_CONVERT = "gptkit convert --dtype bfloat16"
_DEQUANTISED = {
    **dict.fromkeys(("awq", "bitsandbytes", "compressed-tensors", "fp8", "gptq", "mxfp4", "torchao"), _CONVERT),
    "mlx": "mlx_lm.convert --dequantize",
}
"""What makes floating-point weights of them again, by method."""


def quantisation(config: Mapping[str, Any] | None) -> tuple[str, str | None] | None:
    """How a config.json says that its weights are quantised, in words ("gptq, 4 bits, groups of 128"), and what makes
    floating-point ones of them, where that is known. None where it says nothing of the kind.
    """
    given = next((config[key] for key in QUANTISED if config.get(key) is not None), None) if config else None
    if given is None:
        return None
    if not isinstance(given, dict):
        return "in a way that config.json does not tell", None
    usual = "mlx" if "group_size" in given and "bits" in given else "some method"
    if True in (given.get("load_in_4bit"), given.get("load_in_8bit")):  # as transformers takes it
        usual = "bitsandbytes"
    method = given.get("quant_method", usual)
    groups = given.get("config_groups")  # of compressed-tensors
    first = next((each for each in groups.values() if isinstance(each, dict)), {}) if isinstance(groups, dict) else {}
    told = first.get("weights")
    weights = told if isinstance(told, dict) else {}
    bits = given.get("bits", weights.get("num_bits"))
    bits = next((count for count in (4, 8) if given.get(f"load_in_{count}bit") is True), bits)
    size, block = given.get("group_size", weights.get("group_size")), given.get("weight_block_size")
    words = [method if isinstance(method, str) and method.isprintable() and len(method) < 40 else "some method"]
    words += [f"{bits} bits"] if type(bits) is int and 0 < bits < 64 else []
    words += [f"groups of {size}"] if type(size) is int and 0 < size < 2**31 else []
    if isinstance(block, list) and len(block) == 2 and all(type(side) is int and 0 < side < 2**31 for side in block):
        words.append(f"blocks of {block[0]} × {block[1]}")
    return ", ".join(words), _DEQUANTISED.get(words[0])


def parse_config_text(text: str | bytes, where: str) -> dict[str, Any]:
    """The object in a config.json.

    Raises:
        ConfigError: empty, not JSON, not an object, larger than 16 MB, or of half a million objects.
    """
    if len(text) > MAX_CONFIG_BYTES:
        raise _too_long(where, len(text))
    if len(text) > MAX_CONFIG_VALUES:
        raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        if max(raw.count(b"{") + raw.count(b"["), raw.count(b":")) > MAX_CONFIG_VALUES:
            raise ConfigError(
                f"{where} has more than {MAX_CONFIG_VALUES:,} values, which is too many for a config.json"
            )
    if not text.strip():
        raise ConfigError(f"{where} is empty")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{where} contains a JSON {type(data).__name__}, but an object is needed")
    return data


def read_config_file(path: Path) -> tuple[dict[str, Any], str]:
    """The object in the file `path`, and its text.

    Raises:
        ConfigError: as `parse_config_text`, or the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
            if len(raw) > MAX_CONFIG_BYTES:
                raise _too_long(str(path), os.fstat(file.fileno()).st_size)
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not JSON: byte {error.start:,} is not valid UTF-8") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    return parse_config_text(text, str(path)), text


def _too_long(where: str, size: int) -> ConfigError:
    """The error for a file of so many bytes, to be raised by the caller."""
    return ConfigError(f"{where} has {size:,} bytes, which is too large for a config.json")


_KINDS_OF_LAYERS = {"mamba": "linear_attention", "attention": "full_attention"}


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


class ConfigReader:
    """Typed access to a config.json, or to an object in it, that remembers which fields were asked for.

    `aliases` maps a field to its other spellings (GPT-2's n_embd for hidden_size). `outer` is the reader of what an
    object lies in, whose `used` has this one's fields under their dotted name: `text_config.hidden_size`.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        aliases: Mapping[str, tuple[str, ...]] | None = None,
        outer: ConfigReader | None = None,
        place: str = "",
    ) -> None:
        self.data = data
        self.aliases = aliases or {}
        self.outer, self.place = outer, place
        self.used: set[str] = set() if outer is None else outer.used
        self.objects: dict[str, ConfigReader] = {}
        self.assumed: dict[str, int] = {}
        """Sizes that the file does not state, and the default that was taken for each."""

    def inner(
        self, name: str, aliases: Mapping[str, tuple[str, ...]] | None = None, more: Mapping[str, Any] | None = None
    ) -> ConfigReader:
        """A reader of the object in a field, which has nothing where the field is null or absent. `more`: what is said
        of it elsewhere, and counts more.

        Raises:
            ConfigError: it is no object.
        """
        value = self.raw(name)
        if value is not None and not isinstance(value, dict):
            raise self.fail(name, value, "an object or null")
        found = ConfigReader({**(value or {}), **(more or {})}, aliases, self, f"{self.place}{name}.")
        self.objects[name] = found
        return found

    def part(self, name: str) -> ConfigReader:
        """A reader of that part of a composite config (`text_config`); this one where it is not composite."""
        return self.inner(name, self.aliases) if name and isinstance(self.data.get(name), dict) else self

    def raw(self, name: str, default: Any = None) -> Any:
        """The value as it stands; `default` where the key is absent.

        Raises:
            ConfigError: two spellings of the field have two values (transformers takes now the one, now the other).
        """
        found, told = default, ""
        for key in (name, *self.aliases.get(name, ())):
            self.used.add(self.place + key)
            if key not in self.data or (told and self.data[key] is None):
                continue
            value = self.data[key]
            if told and found is not None and value != found:
                both = f"{self.place}{told} is {shown(found)} and {self.place}{key} is {shown(value)}"
                raise ConfigError(f"config.json: {both}, but transformers uses both names for the same field")
            found, told = value, key
        return found

    def fail(self, name: str, value: Any, wanted: str) -> ConfigError:
        """The error for a field that is not what it should be, to be raised by the caller."""
        return ConfigError(f"config.json: {self.place}{name} is {shown(value)}, expected {wanted}")

    def integer(self, name: str, default: int | None = None, *, most: int = 2**31 - 1) -> int:
        """A positive integer up to `most`; required when there is no default."""
        value = self.raw(name, default)
        if value is None:
            raise self.fail(name, value, "a positive integer")
        if not any(key in self.data for key in (name, *self.aliases.get(name, ()))):
            self.assumed[name] = value
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.fail(name, value, f"an integer from 1 to {most:,}")
        return value

    def layers(self, name: str, default: int | None = None) -> int:
        """A number of layers: bounded, since a tree is built from it before any weight is seen."""
        return self.integer(name, default, most=MAX_LAYERS)

    def optional_integer(self, name: str, default: int | None = None) -> int | None:
        """A positive integer, or None where it is null or absent (and has no default)."""
        value = self.raw(name, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**31 - 1:
            raise self.fail(name, value, "a positive integer or null")
        if not any(key in self.data for key in (name, *self.aliases.get(name, ()))):
            self.assumed[name] = value
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number above zero that float32, in which models use it, can hold."""
        value = self.raw(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(name, value, "a number above zero")
        try:
            number = float(value)
        except OverflowError:  # an integer of more than 308 digits
            number = math.inf
        if not 0 < number < math.inf:
            raise self.fail(name, value, "a finite number above zero")
        if number > FLOAT32_MAX:
            raise self.fail(name, value, "a number in the range of float32")
        return number

    def optional_number(self, name: str, default: float | None = None) -> float | None:
        """A finite number above zero, or None where it is null or absent (and has no default)."""
        return None if self.raw(name, default) is None else self.number(name, default)

    def boolean(self, name: str, default: bool) -> bool:
        """True or false; null counts as absent."""
        value = self.raw(name, default)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(name, value, "true or false")
        return value

    def string(self, name: str, default: str) -> str:
        """A string."""
        value = self.raw(name, default)
        if not isinstance(value, str):
            raise self.fail(name, value, "a string")
        return value

    def choice(self, name: str, default: str, choices: Mapping[str, Any]) -> Any:
        """What `choices` has for the string."""
        value = self.string(name, default)
        if value not in choices:
            raise self.fail(name, value, "one of " + ", ".join(choices))
        return choices[value]

    def refuse(self, refusals: Mapping[str, tuple[tuple[Any, ...], str]]) -> None:
        """Raise ConfigError for a field whose value is none of its harmless ones."""
        for name, (harmless, reason) in refusals.items():
            outer, _, inside = name.rpartition(".")
            if outer:
                self.inner(outer).refuse({inside: (harmless, reason)})
                continue
            value = self.raw(name, harmless[0])
            if not any(value is h or (type(value) is type(h) and value == h) for h in harmless):
                raise ConfigError(f"config.json: {self.place}{name} is {shown(value)}: {reason}")

    def refuse_other_windows(self, types: Sequence[str | None]) -> None:
        """Raise ConfigError for fields by which transformers' cache (`get_layer_types_and_kwargs`) would keep other
        tokens than layers of these types look at. It reads them in every family; the families' own code does not. A
        layer without attention (None) is of the type that its family has read.
        """
        said = self.kinds_of_layers()
        if isinstance(said, list) and len(said) == len(types):
            types = [own or other for own, other in zip(types, said, strict=True)]
        reason = "transformers' KV cache uses this field, but the layers of this model_type ignore it"
        if said not in (None, list(types)):
            raise ConfigError(f"config.json: {self.place}layer_types is {shown(said)}: {reason}")
        refused: dict[str, tuple[tuple[Any, ...], str]] = {}
        for name in ("sliding_window", "attention_chunk_size"):
            if f"{self.place}{name}" not in self.used:
                refused[name] = ((None,), reason)
        self.refuse(refused)

    def unknown(self, irrelevant: Mapping[str, str]) -> list[str]:
        """The fields that nobody asked for and nobody declared, in the file's order; those of objects after them."""
        own = [self.place + key for key in self.data if self.place + key not in self.used and key not in irrelevant]
        return own + [name for each in self.objects.values() for name in each.unknown(irrelevant)]

    def kinds_of_layers(self, name: str = "layer_types") -> Any:
        """`layer_types` as they stand, but for the names that transformers takes for others in every family."""
        said = self.raw(name)
        return [_KINDS_OF_LAYERS.get(each, each) for each in said] if _are_names(said) else said

    def layer_types(self, usual: Sequence[str], near: str = "sliding_attention") -> tuple[str, ...]:
        """The kind of every layer's attention, full or `near`; `usual`, one a layer, where it is null or absent."""
        types = self.kinds_of_layers()
        if types is None:
            return tuple(usual)
        known = ("full_attention", near)
        if not isinstance(types, list) or len(types) != len(usual) or any(kind not in known for kind in types):
            raise self.fail("layer_types", types, f"{len(usual)} values of {' or '.join(known)}")
        return tuple(types)
