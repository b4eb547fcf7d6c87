"""Marian (Junczys-Dowmunt et al. 1804.00344), used by the OPUS-MT translators: the original Transformer, an encoder and
a decoder with post-norm and sinusoidal positions.

Files may contain the sines and cosines as a table.

Source: transformers models/marian/{configuration,modeling}_marian.py.
"""

from dataclasses import replace as replace_leaf
from typing import Any

from msgspec.structs import replace

from ...components import ModelSpec, SinusoidalPositions
from ..base import Leaf
from ..config import ConfigReader
from ..encoder_decoder import OF_BOTH, EncoderDecoder
from ..obstacles import of_kind
from .bart import OF_BART, leaves, stack

_SHARED = "share_encoder_decoder_embeddings"

SINES: dict[str, Any] = {"positions": {"made": "float64"}, "table": SinusoidalPositions}
"""Arguments of `bart.stack` for sinusoidal positions whose angles are computed in float64, as numpy does it."""


def _sines(spec: ModelSpec) -> Any:
    """Return the table of positions, (positions, hidden size): first the columns of sines, then of cosines."""
    import numpy as np

    rows = of_kind(spec.positions, SinusoidalPositions).length
    even = 2 * (np.arange(spec.hidden_size) // 2)
    angles = np.arange(rows)[:, None] / np.power(10000, even / spec.hidden_size)
    return np.concatenate([np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])], axis=1)


TABLES = {f"model.{stack}.embed_positions.weight": _sines for stack in ("encoder", "decoder")}
"""The names of both stacks' tables of positions in files -> the function that computes them."""

_STACKS = EncoderDecoder(
    stack("encoder", tokens=58101, **SINES), stack("decoder", tokens=58101, **SINES), headless="MarianModel"
)


def _read(config: ConfigReader) -> ModelSpec:
    """Return the ModelSpec that a config.json describes. The stacks share a token embedding, or have separate ones."""
    spec, shared = _STACKS.read(config), config.boolean(_SHARED, True)
    assert spec.encoder is not None
    tokens = config.optional_integer("decoder_vocab_size", spec.vocab_size) or spec.vocab_size
    if shared:
        if tokens != spec.vocab_size:
            raise config.fail("decoder_vocab_size", tokens, f"{spec.vocab_size}, the size of the encoder's vocabulary")
        return spec
    return replace(
        spec,
        encoder=replace(spec.encoder, embedding=replace(spec.encoder.embedding, shared=False)),
        embedding=replace(spec.embedding, vocab_size=tokens),
        head=replace(spec.has_head(), vocab_size=tokens),
    )


def _write(spec: ModelSpec) -> dict[str, Any]:
    """Return the config fields that `_read` reads."""
    fields, encoder = _STACKS.write(spec), spec.encoder
    if encoder is None or encoder.embedding.shared:
        return fields
    return {**fields, "vocab_size": encoder.vocab_size, "decoder_vocab_size": spec.vocab_size, _SHARED: False}


_OWN = "encoder.embedding.weight"


def _leaves() -> tuple[Leaf, ...]:
    """Return BART's leaves, with a leaf for a separate token embedding before those of either stack."""
    shared, others = ("embedding.weight",), leaves()
    leaves_of_both = [replace_leaf(leaf, unless=_OWN) if leaf.names == shared else leaf for leaf in others]
    for stack_name, name, requires in (("encoder", _OWN, ""), ("decoder", *shared, _OWN)):
        first = next(at for at, leaf in enumerate(leaves_of_both) if leaf.checkpoint.startswith(f"model.{stack_name}."))
        leaves_of_both.insert(first, Leaf(f"model.{stack_name}.embed_tokens.weight", name, requires=requires))
    return tuple(leaves_of_both)


def _unwritten(spec: ModelSpec) -> int:
    """Return the number of elements of both stacks' tables of sinusoidal positions, which files need not contain."""
    stacks = [stack for stack in (spec, spec.encoder) if stack is not None]
    return sum(stack.positions.length * stack.hidden_size for stack in stacks if stack.positions is not None)


MARIAN = _STACKS.architecture(
    "marian",
    "MarianMTModel",
    _leaves(),
    released="2020-05",
    hf_config="MarianConfig",
    read=_read,
    write=_write,
    draw=lambda chosen: {**_STACKS.draw(chosen), "decoder_start_token_id": 0},
    token_ids={"eos_token_id": 0, "pad_token_id": 58100},
    refused=OF_BOTH,
    **{
        **OF_BART,
        "carried": {"unused": (*OF_BART["carried"]["unused"], *TABLES)},
        "computed": TABLES,
        "unwritten": _unwritten,
        "irrelevant": {**OF_BART["irrelevant"], "static_position_embeddings": "what this family always has"},
    },
)
