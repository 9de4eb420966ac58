"""The mutable part of a definition: its program so far, its handles, and the calls that made it.

Everything below floor 12 is frozen (law 2). A handle is a (recording, name) pair; a mutator
replaces the recording's Program, or leaves it as it was when it raises.
"""

from __future__ import annotations

import math
import re
import textwrap
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import field
from enum import Enum
from typing import Any, TypeVar, final

import torch

from meshfuse.base.dtypes import DataType
from meshfuse.base.errors import UserError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr.nodes import IntExpr
from meshfuse.ir.mesh import DeviceMesh, ParallelType
from meshfuse.ir.program import Program

AnyHandle = TypeVar("AnyHandle", bound="Handle")

LONGEST_TEXT = 200
"""Characters of an argument that an error shows."""

_SYMBOL = re.compile(r"[A-Za-z_][A-Za-z_0-9.]*")


class Handle(ABC):
    """Abstract: what users hold. Compared by identity; a recording makes one object per name."""

    __slots__ = ("__weakref__", "recording")
    recording: Recording

    @abstractmethod
    def to_source(self) -> str:
        """The Python expression that stands for this handle in `repr(fd)`."""

    @abstractmethod
    def to_text(self) -> str:
        """The name that errors and program text use."""


@final
@frozen_dataclass
class Call:
    """A call as the user wrote it: `receiver.function(*arguments, **keywords)`.

    Keywords that have their default are left out by whoever makes the Call.
    """

    function: str
    arguments: tuple[object, ...] = ()
    keywords: Mapping[str, object] = field(default_factory=dict)
    receiver: Handle | None = None

    def to_source(self) -> str:
        """Python that repeats the call, with tensors named as in `repr(fd)`."""
        return self._render(to_source)

    def __str__(self) -> str:
        """The call as errors restate it, with tensors named as in program text."""
        return self._render(to_text).removeprefix("fd.ops.").removeprefix("fd.")

    def _render(self, render: Callable[[object], str]) -> str:
        parts = [render(argument) for argument in self.arguments]
        parts += [f"{name}={render(value)}" for name, value in self.keywords.items()]
        receiver = "" if self.receiver is None else render(self.receiver) + "."
        return f"{receiver}{self.function}({', '.join(parts)})"


@final
class Recording:
    """What one definition has said so far.

    `journal` holds the calls as Python, in order: replaying them makes an equal Program. A
    recording freezes at the definition's first execution.
    """

    __slots__ = ("__weakref__", "_handles", "frozen", "journal", "lock", "program")

    def __init__(self) -> None:
        self.program = Program()
        self.journal: list[str] = []
        self.lock = threading.RLock()
        self.frozen = False
        self._handles: dict[Hashable, Handle] = {}

    def define(
        self, call: Call, verb: Callable[[Program], tuple[Program, Sequence[str]]]
    ) -> tuple[str, ...]:
        """Replace the program by what `verb` makes of it, and return the names that it defined."""
        with self.lock:
            if self.frozen:
                raise UserError(
                    f"{call}: this definition has been executed, and its program is fixed; "
                    "write the change into a new FusionDefinition"
                )
            statement = call.to_source()  # before the verb: positions are those that the user saw
            self.program, names = verb(self.program)
            targets = ", ".join(source_name(name) for name in names)
            self.journal.append(f"{targets} = {statement}" if targets else statement)
            return tuple(names)

    def change(self, call: Call, verb: Callable[[Program], Program]) -> None:
        """As `define`, for a verb that defines nothing."""
        self.define(call, lambda program: (verb(program), ()))

    def change_copy(self, program: Program, verb: Callable[[], None]) -> Program:
        """What `verb` makes of `program` through the handles; the recording stays as it is."""
        with self.lock:
            kept = self.program, self.journal, self.frozen
            self.program, self.journal, self.frozen = program, [], False
            try:
                verb()
                return self.program
            finally:
                self.program, self.journal, self.frozen = kept

    def handle(self, key: Hashable, make: Callable[[], AnyHandle]) -> AnyHandle:
        """The one handle of `key`, made at first request."""
        with self.lock:
            found: Any = self._handles.get(key)
            if found is None:
                found = self._handles[key] = make()
            return found

    def own(self, call: Call, handle: AnyHandle) -> AnyHandle:
        """`handle`, or UserError where it belongs to another definition."""
        if handle.recording is not self:
            raise UserError(
                f"{call}: {handle.to_text()} belongs to another FusionDefinition; "
                "a program uses its own tensors and scalars only"
            )
        return handle

    def size_source(self, expression: IntExpr) -> str:
        """Python for an integer in the program's sizes, which become sizes of tensors."""
        whole = self._symbol_source(str(expression))
        if whole != str(expression):
            return whole

        def replace(match: re.Match[str]) -> str:
            return self._symbol_source(match.group())

        return _SYMBOL.sub(replace, str(expression))

    def _symbol_source(self, symbol: str) -> str:
        for name, definition in self.program.fusion.tensors.items():
            for position, axis in enumerate(definition.tensor_axes):
                if str(axis.extent) == symbol:
                    return f"fd.ops.size({source_name(name)}, {position})"
        return symbol  # min and max of expressions


def source_name(name: str) -> str:
    """The Python variable of a tensor or scalar: `T3` is `tv3`, `c0` is `c0`."""
    return f"tv{name[1:]}" if name.startswith("T") else name


def to_source(value: object) -> str:
    """Python that makes `value`, given `fd` and the names that `meshfuse` exports."""
    return value.to_source() if isinstance(value, Handle) else _render_value(value, to_source)


def to_text(value: object) -> str:
    """`value` as an error restates it: one line, and no more of it than says what it is."""
    match value:
        case Handle():
            return value.to_text()
        case torch.Tensor():
            return f"tensor of shape {list(value.shape)}"
        case _:
            return textwrap.shorten(_render_value(value, to_text), LONGEST_TEXT, placeholder="...")


def _render_value(value: object, render: Callable[[object], str]) -> str:
    match value:
        case float() if not math.isfinite(value):
            return f'float("{value}")'
        case DeviceMesh():
            names = f", names={list(value.names)}" if any(value.names) else ""
            return f"multidevice.DeviceMesh({nest_ranks(value.ids, value.shape)}{names})"
        case ParallelType():
            named = value.name in vars(ParallelType)
            return repr(value) if named else f"ParallelType.mesh({value.mesh_position})"
        case DataType():
            return repr(value)
        case Enum():
            return f"{type(value).__name__}.{value.name}"
        case list() | tuple():
            return f"[{', '.join(render(item) for item in value)}]"
        case dict():
            pairs = (f"{render(key)}: {render(item)}" for key, item in value.items())
            return "{" + ", ".join(pairs) + "}"
        case _:
            return repr(value)


def nest_ranks(ids: Sequence[int], shape: Sequence[int]) -> list[Any]:
    """The ranks of a mesh as the nested list that DeviceMesh takes."""
    if len(shape) <= 1:
        return list(ids)
    step = len(ids) // shape[0]
    return [nest_ranks(ids[k * step : (k + 1) * step], shape[1:]) for k in range(shape[0])]
