"""RoBERTa (Liu et al. 1907.11692): BERT's layers. Its table of positions does not count padding tokens, which have a
row of their own, whatever the attention mask contains. XLM-RoBERTa and CamemBERT have the same layers.

Source: transformers models/roberta/{configuration,modeling}_roberta.py.
"""

from typing import Any

from msgspec import structs

from ...components import LearnedPositions, ModelSpec
from ...errors import CannotExpress
from ..base import Architecture, Leaf, leaves_of
from ..config import ConfigReader
from ..draws import Config, Random, sometimes
from ..encoder import BERT_FIELDS, DECODING, OF_BERT, TASKS, TIED, Encoder, embeddings_of, layers_of, renamed_norms
from ..fields import with_defaults
from ..obstacles import of_kind

_PADDING = "pad_token_id"


def like_roberta(name: str, hf_name: str, released: str, vocab: int, *, head_first: bool = False) -> Architecture:
    """A family of these trees under the names that transformers has for it. head_first: whether its class has the head
    before the rest, which decides the order of tensors in files.
    """
    encoder = Encoder(
        with_defaults(BERT_FIELDS, vocab=vocab),
        masked=(f"{hf_name}ForMaskedLM",),
        pooled=True,
        transform=lambda _: {"activation": "gelu"},
    )

    def read(config: ConfigReader) -> ModelSpec:
        padding, rows = config.raw(_PADDING, 1), config.integer("max_position_embeddings", 512)
        if type(padding) is not int or not 0 <= padding < rows - 1:
            raise config.fail(
                _PADDING, padding, f"an integer from 0 to {rows - 2}: position ids start after this number"
            )
        spec = encoder.read(config)
        table = LearnedPositions(length=rows - padding - 1, size=spec.hidden_size, offset=padding + 1, padding=padding)
        return structs.replace(spec, positions=table, context_length=table.length)

    def write(spec: ModelSpec) -> dict[str, Any]:
        table = of_kind(spec.positions, LearnedPositions)
        if table.padding is None:
            raise CannotExpress(f"{name} skips padding tokens when it counts positions, but this model counts them")
        rows = {"max_position_embeddings": table.length + table.offset, _PADDING: table.padding}
        return {**encoder.write(spec), **rows}

    def draw(chosen: Random) -> Config:
        return {**encoder.draw(chosen, {}), **sometimes(chosen, {_PADDING: chosen.choice((0, 3, 40))})}

    prefix = "roberta."
    layer = prefix + "encoder.layer.{layer}."
    behind = ("attention.output.LayerNorm", "output.LayerNorm")
    norms = ("embeddings.LayerNorm", *(f"encoder.layer.{{layer}}.{each}" for each in behind))
    head = (
        Leaf("lm_head.bias", "head.bias"),
        *leaves_of({"lm_head.dense": "head.transform.dense", "lm_head.layer_norm": "head.transform.norm"}),
    )
    # Its class makes the table of positions last.
    positions, found = prefix + "embeddings.position_embeddings.", embeddings_of(prefix)
    embeddings = sorted(found, key=lambda leaf: leaf.checkpoint.startswith(positions))
    base = (*embeddings, *layers_of(layer), *leaves_of({prefix + "pooler.dense": "pooler.dense"}))
    return encoder.architecture(
        name,
        f"{hf_name}ForMaskedLM",
        (*head, *base) if head_first else (*base, *head),
        released=released,
        head="lm_head.decoder.weight",
        optional=("pooler",),
        token_ids={"bos_token_id": 0, "eos_token_id": 2},
        read=read,
        write=write,
        draw=draw,
        prefix=prefix,
        aliases=renamed_norms(*(prefix + each for each in norms)),
        repeated={"lm_head.decoder.bias": "lm_head.bias"},
        carried={
            "unused": (f"{prefix}embeddings.position_ids", "lm_head.decoder.bias"),
            "tasks": (f"{prefix}pooler.", "lm_head.", *TASKS),
        },
        irrelevant={**OF_BERT, _PADDING: None},
        refused={**DECODING, **TIED},
    )


ROBERTA = like_roberta("roberta", "Roberta", "2019-07", 50265)
