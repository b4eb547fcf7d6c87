"""llama.cpp's model architectures in GGUF files: their tensors as leaves, their metadata as each family's config.json.

A GGUF file names an architecture ("llama", "gpt2", …), says its sizes under that prefix (`llama.block_count`) and
holds tensors under llama.cpp's own names (`blk.0.attn_q.weight`). What each is in a family's words is a row of
`gguf_table`. A tree is written and read back: where the two trees differ, GGUF has no place for the difference. Tensors
that stand for numbers of the tree (`rope_freqs.weight`) are `extras`.
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
    """The families of llama.cpp's architecture of that name. Raises UnknownFamily."""
    found = [row for row in GGUF.values() if row.name == name]
    if not found:
        known = ", ".join(dict.fromkeys(row.name for row in GGUF.values()))
        raise UnknownFamily(f"gptkit does not support the GGUF architecture {shown(name)}", f"known: {known}")
    return found


def gguf_architecture(facts: GgufFacts) -> GgufArchitecture:
    """The family of a file. Raises UnknownFamily."""
    found = gguf_rows(facts.name)
    return next((row for row in found if row.fits(facts)), found[-1])


def gguf_keeps(family: str, windowed: bool) -> bool:
    """Whether one of the architectures here is written for a family's models, and has windows where these have some."""
    return any(family in kind.written and (kind.windows is not None or not windowed) for kind in GGUF.values())


@dataclass(frozen=True)
class _Expressed:
    """A tree in GGUF's terms.

    metadata: its keys with the architecture's prefix (integers are uint32, floats float32); `general.architecture` is
        left to the writer.
    leaves: the tensors; extras: further fp32 tensors by name, [n] each, that stand for numbers of the tree.
    """

    architecture: GgufArchitecture
    metadata: dict[str, Value]
    leaves: list[BoundLeaf]
    extras: dict[str, tuple[float, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


_ROUNDED = (
    "llama.cpp rounds the ends of YaRN's ramp to whole pairs, which truncate: false forbids: logits differ slightly"
)


def expressed(spec: ModelSpec, family: str | None = None) -> _Expressed:
    """Return a tree as llama.cpp reads it, `family`'s architecture tried before the others.

    YaRN is written although llama.cpp always truncates its ramp (ggml_rope_yarn_corr_dims), with a note: gpt-oss is
    released untruncated, and every GGUF of it is of this kind.

    Raises CannotExpress: none of llama.cpp's architectures here computes this tree; the message says what is in the
    way, and names the family first where no architecture is written for it.
    """
    before, spec = spec, spec.mapped(_truncated)
    kinds = sorted(GGUF.values(), key=lambda kind: family not in kind.written)
    found, refused = first_of(kinds, spec, clear=("rounding",))
    if found is None:
        if family in kinds[0].written:
            raise refused[0].refusal()
        error = min(refused, key=lambda each: each.weight).refusal()
        whose = "a model that was not read from a transformers architecture" if family is None else family
        error.message = (
            f"gptkit cannot write {whose} as GGUF. The most similar llama.cpp architecture differs: {error.message}"
        )
        raise error
    kind = cast("GgufArchitecture", found.target)
    notes = () if spec == before else (_ROUNDED,)
    return _Expressed(kind, kind.metadata(spec), kind.bind(spec), kind.extras(spec), notes)


def _truncated(node: Component, _: str) -> Component:
    """Return a scaling whose ramp may be truncated as one whose ramp is."""
    return msgspec.structs.replace(node, truncate=True) if getattr(node, "truncate", True) is False else node
