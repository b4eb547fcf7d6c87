"""Find out what vLLM would do with the tensors of a checkpoint, by running the source code of vLLM's model classes.

This is a worker of `confinement`. It executes only the modules that define vLLM's models, without torch and the rest of
vLLM. Stand-ins replace everything that they import: layers have parameters without values, vLLM runs on one GPU without
options, and all other values are unknown. If the code of a model depends on an unknown value, the result is "unread".
"""

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import sys
import traceback
import types
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

from .confinement import allow

_READING = (2**31, 0, 300.0, 0.0)  # address space; a mixture of experts with 90,000 tensors takes 20 seconds
_MODELS = "vllm.model_executor.models"


class _DependsOnUnknown(Exception):
    """The code of a model depends on an unknown value, for example in an `if`."""


# --- stand-ins -------------------------------------------------------------------------------------------------------


class _Kind(type(Protocol)):  # type: ignore[misc]
    """The metaclass of `_Unknown`. An imported class, of which only the name is known, is a class of this metaclass.

    It can be used as models use classes: called, indexed, as a base class and so on.
    """

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _HAVE[name] if name in _HAVE else _elsewhere(f"{cls.__qualname__}.{name}")

    def __call__(cls, *given: Any, **named: Any) -> Any:
        return _decorated(given, named) or super().__call__(*given, **named)

    def __instancecheck__(cls, value: Any) -> bool:
        if isinstance(value, _Config):
            return bool(cls.__name__ == value.kind)
        return type.__instancecheck__(cls, value)

    def _raise(cls, *_: Any) -> Any:
        raise _DependsOnUnknown(cls.__qualname__)

    def _same(cls, *_: Any) -> Any:
        return cls

    __bool__ = __iter__ = __len__ = __lt__ = __le__ = __gt__ = __ge__ = _raise
    __or__ = __ror__ = __getitem__ = _same


class _Unknown(metaclass=_Kind):
    """A stand-in for something imported, of which only the name is known, or for a value computed with it.

    As a module of a model it accepts all tensors that it is asked to load, and records them as "unread".
    """

    _is_protocol = False

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _elsewhere(f"{type(self).__qualname__}.{name}")()

    def __call__(self, *given: Any, **named: Any) -> Any:
        return _decorated(given, named) or type(self)()

    def _raise(self, *_: Any) -> Any:
        raise _DependsOnUnknown(type(self).__qualname__)

    def _another(self, *_: Any) -> Any:
        return type(self)()

    __bool__ = __iter__ = __len__ = __index__ = __int__ = __float__ = __lt__ = __le__ = __gt__ = __ge__ = _raise
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __mod__ = _another
    __floordiv__ = __rfloordiv__ = __pow__ = __neg__ = __or__ = __and__ = __getitem__ = __enter__ = _another

    def __exit__(self, *_: Any) -> None: ...

    def __setitem__(self, *_: Any) -> None: ...

    def load_weights(self, weights: Any) -> set[str]:
        for _, tensor in weights:
            _LOG.unread[f"{type(self).__qualname__} is none of its models' own modules"].append(tensor.origin)
        return set()

    def _none(self, *_: Any, **__: Any) -> list[Any]:
        return []

    named_modules = named_children = named_parameters = named_buffers = _none


def _decorated(given: Any, named: Any) -> Any:
    """Return the only argument of a call if it is a function or class, because the call then decorates it.

    Otherwise return None. The positional arguments are `given`, the keyword arguments `named`.
    """
    return given[0] if len(given) == 1 and not named and isinstance(given[0], (type, types.FunctionType)) else None


def _elsewhere(name: str) -> Any:
    kind = _Kind(name.rpartition(".")[2], (_Unknown,), {"__module__": "elsewhere"})
    kind.__qualname__ = name
    return kind


class _Off(_Unknown):
    """A stand-in for an option of vLLM that is not set. It is false, and so are all of its attributes."""

    def _no(self, *_: Any) -> bool:
        return False

    def _none(self, *_: Any, **__: Any) -> list[Any]:
        return []

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Off()

    __bool__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = _no
    __hash__ = object.__hash__


class _Options(types.SimpleNamespace):
    """An object with options of vLLM. Only the options in the constructor are set."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Off()


class _Config(dict[str, Any]):
    """A stand-in for transformers' config object, with the fields of config.json as attributes.

    `complete` says whether it also has all default values. If not, missing fields are unknown values. `kind` is the
    name of transformers' config class.
    """

    complete, kind = False, ""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise (
                AttributeError(name) if self.complete or name.startswith("__") else _DependsOnUnknown(f"config.{name}")
            )
        value = self[name]
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return [_config(item, self.complete) for item in value]
        return _config(value, self.complete) if isinstance(value, dict) else value

    __setattr__ = dict.__setitem__

    def get_text_config(self) -> Any:
        return self.text_config if "text_config" in self else self


def _config(given: Mapping[str, Any], complete: bool) -> _Config:
    config = _Config(given)
    vars(config).update(complete=complete, kind=config.pop("class of config", ""))
    return config


class _Settings(_Options):
    """A stand-in for vLLM's VllmConfig."""

    def with_hf_config(self, config: Any, *_: Any, **__: Any) -> Any:
        return _settings(config, self.quant_config)


def _settings(config: _Config, quantised: Any) -> _Settings:
    model = _Options(hf_config=config, hf_text_config=config.get_text_config(), max_model_len=2048)
    return _Settings(model_config=model, quant_config=quantised)


# --- modules ---------------------------------------------------------------------------------------------------------


class _Module:
    """A stand-in for torch.nn.Module, with the methods that vLLM uses when it loads weights."""

    checked = True
    """Whether vLLM checks that all parameters of the module were loaded (`track_weights_loading`).

    It does not check layers with a quant_method.
    """

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def named_children(self) -> Iterator[tuple[str, Any]]:
        return ((name, child) for name, child in list(vars(self).items()) if isinstance(child, (_Module, _Unknown)))

    def children(self) -> Iterator[Any]:
        return (child for _, child in self.named_children())

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Iterator[Any]:
        seen: set[int] = set() if memo is None else memo
        if id(self) not in seen or not remove_duplicate:
            seen.add(id(self))
            yield prefix, self
            for name, child in self.named_children():
                path = f"{prefix}.{name}" if prefix else name
                yield from (
                    [(path, child)]
                    if isinstance(child, _Unknown)
                    else child.named_modules(seen, path, remove_duplicate)
                )

    def modules(self) -> Iterator[Any]:
        return (child for _, child in self.named_modules())

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[Any]:
        seen: set[int] = set()
        for path, child in self.named_modules(None, prefix, remove_duplicate) if recurse else [(prefix, self)]:
            for name, value in list(vars(child).items()):
                if isinstance(value, _Parameter) and not value.stored and not (remove_duplicate and id(value) in seen):
                    seen.add(id(value))
                    yield f"{path}.{name}" if path else name, value

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        return (child for _, child in self.named_parameters("", recurse))

    def named_buffers(self, *_: Any, **__: Any) -> Iterator[Any]:
        return ((name, x) for name, x in list(vars(self).items()) if isinstance(x, _Parameter) and x.stored)

    def register_parameter(self, name: str, value: Any) -> None:
        setattr(self, name, value)

    add_module = register_module = register_parameter

    def register_buffer(self, name: str, value: Any, persistent: bool = True) -> None:
        setattr(self, name, _Parameter(stored=True) if persistent and value is not None else None)

    def get_submodule(self, path: str) -> Any:
        module: Any = self
        for name in path.split(".") if path else []:
            module = getattr(module, name)
        return module

    def _get_name(self) -> str:
        return type(self).__name__

    def _same(self, *_: Any, **__: Any) -> Any:
        return self

    to = eval = train = requires_grad_ = apply = cuda = float = half = bfloat16 = _same

    @staticmethod
    def register(*_: Any, **__: Any) -> Any:
        return lambda kind: kind


class _List(_Module):
    def __init__(self, items: Any = (), *more: Any) -> None:
        for place, item in enumerate(
            (items, *more) if isinstance(items, (_Module, _Unknown)) and not isinstance(items, _List) else items
        ):
            setattr(self, str(place), item)

    def append(self, item: Any) -> None:
        setattr(self, str(len(self)), item)

    def __len__(self) -> int:
        return len(vars(self))

    def __iter__(self) -> Iterator[Any]:
        return iter([*vars(self).values()])

    def __getitem__(self, place: Any) -> Any:
        return [*vars(self).values()][place]


class _Dictionary(_Module):
    def __init__(self, items: Any = ()) -> None:
        vars(self).update(items)

    __setitem__ = object.__setattr__

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


class _Parameter:
    """A stand-in for a parameter, or for a buffer that is part of the state dict (`stored`)."""

    def __init__(self, *_: Any, stored: bool = False, **__: Any) -> None:
        vars(self).update(stored=stored, output_dim=0, input_dim=1, weight_loader=self._take)

    def __setattr__(self, name: str, value: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _elsewhere(f"Parameter.{name}")()

    def _take(self, *given: Any, **named: Any) -> bool:
        return _LOG.take(*([] if given and given[0] is self else [self]), *given, **named)


class _StubTensor(_Unknown):
    """A stand-in for a tensor of the checkpoint, or for a tensor computed from it. `origin` is the tensor's name."""

    def __init__(self, origin: str = "", shape: tuple[int, ...] | None = None) -> None:
        self.origin = origin
        if shape is not None:
            vars(self).update(shape=shape, ndim=len(shape), dim=lambda: len(shape))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "shard_id":
            raise AttributeError(name)
        return self

    def _same(self, *_: Any, **__: Any) -> Any:
        return _StubTensor(self.origin)

    __call__ = __getitem__ = __add__ = __sub__ = __mul__ = __truediv__ = __neg__ = _same


class _Layer(_Module):
    """A stand-in for a layer of vLLM or torch, such as a linear layer or a norm."""

    names: tuple[str, ...] = ("weight",)
    """The names of the layer's parameters, except the bias."""
    bias_else: bool | None = None
    """Whether the layer has a bias by default; None if it never has one."""
    place: int | None = None
    """The position of the constructor's argument `bias`, or None if `bias` is only passed by name."""

    def __new__(cls, *_: Any, **named: Any) -> Any:
        return object.__new__(cls) if named.get("quant_config") is None else _elsewhere("a quantised layer")()

    def __init__(self, *given: Any, **named: Any) -> None:
        place = len(given) if self.place is None else self.place
        asked = named.get("bias", given[place] if len(given) > place else self.bias_else)
        wanted = named.get("has_weight", named.get("elementwise_affine", True))
        vars(self).update({name: _Parameter() if wanted else None for name in self.names})
        if asked is not None:
            self.bias = _Parameter() if asked and wanted else None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("load_weights", "quant_config", "hf_to_vllm_mapper"):
            raise AttributeError(name)
        return _elsewhere(f"{type(self).__name__}.{name}")()


def _layer(**fields: Any) -> Any:
    return type("Layer", (_Layer,), fields)


class _Embedding(_Layer):
    """A stand-in for `VocabParallelEmbedding`. vLLM's loader recognises tied weights by this class."""

    checked = False


class _Head(_Embedding):
    """A stand-in for `ParallelLMHead`."""

    bias_else = False

    def tie_weights(self, embedding: Any) -> Any:
        self.weight = embedding.weight
        return self


class _Experts(_Layer):
    """A stand-in for the experts of a mixture-of-experts layer, whose parameters contain all experts.

    They load tensors by the number of the expert and the name of the projection.
    """

    def __new__(cls, *_: Any, **named: Any) -> Any:
        own = named.get("quant_config") is not None or {"routed_experts_cls", "runner_cls"} & {*named}
        return _elsewhere("experts of their own form")() if own else object.__new__(cls)

    def __init__(self, num_experts: int, *_: Any, **named: Any) -> None:
        self.names = named.get("ckpt_names", ("gate_proj", "down_proj", "up_proj"))
        self.number, self.expert_map = num_experts, None
        self.routed_experts = _Module()
        biases = ("w13_bias", "w2_bias") if named.get("has_bias") else ()
        vars(self.routed_experts).update({name: _Parameter() for name in ("w13_weight", "w2_weight", *biases)})
        vars(self.routed_experts).update(checked=False)

    def load_weights(self, weights: Any) -> Iterator[str]:
        gate, down, up = self.names
        for name, tensor in weights:
            number, _, rest = name.partition(".") if name[:1].isdecimal() else ("", "", name)
            word = rest.partition(".")[0].removesuffix("_bias")
            place = "w2" if word == down else "w13" if word in (gate, up, "gate_up_proj", "w13") else ""
            parameter = vars(self.routed_experts).get(f"{place}_{'bias' if rest.endswith('bias') else 'weight'}")
            if parameter is not None and (not number or int(number) < self.number):
                _LOG.take(parameter, tensor, f"{number} {word}".strip())
                yield name


def _numbered(_: Any, **named: Any) -> list[Any]:
    """Stand in for vLLM's `fused_moe_make_expert_params_mapping`.

    The result says, for the name of an expert's tensor, which fused parameter and which part of it to fill.
    """
    kinds = (("w1", "gate", "w13"), ("w2", "down", "w2"), ("w3", "up", "w13"))
    return [(f"experts.routed_experts.{place}_", f"experts.{expert}.{named[f'ckpt_{word}_proj_name']}.", expert, shard)
            for expert in range(named["num_experts"]) for shard, word, place in kinds]  # fmt: skip


_SINGLE = _Options(is_first_rank=True, is_last_rank=True, world_size=1, rank_in_group=0, rank=0)
_SINGLE.device_group = types.SimpleNamespace(rank=lambda: 0, size=lambda: 1)
_PLACES = {"ColumnParallelLinear": 2, "MergedColumnParallelLinear": 2, "RowParallelLinear": 2, "ReplicatedLinear": 2}
_PLACES |= {"QKVParallelLinear": 4}
"""The name of a layer class -> the position of the argument `bias` in its constructor."""
_LINEAR = {"names": ("weight",), "bias_else": True, "checked": False}
_HAVE: dict[str, Any] = {
    **{name: _layer(**_LINEAR, place=place) for name, place in _PLACES.items()},
    **{name: _layer(bias_else=True) for name in ("Conv1d", "Conv2d", "Conv3d", "LayerNorm")},
    **{name: _layer() for name in ("RMSNorm", "GemmaRMSNorm", "Embedding")},
    **dict.fromkeys(("FusedMoEFactory", "FusedMoE", "SharedFusedMoE"), _Experts),
    **{name: type(name, (_Module,), {}) for name in ("Identity", "Dropout", "GELU", "SiLU", "ReLU", "Tanh")},
    **{name: type(name, (_Module,), {}) for name in ("CustomOp", "PluggableLayer", "Attention")},
    **{f"get_{name}_group": lambda: _SINGLE for name in ("pp", "tp", "ep", "dp", "pcp")},
    "AttentionLayerBase": type("AttentionLayerBase", (), {}),
    "GateLinear": _layer(bias_else=False, place=2, checked=False),
    "HAS_TRITON": True,
    "HpcRopeNorm": _Off(),
    "Linear": _layer(bias_else=True, place=2),
    "Module": _Module,
    "ModuleDict": _Dictionary,
    "ModuleList": _List,
    "Parameter": _Parameter,
    "PreTrainedConfig": _Config,
    "PretrainedConfig": _Config,
    "ParallelLMHead": _Head,
    "Sequential": _List,
    "TYPE_CHECKING": False,
    "VocabParallelEmbedding": _Embedding,
    "current_platform": _Options(is_cuda=lambda: True, is_cuda_alike=lambda: True),
    "default_weight_loader": lambda *given, **named: _LOG.take(*given, **named),
    "divide": lambda x, y: x // y,
    "envs": _Options(),
    "get_current_vllm_config": _Options,
    "get_offloader": lambda: _Options(wrap_modules=list),
    "get_pp_indices": lambda layers, rank, size: (0, layers),
    "get_tensor_model_parallel_rank": lambda: 0,
    "get_tensor_model_parallel_world_size": lambda: 1,
    "fused_moe_make_expert_params_mapping": _numbered,
    "is_model_fused_shared_expert_compatible": lambda *_, **__: False,
    "init_logger": lambda name: _Off(),
    "is_initialized": lambda: False,
    "maybe_remap_kv_scale_name": lambda name, parameters: name,
    "register_module_module_registration_hook": lambda hook: nullcontext(),
    "resolve_layer_fused_shared_expert": lambda *_, **__: False,
    "rocm_aiter_ops": _Off(),
    "set_weight_attrs": lambda parameter, attributes: None,
    "support_quantized_model_reload_from_hp_weights": lambda function: function,
    "supports_kw": lambda *_, **__: True,
}
"""The name of a class, function or value that models import -> its stand-in."""


# --- running ---------------------------------------------------------------------------------------------------------


class _UnknownModule(types.ModuleType):
    """A Python module that is not executed. All of its attributes are stand-ins."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self.__name__ == "vllm.envs":
            return _Off()
        return _HAVE[name] if name in _HAVE else _elsewhere(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import hook.

    It imports the standard library and the modules of vLLM's models. Others become `_UnknownModule`s.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(self, name: str, *_: Any) -> Any:
        if name.partition(".")[0] in sys.stdlib_module_names:
            return None
        if name.startswith((f"{_MODELS}.", "vllm.models.")):
            place = self.root.joinpath(*name.split(".")[1:])
            for file in (place.with_suffix(".py"), place / "__init__.py"):
                if file.is_file():
                    return importlib.util.spec_from_file_location(name, file)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        return _UnknownModule(spec.name)

    def exec_module(self, module: Any) -> None: ...


class _Log:
    """A record of what happened to the tensors of the checkpoint while a model loaded them."""

    def __init__(self) -> None:
        self.current = ""  # the name of the tensor that is being loaded
        self.taken: dict[int, set[str]] = defaultdict(set)  # the loaded parts by the id of their parameter
        self.done: set[str] = set()  # the names of the loaded tensors
        self.unread: dict[str, list[str]] = defaultdict(list)  # reason -> the tensors for which it is unknown
        self.unexpected: list[str] = []  # the names of tensors for which there is no parameter

    def take(self, parameter: Any, *given: Any, **named: Any) -> bool:
        words = [*given, *named.values()]
        tensor = next((word for word in words if isinstance(word, _StubTensor)), None)
        part = [
            x
            for x in (getattr(tensor, "shard_id", None), *words)
            if type(x) is int or (type(x) is str and "." not in x)
        ]
        self.taken[id(parameter)].add(" ".join(map(str, part)))
        self.done.add(tensor.origin if tensor is not None else self.current)
        return True


_LOG: _Log = _Log()


def _load(model: Any, tensors: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return what happens when a model loads the tensors of a checkpoint, which are given by name and shape.

    The result has the names of tensors that are "ignored" or "unexpected"; "unread", reason -> the tensors for which
    gptkit could not find out; "missing", parameter without a tensor -> whether vLLM checks it; and "halves"
    (`_halves`).
    """
    remaining = dict(tensors)

    def weights() -> Iterator[tuple[str, _StubTensor]]:
        for name in [*remaining]:
            _LOG.current = name
            yield name, _StubTensor(name, remaining.pop(name))

    opaque = [path for path, module in model.named_modules() if isinstance(module, _Unknown)]
    while remaining:  # An error would end vLLM's loading. It is recorded here, and the next tensor follows.
        try:
            model.load_weights(weights())
        except Exception as error:
            if not isinstance(error, KeyError) and not _says(error):
                return {"unread": {f"its load_weights asks for {error!s:.60}": list(tensors)}}
            within = next((path for path in opaque if path and f"{path}." in f"{_LOG.current}."), None)
            if within is None or not isinstance(error, KeyError):
                _LOG.unexpected.append(_LOG.current)
            else:
                _LOG.unread[f"{_folded(within)} is none of its models' own modules"].append(_LOG.current)
    unread = {name for names in _LOG.unread.values() for name in names}
    known = {*_LOG.done, *_LOG.unexpected, *unread}
    owners = [(path, module) for path, module in model.named_modules() if not isinstance(module, _Unknown)]
    own = {f"{path}.{name}".strip("."): (value, module.checked) for path, module in owners
           for name, value in module.named_parameters(recurse=False)}  # fmt: skip
    return {
        "ignored": [name for name in tensors if name not in known],
        "unexpected": _LOG.unexpected,
        "unread": {why: names for why, names in _LOG.unread.items() if names},
        "missing": {name: checked for name, (value, checked) in own.items() if id(value) not in _LOG.taken},
        "halves": _halves({name: _LOG.taken[id(value)] for name, (value, _) in own.items() if id(value) in _LOG.taken}),
    }


def _says(error: Exception) -> str:
    """Return the message of an error, if the code of the model raised it by `raise` or `assert`; otherwise empty."""
    frame, line = [*traceback.walk_tb(error.__traceback__)][-1]
    code = linecache.getline(frame.f_code.co_filename, line).strip()
    own = frame.f_globals["__name__"].startswith("vllm.") and code.startswith(("raise", "assert"))
    return f"{error!s:.200}" or code if own else ""


def _halves(taken: Mapping[str, set[str]]) -> list[str]:
    """Return the parts of fused parameters (such as q of qkv) that no tensor has filled.

    A part is reported if it was filled in another layer, or if the other parts of the parameter were filled. `taken`
    has the filled parts of every parameter, by its name.
    """
    alike: dict[str, set[str]] = defaultdict(set)
    stacked = ({"q", "k", "v"}, {"0", "1"})
    for name, parts in taken.items():
        alike[_folded(name)] |= parts
        alike[_folded(name)] |= next((part for part in stacked if parts and parts <= part), set())
    return [f"{name} ({part})" for name, parts in taken.items() for part in sorted(alike[_folded(name)] - parts - {""})]


def _folded(name: str) -> str:
    return ".".join("*" if word.isdecimal() else word for word in name.split("."))


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Return what vLLM does with a checkpoint, whose architecture, config and tensors are in the question.

    The answer has "module" and "class", which implement the architecture (None if there are none), "last", the last
    version of vLLM that supported a removed architecture, and "quantisations", the names of the supported methods. It
    also has one of "loading" (see `_load`), "refuses" (why the class refuses the config), or "unread" (why gptkit could
    not find out).
    """
    allow(0, _READING)
    name, names = question["architecture"], {}
    sys.meta_path.insert(0, _Finder(Path(question["source"])))
    registry = importlib.import_module(f"{_MODELS}.registry")
    for file in Path(question["source"]).glob("model_executor/layers/quantization/__init__.py"):
        tree = ast.parse(file.read_bytes())
        names = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign)
                 and isinstance(node.targets[0], ast.Name)}  # fmt: skip
    methods = ast.walk(names.get("QuantizationMethods", ast.Pass()))
    module, kind = registry._VLLM_MODELS.get(name, (None, None))
    result: dict[str, Any] = {"module": module, "class": kind, "last": registry._PREVIOUSLY_SUPPORTED_MODELS.get(name)}
    result["quantisations"] = [node.value for node in methods if isinstance(node, ast.Constant)]
    if module in (None, "transformers"):
        return result
    try:
        source = importlib.import_module(module if "." in module else f"{_MODELS}.{module}")
        config = _config(question["config"], question["complete"])
        settings = _settings(config, _elsewhere("a quantisation")() if question["quantised"] else None)
        model = getattr(source, kind)(vllm_config=settings)
    except Exception as error:
        return {**result, "refuses" if _says(error) else "unread": _says(error) or f"{error!s:.100}"}
    return {**result, "loading": _load(model, {tensor: tuple(shape) for tensor, shape in question["tensors"]})}


def reason(error: BaseException) -> str:
    """Return the text of an error that this process could not handle."""
    return f"{type(error).__name__}: {error!s:.400}"
