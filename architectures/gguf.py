"""llama.cpp's model architectures in GGUF files: which tensors the files have, and which metadata.

A GGUF file names an architecture ("llama", "gpt2", …), states the sizes under that prefix (`llama.block_count`) and
contains tensors under llama.cpp's own names (`blk.0.attn_q.weight`). A row of `gguf_table` maps them to the tensor
names and config fields of a family. To find out whether GGUF can express a model, gptkit writes the ModelSpec and reads
it back. If the two differ, GGUF cannot express the model. Some tensors (`rope_freqs.weight`) do not contain weights,
but numbers that describe the model. These are `extras`.
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
    """Return the rows of `gguf_table` for an architecture of llama.cpp, one for every family that it is used for.

    `name` is the name of the architecture in GGUF files. Raises UnknownFamily.
    """
    rows = [row for row in GGUF.values() if row.name == name]
    if not rows:
        known = ", ".join(dict.fromkeys(row.name for row in GGUF.values()))
        raise UnknownFamily(f"gptkit does not support the GGUF architecture {shown(name)}", f"known: {known}")
    return rows


def gguf_architecture(facts: GgufFacts) -> GgufArchitecture:
    """Return the row of `gguf_table` for the model in a GGUF file.

    `facts` is the header of the file. Raises UnknownFamily.
    """
    rows = gguf_rows(facts.name)
    return next((row for row in rows if row.fits(facts)), rows[-1])


def gguf_keeps(family: str, windowed: bool) -> bool:
    """Return whether gptkit can write models of a family as GGUF.

    `windowed` says whether the models have sliding windows, which llama.cpp ignores in some architectures.
    """
    return any(family in kind.written and (kind.windows is not None or not windowed) for kind in GGUF.values())


@dataclass(frozen=True)
class _Expressed:
    """What a GGUF file contains for a model."""

    architecture: GgufArchitecture
    metadata: dict[str, Value]
    """The metadata. Keys have the prefix of the architecture. Integers are stored as uint32, floats as float32. The
    writer adds `general.architecture`."""
    leaves: list[BoundLeaf]
    """The tensors, with the parameters that they contain."""
    extras: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Further fp32 tensors of one dimension, by name. They contain numbers that describe the model, and no weights."""
    notes: tuple[str, ...] = ()


_ROUNDED = (
    "llama.cpp rounds the ends of YaRN's ramp to whole pairs, which truncate: false forbids: logits differ slightly"
)


def expressed(spec: ModelSpec, family: str | None = None) -> _Expressed:
    """Return what a GGUF file contains for a model.

    llama.cpp always rounds the ends of YaRN's ramp to whole pairs (ggml_rope_yarn_corr_dims). gptkit also writes models
    without this rounding, and adds a note. gpt-oss is such a model, and all GGUF files of it have this difference.

    Args:
        spec: the model.
        family: the model's family. llama.cpp's architectures for this family are tried before others.

    Raises:
        CannotExpress: no architecture in `gguf_table` computes this model. The message lists the differences. If no
            architecture is for `family`, it names the family first.
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
    """Return the component with `truncate` set, if it is a YaRN scaling: the ends of its ramp are rounded."""
    return msgspec.structs.replace(node, truncate=True) if getattr(node, "truncate", True) is False else node
