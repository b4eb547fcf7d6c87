"""Convert serial blocks into parallel blocks, and back.

    serial:    a = x + attention(norm₁(x)),  y = a + feed_forward(norm₂(a))
    parallel:  y = x + attention(norm₁(x)) + feed_forward(norm₂(x))

The weights stay the same. The two forms differ in the input of the feed-forward. They are the same function if
attention or the feed-forward always adds zeros to the residual stream, which the weights show. Otherwise, changing one
layer does little damage, but changing all layers does too much for a model that was not trained in the new form. (PaLM
2204.02311 and GPT-J were trained with parallel blocks.)

Both norms stay. The parallel blocks of Falcon 7b and GPT-J have one norm for attention and feed-forward. The form
"parallel:shared" removes the second norm if it equals the first. The conversion to serial blocks copies a shared norm.
"""

from collections.abc import Mapping
from functools import partial

from ...components import Block, ModelSpec
from ...errors import SwapRefused
from ..base import Moved, Swapped, Tensor
from ..layerwise import guarantee_of, in_words, with_blocks, writers, written_biases
from ..options import NORMS, Option
from ..registry import Asked, Clears, Swap


def _same_either_way(spec: ModelSpec, asked: Asked, layer: int) -> bool:
    """Return whether a layer computes the same function as a serial and as a parallel block.

    It does if at most one of its sub-layers adds something other than zeros to the residual stream.
    """
    written: dict[str, list[str]] = {}
    for writer in writers(spec.blocks[layer], f"blocks.{layer}"):
        written.setdefault(writer.slot, []).extend((writer.weight, writer.bias_name))
    for name in written_biases(spec.blocks[layer], f"blocks.{layer}"):
        written[name.split(".")[2].removesuffix("_output_norm")].append(name)
    return any(
        asked.weights.zero(*(name for other in written if other != slot for name in written[other]))
        for slot in reversed(written)
    )


def _norms_alike(spec: ModelSpec, asked: Asked, layer: int) -> bool:
    """Return whether the norm before attention equals the norm before the feed-forward, in kind and weights."""
    block, first, second = (
        spec.blocks[layer],
        *(f"blocks.{layer}.{slot}_norm" for slot in ("attention", "feed_forward")),
    )
    names = block.attention_norm.shapes()
    same = (asked.weights.same(f"{first}.{name}", f"{second}.{name}") for name in names)
    return block.feed_forward_norm == block.attention_norm and all(same)


def _to_parallel(shared: bool, spec: ModelSpec, asked: Asked) -> Swapped:
    """Convert serial into parallel blocks with the same weights.

    With `shared`, attention and feed-forward have one norm. Raises SwapRefused if the two old norms of a block differ.
    """
    serial = asked.those(spec, lambda block: not block.parallel)
    two = asked.those(spec, lambda block: block.feed_forward_norm is not None)
    if not serial and not (shared and two):
        raise SwapRefused("these layers are parallel already", "--block serial makes them serial.")
    normed = [layer for layer in serial if spec.blocks[layer].residual == "normed"]
    if normed:
        raise SwapRefused(
            f"the residual of {in_words(normed)} comes from the norm's output"
            " (apply_residual_connection_post_layernorm), but a parallel block adds to the residual stream itself",
            "gptkit has no swap that changes where the residual comes from.",
        )
    alone = [layer for layer in serial if len(spec.blocks[layer].sublayers) < 2]
    if alone:
        raise SwapRefused(f"{in_words(alone)}: there is only one sub-layer, so there is nothing to run in parallel")
    grouped = [layer for layer in serial if any(sublayer.beside for sublayer in spec.blocks[layer].sublayers)]
    if grouped:
        raise SwapRefused(
            f"{in_words(grouped)}: attention already runs in parallel with another sub-layer, and the feed-forward "
            "comes after both, which this swap does not support"
        )
    for layer in serial:
        norms = spec.blocks[layer].norms()
        if "attention" in norms and "feed_forward" not in norms:
            raise SwapRefused(
                f"the feed-forward of layer {layer} has no norm, and in a parallel block it would read the output of"
                " attention's norm"
            )
    differing = [layer for layer in two if not _norms_alike(spec, asked, layer)]
    if shared and differing:
        reason = f"the norms before attention and feed-forward differ in {in_words(differing)}: they cannot be shared"
        raise SwapRefused(reason, "--block parallel keeps both norms.")
    blocks = {layer: spec.blocks[layer].replaced(parallel=True) for layer in serial}
    for layer in two if shared else ():
        blocks[layer] = blocks.get(layer, spec.blocks[layer]).replaced(feed_forward_norm=None)
    equal = [] if shared else [layer for layer in serial if layer not in differing]
    note = f"{in_words(equal)}: both norms are the same; --block parallel:shared stores only one" if equal else None
    return _rearranged(spec, asked, serial, blocks, {}, "parallel", note)


def _to_serial(spec: ModelSpec, asked: Asked) -> Swapped:
    """Convert parallel into serial blocks with the same weights. A norm that both sub-layers share is copied."""
    none = "these layers are serial already"
    parallel = asked.those(spec, lambda block: block.parallel, none, "--block parallel makes them parallel.")
    tensors: dict[str, Tensor] = {}
    blocks = {}
    for layer in parallel:
        block = spec.blocks[layer]
        if block.feed_forward_norm is None:
            tensors |= _copied_norm(block, f"blocks.{layer}")
        norm = block.feed_forward_norm or block.attention_norm
        blocks[layer] = block.replaced(parallel=False, feed_forward_norm=norm)
    return _rearranged(spec, asked, parallel, blocks, tensors, "serial", None)


def _copied_norm(block: Block, path: str) -> dict[str, Tensor]:
    """Return the tensors of a norm before the feed-forward that is a copy of the norm before attention."""
    names = block.attention_norm.shapes()
    return {f"{path}.feed_forward_norm.{name}": Moved(f"{path}.attention_norm.{name}") for name in names}


def _rearranged(
    spec: ModelSpec,
    asked: Asked,
    changed: list[int],
    blocks: Mapping[int, Block],
    tensors: dict[str, Tensor],
    to: str,
    note: str | None,
) -> Swapped:
    """Return the result of a swap to serial or parallel blocks, with its guarantee.

    Args:
        spec: The old model.
        asked: The request.
        changed: The layers that become serial or parallel.
        blocks: The new blocks by layer. In some of them, only a norm may change.
        tensors: The new tensors.
        to: "serial" or "parallel".
        note: A message for the user.
    """
    lossy = [layer for layer in changed if not _same_either_way(spec, asked, layer)]
    why = f"{in_words(lossy)}: the feed-forward reads a different input, because both branches write" if lossy else None
    summary = {"to": to, "layers": changed, "exact_layers": [layer for layer in changed if layer not in lossy]}
    guarantee, notes = guarantee_of(len(lossy), len(spec.blocks)), tuple(filter(None, (why, note)))
    return Swapped(with_blocks(spec, blocks), guarantee, tensors, summary, notes)


_entry = partial(Swap, option="block", by_layer=True)
_NO_EFFECT = "attention or feed-forward adds nothing to the residual stream"

ORDER = 160
OPTIONS = (
    Option(
        "block",
        NORMS,
        2,
        "The order of attention and feed-forward in a layer: one after the other (serial), or both on the "
        "same input (parallel).",
        "serial | parallel",
        words="parallel = side by side; serial = sequential",
    ),
)
SWAPS = (
    _entry(
        form="parallel:shared",
        takes="serial blocks",
        gives="parallel blocks with one norm",
        needs=f"Needs equal norms before attention and feed-forward. Exact only if {_NO_EFFECT}, or if"
        " the block was already parallel",
        exact_where=_NO_EFFECT,
        source="PaLM 2204.02311, section 2; Falcon 7b",
        reshape=partial(_to_parallel, True),
        clears=(Clears("*.feed_forward_norm", theirs=None),),
    ),
    _entry(
        form="parallel",
        takes="serial blocks",
        gives="parallel blocks",
        needs=f"Exact only if {_NO_EFFECT}. Approximate if only few layers change",
        exact_where=_NO_EFFECT,
        source="PaLM 2204.02311, section 2",
        reshape=partial(_to_parallel, False),
        clears=(Clears("*.parallel", theirs=True),),
    ),
    _entry(
        form="serial",
        takes="parallel blocks",
        gives="serial blocks",
        needs=f"Exact only if {_NO_EFFECT}. Approximate if only few layers change",
        exact_where=_NO_EFFECT,
        source="PaLM 2204.02311, section 2",
        reshape=_to_serial,
        clears=(Clears("*.feed_forward_norm", ours=None), Clears("*.parallel", theirs=False)),
    ),
)
