"""One layer: its sub-layers, and how they read the residual stream and add to it. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, ClassVar, Literal

import msgspec

from ..errors import ConfigError, MissingComponent
from .attention import Attention
from .base import Component, Mixer, Positive, Weight
from .feed_forward import FeedForward, GatedFeedForward
from .latent_attention import LatentAttention
from .mixture import MixtureOfExperts
from .norms import Norm
from .operations import Add, AltUp, AnyOperation, Program, Scale, Sizes, Stream
from .streams import AlternatingUpdates, LowRankResidual
from .words import NOT_THERE, Words, plain_number

__all__ = ["Block", "BlockScale", "SubLayer"]

_NORMS = ("norm", "output_norm", "sum_norm")

_OWN = ("parallel", "residual", "scale", "altup", "sums", "wide")  # a block's fields except its sub-layers

_PLACES = {"norm": "pre", "output_norm": "output", "sum_norm": "post"}


class SubLayer(Component, frozen=True):
    """A mixer and its norms: y = mixer(norm(x)), x = sum_norm(x + multiplier · output_norm(y)).

    A norm that is None is left out. Pre-norm has only `norm`, a sandwich (Gemma 2) has `norm` and `output_norm`,
    OLMo 2 has `output_norm`, and post-norm (Vaswani et al. 2017) has `sum_norm`.
    """

    tells = ("mixer", *_NORMS, "input_multiplier")
    forgotten: ClassVar[dict[str, str]] = {
        "norm": "norms before sub-layers left out",
        "output_norm": "norms of sub-layers' outputs left out",
        "sum_norm": "norms of sums left out",
        "multiplier": "branches not scaled",
        "low_rank": "residual of low rank left out",
        "onto": "what goes elsewhere added to the stream",
        "input_multiplier": "inputs of branches not scaled",
        "beside": "mixers side by side run in series",
    }

    mixer: Mixer
    """The attention, feed-forward or recurrence."""
    norm: Norm | None = None
    """The norm of the mixer's input."""
    low_rank: LowRankResidual | None = None
    """With r, the new x is (x + output_norm(y) + r(norm(x))) / √2 (Gemma 3n)."""
    output_norm: Norm | None = None
    """The norm of the mixer's output, before it is added to the stream."""
    sum_norm: Norm | None = None
    """The norm of the stream after the addition."""
    multiplier: Positive = 1.0
    """The factor of the output before it is added to the stream (Granite)."""
    onto: Literal["stream", "others", "next"] = "stream"
    """Where the output is added. "others", in a layer with `altup`: to all streams except the first, and the sub-layer
    reads the active one of the corrected streams (Gemma 3n). "next": only to the input of the next sub-layer's norm,
    and the stream stays unchanged (Zamba)."""
    input_multiplier: Positive = 1.0
    """The factor of the mixer's input, after the norm."""
    beside: bool = False
    """Whether the sub-layer reads the same input as the previous one, and both outputs are added to the stream together
    (Falcon-H1)."""

    def __post_init__(self) -> None:
        if self.low_rank is not None and (self.norm is None or self.sum_norm is not None):
            raise ConfigError(
                "a sub-layer with a low-rank residual (low_rank) needs a norm before it, and cannot have a "
                "norm after the residual sum (sum_norm)"
            )
        if self.beside and (self.norm is not None or self.sum_norm is not None):
            raise ConfigError(
                "a sub-layer that runs in parallel with the previous one (beside: true) uses the previous "
                "one's norm and residual sum, so it cannot have norm or sum_norm"
            )

    def mapped(self, change: Callable[[Any, str], Any], path: str = "") -> Any:
        """Return the sub-layer with `change` applied to its parts, then to itself. `path` is the block's path."""
        names = {name: f"{self.mixer.slot}_{name}" for name in self.__struct_fields__} | {"mixer": self.mixer.slot}
        paths = {name: f"{path}.{full}" if path else full for name, full in names.items()}
        return change(self._mapped(change, paths), path)

    def parts(self) -> dict[str, Any]:
        """Return the fields by their names in a block: "attention_norm", "attention", …"""
        slot = self.mixer.slot
        named = {"norm": self.norm, "low_rank": self.low_rank, "": self.mixer}
        others = ("output_norm", "sum_norm", "multiplier", "onto", "input_multiplier", "beside")
        named |= {name: getattr(self, name) for name in others}
        return {f"{slot}_{name}".rstrip("_"): value for name, value in named.items()}

    def words(self) -> dict[str, Words]:
        return {"block": Words("", {})}

    def places(self) -> list[str]:
        """Return the placements of the norms: "pre", "output", "post"."""
        return [place for name, place in _PLACES.items() if getattr(self, name) is not None]


class BlockScale(Component, frozen=True):
    """An untrained number that multiplies the output of a block (Gemma 4)."""

    label = "norms"

    def weights(self) -> dict[str, Weight]:
        return {"weight": Weight((1,), "inner", 1.0)}

    def words(self) -> dict[str, Words]:
        return {"scale of blocks": Words("of each", {})}

    def operations(self, path: str, source: str, shape: Sizes) -> Program:
        return (Scale(path, (source,), shape, "norms", tuple(self.shapes().items()), factor=1.0),)


class Block(Component, frozen=True):
    """A layer: an ordered list of sub-layers, and how their outputs are added to the stream.

    The names of a sub-layer's parts begin with its mixer's slot: `blocks.3.attention_norm`, `blocks.3.attention`.
    """

    rounds = ("sums", "wide")
    tells = ("sublayers",)
    forgotten: ClassVar[dict[str, str]] = {
        "parallel": "parallel block run in series",
        "residual": "residual taken from the stream, not from the norm",
        "scale": "what leaves blocks not scaled",
        "altup": "streams of a token not updated",
    }

    sublayers: tuple[SubLayer, ...]
    """The sub-layers in their order."""
    parallel: bool = False
    """Whether all sub-layers read the layer's input and their outputs are added to it. A sub-layer without a norm then
    reads the output of the first sub-layer's norm."""
    residual: Literal["stream", "normed"] = "stream"
    """What a sub-layer's output is added to: the stream, or the output of the sub-layer's norm (BLOOM's
    apply_residual_connection_post_layernorm)."""
    scale: BlockScale | None = None
    """A factor of the stream after all sub-layers."""
    altup: AlternatingUpdates | None = None
    """If set, there are several streams, and the sub-layers compute one of them."""
    sums: Literal["branches first", "stream first"] = "branches first"
    """The order of additions in a parallel layer: outputs are added to each other and then to the stream, or one after
    the other to the stream (StableLM). It changes only the rounding."""
    wide: bool = False
    """Whether the stream is in at least fp32 after the layer. Norms before sub-layers read it in the model's dtype
    (Mamba)."""

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
        plain = (each.norm is not None and each.low_rank is None and each.sum_norm is None for each in self.sublayers)
        told = self.parallel or self.residual == "normed" or self.scale is not None or self.altup is not None
        if self.wide and (told or not all(plain)):
            raise ConfigError(
                "a block with an fp32 residual stream (wide: true) needs a norm before every sub-layer, and "
                "cannot have parallel, residual: normed, scale, altup, low_rank or sum_norm"
            )
        if any(each.beside for each in self.sublayers):
            firsts = [first for first, *others in self.groups() if others]
            plainly = [each.norm is not None and each.low_rank is None and each.sum_norm is None for each in firsts]
            if told or self.wide or self.sublayers[0].beside or not all(plainly):
                raise ConfigError(
                    "a sub-layer with beside: true must follow a sub-layer that has a norm but neither low_rank "
                    "nor sum_norm, in a block without parallel, residual: normed, scale, altup and wide"
                )
        nexts = [each for each in self.sublayers if each.onto == "next"]
        if nexts:
            last, beside = self.sublayers[-1], any(each.beside for each in self.sublayers)
            summed = any(each.sum_norm is not None or each.low_rank is not None for each in nexts)
            if told or self.wide or beside or summed or last.onto == "next":
                raise ConfigError(
                    "the output of a sub-layer with onto: next goes only to the next sub-layer, so it cannot be "
                    "the last one, and its block cannot have parallel, residual: normed, scale, altup, wide, "
                    "beside, low_rank or sum_norm"
                )
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
        sublayers = tuple(each.mapped(change, path) for each in self.sublayers)
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
        """Yield the sub-layers, with those that run in parallel in one tuple."""
        starts = [index for index, each in enumerate(self.sublayers) if not each.beside]
        for start, end in pairwise((*starts, len(self.sublayers))):
            yield self.sublayers[start:end]

    def widths(self) -> Iterator[tuple[str, int]]:
        """Yield the name and the width of every part that reads the stream or writes to it."""
        for sublayer in self.sublayers:
            for name, part in sublayer.parts().items():
                if isinstance(part, Mixer | LowRankResidual):
                    yield name, part.hidden_size
                elif isinstance(part, Norm):
                    yield name, part.size
        if self.altup is not None:
            yield "altup", self.altup.hidden_size

    def entries(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for sublayer in self.sublayers:
            found |= sublayer.parts()
        return found | {name: getattr(self, name) for name in _OWN}

    def replaced(self, **parts: Any) -> Block:
        """Return the block with other parts, by their names in `entries`, such as attention or feed_forward_norm.

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
            raise MissingComponent(f"this change needs {missing} in every layer, but one layer has only {self.slots}")
        return msgspec.structs.replace(self, sublayers=tuple(sublayers), **own)

    @property
    def slots(self) -> str:
        """The mixers in words: "attention (Attention) and feed_forward (FeedForward)"."""
        return " and ".join(f"{sublayer.mixer.slot} ({type(sublayer.mixer).__name__})" for sublayer in self.sublayers)

    def words(self) -> dict[str, Words]:
        """Return the words for the arrangement, the norms, the biases and all aspects of the mixers."""
        number = sum(each.norm is not None for each in self.sublayers)
        data = {"parallel": self.parallel, "norms": number, "residual": self.residual}
        short = whole = "serial"
        if self.parallel:
            short = whole = f"parallel, {({1: 'one norm', 2: 'two norms'}).get(number, f'{number} norms')}"
        elif self.residual == "normed":
            short, whole = "serial, residual from the norm", "serial, residual from the norms' output"
        words = {"block": Words(short, data, whole), "norm": self._norms(), "norm eps": self._eps()}
        untold = {each.mixer.slot: each.untold() for each in self.sublayers}
        first, *others = untold.values()
        alike = bool(others) and all(each == first for each in others)
        for slot, fields in ({"branch": first} if alike else untold).items():
            words["block"] = words["block"].also({f"{slot} {n}": (f"{slot} {w}", v) for n, (w, v) in fields.items()})
        read = {each.mixer.slot: each.input_multiplier for each in self.sublayers if each.input_multiplier != 1}
        if read:
            said = ", ".join(f"{slot} times {plain_number(factor)}" for slot, factor in read.items())
            words["input of branches"] = Words(said, read)
        for each in self.sublayers:
            for aspect, told in each.mixer.aspects().items():
                words[aspect] = words[aspect].beside(told) if aspect in words else told
        return words | {"bias": self._biases()}

    def norms(self) -> dict[str, Norm]:
        """Return the norms outside the mixers: "attention", "feed_forward", "feed_forward_output", …"""
        return {n.removesuffix("_norm"): part for n, part in self.entries().items() if isinstance(part, Norm)}

    def _norms(self) -> Words:
        """Return the words for the norms. A sub-layer without any norm is listed with the first norm."""
        told = {name: norm.named() for name, norm in self.norms().items()}
        if not told:
            return NOT_THERE
        first, *_ = told.values()
        data = {name: words.data for name, words in told.items()}
        data |= {each.mixer.slot: first.data for each in self.sublayers if not each.places()}
        short = " and ".join(dict.fromkeys(words.short for words in told.values()))
        whole = " and ".join(dict.fromkeys(words.long for words in told.values()))
        places = dict.fromkeys(place for each in self.sublayers for place in each.places())
        where = " and ".join(places)
        whole += f", {' and '.join(f'{place}-norm' for place in places)}"
        return Words(f"{short}, {where}", data | {"placement": where}, whole)

    def _eps(self) -> Words:
        """Return the words for the eps of all norms, as one number if they are equal."""
        found = {name: norm.eps for name, norm in self.norms().items()}
        for each in self.sublayers:
            inner = {name: part.eps for name, part in each.mixer.entries().items() if isinstance(part, Norm)}
            found |= {f"{each.mixer.slot} {name}" if name in found else name: eps for name, eps in inner.items()}
        if not found:
            return NOT_THERE
        words = " and ".join(dict.fromkeys(f"{eps:g}" for eps in found.values()))
        return Words(words, found if len(set(found.values())) > 1 else next(iter(found.values())))

    def _biases(self) -> Words:
        """Return the words for the linear layers that have a bias. Biases of norms are described with the norms."""
        mixers, every = [each.mixer for each in self.sublayers], dict[str, Words]()
        for mixer in mixers:
            linears = mixer.biases()
            every |= {f"{mixer.slot} {name}" if name in every else name: words for name, words in linears.items()}
        there = {name: words for name, words in every.items() if words.data}
        if len(there) == len(every) and all(mixer.biases() for mixer in mixers):
            return Words("all linears", list(there), "every linear")
        words = there.values()
        return Words(
            ", ".join(w.short for w in words) or "none", list(there), ", ".join(w.long for w in words) or "none"
        )

    def mixer(self, slot: str) -> Mixer | None:
        """Return the mixer of a slot, or None."""
        return next((each.mixer for each in self.sublayers if each.mixer.slot == slot), None)

    @property
    def attention(self) -> Attention | LatentAttention:
        """The attention of the block. Raises MissingComponent if there is none."""
        found = self.mixer("attention")
        if not isinstance(found, Attention | LatentAttention):
            raise MissingComponent(f"this needs softmax attention in every layer, but one layer has only {self.slots}")
        return found

    @property
    def feed_forward(self) -> FeedForward | GatedFeedForward | MixtureOfExperts:
        """The feed-forward of the block. Raises MissingComponent if there is none."""
        found = self.mixer("feed_forward")
        if not isinstance(found, FeedForward | GatedFeedForward | MixtureOfExperts):
            raise MissingComponent(f"this needs a feed-forward in every layer, but one layer has only {self.slots}")
        return found

    @property
    def attention_norm(self) -> Norm:
        """The norm before attention. Raises MissingComponent if there is none."""
        found = next((each.norm for each in self.sublayers if each.mixer.slot == "attention"), None)
        if found is None:
            raise MissingComponent(
                f"this needs a norm before the attention of every layer, but one layer, of {self.slots}, has "
                "no such norm"
            )
        return found

    @property
    def feed_forward_norm(self) -> Norm | None:
        """The feed-forward's own input norm, or None."""
        return next((each.norm for each in self.sublayers if each.mixer.slot == "feed_forward"), None)

    # Complex: one branch for every arrangement of norms and sums.
    def operations(self, path: str, source: str, shape: Sizes) -> Program:  # noqa: C901
        """Return the program from the stream `source` to the block's output. Ids are names in the block's module."""
        end = "block_output"  # the operation up to which the module has variables for results
        streams: Sizes = shape if self.altup is None else (self.altup.count, *shape)
        found: list[AnyOperation] = [Stream(source, (source,), streams, "norms", held=end, kept_wide=self.wide)]
        if self.altup is not None:
            found += self.altup.predicted(f"{path}altup", source, shape)
            source = found[-1].id

        def run(name: str, node: Component, read: str, held: str = end) -> str:
            program: Program = node.operations(f"{path}{name}", read, shape)
            *first, last = program
            found.extend([*first, msgspec.structs.replace(last, held=held)])
            return last.id

        def add(name: str, past: str, branch: str, residual: str | None) -> str:
            inputs, wide = (past, branch), self.wide
            found.append(Add(name, inputs, shape, "norms", held=end, residual=residual, kept_wide=wide))
            return name

        branches, total, shared, waiting, for_next = [], source, source, "", ""
        for index, sublayer in enumerate(self.sublayers):
            slot, last = sublayer.mixer.slot, index == len(self.sublayers) - 1 and self.altup is None
            behind = self.sublayers[index + 1 :]
            following = next(
                (f"{each.mixer.slot}_norm" for each in behind if not each.beside and not self.parallel), ""
            )
            waits = bool(behind) and behind[0].beside
            if self.altup is not None and sublayer.onto == "others":
                found += self.altup.corrected(f"{path}altup", total, shape)
                found += self.altup.scaled(f"{path}altup", shape)
                total = found[-1].id
            taken = for_next or (source if self.parallel else total)
            read, for_next = shared if self.parallel or sublayer.beside else taken, ""
            if sublayer.norm is not None:
                read = run(f"{slot}_norm", sublayer.norm, taken, following or end)
                if self.wide:
                    found[-1] = msgspec.structs.replace(found[-1], narrowed=True)
            shared = shared if sublayer.beside or (self.parallel and index) else read
            if sublayer.low_rank is not None:  # the sum is the same whether it comes before or after the mixer
                inputs = (total, run(f"{slot}_low_rank", sublayer.low_rank, read, ""))
                found.append(Add(f"{slot}_augmented", inputs, shape, "norms", residual=total))
                total = found[-1].id
            # Only the last result of a branch stays in a variable.
            passing = last or waits or sublayer.beside or sublayer.onto == "next"
            scaled, kept = sublayer.multiplier != 1, "" if passing else end
            normed, mixed = sublayer.output_norm is not None, read
            if sublayer.input_multiplier != 1:
                mixed, factor = f"{slot}_input_scaled", sublayer.input_multiplier
                held = sublayer.mixer.operations(f"{path}{slot}", mixed, shape)[-1].id
                found.append(Scale(mixed, (read,), shape, "norms", held=held, factor=factor))
            branch = run(slot, sublayer.mixer, mixed, "" if normed or scaled else kept)
            if sublayer.output_norm is not None:
                branch = run(f"{slot}_output_norm", sublayer.output_norm, branch, "" if scaled else kept)
            if scaled:
                factor = sublayer.multiplier
                found.append(Scale(f"{slot}_scaled", (branch,), shape, "norms", held=kept, factor=factor))
                branch = found[-1].id
            if sublayer.beside:
                name, held = f"{slot}_beside", "" if last or waits else end
                found.append(Add(name, (waiting, branch), shape, "norms", held=held))
                branch = name
            if waits:
                waiting = branch
                continue
            if self.parallel:
                branches.append(branch)
                continue
            if sublayer.onto == "next":
                for_next = f"{slot}_added"
                found.append(Add(for_next, (total, branch), shape, "norms", residual=total))
                continue
            if sublayer.onto == "others":
                found.append(AltUp(end, (f"{path}altup.corrected", branch), streams, "streams", step="spread"))
                continue
            past = read if self.residual == "normed" else total
            total = add(end if last and sublayer.low_rank is None else f"{slot}_output", past, branch, past)
            if sublayer.low_rank is not None:
                name = end if last else f"{slot}_halved"
                found.append(Scale(name, (total,), shape, "norms", held=end, factor=0.5**0.5))
                total = name
            if sublayer.sum_norm is not None:  # its result takes the variable of the sum
                found[-1] = msgspec.structs.replace(found[-1], held="")
                total = run(f"{slot}_sum_norm", sublayer.sum_norm, total)
        if self.altup is not None and self.sublayers[-1].onto == "stream":
            *first, corrected = self.altup.corrected(f"{path}altup", total, shape)
            found += (*first, msgspec.structs.replace(corrected, id=end))
        if self.parallel and self.sums == "stream first":
            for index, branch in enumerate(branches):
                total = add(end if index == len(branches) - 1 else f"sum_{index + 1}", total, branch, total)
        elif self.parallel:
            both, *others = branches
            for index, other in enumerate(others):
                both = add("both" if not index else f"both_{index + 1}", both, other, None)
            add(end, source, both, source)
        if self.scale is not None:  # its result takes the variable of the block's output
            found[-1] = msgspec.structs.replace(found[-1], held="")
            found += self.scale.operations(f"{path}scale", found[-1].id, shape)
        return tuple(found)

    def plain(self) -> None:
        """Check that every mixer has only an input norm, for code that supports nothing else.

        A multiplier of the branch is allowed, unless the result is added to a norm's output.

        Raises:
            MissingComponent: a mixer has no input norm, or has an output norm, a sum norm or another such part.
        """
        more = ("multiplier",) if self.residual == "normed" else ()
        looked = (*_NORMS[1:], "low_rank", "onto", "input_multiplier", "beside", *more)
        for index, sublayer in enumerate(self.sublayers):
            for name in looked:
                if getattr(sublayer, name) != sublayer.defaults()[name]:
                    raise MissingComponent(
                        "this supports only layers with plain norms before attention and feed-forward, but "
                        f"{sublayer.mixer.slot} also has {name}"
                    )
            if sublayer.norm is None and not (self.parallel and index):
                raise MissingComponent(
                    "this supports only layers with a norm before attention and feed-forward, but there is no "
                    f"norm before {sublayer.mixer.slot}"
                )
