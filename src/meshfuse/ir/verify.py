"""What holds of every Program between stages; a pass that breaks it is found at its own end."""

from __future__ import annotations

from collections.abc import Sequence, Set

from meshfuse.base.errors import InvariantError, UserError
from meshfuse.expr import IntExpr, const_value
from meshfuse.ir.axes import AxisKind, AxisName, IterDomain, TensorName
from meshfuse.ir.comm import Communication
from meshfuse.ir.infer import AxisShape, infer
from meshfuse.ir.mesh import ParallelType
from meshfuse.ir.ops import Expr
from meshfuse.ir.printer import print_expr
from meshfuse.ir.program import Program
from meshfuse.ir.rewrite import read_names
from meshfuse.ir.schedule import Step, step_results, step_sources


def verify(program: Program, verified: Program | None = None) -> None:
    """Raise InvariantError, naming the tensor or expression, unless all of this holds.

    What `program` shares with `verified`, of which all of it holds, is not looked at again: tensors
    whose definition and schedule are the same objects, and expressions on such tensors.

    Names: every name read is an input or defined before, once, and stands in the tables.
    Results: types and axes of outputs are what `infer` says, as far as extents can be compared.
    Loop nests: the leaves derive from the logical axes and cover each exactly once, and the logical
    ones likewise from the root axes, if there are any. No two tensors share an axis.
    Bindings: only leaves are bound, at most one leaf of a tensor axis to a given mesh axis, and the
    mesh has that axis, with the leaf's extent where it is static.
    Allocations: a permutation of the tensor axes; a broadcast axis has no contiguity flag, and an
    axis without one is broadcast or expanded.
    """
    _verify_names(program)
    changed = _changed_tensors(program, verified)
    known = set[int]() if verified is None else set(map(id, verified.fusion.exprs))
    for expr in program.fusion.exprs:
        if id(expr) not in known or not changed.isdisjoint((*read_names(expr), *expr.outs)):
            _verify_results(program, expr)
    for name in changed:
        _verify_axes(program, name)
        _verify_bindings(program, name)
        _verify_allocation(program, name)
    if changed:
        _verify_axes_are_own(program)


def _changed_tensors(program: Program, verified: Program | None) -> Set[TensorName]:
    """The tensors that `verified` lacks or has otherwise, in order."""
    if verified is None:
        return dict.fromkeys(program.fusion.tensors).keys()
    return dict.fromkeys(
        name
        for name, definition in program.fusion.tensors.items()
        if verified.fusion.tensors.get(name) is not definition
        or verified.schedules.get(name) is not program.schedule(name)
    ).keys()


# Names.


def _verify_names(program: Program) -> None:
    fusion = program.fusion
    known: set[str] = {*fusion.tensors, *fusion.scalars}
    if set(program.schedules) != set(fusion.tensors):
        odd = sorted(set(program.schedules) ^ set(fusion.tensors))
        raise InvariantError(f"tensors and schedules differ in {', '.join(odd)}")
    defined: set[str] = set()
    for name in fusion.inputs:
        _require(name in known, f"input {name} is in no table")
        _require(name not in defined, f"input {name} stands twice")
        defined.add(name)
    for expr in fusion.exprs:
        for name in (*read_names(expr), *expr.outs):
            if name not in known:
                raise InvariantError(f"{print_expr(expr)}: {name} is in no table")
        for name in read_names(expr):
            if name not in defined:
                raise InvariantError(f"{print_expr(expr)}: {name} is read before it is defined")
        for name in expr.outs:
            if name in defined:
                raise InvariantError(f"{print_expr(expr)}: {name} is defined twice")
            defined.add(name)
    for output in fusion.outputs:
        _require(output.tensor in fusion.tensors, f"output {output.tensor} is no tensor")
        _require(output.tensor in defined, f"output {output.tensor} is not defined")
        alias = output.alias
        _require(alias is None or alias in fusion.inputs, f"alias {alias} is no input")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantError(message)


# Results.


def _verify_results(program: Program, expr: Expr) -> None:
    try:
        results = infer(expr, program)
    except UserError as error:
        raise InvariantError(f"{print_expr(expr)}: {error}") from error
    for name, result in zip(expr.outs, results, strict=True):
        table = program.fusion.tensors if result.is_tensor else program.fusion.scalars
        if name not in table:
            kind = "tensor" if result.is_tensor else "scalar"
            raise InvariantError(f"{print_expr(expr)}: {name} should be a {kind}")
        found = table[name].dtype  # pyright: ignore[reportArgumentType]  # each table has its names
        if found is not result.dtype:
            raise InvariantError(
                f"{print_expr(expr)}: {name} has type {found.value}, not {result.dtype.value}"
            )
        if result.is_tensor:
            _verify_result_axes(program, expr, TensorName(name), result.axes)


def _verify_result_axes(
    program: Program, expr: Expr, name: TensorName, inferred: Sequence[AxisShape]
) -> None:
    recorded = [(axis.kind, axis.extent) for axis in program.tensor(name).maybe_root]
    has_partial = any(kind is AxisKind.partial for kind, _ in recorded)
    # A partial axis stands for reduced ones. A collective's result keeps the reduced axes that it
    # had when a reduction defined it.
    if has_partial or isinstance(expr, Communication):
        recorded = [axis for axis in recorded if axis[0].is_tensor_axis]
        inferred = [axis for axis in inferred if axis[0].is_tensor_axis]
    if not _agree(recorded, inferred):
        raise InvariantError(
            f"{print_expr(expr)}: {name} has axes {_brackets(recorded)}, not {_brackets(inferred)}"
        )


def _brackets(axes: Sequence[AxisShape]) -> str:
    return "[" + ", ".join(f"{kind.value}{{{extent}}}" for kind, extent in axes) + "]"


def _agree(recorded: Sequence[AxisShape], inferred: Sequence[AxisShape]) -> bool:
    """Equal kinds, and no two static extents that differ: symbols may stand for one size."""
    return len(recorded) == len(inferred) and all(
        mine[0] is theirs[0] and _may_be_equal(mine[1], theirs[1])
        for mine, theirs in zip(recorded, inferred, strict=True)
    )


def _may_be_equal(a: IntExpr, b: IntExpr) -> bool:
    return a is b or const_value(a) is None or const_value(b) is None


# Loop nests.


def _verify_axes(program: Program, name: TensorName) -> None:
    definition = program.tensor(name)
    logical = [axis.name for axis in definition.logical]
    if definition.root:
        derived = _derive(name, definition.root, definition.root_steps)
        if sorted(derived) != sorted(logical):
            raise InvariantError(
                f"{name}: the logical axes are [{', '.join(logical)}], but the root axes derive "
                f"[{', '.join(derived)}]"
            )
    else:
        _require(not definition.root_steps, f"{name}: root steps without root axes")
    schedule = program.schedule(name)
    left = _derive(name, definition.logical, schedule.steps)
    if sorted(schedule.leaves) != sorted(left):
        raise InvariantError(
            f"{name}: the leaves are [{', '.join(schedule.leaves)}], but the steps leave "
            f"[{', '.join(left)}]"
        )
    depth = schedule.inline_depth
    _require(0 <= depth <= len(left), f"{name}: inline depth {depth} of {len(left)} leaves")


def _derive(
    name: TensorName, start: Sequence[IterDomain], steps: Sequence[Step]
) -> tuple[AxisName, ...]:
    """The axes that are left after the steps."""
    made = [axis.name for axis in start]
    left = dict.fromkeys(made)
    for step in steps:
        for source in step_sources(step):
            if source not in left:
                raise InvariantError(
                    f"{name}: {step} takes {source}, which is not there (any more)"
                )
            del left[source]
        made += step_results(step)
        left |= dict.fromkeys(step_results(step))
    _require(
        len(set(made)) == len(made), f"{name}: an axis is made twice among [{', '.join(made)}]"
    )
    return tuple(left)


def _verify_axes_are_own(program: Program) -> None:
    """No two tensors share an axis."""
    owner: dict[AxisName, TensorName] = {}
    for tensor in program.fusion.tensors:
        for axis in program.all_axes(tensor):
            if owner.setdefault(axis, tensor) != tensor:
                raise InvariantError(f"axis {axis} belongs to {owner[axis]} and to {tensor}")


# Bindings.


def _verify_bindings(program: Program, name: TensorName) -> None:
    schedule = program.schedule(name)
    axes = program.all_axes(name)
    taken: set[ParallelType] = set()
    for leaf, bound in schedule.bindings.items():
        _require(leaf in schedule.leaves, f"{name}: {bound} is bound to {leaf}, which is no leaf")
        if not bound.is_mesh:
            continue
        if axes[leaf].kind.is_tensor_axis:
            _require(bound not in taken, f"{name}: {bound} is bound to two tensor axes")
            taken.add(bound)
        if schedule.mesh is None:
            continue
        if not schedule.mesh.has(bound):
            raise InvariantError(f"{name}: {schedule.mesh} has no {bound}")
        extent = const_value(axes[leaf].extent)
        if extent not in (None, schedule.mesh.axis_size(bound)):
            raise InvariantError(
                f"{name}: {bound} of {schedule.mesh} is bound to {axes[leaf]} of another size"
            )


# Allocations.


def _verify_allocation(program: Program, name: TensorName) -> None:
    allocation = program.schedule(name).allocation
    if allocation is None:
        return
    order, flags = allocation.order, allocation.contiguity
    axes = {axis.name: axis for axis in program.tensor(name).tensor_axes}
    if sorted(order) != sorted(axes):
        raise InvariantError(
            f"{name}: allocation [{', '.join(order)}] does not permute [{', '.join(axes)}]"
        )
    _require(len(flags) == len(order), f"{name}: {len(flags)} contiguity flags, {len(order)} axes")
    for axis, flag in zip(order, flags, strict=True):
        if axes[axis].kind is AxisKind.broadcast:
            _require(flag is None, f"{name}: broadcast axis {axes[axis]} has a contiguity flag")
