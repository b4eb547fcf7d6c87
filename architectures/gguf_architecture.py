"""How one of llama.cpp's architectures says the trees of one family: the mechanism behind the rows of `gguf_table`.

Source: llama.cpp, src/models/*.cpp and llama-model.cpp (what is read, and what is assumed where nothing is said).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..components import Attention, Component, ModelSpec, Norm, Rotary
from ..errors import CannotExpress, ConfigError, shown
from . import ARCHITECTURES, Architecture
from .base import BoundLeaf, Leaf, bind
from .gguf_facts import GgufFacts, Value, fp32
from .gguf_rope import read_scaling, refitted, rope_tensors, write_rope
from .layout import Shape
from .obstacles import Kinds, of_kind
from .rope import USUAL_ROTARY, RotaryKind, write_rotary

Made = Callable[[GgufFacts], Any]  # what makes a field of config.json of a file, where no key says it

_Told = Callable[[Mapping[str, Any]], Value | None]  # what makes a key's value of a config.json

ALWAYS_FP32 = (".bias", "position_embd.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "_norm.weight")
"""How the names of matrices end that llama.cpp's converter writes as fp32, as everything of one dimension."""

_ROPE_BUFFERS = (
    "blk.{layer}.attn_rot_embd.weight",
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)

WINDOW, PATTERN, WIDTH = "attention.sliding_window", "attention.sliding_window_pattern", "attention.key_length"
LOCAL_BASE = "rope.freq_base_swa"


@dataclass(frozen=True)
class GgufArchitecture:
    """One of llama.cpp's architectures with the trees of one family, as what may hold a tree: see `obstacles.Target`.

    A file's metadata are the family's config.json under other names, and the family makes the tree of that.

    name: general.architecture, the prefix of its keys. family: which it is read as, by default the one of its name.
    leaves: its tensors. fields: keys -> fields of config.json, a dot going into an object.
    absent: keys -> what llama.cpp assumes where a file lacks them; of any other it wants a value.
    always: keys -> the value that they have, or what makes it of a config.json.
    assumed: fields that no key says -> their value, or what makes it of a file.
    biases: fields that say whether there are biases -> the tensor of the first layer that has one.
    told: keys that a file has if it is of this family, and where it states a whole number of `always`, that one; such
        rows stand before the others of their name.
    rotary: how the family's config.json says positions; None where none turn. by_kind: whether layers with a window
        turn by other numbers, as `rope_parameters` says: unscaled, and where `absent` has a base for them by that key.
        divisors: the scalings of which llama.cpp reads a tensor.
    windows: of the number of layers, that one of so many has no window, 0 where none has one, None where a file has to
        say it of each; None for a family without such layers. unwindowed: whether a file may be without any window.
    numbers: keys that have no prefix and hold a number of each layer; each is a tensor to a tree, of the key's name and
        the layer's.
    tied: whether the head is the token table, None where either may be.
    square: llama.cpp wants its queries as wide as the model. latent: the widths of heads are in fields of their own,
        and YaRN's factor of scores is in a key.
    also: further families whose models it is written for.
    """

    name: str
    leaves: tuple[Leaf, ...]
    fields: Mapping[str, str]
    family: str = ""
    absent: Mapping[str, Any] = field(default_factory=dict)
    always: Mapping[str, Value | _Told] = field(default_factory=dict)
    assumed: Mapping[str, Any | Made] = field(default_factory=dict)
    biases: Mapping[str, str] = field(default_factory=dict)
    told: tuple[str, ...] = ()
    rotary: RotaryKind | None = USUAL_ROTARY
    by_kind: bool = False
    divisors: tuple[str, ...] = ()
    windows: Callable[[int], int | None] | None = None
    unwindowed: bool = False
    numbers: tuple[str, ...] = ()
    tied: bool | None = None
    square: bool = False
    latent: bool = False
    also: tuple[str, ...] = ()

    @property
    def reads(self) -> str:
        """The family that its files are read as."""
        return self.family or self.name

    @property
    def written(self) -> tuple[str, ...]:
        """The families whose models it is written for."""
        return (self.reads, *self.also)

    @property
    def architecture(self) -> Architecture:
        return ARCHITECTURES[self.reads]

    @property
    def owner(self) -> str:
        return f"GGUF's {self.name}"

    @property
    def kinds(self) -> Kinds:
        return self.architecture.kinds

    @property
    def usual(self) -> ModelSpec:
        return self.architecture.usual

    @property
    def dropped(self) -> tuple[str, ...]:
        """Tensors that hold nothing the tree needs."""
        return () if self.rotary is None else _ROPE_BUFFERS

    def bind(self, spec: ModelSpec) -> list[BoundLeaf]:
        """The file's tensors for a tree. Raises CannotExpress: a shared tensor has no name here."""
        return bind(self.owner, self.leaves, spec)

    # --- metadata -> config.json ---

    def fits(self, facts: GgufFacts) -> bool:
        """Whether a file of this name is of this family."""
        fixed = {key: value for key, value in self.always.items() if isinstance(value, int)}
        return all(facts.raw(key) is not None for key in self.told) and all(
            facts.raw(key) in (None, value) for key, value in fixed.items()
        )

    def read(self, facts: GgufFacts) -> dict[str, Any]:
        """The fields of a config.json. Raises ConfigError: the metadata say what this family is not."""
        if "expert_count" not in self.fields and facts.raw("expert_count") not in (None, 0):
            raise facts.fail(
                "expert_count", facts.raw("expert_count"), "no such field: this architecture has no experts"
            )
        width = None if self.latent else facts.head_dim(only=WIDTH not in {**self.fields, **self.always})
        absent = {"attention.head_count_kv": facts.raw("attention.head_count"), WIDTH: width, **self.absent}
        found: dict[str, Any] = {"vocab_size": facts.vocab_size}
        found["tie_word_embeddings"] = facts.tied if self.tied is None else self.tied
        for key, name in self.fields.items():
            default = (absent[key](facts) if callable(absent[key]) else absent[key],) if key in absent else ()
            value = facts.layers if key == "block_count" else facts.value(key, *default)
            if value is not None:
                _put(found, name, value)
        found |= {name: f"blk.0.{tensor}.bias" in facts.shapes for name, tensor in self.biases.items()}
        if self.windows is not None:
            found |= self._read_windows(facts, self.windows(facts.layers))
        if self.rotary is not None:
            found |= self._read_rotary(facts, width)
        for name, value in self.assumed.items():
            _put(found, name, value(facts) if callable(value) else value)
        for key, value in self.always.items():
            wanted, stated = value(found) if callable(value) else value, facts.raw(key)
            if isinstance(wanted, list) and type(stated) in (bool, int):  # one value for all layers
                stated = [stated] * len(wanted)
            if stated is not None and not (stated == wanted or _is_close(stated, wanted)):
                raise facts.fail(key, stated, shown(wanted))
        return found

    def _read_windows(self, facts: GgufFacts, every: int | None) -> dict[str, Any]:
        """Each layer's, by the pattern that a file states or llama.cpp assumes."""
        layers, pattern = facts.layers, facts.raw(PATTERN)
        width = facts.value(WINDOW, *((None,) if self.unwindowed or every == 0 else ()))
        if every == 0 or width is None:
            return {"layer_types": ["full_attention"] * layers, **({"sliding_window": None} if every == 0 else {})}
        sliding = [pattern] * layers if isinstance(pattern, bool) else pattern
        if not isinstance(sliding, list) and every is not None:
            every = facts.integer(PATTERN, every)
            sliding = [(layer + 1) % every != 0 for layer in range(layers)]
        sliding = sliding if isinstance(sliding, list) else []
        if len(sliding) != layers or any(type(each) is not bool for each in sliding):
            raise facts.fail(PATTERN, pattern, f"a list of {layers} booleans, or a number N: every N-th layer differs")
        types = ["sliding_attention" if each else "full_attention" for each in sliding]
        return {"sliding_window": width, "layer_types": types}

    def _read_rotary(self, facts: GgufFacts, width: int | None) -> dict[str, Any]:
        """What config.json says of positions, `width` that of a head."""
        assert self.rotary is not None
        dim = facts.integer("rope.dimension_count", width)
        if not self.rotary.part and width is not None:
            facts.require("rope.dimension_count", dim, width)
        base = facts.number("rope.freq_base", 10_000.0)
        scaling = read_scaling(facts, dim, base, self.divisors, latent=self.latent)
        if self.by_kind:
            local = facts.number(LOCAL_BASE, self.absent[LOCAL_BASE]) if LOCAL_BASE in self.absent else base
            kinds = {"full_attention": {"rope_theta": base, **(scaling or {"rope_type": "default"})}}
            return {"rope_parameters": {**kinds, "sliding_attention": {"rope_theta": local, "rope_type": "default"}}}
        found = write_rotary(Rotary(dim=dim, base=base), width or dim, self.rotary)
        return found if scaling is None else {**found, "rope_scaling": scaling}

    # --- a tree -> metadata ---

    def metadata(self, spec: ModelSpec) -> dict[str, Value]:
        """The metadata of a tree, keys with the architecture's prefix. Raises CannotExpress."""
        if self.square:
            attention = of_kind(spec.blocks[0].attention, Attention)
            if attention.heads * attention.head_dim != spec.hidden_size:
                raise CannotExpress(
                    f"llama.cpp needs a hidden size of heads · head_dim ({attention.heads} · {attention.head_dim}), "
                    f"but it is {spec.hidden_size}"
                )
        config = self.architecture.write(spec)
        found: dict[str, Value | None] = {key: _get(config, name) for key, name in self.fields.items()}
        if WIDTH in self.fields:
            found["attention.value_length"] = found[WIDTH]
        found |= {key: value(config) if callable(value) else value for key, value in self.always.items()}
        if self.windows is not None:
            found |= self._write_windows(config, self.windows(len(spec.blocks)))
        if self.rotary is not None:
            full, local = _turned(spec)
            found |= write_rope(full, config.get("rope_scaling") if self.latent else None) if full is not None else {}
            if LOCAL_BASE in self.absent and local is not None:
                found[LOCAL_BASE] = local.base
        return {f"{self.name}.{key}": value for key, value in found.items() if value is not None}

    def _write_windows(self, config: Mapping[str, Any], every: int | None) -> dict[str, Value | None]:
        """The window, and which layers have one where that is not what llama.cpp assumes."""
        sliding = [each == "sliding_attention" for each in config["layer_types"]]
        if every == 0 or (self.unwindowed and not any(sliding)):
            return {}
        usual = every is not None and sliding == [(layer + 1) % every != 0 for layer in range(len(sliding))]
        return {WINDOW: config["sliding_window"], PATTERN: None if usual else sliding}

    def extras(self, spec: ModelSpec) -> dict[str, tuple[float, ...]]:
        """The tensors that stand for numbers of a tree."""
        return {} if self.rotary is None else rope_tensors(_turned(spec)[0], self.divisors)

    def back(self, spec: ModelSpec) -> ModelSpec:
        """The tree of a file that this one was written to; what GGUF says in another way, or rounds to fp32, to the
        same effect is as it was. Raises CannotExpress, ConfigError.
        """
        extras = self.extras(spec)
        shapes: dict[str, Shape] = {leaf.checkpoint: leaf.shape for leaf in self.bind(spec)}
        shapes |= {name: (len(values),) for name, values in extras.items()}
        stored = {key: fp32(value) if isinstance(value, float) else value for key, value in self.metadata(spec).items()}
        found, _ = self.spec_of(GgufFacts(self.name, stored, shapes, lambda name: tuple(map(fp32, extras[name]))))
        back: ModelSpec = _as_before(spec, _as_stored(spec), found)
        return back

    def spec_of(self, facts: GgufFacts) -> tuple[ModelSpec, dict[str, Any]]:
        """The tree of a file of this family, and its config.json, in which no field of the tree is missing. Raises
        ConfigError.
        """
        family = self.architecture
        config = {"model_type": family.name, "architectures": [family.hf_class], **self.read(facts)}
        try:
            spec = family.spec(config)
            return _one_eps(spec) if self.latent else spec, _completed(config, family.write(spec))
        except ConfigError as error:
            # The message speaks of a config.json, which lies nowhere.
            raise ConfigError(
                f"the GGUF metadata is invalid. As a config.json, it would have this error: {error.message}", error.hint
            ) from error


def _completed(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with what it lacks of these fields, and what the objects in it lack.

    transformers builds some families from no less (DBRX's `attn_config.rope_theta`).
    """
    both = {
        name: {**value, **config[name]}
        for name, value in fields.items()
        if isinstance(value, Mapping) and isinstance(config.get(name), Mapping)
    }
    return {**fields, **config, **both}


def _get(config: Mapping[str, Any], name: str) -> Any:
    """What a config.json says in a field, a dot going into an object; None where it says nothing."""
    outer, _, inner = name.rpartition(".")
    return (config[outer] if outer else config).get(inner)


def _put(config: dict[str, Any], name: str, value: Any) -> None:
    """Say it there."""
    outer, _, inner = name.rpartition(".")
    if outer:
        config[outer] = config.get(outer) or {}
    (config[outer] if outer else config)[inner] = value


def _one_eps(spec: ModelSpec) -> ModelSpec:
    """The tree with latents normed by the eps of other norms, as llama.cpp does; transformers has one of its own."""
    blocks = []
    for block in spec.blocks:
        eps, attention = block.attention_norm.eps, block.attention
        norms = {name: getattr(attention, name) for name in ("q_norm", "kv_norm")}
        alike = {name: msgspec.structs.replace(norm, eps=eps) for name, norm in norms.items() if norm is not None}
        blocks.append(block.replaced(attention=msgspec.structs.replace(attention, **alike)))
    return msgspec.structs.replace(spec, blocks=tuple(blocks))


def shifted(spec: ModelSpec) -> set[str]:
    """The weights of norms that multiply by 1 + weight, by shared names: GGUF has the factor."""
    nodes = spec.nodes()
    return {f"{path}.weight" for path, node in nodes if isinstance(node, Norm) and node.gain == "1 + weight"}


def _turned(spec: ModelSpec) -> tuple[Rotary | None, Rotary | None]:
    """The rotary positions of layers that see all tokens, or of any where these have none, and of those in windows."""
    found: dict[bool, Rotary] = {}
    for block in spec.blocks:
        if block.attention.position is not None:
            rotary = of_kind(block.attention.position, Rotary)
            found.setdefault(block.attention.window is not None, rotary)
    return found.get(False, found.get(True)), found.get(True)


def _as_before(spec: Any, stored: Any, found: Any) -> Any:
    """A tree that was read, with the original's values where it says what `stored` does, but for rounding to fp32."""
    if isinstance(found, Component) and type(spec) is type(stored) is type(found):
        names = found.__struct_fields__
        fields = {name: _as_before(*(getattr(each, name) for each in (spec, stored, found))) for name in names}
        return type(found)(**fields)
    if isinstance(found, tuple) and isinstance(stored, tuple) and len(stored) == len(found):
        return tuple(_as_before(*each) for each in zip(spec, stored, found, strict=True))
    return spec if stored == found or _is_close(stored, found) else found


def _as_stored(spec: ModelSpec) -> ModelSpec:
    """The tree with what GGUF says in another way, to the same effect, put as it comes back."""
    context = spec.context_length or spec.hidden_size  # BLOOM may know none, and the converter takes its width
    blocks = []
    for block in spec.blocks:
        attention = block.attention
        # A window that reaches over the whole context hides nothing.
        idle = attention.window is not None and attention.window >= context and not getattr(attention, "chunked", False)
        window = None if idle else attention.window
        attention = msgspec.structs.replace(attention, window=window, position=refitted(attention.position))
        blocks.append(block.replaced(attention=attention))
    return msgspec.structs.replace(spec, blocks=tuple(blocks), context_length=context)


def _is_close(a: Any, b: Any) -> bool:
    """Whether two values are one number, but for its rounding to fp32."""
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (a, b))
    return numbers and (math.isclose(a, b, rel_tol=2e-7) if isinstance(a, float) or isinstance(b, float) else a == b)
