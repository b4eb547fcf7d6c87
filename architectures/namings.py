"""Recognise which program or family uses the tensor names of a file.

gptkit only uses this in messages about checkpoints that it refuses, and not to read checkpoints.
"""

import re
from collections.abc import Iterator, Sequence

from . import ARCHITECTURES, llama2c

_LITGPT = (
    *("lm_head.weight", "transformer.wte.weight", "transformer.ln_f.weight"),
    *("transformer.h.{layer}.norm_1.weight", "transformer.h.{layer}.norm_2.weight"),
    *("transformer.h.{layer}.attn.qkv.weight", "transformer.h.{layer}.attn.attn.weight"),
    *("transformer.h.{layer}.attn.proj.weight", "transformer.h.{layer}.mlp.proj.weight"),
    *("transformer.h.{layer}.mlp.fc.weight", "transformer.h.{layer}.mlp.fc_1.weight"),
    "transformer.h.{layer}.mlp.fc_2.weight",
)
"""Tensor names of litgpt's models without biases (litgpt/model.py)."""

_MOST = 400
"""The largest number of tensor names that `whose` looks at."""
_LONGEST = 200
"""The largest number of characters of a name that `whose` looks at."""


def whose(names: Sequence[str]) -> tuple[str, str] | None:
    """Return which program or families use most of these tensor names, and a prefix that the file adds to the names.

    The first value is a name such as "gpt2", or "llama, mistral" if several families use the names. The prefix may be
    empty. The result is None if no program or family uses most of the names.
    """
    some = [name[:_LONGEST] for name in names[:_MOST]]
    best: tuple[int, str, list[str]] = (len(some) // 2, "", [])
    for prefix in _prefixes(some):
        inner = [name.removeprefix(prefix) for name in some if name.startswith(prefix)]
        for owner, pattern in _patterns():
            count = sum(pattern.fullmatch(name) is not None for name in inner)
            if count > best[0]:
                best = (count, prefix, [owner])
            elif count == best[0] and best[2] and prefix == best[1]:
                best[2].append(owner)
    return (", ".join(best[2][:3]), best[1]) if best[2] else None


def _prefixes(names: Sequence[str]) -> list[str]:
    """Return prefixes that a file may have added to its tensor names, the shortest first.

    The prefixes are the beginnings of some of the names, with up to four parts that end with dots.
    """
    prefixes = {""}
    for name in names[:: max(len(names) // 8, 1)]:
        parts = name.split(".")
        prefixes |= {".".join(parts[:count]) + "." for count in range(1, min(5, len(parts)))}
    return sorted(prefixes, key=lambda prefix: (len(prefix), prefix))


def _patterns() -> Iterator[tuple[str, re.Pattern[str]]]:
    """Yield the names of all known families and programs, each with a pattern for its tensor names.

    The patterns match the names for any number of layers and experts.
    """
    for family in ARCHITECTURES.values():
        yield family.name, _pattern([leaf.checkpoint for leaf in family.leaves])
    yield "litgpt", _pattern(_LITGPT)
    yield "Meta's LLaMA and llama2.c", _pattern([leaf.checkpoint for leaf in llama2c.LEAVES])


def _pattern(templates: Sequence[str]) -> re.Pattern[str]:
    return re.compile(
        "|".join(re.sub(r"\\\{(layer|expert|use)\\\}", r"[0-9]{1,5}", re.escape(template)) for template in templates)
    )
