"""Extract the language model of a multimodal checkpoint: its config.json and the names of its tensors.

Multimodal models may give image tokens several kinds of positions (`mrope_section`). All kinds are equal for text
tokens, so the extracted config has ordinary rotary positions.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import ConfigError, InvalidInput, shown
from . import ARCHITECTURES, architecture_of
from .base import OUTSIDE, TOKEN_IDS, Architecture
from .config import quantisation

_PART = "text_config"
"""The field of a multimodal config that contains the config of the language model."""
_PLACES = (
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("language_model.", ""),
    ("text_model.", ""),
    ("", ""),
)
"""Pairs of prefixes of the language model's tensors: in multimodal checkpoints, and in a checkpoint of the language
model alone. The first pair that gives a known name is used."""
_ROPES = ("rope_parameters", "rope_scaling")
_OUTER = (
    *("architectures", "auto_map", "transformers_version", "_name_or_path", "processor_class", "vision_token_id"),
    *("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
)
"""Fields that describe the multimodal model, and are dropped from the config of its language model."""
_SECTIONS = ("mrope_section", "mrope_interleaved")


def bare_names(name: str) -> list[str]:
    """Return the names that a tensor or module of a multimodal model may have in its language model alone."""
    return [ours + name.removeprefix(theirs) for theirs, ours in _PLACES if name.startswith(theirs)]


def text_config(config: Mapping[str, Any]) -> tuple[Architecture, dict[str, Any]]:
    """Return the family and the config.json of a multimodal model's language model.

    Raises:
        InvalidInput: the model is not multimodal, its weights are quantised, or gptkit does not know the family of its
            language model.
    """
    text = _inner_config(config)
    if quantisation(config) or quantisation(text):
        raise InvalidInput(
            "the weights are quantised, so gptkit cannot tell which tensors belong together",
            "Give a checkpoint whose weights are not quantised.",
        )
    family, usual = _family_of(text)
    if any(name in text for name in ("rope_theta", *_ROPES)):  # the defaults only apply if the config states no RoPE
        usual = {key: value for key, value in usual.items() if key not in _ROPES}
    ids = {key: config[key] for key in (*TOKEN_IDS, "dtype", "torch_dtype") if config.get(key) is not None}
    plain = {**ids, **usual, **{key: value for key, value in text.items() if key not in _OUTER}}
    for name in _ROPES:
        if isinstance(plain.get(name), dict):
            plain[name] = _plain_rope(plain[name])
    return family, {**plain, "model_type": family.name, "architectures": [family.hf_class]}


def _inner_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the language model. In older multimodal configs, its fields are at the top level."""
    text = config.get(_PART)
    if isinstance(text, dict):
        return text
    if config.get("vision_config") is None:
        model_type = shown(config.get("model_type"))
        raise InvalidInput(
            f"the config of the model_type {model_type} has no {_PART}, so it is not a multimodal model",
            "Give a model that reads images and text.",
        )
    return {key: value for key, value in config.items() if not isinstance(value, dict) or key in _ROPES}


def _family_of(text: Mapping[str, Any]) -> tuple[Architecture, dict[str, Any]]:
    """Return the family of a language model, and defaults for fields that its config does not state.

    A language model inside a composite model may have a config class of its own. The defaults are those in which this
    class differs from the family's class.
    """
    for family in ARCHITECTURES.values():
        if text.get("model_type") in family.texts:
            return family, dict(family.texts[text["model_type"]])
    try:
        return architecture_of(text), {}
    except ConfigError as error:
        raise InvalidInput(
            f"gptkit does not support the language model of this multimodal model: {error.message}"
        ) from error


def _plain_rope(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return RoPE parameters without those of multimodal positions, or None if only default values remain."""
    plain = {key: value for key, value in rope.items() if key not in _SECTIONS}
    plain |= {key: "default" for key in ("type", "rope_type") if plain.get(key) == "mrope"}
    return plain if plain.keys() - {"type", "rope_type"} or "default" not in plain.values() else None


def text_names(
    family: Architecture, config: Mapping[str, Any], names: Iterable[str]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the names that the language model's tensors have without the multimodal model, and the complete config.

    Args:
        family: the family of the language model.
        config: the config.json of the language model.
        names: the names of all tensors in the multimodal checkpoint.

    Returns:
        The names of the language model's tensors in the multimodal checkpoint -> their own names; and the config with
        `tie_word_embeddings`, which is true if the checkpoint has no tensor for the head.

    Raises:
        InvalidInput: a tensor of the language model is missing, or there is one that the family does not have.
    """
    names = list(names)
    own = {name: bare_names(name) for name in names}
    tied = not any(family.head in candidates for candidates in own.values())
    config = {**config, "tie_word_embeddings": tied}
    spec = family.spec(config)
    possible = [candidate for candidates in own.values() for candidate in candidates]
    known = {leaf.checkpoint: leaf for leaf in family.bind_files(spec, possible)}
    layers = len(spec.blocks)
    matched: dict[str, str] = {}
    unknown: list[str] = []
    for name, candidates in own.items():
        groups = [family.carries(candidate, layers) for candidate in candidates]
        if any(group and group[0] in OUTSIDE for group in groups):
            continue
        carried = [group[1] for group in groups if group]
        canonical = [family.canonical_name(candidate, known, layers) for candidate in candidates]
        own_name = next((name for name in canonical if name in known), carried[0] if carried else None)
        if own_name is not None:
            matched[name] = own_name
        elif len(candidates) > 1 and None not in canonical:
            unknown.append(name)
    if unknown:
        raise InvalidInput(
            f"{len(unknown)} tensors have names that {family.name} does not have: {', '.join(unknown[:8])}"
        )
    missing = sorted(known.keys() - matched.values())
    if missing:
        raise InvalidInput(f"{len(missing)} tensors of the language model are missing: {', '.join(missing[:8])}")
    return matched, config
