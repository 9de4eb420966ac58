"""What an expression defines: element type and axes of each output, from its inputs alone.

`infer` serves the builders, which make outputs of its results, and the verifier, which compares.
What an expression leaves open (the type of a cast, the extents of an expand) is read from its
output's definition. Where extents meet, a static one is kept, else the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import singledispatch
from typing import final

from meshfuse.base.dtypes import (
    REDUCED_FLOATS,
    DataType,
    compute_dtype,
    is_floating,
    is_integral,
    promote,
)
from meshfuse.base.errors import UserError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import IntExpr, const, const_value
from meshfuse.ir.axes import AxisKind, ScalarName, TensorName
from meshfuse.ir.comm import Communication, Deliver, Fetch
from meshfuse.ir.describe import describe_call
from meshfuse.ir.ops import (
    Broadcast,
    Cast,
    Expand,
    Expr,
    Linear,
    Literal,
    MatMul,
    Operand,
    Permute,
    Pointwise,
    Reduction,
    Reshape,
    Set,
    Squeeze,
    Welford,
)
from meshfuse.ir.pointwise import SCALAR_FUNCTIONS, ResultRule
from meshfuse.ir.program import Program
from meshfuse.ir.terms import Terms

AxisShape = tuple[AxisKind, IntExpr]
"""Kind and extent: an axis without its name."""

ONE: AxisShape = (AxisKind.broadcast, const(1))


@final
@frozen_dataclass
class Result:
    """One output: its root axes, reduced ones among them. A scalar has none, and is no tensor."""

    dtype: DataType
    axes: tuple[AxisShape, ...]
    is_tensor: bool = True


@singledispatch
def infer(expr: Expr, program: Program) -> tuple[Result, ...]:
    """One result per output of `expr`. Raises UserError if the inputs do not fit."""
    raise TypeError(f"no inference rule for {type(expr).__name__} in {program}")


def tensor_shape(program: Program, tensor: TensorName) -> tuple[AxisShape, ...]:
    """Kinds and extents of the tensor axes."""
    return tuple((axis.kind, axis.extent) for axis in program.tensor(tensor).tensor_axes)


# Element types.


Lookup = Callable[[TensorName | ScalarName], tuple[DataType, bool]]
"""The element type of a name, and whether it is a tensor."""


def lookup_in(program: Program) -> Lookup:
    """The types of a program's names."""
    tensors, scalars = program.fusion.tensors, program.fusion.scalars

    def lookup(name: TensorName | ScalarName) -> tuple[DataType, bool]:
        tensor = tensors.get(TensorName(name))
        return (scalars[ScalarName(name)].dtype, False) if tensor is None else (tensor.dtype, True)

    return lookup


def operand_dtype(operand: Operand, lookup: Lookup) -> tuple[DataType, bool]:
    """The type with which an operand is promoted, and whether it is a tensor.

    Scalars of 16 bits count as Float.
    """
    if isinstance(operand, Literal):
        return compute_dtype(operand.dtype), False
    if isinstance(operand, IntExpr):
        return DataType.Int, False
    dtype, is_tensor = lookup(operand)
    return (dtype if is_tensor else compute_dtype(dtype)), is_tensor


def promoted_dtype(operands: Sequence[Operand], lookup: Lookup) -> DataType:
    """Promotion in an expression: tensors of any rank, then scalars.

    Who builds an expression ranks 0-dim tensors below others, and casts those that lose.
    """
    found = [operand_dtype(operand, lookup) for operand in operands]
    tensors = [dtype for dtype, is_tensor in found if is_tensor]
    return promote(tensors, (), [dtype for dtype, is_tensor in found if not is_tensor])


def is_tensor(program: Program, operand: Operand) -> bool:
    return as_tensor(program, operand) is not None


def as_tensor(program: Program, operand: Operand) -> TensorName | None:
    """The operand if it is a tensor."""
    if isinstance(operand, str) and operand in program.fusion.tensors:
        return TensorName(operand)
    return None


def pointwise_dtypes(
    program: Program, function: str, args: Sequence[Operand]
) -> tuple[DataType, DataType]:
    """The type that operands convert to before `function` is applied, and the type of the result.

    The condition of `where` stays bool. 16-bit floats then compute in float32.
    """
    promoted = promoted_dtype(values_of(function, args), lookup_in(program))
    return dtypes_after_promotion(function, promoted)


def values_of(function: str, args: Sequence[Operand]) -> Sequence[Operand]:
    """The operands that take part in promotion: all but the condition of `where`."""
    return args[1:] if SCALAR_FUNCTIONS[function].rule is ResultRule.select else args


def dtypes_after_promotion(function: str, promoted: DataType) -> tuple[DataType, DataType]:
    """As `pointwise_dtypes`, from the promoted type of the values."""
    match SCALAR_FUNCTIONS[function].rule:
        case ResultRule.default:
            result = compute_dtype(promoted)
            return result, result
        case ResultRule.floating:
            result = compute_dtype(promoted) if is_floating(promoted) else DataType.Float
            return result, result
        case ResultRule.keep | ResultRule.select:
            return promoted, promoted
        case ResultRule.comparison:
            return promoted, DataType.Bool


def reduction_dtype(function: str, dtype: DataType) -> DataType:
    """Sums and products of Int32 and Bool are Int; all else keeps its type."""
    if function in ("sum", "prod") and dtype in (DataType.Int32, DataType.Bool):
        return DataType.Int
    return dtype


# Axes.


def meet(call: str, *axes: AxisShape) -> AxisShape:
    """The axis where operands meet, broadcast axes stretching. Unequal static sizes: UserError."""
    solid = [axis for axis in axes if axis[0] is not AxisKind.broadcast]
    if not solid:
        return ONE
    return AxisKind.iteration, meet_extents(call, *(extent for _, extent in solid))


def meet_extents(call: str, *extents: IntExpr) -> IntExpr:
    """The first static extent, else the first. Raises UserError for unequal static sizes."""
    static = [extent for extent in extents if const_value(extent) is not None]
    if any(extent is not static[0] for extent in static):
        sizes = " and ".join(str(extent) for extent in dict.fromkeys(static))
        raise UserError(
            f"{call}: sizes {sizes} meet on one axis; they must be equal, or declared as 1"
        )
    return static[0] if static else extents[0]


def _align(call: str, *shapes: Sequence[AxisShape]) -> tuple[AxisShape, ...]:
    """Shapes aligned at their last axis, axis by axis."""
    rank = max((len(shape) for shape in shapes), default=0)
    padded = [(ONE,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(meet(call, *column) for column in zip(*padded, strict=True))


@infer.register
def _(expr: Pointwise, program: Program) -> tuple[Result, ...]:
    call = describe_call(program, expr.function, expr.args)
    row = SCALAR_FUNCTIONS[expr.function]
    if len(expr.args) != row.arity:
        raise UserError(f"{call}: takes {row.arity} operands, got {len(expr.args)}")
    if row.rule is ResultRule.select:
        if operand_dtype(expr.args[0], lookup_in(program))[0] is not DataType.Bool:
            raise UserError(f"{call}: Condition should be of DataType Bool")
    operands, result = pointwise_dtypes(program, expr.function, expr.args)
    if operands is DataType.Bool and not row.takes_bool:
        raise UserError(f"{call}: not defined for bool; cast an operand first")
    if is_integral(operands) and not row.takes_integers:
        raise UserError(f"{call}: takes floating types; cast the operand first")
    tensors = [as_tensor(program, arg) for arg in expr.args]
    shapes = [tensor_shape(program, tensor) for tensor in tensors if tensor is not None]
    return (Result(result, _align(call, *shapes), is_tensor=bool(shapes)),)


@infer.register
def _(expr: Cast, program: Program) -> tuple[Result, ...]:
    return (Result(program.tensor(expr.out).dtype, tensor_shape(program, expr.src)),)


@infer.register(Set)
@infer.register(Communication)
def _(expr: Set | Communication, program: Program) -> tuple[Result, ...]:
    return (Result(program.tensor(expr.src).dtype, tensor_shape(program, expr.src)),)


@infer.register(Fetch)
@infer.register(Deliver)
def _(expr: Fetch | Deliver, program: Program) -> tuple[Result, ...]:
    """The chunk is as large as the loop that it is in says."""
    return (Result(program.tensor(expr.src).dtype, tensor_shape(program, expr.out)),)


@infer.register
def _(expr: Broadcast, program: Program) -> tuple[Result, ...]:
    shape = iter(tensor_shape(program, expr.src))
    call = describe_call(program, "broadcast", [expr.src], inserted=list(expr.inserted))
    kept, rank = expr.inserted.count(False), program.tensor(expr.src).ndim
    if kept != rank:
        raise UserError(f"{call}: {kept} flags are false; the tensor has {rank} axes")
    axes = tuple(ONE if inserted else next(shape) for inserted in expr.inserted)
    return (Result(program.tensor(expr.src).dtype, axes),)


@infer.register
def _(expr: Terms, program: Program) -> tuple[Result, ...]:
    axes = (*tensor_shape(program, expr.src), (AxisKind.iteration, const(expr.count)))
    return (Result(program.tensor(expr.src).dtype, axes),)


@infer.register
def _(expr: Expand, program: Program) -> tuple[Result, ...]:
    src, out = tensor_shape(program, expr.src), tensor_shape(program, expr.out)
    if len(src) != len(out):
        raise UserError(f"expand of {len(src)} axes to {len(out)}")
    axes: list[AxisShape] = []
    for had, wanted in zip(src, out, strict=True):
        if had[0] is not AxisKind.broadcast:
            meet_extents("expand", had[1], wanted[1])
        axes.append(wanted if had[0] in (AxisKind.broadcast, wanted[0]) else had)
    return (Result(program.tensor(expr.src).dtype, tuple(axes)),)


@infer.register
def _(expr: Permute, program: Program) -> tuple[Result, ...]:
    shape = tensor_shape(program, expr.src)
    if sorted(expr.dims) != list(range(len(shape))):
        call = describe_call(program, "permute", [expr.src], dims=list(expr.dims))
        raise UserError(f"{call}: dims must be a permutation of 0..{len(shape) - 1}")
    return (Result(program.tensor(expr.src).dtype, tuple(shape[dim] for dim in expr.dims)),)


@infer.register
def _(expr: Squeeze, program: Program) -> tuple[Result, ...]:
    shape = tensor_shape(program, expr.src)
    call = describe_call(program, "squeeze", [expr.src], dims=list(expr.dims))
    for dim in expr.dims:
        meet_extents(call, shape[dim][1], const(1))
    axes = tuple(axis for dim, axis in enumerate(shape) if dim not in expr.dims)
    return (Result(program.tensor(expr.src).dtype, axes),)


@infer.register
def _(expr: Reshape, program: Program) -> tuple[Result, ...]:
    """The root axes."""
    shape = tensor_shape(program, expr.src)
    if any(kind is AxisKind.broadcast for kind, _ in shape):
        call = describe_call(program, "reshape", [expr.src])
        raise UserError(f"{call}: squeeze the axes of size 1 first")
    return (Result(program.tensor(expr.src).dtype, shape),)


def _reduced(shape: Sequence[AxisShape], dims: Sequence[int]) -> tuple[AxisShape, ...]:
    return tuple(
        (AxisKind.reduction, axis[1]) if dim in dims else axis for dim, axis in enumerate(shape)
    )


@infer.register
def _(expr: Reduction, program: Program) -> tuple[Result, ...]:
    dtype = reduction_dtype(expr.function, program.tensor(expr.src).dtype)
    return (Result(dtype, _reduced(tensor_shape(program, expr.src), expr.axes)),)


@infer.register
def _(expr: Welford, program: Program) -> tuple[Result, ...]:
    dtype = program.tensor(expr.src).dtype
    if not is_floating(dtype) or dtype in REDUCED_FLOATS:
        call = describe_call(program, "welford", [expr.src], dims=list(expr.axes))
        raise UserError(f"{call}: takes float32 or float64; cast the operand first")
    shapes = [tensor_shape(program, TensorName(str(part))) for part in expr.ins]
    if any(len(shape) != len(shapes[0]) for shape in shapes):
        call = describe_call(program, "welford", expr.ins, dims=list(expr.axes))
        raise UserError(f"{call}: the moments of parts must have like axes")
    axes = _reduced(shapes[0], expr.axes)
    return (Result(dtype, axes), Result(dtype, axes), Result(DataType.Int, axes))


@infer.register
def _(expr: MatMul, program: Program) -> tuple[Result, ...]:
    call = describe_call(program, "matmul", [expr.a, expr.b])
    _require_equal_dtypes(call, program, [expr.a, expr.b])
    a, b = tensor_shape(program, expr.a), tensor_shape(program, expr.b)
    if not a or not b:
        raise UserError(f"{call}: both operands need at least one axis")
    contracted = meet_extents(call, a[-1][1], b[-2 if len(b) > 1 else -1][1])
    batch = _align(call, a[:-2], b[:-2])
    axes = (*batch, *a[-2:-1], *(b[-1:] if len(b) > 1 else ()), (AxisKind.reduction, contracted))
    return (Result(program.tensor(expr.a).dtype, axes),)


@infer.register
def _(expr: Linear, program: Program) -> tuple[Result, ...]:
    tensors = [expr.src, expr.weight] + ([] if expr.bias is None else [expr.bias])
    call = describe_call(program, "linear", tensors)
    _require_equal_dtypes(call, program, tensors)
    src, weight = tensor_shape(program, expr.src), tensor_shape(program, expr.weight)
    if not src or len(weight) < 2:
        raise UserError(f"{call}: takes src [*batch, k] and weight [*d, n, k]")
    if expr.bias is not None:
        bias = tensor_shape(program, expr.bias)
        if len(bias) != len(weight) - 1:
            raise UserError(f"{call}: the bias of weight [*d, n, k] is [*d, n]")
        for have, want in zip(bias, weight[:-1], strict=True):
            meet_extents(call, have[1], want[1])
    contracted = meet_extents(call, src[-1][1], weight[-1][1])
    axes = (*weight[:-2], *src[:-1], weight[-2], (AxisKind.reduction, contracted))
    return (Result(program.tensor(expr.src).dtype, axes),)


def _require_equal_dtypes(call: str, program: Program, tensors: Sequence[TensorName]) -> None:
    if len({program.tensor(tensor).dtype for tensor in tensors}) > 1:
        raise UserError(f"{call}: operands must have one element type; cast one of them")
