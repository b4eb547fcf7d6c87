"""CodeGen (Nijkamp et al. 2203.13474): GPT-J's blocks with q, v and k in one tensor. It is split into four parts, one
for each of the cores that trained it, and each part has a quarter of the queries, values and keys.

Source: transformers models/codegen/{configuration,modeling}_codegen.py, which has no sdpa path. Queries stay in fp32
when they have turned, keys are rounded by the cache.
"""

from dataclasses import replace

from ...components import ModelSpec
from ...errors import CannotExpress
from ..base import Leaf, leaves_of
from ..config import GPT2_ALIASES, ConfigReader
from ..draws import TABLE, Config, Random
from ..layout import Layout
from .gptj import DECODER, EMBEDDING, GPTJ_DROPPED, GPTJ_IRRELEVANT, KINDS, REST, B, T, turning

_CORES = 4
_QUARTERS = Layout("(4 part heads/4 head_dim) hidden", "(4 part heads/4 head_dim) hidden", "part", ("1", "1", "1"))

_CODEGEN_DECODER = replace(DECODER, fixed={**DECODER.fixed, "attention.fused": True}, layers=turning("keys"))


def _read(config: ConfigReader) -> ModelSpec:
    """Read the tree of a config.json."""
    heads = config.integer("n_head", 16)
    if heads % _CORES:
        raise config.fail("n_head", heads, f"a multiple of {_CORES}")
    return _CODEGEN_DECODER.read(config)


def _write(spec: ModelSpec) -> dict[str, object]:
    """Return the config fields of a tree."""
    heads = spec.blocks[0].attention.heads
    if heads % _CORES:
        raise CannotExpress(
            f"CodeGen splits q, k and v over {_CORES} cores, and {heads} heads are not divisible by {_CORES}"
        )
    return _CODEGEN_DECODER.write(spec)


def _draw(chosen: Random) -> Config:
    """Draw a config of GPT-J with four times the heads."""
    config = _CODEGEN_DECODER.draw(chosen, {}, context=TABLE)
    return {**config, **{name: _CORES * config[name] for name in ("n_embd", "n_head")}}


_CODEGEN = _CODEGEN_DECODER.architecture(
    "codegen",
    "CodeGenForCausalLM",
    (
        *leaves_of(EMBEDDING),
        Leaf(
            T + "attn.qkv_proj.weight", tuple(f"{B}attention.{name}_proj.weight" for name in ("q", "v", "k")), _QUARTERS
        ),
        *leaves_of(REST),
    ),
    released="2022-03",
    kinds=KINDS,
    token_ids={"bos_token_id": 50256, "eos_token_id": 50256},
    read=_read,
    write=_write,
    draw=_draw,
    config_aliases=GPT2_ALIASES,
    prefix="transformer.",
    dropped=GPTJ_DROPPED,
    irrelevant=GPTJ_IRRELEVANT,
    bounded=True,
    reference=lambda _: ("eager",),
    reference_quirk="transformers has no sdpa path for codegen",
)
