"""The decoders of Ettin (Weller et al. 2507.11412): ModernBERT with causal attention, and with separate tensors for
queries, keys and values.

Source: transformers models/modernbert_decoder/{configuration,modeling}_modernbert_decoder.py.
"""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from msgspec import structs

from ...components import HeadTransform, LayerNorm, ModelSpec
from ..base import leaves_of
from ..config import ConfigReader
from ..decoder import DecoderFamily
from ..draws import Config, Sizes, kind_by_layer, sometimes
from ..lenses import Lens, rope_by_kind, write_windows
from ..obstacles import of_kind
from ..usual import B, T
from . import modernbert


def _windows(config: ConfigReader, values: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the window of every layer: `sliding_window`, or half of `local_attention` if it is absent."""
    every = config.integer("global_attn_every_n_layers", 3)
    usual = ["sliding_attention" if layer % every else "full_attention" for layer in range(values["layers"])]
    types = config.layer_types(usual)
    around = config.optional_integer("local_attention", 128)
    window = config.raw("sliding_window", -1 if around is None else around // 2)
    if "sliding_attention" in types and (type(window) is not int or not 1 <= window < 2**31):
        raise config.fail("sliding_window", window, "a positive integer, by default half of local_attention")
    return [{"window": window if kind == "sliding_attention" else None} for kind in types]


def _write_windows(spec: ModelSpec) -> dict[str, Any]:
    """Return the config fields that `_windows` reads."""
    fields = write_windows(spec)
    return {**fields, "local_attention": min(2 * fields["sliding_window"], 2**31 - 1)}


def _draw_windows(chosen: Random, sizes: Sizes) -> Config:
    types = kind_by_layer(chosen, sizes["layers"], "full_attention", "sliding_attention")
    fields = {
        "global_attn_every_n_layers": chosen.choice((1, 2)),
        "layer_types": types,
        "local_attention": chosen.choice((2, 5, 17, 32)),
        "sliding_window": chosen.choice((1, 4, 9)),
    }
    return sometimes(chosen, fields)


class _ModernBertDecoder(DecoderFamily):
    """A decoder family without a norm before the first attention, and with a `HeadTransform` before the head."""

    def read(self, config: ConfigReader, **more: Any) -> ModelSpec:
        spec = modernbert.without_first_norm(super().read(config, **more))
        norm = of_kind(spec.final_norm, LayerNorm)
        transform = HeadTransform(hidden_size=spec.hidden_size, norm=norm, **modernbert.read_transform(config))
        return structs.replace(spec, head=structs.replace(spec.has_head(), transform=transform))

    def draw(self, chosen: Random, stated: Mapping[str, Any], **own: Any) -> Config:
        return {**super().draw(chosen, stated, **own), **modernbert.draw_transform(chosen)}


_DECODER = _ModernBertDecoder(
    modernbert.FIELDS,
    norm=LayerNorm,
    fixed={"feed_forward.fused": True},
    rotary=None,
    embedding_norm=True,
    layers=rope_by_kind(Lens(_windows, _write_windows, _draw_windows), modernbert.KINDS),
    square=True,
    written=modernbert.write_transform,
)

MODERNBERT_DECODER = _DECODER.architecture(
    "modernbert-decoder",
    "ModernBertDecoderForCausalLM",
    (
        *leaves_of(
            {
                **modernbert.EMBEDDING,
                **{f"{T}attn.{name}_proj": f"{B}attention.{name}_proj" for name in ("q", "k", "v")},
                T + "attn.Wo": B + "attention.o_proj",
            }
        ),
        *modernbert.FEED_FORWARD,
        *leaves_of({"lm_head.dense": "head.transform.dense", "lm_head.norm": "head.transform.norm", "decoder": "head"}),
    ),
    released="2025-07",
    head="decoder.weight",
    kinds=_DECODER.kinds | {HeadTransform},
    token_ids={"bos_token_id": 50281, "eos_token_id": 50282, "pad_token_id": 50283},
    carried={"tasks": ("head.", "classifier.")},
    irrelevant=modernbert.IRRELEVANT,
)
