"""What vLLM would do with the tensors of a checkpoint, by its source, which is read and never imported: a worker of
`confinement`.

A model's class is followed through what its `__init__` assigns, under the conditions that config.json decides; where it
does not, all that may be assigned stands side by side. Expressions of plain values (config, strings, mappers of names)
are evaluated with nothing but such values in reach. Of `load_weights` those are read that hand the names on to
`AutoWeightsLoader`, through functions and mappers of names; of any other it is said that it is not read.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .confinement import allow

_READING = (2**30, 0, 60.0, 0.0)  # a large model takes 2 seconds and 100 MB
_OURS = ("vllm.model_executor.models", "vllm.models")
_DEEP = 40
_WEIGHT = ("weight",)
_LAYERS: dict[str, tuple[str, ...]] = {
    "LinearBase": _WEIGHT,
    "VocabParallelEmbedding": _WEIGHT,
    "RMSNorm": _WEIGHT,
    "GemmaRMSNorm": _WEIGHT,
}
_LAYERS |= {"LayerNorm": ("weight", "bias"), "torch.nn.LayerNorm": ("weight", "bias"), "torch.nn.Embedding": _WEIGHT}
_LAYERS |= {f"torch.nn.{name}": _WEIGHT for name in ("Linear", "Conv1d", "Conv2d", "Conv3d")}
"""Layers by their class or one above it, and their parameters; a `bias` besides where it is asked for."""
_UNCHECKED = ("LinearBase", "VocabParallelEmbedding")
"""Those that have a quant_method, and which `track_weights_loading` therefore does not hold to what was loaded."""
_EXPERTS = ("FusedMoEFactory", "FusedMoE", "SharedFusedMoE")
_SAME_NAMES = ("maybe_fuse_shared_experts", "skip_spec_layers", "list", "iter")
"""Functions of weights that change no name of a model that is loaded by one process on one GPU."""
_BUILTINS: tuple[Callable[..., Any], ...] = (any, all, len, int, str, bool, list, tuple, set, dict, range, enumerate)
_BUILTINS += (zip, min, max, sum, sorted, getattr, hasattr, isinstance)
_IMPURE = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.Lambda, ast.Global, ast.Nonlocal, ast.With, ast.While, ast.Try)
_LAYER_COUNTS = ("n_layer", "n_layers", "num_layers")


class _Untold(Exception):
    """What the source alone does not say, and in words why."""


_UNTOLD: Any = object()
_PARAMETER: Any = object()


class _Config(dict[str, Any]):
    """config.json. complete: what is not in it is not there; else classes have defaults of which nothing is known."""

    complete = False

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name) if self.complete else _Untold(name)
        if not isinstance(self[name], dict):
            return self[name]
        inner = _Config(self[name])
        inner.complete = self.complete
        return inner

    def get_text_config(self) -> Any:
        return self.text_config if "text_config" in self else self


@dataclass
class _Mapper:
    """vLLM's `WeightsMapper`: kinds of renaming in the order of their use."""

    orig_to_new_regex: dict[Any, Any] = field(default_factory=dict)
    orig_to_new_substr: dict[str, Any] = field(default_factory=dict)
    orig_to_new_stacked: dict[str, Any] = field(default_factory=dict)
    orig_to_new_prefix: dict[str, Any] = field(default_factory=dict)
    orig_to_new_suffix: dict[str, Any] = field(default_factory=dict)

    def __or__(self, other: "_Mapper") -> "_Mapper":
        return _Mapper(**{kind: {**table, **vars(other)[kind]} for kind, table in vars(self).items()})

    def renamed(self, name: str) -> tuple[str, list[Any]] | None:
        """A name as the model has it, and the shards of a parameter that it fills; None where it is left out."""
        shards: list[Any] = [None]
        for kind, table in vars(self).items():
            end = kind.rpartition("_")[2]
            for old, new in table.items():
                whole = old if end == "regex" else re.escape(old)
                if not re.search({"prefix": f"^{whole}", "suffix": f"{whole}$"}.get(end, whole), name):
                    continue
                if new is None:
                    return None
                if end == "regex":
                    name = old.sub(new, name)
                elif end == "suffix":
                    name = name.removesuffix(old) + new
                else:
                    name = name.replace(old, new[0] if end == "stacked" else new, 1)
                    shards = (new[1] if isinstance(new[1], list) else [new[1]]) if end == "stacked" else shards
        return name, shards


@dataclass(frozen=True, eq=False)
class _Settings:
    """vLLM's own configuration."""

    hf_config: _Config
    quantised: bool

    def __getattr__(self, name: str) -> Any:
        known = {"model_config": self, "hf_text_config": self.hf_config, "lora_config": None}
        known |= {} if self.quantised else {"quant_config": None}
        if name not in known:
            raise _Untold(name)
        return known[name]

    def with_hf_config(self, config: _Config, *_: Any, **__: Any) -> "_Settings":
        return _Settings(config, self.quantised)


_ALONE = SimpleNamespace(is_first_rank=True, is_last_rank=True, world_size=1, rank_in_group=0)
_KNOWN: dict[str, Any] = {"WeightsMapper": _Mapper, "re": SimpleNamespace(compile=re.compile), "logger": None}
_KNOWN |= {f"get_{kind}_group": lambda: _ALONE for kind in ("pp", "tp", "ep", "dp")}
_KNOWN |= {"get_tensor_model_parallel_world_size": lambda: 1, "get_tensor_model_parallel_rank": lambda: 0}
_KNOWN |= {"is_pp_missing_parameter": lambda *_: False, "TYPE_CHECKING": False}


@dataclass(frozen=True)
class _Class:
    """A class by its definition; of another package by its dotted name alone."""

    name: str
    module: str = ""
    node: ast.ClassDef | None = field(default=None, compare=False)


@dataclass(frozen=True, eq=False)
class _Function:
    node: ast.FunctionDef | ast.Lambda
    names: "_Names"


@dataclass(frozen=True, eq=False)
class _Constant:
    value: Any


@dataclass(eq=False)
class _Names:
    """What the names in a function of a module may stand for. this: the object that it is called on, `owner`'s."""

    module: str
    known: dict[str, list[Any]] = field(default_factory=dict)
    this: "_Part | None" = None
    owner: _Class | None = None
    returned: list[Any] = field(default_factory=list)


@dataclass(eq=False)
class _Part:
    """A module of a model. parts: what each attribute may be; sure: those that there are. elements, count:
    what those of a list may be, and how many there are. open: anything may lie in it besides.
    """

    kind: _Class
    parts: dict[str, list[Any]] = field(default_factory=dict)
    sure: frozenset[str] = frozenset()
    elements: list[Any] = field(default_factory=list)
    count: int | None = None
    open: bool = False
    layer: str = ""
    experts: tuple[str, ...] = ()


_Pair = tuple[str, str, Any]
"""A name as it is at this place, as the checkpoint has it, and the shard of a parameter that it fills."""
_Outcome = tuple[str, str, Any]
"""taken, ignored, unexpected or unread; the checkpoint's name; where, or why."""


@dataclass
class _Loading:
    """What becomes of a checkpoint's names. taken: parameters, each with the shards that fill it. unread: by what
    is not told. missing: parameters that nothing fills, and whether vLLM says so. halves: shards that nothing fills.
    """

    kind: str
    taken: dict[str, set[Any]] = field(default_factory=lambda: defaultdict(set))
    ignored: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    unexpected: list[str] = field(default_factory=list)
    unread: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    missing: dict[str, bool] = field(default_factory=dict)
    halves: list[str] = field(default_factory=list)


class _Source:
    """vLLM's source, by the folder of its package."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._modules: dict[str, dict[str, Any]] = {}
        self._closed: list[str] = []
        self._stacked: dict[str, Any] = {}
        self._first: dict[int, str] = {}
        self._shapes: Mapping[str, tuple[int, ...]] = {}
        self._deep = 0
        tables = self._definitions(f"{_OURS[0]}.registry")
        self.registry: dict[str, tuple[str, str]] = {}
        for name, node in tables.items():
            if name.endswith("_MODELS") and isinstance(node, ast.Dict) and None not in node.keys:
                self.registry |= {key: x for key, x in ast.literal_eval(node).items() if isinstance(x, tuple)}
        self.previous: dict[str, str] = ast.literal_eval(tables.get("_PREVIOUSLY_SUPPORTED_MODELS", ast.Dict([], [])))
        methods = self._definitions("vllm.model_executor.layers.quantization").get("QuantizationMethods", ast.Pass())
        self.quantisations = [each.value for each in ast.walk(methods) if isinstance(each, ast.Constant)]
        auto = self._definitions(f"{_OURS[0]}.utils").get("AutoWeightsLoader", ast.Pass())
        words = {
            each.value for each in ast.walk(auto) if isinstance(each, ast.Constant) and isinstance(each.value, str)
        }
        self._left_out = tuple(each for each in words if re.fullmatch(r"rotary\w*\.\w+", each))
        self._left_suffixes = tuple(words & {".bias"})

    def model(self, architecture: str, config: Mapping[str, Any], quantised: bool, complete: bool) -> _Part | None:
        """The model that vLLM makes for an architecture of its registry; None where its class is not in its source.
        complete: the config has all its class's fields.
        """
        told = _Config(config)
        told.complete = complete
        counts = [config[name] for name in _LAYER_COUNTS if name in config]
        told.setdefault("num_hidden_layers", counts[0]) if counts else None
        module, name = self.registry[architecture]
        kind = self._found(module if "." in module else f"{_OURS[0]}.{module}", name)
        made = self._part(kind, [], {"vllm_config": [_Constant(_Settings(told, quantised))]})
        return made if isinstance(made, _Part) and kind.node is not None else None

    # --- names of modules ---

    def _definitions(self, module: str) -> dict[str, Any]:
        """What a module defines: a statement or expression, or of another's names (module, name)."""
        if module not in self._modules:
            place = self._root.joinpath(*module.split(".")[1:])
            files = [place.with_suffix(".py"), place / "__init__.py"] if module.startswith("vllm.") else []
            file = next((each for each in files if each.is_file()), None)
            self._modules[module] = {}
            if file is not None:
                package = module if file.name == "__init__.py" else module.rpartition(".")[0]
                _define(ast.parse(file.read_bytes()).body, package, self._modules[module])
        return self._modules[module]

    def _found(self, module: str, name: str) -> Any:
        """A class or function, of another package a class by its dotted name; the value of an expression."""
        match self._definitions(module).get(name):
            case (str() as source, str() as wanted):
                return self._found(source, wanted)
            case ast.ClassDef() as node:
                return _Class(name, module, node)
            case ast.FunctionDef() as node:
                return _Function(node, _Names(module))
            case ast.expr() as node:
                self._modules[module][name] = ast.Constant(...)  # a definition by itself
                values = self._values(node, _Names(module))
                self._modules[module][name] = node
                return values[0]
        return _Class(f"{module}.{name}".lstrip("."))

    def _above(self, kind: _Class) -> list[_Class]:
        """A class and those above it, in the order in which Python looks."""
        bases = [] if kind.node is None else [self._values(base, _Names(kind.module))[0] for base in kind.node.bases]
        above = [each for base in bases if isinstance(base, _Class) for each in self._above(base)]
        return [kind, *(each for place, each in enumerate(above) if each not in above[place + 1 :])]

    def _member(self, kind: _Class, name: str, after: _Class | None = None) -> tuple[_Class, ast.AST] | None:
        """What a class, or the next `after` one of those above it, has of this name."""
        above = self._above(kind)
        for each in above[above.index(after) + 1 if after in above else 0 :]:
            names: dict[str, Any] = {}
            _define(each.node.body if each.node is not None else [], "", names)
            match names.get(name):
                case ast.Attribute(value=ast.Name(id=other), attr=same):  # load_weights = Other.load_weights
                    source = self._found(each.module, other)
                    return self._member(source, same) if isinstance(source, _Class) else None
                case ast.AST() as node:
                    return each, node
        return None

    # --- plain values ---

    def _plain(self, node: ast.expr, names: _Names) -> Any:
        """The value of an expression of plain values. Raises _Untold."""
        space = self._space(node, names)
        try:
            value = eval(compile(ast.Expression(node), "vLLM", "eval"), space)  # noqa: S307 (with nothing in reach)
        except Exception as error:
            raise _Untold(ast.unparse(node)) from error
        if isinstance(value, _This) or callable(value):
            raise _Untold(ast.unparse(node))
        return value

    def _space(self, node: ast.AST, names: _Names) -> dict[str, Any]:
        """The names that code of plain values may reach: Python's harmless functions, and such values and functions."""
        space: dict[str, Any] = {"__builtins__": {}}
        for each in ast.walk(node):
            hidden = isinstance(each, ast.Attribute) and ("__" in each.attr or "format" in each.attr)
            if hidden or isinstance(each, _IMPURE):
                raise _Untold(ast.unparse(each))
            if isinstance(each, ast.Name) and each.id not in space:
                with suppress(_Untold):
                    space[each.id] = self._plain_name(each.id, names)
        return space

    def _plain_name(self, name: str, names: _Names) -> Any:
        if name == "self" and names.this is not None:
            return _This(self, names.this)
        if name in names.known:
            values = names.known[name]
        elif name in _KNOWN:
            return _KNOWN[name]
        elif name in self._definitions(names.module):
            values = [self._found(names.module, name)]
        else:
            values = [_Constant(each) for each in _BUILTINS if each.__name__ == name]
        match values:
            case [_Constant(value=value)]:
                return value
            case [_Function(node=ast.FunctionDef() as node, names=inner)]:
                return self._plain_function(node, inner)
        raise _Untold(name)

    def _plain_function(self, node: ast.FunctionDef, names: _Names) -> Callable[..., Any]:
        """A function that does nothing but with plain values, which may be called. Raises _Untold."""
        if self._deep > _DEEP or not names.module.startswith(_OURS):
            raise _Untold(node.name)
        made = ast.parse(ast.unparse(node)).body[0]
        assert isinstance(made, ast.FunctionDef)
        made.decorator_list, made.returns = [], None
        for each in ast.walk(made):
            if isinstance(each, ast.arg):
                each.annotation = None
        self._deep += 1
        try:
            space = self._space(made, names)
        finally:
            self._deep -= 1
        exec(compile(ast.Module([made], []), "vLLM", "exec"), space)  # noqa: S102 (with nothing in reach)
        function: Callable[..., Any] = space[node.name]
        return function

    # --- what an expression may be ---

    def _values(self, node: ast.expr, names: _Names) -> list[Any]:
        try:
            return [_Constant(self._plain(node, names))]
        except _Untold:
            pass
        match node:
            case ast.Name():
                if node.id in names.known:
                    return names.known[node.id]
                return [self._found(names.module, node.id) if node.id in self._definitions(names.module) else _UNTOLD]
            case ast.Lambda():
                return [_Function(node, names)]
            case ast.IfExp():
                told = self._told(node.test, names)
                ways = [node.body, node.orelse] if told is None else [node.body if told else node.orelse]
                return [each for way in ways for each in self._values(way, names)]
            case ast.Attribute():
                return [x for held in self._values(node.value, names) for x in self._attribute(held, node.attr)]
            case ast.Call():
                return self._call(node, names)
            case ast.ListComp() | ast.GeneratorExp():
                inner = _Names(names.module, {**names.known}, names.this, names.owner)
                for name in (
                    each.id for x in node.generators for each in ast.walk(x.target) if isinstance(each, ast.Name)
                ):
                    inner.known[name] = [_UNTOLD]
                made = _Part(_Class("torch.nn.ModuleList"), elements=self._values(node.elt, inner))
                made.count = self._count(ast.ListComp(ast.Constant(0), node.generators), names)
                return [made]
            case ast.Tuple() | ast.List():
                return [_Constant([self._values(each, names) for each in node.elts])]
        return [_UNTOLD]

    def _count(self, node: ast.expr, names: _Names) -> int | None:
        try:
            told = self._plain(ast.fix_missing_locations(node), names)
        except _Untold:
            return None
        return len(told) if isinstance(told, list) else told if isinstance(told, int) else None

    def _attribute(self, held: Any, name: str) -> list[Any]:
        match held:
            case _Part() if name in held.parts:
                return held.parts[name]
            case _Part() if (found := self._member(held.kind, name)) is not None:
                if isinstance(found[1], ast.FunctionDef):
                    return [_Function(found[1], _Names(found[0].module, {}, held, found[0]))]
                return self._values(found[1], _Names(found[0].module)) if isinstance(found[1], ast.expr) else [_UNTOLD]
            case _Class() if held.node is None:
                return [self._found(held.name, name)]
        return [_UNTOLD]

    def _told(self, node: ast.expr, names: _Names) -> bool | None:
        """Whether a condition holds; None where that is not told."""
        try:
            return bool(self._plain(node, names))
        except _Untold:
            pass
        match node:
            case ast.BoolOp():
                told = [self._told(each, names) for each in node.values]
                decides = isinstance(node.op, ast.Or)
                return decides if decides in told else None if None in told else not decides
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inverse = self._told(operand, names)
                return None if inverse is None else not inverse
            case ast.Compare(
                left=left, ops=[ast.Is() | ast.IsNot() as operation], comparators=[ast.Constant(value=None)]
            ):
                values = self._values(left, names)
                return isinstance(operation, ast.IsNot) if all(isinstance(each, _Part) for each in values) else None
        return None

    # --- what a call makes ---

    def _call(self, node: ast.Call, names: _Names) -> list[Any]:
        given = [self._values(each, names) for each in node.args if not isinstance(each, ast.Starred)]
        named = {each.arg: self._values(each.value, names) for each in node.keywords if each.arg is not None}
        holder = node.func.value if isinstance(node.func, ast.Attribute) else None
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name == "make_layers":
            maker = [*given[1:2], *([named["layer_fn"]] if "layer_fn" in named else [])]
            made = _Part(_Class("torch.nn.ModuleList"))
            made.elements = [x for function in maker[0] for x in self._made(function, [], {})] if maker else [_UNTOLD]
            made.count = self._count(node.args[0], names) if node.args else None
            return [_Constant([[_UNTOLD], [_UNTOLD], [made]])]
        if name in _EXPERTS:
            said = [each.value for each in named.get("ckpt_names", []) if isinstance(each, _Constant)]
            experts = said[0] if said else ("gate_proj", "down_proj", "up_proj")
            return [_Part(_Class(name), experts=(*filter(None, experts), "gate_up_proj", "w13"))]
        if name == "tie_weights":
            return given[0]
        if name == "init_vllm_registered_model":
            return self._registered(given[0] if given else named.get("vllm_config", []), named)
        if isinstance(holder, ast.Call) and getattr(holder.func, "id", "") == "super" and names.this is not None:
            found = self._member(names.this.kind, name, after=names.owner)
            if found is None or not isinstance(found[1], ast.FunctionDef):
                return [_Constant(None)]
            return self._made(_Function(found[1], _Names(found[0].module, {}, names.this, found[0])), given, named)
        if name in ("append", "register_parameter", "register_buffer", "add_module") and holder is not None:
            for part in self._values(holder, names):
                if isinstance(part, _Part) and name == "append":
                    part.elements, part.count = [*part.elements, *given[0]], None
                elif isinstance(part, _Part):
                    word = given[0][0].value if given and isinstance(given[0][0], _Constant) else None
                    part.open |= not isinstance(word, str)
                    part.parts[str(word)] = [_PARAMETER] if name == "register_buffer" else given[1]
            return [_Constant(None)]
        return [x for function in self._values(node.func, names) for x in self._made(function, given, named)]

    def _registered(self, settings: list[Any], named: Mapping[str, list[Any]]) -> list[Any]:
        """The model within a model, which the registry names."""
        told = {key: values[0].value for key, values in named.items() if isinstance(values[0], _Constant)}
        outer = next((each.value for each in settings if isinstance(each, _Constant)), None)
        if not isinstance(outer, _Settings):
            return [_UNTOLD]
        config = told.get("hf_config") or outer.hf_config
        known = [
            each for each in told.get("architectures") or config.get("architectures") or [] if each in self.registry
        ]
        made = self.model(known[0], config, outer.quantised, outer.hf_config.complete) if known else None
        return [_UNTOLD if made is None else made]

    def _made(self, function: Any, given: list[list[Any]], named: Mapping[str, list[Any]]) -> list[Any]:
        """What a call of a class or function may return."""
        if isinstance(function, _Class):
            return [self._part(function, given, named)]
        if not isinstance(function, _Function) or self._deep > _DEEP:
            return [_UNTOLD]
        node, outer = function.node, function.names
        if isinstance(node, ast.Lambda):
            inner = _Names(outer.module, {**outer.known}, outer.this, outer.owner)
            self._bind(node.args, given, named, inner)
            return self._values(node.body, inner)
        if not outer.module.startswith(_OURS) and outer.this is None:
            return [_UNTOLD]
        inner = _Names(outer.module, {}, outer.this, outer.owner)
        self._bind(
            node.args, given, named, inner, int(node.args.args[:1] != [] and node.args.args[0].arg in ("self", "cls"))
        )
        self._follow(node.body, inner)
        return inner.returned or [_Constant(None)]

    def _part(self, kind: _Class, given: list[list[Any]], named: Mapping[str, list[Any]]) -> Any:
        """An object of a class, made with these arguments."""
        above = self._above(kind)
        made, names = _Part(kind), [each.name for each in above]
        if "torch.nn.Parameter" in names or "torch.nn.parameter.Parameter" in names:
            return _PARAMETER
        layer = next((each.name for each in above if each.name in _LAYERS and not each.module.startswith(_OURS)), None)
        found = self._member(kind, "__init__")
        if layer is not None:
            inner = _Names(kind.module)
            if found is not None and isinstance(found[1], ast.FunctionDef):
                self._bind(found[1].args, given, named, inner, 1)
            self._fill(made, layer, named, inner.known)
        elif kind.name in ("torch.nn.ModuleList", "torch.nn.Sequential") and given:
            items = given[0][0].value if isinstance(given[0][0], _Constant) else None
            if isinstance(given[0][0], _Part) and given[0][0].kind.name == "torch.nn.ModuleList":
                return given[0][0]
            parts = items if isinstance(items, list) else given if kind.name.endswith("Sequential") else []
            made.parts = {str(place): each for place, each in enumerate(parts)}
            made.sure, made.open = frozenset(made.parts), given[0][0] is _UNTOLD
        elif kind.node is not None and found is None:
            made.open = any(each.node is None and each.name != "torch.nn.Module" for each in above)
        elif found is None or self._deep > _DEEP or self._remade(kind):
            return (
                _UNTOLD if kind.name not in ("torch.nn.ModuleList", "torch.nn.Identity", "torch.nn.Dropout") else made
            )
        elif isinstance(found[1], ast.FunctionDef):
            inner = _Names(found[0].module, {}, made, found[0])
            self._bind(found[1].args, given, named, inner, 1)
            self._deep += 1
            self._follow(found[1].body, inner)
            self._deep -= 1
        return made

    def _remade(self, kind: _Class) -> bool:
        """Whether a class of a model's own may make an object of another one."""
        found = self._member(kind, "__new__")
        return found is not None and not found[0].module.endswith(("interfaces", "custom_op"))

    def _fill(self, made: _Part, layer: str, named: Mapping[str, list[Any]], known: Mapping[str, list[Any]]) -> None:
        made.layer = layer
        made.parts = {name: [_PARAMETER] for name in _LAYERS[layer]}
        made.sure = frozenset(made.parts) if not {"has_weight", "elementwise_affine"} & set(named) else frozenset()
        bias = {
            each.value if isinstance(each, _Constant) else None for each in known.get("bias") or named.get("bias") or []
        }
        if bias == {False}:
            made.parts.pop("bias", None)
        elif bias or layer.startswith("torch.nn."):
            made.parts["bias"] = [_PARAMETER]
        made.sure = made.sure - {"bias"} | (made.sure and ({"bias"} if bias == {True} else set()))
        made.open = "quant_config" in known and not all(isinstance(each, _Constant) for each in known["quant_config"])

    def _bind(
        self, wanted: ast.arguments, given: list[list[Any]], named: Mapping[str, Any], into: _Names, skip: int = 0
    ) -> None:
        """Give a function's names their values: what is given, or the default."""
        order = [each.arg for each in (*wanted.posonlyargs, *wanted.args)]
        defaults: dict[str, Any] = dict(zip(reversed(order), reversed(wanted.defaults), strict=False))
        defaults |= {x.arg: y for x, y in zip(wanted.kwonlyargs, wanted.kw_defaults, strict=True) if y is not None}
        placed = dict(zip(order[skip:], given, strict=False))
        into.known |= {order[0]: [into.this]} if skip and into.this is not None else {}
        for name in [*order[skip:], *(each.arg for each in wanted.kwonlyargs)]:
            said = placed.get(name) or named.get(name)
            into.known[name] = said or (
                self._values(defaults[name], _Names(into.module)) if name in defaults else [_UNTOLD]
            )

    # --- statements ---

    def _follow(self, body: Iterable[ast.stmt], names: _Names, sure: bool = True) -> bool:
        """Follow statements; whether their end may be reached."""
        for node in body:
            match node:
                case ast.Expr():
                    self._values(node.value, names)
                case ast.Assign():
                    for target in node.targets:
                        self._assign(target, self._values(node.value, names), names, sure)
                case ast.AnnAssign(value=ast.expr() as given):
                    self._assign(node.target, self._values(given, names), names, sure)
                case ast.If():
                    told = self._told(node.test, names)
                    ways = [node.body, node.orelse] if told is None else [node.body if told else node.orelse]
                    if not self._ways(ways, names, sure):
                        return False
                case ast.For():
                    for each in ast.walk(node.target):
                        names.known |= {each.id: [_UNTOLD]} if isinstance(each, ast.Name) else {}
                    self._follow(node.body, names, False)
                case ast.With() | ast.Try():
                    if not self._follow(node.body, names, sure):
                        return False
                case ast.Return():
                    names.returned += [] if node.value is None else self._values(node.value, names)
                    return False
                case ast.Raise():
                    return False
                case ast.ImportFrom():
                    told_: dict[str, Any] = {}
                    _define([node], names.module.rpartition(".")[0], told_)
                    names.known |= {name: [self._found(*source)] for name, source in told_.items()}
        return True

    def _ways(self, bodies: list[list[ast.stmt]], names: _Names, sure: bool) -> bool:
        """Follow each of these ways: what is assigned in all of them is assigned for sure."""
        this = names.this or _Part(_Class(""))
        before = dict(names.known), dict(this.parts), this.sure
        ends = []
        for body in bodies:
            names.known, this.parts, this.sure = dict(before[0]), dict(before[1]), before[2]
            if self._follow(body, names, sure):
                ends.append((names.known, this.parts, this.sure))
        if ends:
            names.known = {
                key: _joined(*(way[0].get(key, [_UNTOLD]) for way in ends)) for way in ends for key in way[0]
            }
            this.parts = {key: _joined(*(way[1].get(key, []) for way in ends)) for way in ends for key in way[1]}
            this.sure = frozenset.intersection(*(way[2] for way in ends))
        return bool(ends)

    def _assign(self, target: ast.expr, values: list[Any], names: _Names, sure: bool) -> None:
        match target:
            case ast.Name():
                names.known[target.id] = values
            case ast.Attribute(value=ast.Name(id="self"), attr=name) if names.this is not None:
                names.this.parts[name] = values
                names.this.sure = names.this.sure | {name} if sure else names.this.sure - {name}
            case ast.Attribute(value=holder, attr=name):
                for held in self._values(holder, names):
                    if isinstance(held, _Part):
                        held.parts[name] = _joined(held.parts.get(name, []), values)
            case ast.Tuple():
                several = values[0].value if len(values) == 1 and isinstance(values[0], _Constant) else None
                told = isinstance(several, list) and len(several) == len(target.elts)
                for place, each in enumerate(target.elts):
                    one = several[place] if told and several is not None else [_UNTOLD]
                    self._assign(each, one if isinstance(one, list) else [_Constant(one)], names, sure)

    # --- what is loaded ---

    def load(self, model: _Part, tensors: Mapping[str, tuple[int, ...]]) -> _Loading:
        """What becomes of a checkpoint's names in a model. tensors: each with its shape."""
        loading = _Loading(model.kind.name)
        self._closed, self._stacked, self._first, self._shapes = [], {}, {}, tensors
        self._note(model, "")
        for what, origin, told in self._load(model, [(name, name, None) for name in tensors], ""):
            match what:
                case "taken":
                    loading.taken[told[0]].add(told[1])
                case "ignored" | "unread":
                    getattr(loading, what)[told].append(origin)
                case "unexpected":
                    loading.unexpected.append(origin)
        for path, checked in self._needed(model, ""):
            if path not in loading.taken and not path.startswith(tuple(self._closed)):
                loading.missing[path] = checked
        for path, shards in loading.taken.items():
            wanted = {shard: (new, old) for old, (new, several) in self._stacked.items() if new in path
                      for shard in (several if isinstance(several, list) else [several])}  # fmt: skip
            loading.halves += [path.replace(*wanted[x]) for x in wanted if None not in shards and x not in shards]
        return loading

    def _load(self, part: _Part, pairs: list[_Pair], path: str) -> list[_Outcome]:
        """What becomes of names in a module: by its own `load_weights`, or each by the part that it begins with."""
        found = self._own_loader(part.kind)
        if found is None:
            return self._hand_on(part, pairs, path, path, ())
        try:
            pairs, mapper, prefixes = self._loader(part, found[0], found[1], pairs)
        except _Untold as error:
            self._closed.append(path)
            why = f"{found[0].name}.load_weights is not read: {error!s:.80}"
            return [("unread", origin, why) for _, origin, _ in pairs]
        outcomes: list[_Outcome] = []
        kept: list[_Pair] = []
        for name, origin, shard in pairs:
            new = mapper.renamed(name)
            if new is None or any(each in new[0] for each in self._left_out):
                outcomes.append(("ignored", origin, "leaves these out, by its mapper of names"))
            else:
                kept += [(new[0], origin, shard if each is None else each) for each in new[1]]
        self._stacked |= mapper.orig_to_new_stacked
        return outcomes + self._hand_on(part, kept, path, path, prefixes)

    def _own_loader(self, kind: _Class) -> tuple[_Class, ast.FunctionDef] | None:
        """The `load_weights` of a model's class; those of layers take what their parameters are called."""
        found = self._member(kind, "load_weights")
        ours = found is not None and found[0].module.startswith(_OURS)
        return (found[0], found[1]) if ours and found is not None and isinstance(found[1], ast.FunctionDef) else None

    def _hand_on(self, part: _Part, pairs: list[_Pair], path: str, start: str, prefixes: Any) -> list[_Outcome]:
        """What `AutoWeightsLoader` does from `start` on: each name goes to the part that it begins with."""
        groups: dict[str, list[_Pair]] = defaultdict(list)
        for name, origin, shard in pairs:
            head, _, rest = name.partition(".")
            groups[head].append((rest, origin, shard))
        outcomes: list[_Outcome] = []
        for head, inner in groups.items():
            inside = head.isdecimal() and (part.count is None or int(head) < part.count)
            values = part.elements if inside and part.elements else part.parts.get(head, [])
            ways = [self._offer(part, value, inner, f"{path}{head}", start, prefixes) for value in values]
            if _UNTOLD in values or (part.open and not values):
                ways.append(
                    [("unread", origin, f"{part.kind.name}.{head} is not told by the source") for _, origin, _ in inner]
                )
            ways = ways or [[("unexpected", origin, rest) for rest, origin, _ in inner]]
            best = min(
                ways,
                key=lambda way: [sum(what == bad for what, *_ in way) for bad in ("unexpected", "unread", "ignored")],
            )
            for what, origin, told in best:
                full = f"{path}{head}.{told}".rstrip(".").removeprefix(start) if what == "unexpected" else ""
                left = full.startswith(tuple(prefixes)) or full.endswith(self._left_suffixes)
                outcomes.append(("ignored", origin, _NO_PLACE) if full and left else (what, origin, told))
        return outcomes

    def _offer(
        self, part: _Part, value: Any, pairs: list[_Pair], path: str, start: str, prefixes: Any
    ) -> list[_Outcome]:
        if value is _PARAMETER:
            tied = path.endswith(".weight") and self._first.get(id(part), path) != path
            return [("unexpected", origin, rest) if rest else ("ignored", origin, _TIED) if tied
                    else ("taken", origin, (path, shard)) for rest, origin, shard in pairs]  # fmt: skip
        if not isinstance(value, _Part):
            return [("unexpected", origin, rest) for rest, origin, _ in pairs]
        if value.experts:
            kept = [bool({*rest.split(".")[:2]} & {*value.experts}) for rest, *_ in pairs]
            told = zip(pairs, kept, strict=True)
            return [("unread", x[1], _COUNTED) if known else ("ignored", x[1], _NO_EXPERT) for x, known in told]
        if self._own_loader(value.kind) is not None:
            return self._load(value, pairs, f"{path}.")
        return self._hand_on(value, pairs, f"{path}.", start, prefixes)

    def _note(self, part: _Part, path: str) -> None:
        """Note under which name each embedding comes first: under any other it is tied."""
        for name, values in part.parts.items():
            for each in values:
                if isinstance(each, _Part) and each.layer == "VocabParallelEmbedding":
                    self._first.setdefault(id(each), f"{path}{name}.weight")
                elif isinstance(each, _Part):
                    self._note(each, f"{path}{name}.")

    def _needed(self, part: _Part, path: str) -> Iterator[tuple[str, bool]]:
        """The parameters that there are for sure, and whether vLLM looks if they were loaded."""
        places = [(name, part.parts[name]) for name in part.parts if name in part.sure]
        places += [(str(place), part.elements) for place in range(part.count or 0)]
        for name, values in places:
            if values == [_PARAMETER]:
                if self._first.get(id(part), f"{path}{name}") == f"{path}{name}":
                    yield f"{path}{name}", part.layer not in _UNCHECKED
            elif values and all(isinstance(each, _Part) for each in values):
                needs = [dict(self._needed(each, f"{path}{name}.")) for each in values]
                yield from ((key, needs[0][key]) for key in needs[0] if all(key in each for each in needs))

    def _loader(
        self, part: _Part, owner: _Class, function: ast.FunctionDef, pairs: list[_Pair]
    ) -> tuple[list[_Pair], _Mapper, tuple[str, ...]]:
        """What a `load_weights` hands to `AutoWeightsLoader`: names, mapper, prefixes to leave out. Raises _Untold."""
        names = _Names(owner.module, {"self": [part]}, part, owner)
        weights = function.args.args[1].arg
        held = {weights: pairs}
        auto: ast.Call | None = None
        for node in function.body:
            calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
            auto = next((each for each in calls if ast.unparse(each.func) == "AutoWeightsLoader"), auto)
            match node:
                case ast.FunctionDef():
                    names.known[node.name] = [_Function(node, names)]
                case ast.Expr(value=ast.Constant()):
                    pass
                case ast.Assign(value=ast.expr() as made) | ast.Return(value=ast.expr() as made):
                    if (
                        isinstance(made, ast.Call)
                        and ast.unparse(made.func).endswith(".load_weights")
                        and auto is not None
                    ):
                        wanted = {each.arg: each.value for each in made.keywords}
                        mapper = self._plain(wanted["mapper"], names) if "mapper" in wanted else _Mapper()
                        given = self._renamed(made.args[0] if made.args else wanted["weights"], held, names)
                        return given, mapper, self._prefixes(auto, names, mapper)
                    if isinstance(node, ast.Assign) and made is not auto:
                        target = ast.unparse(node.targets[0])
                        if any(isinstance(each, ast.Name) and each.id in held for each in ast.walk(made)):
                            held[target] = self._renamed(made, held, names)
                        else:
                            names.known[target] = self._values(made, names)
                case _:
                    break
        raise _Untold("it is a program of its own")

    def _prefixes(self, auto: ast.Call, names: _Names, mapper: _Mapper) -> tuple[str, ...]:
        told = {each.arg: self._plain(each.value, names) or () for each in auto.keywords}
        mapper.orig_to_new_prefix.update(dict.fromkeys(told.get("skip_prefixes", ())))
        mapper.orig_to_new_substr.update(dict.fromkeys(told.get("skip_substrs", ())))
        return tuple(told.get("ignore_unexpected_prefixes", ()))

    def _renamed(self, node: ast.expr, held: Mapping[str, list[_Pair]], names: _Names) -> list[_Pair]:
        """The names after functions of them. Raises _Untold."""
        if isinstance(node, ast.Name) and node.id in held:
            return held[node.id]
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in _SAME_NAMES:
            return self._renamed([*node.args, *(x.value for x in node.keywords if x.arg == "weights")][0], held, names)
        inner = _Names(names.module, dict(names.known), names.this, names.owner)
        for name, pairs in held.items():
            inner.known[name] = [_Constant([(each, _Tensor(rest, self._shapes[rest[0]])) for each, *rest in pairs])]
        try:
            listed = ast.ListComp(
                ast.Name("_", ast.Load()), [ast.comprehension(ast.Name("_", ast.Store()), node, [], 0)]
            )
            return [(name, *x.origin) for name, x in self._plain(ast.fix_missing_locations(listed), inner)]
        except Exception as error:
            raise _Untold(f"it changes names by {ast.unparse(node)}") from error


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """What vLLM does with an architecture (`registered`: in which module; `previous`: the last version that had it) and
    with its tensors (`loading`, None where its class is not in the source), and how it takes weights to be quantised.
    """
    allow(0, _READING)
    source, name = _Source(Path(question["source"])), question["architecture"]
    told: dict[str, Any] = {"registered": source.registry.get(name, [None])[0], "previous": source.previous.get(name)}
    told |= {"quantisations": source.quantisations, "loading": None}
    if told["registered"] not in (None, "transformers"):
        model = source.model(name, question["config"], question["quantised"], question["complete"])
        if model is not None:
            tensors = {name: tuple(shape) for name, shape in question["tensors"]}
            told["loading"] = vars(source.load(model, tensors))
            told["loading"]["taken"] = len(told["loading"]["taken"])
    return told


def reason(error: BaseException) -> str:
    """What is to be told of an error."""
    return f"{type(error).__name__}: {error!s:.400}"


_NO_PLACE = "has no place for these, and leaves them out without a word"
_NO_EXPERT = "has no such expert, and leaves these out without a word"
_COUNTED = "experts go by numbers and names, which are not counted"
_TIED = "takes another's in the place of these, which are tied to it"


class _Tensor:
    """A tensor that a function of names hands on: whatever is made of it stands for it, and nothing is known of it."""

    def __init__(self, origin: list[Any], shape: tuple[int, ...] | None = None) -> None:
        self.origin, self.known = origin, {} if shape is None else {"shape": shape, "ndim": len(shape)}

    def _same(self, *_: Any, **__: Any) -> "_Tensor":
        return _Tensor(self.origin)

    __getitem__ = __call__ = _same

    def __getattr__(self, name: str) -> Any:
        if name == "dim" and self.known:
            return lambda: self.known["ndim"]
        return self.known[name] if name in self.known else _Tensor(self.origin)

    def _untold(self, *_: Any) -> bool:
        raise _Untold("tensor's values")

    __bool__ = __eq__ = __lt__ = __gt__ = __iter__ = _untold


class _This:
    """A module, as plain code sees it: by those of its attributes that are plain values."""

    def __init__(self, source: _Source, part: _Part) -> None:
        self._source, self._part = source, part

    def __getattr__(self, name: str) -> Any:
        values = self._part.parts.get(name)
        if values is not None and len(values) == 1 and isinstance(values[0], _Constant):
            return values[0].value
        found = self._source._member(self._part.kind, name) if values is None else None
        if found is None:
            raise _Untold(f"self.{name}")
        names = _Names(found[0].module, {}, self._part, found[0])
        if not isinstance(found[1], ast.FunctionDef):
            assert isinstance(found[1], ast.expr)
            return self._source._plain(found[1], names)
        function = self._source._plain_function(found[1], names)
        return lambda *given, **named: function(self, *given, **named)


def _joined(*values: list[Any]) -> list[Any]:
    joined: list[Any] = []
    for each in (each for part in values for each in part):
        joined += [] if any(each is x for x in joined) else [each]
    return joined


def _define(body: Iterable[ast.stmt], package: str, names: dict[str, Any]) -> None:
    """Note what statements define, by name."""
    for node in body:
        match node:
            case ast.ClassDef() | ast.FunctionDef():
                names[node.name] = node
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                names[name] = value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                names[name] = value
            case ast.ImportFrom():
                parts = package.split(".")
                base = parts[: len(parts) - node.level + 1] if node.level else []
                source = ".".join([*base, *filter(None, [node.module])])
                names |= {each.asname or each.name: (source, each.name) for each in node.names}
            case ast.Import():
                for each in node.names:
                    whole = each.name if each.asname else each.name.partition(".")[0]
                    names[each.asname or whole] = ("", whole)
            case ast.If() | ast.Try():
                _define([*node.body, *node.orelse], package, names)
