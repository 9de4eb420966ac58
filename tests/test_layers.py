"""The laws of the source tree hold, and each check is seen to fail on a planted violation.

The rules themselves are in layer_rules.py and op_coverage.py.
"""

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import singledispatch
from pathlib import Path

import pytest

import meshfuse
from layer_rules import (
    MAX_FILE_LINES,
    MAX_FUNCTION_LINES,
    OPTIONAL_DOOR,
    ROOMS,
    check_source,
    room_of,
)
from op_coverage import (
    Interpretation,
    concrete_classes,
    load,
    missing_classes,
    required_classes,
)

SOURCE = Path(meshfuse.__file__).parent
FILES = {path.relative_to(SOURCE).as_posix(): path for path in sorted(SOURCE.rglob("*.py"))}

EXCEPTIONS: tuple[str, ...] = ()
"""Files that need not obey. There are none: a rule that does not fit gets changed for all."""

INTERPRETATIONS: tuple[Interpretation, ...] = (
    Interpretation("meshfuse.ir.infer:infer"),
    Interpretation("meshfuse.facts.axis_map:axis_pairs"),
    # Communications are made when shardings are settled.
    Interpretation("meshfuse.passes.sharding_rules:sharding_rule", exempt=("Communication",)),
    # These are in no kernel.
    Interpretation(
        "meshfuse.kernel.elements:operand_elements",
        exempt=("Communication", "LibraryExpr"),
    ),
    Interpretation("meshfuse.runtime.evaluate_ops:evaluate"),
    Interpretation("meshfuse.host.expression_work:work_of"),
)
"""Every singledispatch over expressions. A new op is complete when each of them knows it."""

EXPRESSION_MODULES = (
    "meshfuse.ir.ops",
    "meshfuse.ir.ops_attention",
    "meshfuse.ir.ops_indexing",
    "meshfuse.ir.ops_random",
    "meshfuse.ir.comm",
    "meshfuse.ir.terms",
)


def expressions_by_name(root: type) -> dict[str, type]:
    """Every expression class, abstract families included."""
    return {
        name: value
        for module in EXPRESSION_MODULES
        for name, value in vars(importlib.import_module(module)).items()
        if isinstance(value, type) and issubclass(value, root)
    }


def rules_broken(path: str, source: str) -> list[str]:
    return [violation.rule for violation in check_source(path, source)]


# The tree.


def test_there_are_no_exceptions() -> None:
    assert EXCEPTIONS == ()


def test_the_rooms_are_there() -> None:
    """The other tests look at the real tree, not at an empty one."""
    rooms = {room_of(path) for path in FILES}
    assert {"base", "expr", "ir", "facts", "passes", "kernel", "codegen", "host"} <= rooms


@pytest.mark.parametrize("path", FILES)
def test_file_obeys(path: str) -> None:
    violations = check_source(path, FILES[path].read_text(encoding="utf-8"))
    assert not violations, "\n" + "\n".join(map(str, violations))


def test_every_op_is_interpreted() -> None:
    root = load("meshfuse.ir.ops:Expr")
    known = expressions_by_name(root)
    assert len(concrete_classes(root)) > 10
    missing = [
        f"{interpretation.function} has no registration for {cls.__qualname__}"
        for interpretation in INTERPRETATIONS
        for cls in missing_classes(
            load(interpretation.function),
            root,
            required_classes(interpretation, root, known),
        )
    ]
    assert not missing, "\n" + "\n".join(missing)


# Planted violations of the source rules.


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("ir/ops.py", "from meshfuse.base.errors import UserError\nimport meshfuse.expr.nodes"),
        ("ir/ops.py", "from meshfuse.ir.axes import IterDomain"),
        ("ir/ops.py", "from meshfuse import expr"),
        ("cache.py", "from meshfuse import pipeline\nfrom meshfuse.pipeline import compile"),
        ("host/run.py", '"""Doc."""\nfrom __future__ import annotations\nimport torch'),
        ("__init__.py", "from meshfuse.api.definition import FusionDefinition"),
        ("ir/ops.py", "import torchlike\nimport tritonic\nimport richer"),
        (OPTIONAL_DOOR, "def load(name):\n    import importlib\n    return import_module(name)"),
        (
            "ir/ops.py",
            "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from meshfuse.base import text\n"
            "from meshfuse.expr import nodes",
        ),
    ],
)
def test_lawful_source_passes(path: str, source: str) -> None:
    assert rules_broken(path, source) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("ir/ops.py", "from meshfuse.facts.axis_map import axis_pairs"),
        ("ir/ops.py", "import meshfuse.facts"),
        ("ir/ops.py", "from meshfuse import facts"),
        ("ir/ops.py", "import sys, meshfuse.kernel.nodes"),
        ("passes/overlap.py", "from meshfuse.segment import merge"),
        ("segment/merge.py", "from meshfuse.schedulers.registry import SCHEDULERS"),
        ("pipeline.py", "from meshfuse.cache import FusionCache"),
        ("pipeline.py", "from meshfuse import cache"),
        ("api/ops.py", "import meshfuse"),
        ("api/ops.py", "from meshfuse import FusionDefinition"),
        ("cli/report.py", "from meshfuse import __version__"),
        ("api/ops.py", "import meshfuse.attic"),
        (
            "ir/ops.py",
            "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from meshfuse.kernel.nodes import Kernel",
        ),
    ],
)
def test_an_import_that_does_not_point_down_is_found(path: str, source: str) -> None:
    assert rules_broken(path, source) == ["down"]


@pytest.mark.parametrize("path", ["attic/ops.py", "attic.py", "meshfuse/ops.py"])
def test_a_file_in_no_room_is_found(path: str) -> None:
    assert rules_broken(path, "") == ["room"]


@pytest.mark.parametrize("source", ["from . import axes", "from .axes import IterDomain"])
def test_a_relative_import_is_found(source: str) -> None:
    assert rules_broken("ir/ops.py", source) == ["absolute"]


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    import os",
        "class A:\n    import os",
        "X = 1\nimport os",
        '"""Doc."""\n"""Another."""\nimport os',
        "try:\n    import os\nexcept ImportError:\n    os = None",
        "if X:\n    import os",
        "def f():\n    def g():\n        from os import path",
        "from typing import TYPE_CHECKING\nX = 1\nif TYPE_CHECKING:\n    import os",
    ],
)
def test_an_import_below_the_top_is_found(source: str) -> None:
    assert rules_broken("ir/ops.py", source) == ["top"]


@pytest.mark.parametrize(
    "source",
    [
        "import triton",
        "import triton.language as tl",
        "from rich.console import Console",
        "import typer",
        "import torch.distributed.tensor",
        "from torch.distributed import tensor",
        "from torch.distributed.tensor.placement_types import Shard",
        "import torch.distributed._symmetric_memory as symmetric",
        "from torch.distributed import _symmetric_memory",
        "import importlib\nM = importlib.import_module('triton')",
        "from importlib import import_module\nM = import_module('triton')",
        "M = __import__('triton')",
    ],
)
def test_an_optional_module_loaded_elsewhere_is_found(source: str) -> None:
    assert rules_broken("runtime/compile.py", source) == ["optional"]


@pytest.mark.parametrize("room", [room for room, floor in ROOMS.items() if floor <= 6])
@pytest.mark.parametrize(
    "source", ["import torch", "from torch.nn import functional", "import numpy as np"]
)
def test_a_tensor_library_in_the_compiler_is_found(room: str, source: str) -> None:
    assert rules_broken(f"{room}/file.py", source) == ["torch-free"]
    assert rules_broken("runtime/launch.py", source) == []


def test_a_long_file_is_found() -> None:
    assert rules_broken("ir/ops.py", "X = 1\n" * MAX_FILE_LINES) == []
    assert rules_broken("ir/ops.py", "X = 1\n" * (MAX_FILE_LINES + 1)) == ["length"]


@pytest.mark.parametrize("head", ["def f():\n", "async def f():\n"])
def test_a_long_function_is_found(head: str) -> None:
    line = "    x = 1\n"
    assert rules_broken("ir/ops.py", head + line * (MAX_FUNCTION_LINES - 1)) == []
    assert rules_broken("ir/ops.py", head + line * MAX_FUNCTION_LINES) == ["length"]
    method = "class A:\n    " + head + "    " + line * MAX_FUNCTION_LINES
    assert rules_broken("ir/ops.py", method.replace("\n    x", "\n        x")) == ["length"]


@pytest.mark.parametrize("name", ["utils", "helpers", "common", "misc", "manager"])
def test_a_name_that_says_nothing_is_found(name: str) -> None:
    assert rules_broken(f"ir/{name}.py", "") == ["name"]
    assert rules_broken(f"ir/{name}/ops.py", "") == ["name"]
    assert rules_broken(f"ir/axis_{name}.py", "") == ["name"]
    assert rules_broken(f"{name}.py", "") == ["room", "name"]
    assert rules_broken(f"ir/{name}_subexpressions.py", "") == []


def test_a_violation_reads_like_a_compiler_message() -> None:
    (violation,) = check_source("ir/ops.py", "\nimport meshfuse.kernel.nodes")
    assert str(violation) == "ir/ops.py:2: [down] ir (2) imports meshfuse.kernel.nodes (5)"


# A planted gap in an interpretation's table.


class Shape(ABC):
    @abstractmethod
    def area(self) -> float: ...


class Polygon(Shape):
    """An abstract family: no abstract method of its own, but classes derive from it."""

    def area(self) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class Square(Polygon):
    side: float = 1.0


@dataclass(frozen=True, slots=True)
class Triangle(Polygon):
    base: float = 1.0


@dataclass(frozen=True, slots=True)
class Circle(Shape):
    radius: float = 1.0

    def area(self) -> float:
        return 3.0 * self.radius**2


SHAPES = {cls.__name__: cls for cls in (Shape, Polygon, Square, Triangle, Circle)}


def test_concrete_classes_are_each_found_once() -> None:
    assert concrete_classes(Shape) == (Circle, Square, Triangle)


def test_an_op_without_registration_is_found() -> None:
    @singledispatch
    def name(shape: object) -> str:
        raise TypeError(shape)

    @name.register
    def _(shape: Shape) -> str:
        raise TypeError(shape)

    name.register(Square, lambda shape: "square")
    assert missing_classes(name, Shape, concrete_classes(Shape)) == (Circle, Triangle)
    name.register(Polygon, lambda shape: "polygon")
    assert missing_classes(name, Shape, concrete_classes(Shape)) == (Circle,)
    name.register(Circle, lambda shape: "circle")
    assert missing_classes(name, Shape, concrete_classes(Shape)) == ()


def test_families_and_exemptions_bound_what_is_required() -> None:
    def required(families: tuple[str, ...], exempt: tuple[str, ...] = ()) -> tuple[type, ...]:
        return required_classes(Interpretation("m:f", families, exempt), Shape, SHAPES)

    assert required(("Shape",)) == (Circle, Square, Triangle)
    assert required(("Polygon",)) == (Square, Triangle)
    assert required(("Shape",), ("Polygon",)) == (Circle,)
    assert required(("Circle", "Square")) == (Circle, Square)
