"""State that all layers of a forward pass share: position tables, biases and masks, computed once when needed."""

import math
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..components import Biasing, Buckets, SharedTransformer, Temperature, Turning
from ..errors import MissingComponent
from .registry import module_of


class Encoded(NamedTuple):
    """The output of an encoder for source texts of U tokens."""

    states: Tensor  # the hidden states, (B, U, hidden)
    mask: Tensor | None = None  # (B, U), 1 for tokens and 0 for padding; None if there is no padding

    def repeated(self, count: int) -> "Encoded":
        """Return the output with every source text repeated `count` times."""
        rows = torch.arange(len(self.states), device=self.states.device)
        return self.chosen(rows.repeat_interleave(count))

    def chosen(self, rows: Tensor) -> "Encoded":
        """Return the output for the source texts with the indices `rows`. An index may occur several times."""
        mask = None if self.mask is None else self.mask.index_select(0, rows)
        return Encoded(self.states.index_select(0, rows), mask)


class _Sight:
    """The masks of cross-attention, which hide only padding of the source.

    It has the methods of `Context` that attention kernels call, so that they can use it in place of a `Context`.
    """

    def __init__(self, mask: Tensor | None, dtype: torch.dtype) -> None:
        padded = mask is not None and not bool(mask.all())
        self._allowed = mask[:, None, None, :].bool() if padded and mask is not None else None
        self._additive = None
        if self._allowed is not None:
            zero = torch.zeros((), dtype=dtype, device=self._allowed.device)
            self._additive = torch.where(self._allowed, zero, torch.finfo(dtype).min)

    def sdpa_mask(self, *_: Any) -> Tensor | None:
        """Return (B, 1, 1, U), True at visible tokens, or None if all are visible."""
        return self._allowed

    def additive_mask(self, *_: Any) -> Tensor | None:
        """Return the mask to be added to scores: 0 at visible tokens, and the dtype's minimum at padding."""
        return self._additive


class Context:
    """What all layers of one forward pass share: positions and masks, for T new tokens after `past` cached ones.

    Args:
        batch: the number of rows, B.
        steps: the number of new tokens per row, T.
        past: the number of tokens in the cache. With a `StaticCache` it is a tensor (1,) on the model's device, so that
            a recorded CUDA graph is right for every step.
        cached: whether the pass uses a cache.
        position_ids: the positions of the new tokens, (1 or B, T).
        attention_mask: (B, past + T), 1 for tokens and 0 for padding; None if there is no padding.
        dtype: the dtype of the hidden states.
        documents: (B, T), the document of every token if a row contains several. Tokens attend only to their own
            document.
        capacity: the number of keys that a `StaticCache` returns, of which those after the new tokens are unwritten.
            None for other caches.
    """

    def __init__(
        self,
        batch: int,
        steps: int,
        past: int | Tensor,
        cached: bool,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        dtype: torch.dtype,
        documents: Tensor | None = None,
        capacity: int | None = None,
    ) -> None:
        self.batch, self.steps, self.cached, self.capacity = batch, steps, cached, capacity
        self.past: Any = past
        self.position_ids, self.dtype = position_ids, dtype
        self.padded = attention_mask is not None and not bool(attention_mask.all())
        self.attention_mask, self.documents = attention_mask, documents
        self.layer = 0  # the index of the block that runs
        self.inputs: Tensor | None = None  # (B, T, layers, width): additional inputs of the blocks
        self.shared: dict[Any, tuple[Tensor, Tensor] | None] = {}  # keys and values that later blocks use
        self.table: Tensor | None = None  # (buckets, heads): biases by distance
        self.encoded: Encoded | None = None  # the encoder's output, for cross-attention
        self.first: Tensor | None = None  # the input of the first block, for shared blocks
        self._lenders: dict[int, Any] = {}  # the modules that have the weights of shared blocks, by number
        self.sight: Any = None
        self._tables: dict[int, tuple[Turning, Any]] = {}
        self._biases: dict[tuple[int, int, int], tuple[Biasing, Tensor]] = {}
        self._allowed: dict[tuple[int | None, int | None, bool, bool], Tensor] = {}
        self._additive: dict[tuple[int | None, int | None, bool, bool, float], Tensor] = {}
        self._copies: dict[torch.device, Context] = {}

    def on(self, device: torch.device) -> "Context":
        """Return this state on a device, for a model whose layers are on several devices.

        The copies of a device share its tables and masks, and all of them share `shared`.
        """
        if device == self.position_ids.device:
            return self
        if device not in self._copies:
            moved = self._copies[device] = copy(self)
            for name, value in vars(self).items():
                if isinstance(value, Tensor):
                    setattr(moved, name, value.to(device))
            moved._tables, moved._biases, moved._allowed, moved._additive = {}, {}, {}, {}
        self._copies[device].layer = self.layer
        return self._copies[device]

    def tables(self, spec: Turning) -> Any:
        """Return the tables of a rotary position encoding for the new tokens, such as cos and sin.

        `spec` is the encoding. Its tables are computed once per forward pass.
        """
        if id(spec) not in self._tables:
            self._tables[id(spec)] = spec, module_of(spec).tables(spec, self.position_ids, self.dtype)
        return self._tables[id(spec)][1]

    def tempered(self, spec: Temperature, q: Tensor) -> Tensor:
        """Return queries (B, H, T, hd), multiplied by a factor that grows with the token's position (as in Llama 4).

        `spec` defines the factor, which is computed in fp32.
        """
        positions = self.position_ids
        if spec.counts == "tokens":
            positions = self.places()[None]
        grown = torch.floor((positions + spec.offset) / spec.original_context)
        if spec.counts == "positions":
            factor = (1 + spec.growth * torch.log(1 + grown)).to(q.dtype)
        else:
            factor = torch.log1p(grown) * spec.growth + 1.0
        return (q * factor[:, None, :, None]).to(q.dtype)

    def layer_input(self) -> Tensor:
        """Return the current layer's additional input (B, T, width), as in Gemma 3n.

        Raises MissingComponent if the pass has no such inputs.
        """
        if self.inputs is None:
            raise MissingComponent(
                "a layer with a layer_input ran outside of its model: only the model's own forward pass "
                "computes layer_inputs"
            )
        return self.inputs[:, :, self.layer]

    def earlier(self, spec: Any) -> tuple[Tensor, Tensor]:
        """Return keys and values that an earlier layer computed, for an attention that uses them (`kv_from: earlier`).

        `spec` is the attention that uses them. Raises MissingComponent if the earlier layer has not run.
        """
        shared = self.shared.get(spec.kv_signature)
        if shared is None:
            raise MissingComponent(
                "a layer with kv_from: earlier ran before the layer whose keys and values it uses: run the "
                "layers in order"
            )
        keys, values = (tensor.to(self.position_ids.device) for tensor in shared)
        return keys, values

    def first_stream(self) -> Tensor:
        """Return the input of the first block (B, T, hidden). Raises MissingComponent if it was not stored."""
        if self.first is None:
            raise MissingComponent(
                "a layer with a shared block ran outside of its model: it needs the input of the first layer, which "
                "only the model's own forward pass stores"
            )
        return self.first

    def lender(self, spec: SharedTransformer, module: Any) -> Any:
        """Return the module that stores the weights of a shared block (Zamba 2), for a layer that runs this block.

        `spec` and `module` are the record and the module of the layer. If the layer itself stores the weights, its
        module is remembered for later layers. Raises MissingComponent if the module that stores them has not run yet.
        """
        if spec.weights_from == "own":
            self._lenders[spec.number] = module
        if spec.number not in self._lenders:
            raise MissingComponent(
                f"a layer that uses shared block {spec.number} ran before the layer that has the weights of "
                "this block: run the layers in order"
            )
        return self._lenders[spec.number]

    def see(self, encoded: Encoded) -> None:
        """Set the encoder's output for cross-attention.

        Its hidden states may be empty if the keys and values that are computed from them are already in a cache.
        """
        self.encoded, self.sight = encoded, _Sight(encoded.mask, self.dtype)

    def source(self) -> Tensor:
        """Return the encoder's hidden states (B, U, hidden). Raises MissingComponent if there are none."""
        if self.encoded is None:
            raise MissingComponent(
                "a layer has cross-attention, but there is no output of an encoder: pass "
                "encoded=model.encode(ids) to the model"
            )
        return self.encoded.states

    def places(self) -> Tensor:
        """Return the positions of the new tokens in the text, (T,), including padding."""
        return counted(self.past, self.steps, self.position_ids.device)

    def first_key(self, window: int | None) -> int:
        """Return the position of the earliest token whose key is still in the cache of a layer with this window."""
        forgets = window is not None and self.cached and self.capacity is None
        return max(self.past - window + 1, 0) if forgets else 0

    def keys(self, window: int | None) -> int:
        """Return S, the number of keys that the cache of a layer with this window returns.

        These are the cached keys and the new ones. A static cache also returns keys that are not written yet.
        """
        return self.past + self.steps - self.first_key(window) if self.capacity is None else self.capacity

    def bias(self, spec: Biasing, heads: int, window: int | None) -> Tensor:
        """Return the bias that is added to attention scores.

        It is (B, heads, 1, S) for ALiBi, and (1, heads, T, S) for a learned bias by distance as in T5.

        Args:
            spec: the position encoding.
            heads: the number of query heads.
            window: the number of tokens that the layer's cache keeps; None for all.

        Raises:
            MissingComponent: the model has not given the table of learned biases to this pass.
        """
        first = self.first_key(window)
        key = (id(spec), heads, first)
        if key not in self._biases and isinstance(spec, Buckets):
            if self.table is None:
                raise MissingComponent(
                    "a layer with relative position biases ran outside of its model: only the model's own "
                    "forward pass reads the table of biases"
                )
            keys = torch.arange(self.keys(None), device=self.table.device)
            self._biases[key] = spec, module_of(spec).looked_up(spec, self.table, self.places(), keys)
        if key not in self._biases and self.capacity is not None:
            self._biases[key] = spec, self._static_bias(spec, heads, self.capacity)
        if key not in self._biases:
            mask = self.attention_mask
            if mask is None:
                shape = (self.batch, self.past + self.steps)
                mask = torch.ones(shape, dtype=torch.long, device=self.position_ids.device)
            self._biases[key] = spec, module_of(spec).bias(spec, heads, mask.long(), self.dtype)[..., first:]
        return self._biases[key][1]

    def _static_bias(self, spec: Biasing, heads: int, capacity: int) -> Tensor:
        """Return the bias (B, heads, 1, S) for a static cache with `capacity` keys.

        The text is treated as padded on the left to the capacity, because some biases count back from the last key.
        The result is then shifted, so that it begins with the bias of the first key.
        """
        keys = torch.arange(capacity, device=self.position_ids.device)
        padding = capacity - self.steps - self.past
        mask = (keys >= padding).long().expand(self.batch, -1)
        bias = module_of(spec).bias(spec, heads, mask, self.dtype)
        return bias.index_select(-1, (keys + padding).clamp(max=capacity - 1))  # type: ignore[no-any-return]

    def allowed(
        self, window: int | None, cache_window: int | None, chunked: bool = False, causal: bool = True
    ) -> Tensor | None:
        """Return a mask (B or 1, 1, T, S) that is True where query t may attend to key s, or None if it is all True.

        Args:
            window: the number of tokens to which a query attends, including its own; None for all.
            cache_window: the window of the layer's cache, which may be larger.
            chunked: the text is divided into chunks of `window` tokens, and a query attends only to its own chunk.
                The first chunk starts at the first token that is not padding.
            causal: a query attends to no later keys. Otherwise, a window extends equally far in both directions.
        """
        near = window is None or self.steps < window
        if not causal and near and not self.padded and self.documents is None:
            return None
        alone = causal and self.steps == 1 and not self.padded and self.capacity is None
        if alone and (window is None or self.keys(cache_window) < window):
            return None
        key = (window, cache_window, chunked, causal)
        if key not in self._allowed:
            device, first = self.position_ids.device, self.first_key(cache_window)
            queries = self.places()[:, None]
            keys = torch.arange(first, first + self.keys(cache_window), device=device)[None, :]
            allowed = keys <= queries if causal else torch.ones_like(keys <= queries)
            if window is not None and not causal:
                allowed &= keys < queries + window
            if window is not None and not chunked:
                allowed &= keys > queries - window
            allowed = allowed[None, None]
            if window is not None and chunked:
                first_token = torch.zeros(1, 1, dtype=torch.long, device=device)
                if self.attention_mask is not None:
                    first_token = (self.attention_mask.cumsum(dim=-1) == 0).sum(dim=-1, keepdim=True)
                start = first_token[:, None, None]  # (B or 1, 1, 1, 1)
                if self.documents is not None:  # chunks start at the first token of a document
                    keys, queries = self.position_ids[:, None, None, :], self.position_ids[:, None, :, None]
                allowed = allowed & ((keys - start) // window == (queries - start) // window)
            if self.padded and self.attention_mask is not None:
                allowed = allowed & self.attention_mask[:, None, None, first:].bool()
            if self.documents is not None:
                allowed = allowed & (self.documents[:, None, :, None] == self.documents[:, None, None, :])
            self._allowed[key] = allowed
        return self._allowed[key]

    def sdpa_mask(
        self, window: int | None, cache_window: int | None, chunked: bool = False, causal: bool = True
    ) -> Tensor | None:
        """Return the mask of `allowed`, or None if sdpa's `is_causal` has the same effect.

        With a static cache, the mask is one that is added to scores. sdpa would convert a boolean one in every layer.
        """
        if self.capacity is not None:
            return self._added(window, cache_window, chunked, causal, -math.inf)
        if not causal:
            return self.allowed(window, cache_window, chunked, causal)
        first_pass = self.past == 0 and (window is None or self.steps < window)
        whole = not self.padded and self.documents is None
        return None if first_pass and whole else self.allowed(window, cache_window, chunked)

    def additive_mask(
        self, window: int | None, cache_window: int | None, chunked: bool = False, causal: bool = True
    ) -> Tensor | None:
        """Return the mask of `allowed` to be added to scores: 0 where it is True, and the dtype's minimum elsewhere."""
        return self._added(window, cache_window, chunked, causal, torch.finfo(self.dtype).min)

    def _added(
        self, window: int | None, cache_window: int | None, chunked: bool, causal: bool, least: float
    ) -> Tensor | None:
        """Return the mask of `allowed` as numbers: 0 where it is True, and `least` elsewhere."""
        allowed, key = self.allowed(window, cache_window, chunked, causal), (window, cache_window, chunked, causal)
        if allowed is None:
            return None
        if (*key, least) not in self._additive:
            zero = torch.zeros((), dtype=self.dtype, device=allowed.device)
            self._additive[*key, least] = torch.where(allowed, zero, least)
        return self._additive[*key, least]


def counted(past: int | Tensor, steps: int, device: torch.device) -> Tensor:
    """Return the numbers (T,) of `steps` tokens that follow `past` others.

    `past` may be a tensor (1,). The result then depends on its value at the time when the device computes it.
    """
    if isinstance(past, Tensor):
        return past if steps == 1 else past + torch.arange(steps, device=device)
    return torch.arange(past, past + steps, device=device)
