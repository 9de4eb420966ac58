"""Which expressions an interpretation leaves out.

An interpretation (infer, evaluate, lower, ...) is one singledispatch function with a registration
per expression class. A class counts as covered when the function, or an abstract family of
expressions that the class belongs to, has a registration of its own; the fallbacks on `object` and
on the root class do not count, since they are where errors are raised.
"""

import importlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Interpretation:
    """A singledispatch function, as `module:function`, and what it must cover.

    `families` and `exempt` are class names from the expressions' modules: every concrete class in
    one of the families and in none of the exempt ones must be covered.
    """

    function: str
    families: tuple[str, ...] = ("Expr",)
    exempt: tuple[str, ...] = ()


def load(name: str) -> Any:
    """The object that `module:attribute` names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def concrete_classes(root: type) -> tuple[type, ...]:
    """The concrete descendants of `root` (and it, if concrete), by name.

    A descendant is concrete when it is not abstract and nothing derives from it. `@dataclass(slots=
    True)` makes a class anew and leaves the first one among the subclasses until it is collected:
    those are passed over. So are classes outside the package of `root`, which tests make up.
    """
    package = root.__module__.partition(".")[0]
    family = (c for c in _descendants(root) if c.__module__.partition(".")[0] == package)
    found = {cls for cls in family if _stands_in_its_module(cls)}
    bases = {base for cls in found for base in cls.__mro__[1:]}
    concrete = (cls for cls in found if cls not in bases and not inspect.isabstract(cls))
    return tuple(sorted(concrete, key=lambda cls: cls.__qualname__))


def missing_classes(function: Any, root: type, required: tuple[type, ...]) -> tuple[type, ...]:
    """Those of `required` for which singledispatch `function` falls back to `root` or `object`."""
    fallbacks = [function.registry[cls] for cls in (object, root) if cls in function.registry]
    return tuple(cls for cls in required if function.dispatch(cls) in fallbacks)


def required_classes(
    interpretation: Interpretation, root: type, known: dict[str, type]
) -> tuple[type, ...]:
    """The concrete classes that `interpretation` must cover; `known` gives classes by name."""
    families = tuple(known[name] for name in interpretation.families)
    exempt = tuple(known[name] for name in interpretation.exempt)
    return tuple(
        cls
        for cls in concrete_classes(root)
        if issubclass(cls, families) and not issubclass(cls, exempt)
    )


def _descendants(root: type) -> Iterator[type]:
    yield root
    for cls in type.__subclasses__(root):
        yield from _descendants(cls)


def _stands_in_its_module(cls: type) -> bool:
    found: Any = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is cls
