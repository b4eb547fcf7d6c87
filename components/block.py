"""One layer: its sub-layers, and how they read the residual stream and add to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Literal

import msgspec

from ..errors import ConfigError, MissingComponent
from .attention import Attention
from .base import Component, Mixer, Weight
from .feed_forward import FeedForward, GatedFeedForward
from .latent_attention import LatentAttention
from .mixture import MixtureOfExperts
from .norms import Norm
from .operations import Add, AltUp, AnyOperation, Program, ScaleOperation, Sizes, Stream
from .streams import AlternatingUpdates, LowRankResidual
from .sublayer import SubLayer
from .words import NOT_THERE, Words, plain_number

__all__ = ["Block", "BlockScale"]

_OWN = ("parallel", "residual", "scale", "altup", "sums", "wide")  # a block's fields except its sub-layers


class BlockScale(Component, frozen=True):
    """A number that multiplies the output of a block, and that is not trained (Gemma 4)."""

    label = "norms"

    def weights(self) -> dict[str, Weight]:
        return {"weight": Weight((1,), "inner", 1.0)}

    def words(self) -> dict[str, Words]:
        return {"scale of blocks": Words("of each", {})}

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        return (ScaleOperation(path, (source,), shape, "norms", tuple(self.shapes().items()), factor=1.0),)


class Block(Component, frozen=True):
    """A layer: an ordered list of sub-layers, and how their outputs are added to the residual stream.

    The names of a sub-layer's parts begin with its mixer's slot: `blocks.3.attention_norm`, `blocks.3.attention`.
    """

    rounds = ("sums", "wide")
    described = ("sublayers",)
    forgotten: ClassVar[dict[str, str]] = {
        "parallel": "parallel block run in series",
        "residual": "residual taken from the stream, not from the norm",
        "scale": "what leaves blocks not scaled",
        "altup": "streams of a token not updated",
    }

    sublayers: tuple[SubLayer, ...]
    """The sub-layers, in the order of computation."""
    parallel: bool = False
    """Whether the sub-layers are parallel: all read the layer's input, and their outputs are added to it. A sub-layer
    without a norm then reads the output of the first sub-layer's norm."""
    residual: Literal["stream", "normed"] = "stream"
    """What a sub-layer's output is added to: the stream, or the output of the sub-layer's norm (BLOOM's
    apply_residual_connection_post_layernorm)."""
    scale: BlockScale | None = None
    """The component that multiplies the stream by a number after all sub-layers (Gemma 4)."""
    altup: AlternatingUpdates | None = None
    """The predictions and corrections of several residual streams. If set, the sub-layers compute only one of these
    streams."""
    sums: Literal["branches first", "stream first"] = "branches first"
    """The order of additions in a parallel layer. "branches first": outputs are added to each other and then to the
    stream. "stream first": outputs are added to the stream one after the other (StableLM)."""
    wide: bool = False
    """Whether the residual stream is in at least fp32 after the layer. Norms before sub-layers cast their input to the
    model's dtype (Mamba)."""

    def __post_init__(self) -> None:
        slots = [sublayer.mixer.slot for sublayer in self.sublayers]
        if not slots or len(set(slots)) < len(slots):
            raise ConfigError(f"a block needs at least one sub-layer, and at most one of each kind, but has {slots}")
        widths = {size: name for name, size in self.widths()}
        if len(widths) > 1:
            raise ConfigError(
                " and ".join(f"{name} has {size}" for size, name in widths.items())
                + ", but all parts of a block must have the same width"
            )
        self._check_residual()
        self._check_order()
        self._check_streams()

    def _check_residual(self) -> None:
        """Raise ConfigError unless the sub-layers have the norms that `parallel` and `residual` need."""
        if self.parallel and self.residual == "normed":
            raise ConfigError("a parallel block (parallel: true) cannot have residual: normed")
        for sublayer in self.sublayers:
            if self.residual == "normed" and sublayer.norm is None:
                raise ConfigError(
                    f"with residual: normed, the output of {sublayer.mixer.slot} is added to the output of the "
                    "norm before it, but there is no such norm"
                )
            if self.parallel and (sublayer.sum_norm is not None or sublayer.low_rank is not None):
                raise ConfigError(
                    "the sub-layers of a parallel block share one residual sum, so none of them can have "
                    "sum_norm or low_rank"
                )

    def _check_order(self) -> None:
        """Raise ConfigError if `wide`, `SubLayer.beside` or `onto: next` is used in a block that does not support it.

        All three need sub-layers that run in series and whose outputs are added to the stream without further steps.
        """
        pre_norms = all(sublayer.pre_norm for sublayer in self.sublayers)
        parallel_pairs = any(sublayer.beside for sublayer in self.sublayers)
        complex_sums = self.parallel or self.residual == "normed" or self.scale is not None or self.altup is not None
        if self.wide and (complex_sums or not pre_norms):
            raise ConfigError(
                "a block with an fp32 residual stream (wide: true) needs a norm before every sub-layer, and "
                "cannot have parallel, residual: normed, scale, altup, low_rank or sum_norm"
            )
        if parallel_pairs:
            firsts = [first for first, *others in self.groups() if others]
            pre_norms = all(sublayer.pre_norm for sublayer in firsts)
            if complex_sums or self.wide or self.sublayers[0].beside or not pre_norms:
                raise ConfigError(
                    "a sub-layer with beside: true must follow a sub-layer that has a norm but neither low_rank "
                    "nor sum_norm, in a block without parallel, residual: normed, scale, altup and wide"
                )
        feeders = [sublayer for sublayer in self.sublayers if sublayer.onto == "next"]
        if feeders:
            summed = any(sublayer.sum_norm is not None or sublayer.low_rank is not None for sublayer in feeders)
            if complex_sums or self.wide or parallel_pairs or summed or self.sublayers[-1].onto == "next":
                raise ConfigError(
                    "the output of a sub-layer with onto: next goes only to the next sub-layer, so it cannot be "
                    "the last one, and its block cannot have parallel, residual: normed, scale, altup, wide, "
                    "beside, low_rank or sum_norm"
                )

    def _check_streams(self) -> None:
        """Raise ConfigError if `altup`, or a sub-layer with `onto: others`, is used in a way that is not supported."""
        others = [sublayer.onto == "others" for sublayer in self.sublayers]
        if others != sorted(others) or all(others) or (any(others) and self.altup is None):
            raise ConfigError(
                "a sub-layer that writes to the other residual streams (onto: others) must be the last of "
                "several sub-layers, in a block with altup"
            )
        if self.altup is not None and (self.parallel or self.scale is not None or self.residual == "normed"):
            raise ConfigError("a block with altup cannot have parallel, scale or residual: normed")
        if self.altup is not None and sum(others) > 1:
            raise ConfigError("only one sub-layer of a block can write to the other residual streams (onto: others)")

    def mapped(self, change: Callable[[Any, str], Any], path: str = "") -> Any:
        sublayers = tuple(sublayer.mapped(change, path) for sublayer in self.sublayers)
        own = {
            name: part.mapped(change, f"{path}.{name}" if path else name)
            for name in ("scale", "altup")
            if (part := getattr(self, name)) is not None
        }
        return change(msgspec.structs.replace(self, sublayers=sublayers, **own), path)

    def slips(self) -> dict[str, Block]:
        alone = self.parallel and all(sublayer.norm is not None for sublayer in self.sublayers)
        return {"parallel block run in series": msgspec.structs.replace(self, parallel=False)} if alone else {}

    def groups(self) -> Iterator[tuple[SubLayer, ...]]:
        """Yield groups of sub-layers that read the same input (`SubLayer.beside`). Most groups have one sub-layer."""
        starts = [index for index, sublayer in enumerate(self.sublayers) if not sublayer.beside]
        for start, end in pairwise((*starts, len(self.sublayers))):
            yield self.sublayers[start:end]

    def widths(self) -> Iterator[tuple[str, int]]:
        """Yield the width of every part that reads or writes the stream, as (name, size)."""
        for sublayer in self.sublayers:
            for name, part in sublayer.parts().items():
                if isinstance(part, Mixer | LowRankResidual):
                    yield name, part.hidden_size
                elif isinstance(part, Norm):
                    yield name, part.size
        if self.altup is not None:
            yield "altup", self.altup.hidden_size

    def entries(self) -> dict[str, Any]:
        parts: dict[str, Any] = {}
        for sublayer in self.sublayers:
            parts |= sublayer.parts()
        return parts | {name: getattr(self, name) for name in _OWN}

    def replaced(self, **parts: Any) -> Block:
        """Return a copy of the block with some parts replaced. Parts have names like attention or feed_forward_norm.

        Raises:
            MissingComponent: the block has no part of this name.
        """
        own = {name: parts.pop(name) for name in _OWN if name in parts}
        sublayers = []
        for sublayer in self.sublayers:
            slot, fields = sublayer.mixer.slot, {}
            for name in parts.keys() & sublayer.parts().keys():
                fields["mixer" if name == slot else name.removeprefix(f"{slot}_")] = parts.pop(name)
            sublayers.append(msgspec.structs.replace(sublayer, **fields))
        if parts:
            missing = " or ".join(name.replace("_", " ") for name in parts)
            raise MissingComponent(
                f"this operation needs {missing} in every layer, but one layer has only {self.slots}"
            )
        return msgspec.structs.replace(self, sublayers=tuple(sublayers), **own)

    @property
    def slots(self) -> str:
        """Name the mixers with their kinds: "attention (Attention) and feed_forward (FeedForward)"."""
        return " and ".join(f"{sublayer.mixer.slot} ({type(sublayer.mixer).__name__})" for sublayer in self.sublayers)

    def words(self) -> dict[str, Words]:
        """Return descriptions of the order of sub-layers, the norms, the biases and all aspects of the mixers."""
        number = sum(sublayer.norm is not None for sublayer in self.sublayers)
        data = {"parallel": self.parallel, "norms": number, "residual": self.residual}
        short = whole = "serial"
        if self.parallel:
            short = whole = f"parallel, {({1: 'one norm', 2: 'two norms'}).get(number, f'{number} norms')}"
        elif self.residual == "normed":
            short, whole = "serial, residual from the norm", "serial, residual from the norms' output"
        words = {"block": Words(short, data, whole), "norm": self._norms(), "norm eps": self._eps()}
        undescribed = {sublayer.mixer.slot: sublayer.undescribed() for sublayer in self.sublayers}
        first, *others = undescribed.values()
        alike = bool(others) and all(fields == first for fields in others)
        for slot, fields in ({"branch": first} if alike else undescribed).items():
            words["block"] = words["block"].also({f"{slot} {n}": (f"{slot} {w}", v) for n, (w, v) in fields.items()})
        factors = {sublayer.mixer.slot: sublayer.input_multiplier for sublayer in self.sublayers}
        factors = {slot: factor for slot, factor in factors.items() if factor != 1}
        if factors:
            text = ", ".join(f"{slot} times {plain_number(factor)}" for slot, factor in factors.items())
            words["input of branches"] = Words(text, factors)
        for sublayer in self.sublayers:
            for aspect, described in sublayer.mixer.aspects().items():
                words[aspect] = words[aspect].joined(described) if aspect in words else described
        return words | {"bias": self._biases()}

    def norms(self) -> dict[str, Norm]:
        """Return the norms outside the mixers by name (without "_norm"), such as "feed_forward_output"."""
        return {n.removesuffix("_norm"): part for n, part in self.entries().items() if isinstance(part, Norm)}

    def _norms(self) -> Words:
        """Return one description of all norms outside the mixers.

        Its `data` has an entry for every norm. A sub-layer without norms has the same entry as the first norm.
        """
        described = {name: norm.named() for name, norm in self.norms().items()}
        if not described:
            return NOT_THERE
        first, *_ = described.values()
        data = {name: words.data for name, words in described.items()}
        data |= {sublayer.mixer.slot: first.data for sublayer in self.sublayers if not sublayer.places()}
        short = " and ".join(dict.fromkeys(words.short for words in described.values()))
        whole = " and ".join(dict.fromkeys(words.long for words in described.values()))
        places = dict.fromkeys(place for sublayer in self.sublayers for place in sublayer.places())
        where = " and ".join(places)
        whole += f", {' and '.join(f'{place}-norm' for place in places)}"
        return Words(f"{short}, {where}", data | {"placement": where}, whole)

    def _eps(self) -> Words:
        """Return the description of the eps of all norms, as one number if they are equal."""
        by_norm = {name: norm.eps for name, norm in self.norms().items()}
        for mixer in self._mixers:
            inner = {name: part.eps for name, part in mixer.entries().items() if isinstance(part, Norm)}
            by_norm |= {f"{mixer.slot} {name}" if name in by_norm else name: eps for name, eps in inner.items()}
        if not by_norm:
            return NOT_THERE
        words = " and ".join(dict.fromkeys(f"{eps:g}" for eps in by_norm.values()))
        return Words(words, by_norm if len(set(by_norm.values())) > 1 else next(iter(by_norm.values())))

    def _biases(self) -> Words:
        """Return the description of the linear layers that have a bias.

        Biases of norms are described with the norms.
        """
        linears: dict[str, Words] = {}
        for mixer in self._mixers:
            own = mixer.biases()
            linears |= {f"{mixer.slot} {name}" if name in linears else name: words for name, words in own.items()}
        biased = {name: words for name, words in linears.items() if words.data}
        if len(biased) == len(linears) and all(mixer.biases() for mixer in self._mixers):
            return Words("all linears", list(biased), "every linear")
        words = biased.values()
        return Words(
            ", ".join(w.short for w in words) or "none", list(biased), ", ".join(w.long for w in words) or "none"
        )

    @property
    def _mixers(self) -> Sequence[Mixer]:
        return [sublayer.mixer for sublayer in self.sublayers]

    def mixer(self, slot: str) -> Mixer | None:
        """Return the mixer with this slot, or None."""
        return next((mixer for mixer in self._mixers if mixer.slot == slot), None)

    @property
    def attention(self) -> Attention | LatentAttention:
        """Return the attention of the block. Raises MissingComponent if there is none."""
        attention = self.mixer("attention")
        if not isinstance(attention, Attention | LatentAttention):
            raise MissingComponent(
                f"this operation needs softmax attention in every layer, but one layer has only {self.slots}"
            )
        return attention

    @property
    def feed_forward(self) -> FeedForward | GatedFeedForward | MixtureOfExperts:
        """Return the feed-forward of the block. Raises MissingComponent if there is none."""
        feed_forward = self.mixer("feed_forward")
        if not isinstance(feed_forward, FeedForward | GatedFeedForward | MixtureOfExperts):
            raise MissingComponent(
                f"this operation needs a feed-forward in every layer, but one layer has only {self.slots}"
            )
        return feed_forward

    @property
    def attention_norm(self) -> Norm:
        """Return the norm before attention. Raises MissingComponent if there is none."""
        norm = self._norm_before("attention")
        if norm is None:
            raise MissingComponent(
                f"this operation needs a norm before the attention of every layer, but one layer, of {self.slots}, has "
                "no such norm"
            )
        return norm

    @property
    def feed_forward_norm(self) -> Norm | None:
        """The norm of the feed-forward's input, or None if there is none."""
        return self._norm_before("feed_forward")

    def _norm_before(self, slot: str) -> Norm | None:
        return next((sublayer.norm for sublayer in self.sublayers if sublayer.mixer.slot == slot), None)

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        """Return the operations that compute the block's output. `source` is the id of the residual stream.

        The id of an operation begins with the name of its module, such as "attention".
        """
        return _BlockProgram(self, path, source, shape).whole()

    def plain(self) -> None:
        """Check that the block is a plain pre-norm block, for code that supports no other blocks.

        Every mixer must have a norm of its input. Other norms and factors are not allowed, except multipliers of
        outputs that are added to the residual stream.

        Raises:
            MissingComponent: a mixer has no input norm, or has an output norm, a sum norm or another such part.
        """
        more = ("multiplier",) if self.residual == "normed" else ()
        checked = ("output_norm", "sum_norm", "low_rank", "onto", "input_multiplier", "beside", *more)
        for index, sublayer in enumerate(self.sublayers):
            for name in checked:
                if getattr(sublayer, name) != sublayer.defaults()[name]:
                    raise MissingComponent(
                        "this operation supports only layers with plain norms before attention and feed-forward, but "
                        f"{sublayer.mixer.slot} also has {name}"
                    )
            if sublayer.norm is None and not (self.parallel and index):
                raise MissingComponent(
                    "this operation supports only layers with a norm before attention and feed-forward, but there is "
                    f"no norm before {sublayer.mixer.slot}"
                )


_END = "block_output"
"""The id of a block's last operation. Variables in the code of the torch module refer to the stream and to most results
until this operation, so their memory is not released earlier."""


class _BlockProgram:
    """A builder of the program of a block (its list of operations), one sub-layer after the other.

    `live_until` of an operation says how long its result stays in memory. The values follow from the variables in the
    code of the block's torch module (`modules.decoder.BlockModule`).
    """

    def __init__(self, block: Block, path: str, source: str, shape: Sizes) -> None:
        self.block, self.path, self.shape = block, path, shape
        self.streams: Sizes = shape if block.altup is None else (block.altup.count, *shape)
        self.program: list[AnyOperation] = [
            Stream(source, (source,), self.streams, "norms", live_until=_END, kept_wide=block.wide)
        ]
        if block.altup is not None:
            self.program += block.altup.predicted(f"{path}altup", source, shape)
        self.source = self.last
        self.total = self.source  # the stream, with the outputs that are already added
        self.normed = self.source  # the input of sub-layers without their own norm, if they read the same as others
        self.waiting = ""  # an output that is added together with that of the next sub-layer (`beside`)
        self.next_input = ""  # what the norm of the next sub-layer reads instead of the stream (`onto: next`)
        self.branches: list[str] = []  # the outputs of a parallel block's sub-layers

    @property
    def last(self) -> str:
        """The id of the operation that was added last."""
        return self.program[-1].id

    def whole(self) -> Program:
        """Build and return the program of the whole block."""
        block, altup = self.block, self.block.altup
        for index in range(len(block.sublayers)):
            self._sublayer(index)
        if altup is not None and block.sublayers[-1].onto == "stream":
            *first, corrected = altup.corrected(f"{self.path}altup", self.total, self.shape)
            self.program += (*first, msgspec.structs.replace(corrected, id=_END))
        if block.parallel:
            self._parallel_sum()
        if block.scale is not None:
            self._release_last()  # the module has one variable for the sum and for the scaled sum
            self.program += block.scale.operations(f"{self.path}scale", self.last, self.shape)
        return tuple(self.program)

    def _sublayer(self, index: int) -> None:
        """Append the operations of a sub-layer to the program, with the addition of its output to the stream."""
        block, sublayer, shape = self.block, self.block.sublayers[index], self.shape
        slot, altup = sublayer.mixer.slot, block.altup
        if altup is not None and sublayer.onto == "others":
            self.program += altup.corrected(f"{self.path}altup", self.total, shape)
            self.program += altup.scaled(f"{self.path}altup", shape)
            self.total = self.last
        read = self._input(index)
        if sublayer.low_rank is not None:  # adding it before or after the mixer makes no difference
            low_rank = self._run(f"{slot}_low_rank", sublayer.low_rank, read, "")
            self.program.append(Add(f"{slot}_augmented", (self.total, low_rank), shape, "norms", residual=self.total))
            self.total = self.last
        branch = self._branch(index, read)
        if self._waits(index):
            self.waiting = branch
        elif block.parallel:
            self.branches.append(branch)
        elif sublayer.onto == "next":
            self.next_input = f"{slot}_added"
            self.program.append(Add(self.next_input, (self.total, branch), shape, "norms", residual=self.total))
        elif sublayer.onto == "others":
            inputs = (f"{self.path}altup.corrected", branch)
            self.program.append(AltUp(_END, inputs, self.streams, "streams", step="spread"))
        else:
            self._serial_sum(index, read if block.residual == "normed" else self.total, branch)

    def _input(self, index: int) -> str:
        """Append the norm of a sub-layer's input, if there is one. Return the id of the mixer's input."""
        block, sublayer = self.block, self.block.sublayers[index]
        stream = self.next_input or (self.source if block.parallel else self.total)
        read = self.normed if block.parallel or sublayer.beside else stream
        self.next_input = ""
        if sublayer.norm is not None:
            # The module's variable for the result gets a new value by the norm of the next sub-layer in series.
            following = () if block.parallel else (later for later in block.sublayers[index + 1 :] if not later.beside)
            until = next((f"{later.mixer.slot}_norm" for later in following), _END)
            read = self._run(f"{sublayer.mixer.slot}_norm", sublayer.norm, stream, until)
            if block.wide:
                self.program[-1] = msgspec.structs.replace(self.program[-1], narrowed=True)
        if not (sublayer.beside or (block.parallel and index)):
            self.normed = read
        return read

    def _branch(self, index: int, read: str) -> str:
        """Append the operations of a mixer, its multipliers and its output norm. Return the id of the output.

        With `SubLayer.beside`, the output of the previous sub-layer is added, and the id is that of the sum. The torch
        module has only one variable for outputs, so only the last output stays in memory until the end of the block.

        Args:
            index: The index of the sub-layer.
            read: The id of the mixer's input.
        """
        sublayer, shape = self.block.sublayers[index], self.shape
        slot, last, waits = sublayer.mixer.slot, self._is_last(index), self._waits(index)
        until = "" if last or waits or sublayer.beside or sublayer.onto == "next" else _END
        normed, scaled = sublayer.output_norm is not None, sublayer.multiplier != 1
        if sublayer.input_multiplier != 1:
            name, factor = f"{slot}_input_scaled", sublayer.input_multiplier
            mixer_end = sublayer.mixer.operations(f"{self.path}{slot}", name, shape)[-1].id
            self.program.append(ScaleOperation(name, (read,), shape, "norms", live_until=mixer_end, factor=factor))
            read = name
        branch = self._run(slot, sublayer.mixer, read, "" if normed or scaled else until)
        if sublayer.output_norm is not None:
            branch = self._run(f"{slot}_output_norm", sublayer.output_norm, branch, "" if scaled else until)
        if scaled:
            factor = sublayer.multiplier
            self.program.append(
                ScaleOperation(f"{slot}_scaled", (branch,), shape, "norms", live_until=until, factor=factor)
            )
            branch = self.last
        if sublayer.beside:
            until = "" if last or waits else _END
            self.program.append(Add(f"{slot}_beside", (self.waiting, branch), shape, "norms", live_until=until))
            branch = self.last
        return branch

    def _serial_sum(self, index: int, residual: str, branch: str) -> None:
        """Append the sum of a sub-layer's output and the residual, and the norm of the sum if there is one.

        `residual` and `branch` are the ids of the residual and of the output.
        """
        sublayer, last = self.block.sublayers[index], self._is_last(index)
        slot, low_rank = sublayer.mixer.slot, sublayer.low_rank is not None
        self.total = self._add(_END if last and not low_rank else f"{slot}_output", residual, branch, residual)
        if low_rank:
            name = _END if last else f"{slot}_halved"
            self.program.append(
                ScaleOperation(name, (self.total,), self.shape, "norms", live_until=_END, factor=0.5**0.5)
            )
            self.total = name
        if sublayer.sum_norm is not None:
            self._release_last()  # the module has one variable for the sum and for its norm
            self.total = self._run(f"{slot}_sum_norm", sublayer.sum_norm, self.total)

    def _parallel_sum(self) -> None:
        """Append the sum of the stream and of the outputs of all sub-layers, for a parallel block."""
        if self.block.sums == "stream first":
            for index, branch in enumerate(self.branches):
                name = _END if index == len(self.branches) - 1 else f"sum_{index + 1}"
                self.total = self._add(name, self.total, branch, self.total)
            return
        both, *others = self.branches
        for index, other in enumerate(others):
            both = self._add(f"both_{index + 1}" if index else "both", both, other, None)
        self._add(_END, self.source, both, self.source)

    def _run(self, name: str, node: Component, read: str, live_until: str = _END) -> str:
        """Append the operations of a component. Return the id of its result.

        Args:
            name: The name of the component in the block.
            node: The component.
            read: The id of its input.
            live_until: The id of the last operation during which the result stays in memory.
        """
        program: Program = node.operations(f"{self.path}{name}", read, self.shape)
        *first, last = program
        self.program += (*first, msgspec.structs.replace(last, live_until=live_until))
        return last.id

    def _add(self, name: str, one: str, other: str, residual: str | None) -> str:
        inputs, wide = (one, other), self.block.wide
        self.program.append(Add(name, inputs, self.shape, "norms", live_until=_END, residual=residual, kept_wide=wide))
        return name

    def _release_last(self) -> None:
        self.program[-1] = msgspec.structs.replace(self.program[-1], live_until="")

    def _waits(self, index: int) -> bool:
        """Return whether the sub-layer's output waits for that of the next sub-layer, which reads the same input."""
        following = self.block.sublayers[index + 1 :]
        return bool(following) and following[0].beside

    def _is_last(self, index: int) -> bool:
        """Return whether the block's output is complete after this sub-layer."""
        return index == len(self.block.sublayers) - 1 and self.block.altup is None
