"""Write config.json and tokenizer_config.json for programs that do not read the files of transformers 5.

Version 5 of transformers renamed config fields and tokenizer classes. Programs that know only the names of version 4
refuse such files, or silently use defaults: transformers 4, older releases of vLLM and SGLang, llama.cpp's converter,
MLX, text-generation servers. This module adds the names of version 4 next to those of version 5, so that both kinds of
programs read the same values. The tables `CONFIG_CHANGES` and `TOKENIZER_CHANGES` list all changes. What differs by
family comes from the family's definition: `Architecture.rotaries`, and the names of its config fields.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..architectures import Architecture
from ..architectures.base import TOKEN_IDS
from ..architectures.config import parse_config_text
from ..architectures.rope import ORIGINAL, PART, USUAL_ROTARY, RotaryKind
from ..components import ModelSpec
from ..errors import CannotExpress, ConfigError
from .companions import Companion
from .names import CONFIG, json_bytes

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
Fields = Mapping[str, Any]
"""A JSON object: a config.json, a part of it, or a tokenizer_config.json."""


@dataclass(frozen=True)
class RestatedFile:
    """A change that makes a file readable for more programs, and loses nothing."""

    name: str
    """The name of the change, for programs."""
    fields: Callable[[Fields, Any], Mapping[str, Any]]
    """Returns the fields to add or replace. The first argument is the object. The second is the family or None if the
    object is (a part of) a config.json, and the content of the folder's other files by name if it is a
    tokenizer_config.json. If the value of a field is `REMOVED`, the field is removed."""
    why: str
    """What programs do without the change."""
    source: str
    """Where the code of such a program shows this."""
    effect: Literal["refuses", "misreads", "ignores"]
    """What transformers 4 does without the change: it does not load the files, it computes something else, or it only
    ignores a setting."""


REMOVED = object()

# --- config.json ------------------------------------------------------------------------------------------------------


def _torch_dtype(config: Fields, _family: Architecture | None) -> Fields:
    return {"torch_dtype": config["dtype"]} if config.get("dtype") is not None and "torch_dtype" not in config else {}


def _plain_numbers(config: Fields, _family: Architecture | None) -> Fields:
    """Replace the objects that stand for infinite numbers, such as {"__float__": "Infinity"}, by `Infinity`."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(item) for item in value]
        is_number = isinstance(value, dict) and value.keys() == {"__float__"} and value["__float__"] in _NUMBERS
        return _NUMBERS[value["__float__"]] if is_number else value

    changed = {name: plain(value) for name, value in config.items()}
    return {name: value for name, value in changed.items() if value != config[name]}


_NUMBERS = {"Infinity": math.inf, "-Infinity": -math.inf}


def _names_in_lists(config: Fields, family: Architecture | None) -> Fields:
    """Return the lists in which names of version 5 are replaced by those of version 4, such as types of layers."""
    former = {} if family is None else family.former_values
    lists = {name: config[name] for name in former if isinstance(config.get(name), list)}
    return {name: [former[name].get(item, item) for item in items] for name, items in lists.items()}


def _without_bookkeeping(config: Fields, _family: Architecture | None) -> Fields:
    """Remove the fields of transformers' base class from the objects in a config that describe a part of each layer.

    Only DBRX has two such objects, and classes for them that refuse unknown fields.
    """
    parts = {name: config[name] for name in ("attn_config", "ffn_config") if isinstance(config.get(name), dict)}
    if len(parts) < 2:
        return {}
    return {
        name: {key: value for key, value in part.items() if key not in _BOOKKEEPING} for name, part in parts.items()
    }


_BOOKKEEPING = (
    *("_name_or_path", "architectures", "chunk_size_feed_forward", "dtype", "hidden_size", "id2label"),
    *("is_encoder_decoder", "label2id", "model_type", "output_attentions", "output_hidden_states", "problem_type"),
    "return_dict",
)
"""The fields that transformers 5 writes for every config object, also inside other objects. The hidden size is that of
the whole model."""


def _other_names(config: Fields, family: Architecture | None) -> Fields:
    """Return the fields that have another name in version 5, such as `num_experts`, which is `num_local_experts`."""
    aliases = {} if family is None else family.config_aliases
    return {
        name: value
        for name, value in _own_names(config, family).items()
        if any(x in config for x in aliases.get(name, ()))
    }


def _own_names(config: Fields, family: Architecture | None) -> Fields:
    """Return the fields that the family's definition writes and the config lacks.

    Most of them have their default value. Others have another name in version 5, or only other programs need them
    (`Architecture.restated`).
    """
    if family is None:
        return {}
    known = family.spec_and_unknown(config)
    written = {**family.config_for(known[0]), **family.restated(known[0])}
    ropes = {name for kind in family.rotaries.values() for name in (kind.theta, kind.part)}
    left_out = {*config, *TOKEN_IDS, *ropes, "rope_scaling", "rope_parameters", "architectures", "model_type"}
    missing = {name: value for name, value in written.items() if name not in left_out}
    return {name: value for name, value in missing.items() if _reads(family, {**config, name: value}, known)}


def _reads(family: Architecture, config: Fields, known: tuple[ModelSpec, list[str]]) -> bool:
    """Return whether a config gives a model and unknown fields as in `known`."""
    try:
        return family.spec_and_unknown(config) == known
    except ConfigError:
        return False


def _rope(config: Fields, family: Architecture | None) -> Fields:
    """Return the fields of RoPE in the form of version 4: the base, `rope_scaling`, and the fraction of a head.

    In version 4, `rope_scaling` applies to one type of layer at most.
    """
    old, new = (config.get(name) for name in ("rope_scaling", "rope_parameters"))
    by_type = isinstance(new, dict) and any(isinstance(new[name], dict) or name.endswith("_attention") for name in new)
    if isinstance(new, dict) and by_type:
        kinds = family.rotaries if family is not None else {"full_attention": USUAL_ROTARY}
        types = [(new[name], kind) for name, kind in kinds.items() if isinstance(new.get(name), dict)]
        restated = [_rope_fields(rope, kind, config, family) for rope, kind in types]
        scalings = [fields["rope_scaling"] for fields in restated if "rope_scaling" in fields]
        together = {name: value for fields in restated for name, value in fields.items()}
        if any(scaling != scalings[0] for scaling in scalings):
            del together["rope_scaling"]
        return together
    kind = USUAL_ROTARY if family is None else family.rotaries.get("", USUAL_ROTARY)
    given = old if isinstance(old, dict) and old else new
    return _rope_fields(given, kind, config, family) if isinstance(given, dict) else {}


def _rope_fields(rope: Fields, kind: RotaryKind, config: Fields, family: Architecture | None) -> dict[str, Any]:
    """Return the fields of version 4 for the RoPE parameters of one type of layer, or of all layers.

    Args:
        rope: the parameters, in the form of version 4 or 5.
        kind: how the family's config class states RoPE.
        config: the config with these parameters.
        family: the family. Without it, the fraction of a head is always written.
    """
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    named = ("rope_theta", "rope_type", "type", *([PART] if rope_type == "default" else []))
    rest = {name: _number(name, value) for name, value in rope.items() if name not in named}
    fields: dict[str, Any] = {}
    if rope.get("rope_theta") is not None and kind.theta:
        fields[kind.theta] = rope["rope_theta"]
    if rope.get(PART) is not None and not kind.inside and (kind.part or family is None):
        fields[kind.part or PART] = rope[PART]
    if not kind.scaled:
        return fields
    if rope_type == "default" and not rest and kind.usual is None:
        return fields | {"rope_scaling": None}
    rest |= {name: value for name, value in _inferred(rope_type, rest, config, kind).items() if name not in rest}
    if rope_type == "longrope" and ORIGINAL in rest:
        fields[ORIGINAL] = rest[ORIGINAL]  # the functions of version 4 read it here
    scaling = {"type": rope_type, "rope_type": rope_type, **rest}
    allowed = {name: value for name, value in scaling.items() if not kind.only or name in kind.only}
    return fields | {"rope_scaling": allowed}


def _number(name: str, value: Any) -> Any:
    """Return a RoPE parameter as version 4 and MLX require it: all numbers are floats, except counts of tokens."""
    whole = name == ORIGINAL or isinstance(value, bool) or not isinstance(value, int)
    return value if whole else float(value)


def _inferred(rope_type: Any, rope: Fields, config: Fields, kind: RotaryKind) -> dict[str, Any]:
    """Return RoPE parameters that version 5 infers and version 4 does not."""
    context = config.get("max_position_embeddings")
    original = rope.get(ORIGINAL, config.get(ORIGINAL, kind.original or context))
    if rope_type not in ("llama3", "yarn", "longrope") or not (isinstance(original, int) and original > 0):
        return {}
    inferred: dict[str, Any] = {ORIGINAL: original}
    if rope_type == "yarn" and isinstance(context, int):
        inferred["factor"] = context / original
    factor = rope.get("factor")
    if rope_type == "longrope" and isinstance(factor, float):  # version 4 computes another factor from ORIGINAL
        scaled = factor > 1 and original > 1
        inferred["attention_factor"] = math.sqrt(1 + math.log(factor) / math.log(original)) if scaled else 1.0
    return inferred


CONFIG_CHANGES = (
    RestatedFile(
        "torch-dtype",
        _torch_dtype,
        "transformers before 4.56 ignores dtype, and loads the weights as float32",
        "transformers 4.55, configuration_utils.py, PretrainedConfig.__init__",
        "ignores",
    ),
    RestatedFile(
        "infinity",
        _plain_numbers,
        'an infinite number is stored as {"__float__": "Infinity"}, which transformers 4 does not read as a number',
        "transformers 5.23, configuration_utils.py, _encode_special_floats",
        "refuses",
    ),
    RestatedFile(
        "rope",
        _rope,
        "programs that do not read rope_parameters use the default base, and no scaling",
        "transformers 4.57.6, modeling_rope_utils.py; mlx-lm 0.32.2, models/llama.py",
        "misreads",
    ),
    RestatedFile(
        "parts",
        _without_bookkeeping,
        "transformers 4 refuses unknown fields of attn_config and ffn_config",
        "transformers 4.57.6, models/dbrx/configuration_dbrx.py, DbrxAttentionConfig",
        "refuses",
    ),
    RestatedFile(
        "layer-types",
        _names_in_lists,
        "transformers 4 refuses the names that version 5 has for types of layers",
        "transformers 4.57.6, models/granitemoehybrid/configuration_granitemoehybrid.py",
        "refuses",
    ),
    RestatedFile(
        "names",
        _other_names,
        "transformers 4 does not know the names that some fields have in version 5",
        "transformers 4.57.6, models/qwen3_moe/configuration_qwen3_moe.py",
        "misreads",
    ),
    RestatedFile(
        "defaults",
        _own_names,
        "programs refuse configs without fields that transformers 5 does not write, or use other defaults",
        "mlx-lm 0.32.2, models/nemotron.py, ModelArgs; llama.cpp, conversion/command_r.py",
        "ignores",
    ),
)
"""The changes of config.json. In a composite config, they also apply to the config of the language model."""

# --- tokenizer_config.json --------------------------------------------------------------------------------------------


def _class(settings: Fields, files: Mapping[str, Any]) -> Fields:
    newer = settings.get("tokenizer_class") in _ONLY_IN_5 and TOKENIZER in files
    return {"tokenizer_class": "PreTrainedTokenizerFast"} if newer else {}


_ONLY_IN_5 = ("TokenizersBackend", "Qwen3_5Tokenizer", "Siglip2Tokenizer", "EsmcTokenizer")
"""The tokenizer classes of transformers 5.23 that read tokenizer.json, and that transformers 4.57.6 does not have."""


def _extra_tokens(settings: Fields, _files: Mapping[str, Any]) -> Fields:
    extra = settings.get("extra_special_tokens")
    if not isinstance(extra, list):
        return {}
    return {"extra_special_tokens": REMOVED, "additional_special_tokens": extra}


def _template(settings: Fields, files: Mapping[str, Any]) -> Fields:
    template = files.get(TEMPLATE)
    return {} if template is None or "chat_template" in settings else {"chat_template": template.decode()}


TOKENIZER_CHANGES = (
    RestatedFile(
        "tokenizer-class",
        _class,
        "transformers 4 has no class of this name, and does not load the tokenizer",
        "transformers 4.57.6, models/auto/tokenization_auto.py, AutoTokenizer.from_pretrained",
        "refuses",
    ),
    RestatedFile(
        "extra-tokens",
        _extra_tokens,
        "transformers 4 fails with: 'list' object has no attribute 'keys'",
        "transformers 4.57.6, tokenization_utils_base.py, _set_model_specific_special_tokens",
        "refuses",
    ),
    RestatedFile(
        "chat-template",
        _template,
        f"transformers before 4.48 does not read {TEMPLATE}",
        "transformers 4.47, tokenization_utils_base.py, _from_pretrained",
        "ignores",
    ),
)
"""The changes of tokenizer_config.json."""

# --- files ------------------------------------------------------------------------------------------------------------


def changed(settings: Fields, changes: Sequence[RestatedFile], about: Any) -> tuple[dict[str, Any], list[RestatedFile]]:
    """Return an object after all changes, and the changes that had an effect.

    Args:
        settings: the object; see `RestatedFile.fields`.
        changes: `CONFIG_CHANGES` or `TOKENIZER_CHANGES`.
        about: the second argument of `RestatedFile.fields`.
    """
    result, effective = dict(settings), []
    for change in changes:
        before = dict(result)
        for name, value in change.fields(before, about).items():
            if value is REMOVED:
                result.pop(name, None)
            else:
                result[name] = value
        if result != before:
            effective.append(change)
    return result, effective


def compatible_config(config: Fields, family: Architecture | None) -> tuple[dict[str, Any], list[RestatedFile]]:
    """Return a config.json with the fields of transformers 4 too, and the changes that were needed.

    Raises CannotExpress if the family's fields of transformers 4 cannot describe the model. `family` is None if gptkit
    does not know the family.
    """
    part = family.part if family is not None else "text_config"
    inner = config.get(part) if part else None
    if not isinstance(inner, dict):
        result, effective = changed(config, CONFIG_CHANGES, family)
    else:
        text, effective = changed(inner, CONFIG_CHANGES, family)
        dtype, outer = changed(config, CONFIG_CHANGES[:2], None)
        result, effective = {**dtype, part: text}, list(dict.fromkeys((*outer, *effective)))
    if family is not None and family.spec(result) != family.spec(config):
        only = sorted({name for kind in family.rotaries.values() for name in kind.only})
        why = f": in rope_scaling it reads only {', '.join(only)}" if only else ""
        raise CannotExpress(f"transformers 4 cannot read this model's RoPE for the family {family.name}{why}")
    return result, effective


def compatible_files(
    texts: Mapping[str, bytes], companions: Sequence[Companion], family: Architecture | None
) -> tuple[dict[str, bytes], list[Companion]]:
    """Return the small files of a folder, and the files to copy, so that transformers 4 can read them too.

    Args:
        texts: the contents of small files by name, with config.json.
        companions: the files to copy, such as the tokenizer.
        family: the family of the config.json; None if gptkit does not know it.

    Raises CannotExpress as `compatible_config`.
    """
    result = dict(texts)
    config = parse_config_text(texts[CONFIG], CONFIG)
    new, effective = compatible_config(config, family)
    if effective:
        result[CONFIG] = json_bytes(new)
    files = {companion.name: companion for companion in companions}
    if TOKENIZER_CONFIG not in files.keys() | texts.keys():
        return result, list(companions)
    text = texts[TOKENIZER_CONFIG] if TOKENIZER_CONFIG in texts else files[TOKENIZER_CONFIG].read_bytes()
    other_files: dict[str, Any] = dict.fromkeys(files) | dict(texts)
    if TEMPLATE in files:
        other_files[TEMPLATE] = files[TEMPLATE].read_bytes()
    settings, effective = changed(json.loads(text), TOKENIZER_CHANGES, other_files)
    if effective:
        result[TOKENIZER_CONFIG] = json_bytes(settings)
        files.pop(TOKENIZER_CONFIG, None)
    return result, list(files.values())
