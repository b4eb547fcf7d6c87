"""Change the window of attention: how far back a token attends.

With a window of w tokens, position t attends to t-w+1 … t. No weight depends on the window, so no tensor changes. Up to
the shorter of the old and the new window, every token attends to the same tokens as before. The swap is exact if the
model's context is not longer than that. On longer texts, a narrower window hides tokens that the model was trained to
see (Longformer 2004.05150), and a wider one shows tokens that it was not trained to see. That damage is measured.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from ...analysis.costs import usual_context
from ...architectures.obstacles import of_kind
from ...components import Attention, Block, ModelSpec
from ...errors import SwapRefused
from ..base import Promise, Swapped
from ..layerwise import with_mixers
from ..options import ATTENTION, Option
from ..registry import Asked, Clears, Swap


def _has_window(block: Block) -> bool:
    """Return whether a block has attention that supports a window. Latent and linear attention do not."""
    return isinstance(block.mixer("attention"), Attention)


def _same_up_to(windows: list[int | None]) -> int:
    """Return the length of the longest sequence, in tokens, in which every token is in all these windows.

    This is the shortest window. None stands for full attention.
    """
    return min(window for window in windows if window is not None)


def _to_window(spec: ModelSpec, asked: Asked) -> Swapped:
    """Give the attention of the chosen layers a window, or with the value "none" full attention."""
    window = None if asked.value == "none" else asked.number("a window", most=10**9)
    layers = asked.those(spec, _has_window, "no layer has attention that can have a window")
    changed = dict[int, Attention]()
    before: dict[int, int | None] = {}
    for layer in layers:
        attention = of_kind(spec.blocks[layer].attention, Attention)
        if attention.window != window:
            before[layer] = attention.window
            changed[layer] = replace(attention, window=window, chunked=attention.chunked and window is not None)
    if not changed:
        words = "full attention" if window is None else f"a window of {window:,} tokens"
        raise SwapRefused(f"every layer has {words} already")
    length = _same_up_to([window, *before.values()])
    exact = spec.context_length is not None and spec.context_length <= length
    notes = (f"the model computes the same function up to {length:,} tokens",)
    promise = Promise(length=length) if exact else Promise()
    summary = {"from": list(before.values()), "to": window, "layers": [*before]}
    return Swapped(with_mixers(spec, changed), "exact" if exact else "approximate", {}, summary, notes, promise)


def _windows(spec: ModelSpec) -> set[int | None]:
    """Return the different attention windows of a model's layers, in tokens.

    If no layer has a window, return the context length.
    """
    windows = {getattr(block.mixer("attention"), "window", None) for block in spec.blocks} - {None}
    return windows or {usual_context(spec)}


def _examples(spec: ModelSpec) -> Iterator[str]:
    """Yield the value that `gptkit swaps` tries on a model: half of the widest window."""
    widest = max(_windows(spec), key=lambda width: width or 0)
    if widest is not None and widest > 1:
        yield str(widest // 2)


ORDER = 55
OPTIONS = (
    Option(
        "window",
        ATTENTION,
        4,
        "The number of tokens that a token attends to, itself included, such as 4096. --window none gives "
        "full attention.",
        "N | none",
        words="none = full, off",
        parts={"": ("tokens of a window", _windows)},
    ),
)
SWAPS = (
    Swap(
        option="window",
        form="none",
        takes="sliding-window attention",
        gives="full attention",
        needs="Exact only if the model's context is not longer than the window",
        source="Longformer 2004.05150; Mistral 2310.06825",
        reshape=_to_window,
        exact_where="the context is not longer than the shorter window",
        by_layer=True,
        clears=(Clears("*.window", theirs=None),),
    ),
    Swap(
        option="window",
        form="N",
        takes="attention",
        gives="attention with a sliding window of N tokens",
        needs="Exact only if the model's context is not longer than the shorter window",
        source="Longformer 2004.05150; Mistral 2310.06825",
        reshape=_to_window,
        exact_where="the context is not longer than the shorter window",
        examples=_examples,
        by_layer=True,
        clears=(Clears("*.window", "window={theirs}", theirs=int),),
    ),
)
