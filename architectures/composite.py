"""The language model of a composite checkpoint, of images or sound and text, by itself: its config.json, and what its
tensors are called there.

Where all tokens are text, positions that are told apart for images (`mrope_section`) are one and the same.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import ConfigError, InvalidInput, shown
from . import ARCHITECTURES, architecture_of
from .base import OUTSIDE, TOKEN_IDS, Architecture
from .config import quantisation

_PART = "text_config"
"""The field of a composite config that holds the language model's own."""
_PLACES = (
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("language_model.", ""),
    ("text_model.", ""),
    ("", ""),
)
"""How names of the language model begin in composite checkpoints, and by itself; the first that is known is right."""
_ROPES = ("rope_parameters", "rope_scaling")
_LEFT = (
    *("architectures", "auto_map", "transformers_version", "_name_or_path", "processor_class", "vision_token_id"),
    *("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
)
"""Fields of what the language model lies in."""
_SECTIONS = ("mrope_section", "mrope_interleaved")


def bare_names(name: str) -> list[str]:
    """Return what a tensor or module of a composite model may be called in its language model by itself."""
    return [ours + name.removeprefix(theirs) for theirs, ours in _PLACES if name.startswith(theirs)]


def text_config(config: Mapping[str, Any]) -> tuple[Architecture, dict[str, Any]]:
    """The family of a composite's language model, and the config.json that it has by itself.

    Raises:
        InvalidInput: it is no composite; its weights are quantised; its language model is of a family not known here.
    """
    kind = config.get("model_type")
    told = f"{shown(kind)}"
    text = config.get(_PART)
    if not isinstance(text, dict):
        if config.get("vision_config") is None:
            raise InvalidInput(
                f"the config of the model_type {told} has no {_PART}, so it is not a multimodal model",
                "Give a model that reads images and text.",
            )
        text = {key: value for key, value in config.items() if not isinstance(value, dict) or key in _ROPES}
    if quantisation(config) or quantisation(text):
        raise InvalidInput(
            "the weights are quantised, so gptkit cannot tell which tensors belong together",
            "Give a checkpoint whose weights are not quantised.",
        )
    found = next((each for each in ARCHITECTURES.values() if text.get("model_type") in each.texts), None)
    usual = {} if found is None else dict(found.texts[text["model_type"]])
    if found is None:
        try:
            found = architecture_of(text)
        except ConfigError as error:
            raise InvalidInput(
                f"gptkit does not support the language model of this multimodal model: {error.message}"
            ) from error
    if any(name in text for name in ("rope_theta", *_ROPES)):
        usual = {key: value for key, value in usual.items() if key not in _ROPES}
    ids = {key: config[key] for key in (*TOKEN_IDS, "dtype", "torch_dtype") if config.get(key) is not None}
    made = {**ids, **usual, **{key: value for key, value in text.items() if key not in _LEFT}}
    for name in _ROPES:
        if isinstance(made.get(name), dict):
            made[name] = _plain(made[name])
    return found, {**made, "model_type": found.name, "architectures": [found.hf_class]}


def _plain(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a config says of rotary positions, without the sections that tell three kinds of positions apart."""
    left = {key: value for key, value in rope.items() if key not in _SECTIONS}
    left |= {key: "default" for key in ("type", "rope_type") if left.get(key) == "mrope"}
    return left if left.keys() - {"type", "rope_type"} or "default" not in left.values() else None


def text_names(
    family: Architecture, config: Mapping[str, Any], names: Iterable[str]
) -> tuple[dict[str, str], dict[str, Any]]:
    """The tensors of the language model among a composite's, each with its own name; and the config, which then says
    whether the head is the embedding.

    Raises:
        InvalidInput: one that it needs is not there, or there is one that it has no place for.
    """
    names = list(names)
    own = {name: bare_names(name) for name in names}
    tied = not any(family.head in each for each in own.values())
    config = {**config, "tie_word_embeddings": tied}
    spec = family.spec(config)
    every = [each for some in own.values() for each in some]
    known = {leaf.checkpoint: leaf for leaf in family.bind_files(spec, every)}
    layers = len(spec.blocks)
    found: dict[str, str] = {}
    lost: list[str] = []
    for name, candidates in own.items():
        groups = {each: family.carries(each, layers) for each in candidates}
        if any(group and group[0] in OUTSIDE for group in groups.values()):
            continue
        carried = [group[1] for group in groups.values() if group]
        named = (family.canonical_name(each, known, layers) for each in candidates)
        right = next((each for each in named if each in known), carried[0] if carried else None)
        if right is not None:
            found[name] = right
        elif len(candidates) > 1 and not any(family.canonical_name(each, known, layers) is None for each in candidates):
            lost.append(name)
    if lost:
        raise InvalidInput(f"{len(lost)} tensors have names that {family.name} does not have: {', '.join(lost[:8])}")
    missing = sorted(known.keys() - found.values())
    if missing:
        raise InvalidInput(f"{len(missing)} tensors of the language model are missing: {', '.join(missing[:8])}")
    return found, config
