"""Convert a ModelSpec of one family to the contents of a GGUF file and back, as `gguf_table` describes.

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
"""The ends of the names of matrices that llama.cpp's converter writes as fp32. It writes all tensors of one dimension
as fp32, too."""

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
    """How models of one family are stored in GGUF files of one of llama.cpp's architectures.

    The metadata of a file have the same contents as the family's config.json, under other names. gptkit converts them
    to a config.json, from which the family makes the ModelSpec. This class has the methods of a `Destination`, so that
    gptkit can find out which models GGUF can express.
    """

    name: str
    """The name of llama.cpp's architecture. It is the value of general.architecture, and the prefix of the metadata
    keys."""
    leaves: tuple[Leaf, ...]
    """The table of the tensors that files may have."""
    fields: Mapping[str, str]
    """Metadata keys -> fields of config.json. "inner.name" is the field `name` of the object `inner`."""
    family: str = ""
    """The family of the models in such files. "" is the family with the name of the architecture."""
    absent: Mapping[str, Any] = field(default_factory=dict)
    """Metadata keys -> the values that llama.cpp assumes if a file lacks them. All other keys are required."""
    always: Mapping[str, Value | _KeyOfConfig] = field(default_factory=dict)
    """Metadata keys -> their constant value, or a function that computes the value from a config.json."""
    assumed: Mapping[str, Any | FieldOfFile] = field(default_factory=dict)
    """Config fields that have no metadata key -> their value, or a function that computes the value from a file."""
    biases: Mapping[str, str] = field(default_factory=dict)
    """Config fields that say whether modules have biases -> llama.cpp's name of such a module. The field is true if the
    first layer in a file has this module's bias."""
    signs: tuple[str, ...] = ()
    """Metadata keys that a file has only if its model is of this family. Integers in `always` must agree, too. In the
    table, rows with `signs` come before other rows of the same name."""
    rotary: RotaryKind | None = USUAL_ROTARY
    """How the family's config.json describes RoPE. None if the family has no RoPE."""
    by_kind: bool = False
    """Whether `rope_parameters` in config.json has an entry of its own for layers with a window. The RoPE of these
    layers is not scaled. If `absent` has the key of their RoPE base (`LOCAL_BASE`), files state this base."""
    divisors: tuple[str, ...] = ()
    """The kinds of RoPE scaling whose frequency divisors llama.cpp reads from a tensor of the file: "llama3",
    "longrope" or "proportional"."""
    windows: Callable[[int], int | None] | None = None
    """Returns, for a number of layers, which layers have no window: N means every N-th layer, and 0 means that no layer
    has a window. None means that a file must list the layers with a window. The function itself is None if the family
    has no windows."""
    unwindowed: bool = False
    """Whether the model in a file may have no window in any layer."""
    numbers: tuple[str, ...] = ()
    """Metadata keys whose values are lists with one number per layer. In a ModelSpec, each of these numbers is a
    tensor. The keys have no architecture prefix. gptkit treats every number like a file's tensor with the name
    "key.layer"."""
    tied: bool | None = None
    """Whether the head is tied to the token embedding. None if both are possible."""
    square: bool = False
    """Whether llama.cpp requires that all query heads together are as wide as the hidden states."""
    latent: bool = False
    """Whether the model has latent attention. If so, config.json has separate fields for the widths of heads, and a
    metadata key states the factor by which YaRN scales the attention scores."""
    also: tuple[str, ...] = ()
    """Further families whose models gptkit writes as GGUF files of this architecture."""

    @property
    def reads(self) -> str:
        """The name of the family that gptkit assigns to such files when it reads them."""
        return self.family or self.name

    @property
    def written(self) -> tuple[str, ...]:
        """The names of the families whose models gptkit writes as GGUF files of this architecture."""
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
        """Templates of the names of tensors that a file may have, and that are not needed to build the ModelSpec."""
        return () if self.rotary is None else _ROPE_BUFFERS

    def bind(self, spec: ModelSpec) -> list[BoundLeaf]:
        """Return which tensors the file of a model has, and which parameters every tensor contains.

        Raises CannotExpress if a parameter has no name in GGUF.
        """
        return bind(self.owner, self.leaves, spec)

    # --- metadata -> config.json ---

    def fits(self, facts: GgufFacts) -> bool:
        """Return whether a file of this architecture contains a model of this family.

        Other families may use the same architecture. `facts` is the header of the file.
        """
        fixed = {key: value for key, value in self.always.items() if isinstance(value, int)}
        return all(facts.raw(key) is not None for key in self.signs) and all(
            facts.raw(key) in (None, value) for key, value in fixed.items()
        )

    def read(self, facts: GgufFacts) -> dict[str, Any]:
        """Return the config.json fields that the header of a file describes.

        Raises ConfigError if the metadata contradict the family.
        """
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
        """Return the config fields that have a metadata key, and those that follow from the tensors in the file.

        Args:
            facts: the header of the file.
            width: the width of a head, or None if separate fields state it.
        """
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
        """Raise ConfigError if a metadata key in `always` has another value than gptkit would write for the config."""
        for key, value in self.always.items():
            wanted, stated = value(config) if callable(value) else value, facts.raw(key)
            if isinstance(wanted, list) and type(stated) in (bool, int):  # one value for all layers
                stated = [stated] * len(wanted)
            if stated is not None and not (stated == wanted or _is_close(stated, wanted)):
                raise facts.fail(key, stated, shown(wanted))

    def _read_windows(self, facts: GgufFacts, every: int | None) -> dict[str, Any]:
        """Return the config fields of attention windows.

        Args:
            facts: the header of the file. It may list the layers with a window. Otherwise llama.cpp's default applies.
            every: this default, as the function `windows` returns it.
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
        """Return the config fields of RoPE.

        Args:
            facts: the header of the file.
            width: the width of a head, or None if separate fields state it.
        """
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
        """Return the metadata for a model. The keys have the architecture's prefix.

        Raises:
            CannotExpress: the family has no config for the model, or llama.cpp does not support its sizes.
        """
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
        """Return the metadata for attention windows: their width, and for every layer whether it has a window.

        The value for the layers is None if llama.cpp assumes these layers by default.

        Args:
            config: the config.json of the model.
            every: llama.cpp's default, as the function `windows` returns it.
        """
        sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
        if every == 0 or (self.unwindowed and not any(sliding)):
            return {}
        usual = every is not None and sliding == [(layer + 1) % every != 0 for layer in range(len(sliding))]
        return {WINDOW: config["sliding_window"], PATTERN: None if usual else sliding}

    def extras(self, spec: ModelSpec) -> dict[str, tuple[float, ...]]:
        """Return the tensors of a file that contain no weights, but numbers that describe the model (RoPE factors)."""
        return {} if self.rotary is None else rope_tensors(_rotaries(spec)[0], self.divisors)

    def back(self, spec: ModelSpec) -> ModelSpec:
        """Convert a model to the contents of a GGUF file, and return the ModelSpec that gptkit reads from these.

        If a value comes back in an equivalent form (rounded to fp32, or in another notation), the result has the value
        of `spec`. Raises CannotExpress, ConfigError.
        """
        extras = self.extras(spec)
        shapes: dict[str, Shape] = {leaf.checkpoint: leaf.shape for leaf in self.bind(spec)}
        shapes |= {name: (len(values),) for name, values in extras.items()}
        stored = {key: fp32(value) if isinstance(value, float) else value for key, value in self.metadata(spec).items()}
        tree, _ = self.spec_of(GgufFacts(self.name, stored, shapes, lambda name: tuple(map(fp32, extras[name]))))
        back: ModelSpec = _as_before(spec, _as_stored(spec), tree)
        return back

    def spec_of(self, facts: GgufFacts) -> tuple[ModelSpec, dict[str, Any]]:
        """Return the ModelSpec for a file of this family, and its complete config.json. Raises ConfigError."""
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
    """Return a config.json with those of the given fields that it lacks. Objects in it are completed in the same way.

    transformers requires some of these fields (DBRX's `attn_config.rope_theta`).
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
    """Return the model with one eps for all norms of a layer, also those of latents. llama.cpp has only one eps."""
    blocks = []
    for block in spec.blocks:
        eps, attention = block.attention_norm.eps, block.attention
        norms = {name: getattr(attention, name) for name in ("q_norm", "kv_norm")}
        alike = {name: msgspec.structs.replace(norm, eps=eps) for name, norm in norms.items() if norm is not None}
        blocks.append(block.replaced(attention=msgspec.structs.replace(attention, **alike)))
    return msgspec.structs.replace(spec, blocks=tuple(blocks))


def shifted(spec: ModelSpec) -> set[str]:
    """Return the names of norm weights that a model adds 1 to before it multiplies by them. GGUF stores 1 + weight."""
    nodes = spec.nodes()
    return {f"{path}.weight" for path, node in nodes if isinstance(node, Norm) and node.gain == "1 + weight"}


def _rotaries(spec: ModelSpec) -> tuple[Rotary | None, Rotary | None]:
    """Return the RoPE of layers without a window, and that of layers with one, or None.

    Both are taken from the first such layer that has RoPE. If no layer without a window has RoPE, the first value is
    that of layers with a window, too.
    """
    rotaries: dict[bool, Rotary] = {}
    for block in spec.blocks:
        if block.attention.position is not None:
            rotary = of_kind(block.attention.position, Rotary)
            rotaries.setdefault(block.attention.window is not None, rotary)
    return rotaries.get(False, rotaries.get(True)), rotaries.get(True)


def _as_before(spec: Any, stored: Any, read: Any) -> Any:
    """Return the model `read`, with original values in fields whose value did not change in the file.

    A value did not change if it equals that of `stored` up to fp32 rounding.

    Args:
        spec: the original model, or a part of it.
        stored: the same model as GGUF expresses it (see `_as_stored`).
        read: the model that was read from the file.
    """
    if isinstance(read, Component) and type(spec) is type(stored) is type(read):
        names = read.__struct_fields__
        fields = {name: _as_before(*(getattr(tree, name) for tree in (spec, stored, read))) for name in names}
        return type(read)(**fields)
    if isinstance(read, tuple) and isinstance(stored, tuple) and len(stored) == len(read):
        return tuple(_as_before(*trees) for trees in zip(spec, stored, read, strict=True))
    return spec if stored == read or _is_close(stored, read) else read


def _as_stored(spec: ModelSpec) -> ModelSpec:
    """Return the model as it comes back from a GGUF file, which changes some values to equivalent ones."""
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
    """Return whether two values are the same number, up to rounding to fp32."""
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (a, b))
    return numbers and (math.isclose(a, b, rel_tol=2e-7) if isinstance(a, float) or isinstance(b, float) else a == b)
