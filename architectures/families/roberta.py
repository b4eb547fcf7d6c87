"""RoBERTa (Liu et al. 1907.11692): BERT's layers, and positions that do not count padding tokens. XLM-RoBERTa and
CamemBERT have the same layers.

Padding tokens have a separate row in the table of positions, whatever the attention mask contains.

Source: transformers models/roberta/{configuration,modeling}_roberta.py.
"""

from typing import Any

from msgspec import structs

from ...components import LearnedPositions, ModelSpec
from ...errors import CannotExpress
from ..base import Architecture, Leaf, leaves_of
from ..config import ConfigReader
from ..draws import sometimes
from ..encoder import BERT_FIELDS, DECODING, OF_BERT, TASKS, TIED, Encoder, embeddings_of, layers_of, renamed_norms
from ..fields import with_defaults
from ..obstacles import of_kind

_PADDING, _PREFIX = "pad_token_id", "roberta."
_LAYER_NORMS = ("attention.output.LayerNorm", "output.LayerNorm")
_HEAD = (
    Leaf("lm_head.bias", "head.bias"),
    *leaves_of({"lm_head.dense": "head.transform.dense", "lm_head.layer_norm": "head.transform.norm"}),
)


def like_roberta(name: str, hf_name: str, released: str, vocab: int, *, head_first: bool = False) -> Architecture:
    """Return a family with the same trees as RoBERTa.

    Args:
        name: the name of the family.
        hf_name: the prefix of transformers' classes.
        released: the date of the first release, as in `Architecture`.
        vocab: the default of `vocab_size`.
        head_first: whether transformers' class creates the head before the other modules. This decides the order of
            tensors in files.
    """
    encoder = Encoder(
        with_defaults(BERT_FIELDS, vocab=vocab),
        masked=(f"{hf_name}ForMaskedLM",),
        pooled=True,
        transform=lambda _: {"activation": "gelu"},
    )
    norms = ("embeddings.LayerNorm", *(f"encoder.layer.{{layer}}.{norm}" for norm in _LAYER_NORMS))
    return encoder.architecture(
        name,
        f"{hf_name}ForMaskedLM",
        (*_HEAD, *_base()) if head_first else (*_base(), *_HEAD),
        released=released,
        head="lm_head.decoder.weight",
        optional=("pooler",),
        token_ids={"bos_token_id": 0, "eos_token_id": 2},
        read=lambda config: _read(encoder, config),
        write=lambda spec: _write(encoder, name, spec),
        draw=lambda chosen: {**encoder.draw(chosen, {}), **sometimes(chosen, {_PADDING: chosen.choice((0, 3, 40))})},
        prefix=_PREFIX,
        aliases=renamed_norms(*(_PREFIX + norm for norm in norms)),
        repeated={"lm_head.decoder.bias": "lm_head.bias"},
        carried={
            "unused": (f"{_PREFIX}embeddings.position_ids", "lm_head.decoder.bias"),
            "tasks": (f"{_PREFIX}pooler.", "lm_head.", *TASKS),
        },
        irrelevant={**OF_BERT, _PADDING: None},
        refused={**DECODING, **TIED},
    )


def _read(encoder: Encoder, config: ConfigReader) -> ModelSpec:
    """Return the ModelSpec that a config.json describes. Position ids start after the id of the padding token."""
    padding, rows = config.raw(_PADDING, 1), config.integer("max_position_embeddings", 512)
    if type(padding) is not int or not 0 <= padding < rows - 1:
        raise config.fail(_PADDING, padding, f"an integer from 0 to {rows - 2}: position ids start after this number")
    spec = encoder.read(config)
    table = LearnedPositions(length=rows - padding - 1, size=spec.hidden_size, offset=padding + 1, padding=padding)
    return structs.replace(spec, positions=table, context_length=table.length)


def _write(encoder: Encoder, name: str, spec: ModelSpec) -> dict[str, Any]:
    """Return the config fields that describe a model. `name` is that of the family."""
    table = of_kind(spec.positions, LearnedPositions)
    if table.padding is None:
        raise CannotExpress(f"{name} skips padding tokens when it counts positions, but this model counts them")
    rows = {"max_position_embeddings": table.length + table.offset, _PADDING: table.padding}
    return {**encoder.write(spec), **rows}


def _base() -> tuple[Leaf, ...]:
    """Return the leaves of everything but the head. transformers' class creates the table of positions last."""
    positions = _PREFIX + "embeddings.position_embeddings."
    embeddings = sorted(embeddings_of(_PREFIX), key=lambda leaf: leaf.checkpoint.startswith(positions))
    layers = layers_of(_PREFIX + "encoder.layer.{layer}.")
    return (*embeddings, *layers, *leaves_of({_PREFIX + "pooler.dense": "pooler.dense"}))


ROBERTA = like_roberta("roberta", "Roberta", "2019-07", 50265)
