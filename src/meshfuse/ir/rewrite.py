"""What builders and passes make Programs of: new tensors, replaced expressions, parts of one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast, final

from meshfuse.base.dtypes import DataType
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import IntExpr, IntLike, free_symbols, substitute, symbol
from meshfuse.ir.axes import AxisName, IterDomain, ScalarName, TensorName
from meshfuse.ir.fusion import Fusion, Output, ScalarDef, TensorDef
from meshfuse.ir.infer import AxisShape, infer
from meshfuse.ir.ops import Expr
from meshfuse.ir.program import Program, fresh_name
from meshfuse.ir.schedule import Merge, Schedule, Split, Step, step_results, step_sources

Name = TensorName | ScalarName
_Value = TypeVar("_Value")


# New tensors and expressions.


def fresh_tensor_name(program: Program) -> tuple[Program, TensorName]:
    program, name = fresh_name(program, "T")
    return program, TensorName(name)


def fresh_scalar_name(program: Program) -> tuple[Program, ScalarName]:
    program, name = fresh_name(program, "c")
    return program, ScalarName(name)


def fresh_axes(
    program: Program, axes: Sequence[AxisShape]
) -> tuple[Program, tuple[IterDomain, ...]]:
    """New axes of these kinds and extents."""
    first = program.serials.get("a", 0)
    serials = {**program.serials, "a": first + len(axes)}
    named = tuple(
        IterDomain(AxisName(f"a{first + position}"), kind, extent)
        for position, (kind, extent) in enumerate(axes)
    )
    return replace(program, serials=serials), named


def add_tensor(
    program: Program,
    name: TensorName,
    definition: TensorDef,
    schedule: Schedule | None = None,
) -> Program:
    """Enter or replace a tensor. By default its loop nest is its logical axes."""
    if schedule is None:
        schedule = Schedule(tuple(axis.name for axis in definition.logical))
    fusion = replace(program.fusion, tensors={**program.fusion.tensors, name: definition})
    return replace(program, fusion=fusion, schedules={**program.schedules, name: schedule})


def new_tensor(
    program: Program, dtype: DataType, axes: Sequence[AxisShape]
) -> tuple[Program, TensorName]:
    """A tensor with fresh axes that nothing defines yet."""
    program, name = fresh_tensor_name(program)
    program, logical = fresh_axes(program, axes)
    return add_tensor(program, name, TensorDef(dtype, logical)), name


def append(program: Program, expr: Expr) -> Program:
    """Add an expression whose outputs exist."""
    exprs = (*program.fusion.exprs, expr)
    return replace(program, fusion=replace(program.fusion, exprs=exprs))


def define(program: Program, expr: Expr) -> Program:
    """Add an expression and enter its outputs, whose names are fresh, as inference describes them.

    Raises UserError, restating the call, if the inputs do not fit.
    """
    for name, result in zip(expr.outs, infer(expr, program), strict=True):
        if result.is_tensor:
            program, axes = fresh_axes(program, result.axes)
            program = add_tensor(program, TensorName(name), TensorDef(result.dtype, axes))
        else:
            scalars = {**program.fusion.scalars, ScalarName(name): ScalarDef(result.dtype)}
            program = replace(program, fusion=replace(program.fusion, scalars=scalars))
    return append(program, expr)


def copy_tensor(
    program: Program, name: TensorName, *, dtype: DataType | None = None
) -> tuple[Program, TensorName]:
    """A tensor like `name` under a fresh name, with fresh axes, that nothing defines yet.

    It has the tensor axes only, the same mesh, and the steps and bindings that concern those axes.
    Memory order, memory type and inlining are not copied.
    """
    definition, schedule = program.tensor(name), program.schedule(name)
    program, out = fresh_tensor_name(program)
    program, logical, copied = copy_axes(program, definition.tensor_axes, schedule)
    return add_tensor(program, out, TensorDef(dtype or definition.dtype, logical), copied), out


def copy_axes(
    program: Program, axes: Sequence[IterDomain], schedule: Schedule
) -> tuple[Program, tuple[IterDomain, ...], Schedule]:
    """Fresh axes like `axes`, and what concerns those in `schedule`: mesh, loops and bindings."""
    program, fresh = fresh_axes(program, [(axis.kind, axis.extent) for axis in axes])
    renamed = {old.name: new.name for old, new in zip(axes, fresh, strict=True)}
    program, steps = replay_steps(program, schedule.steps, renamed)
    bindings = {renamed[leaf]: to for leaf, to in schedule.bindings.items() if leaf in renamed}
    leaves = tuple(renamed[leaf] for leaf in schedule.leaves if leaf in renamed)
    return program, fresh, Schedule(leaves, steps, bindings, schedule.mesh)


def replay_steps(
    program: Program, steps: Sequence[Step], renamed: dict[AxisName, AxisName]
) -> tuple[Program, tuple[Step, ...]]:
    """The steps on renamed axes, with fresh names for what they derive.

    Those names are added to `renamed`. A step on an axis that `renamed` lacks is left out.
    """
    replayed: list[Step] = []
    for step in steps:
        if not all(source in renamed for source in step_sources(step)):
            continue
        for made in step_results(step):
            program, fresh = fresh_name(program, "a")
            renamed[made] = AxisName(fresh)
        replayed.append(rename_axes(step, renamed))
    return program, tuple(replayed)


def rename_axes(step: Step, renamed: Mapping[AxisName, AxisName]) -> Step:
    """The step with those axes that have a new name under it."""
    return _map_values(step, partial(_renamed, mapping=renamed))


def _renamed(value: object, mapping: Mapping[Any, Any]) -> object:
    return mapping.get(value, value) if isinstance(value, str) else value


# Expressions.


def map_names(expr: Expr, mapping: Mapping[Name, Name]) -> Expr:
    """`expr` with names replaced, among its outputs, operands, and the symbols of its IntExprs."""
    symbols: dict[str | IntExpr, IntLike] = {old: symbol(new) for old, new in mapping.items()}

    def renamed(value: object) -> object:
        if isinstance(value, IntExpr):
            return substitute(value, symbols) if _mentions(value, mapping) else value
        return _renamed(value, mapping)

    return _map_values(expr, renamed)


def replace_expr(program: Program, old: Expr, new: Sequence[Expr]) -> Program:
    """Put `new` in the place of `old`."""
    exprs: list[Expr] = []
    for expr in program.fusion.exprs:
        exprs += new if expr is old else [expr]
    return with_exprs(program, exprs)


def with_exprs(program: Program, exprs: Sequence[Expr]) -> Program:
    return replace(program, fusion=replace(program.fusion, exprs=tuple(exprs)))


def redirect_uses(
    program: Program, old: Name, new: Name, exprs: Sequence[Expr] | None = None
) -> Program:
    """Let consumers of `old` read `new`: those in `exprs`, by default all of them and the outputs.

    The expression that defines `new` keeps reading `old`.
    """
    mapping = {old: new}

    def redirected(expr: Expr) -> Expr:
        if old not in expr.ins or new in expr.outs or old in expr.outs:
            return expr
        return expr if exprs is not None and expr not in exprs else map_names(expr, mapping)

    program = with_exprs(program, [redirected(expr) for expr in program.fusion.exprs])
    if exprs is not None:
        return program
    outputs = tuple(
        replace(output, tensor=TensorName(new)) if output.tensor == old else output
        for output in program.fusion.outputs
    )
    return replace(program, fusion=replace(program.fusion, outputs=outputs))


def _map_values(value: _Value, function: Callable[[object], object]) -> _Value:
    """A dataclass of names, expressions and tuples of them, with `function` applied to each."""
    changed: dict[str, object] = {}
    for field in dataclasses.fields(cast(Any, value)):
        old: object = getattr(value, field.name)
        if isinstance(old, tuple):
            items = cast(tuple[object, ...], old)
            changed[field.name] = tuple(function(item) for item in items)
        else:
            changed[field.name] = function(old)
    return type(value)(**changed)


def _mentions(expr: IntExpr, names: Container[Any]) -> bool:
    return any(found.name in names for found in free_symbols(expr))


# Parts of a Program.


def read_names(expr: Expr) -> tuple[Name, ...]:
    """The tensors and scalars among an expression's operands, each once."""
    return tuple(dict.fromkeys(operand for operand in expr.ins if isinstance(operand, str)))


@final
@frozen_dataclass
class NameIndex:
    """Of a Program: who reads each name, and the place of each in its table, for `extract`.

    Readers are identities of expressions. Outputs of the program are `returned`.
    """

    readers: Mapping[Name, Sequence[int]]
    places: Mapping[Name, int]
    returned: Set[TensorName]


def index_names(program: Program) -> NameIndex:
    """Linear in the size of the program."""
    fusion = program.fusion
    readers: dict[Name, list[int]] = {}
    for expr in fusion.exprs:
        for name in read_names(expr):
            readers.setdefault(name, []).append(id(expr))
    places = {name: place for place, name in enumerate((*fusion.tensors, *fusion.scalars))}
    return NameIndex(readers, places, {output.tensor for output in fusion.outputs})


def extract(program: Program, exprs: Sequence[Expr], index: NameIndex | None = None) -> Program:
    """The Program of only these expressions, in the order given, under the same names.

    Inputs are the names read but not defined inside, in order of first use; outputs the tensors
    defined inside that are read outside or are outputs of `program` (aliases are not taken over).
    Symbols of extents stay free. Who takes many parts out of a program makes its `index` once.
    """
    index = index_names(program) if index is None else index
    defined = dict.fromkeys(name for expr in exprs for name in expr.outs)
    inputs = dict.fromkeys(
        name for expr in exprs for name in read_names(expr) if name not in defined
    )
    inside = set(map(id, exprs))
    tensors, scalars = program.fusion.tensors, program.fusion.scalars
    outputs = tuple(
        Output(TensorName(name))
        for name in defined
        if name in tensors
        and (name in index.returned or not inside.issuperset(index.readers.get(name, ())))
    )
    named = sorted((*defined, *inputs), key=index.places.__getitem__)
    fusion = Fusion(
        {TensorName(name): tensors[TensorName(name)] for name in named if name in tensors},
        {ScalarName(name): scalars[ScalarName(name)] for name in named if name in scalars},
        tuple(exprs),
        tuple(inputs),
        outputs,
    )
    schedules = {name: program.schedule(name) for name in fusion.tensors}
    return replace(program, fusion=fusion, schedules=schedules)


def remove_dead(program: Program) -> Program:
    """Drop expressions whose results nothing needs, and the tensors and scalars that go with them.

    Inputs stay. A scalar is needed, too, where its symbol stands in an extent or operand that is.
    """
    needed: set[str] = {output.tensor for output in program.fusion.outputs}
    for name in (*needed, *program.fusion.inputs):
        needed |= set(_symbols_of_tensor(program, name))
    kept: list[Expr] = []
    for expr in reversed(program.fusion.exprs):
        if not needed.intersection(expr.outs):
            continue
        kept.append(expr)
        needed |= set(read_names(expr))
        needed |= {s.name for op in expr.ins if isinstance(op, IntExpr) for s in free_symbols(op)}
        for name in (*expr.outs, *read_names(expr)):
            needed |= set(_symbols_of_tensor(program, name))
    return without_unnamed(with_exprs(program, kept[::-1]))


def _symbols_of_tensor(program: Program, name: str) -> Iterator[str]:
    """Names of the symbols in a tensor's extents; none for a scalar."""
    definition = program.fusion.tensors.get(TensorName(name))
    for axis in (*definition.logical, *definition.root) if definition is not None else ():
        yield from (found.name for found in free_symbols(axis.extent))


def without_unnamed(program: Program) -> Program:
    """Drop tensors and scalars that are neither inputs nor named by an expression."""
    fusion = program.fusion
    named: set[str] = set(fusion.inputs)
    for expr in fusion.exprs:
        named.update(expr.outs)
        named.update(read_names(expr))
    return replace(
        program,
        fusion=replace(
            fusion,
            tensors={name: value for name, value in fusion.tensors.items() if name in named},
            scalars={name: value for name, value in fusion.scalars.items() if name in named},
        ),
        schedules={name: value for name, value in program.schedules.items() if name in named},
    )


def substitute_extents(program: Program, mapping: Mapping[IntExpr, IntExpr]) -> Program:
    """Replace symbols or subexpressions in all extents, split factors and integer operands."""

    replacements: dict[str | IntExpr, IntLike] = {**mapping}

    def changed(value: object) -> object:
        if isinstance(value, IntExpr):
            return substitute(value, replacements)
        if isinstance(value, IterDomain | Split | Merge):
            return _map_values(value, changed)
        return value

    fusion: Fusion = replace(
        program.fusion,
        tensors={name: _map_values(old, changed) for name, old in program.fusion.tensors.items()},
        exprs=tuple(_map_values(expr, changed) for expr in program.fusion.exprs),
    )
    schedules = {
        name: replace(old, steps=tuple(_map_values(step, changed) for step in old.steps))
        for name, old in program.schedules.items()
    }
    return replace(program, fusion=fusion, schedules=schedules)
