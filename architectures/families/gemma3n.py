"""Gemma 3n's text model (Google 2025): Gemma 3 with four residual streams per token, of which a layer computes one and
predicts the others. There is a low-rank residual connection around attention, and every layer has an additional input
per token. In the first feed-forwards, most units are 0. The last layers use keys and values of earlier layers.

Conversions keep the tensors of towers for images and sound. They also keep the projections of keys and values in the
last layers, which do not use them.

Source: transformers models/gemma3n/{configuration,modeling}_gemma3n.py.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from ...components import (
    MOST_STREAMS,
    AlternatingUpdates,
    Attention,
    GatedFeedForward,
    LayerEmbedding,
    LayerInput,
    LowRankResidual,
    ModelSpec,
    RMSNorm,
    Streams,
    SubLayer,
)
from ..base import Leaf, leaves_of
from ..config import ConfigReader
from ..decoder import DecoderFamily
from ..draws import VOCAB, Config, Random, Sizes, among, kind_by_layer, sometimes
from ..fields import AROUND, Field, Fields, below, read_fields, size, with_defaults
from ..lenses import Lens, rope_by_kind, sliding
from ..obstacles import of_kind
from ..rope import ROTARY, RotaryKind
from ..usual import EMBEDDING, FEED_FORWARD, SANDWICH, B, T
from .gemma4 import AFTER_LAYERS, FIELDS, INPUTS, LATE, TOWERS, UNUSED, late_layers

_KINDS = {"full_attention": RotaryKind(1e6), "sliding_attention": RotaryKind(1e4, "rope_local_base_freq", scaled=False)}
SPARSE, SPARSITY = 10, 0.95  # by default, 95 % of the units are 0 in the first 10 layers
_UNITS, _SPARSE = "intermediate_size", "activation_sparsity_pattern"
_STREAMED: Fields = {
    _UNITS: Field("own.units", 16384, ConfigReader.raw, of=lambda spec: _by_layer(spec, "intermediate_size")),
    _SPARSE: Field(
        "own.shares", None, ConfigReader.raw, of=lambda spec: [s or 0.0 for s in _by_layer(spec, "sparsity")]
    ),
    "hidden_size_per_layer_input": size("layer_inputs.width", 256, 1, 3, 8),
    "vocab_size_per_layer_input": size("layer_inputs.table.vocab_size", 262144, VOCAB - 5, VOCAB, VOCAB + 3),
    "altup_num_inputs": Field("streams.count", 4, partial(ConfigReader.integer, most=MOST_STREAMS)),
    "altup_active_idx": below("altup.active", 0, "altup_num_inputs", 4),
    "laurel_rank": size("attention_low_rank.rank", 64, 1, 3, 8),
}
_FIELDS: Fields = {
    **with_defaults(FIELDS, vocab=262400, hidden=2048, layers=35, kv_heads=2, context=32768, num_kv_shared_layers=15),
    "final_logit_softcapping": Field("head.cap", 30.0, ConfigReader.number, draw=among(0.5, 3.0, 30.0)),
    **_STREAMED,
}
_WINDOWS = rope_by_kind(sliding(5, 512), _KINDS)


def _by_layer(spec: ModelSpec, name: str) -> list[Any]:
    """Return a field of every layer's feed-forward."""
    return [getattr(of_kind(block.feed_forward, GatedFeedForward), name) for block in spec.blocks]


def _layers(config: ConfigReader, values: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the fields of attention that differ by layer. Some layers use keys and values of earlier layers."""
    layers = _WINDOWS.get(config, values)
    late = late_layers(config, values, [fields["window"] for fields in layers])
    norm = RMSNorm(size=values["head_dim"], eps=values["eps"], cast="after_weight")
    norms = {"q_norm": norm, "k_norm": norm, "v_norm": replace(norm, gain="none")}
    return [{**fields, **norms, **(LATE if is_late else {})} for is_late, fields in zip(late, layers, strict=True)]


def _draw(chosen: Random, sizes: Sizes) -> Config:
    """Return random config fields of windows, reused keys and values, residual streams and feed-forwards."""
    layers, streams = sizes["layers"], chosen.choice((2, 3, 5))
    kinds = kind_by_layer(chosen, layers, "full_attention", "sliding_attention")
    by_layer = {_SPARSE: kind_by_layer(chosen, layers, 0.0, 0.25, 0.95), _UNITS: kind_by_layer(chosen, layers, 16, 33)}
    return {
        **_WINDOWS.draw(chosen, sizes),
        "layer_types": kinds,
        "num_kv_shared_layers": int(layers > 1 and {*kinds[:-1]} == {*kinds}),
        "altup_num_inputs": streams,
        "altup_active_idx": chosen.randrange(streams),
        _UNITS: sizes["intermediate"],
        **sometimes(chosen, by_layer),
    }


_DECODER = DecoderFamily(
    _FIELDS,
    norms=AROUND,
    fixed={
        "norm.cast": "after_weight",
        "attention.scale": 1.0,
        "intermediate": 1,  # replaced by the width of every layer
        "embedding.multiplier": lambda values: values["hidden"] ** 0.5,
        "embedding.scaling": "rounded",
    },
    rotary=None,
    layers=Lens(_layers, _WINDOWS.put, _draw),
    whole_heads=True,
)


def _read(config: ConfigReader) -> ModelSpec:
    """Return the ModelSpec that a config.json describes."""
    spec = _DECODER.read(config)
    hidden, count, norm = spec.hidden_size, len(spec.blocks), of_kind(spec.final_norm, RMSNorm)
    if hidden % of_kind(spec.blocks[0].attention, Attention).heads:
        raise config.fail("hidden_size", hidden, "a multiple of num_attention_heads")
    values = read_fields(_STREAMED, config)
    width, rows = values["layer_inputs.width"], values["layer_inputs.table.vocab_size"]
    streams, active, rank = (values[role] for role in ("streams.count", "altup.active", "attention_low_rank.rank"))
    if streams < 2:
        raise config.fail("altup_num_inputs", streams, "at least 2")
    altup = AlternatingUpdates(hidden_size=hidden, count=streams, norm=norm, active=active)
    low_rank = LowRankResidual(hidden_size=hidden, rank=rank, norm=norm)
    blocks = []
    for block, units, share in zip(spec.blocks, _units(config, count), _shares(config, count), strict=True):
        inner = replace(of_kind(block.feed_forward, GatedFeedForward), intermediate_size=units, sparsity=share or None)
        attention, feed_forward = block.replaced(feed_forward=inner).sublayers
        mixer = LayerInput(hidden_size=hidden, width=width, activation=inner.activation)
        own = SubLayer(mixer=mixer, output_norm=norm, onto="others")
        blocks.append(replace(block, sublayers=(replace(attention, low_rank=low_rank), feed_forward, own), altup=altup))
    inputs = LayerEmbedding(
        table=replace(spec.embedding, vocab_size=rows, hidden_size=count * width, multiplier=width**0.5),
        hidden_size=hidden,
        layers=count,
        width=width,
        norm=replace(norm, size=width),
        projected=hidden**-0.5,
        summed=2.0**-0.5,
        scaling="rounded",
    )
    both = dict.fromkeys(("streams", "joined"), Streams(hidden_size=hidden, count=streams))
    return replace(spec, blocks=tuple(blocks), layer_inputs=inputs, **both)


def _units(config: ConfigReader, count: int) -> list[int]:
    """Return the width of each layer's feed-forward."""
    if not isinstance(stated := config.raw(_UNITS, _STREAMED[_UNITS].default), list):
        return [config.integer(_UNITS, stated)] * count
    if len(stated) != count or any(type(width) is not int or not 1 <= width < 2**31 for width in stated):
        raise config.fail(_UNITS, stated, f"a positive integer, or a list of {count} positive integers")
    return stated


def _shares(config: ConfigReader, count: int) -> list[float]:
    """Return, for every layer, the activation sparsity: the fraction of its feed-forward's units that are set to 0."""
    stated, sparse = config.raw(_SPARSE), SPARSE if count > SPARSE else 0
    if stated is None:
        return [SPARSITY] * sparse + [0.0] * (count - sparse)
    numbers = isinstance(stated, list) and all(type(share) in (int, float) and 0 <= share < 1 for share in stated)
    if not numbers or len(stated) != count:
        raise config.fail(_SPARSE, stated, f"a list of {count} numbers, at least 0 and below 1")
    return list(map(float, stated))


_UPDATES = {
    **{
        f"{T}altup.{theirs}": f"{B}altup.{ours}"
        for theirs, ours in (
            ("correction_coefs", "correction"),
            ("prediction_coefs", "prediction"),
            ("modality_router", "router"),
            ("router_norm", "norm"),
        )
    },
    T + "laurel.linear_left": B + "attention_low_rank.left_proj",
    T + "laurel.linear_right": B + "attention_low_rank.right_proj",
    T + "laurel.post_laurel_norm": B + "attention_low_rank.norm",
}
_STREAMS = {
    f"model.altup_{theirs}.{i}": f"{ours}.{i}"
    for theirs, ours in (("projections", "streams"), ("unembed_projections", "joined"))
    for i in range(MOST_STREAMS - 1)
}
_HEAD = "lm_head"
_MODULES = ("q_proj", "q_norm", "k_proj", "v_proj", "k_norm", "o_proj")
_LEAVES = (
    *leaves_of(EMBEDDING),
    *leaves_of({f"{T}self_attn.{name}": f"{B}attention.{name}" for name in _MODULES}),
    *leaves_of({**FEED_FORWARD, **SANDWICH}),
    Leaf(T + "altup.correct_output_scale", B + "altup.scale.weight"),
    *leaves_of({**_UPDATES, **INPUTS}),
    *leaves_of({name: ours for name, ours in AFTER_LAYERS.items() if name != _HEAD}),
    *leaves_of({**_STREAMS, _HEAD: AFTER_LAYERS[_HEAD]}),
)

GEMMA3N = _DECODER.architecture(
    "gemma3n_text",
    "Gemma3nForCausalLM",
    _LEAVES,
    released="2025-06",
    model_types=("gemma3n_text", "gemma3n"),
    hf_config="Gemma3nTextConfig",
    kinds=_DECODER.kinds | {*ROTARY, AlternatingUpdates, LayerEmbedding, LayerInput, LowRankResidual, Streams},
    read=_read,
    token_ids={"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2},
    part="text_config",
    renamed=(("model.language_model.", "model."),),
    carried={**TOWERS, "unused": UNUSED},
    irrelevant={
        "altup_coef_clip": "about training, in which transformers clips numbers of the streams",
        **dict.fromkeys(
            (
                "vision_config",
                "audio_config",
                "audio_soft_tokens_per_image",
                "vision_soft_tokens_per_image",
                "boi_token_id",
                "eoi_token_id",
                "image_token_id",
                "boa_token_id",
                "eoa_token_id",
                "audio_token_id",
            ),
            "about images and sound, which the language model does not read",
        ),
    },
    refused={
        "altup_correct_scale": ((True,), "the checkpoint has a scale of the AltUp corrections, which would stay unused")
    },
)
