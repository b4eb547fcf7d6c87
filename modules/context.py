"""What all layers of one forward pass share: position tables, biases and masks, each made once and on demand."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..components import Biasing, Buckets, SharedTransformer, Temperature, Turning
from ..errors import MissingComponent
from .registry import module_of


class Encoded(NamedTuple):
    """What an encoder makes of a source: states (B, U, hidden), and the mask (B, U) of its tokens, None where all are
    real.
    """

    states: Tensor
    mask: Tensor | None = None

    def repeated(self, count: int) -> "Encoded":
        """Each source so many times."""
        rows = torch.arange(len(self.states), device=self.states.device)
        return self.chosen(rows.repeat_interleave(count))

    def chosen(self, rows: Tensor) -> "Encoded":
        """The sources of these numbers: (new sources,)."""
        mask = None if self.mask is None else self.mask.index_select(0, rows)
        return Encoded(self.states.index_select(0, rows), mask)


class _Sight:
    """What tokens see of the source: its real tokens, all of them alike. Stands in a `Context`'s place for kernels."""

    def __init__(self, mask: Tensor | None, dtype: torch.dtype) -> None:
        padded = mask is not None and not bool(mask.all())
        self._allowed = mask[:, None, None, :].bool() if padded and mask is not None else None
        self._additive = None
        if self._allowed is not None:
            zero = torch.zeros((), dtype=dtype, device=self._allowed.device)
            self._additive = torch.where(self._allowed, zero, torch.finfo(dtype).min)

    def sdpa_mask(self, *_: Any) -> Tensor | None:
        """(B, 1, 1, U), True where a token may be looked at; None where all may."""
        return self._allowed

    def additive_mask(self, *_: Any) -> Tensor | None:
        """The same as 0, and the dtype's minimum where not."""
        return self._additive


class Context:
    """One forward pass of T new tokens (`steps`) a row of a batch, after `past` earlier ones in the cache; position ids
    are (1 or B, T), the mask is (B, past + T), 1 where a token is real, or None where all are. `documents` (B, T) are
    the numbers of those that are packed into a row: a token looks at none of another. None where each row is one.
    """

    def __init__(
        self,
        batch: int,
        steps: int,
        past: int,
        cached: bool,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        dtype: torch.dtype,
        documents: Tensor | None = None,
    ) -> None:
        self.batch, self.steps, self.past, self.cached = batch, steps, past, cached
        self.position_ids, self.dtype = position_ids, dtype
        self.padded = attention_mask is not None and not bool(attention_mask.all())
        self.attention_mask, self.documents = attention_mask, documents
        self.layer = 0  # which block runs
        self.inputs: Tensor | None = None  # (B, T, layers, width): what each block reads beside the stream
        self.shared: dict[Any, tuple[Tensor, Tensor] | None] = {}  # keys and values that later blocks are to have
        self.table: Tensor | None = None  # (buckets, heads): of biases of distances
        self.encoded: Encoded | None = None  # the source, for cross-attention
        self.first: Tensor | None = None  # what the first block reads, for shared blocks
        self._lenders: dict[int, Any] = {}  # of shared blocks, by number: the module that has the weights
        self.sight: Any = None
        self._tables: dict[int, tuple[Turning, Any]] = {}
        self._biases: dict[tuple[int, int, int], tuple[Biasing, Tensor]] = {}
        self._allowed: dict[tuple[int | None, int | None, bool, bool], Tensor] = {}
        self._additive: dict[tuple[int | None, int | None, bool, bool], Tensor] = {}

    def tables(self, spec: Turning) -> Any:
        """What positions turn the new tokens by: of rotary ones cos and sin."""
        if id(spec) not in self._tables:
            self._tables[id(spec)] = spec, module_of(spec).tables(spec, self.position_ids, self.dtype)
        return self._tables[id(spec)][1]

    def tempered(self, spec: Temperature, q: Tensor) -> Tensor:
        """Queries (B, H, T, hd) times what each position says, which is computed in fp32."""
        at = self.position_ids
        if spec.counts == "tokens":
            at = torch.arange(self.past, self.past + self.steps, device=q.device)[None]
        grown = torch.floor((at + spec.offset) / spec.original_context)
        if spec.counts == "positions":
            factor = (1 + spec.growth * torch.log(1 + grown)).to(q.dtype)
        else:
            factor = torch.log1p(grown) * spec.growth + 1.0
        return (q * factor[:, None, :, None]).to(q.dtype)

    def layer_input(self) -> Tensor:
        """What the block that runs reads beside the stream, (B, T, width); raises MissingComponent: nothing made it."""
        if self.inputs is None:
            raise MissingComponent(
                "a layer with a layer_input ran outside of its model: only the model's own forward pass "
                "computes layer_inputs"
            )
        return self.inputs[:, :, self.layer]

    def earlier(self, spec: Any) -> tuple[Tensor, Tensor]:
        """The keys and values that an earlier layer left for an attention; raises MissingComponent: none did."""
        found = self.shared.get(spec.remembered)
        if found is None:
            raise MissingComponent(
                "a layer with kv_from: earlier ran before the layer whose keys and values it uses: run the "
                "layers in order"
            )
        return found

    def first_stream(self) -> Tensor:
        """What the first block reads, (B, T, hidden); raises MissingComponent: nothing left it."""
        if self.first is None:
            raise MissingComponent(
                "a layer with a shared block ran outside of its model: only the model's own forward pass "
                "stores the input of the first layer, which it needs"
            )
        return self.first

    def lender(self, spec: SharedTransformer, module: Any) -> Any:
        """The module that has the weights of a shared block; raises MissingComponent: it has not run in this pass."""
        if spec.weights_from == "own":
            self._lenders[spec.number] = module
        if spec.number not in self._lenders:
            raise MissingComponent(
                f"a layer that uses shared block {spec.number} ran before the layer that has the weights of "
                "this block: run the layers in order"
            )
        return self._lenders[spec.number]

    def see(self, encoded: Encoded) -> None:
        """Let cross-attention look at a source, whose states may be gone where its keys are in a cache."""
        self.encoded, self.sight = encoded, _Sight(encoded.mask, self.dtype)

    def source(self) -> Tensor:
        """The encoder's output (B, U, hidden); raises MissingComponent: nothing made it."""
        if self.encoded is None:
            raise MissingComponent(
                "a layer has cross-attention, but there is no output of an encoder: pass "
                "encoded=model.encode(ids) to the model"
            )
        return self.encoded.states

    def first_key(self, window: int | None) -> int:
        """The position of the first key there: a windowed layer's cache forgets the ones before."""
        return max(self.past - window + 1, 0) if window is not None and self.cached else 0

    def keys(self, window: int | None) -> int:
        """S, the number of keys a layer sees."""
        return self.past + self.steps - self.first_key(window)

    def bias(self, spec: Biasing, heads: int, window: int | None) -> Tensor:
        """The bias (B, heads, 1, S), or of distances (1, heads, T, S); raises MissingComponent: these have no table."""
        first = self.first_key(window)
        key = (id(spec), heads, first)
        if key not in self._biases and isinstance(spec, Buckets):
            if self.table is None:
                raise MissingComponent(
                    "a layer with relative position biases ran outside of its model: only the model's own "
                    "forward pass reads the table of biases"
                )
            self._biases[key] = spec, module_of(spec).looked_up(spec, self.table, self.past, self.steps)
        if key not in self._biases:
            mask = self.attention_mask
            if mask is None:
                shape = (self.batch, self.past + self.steps)
                mask = torch.ones(shape, dtype=torch.long, device=self.position_ids.device)
            self._biases[key] = spec, module_of(spec).bias(spec, heads, mask.long(), self.dtype)[..., first:]
        return self._biases[key][1]

    def allowed(
        self, window: int | None, held: int | None, chunked: bool = False, causal: bool = True
    ) -> Tensor | None:
        """True where query t may look at key s: (B or 1, 1, T, S). None where it may everywhere. `held` is the window
        of the cache, which may hold more than is seen. With `chunked` windows do not move: they lie side by side from
        the first token on that is no padding. Without `causal` they reach as far forward as back.
        """
        near = window is None or self.steps < window
        if not causal and near and not self.padded and self.documents is None:
            return None
        if causal and self.steps == 1 and not self.padded and (window is None or self.keys(held) < window):
            return None
        key = (window, held, chunked, causal)
        if key not in self._allowed:
            device, first = self.position_ids.device, self.first_key(held)
            queries = torch.arange(self.past, self.past + self.steps, device=device)[:, None]
            keys = torch.arange(first, self.past + self.steps, device=device)[None, :]
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
                if self.documents is not None:  # each begins its chunks anew
                    keys, queries = self.position_ids[:, None, None, :], self.position_ids[:, None, :, None]
                allowed = allowed & ((keys - start) // window == (queries - start) // window)
            if self.padded and self.attention_mask is not None:
                allowed = allowed & self.attention_mask[:, None, None, first:].bool()
            if self.documents is not None:
                allowed = allowed & (self.documents[:, None, :, None] == self.documents[:, None, None, :])
            self._allowed[key] = allowed
        return self._allowed[key]

    def sdpa_mask(
        self, window: int | None, held: int | None, chunked: bool = False, causal: bool = True
    ) -> Tensor | None:
        """`allowed`, or None where the kernel's own causal mask says the same."""
        if not causal:
            return self.allowed(window, held, chunked, causal)
        first_pass = self.past == 0 and (window is None or self.steps < window)
        whole = not self.padded and self.documents is None
        return None if first_pass and whole else self.allowed(window, held, chunked)

    def additive_mask(
        self, window: int | None, held: int | None, chunked: bool = False, causal: bool = True
    ) -> Tensor | None:
        """0 where a query may look, the dtype's minimum where not: (B or 1, 1, T, S)."""
        allowed, key = self.allowed(window, held, chunked, causal), (window, held, chunked, causal)
        if allowed is None:
            return None
        if key not in self._additive:
            zero = torch.zeros((), dtype=self.dtype, device=allowed.device)
            self._additive[key] = torch.where(allowed, zero, torch.finfo(self.dtype).min)
        return self._additive[key]
