"""CodeGen (Nijkamp et al. 2203.13474): GPT-J's blocks with q, v and k in one tensor. It is split into four parts, one
for each of the cores that trained it, and each part has a quarter of the queries, values and keys.

RoPE is computed in fp32. Before transformers 5.24, queries stay in fp32, only the cache rounds keys, and there is no
sdpa path.

Source: transformers models/codegen/{configuration,modeling}_codegen.py.
"""

from dataclasses import replace

from ..base import Leaf, leaves_of, only_eager
from ..config import GPT2_ALIASES
from ..fields import multiple
from ..layout import Layout
from ..lenses import rotary_dims
from .gptj import DECODER, EMBEDDING, GPTJ_DROPPED, GPTJ_IRRELEVANT, KINDS, REST, REWRITTEN, B, T

_CORES = 4
_QUARTERS = Layout("(4 part heads/4 head_dim) hidden", "(4 part heads/4 head_dim) hidden", "part", ("1", "1", "1"))

_DECODER = replace(
    DECODER,
    fields={**DECODER.fields, "n_head": multiple("heads", 16, of=_CORES)},
    fixed={**DECODER.fixed, "attention.fused": True},
    layers=rotary_dims("result" if REWRITTEN else "keys"),
    sized=lambda _, sizes: {name: _CORES * sizes[name] for name in ("heads", "hidden")},
)

_CODEGEN = _DECODER.architecture(
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
    config_aliases=GPT2_ALIASES,
    prefix="transformer.",
    dropped=GPTJ_DROPPED,
    irrelevant=GPTJ_IRRELEVANT,
    bounded=True,
    **({} if REWRITTEN else only_eager()),
)
