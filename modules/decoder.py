"""The model as torch modules: the embeddings, the blocks and the head of a ModelSpec.

Parameters have the names that gptkit uses for models of all families, such as "blocks.3.attention.q_proj.weight". The
modules inside of a block are in the files layers, positions, attention and feed_forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..analysis.activations import Kernel
from ..components import (
    Block,
    Component,
    Embedding,
    Head,
    HeadTransform,
    LayerEmbedding,
    LearnedPositions,
    LowRankResidual,
    Mixer,
    ModelSpec,
    Norm,
    Pooler,
    RelativeBias,
    SinusoidalPositions,
    SubLayer,
    TokenTypes,
)
from ..converter.outline import Outline
from ..errors import UsageError
from . import attention as _attention  # noqa: F401 - its modules register themselves, like those of the next line
from . import cross_attention, feed_forward, layers, positions  # noqa: F401
from .cache import Cache
from .context import Context, Encoded, counted
from .layers import ACTIVATIONS, LinearModule, capped
from .placement import DevicePlacement
from .positions import sinusoids
from .registry import build_module
from .streams import Multiplier


class EmbeddingModule(nn.Module):
    """The token embedding: token ids (B, T) -> (B, T, hidden)."""

    weight: nn.Parameter

    def __init__(self, spec: Embedding) -> None:
        super().__init__()
        self.spec = spec
        empty = torch.empty(0 if spec.shared else spec.vocab_size, spec.width or spec.hidden_size)
        self.register_parameter("weight", None if spec.shared else nn.Parameter(empty))
        self.projection = None if spec.width is None else LinearModule(spec.width, spec.hidden_size, False)
        self.norm = build_module(spec.norm) if spec.norm is not None else None

    def forward(self, input_ids: Tensor, table: Tensor | None = None) -> Tensor:
        """Look up the token ids in `table`, or in the module's own weight if it is None."""
        x = F.embedding(input_ids, self.weight if table is None else table)
        if self.spec.blank is not None:
            x = x.masked_fill((input_ids == self.spec.blank)[..., None], 0)
        if self.spec.multiplier != 1:
            rounded = self.spec.scaling == "rounded"
            x = x * (x.new_full((), self.spec.multiplier) if rounded else self.spec.multiplier)
        x = x if self.projection is None else self.projection(x)
        return x if self.norm is None else self.norm(x)


class _LayerEmbeddingModule(nn.Module):
    """The additional inputs of the layers, as in Gemma 3n.

    They are computed from token ids (B, T) and embeddings (B, T, hidden), and have the shape (B, T, layers, width).
    """

    def __init__(self, spec: LayerEmbedding) -> None:
        super().__init__()
        self.spec = spec
        self.table = EmbeddingModule(spec.table)
        self.projection = LinearModule(spec.hidden_size, spec.every, False)
        self.norm = build_module(spec.norm)

    def forward(self, input_ids: Tensor, x: Tensor) -> Tensor:
        spec, by_layer = self.spec, (self.spec.layers, self.spec.width)
        rows = torch.unflatten(self.table(input_ids.where(input_ids < spec.table.vocab_size, 0)), -1, by_layer)
        numbers = (spec.projected, spec.summed)
        first, last = [x.new_full((), number) for number in numbers] if spec.scaling == "rounded" else numbers
        projected = self.norm(torch.unflatten(self.projection(x) * first, -1, by_layer))
        return (projected + rows) * last  # type: ignore[no-any-return]


class PositionsModule(nn.Module):
    """The position embedding: position ids (1 or B, T) -> (1 or B, T, hidden).

    Learned positions have the dtype of their table. Computed ones have the dtype that the call asks for.
    """

    def __init__(self, spec: LearnedPositions | SinusoidalPositions) -> None:
        super().__init__()
        self.spec = spec
        learned = "weight" in spec.weights()
        self.weight = nn.Parameter(torch.empty(spec.length + spec.offset, spec.size)) if learned else None

    def forward(self, position_ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        rows = position_ids + self.spec.offset if self.spec.offset else position_ids
        if self.weight is None:
            return sinusoids(self.spec, rows).to(dtype)  # type: ignore[arg-type]
        return F.embedding(rows, self.weight)

    def where_not_given(self, input_ids: Tensor, attention_mask: Tensor | None, past: int | Tensor = 0) -> Tensor:
        """Return the default position ids (1 or B, T) of token ids (B, T) that follow `past` cached tokens."""
        if self.spec.padding is not None:
            tokens = (input_ids != self.spec.padding).long()
            return (tokens.cumsum(dim=1) + past) * tokens - 1
        if self.spec.counts == "tokens" or attention_mask is None:
            return counted(past, input_ids.shape[1], input_ids.device)[None]
        mask = attention_mask.long()
        # Padding has the row before that of the first token, if the table has one.
        return (mask.cumsum(dim=1) * mask - 1)[:, past:].clamp(min=-min(self.spec.offset, 1))


class _RelativeBiasModule(nn.Module):
    """The learned biases of attention scores by distance, as in T5: a table (buckets, heads)."""

    def __init__(self, spec: RelativeBias) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(spec.buckets, spec.heads))

    def forward(self) -> Tensor:
        return self.weight


class _TokenTypesModule(nn.Module):
    """The embedding of token types: types (B, T) -> (B, T, hidden)."""

    def __init__(self, spec: TokenTypes) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(spec.count, spec.hidden_size))

    def forward(self, types: Tensor) -> Tensor:
        return F.embedding(types, self.weight)


class Front(nn.Module):
    """The part of a model before its layers: embeddings, and the first norm if there is one.

    It turns token ids (B, T) and position ids (1 or B, T) into hidden states (B, T, hidden). A model with several
    residual streams gets (streams, B, T, hidden). The second result has the additional inputs of the layers
    (B, T, layers, width), or is None if they have none.
    """

    embedding: EmbeddingModule
    positions: PositionsModule | None

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        _build_front(self, spec)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_types: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return hidden states and additional inputs. With an `attention_mask`, `position_ids` are not used.

        The position ids then are the default ones for this mask.
        """
        if self.positions is not None and (attention_mask is not None or self.positions.spec.padding is not None):
            position_ids = self.positions.where_not_given(input_ids, attention_mask)
        return _embedded(self, input_ids, position_ids, token_types)


def _build_front(module: Any, spec: ModelSpec) -> None:
    """Add the submodules that come before the layers of a model to `module`."""
    module.embedding = EmbeddingModule(spec.embedding)
    module.token_types = None if spec.token_types is None else _TokenTypesModule(spec.token_types)
    module.positions = None if spec.positions is None else PositionsModule(spec.positions)
    module.first_norm = None if spec.first_norm is None else build_module(spec.first_norm)
    module.layer_inputs = None if spec.layer_inputs is None else _LayerEmbeddingModule(spec.layer_inputs)
    module.streams = None if spec.streams is None else build_module(spec.streams)


def _embedded(
    module: Any, input_ids: Tensor, position_ids: Tensor, token_types: Tensor | None, table: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the input of the first layer, and the additional inputs of all layers or None; see `Front`.

    Args:
        module: a module to which `_build_front` added the embeddings.
        input_ids: (B, T).
        position_ids: (1 or B, T).
        token_types: (B, T), or None for models without token types.
        table: a table of token embeddings to use instead of the module's own.
    """
    x: Tensor = module.embedding(input_ids) if table is None else module.embedding(input_ids, table)
    inputs = None if module.layer_inputs is None else module.layer_inputs(input_ids, x)
    if module.token_types is not None:  # by default all tokens have the first type
        x = x + module.token_types(torch.zeros_like(input_ids) if token_types is None else token_types)
    x = x if module.positions is None else x + module.positions(position_ids, x.dtype)
    x = x if module.first_norm is None else module.first_norm(x)
    return (x if module.streams is None else module.streams.split(x)), inputs


class BlockModule(nn.Module):
    """One layer of a model; see `components.Block` for the formula. Its submodules are named like the block's parts."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, spec: Block, kernel: Kernel = "sdpa") -> None:
        super().__init__()
        self.spec = spec
        for sublayer in spec.sublayers:
            for name, part in sublayer.parts().items():
                if isinstance(part, Mixer):
                    self.add_module(name, build_module(part, kernel))
                elif isinstance(part, Norm | LowRankResidual):
                    self.add_module(name, build_module(part))
        self.scale = None if spec.scale is None else Multiplier()
        self.altup = None if spec.altup is None else build_module(spec.altup)

    def forward(self, x: Tensor, context: Context, cache: Mapping[str, Any] | None = None) -> Tensor:
        """Return the hidden states after the layer, in the shape of x.

        x is (B, T, hidden), or (streams, B, T, hidden) in a model with several residual streams.
        """
        if self.altup is not None:
            streams: Tensor = self.altup.predicted(x)
            x = self._in_turn(streams[self.altup.spec.active], context, cache)
            streams = self.altup.corrected(streams, x)
            for sublayer in self.spec.sublayers:
                if sublayer.onto == "others":
                    branch = self._branch(sublayer, self.altup.scaled(streams), context, cache)
                    streams = self.altup.spread(streams, branch)
            return streams
        x = self._together(x, context, cache) if self.spec.parallel else self._in_turn(x, context, cache)
        return x if self.scale is None else self.scale(x)

    def _in_turn(self, x: Tensor, context: Context, cache: Mapping[str, Any] | None) -> Tensor:
        """Return the hidden states after the sub-layers (attention, feed-forward), which run one after the other."""
        for_next: Tensor | None = None
        for sublayer, *others in self.spec.groups():
            if sublayer.onto == "others":
                continue
            source = x.to(context.dtype) if self.spec.wide else x
            if for_next is not None:
                source, for_next = source + for_next, None
            read = source if sublayer.norm is None else self._part(sublayer, "norm")(source)
            del source
            x = x.to(torch.promote_types(x.dtype, torch.float32)) if self.spec.wide else x
            past = x if self.spec.residual == "stream" else read
            low_rank = None if sublayer.low_rank is None else self._part(sublayer, "low_rank")(read)
            branch = self._branch(sublayer, read, context, cache)
            for other in others:
                branch = branch + self._branch(other, read, context, cache)
            if sublayer.onto == "next":
                for_next = branch
                del branch
                continue
            x = past + branch
            if low_rank is not None:
                x = (x + low_rank) / 2**0.5
            if sublayer.sum_norm is not None:
                x = self._part(sublayer, "sum_norm")(x)
        return x

    def _together(self, x: Tensor, context: Context, cache: Mapping[str, Any] | None) -> Tensor:
        """Return the hidden states after parallel sub-layers, which all read the layer's input.

        The order of the additions affects the rounding, so `Block.sums` gives it: the outputs of the sub-layers are
        added to the hidden states one after the other, or they are added to each other first.
        """
        branches: list[Tensor] = []
        shared = x
        for sublayer in self.spec.sublayers:
            read = shared if sublayer.norm is None else self._part(sublayer, "norm")(x)
            shared = shared if branches else read
            branches.append(self._branch(sublayer, read, context, cache))
        if self.spec.sums == "stream first":
            return reduce(torch.add, branches, x)
        return x + reduce(lambda total, branch: branch + total, branches)

    def _branch(self, sublayer: SubLayer, x: Tensor, context: Context, cache: Mapping[str, Any] | None) -> Tensor:
        slot, factor = sublayer.mixer.slot, sublayer.input_multiplier
        state = None if cache is None else cache.get(slot)
        mixed: Tensor = getattr(self, slot)(x if factor == 1 else x * factor, context, state)
        if sublayer.output_norm is not None:
            mixed = self._part(sublayer, "output_norm")(mixed)
        return mixed if sublayer.multiplier == 1 else mixed * sublayer.multiplier

    def _part(self, sublayer: SubLayer, name: str) -> Any:
        return getattr(self, f"{sublayer.mixer.slot}_{name}")


class HeadTransformModule(nn.Module):
    """The transform of hidden states before the head's matrix, as in BERT: norm(activation(dense(x)))."""

    def __init__(self, spec: HeadTransform) -> None:
        super().__init__()
        self.dense = LinearModule(spec.hidden_size, spec.hidden_size, spec.bias)
        self.activation = ACTIVATIONS[spec.activation]
        self.norm = build_module(spec.norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(x)))  # type: ignore[no-any-return]


class PoolerModule(nn.Module):
    """The pooler: hidden states (B, T, hidden) -> one vector per text (B, hidden), computed from its first token."""

    def __init__(self, spec: Pooler) -> None:
        super().__init__()
        self.dense = LinearModule(spec.hidden_size, spec.hidden_size, True)
        self.activation = ACTIVATIONS[spec.activation]

    def forward(self, states: Tensor) -> Tensor:
        return self.activation(self.dense(states[:, 0]))


class HeadModule(nn.Module):
    """The head: hidden states (B, T, hidden) -> logits (B, T, vocabulary).

    A tied head uses the matrix of the embedding. `blank` is the id of a token whose row is treated as zeros in both.
    """

    def __init__(self, spec: Head, blank: int | None = None) -> None:
        super().__init__()
        self.spec, self.blank = spec, blank if spec.tied else None
        width = spec.width or spec.hidden_size
        self.projection = None if spec.width is None else LinearModule(spec.hidden_size, width, False)
        self.transform = None if spec.transform is None else HeadTransformModule(spec.transform)
        self.weight = None if spec.tied else nn.Parameter(torch.empty(spec.vocab_size, width))
        self.bias = nn.Parameter(torch.empty(spec.vocab_size)) if spec.bias else None

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        x = x if self.transform is None else self.transform(x)
        before = self.spec.early and self.spec.multiplier != 1
        if before:
            divided = self.spec.scaling == "divide states"
            x = x / (1 / self.spec.multiplier) if divided else x * self.spec.multiplier
        x = x if self.projection is None else self.projection(x)
        inside = self.spec.added == "in the product"
        logits = F.linear(x, embedding if self.weight is None else self.weight, self.bias if inside else None)
        if self.blank is not None:
            logits[..., self.blank] = self.bias[self.blank] if inside and self.bias is not None else 0.0
        logits = logits if inside or self.bias is None else logits + self.bias
        if self.spec.multiplier != 1 and not before:
            divided = self.spec.scaling == "divide"
            logits = logits / (1 / self.spec.multiplier) if divided else logits * self.spec.multiplier
        return capped(logits, self.spec.cap)


class Decoder(nn.Module):
    """A language model, built from a `ModelSpec`: a decoder, an encoder, or a decoder with an encoder.

    The parameters have no values until `modules.load.build` or `load_state_dict` sets them.

    Args:
        spec: the model's architecture.
        attention: "sdpa" or "eager"; see `modules.attention`.

    Attributes:
        source: the checkpoint that the model was loaded from and its tokenizer, for `modules.save` and `modules.text`;
            None for a model that was built from a `ModelSpec` alone.
        placement: the devices of the layers, if `load` divided the model over several devices; otherwise None.
    """

    embedding: EmbeddingModule
    token_types: nn.Module | None
    positions: PositionsModule | None
    layer_inputs: nn.Module | None
    streams: Any

    def __init__(self, spec: ModelSpec, attention: Kernel = "sdpa") -> None:
        super().__init__()
        if attention not in ("sdpa", "eager"):
            raise UsageError(f"attention must be 'sdpa' or 'eager', not {attention!r}")
        # Equal records become one object. A Context identifies records by id, since torch.compile cannot trace hashes.
        seen: dict[Component, Component] = {}
        self.spec = spec = spec.mapped(lambda node, _: seen.setdefault(node, node))
        self.source: Outline | None = None
        self.placement: DevicePlacement | None = None
        _build_front(self, spec)
        self.encoder = None if spec.encoder is None else Decoder(spec.encoder, attention)
        self.relative_bias = None if spec.relative_bias is None else _RelativeBiasModule(spec.relative_bias)
        self.blocks = nn.ModuleList(BlockModule(block, attention) for block in spec.blocks)
        self.joined = None if spec.joined is None else build_module(spec.joined)
        self.final_norm = None if spec.final_norm is None else build_module(spec.final_norm)
        self.head = None if spec.head is None else HeadModule(spec.head, spec.embedding.blank)
        self.pooler = None if spec.pooler is None else PoolerModule(spec.pooler)
        self.has_shared_blocks = spec.has_shared_blocks

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        last_only: bool = False,
        documents: Tensor | None = None,
        token_types: Tensor | None = None,
        encoded: Encoded | None = None,
        table: Tensor | None = None,
    ) -> Tensor:
        """Return the logits (B, T, vocabulary) for token ids (B, T).

        A model without a head returns hidden states (B, T, hidden). If it has a pooler, `pooler` computes a vector per
        text from them.

        Args:
            input_ids: (B, T), int64.
            attention_mask: (B, past + T), 1 for tokens and 0 for padding on either side; by default there is no
                padding. Logits at padding are meaningless.
            position_ids: (1 or B, T); by default counted from the length of the cache, including padding, as in
                transformers.
            cache: a `Cache` with the keys and values of earlier tokens, to which those of these tokens are added.
            last_only: return only the logits of the last token, (B, 1, vocabulary).
            documents: (B, T), the number of every token's document, if a row has several documents. Attention does not
                cross their ends, and default positions start again in every document.
            token_types: (B, T), the segment of every token, for models with token types; by default the first type.
            encoded: the output of `encode`, for models with an encoder. It is needed only once per cache, which stores
                the keys and values of the source.
            table: the token embeddings of the decoder, for an encoder that shares them; `encode` passes them.

        Raises:
            UsageError: `encoded` is missing for a model with an encoder, or was given for another model; there are more
                tokens than rows of the position table; the ids, mask or documents have an impossible shape; documents
                were given together with a cache or a mask.
        """
        if input_ids.dim() != 2 or not input_ids.shape[1]:
            raise UsageError(f"token ids must have the shape (B, T) with T >= 1, not {tuple(input_ids.shape)}")
        batch, steps = input_ids.shape
        known = 0 if cache is None else cache.length
        _check_shapes(input_ids, known, attention_mask, documents, cache)
        past = 0 if cache is None else cache.begin(steps)
        if position_ids is None:
            position_ids = self._positions(input_ids, past, attention_mask, documents)
        if self.positions is not None:
            length = self.positions.spec.length
            if known + steps > length and int(position_ids.max()) >= length:
                raise UsageError(
                    f"the sequence has {known + steps} tokens, but the model's position table has only {length} rows"
                )
        if token_types is not None and self.token_types is None:
            raise UsageError("this model has no token type embeddings", "Leave out the argument token_types.")
        if token_types is not None and token_types.shape != input_ids.shape:
            raise UsageError(
                f"token_types must have the shape of the token ids, {(batch, steps)}, not {tuple(token_types.shape)}"
            )
        encoded = self._source(encoded, cache, batch)
        x, inputs = _embedded(self, input_ids, position_ids, token_types, table)
        capacity = None if cache is None else cache.capacity
        context = Context(
            batch, steps, past, cache is not None, position_ids, attention_mask, x.dtype, documents, capacity
        )
        context.inputs, context.shared = inputs, dict.fromkeys(self.spec.reused_keys)
        context.table = None if self.relative_bias is None else self.relative_bias()
        context.first = x if self.has_shared_blocks else None
        if encoded is not None:
            context.see(encoded)
        for layer, block in enumerate(self.blocks):
            context.layer = layer
            x = block(x, context, None if cache is None else cache.layers[layer])
        if cache is not None:
            cache.end(steps)
        x = x if self.joined is None else self.joined.join(x)
        x = (x if self.final_norm is None else self.final_norm(x)).to(context.dtype)
        x = x[:, -1:] if last_only else x
        return x if self.head is None else self.head(x, self.embedding.weight)

    def _positions(
        self, input_ids: Tensor, past: int | Tensor, attention_mask: Tensor | None, documents: Tensor | None
    ) -> Tensor:
        """Return the default position ids (1 or B, T) of new tokens that follow `past` cached tokens."""
        if documents is not None:
            return positions_in(documents)
        if self.positions is not None:
            return self.positions.where_not_given(input_ids, attention_mask, past)
        return counted(past, input_ids.shape[1], input_ids.device)[None]

    def encode(self, source: Tensor, attention_mask: Tensor | None = None) -> Encoded:
        """Return the encoder's output for a source text, given as token ids (B, U) and a mask (B, U) with 1 for tokens.

        Raises:
            UsageError: the model has no encoder; also as in `forward`.
        """
        if self.encoder is None:
            raise UsageError("this model has no encoder", "Call the model with the token ids instead: model(ids).")
        own = dict(self.encoder.embedding.named_parameters())
        table = None if "weight" in own else self.embedding.weight
        return Encoded(self.encoder(source, attention_mask, table=table), attention_mask)

    def _source(self, encoded: Encoded | None, cache: Cache | None, batch: int) -> Encoded | None:
        """Return the encoder's output for this forward pass, and store it in the cache.

        Raises:
            UsageError: the model needs an encoder's output and there is none, or the model has no encoder.
        """
        if self.encoder is None:
            if encoded is not None:
                raise UsageError(
                    "the argument encoded is only for models with an encoder, and this model has none",
                    "Leave out encoded.",
                )
            return None
        if encoded is None and cache is not None:
            encoded = cache.encoded
        if encoded is None:
            raise UsageError(
                "this model has an encoder, but the call has no argument encoded", "Pass encoded=model.encode(ids)."
            )
        if len(encoded.states) != batch:
            raise UsageError(
                f"encoded has {len(encoded.states)} rows, but the token ids have {batch}",
                "Give one encoded source per row of token ids.",
            )
        if cache is not None:
            cache.encoded = encoded
        return encoded


def _check_shapes(
    input_ids: Tensor, past: int, attention_mask: Tensor | None, documents: Tensor | None, cache: Cache | None
) -> None:
    """Raise UsageError if the mask or the documents do not match the token ids (B, T)."""
    batch, steps = input_ids.shape
    if attention_mask is not None and cache is not None and cache.capacity is not None:
        raise UsageError(
            "a static cache cannot be combined with an attention_mask", "Use gptkit.modules.Cache for padded texts."
        )
    if attention_mask is not None and attention_mask.shape != (batch, past + steps):
        raise UsageError(
            f"attention_mask must have the shape {(batch, past + steps)}, not {tuple(attention_mask.shape)}",
            "Give the mask a column for every token, including the tokens in the cache.",
        )
    if documents is None:
        return
    if documents.shape != input_ids.shape:
        raise UsageError(
            f"the argument documents must have the shape of the token ids, {(batch, steps)}, not "
            f"{tuple(documents.shape)}"
        )
    if cache is not None or attention_mask is not None:
        raise UsageError(
            "the argument documents cannot be combined with a cache or an attention_mask",
            "Leave out documents, or the other two arguments.",
        )


def positions_in(documents: Tensor) -> Tensor:
    """Return the position (B, T) of every token in its document. `documents` (B, T) has the documents' numbers."""
    places = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return places - torch.where(begins, places, 0).cummax(dim=1).values
