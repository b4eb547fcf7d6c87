"""The words that people and papers have for the values of swaps: `--mlp SwiGLU`, `--norm RMSNorm`, `--attention
Multi-Query`. One table for the command line, recipes and Python. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache

__all__ = ["SYNONYMS", "TWO_STEPS", "guarantee_in_words", "nearest", "understood"]

SYNONYMS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "norm": {"rmsnorm": ("rms", "root mean square"), "layernorm": ("ln", "layer")},
    "block": {"parallel": ("side by side",), "serial": ("sequential",)},
    "layers": {"auto": ()},
    "attention": {
        "mha": ("multi-head", "multi-head attention"),
        "mqa": ("multi-query", "multi-query attention"),
        "gqa": ("grouped-query", "grouped-query attention"),
        "mla": ("multi-head latent", "multi-head latent attention", "latent"),
    },
    "position": {
        "rope": ("rotary", "rotary embeddings", "roformer"),
        "alibi": ("linear biases",),
        "learned": ("absolute", "learned absolute", "table"),
        "none": ("nope",),
    },
    "rope_scaling": {
        "yarn": (),
        "llama3": (),
        "ntk": ("ntk-aware",),
        "linear": ("pi", "position interpolation"),
        "dynamic": ("dynamic ntk",),
        "none": ("default",),
    },
    "rope_pairs": {
        "halves": ("half", "split half", "rotate half", "neox", "gpt-neox"),
        "adjacent": ("interleaved", "gpt-j"),
    },
    "mlp": {
        "gated": ("glu",),
        "plain": ("ungated", "vanilla"),
        "moe": ("mixture of experts", "mixture", "experts"),
        "dense": (),
    },
    "activation": {
        "gelu_new": (),
        "quick_gelu": ("gelu sigmoid",),
        "relu": (),
        "gelu": ("gelu exact", "gelu erf", "gelu python"),
        "gelu_tanh": ("gelu pytorch tanh", "gelu approximate"),
        "gelu_bloom": ("bloom gelu",),
        "silu": ("swish",),
    },
    "vocab": {"multiple": ("multiple of",), "prune": (), "prune-text": ()},
    "drop": {
        "head.bias": ("lm_head.bias",),
        "norm.bias": ("norms.bias",),
        "query.bias": ("q.bias", "q_proj.bias"),
        "key.bias": ("k.bias", "k_proj.bias"),
        "value.bias": ("v.bias", "v_proj.bias"),
        "latent.bias": ("kv_down_proj.bias",),
        "output.bias": ("o.bias", "o_proj.bias"),
        "up.bias": ("up_proj.bias",),
        "down.bias": ("down_proj.bias",),
        "biases": ("bias", "all biases"),
    },
    "fold": {"norm": ("norms",), "value-bias": ("value_bias",), "scale": ("scales",)},
    "quantize": {"int8": ("8 bit", "i8"), "int4": ("4 bit", "i4"), **{f"int{bits}": () for bits in (2, 3, 5, 6, 7)}},
}
"""By option: each word of ours, and what else it is called. Case, hyphens, underscores and blanks do not matter."""

TWO_STEPS: Mapping[tuple[str, str], tuple[tuple[str, str], ...]] = {
    ("mlp", "swiglu"): (("mlp", "gated"), ("activation", "silu")),
    ("mlp", "geglu"): (("mlp", "gated"), ("activation", "gelu")),
    ("mlp", "reglu"): (("mlp", "gated"), ("activation", "relu")),
}
"""What has one name in papers and is two steps here."""


def squashed(word: str) -> str:
    """A word without what people write differently."""
    return re.sub(r"[-_ ]", "", word).lower()


@cache
def _words(option: str) -> Mapping[str, str]:
    """Our word by each squashed one."""
    ours = SYNONYMS.get(option, {})
    pairs = [(word, name) for name, more in ours.items() for word in (name, *more)]
    two = [(word, word) for known, word in TWO_STEPS if known == option]
    return {squashed(word): name for word, name in (*pairs, *two)}


def understood(option: str, value: str) -> str:
    """The value in gptkit's words; as it is where none of them is meant. What is behind a colon loses its capitals,
    unless it is a file's name.
    """
    word, colon, rest = value.partition(":")
    ours = _words(option).get(squashed(word))
    if ours is None:
        return value
    return f"{ours}{colon}{rest if ours.startswith('prune') else rest.strip().lower()}"


def nearest(option: str, value: str, forms: Iterable[str] = ()) -> str | None:
    """What may have been meant by a value that is unknown: one of these forms, or a word that is understood."""
    known = {form.partition(":")[0]: form for form in forms if not form.isupper()}
    words = {word: known.get(ours, ours) for word, ours in _words(option).items()}
    near = get_close_matches(squashed(value.partition(":")[0]), words, 1)
    return words[near[0]] if near else None


def guarantee_in_words(guarantee: str) -> str:
    """What people read: data says "retrained" of what is of no use until it is trained on."""
    return "needs training" if guarantee == "retrained" else guarantee
