"""List in a function's signature the keyword arguments that it takes as `**options`."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, cast

_Function = TypeVar("_Function", bound=Callable[..., Any])


def takes(options: type) -> Callable[[_Function], _Function]:
    """Return a decorator for functions whose `**options` are the fields of a record, or the keys of a TypedDict.

    The signature of the decorated function lists them. The default of a TypedDict's key is False. Other keyword
    arguments are a TypeError that names this function, and not one that it passes the options to.
    """
    if is_dataclass(options):
        listed = [(field.name, field.default, field.type) for field in fields(options)]
    else:
        listed = [(name, False, kind) for name, kind in inspect.get_annotations(options).items()]

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for name, default, kind in listed
        ]
        known = {parameter.name for parameter in (*own, *more)}

        @functools.wraps(function)
        def checked(*args: Any, **given: Any) -> Any:
            for name in given.keys() - known:
                raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}")
            return function(*args, **given)

        checked.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        return cast("_Function", checked)

    return decorate
