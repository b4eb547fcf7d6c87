"""The registry of torch modules by kind of component. Modules register themselves, also those of plugins."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from ..components import Component
from ..errors import MissingComponent

_MODULES: dict[type[Component], type[Any]] = {}
_Made = TypeVar("_Made", bound=type[Any])


def computes(kind: type[Component]) -> Callable[[_Made], _Made]:
    """Register the decorated class as the module for a kind of component.

    A norm's and a mixer's is a module, which is made of the record: a norm of it alone, for x; a mixer of it and a
    kernel, for x, a `Context` and a cache. What keeps something of earlier tokens has a static `cache(record)`.
    Positions that turn have the static `tables(record, position_ids, dtype)` and `turn(x, tables)`, and where queries
    and keys are turned apart `both(record, q, k, tables)`; those that bias have `bias(record, heads, key_mask, dtype)`,
    which gives (B, heads, 1, S).
    """

    def registered(module: _Made) -> _Made:
        _MODULES[kind] = module
        return module

    return registered


def module_of(node: Component) -> Any:
    """Return the module class for a component. Raises MissingComponent if its kind has none."""
    if type(node) not in _MODULES and node.computed_in:
        import_module(node.computed_in)
    found = _MODULES.get(type(node))
    if found is None:
        raise MissingComponent(
            f"gptkit has no PyTorch module for the component {type(node).__name__}: a plugin with this "
            "component must register one"
        )
    return found


def build_module(node: Any, *options: Any) -> Any:
    """Build the module for a component. Raises MissingComponent like `module_of`."""
    return module_of(node)(node, *options)
