"""A model as a tree of components, and functions for any tree: its nodes, parameters, differences."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from typing import Any, ClassVar

import msgspec

from ..display import Shown
from ..errors import ConfigError, MissingComponent
from .base import Component, Mixer, Parameter, Size, Weight
from .block import Block
from .cross_attention import CrossAttention
from .encoder import Pooler, TokenTypes
from .ends import Embedding, Head, LayerEmbedding
from .norms import Norm
from .operations import Add, AnyOperation, Positions, Program, Sizes, Stream, Tokens
from .positions import Buckets, LearnedPositions, RelativeBias, SinusoidalPositions
from .shared_transformer import FIRST, SharedTransformer
from .streams import Streams
from .words import Words

__all__ = ["ModelSpec", "differences", "without_rounding"]


class ModelSpec(Component, Shown, frozen=True, kw_only=True):
    """A language model with one stack of layers: a decoder, or an encoder if attention is bidirectional.

    If it has an `encoder`, it is an encoder-decoder model, and the other fields describe the decoder.
    """

    described = (
        "embedding",
        "encoder",
        "token_types",
        "positions",
        "first_norm",
        "layer_inputs",
        "streams",
        "relative_bias",
        "blocks",
        "joined",
        "final_norm",
        "head",
        "pooler",
        "context_length",
    )
    notes = ("context_length",)
    by_length: ClassVar[dict[str, Any]] = {"context_length": None}
    forgotten: ClassVar[dict[str, str]] = {
        "token_types": "types of tokens left out",
        "positions": "table of positions left out",
        "first_norm": "norm of what is embedded left out",
        "pooler": "pooler left out",
        "final_norm": "norm of the last output left out",
        "layer_inputs": "inputs of layers left out",
        "streams": "one stream a token",
        "joined": "streams of a token not joined",
        "encoder": "encoder left out",
        "relative_bias": "biases of distances left out",
    }

    embedding: Embedding
    """The token embeddings."""
    encoder: "ModelSpec | None" = None
    """The encoder: a tree without a head, which reads another text, the source. Every decoder layer then has a
    `CrossAttention` to the encoder's output."""
    token_types: TokenTypes | None = None
    """Embeddings of token types, which are added to the token embeddings (BERT)."""
    positions: LearnedPositions | SinusoidalPositions | None = None
    """Position embeddings, which are added to the token embeddings."""
    first_norm: Norm | None = None
    """The norm of the sum of all embeddings (BERT)."""
    layer_inputs: LayerEmbedding | None = None
    """Additional inputs of the layers (Gemma 3n)."""
    streams: Streams | None = None
    """The component that makes several residual streams from the embeddings (Gemma 3n). Every layer then has an
    `altup`."""
    relative_bias: RelativeBias | None = None
    """The table of position biases for layers with the positions `Buckets` (T5)."""
    blocks: tuple[Block, ...]
    """The layers."""
    joined: Streams | None = None
    """The component that combines the residual streams after the last layer. It equals `streams`."""
    final_norm: Norm | None = None
    """The norm of the last layer's output. Post-norm models have none."""
    head: Head | None
    """The computation of logits. Without a head, the model returns hidden states."""
    pooler: Pooler | None = None
    """The computation of one vector per text, for models without a head (BERT)."""
    context_length: Size | None = None
    """The longest sequence that the model was trained for, if it is known. It changes nothing that is computed."""

    def __post_init__(self) -> None:
        if not self.blocks:
            raise ConfigError("a model needs at least one layer")
        for name, size in self._widths():
            if size != self.embedding.hidden_size:
                raise ConfigError(
                    f"{name} has hidden size {size}, but the embedding has hidden size {self.embedding.hidden_size}"
                )
        head, tokens = self.head, self.embedding.vocab_size
        if head is not None and head.vocab_size != tokens:
            raise ConfigError(f"the head has vocab_size {head.vocab_size}, but the embedding has vocab_size {tokens}")
        if head is not None and head.tied and head.width != self.embedding.width:
            raise ConfigError(
                f"the head is tied to the embedding, but its width is {head.width} and the width of the "
                f"embedding table is {self.embedding.width}"
            )
        if head is not None and self.pooler is not None:
            raise ConfigError("a model has either a pooler or a head, not both")
        directions = {getattr(block.mixer("attention"), "causal", True) for block in self.blocks}
        if len(directions) > 1:
            raise ConfigError("either all layers have causal attention, or all have bidirectional attention")
        if self.joined != self.streams:
            raise ConfigError(
                "the fields streams (which splits the residual stream before the first layer) and joined "
                "(which merges the streams after the last one) must be equal"
            )
        count = None if self.streams is None else self.streams.count
        for layer, block in enumerate(self.blocks):
            if count != (None if block.altup is None else block.altup.count):
                raise ConfigError(
                    f"the model has {count or 1} residual streams per token, but layer {layer} is for another "
                    "number (altup)"
                )
        self._given()
        self._encoded()

    def _encoded(self) -> None:
        """Raise ConfigError if cross-attention has no encoder, or a layer's position biases have no table."""
        encoder, table = self.encoder, self.relative_bias
        if encoder is not None and (encoder.head, encoder.pooler, encoder.encoder) != (None, None, None):
            raise ConfigError(
                "an encoder outputs hidden states: it cannot have a head, a pooler or an encoder of its own"
            )
        if encoder is not None and encoder.streams is not None:
            raise ConfigError("an encoder cannot have several residual streams (the field streams)")
        if encoder is not None and encoder.embedding.shared and encoder.vocab_size != self.vocab_size:
            raise ConfigError(
                f"the encoder has {encoder.vocab_size} tokens, but the shared embedding table has {self.vocab_size}"
            )
        for layer, block in enumerate(self.blocks):
            across = block.mixer(CrossAttention.slot) is not None
            if across != (encoder is not None):
                has, there = ("", "no") if across else ("no ", "an")
                raise ConfigError(f"layer {layer} has {has}cross-attention, but the model has {there} encoder")
            attention: Any = block.mixer("attention")
            position = getattr(attention, "position", None)
            if isinstance(position, Buckets) and (
                table is None or (table.buckets, table.heads) != (position.buckets, attention.heads)
            ):
                raise ConfigError(
                    f"layer {layer} has bucketed positions, which need a relative_bias table of the model with "
                    f"{position.buckets} buckets and {attention.heads} heads"
                )

    def _given(self) -> None:
        """Raise ConfigError if a layer needs additional inputs, keys or shared weights that the model does not have."""
        inputs, known_keys, shared_blocks = self.layer_inputs, set[Any](), dict[int, Any]()
        for layer, block in enumerate(self.blocks):
            shared: Any = block.mixer(SharedTransformer.slot)
            if getattr(shared, "weights_from", "") == "own":
                shared_blocks[shared.number] = shared.shared_part
            elif shared is not None and shared_blocks.get(shared.number) != shared.shared_part:
                raise ConfigError(
                    f"layer {layer} uses the weights of shared block {shared.number}, but no earlier layer has "
                    "this block with the same sizes"
                )
            layer_input: Any = block.mixer("layer_input")
            if layer_input is not None and (
                inputs is None or (inputs.width, True) != (layer_input.width, layer < inputs.layers)
            ):
                raise ConfigError(
                    f"layer {layer} has a layer_input of width {layer_input.width}, but the model's layer_inputs has "
                    "none for this layer and width"
                )
            heads = getattr(block.mixer("attention"), "remembered", None)
            if heads in known_keys or heads is None:
                continue
            if getattr(block.attention, "kv_from", "") == "earlier":
                raise ConfigError(
                    f"layer {layer} uses the keys and values of an earlier layer (kv_from: earlier), but no "
                    "earlier layer has keys and values of the same shape"
                )
            known_keys.add(heads)

    @property
    def causal(self) -> bool:
        """Whether tokens attend only to themselves and earlier ones, so that the model can predict the next token."""
        return all(getattr(block.mixer("attention"), "causal", True) for block in self.blocks)

    @property
    def tied(self) -> bool:
        """Whether the head's weight is the table of the embedding."""
        return self.head is not None and self.head.tied

    def has_head(self) -> Head:
        """Return the head. Raises MissingComponent if there is none."""
        if self.head is None:
            raise MissingComponent(
                "this operation needs a language model head, but this model has none: it outputs hidden states"
            )
        return self.head

    def predicts(self, what: str) -> None:
        """Check that the model predicts the next token. `what` names the operation that needs this, for the message.

        Raises:
            MissingComponent: The model has bidirectional attention, or no head.
        """
        if not self.causal:
            raise MissingComponent(
                f"{what} needs a model that predicts the next token, but this one is an encoder with "
                "bidirectional attention",
                "gptkit.load returns its hidden states or logits. params, verify, compare and convert support it.",
            )
        self.has_head()

    def one_stack(self, what: str) -> None:
        """Check that the model has no encoder. `what` names the operation that supports none, for the message.

        Raises:
            MissingComponent: The model has an encoder.
        """
        if self.encoder is not None:
            raise MissingComponent(
                f"{what} needs a decoder-only model, but this model also has an encoder",
                "params, show, compare, convert, verify and generate support encoder-decoder models.",
            )

    @property
    def extra_inputs(self) -> str:
        """What layers read besides the residual stream, such as "layer_inputs and kv_from". Empty if nothing else."""
        there = {"layer_inputs": self.layer_inputs is not None, "kv_from": bool(self.reused_keys)}
        there |= {"streams": self.streams is not None, "encoder": self.encoder is not None}
        there |= {"relative_bias": self.relative_bias is not None, SharedTransformer.slot: self.has_shared_blocks}
        return " and ".join(name for name, is_there in there.items() if is_there)

    @property
    def has_shared_blocks(self) -> bool:
        """Whether some layers run a shared block (`SharedTransformer`), which also reads the first layer's input."""
        return any(block.mixer(SharedTransformer.slot) is not None for block in self.blocks)

    @property
    def shared_block_sources(self) -> dict[int, int]:
        """The number of every layer that runs a shared block -> the number of the layer that stores the weights."""
        sources: dict[int, int] = {}
        stored: dict[int, int] = {}
        for layer, block in enumerate(self.blocks):
            shared: Any = block.mixer(SharedTransformer.slot)
            if shared is not None:
                stored |= {shared.number: layer} if shared.weights_from == "own" else {}
                sources[layer] = stored[shared.number]
        return sources

    @property
    def reused_keys(self) -> frozenset[Any]:
        """The `Attention.kv_signature` values of all layers that use the keys and values of an earlier layer."""
        mixers: list[Any] = [block.mixer("attention") for block in self.blocks]
        return frozenset(mixer.kv_signature for mixer in mixers if getattr(mixer, "kv_from", "") == "earlier")

    def _widths(self) -> Iterator[tuple[str, int]]:
        norms = {"embedding.norm": self.embedding.norm, "positions": self.positions, "first_norm": self.first_norm}
        norms |= {"final_norm": self.final_norm}
        yield from ((name, node.size) for name, node in norms.items() if node is not None)
        own = {name: getattr(self, name) for name in ("encoder", "token_types", "layer_inputs", "head", "pooler")}
        yield from ((name, part.hidden_size) for name, part in own.items() if part is not None)
        if self.streams is not None:
            yield "streams", self.streams.hidden_size
        for block, run in groupby(enumerate(self.blocks), key=lambda pair: pair[1]):
            first = next(run)[0]
            yield from ((f"blocks.{first}.{name}", size) for name, size in block.widths())

    def __repr__(self) -> str:
        """Return a summary of the tree in a few lines. `to_json` returns the whole tree."""
        runs: list[list[Any]] = []  # the first layer, the last layer and the block of every run of equal layers
        for index, block in enumerate(self.blocks):
            if runs and runs[-1][2] == block:
                runs[-1][1] = index
            else:
                runs.append([index, index, block])
        total = sum(parameter.count for parameter in self.parameters())
        sizes = f"{len(self.blocks):,} layers, hidden size {self.hidden_size:,}, {total:,} parameters"
        lines = [f"ModelSpec of {sizes}", f"  {_summary(self.embedding)}"]
        read = [] if self.encoder is None else repr(self.encoder).split("\n")
        lines += [f"  encoder: {line.strip()}" for line in read]
        lines += [
            f"  {_summary(node)}" for node in (self.token_types, self.positions, self.first_norm) if node is not None
        ]
        for first, last, block in runs[:_MOST_RUNS]:
            where = f"{first}" if first == last else f"{first}–{last}"
            lines.append(f"  blocks.{where}: {', '.join(_summary(node) for _, node in block.children())}")
        lines += [f"  … {len(runs) - _MOST_RUNS:,} more runs of layers"] if len(runs) > _MOST_RUNS else []
        lines += [f"  {_summary(node)}" for node in (self.final_norm, self.head, self.pooler) if node is not None]
        return "\n".join(lines)

    def words(self) -> dict[str, Words]:
        return {"model": Words("of tokens", {})}

    @property
    def hidden_size(self) -> int:
        return self.embedding.hidden_size

    @property
    def stream_size(self) -> int:
        """The number of elements per token that a layer passes to the next layer."""
        return self.hidden_size * (1 if self.streams is None else self.streams.count)

    @property
    def vocab_size(self) -> int:
        return self.embedding.vocab_size

    def components(self) -> Iterator[Component]:
        """Yield every component of the tree, depth first, including components that never have parameters."""
        for _, root, top in self._roots():
            yield from (node for _, node in walk(top, root))

    def nodes(self) -> Iterator[tuple[str, Component]]:
        """Yield (path, node) for every component that may have parameters, depth first, in the order of computation."""
        for _, root, top in self._roots():
            yield from ((path, node) for path, node in walk(top, root) if node.label is not None)

    def parameters(self) -> Iterator[Parameter]:
        """Yield every parameter once, in the order of `nodes`."""
        for layer, root, top in self._roots():
            for name, weight, label in _weights(top):
                label = f"encoder {label}" if root == "encoder" else label
                yield Parameter(f"{root}{name}", weight.shape, label, layer, weight.role, weight.initial)

    def _roots(self) -> Iterator[tuple[int | None, str, Component]]:
        """Yield (layer number or None, path, component) for the components directly below the model.

        The number is None for components outside the layers, such as the embedding.
        """
        for name, value in self.entries().items():
            if isinstance(value, Component):
                yield None, name, value
            elif isinstance(value, tuple):
                yield from ((layer, f"{name}.{layer}", block) for layer, block in enumerate(value))

    def before_blocks(self) -> Program:
        """Return the operations from the token ids to the residual stream that the first block reads."""
        ids: Sizes = ("B", "T")
        program: list[AnyOperation] = [Tokens("tokens", (), ids, "embedding")]
        program += self.embedding.operations("embedding", "tokens", ids)
        stream = program[-1]
        if self.layer_inputs is not None:
            program += self.layer_inputs.operations("layer_inputs", stream.id, ids)
            program.append(Stream("embedded_tokens", (stream.id,), stream.shape, "norms"))
        if self.token_types is not None:
            program += self.token_types.operations("token_types", stream.id, ids)
        if self.positions is not None:
            last, shape = program[-1].id, program[-1].shape
            own = tuple(self.positions.shapes().items())
            offset, padding = self.positions.offset, self.positions.padding
            rows = shape[1:] if padding is None else shape
            program.append(Positions("positions", (), rows, "embedding", own, offset=offset, padding=padding))
            program.append(Add("embedded", (last, "positions"), shape, "norms", residual=last))
        if self.first_norm is not None:
            program += self.first_norm.operations("first_norm", program[-1].id, program[-1].shape)
        if self.streams is not None:
            program += self.streams.operations("streams", program[-1].id, program[-1].shape)
        if self.has_shared_blocks:
            program.append(Stream(FIRST, (program[-1].id,), program[-1].shape, "norms"))
        return tuple(program)

    def block_operations(self, block: Block) -> Program:
        """Return the operations of a block. The block's input has the id "x", and its output the id "block_output"."""
        return _program(block, self.hidden_size)

    def after_blocks(self) -> Program:
        """Return the operations from the last block's output to the logits, or to hidden states without a head."""
        stream: Sizes = ("B", "T", self.hidden_size)
        program: list[AnyOperation] = []
        if self.joined is not None:
            program += self.joined.operations("joined", "block_output", (self.joined.count, *stream))
        if self.final_norm is not None:
            normed = self.final_norm.operations("final_norm", program[-1].id if program else "block_output", stream)
            if self.blocks[-1].wide:
                normed = tuple(msgspec.structs.replace(norm, normalised_in="float32") for norm in normed)
            program += normed
        last = program[-1].id if program else "block_output"
        if self.head is None:
            return (*program, Stream("hidden_states", (last,), stream, "head"))
        return (*program, *self.head.operations("head", last, stream))


@lru_cache(maxsize=256)
def _program(block: Block, width: int) -> Program:
    """Return the operations of a block for a residual stream of width `width`. The results are cached."""
    return block.operations("", "x", ("B", "T", width))


_MOST_RUNS = 8  # the largest number of runs of equal layers in the repr of a tree


def walk(node: Component, path: str) -> Iterator[tuple[str, Component]]:
    """Yield (path, node) for a component and all components inside it, depth first, in the order of computation."""
    yield path, node
    for name, child in node.children():
        yield from walk(child, f"{path}.{name}")


@lru_cache(maxsize=256)
def _weights(top: Component) -> tuple[tuple[str, Weight, str], ...]:
    """Return (name, weight, label) of every parameter in a component. The names begin with a dot: ".norm.weight".

    Results are cached, because most layers of a model are equal. Raises ConfigError if a component with parameters has
    no label.
    """
    found: list[tuple[str, Weight, str]] = []
    for path, node in walk(top, ""):
        weights = node.weights()
        if weights and node.label is None:
            raise ConfigError(
                f"the component {type(node).__name__} has parameters, but no label, which gptkit params needs for its "
                "table"
            )
        found += [(f"{path}.{name}", weight, str(node.label)) for name, weight in weights.items()]
    return tuple(found)


def _summary(node: Component) -> str:
    """Return a component's kind and sizes as text: Attention(heads 12, kv_heads 12, head_dim 64)."""
    plain = {name: getattr(node, name) for name in node.__struct_fields__ if name not in ("hidden_size", "scale")}
    sizes = [f"{name} {value:,}" for name, value in plain.items() if type(value) is int]
    sizes += [name for name, value in plain.items() if value is True]
    inside = [_summary(value) for value in plain.values() if isinstance(value, Mixer)]
    return f"{type(node).__name__}({', '.join([*sizes, *inside])})"


def differences(a: Any, b: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """Return the differences between two trees, as (path, value in a, value in b).

    If two components at the same path are of different kinds, this is one difference.
    """
    if type(a) is not type(b):
        return [(path or "model", a, b)]
    if isinstance(a, Component):
        if a == b:
            return []
        one, other = a.entries(), b.entries()
        return [
            difference
            for name in dict.fromkeys((*one, *other))
            for difference in differences(one.get(name), other.get(name), f"{path}.{name}" if path else name)
        ]
    if isinstance(a, tuple):
        if len(a) != len(b):
            return [(path, f"{len(a)} entries", f"{len(b)} entries")]
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{path}.{i}")]
    return [] if a == b else [(path, a, b)]


@lru_cache(maxsize=64)
def without_rounding(node: Component | None) -> Any:
    """Return a copy of the tree without the differences in rounding between families, for comparisons.

    All rounding fields have their defaults, and activations are replaced by `function_of`. Trees that compute the same
    function in exact arithmetic therefore become equal. Results are cached, because gptkit asks many families whether
    they can store the same tree.
    """
    return None if node is None else node.mapped(lambda part, _: part.alike())
