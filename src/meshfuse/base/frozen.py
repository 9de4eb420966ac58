"""Frozen, slotted dataclasses that are quick to define and to make: the values of every room.

`dataclass(frozen=True, slots=True)` writes and compiles six methods for each class, 0.3 ms in
all, and the package has hundreds of classes that are defined whenever it is imported. Here only the
constructor is compiled; the others read a value's fields through one attrgetter. A value is made in
half the time, too, for the constructor writes to the slots past `__setattr__`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field, fields
from operator import attrgetter
from typing import Any, NoReturn, TypeVar

from typing_extensions import dataclass_transform

_Class = TypeVar("_Class")
_Read = Callable[[Any], tuple[object, ...]]
_HANDLED = ("init", "repr", "hash", "compare", "kw_only")
_USUAL = (True, True, None, True, False)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen_dataclass(cls: type[_Class]) -> type[_Class]:
    """As `dataclass(frozen=True, slots=True)`: `fields`, `replace` and patterns take its values.

    Methods that the class itself defines stay. For plain fields: raises TypeError for one that
    `field()` leaves out of a method, and for a class with `__post_init__`.
    """
    made: Any = dataclass(init=False, repr=False, eq=False, slots=True)(cls)
    found = fields(made)
    odd = [f.name for f in found if tuple(getattr(f, name) for name in _HANDLED) != _USUAL]
    if odd or hasattr(made, "__post_init__"):
        raise TypeError(f"{cls.__name__} needs dataclass(frozen=True, slots=True): {odd}")
    own = vars(cls)
    methods = _methods_reading(_reader([f.name for f in found]))
    for name, method in methods.items():
        if name not in own or own[name] is None:
            setattr(made, name, method)
    made.__init__ = _constructor(made, found)
    return made


def _reader(names: list[str]) -> _Read:
    """What gives the values of these attributes, always as a tuple."""
    if len(names) > 1:
        return attrgetter(*names)
    if not names:
        return lambda value: ()
    read = attrgetter(names[0])
    return lambda value: (read(value),)


def _methods_reading(read: _Read) -> dict[str, Callable[..., Any]]:
    """The methods of a class by name; `read` gives the fields of one of its values."""

    def equal(self: Any, other: object) -> bool:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return self is other or read(self) == read(other)

    def hash_fields(self: Any) -> int:
        return hash(read(self))

    def reduce(self: Any) -> tuple[Any, ...]:
        return self.__class__, read(self)

    return {
        "__eq__": equal,
        "__hash__": hash_fields,
        "__reduce__": reduce,
        "__repr__": _show,
        "_repr_pretty_": _show_in_one_line,
        "__setattr__": _refuse_to_set,
        "__delattr__": _refuse_to_delete,
    }


def _show(self: Any) -> str:
    shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__match_args__)
    return f"{self.__class__.__qualname__}({shown})"


def _show_in_one_line(self: object, printer: Any, cycle: bool) -> None:
    """What IPython and hypothesis ask for: field by field, a program would take them minutes."""
    printer.text(repr(self))


def _refuse_to_set(self: object, name: str, value: object) -> NoReturn:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(self: object, name: str) -> NoReturn:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _constructor(cls: Any, found: tuple[Field[Any], ...]) -> Callable[..., None]:
    """`__init__`, compiled: written out, it is as fast as one that a person writes."""
    names: dict[str, object] = {"__name__": cls.__module__, "_missing": MISSING}
    for f in found:
        names[f"_set_{f.name}"] = getattr(cls, f.name).__set__
        names[f"_default_{f.name}"] = f.default
        names[f"_make_{f.name}"] = f.default_factory
    parameters = ", ".join(["self", *map(_parameter, found)])
    body = "\n ".join(line for f in found for line in _assignment(f)) or "pass"
    exec(f"def __init__({parameters}):\n {body}", names)
    constructor: Any = names["__init__"]
    constructor.__qualname__ = f"{cls.__qualname__}.__init__"
    constructor.__annotations__ = {f.name: f.type for f in found} | {"return": None}
    return constructor


def _parameter(found: Field[Any]) -> str:
    if found.default is not MISSING:
        return f"{found.name}=_default_{found.name}"
    if found.default_factory is not MISSING:
        return f"{found.name}=_missing"
    return found.name


def _assignment(found: Field[Any]) -> Iterator[str]:
    """The lines that fill a slot."""
    name = found.name
    if found.default_factory is not MISSING:
        yield f"if {name} is _missing: {name} = _make_{name}()"
    yield f"_set_{name}(self, {name})"
