"""The registry that maps a kind of component to its torch module. Modules, also of plugins, register themselves."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from ..components import Component
from ..errors import MissingComponent

_MODULES: dict[type[Component], type[Any]] = {}
_Module = TypeVar("_Module", bound=type[Any])


def computes(kind: type[Component]) -> Callable[[_Module], _Module]:
    """Register the decorated class as the module for a kind of component.

    The class has these constructors and methods:

    - a norm is a module `Class(record)`, called with x;
    - a mixer is a module `Class(record, kernel)`, called with x, a `Context` and a cache. If it needs earlier tokens,
      it has a static method `cache(record)`, which returns an empty cache;
    - positions that rotate (`Turning`) have the static methods `tables(record, position_ids, dtype)` and
      `turn(x, tables)`, and if queries and keys are rotated differently, `both(record, q, k, tables)`;
    - positions that bias scores (`Biasing`) have `bias(record, heads, key_mask, dtype)` -> (B, heads, 1, S).
    """

    def registered(module: _Module) -> _Module:
        _MODULES[kind] = module
        return module

    return registered


def module_of(node: Component) -> Any:
    """Return the module class for a component. Raises MissingComponent if its kind has none."""
    if type(node) not in _MODULES and node.computed_in:
        import_module(node.computed_in, __package__)
    module = _MODULES.get(type(node))
    if module is None:
        raise MissingComponent(
            f"gptkit has no PyTorch module for the component {type(node).__name__}: a plugin with this "
            "component must register one"
        )
    return module


def build_module(node: Any, *options: Any) -> Any:
    """Build the module for a component. Raises MissingComponent if no module class is registered for its kind.

    `options` are further arguments of the module class, such as the kernel of a mixer.
    """
    return module_of(node)(node, *options)
