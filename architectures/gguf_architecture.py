"""Convert between trees of a family and GGUF files of one of llama.cpp's architectures, as `gguf_table` describes.

Source: llama.cpp, src/models/*.cpp and llama-model.cpp (which keys are read, and their defaults).
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

FieldOfFile = Callable[[GgufFacts], Any]  # computes a field of config.json that has no key

_KeyOfConfig = Callable[[Mapping[str, Any]], Value | None]  # computes the value of a key from a config.json

ALWAYS_FP32 = (".bias", "position_embd.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "_norm.weight")
"""Suffixes of matrices that llama.cpp's converter writes as fp32, like all tensors of one dimension."""

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
    """An architecture of llama.cpp, as the target (`obstacles.Destination`) for the trees of one family.

    The metadata of a file have the same contents as the family's config.json, under other names. gptkit converts them
    to a config.json, and the family reads the tree from that.
    """

    name: str
    """The value of general.architecture, and the prefix of the metadata keys."""
    leaves: tuple[Leaf, ...]
    """The tensors of files."""
    fields: Mapping[str, str]
    """Metadata keys -> fields of config.json. "inner.name" is the field `name` of the object `inner`."""
    family: str = ""
    """The family that files are read as, by default the one with the same name."""
    absent: Mapping[str, Any] = field(default_factory=dict)
    """Keys -> the values that llama.cpp assumes if a file lacks them. All other keys are required."""
    always: Mapping[str, Value | _KeyOfConfig] = field(default_factory=dict)
    """Keys -> their constant value, or a function that computes the value from a config.json."""
    assumed: Mapping[str, Any | FieldOfFile] = field(default_factory=dict)
    """Config fields without a key -> their value, or a function that computes the value from a file."""
    biases: Mapping[str, str] = field(default_factory=dict)
    """Config fields that say whether there are biases -> a tensor of the first layer, which has a bias if the field is
    true."""
    signs: tuple[str, ...] = ()
    """Keys that a file has only if its model is of this family. Integers in `always` must agree, too. In the table,
    rows with `signs` come before other rows of the same name."""
    rotary: RotaryKind | None = USUAL_ROTARY
    """How the family's config.json describes rotary positions. None if it has none."""
    by_kind: bool = False
    """Whether layers with a window have their own entry in `rope_parameters`. Their RoPE has no scaling. If `absent`
    has the key of their RoPE base (`LOCAL_BASE`), files state this base."""
    divisors: tuple[str, ...] = ()
    """The RoPE scalings that llama.cpp reads from a tensor: "llama3", "longrope" or "proportional"."""
    windows: Callable[[int], int | None] | None = None
    """Returns N, given the number of layers, if every N-th layer has no window. It returns 0 if no layer has a window,
    and None if a file must list the layers with a window. The function itself is None if the family has no windows."""
    unwindowed: bool = False
    """Whether a file may state no window at all."""
    numbers: tuple[str, ...] = ()
    """Keys without the architecture's prefix whose values have one number per layer. In the tree, each of these numbers
    is a tensor, named by the key and the layer."""
    tied: bool | None = None
    """Whether the head is tied to the token embedding. None if both are possible."""
    square: bool = False
    """Whether llama.cpp requires that all query heads together are as wide as the hidden states."""
    latent: bool = False
    """Whether the model has latent attention. Then separate fields state the widths of heads, and a key states the
    factor by which YaRN scales the attention scores."""
    also: tuple[str, ...] = ()
    """Further families whose models are saved in GGUF files of this architecture."""

    @property
    def reads(self) -> str:
        """The name of the family as which files are read."""
        return self.family or self.name

    @property
    def written(self) -> tuple[str, ...]:
        """The names of the families whose models are saved in GGUF files of this architecture."""
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
        """The names of tensors that a file may have, and that gptkit does not need for the tree."""
        return () if self.rotary is None else _ROPE_BUFFERS

    def bind(self, spec: ModelSpec) -> list[BoundLeaf]:
        """Return the weight map of a file for a tree. Raises CannotExpress if a shared tensor has no name in GGUF."""
        return bind(self.owner, self.leaves, spec)

    # --- metadata -> config.json ---

    def fits(self, facts: GgufFacts) -> bool:
        """Return whether the model in a file of this architecture is of this family."""
        fixed = {key: value for key, value in self.always.items() if isinstance(value, int)}
        return all(facts.raw(key) is not None for key in self.signs) and all(
            facts.raw(key) in (None, value) for key, value in fixed.items()
        )

    def read(self, facts: GgufFacts) -> dict[str, Any]:
        """Return the fields of a config.json. Raises ConfigError if the metadata contradict the family."""
        if "expert_count" not in self.fields and facts.raw("expert_count") not in (None, 0):
            raise facts.fail(
                "expert_count", facts.raw("expert_count"), "no such field: this architecture has no experts"
            )
        width = None if self.latent else facts.head_dim(only=WIDTH not in {**self.fields, **self.always})
        config = self._read_fields(facts, width)
        config |= {name: f"blk.0.{tensor}.bias" in facts.shapes for name, tensor in self.biases.items()}
        if self.windows is not None:
            config |= self._read_windows(facts, self.windows(facts.layers))
        if self.rotary is not None:
            config |= self._read_rotary(facts, width)
        for name, value in self.assumed.items():
            _put(config, name, value(facts) if callable(value) else value)
        self._check_constants(facts, config)
        return config

    def _read_fields(self, facts: GgufFacts, width: int | None) -> dict[str, Any]:
        """Return the config fields that have a key or follow from the tensors. `width` is the width of a head."""
        absent = {"attention.head_count_kv": facts.raw("attention.head_count"), WIDTH: width, **self.absent}
        config: dict[str, Any] = {"vocab_size": facts.vocab_size}
        config["tie_word_embeddings"] = facts.tied if self.tied is None else self.tied
        for key, name in self.fields.items():
            default = (absent[key](facts) if callable(absent[key]) else absent[key],) if key in absent else ()
            value = facts.layers if key == "block_count" else facts.value(key, *default)
            if value is not None:
                _put(config, name, value)
        return config

    def _check_constants(self, facts: GgufFacts, config: Mapping[str, Any]) -> None:
        """Raise ConfigError if the value of a key in `always` is not the one that follows from the config."""
        for key, value in self.always.items():
            wanted, stated = value(config) if callable(value) else value, facts.raw(key)
            if isinstance(wanted, list) and type(stated) in (bool, int):  # one value for all layers
                stated = [stated] * len(wanted)
            if stated is not None and not (stated == wanted or _is_close(stated, wanted)):
                raise facts.fail(key, stated, shown(wanted))

    def _read_windows(self, facts: GgufFacts, every: int | None) -> dict[str, Any]:
        """Return the config fields of the windows, from the pattern that the file states or llama.cpp assumes.

        `every` is the result of `windows`.
        """
        layers, pattern = facts.layers, facts.raw(PATTERN)
        width = facts.value(WINDOW, *((None,) if self.unwindowed or every == 0 else ()))
        if every == 0 or width is None:
            return {"layer_types": ["full_attention"] * layers, **({"sliding_window": None} if every == 0 else {})}
        sliding = [pattern] * layers if isinstance(pattern, bool) else pattern
        if not isinstance(sliding, list) and every is not None:
            every = facts.integer(PATTERN, every)
            sliding = [(layer + 1) % every != 0 for layer in range(layers)]
        sliding = sliding if isinstance(sliding, list) else []
        if len(sliding) != layers or any(type(has_window) is not bool for has_window in sliding):
            raise facts.fail(
                PATTERN, pattern, f"a list of {layers} booleans, or N if every N-th layer has full attention"
            )
        types = ["sliding_attention" if has_window else "full_attention" for has_window in sliding]
        return {"sliding_window": width, "layer_types": types}

    def _read_rotary(self, facts: GgufFacts, width: int | None) -> dict[str, Any]:
        """Return the config fields of RoPE. `width` is the width of a head."""
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
        fields = write_rotary(Rotary(dim=dim, base=base), width or dim, self.rotary)
        return fields if scaling is None else {**fields, "rope_scaling": scaling}

    # --- a tree -> metadata ---

    def metadata(self, spec: ModelSpec) -> dict[str, Value]:
        """Return the metadata of a tree. The keys have the architecture's prefix. Raises CannotExpress."""
        if self.square:
            attention = of_kind(spec.blocks[0].attention, Attention)
            if attention.heads * attention.head_dim != spec.hidden_size:
                raise CannotExpress(
                    f"llama.cpp needs a hidden size of heads · head_dim ({attention.heads} · {attention.head_dim}), "
                    f"but it is {spec.hidden_size}"
                )
        config = self.architecture.write(spec)
        values: dict[str, Value | None] = {key: _get(config, name) for key, name in self.fields.items()}
        if WIDTH in self.fields:
            values["attention.value_length"] = values[WIDTH]
        values |= {key: value(config) if callable(value) else value for key, value in self.always.items()}
        if self.windows is not None:
            values |= self._write_windows(config, self.windows(len(spec.blocks)))
        if self.rotary is not None:
            full, local = _rotaries(spec)
            values |= write_rope(full, config.get("rope_scaling") if self.latent else None) if full is not None else {}
            if LOCAL_BASE in self.absent and local is not None:
                values[LOCAL_BASE] = local.base
        return {f"{self.name}.{key}": value for key, value in values.items() if value is not None}

    def _write_windows(self, config: Mapping[str, Any], every: int | None) -> dict[str, Value | None]:
        """Return the keys of the window's width and of the layers with a window. `every` is the result of `windows`.

        If llama.cpp assumes the same layers by default, the key of the layers is None.
        """
        sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
        if every == 0 or (self.unwindowed and not any(sliding)):
            return {}
        usual = every is not None and sliding == [(layer + 1) % every != 0 for layer in range(len(sliding))]
        return {WINDOW: config["sliding_window"], PATTERN: None if usual else sliding}

    def extras(self, spec: ModelSpec) -> dict[str, tuple[float, ...]]:
        """Return tensors that encode numbers of the tree, such as rope factors."""
        return {} if self.rotary is None else rope_tensors(_rotaries(spec)[0], self.divisors)

    def back(self, spec: ModelSpec) -> ModelSpec:
        """Write a tree and return the tree that gptkit reads from the file. Raises CannotExpress, ConfigError.

        If a value comes back in an equivalent form (rounded to fp32, or in another notation), the result has the value
        of `spec`.
        """
        extras = self.extras(spec)
        shapes: dict[str, Shape] = {leaf.checkpoint: leaf.shape for leaf in self.bind(spec)}
        shapes |= {name: (len(values),) for name, values in extras.items()}
        stored = {key: fp32(value) if isinstance(value, float) else value for key, value in self.metadata(spec).items()}
        tree, _ = self.spec_of(GgufFacts(self.name, stored, shapes, lambda name: tuple(map(fp32, extras[name]))))
        back: ModelSpec = _as_before(spec, _as_stored(spec), tree)
        return back

    def spec_of(self, facts: GgufFacts) -> tuple[ModelSpec, dict[str, Any]]:
        """Return the tree of a file of this family, and its complete config.json. Raises ConfigError."""
        family = self.architecture
        config = {"model_type": family.name, "architectures": [family.hf_class], **self.read(facts)}
        try:
            spec = family.spec(config)
            return _one_eps(spec) if self.latent else spec, _completed(config, family.write(spec))
        except ConfigError as error:
            # The message is about a config.json, which the user does not have.
            raise ConfigError(
                f"the GGUF metadata is invalid. As a config.json, it would have this error: {error.message}", error.hint
            ) from error


def _completed(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json to which these fields are added if it lacks them, also inside of objects.

    transformers requires some of them (DBRX's `attn_config.rope_theta`).
    """
    both = {
        name: {**value, **config[name]}
        for name, value in fields.items()
        if isinstance(value, Mapping) and isinstance(config.get(name), Mapping)
    }
    return {**fields, **config, **both}


def _get(config: Mapping[str, Any], name: str) -> Any:
    """Return the value of a field of config.json, or None. "inner.name" is the field `name` of the object `inner`."""
    outer, _, inner = name.rpartition(".")
    return (config[outer] if outer else config).get(inner)


def _put(config: dict[str, Any], name: str, value: Any) -> None:
    """Set a field of config.json. "inner.name" is the field `name` of the object `inner`."""
    outer, _, inner = name.rpartition(".")
    if outer:
        config[outer] = config.get(outer) or {}
    (config[outer] if outer else config)[inner] = value


def _one_eps(spec: ModelSpec) -> ModelSpec:
    """Return the tree with the same eps in the norms of latents as in other norms. llama.cpp has only one eps."""
    blocks = []
    for block in spec.blocks:
        eps, attention = block.attention_norm.eps, block.attention
        norms = {name: getattr(attention, name) for name in ("q_norm", "kv_norm")}
        alike = {name: msgspec.structs.replace(norm, eps=eps) for name, norm in norms.items() if norm is not None}
        blocks.append(block.replaced(attention=msgspec.structs.replace(attention, **alike)))
    return msgspec.structs.replace(spec, blocks=tuple(blocks))


def shifted(spec: ModelSpec) -> set[str]:
    """Return the shared names of norm weights that multiply by 1 + weight. GGUF stores 1 + weight."""
    nodes = spec.nodes()
    return {f"{path}.weight" for path, node in nodes if isinstance(node, Norm) and node.gain == "1 + weight"}


def _rotaries(spec: ModelSpec) -> tuple[Rotary | None, Rotary | None]:
    """Return the RoPE of the first layer without a window, and of the first layer with one, or None if there is none.

    If all layers have a window, both are the same.
    """
    rotaries: dict[bool, Rotary] = {}
    for block in spec.blocks:
        if block.attention.position is not None:
            rotary = of_kind(block.attention.position, Rotary)
            rotaries.setdefault(block.attention.window is not None, rotary)
    return rotaries.get(False, rotaries.get(True)), rotaries.get(True)


def _as_before(spec: Any, stored: Any, read: Any) -> Any:
    """Return the tree `read`, with the values of `spec` in fields in which `read` equals `stored` up to fp32 rounding.

    Args:
        spec: the original tree.
        stored: this tree in the notation of GGUF (see `_as_stored`).
        read: the tree that was read from the file.
    """
    if isinstance(read, Component) and type(spec) is type(stored) is type(read):
        names = read.__struct_fields__
        fields = {name: _as_before(*(getattr(tree, name) for tree in (spec, stored, read))) for name in names}
        return type(read)(**fields)
    if isinstance(read, tuple) and isinstance(stored, tuple) and len(stored) == len(read):
        return tuple(_as_before(*trees) for trees in zip(spec, stored, read, strict=True))
    return spec if stored == read or _is_close(stored, read) else read


def _as_stored(spec: ModelSpec) -> ModelSpec:
    """Return the tree in the notation of GGUF, in which some equivalent trees are the same."""
    # BLOOM may have no context length, and then llama.cpp's converter writes the hidden size.
    context = spec.context_length or spec.hidden_size
    blocks = []
    for block in spec.blocks:
        attention = block.attention
        # A window as long as the context has no effect.
        idle = attention.window is not None and attention.window >= context and not getattr(attention, "chunked", False)
        window = None if idle else attention.window
        attention = msgspec.structs.replace(attention, window=window, position=refitted(attention.position))
        blocks.append(block.replaced(attention=attention))
    return msgspec.structs.replace(spec, blocks=tuple(blocks), context_length=context)


def _is_close(a: Any, b: Any) -> bool:
    """Return whether two values are the same number up to rounding to fp32."""
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (a, b))
    return numbers and (math.isclose(a, b, rel_tol=2e-7) if isinstance(a, float) or isinstance(b, float) else a == b)
