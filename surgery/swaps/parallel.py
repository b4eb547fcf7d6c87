"""Serial blocks <-> parallel blocks.

    serial:    a = x + attention(norm₁(x)),  y = a + feed_forward(norm₂(a))
    parallel:  y = x + attention(norm₁(x)) + feed_forward(norm₂(x))

with the same weights. The two differ in what the feed-forward reads, and so they are one function where the attention
writes nothing (norm₂ sees x in both) or the feed-forward does; that is looked up in the weights. Otherwise one layer is
a small change and all of them together are too much for a model that was not trained so. (PaLM 2204.02311 and GPT-J
were.)

Both norms stay. Falcon 7b's and GPT-J's parallel blocks have one for both branches: "shared" leaves the second out
where it is the same as the first, and on the way to serial blocks a shared norm is copied.
"""

from __future__ import annotations

from functools import partial

from ...components import Block, ModelSpec
from ...errors import SwapRefused
from ..base import Moved, Swapped, Tensor
from ..layerwise import blocks_text, chosen_layers, guarantee_of, in_words, replaced, with_blocks
from ..registry import Asked, Clears, Step, Swap
from ..stream import writers

__all__ = ["SWAPS"]


def same_either_way(spec: ModelSpec, asked: Asked, layer: int) -> bool:
    """Whether a layer is the same function serial and parallel: all but one of its sub-layers, experts with them, add
    nothing to the stream.
    """
    written: dict[str, list[str]] = {}
    for each in writers(spec.blocks[layer], f"blocks.{layer}"):
        written.setdefault(each.slot, []).extend((each.weight, each.bias_name))
    return any(
        asked.weights.zero(*(name for other in written if other != slot for name in written[other]))
        for slot in reversed(written)
    )


def norms_alike(spec: ModelSpec, asked: Asked, layer: int) -> bool:
    """Whether the feed-forward's norm is the attention's, by kind and by every value."""
    block = spec.blocks[layer]
    if block.feed_forward_norm != block.attention_norm:
        return False
    path = f"blocks.{layer}"
    names = block.attention_norm.shapes()
    pairs = ((f"{path}.attention_norm.{name}", f"{path}.feed_forward_norm.{name}") for name in names)
    return all(asked.weights.same(a, b) for a, b in pairs)


def to_parallel(shared: bool, spec: ModelSpec, asked: Asked) -> Swapped:
    """Serial -> parallel with the same weights; `shared`: one norm for both branches, where the two are the same."""
    blocks = dict(enumerate(spec.blocks))
    asked_for = chosen_layers(spec, asked)
    serial = [layer for layer in asked_for if not blocks[layer].parallel]
    two = [layer for layer in asked_for if blocks[layer].feed_forward_norm is not None]
    if not serial and not (shared and two):
        raise SwapRefused("the blocks asked for are parallel already", "--block serial is the other way.")
    refuse_normed(spec, serial)
    differing = [layer for layer in two if not norms_alike(spec, asked, layer)]
    if shared and differing:
        raise SwapRefused(
            f"the norms before attention and feed-forward differ in {in_words(differing)}: they cannot be shared",
            "--block parallel keeps both.",
        )
    for layer in serial:
        blocks[layer] = replaced(blocks[layer], parallel=True)
    for layer in two if shared else ():
        blocks[layer] = replaced(blocks[layer], feed_forward_norm=None)
    alike = [] if shared else [layer for layer in serial if layer not in differing]
    note = f"{in_words(alike)}: both norms are the same; --block parallel:shared leaves one out" if alike else None
    return rearranged(spec, asked, serial, blocks, {}, "parallel", note)


def to_serial(spec: ModelSpec, asked: Asked) -> Swapped:
    """Parallel -> serial with the same weights; a norm that both branches share is copied."""
    blocks = dict(enumerate(spec.blocks))
    parallel = [layer for layer in chosen_layers(spec, asked) if blocks[layer].parallel]
    if not parallel:
        raise SwapRefused("the blocks asked for are serial already", "--block parallel is the other way.")
    tensors: dict[str, Tensor] = {}
    for layer in parallel:
        block = blocks[layer]
        if block.feed_forward_norm is None:
            tensors |= copied_norm(block, f"blocks.{layer}")
        blocks[layer] = replaced(
            block, parallel=False, feed_forward_norm=block.feed_forward_norm or block.attention_norm
        )
    return rearranged(spec, asked, parallel, blocks, tensors, "serial", None)


def copied_norm(block: Block, path: str) -> dict[str, Tensor]:
    """The shared norm's values for the feed-forward's own."""
    names = block.attention_norm.shapes()
    return {f"{path}.feed_forward_norm.{name}": Moved(f"{path}.attention_norm.{name}") for name in names}


def refuse_normed(spec: ModelSpec, layers: list[int]) -> None:
    """Raise SwapRefused where a residual is taken from a norm's output."""
    normed = [layer for layer in layers if spec.blocks[layer].residual == "normed"]
    if normed:
        raise SwapRefused(
            f"the residual of {in_words(normed)} is taken from the norm's output"
            " (apply_residual_connection_post_layernorm): a parallel block adds to the residual stream itself",
            "Nothing like it is known.",
        )


def rearranged(
    spec: ModelSpec,
    asked: Asked,
    changed: list[int],
    blocks: dict[int, Block],
    tensors: dict[str, Tensor],
    to: str,
    note: str | None,
) -> Swapped:
    """The tree with these blocks, `changed` of them from one order to the other."""
    lossy = [layer for layer in changed if not same_either_way(spec, asked, layer)]
    guarantee = guarantee_of(len(lossy), len(blocks))
    why = f"{in_words(lossy)}: the feed-forward reads another stream, since both branches write" if lossy else None
    new = with_blocks(spec, blocks)
    summary = {"to": to, "layers": changed, "exact_layers": [layer for layer in changed if layer not in lossy]}
    return Swapped(new, guarantee, tensors, summary, tuple(each for each in (why, note) if each is not None))


def serial_again(before: ModelSpec, asked: Asked) -> Step | None:
    """The way back from "parallel", where all were serial."""
    if any(before.blocks[i].parallel for i in asked.chosen(before)):
        return None
    return Step("block", "serial", blocks_text(asked))


def parallel_again(before: ModelSpec, asked: Asked) -> Step | None:
    """The way back from "serial", where all were parallel and of one kind."""
    blocks = [before.blocks[i] for i in asked.chosen(before)]
    kinds = {block.feed_forward_norm is None for block in blocks}
    if len(kinds) > 1 or not all(block.parallel for block in blocks):
        return None
    return Step("block", "parallel:shared" if kinds.pop() else "parallel", blocks_text(asked))


def may_be_parallel(spec: ModelSpec) -> bool:
    """Whether some block is serial and none is of a kind that cannot be parallel."""
    return any(not b.parallel for b in spec.blocks) and all(b.residual == "stream" for b in spec.blocks)


ORDER = 160
SWAPS = (
    Swap(
        option="block",
        form="parallel:shared",
        takes="serial block",
        gives="parallel block with one norm",
        guarantee="exact",
        needs="norms that are the same; exact where attention or feed-forward writes nothing, or it was parallel",
        source="PaLM 2204.02311, section 2; Falcon 7b",
        reshape=partial(to_parallel, True),
        clears=(Clears("*.feed_forward_norm", theirs=None),),
        by_layer=True,
        inverse=serial_again,
    ),
    Swap(
        option="block",
        form="parallel",
        takes="serial block",
        gives="parallel block",
        guarantee="exact",
        needs="exact where attention or feed-forward writes nothing; near for few layers",
        source="PaLM 2204.02311, section 2",
        reshape=partial(to_parallel, False),
        clears=(Clears("*.parallel", theirs=True),),
        examples=lambda spec: ("parallel",) if may_be_parallel(spec) else (),
        by_layer=True,
        inverse=serial_again,
    ),
    Swap(
        option="block",
        form="serial",
        takes="parallel block",
        gives="serial block",
        guarantee="exact",
        needs="exact where attention or feed-forward writes nothing; near for few layers",
        source="PaLM 2204.02311, section 2",
        reshape=to_serial,
        clears=(Clears("*.feed_forward_norm", ours=None), Clears("*.parallel", theirs=False)),
        examples=lambda spec: ("serial",) if any(b.parallel for b in spec.blocks) else (),
        by_layer=True,
        inverse=parallel_again,
    ),
)
