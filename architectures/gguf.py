"""llama.cpp's model architectures in GGUF files: their tensors as leaves, and their metadata as a family's config.json.

A GGUF file names an architecture ("llama", "gpt2", …), states the sizes under that prefix (`llama.block_count`) and
contains tensors under llama.cpp's own names (`blk.0.attn_q.weight`). A row of `gguf_table` maps them to the names and
fields of a family. To find out whether GGUF can express a tree, gptkit writes the tree and reads it back. If the two
trees differ, GGUF cannot express the tree. Some tensors (`rope_freqs.weight`) do not contain weights, but numbers of
the tree. These are `extras`.
"""

from dataclasses import dataclass, field
from typing import cast

import msgspec

from ..components import Component, ModelSpec
from ..errors import UnknownFamily, shown
from .base import BoundLeaf
from .gguf_architecture import GgufArchitecture
from .gguf_facts import GgufFacts, Value
from .gguf_table import GGUF
from .obstacles import first_of


def gguf_rows(name: object) -> list[GgufArchitecture]:
    """Return the rows of `gguf_table` for llama.cpp's architecture `name`, one per family. Raises UnknownFamily."""
    rows = [row for row in GGUF.values() if row.name == name]
    if not rows:
        known = ", ".join(dict.fromkeys(row.name for row in GGUF.values()))
        raise UnknownFamily(f"gptkit does not support the GGUF architecture {shown(name)}", f"known: {known}")
    return rows


def gguf_architecture(facts: GgufFacts) -> GgufArchitecture:
    """Return the row of `gguf_table` to which a file belongs. Raises UnknownFamily."""
    rows = gguf_rows(facts.name)
    return next((row for row in rows if row.fits(facts)), rows[-1])


def gguf_keeps(family: str, windowed: bool) -> bool:
    """Return whether gptkit can write models of a family as GGUF. `windowed` means models with sliding windows."""
    return any(family in kind.written and (kind.windows is not None or not windowed) for kind in GGUF.values())


@dataclass(frozen=True)
class _Expressed:
    """A tree as the contents of a GGUF file."""

    architecture: GgufArchitecture
    metadata: dict[str, Value]
    """The keys with the architecture's prefix. Integers are stored as uint32, floats as float32. The writer adds
    `general.architecture`."""
    leaves: list[BoundLeaf]
    """The tensors."""
    extras: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Further fp32 tensors of one dimension, by name, that encode numbers of the tree."""
    notes: tuple[str, ...] = ()


_ROUNDED = (
    "llama.cpp rounds the ends of YaRN's ramp to whole pairs, which truncate: false forbids: logits differ slightly"
)


def expressed(spec: ModelSpec, family: str | None = None) -> _Expressed:
    """Return a tree as the contents of a GGUF file. The architectures for `family` are tried before the others.

    llama.cpp always rounds the ends of YaRN's ramp to whole pairs (ggml_rope_yarn_corr_dims). gptkit writes trees
    without this rounding all the same, and adds a note: gpt-oss was released without it, and all GGUF files of it
    differ in this.

    Raises:
        CannotExpress: no architecture in `gguf_table` computes this tree. The message lists the differences, and names
            the family first if no architecture is written for it.
    """
    before, spec = spec, spec.mapped(_truncated)
    kinds = sorted(GGUF.values(), key=lambda kind: family not in kind.written)
    expression, refused = first_of(kinds, spec, clear=("rounding",))
    if expression is None:
        if family in kinds[0].written:
            raise refused[0].refusal()
        error = min(refused, key=lambda refusal: refusal.weight).refusal()
        model = "a model that was not read from a transformers architecture" if family is None else family
        error.message = (
            f"gptkit cannot write {model} as GGUF. The most similar llama.cpp architecture differs: {error.message}"
        )
        raise error
    kind = cast("GgufArchitecture", expression.target)
    notes = () if spec == before else (_ROUNDED,)
    return _Expressed(kind, kind.metadata(spec), kind.bind(spec), kind.extras(spec), notes)


def _truncated(node: Component, _: str) -> Component:
    """Return the component. If it is a YaRN scaling, the ends of its ramp are rounded."""
    return msgspec.structs.replace(node, truncate=True) if getattr(node, "truncate", True) is False else node
