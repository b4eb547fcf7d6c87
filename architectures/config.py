"""Read config.json with typed and bounded fields, and find the fields that nobody reads.

A family reads fields through `ConfigReader`, which remembers their names. It declares the fields that it does not read:
they are irrelevant to the function (with a reason), or refused unless they have a harmless value. `load` reports other
fields as unknown. transformers ignores these fields too.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError, shown

MAX_LAYERS = 10_000
MAX_CONFIG_BYTES = 16 * 2**20
MAX_CONFIG_VALUES = 500_000
"""The largest number of objects and lists in a config.json, and the largest number of keys. gptkit counts brackets and
colons before it parses the text, because every value costs about a hundred bytes of memory, however short its text
is."""

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
"""Config fields of families like GPT-2 that only describe a classification head, for `Architecture.irrelevant`."""
GPT2_ALIASES = {
    "n_embd": ("hidden_size",),
    "n_head": ("num_attention_heads",),
    "n_layer": ("num_hidden_layers",),
    "n_positions": ("max_position_embeddings",),
}


OF_GPT2 = {"n_ctx": "an old copy of n_positions", **SUMMARIES}
"""Fields that other families copied from GPT-2's config class, and that do not change what a model computes."""

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
"""The fields that only quantised checkpoints have: that of transformers, and that of MLX."""

FLOAT32_MAX = 3.4028234663852886e38
_CONVERT = "gptkit convert --dtype bfloat16"
_DEQUANTISED = {
    **dict.fromkeys(("awq", "bitsandbytes", "compressed-tensors", "fp8", "gptq", "mxfp4", "torchao"), _CONVERT),
    "mlx": "mlx_lm.convert --dequantize",
}
"""Methods of quantisation -> the command that converts weights of this method to floating-point weights."""


def quantisation(config: Mapping[str, Any] | None) -> tuple[str, str | None] | None:
    """Return how the weights are quantised according to a config.json, or None if they are not.

    Returns:
        The method in words ("gptq, 4 bits, groups of 128"), and the command that dequantises the weights, if known.
    """
    given = next((config[key] for key in QUANTISED if config.get(key) is not None), None) if config else None
    if given is None:
        return None
    if not isinstance(given, dict):
        return "in a way that config.json does not tell", None
    usual = "mlx" if "group_size" in given and "bits" in given else "some method"
    if True in (given.get("load_in_4bit"), given.get("load_in_8bit")):  # transformers does the same
        usual = "bitsandbytes"
    method = given.get("quant_method", usual)
    words = [method if isinstance(method, str) and method.isprintable() and len(method) < 40 else "some method"]
    return ", ".join([*words, *_sizes_in_words(given)]), _DEQUANTISED.get(words[0])


def _sizes_in_words(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield the number of bits and the sizes of groups and blocks in a quantisation config, in words."""
    groups = given.get("config_groups")  # compressed-tensors has this field
    listed = groups.values() if isinstance(groups, dict) else ()
    first: Mapping[str, Any] = next((group for group in listed if isinstance(group, dict)), {})
    stated = first.get("weights")
    weights = stated if isinstance(stated, dict) else {}
    bits = given.get("bits", weights.get("num_bits"))
    bits = next((count for count in (4, 8) if given.get(f"load_in_{count}bit") is True), bits)
    size, block = given.get("group_size", weights.get("group_size")), given.get("weight_block_size")
    if type(bits) is int and 0 < bits < 64:
        yield f"{bits} bits"
    if type(size) is int and 0 < size < 2**31:
        yield f"groups of {size}"
    if isinstance(block, list) and len(block) == 2 and all(type(side) is int and 0 < side < 2**31 for side in block):
        yield f"blocks of {block[0]} × {block[1]}"


def parse_config_text(text: str | bytes, where: str) -> dict[str, Any]:
    """Return the object in the text of a config.json. `where` names the file in messages.

    Raises:
        ConfigError: the text is empty, not JSON, not an object, larger than 16 MB, or has more than half a million
            values.
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
    """Return the object in a config.json, and the text of the file.

    Raises:
        ConfigError: the file cannot be read, or `parse_config_text` refuses its text.
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
    """Return the error for a file that is too large. The caller raises it."""
    return ConfigError(f"{where} has {size:,} bytes, which is too large for a config.json")


_KINDS_OF_LAYERS = {"mamba": "linear_attention", "attention": "full_attention"}


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


class ConfigReader:
    """Typed access to a config.json, or to an object in it, that remembers which fields were read.

    `aliases` maps a field to its other spellings (GPT-2's n_embd for hidden_size). If this reader is for an object
    inside of a config, `outer` is the reader of that config. The set `used` has the names of all fields that were read.
    It is shared with `outer`, and the names of an object's fields are like `text_config.hidden_size`.
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
        """Config fields with sizes that the file does not state -> the defaults that were used."""

    def inner(
        self, name: str, aliases: Mapping[str, tuple[str, ...]] | None = None, more: Mapping[str, Any] | None = None
    ) -> ConfigReader:
        """Return a reader of the object in a field. A field that is null or absent is read as an empty object.

        Args:
            name: the field.
            aliases: other spellings of the object's fields.
            more: fields that are added to the object, or replace its own.

        Raises:
            ConfigError: the value of the field is not an object.
        """
        value = self.raw(name)
        if value is not None and not isinstance(value, dict):
            raise self.fail(name, value, "an object or null")
        reader = ConfigReader({**(value or {}), **(more or {})}, aliases, self, f"{self.place}{name}.")
        self.objects[name] = reader
        return reader

    def part(self, name: str) -> ConfigReader:
        """Return a reader of a part of a composite config (`text_config`), or this reader if it is not composite."""
        return self.inner(name, self.aliases) if name and isinstance(self.data.get(name), dict) else self

    def raw(self, name: str, default: Any = None) -> Any:
        """Return the value of a field unchecked, or `default` if it is absent.

        Raises:
            ConfigError: two spellings of the field have different values. transformers uses sometimes one of them and
                sometimes the other.
        """
        result, stated_as = default, ""
        for key in (name, *self.aliases.get(name, ())):
            self.used.add(self.place + key)
            if key not in self.data or (stated_as and self.data[key] is None):
                continue
            value = self.data[key]
            if stated_as and result is not None and value != result:
                both = f"{self.place}{stated_as} is {shown(result)} and {self.place}{key} is {shown(value)}"
                raise ConfigError(f"config.json: {both}, but transformers uses both names for the same field")
            result, stated_as = value, key
        return result

    def fail(self, name: str, value: Any, wanted: str) -> ConfigError:
        """Return the error for an invalid value of a field. The caller raises it."""
        return ConfigError(f"config.json: {self.place}{name} is {shown(value)}, expected {wanted}")

    def integer(self, name: str, default: int | None = None, *, most: int = 2**31 - 1) -> int:
        """Return the value of a field that must be an integer from 1 to `most`.

        The field is required if there is no default.
        """
        value = self.raw(name, default)
        if value is None:
            raise self.fail(name, value, "a positive integer")
        if not any(key in self.data for key in (name, *self.aliases.get(name, ()))):
            self.assumed[name] = value
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.fail(name, value, f"an integer from 1 to {most:,}")
        return value

    def layers(self, name: str, default: int | None = None) -> int:
        """Return the value of a field that states a number of layers.

        It has an upper bound, because gptkit creates the layers before it reads any weights.
        """
        return self.integer(name, default, most=MAX_LAYERS)

    def optional_integer(self, name: str, default: int | None = None) -> int | None:
        """Return the value of a field that must be a positive integer or null.

        The result is None if the field is null, or if it is absent and has no default.
        """
        value = self.raw(name, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**31 - 1:
            raise self.fail(name, value, "a positive integer or null")
        if not any(key in self.data for key in (name, *self.aliases.get(name, ()))):
            self.assumed[name] = value
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return the value of a field that must be a number above zero, in the range of float32.

        Models use the number in float32.
        """
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
        """Return the value of a field that must be a finite number above zero or null.

        The result is None if the field is null, or if it is absent and has no default.
        """
        return None if self.raw(name, default) is None else self.number(name, default)

    def boolean(self, name: str, default: bool) -> bool:
        """Return the value of a field that must be a boolean. If the field is null or absent, return the default."""
        value = self.raw(name, default)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(name, value, "true or false")
        return value

    def string(self, name: str, default: str) -> str:
        """Return the value of a field that must be a string."""
        value = self.raw(name, default)
        if not isinstance(value, str):
            raise self.fail(name, value, "a string")
        return value

    def choice(self, name: str, default: Any, choices: Mapping[Any, Any]) -> Any:
        """Read a string from a field, or another key of `choices`, and return the value that `choices` has for it."""
        only_strings = all(isinstance(known, str) for known in choices)
        value = self.string(name, default) if only_strings else self.raw(name, default)
        if isinstance(value, dict | list) or value not in choices:
            words = ("null" if known is None else str(known) for known in choices)
            raise self.fail(name, value, "one of " + ", ".join(words))
        return choices[value]

    def refuse(self, refusals: Mapping[str, tuple[tuple[Any, ...], str]]) -> None:
        """Raise ConfigError if a field has a value with which gptkit does not support the model.

        `refusals` maps fields to their harmless values, and to the reason for refusing all others.
        """
        for name, (harmless, reason) in refusals.items():
            outer, _, inside = name.rpartition(".")
            if outer:
                self.inner(outer).refuse({inside: (harmless, reason)})
                continue
            value = self.raw(name, harmless[0])
            if not any(value is h or (type(value) is type(h) and value == h) for h in harmless):
                raise ConfigError(f"config.json: {self.place}{name} is {shown(value)}: {reason}")

    def refuse_other_windows(self, types: Sequence[str | None]) -> None:
        """Raise ConfigError if the config states attention windows that the family's layers do not have.

        transformers' cache (`get_layer_types_and_kwargs`) would use these windows, even in families whose own code
        ignores the fields.

        Args:
            types: the type of every layer. None is a layer without attention, whose type the family has already read.
        """
        stated = self.kinds_of_layers()
        if isinstance(stated, list) and len(stated) == len(types):
            types = [own or other for own, other in zip(types, stated, strict=True)]
        reason = "transformers' KV cache uses this field, but the layers of this model_type ignore it"
        if stated not in (None, list(types)):
            raise ConfigError(f"config.json: {self.place}layer_types is {shown(stated)}: {reason}")
        refused: dict[str, tuple[tuple[Any, ...], str]] = {}
        for name in ("sliding_window", "attention_chunk_size"):
            if f"{self.place}{name}" not in self.used:
                refused[name] = ((None,), reason)
        self.refuse(refused)

    def unknown(self, irrelevant: Mapping[str, str]) -> list[str]:
        """Return the config fields that were not read and are not in `irrelevant`.

        The fields have the order of the file. Fields of objects come last.
        """
        own = [key for key in self.data if not {key, self.place + key} & irrelevant.keys()]
        own = [self.place + key for key in own if self.place + key not in self.used]
        return own + [name for inner in self.objects.values() for name in inner.unknown(irrelevant)]

    def kinds_of_layers(self, name: str = "layer_types") -> Any:
        """Return the value of `layer_types` unchecked.

        Older names of layer types are replaced by transformers' present names.
        """
        stated = self.raw(name)
        return [_KINDS_OF_LAYERS.get(kind, kind) for kind in stated] if _are_names(stated) else stated

    def layer_types(self, usual: Sequence[str], near: str = "sliding_attention") -> tuple[str, ...]:
        """Return the type of every layer from the field `layer_types`: "full_attention" or `near`.

        Args:
            usual: the types of all layers if the field is null or absent.
            near: the name of the type of layers that do not attend to all tokens.
        """
        types = self.kinds_of_layers()
        if types is None:
            return tuple(usual)
        known = ("full_attention", near)
        if not isinstance(types, list) or len(types) != len(usual) or any(kind not in known for kind in types):
            raise self.fail("layer_types", types, f"{len(usual)} values of {' or '.join(known)}")
        return tuple(types)
