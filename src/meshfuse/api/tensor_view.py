"""TensorView and Val: handles with arithmetic. Each is a (recording, name) pair, nothing more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from meshfuse.api.constants import constant
from meshfuse.api.iter_domain import IterDomain, TensorDomain, iter_domain
from meshfuse.api.mesh import DeviceMesh
from meshfuse.api.recording import Call, Handle, Recording, source_name, to_source
from meshfuse.api.size_arithmetic import fold_sizes
from meshfuse.base.dtypes import DataType, Scalar, dtype_of_value
from meshfuse.base.errors import UserError, UserTypeError
from meshfuse.expr.nodes import Const, IntExpr
from meshfuse.ir import build, transforms
from meshfuse.ir import mesh as ir_mesh
from meshfuse.ir.axes import AxisName, ScalarName, TensorName
from meshfuse.ir.describe import describe
from meshfuse.ir.fusion import TensorDef
from meshfuse.ir.mesh import ParallelType
from meshfuse.ir.ops import Literal, Operand
from meshfuse.ir.program import Program
from meshfuse.ir.schedule import MemoryType, Schedule

ScalarOperand = ScalarName | Literal | IntExpr


class Arithmetic(Handle):
    """Abstract: what the operators do. `<` and its like compare elements; `==` stays identity."""

    __slots__ = ()

    def __add__(self, other: Value) -> Any:
        return apply_function("add", (self, other))

    def __radd__(self, other: Value) -> Any:
        return apply_function("add", (other, self))

    def __sub__(self, other: Value) -> Any:
        return apply_function("sub", (self, other))

    def __rsub__(self, other: Value) -> Any:
        return apply_function("sub", (other, self))

    def __mul__(self, other: Value) -> Any:
        return apply_function("mul", (self, other))

    def __rmul__(self, other: Value) -> Any:
        return apply_function("mul", (other, self))

    def __truediv__(self, other: Value) -> Any:
        return apply_function("div", (self, other))

    def __rtruediv__(self, other: Value) -> Any:
        return apply_function("div", (other, self))

    def __pow__(self, other: Value) -> Any:
        return apply_function("pow", (self, other))

    def __rpow__(self, other: Value) -> Any:
        return apply_function("pow", (other, self))

    def __neg__(self) -> Any:
        return apply_function("neg", (self,))

    def __abs__(self) -> Any:
        return apply_function("abs", (self,))

    def __lt__(self, other: Value) -> Any:
        return apply_function("lt", (self, other))

    def __le__(self, other: Value) -> Any:
        return apply_function("le", (self, other))

    def __gt__(self, other: Value) -> Any:
        return apply_function("gt", (self, other))

    def __ge__(self, other: Value) -> Any:
        return apply_function("ge", (self, other))

    def __bool__(self) -> bool:
        raise UserTypeError(
            f"bool({self.to_text()}): its value is known only when the program runs; "
            "use fd.ops.where, or compare handles with `is`"
        )


@final
class Val(Arithmetic):
    """A scalar: a constant, a scalar input, the result of scalar arithmetic, or a size."""

    __slots__ = ("operand",)
    operand: ScalarOperand

    def __init__(self, recording: Recording, operand: ScalarOperand) -> None:
        self.recording = recording
        self.operand = operand

    def __floordiv__(self, other: Val | Scalar) -> Any:
        """The quotient of two integers, truncated."""
        return apply_function("div", (self, other))

    def __rfloordiv__(self, other: Val | Scalar) -> Any:
        return apply_function("div", (other, self))

    def dtype(self) -> DataType:
        match self.operand:
            case Literal(_, dtype):
                return dtype
            case IntExpr():
                return DataType.Int
            case name:
                return self.recording.program.fusion.scalars[name].dtype

    def is_symbolic(self) -> bool:
        """False for a constant."""
        return not isinstance(self.operand, Literal | Const)

    def is_tensor(self) -> bool:
        return False

    def to_source(self) -> str:
        match self.operand:
            case Literal(value, dtype) if dtype_of_value(value) is dtype:
                return to_source(value)
            case Literal(value, dtype):
                return f"fd.define_scalar({to_source(value)}, dtype={dtype!r})"
            case Const(value=value):
                return str(value)
            case IntExpr():
                return f"({self.recording.size_source(self.operand)})"
            case name:
                return source_name(name)

    def to_text(self) -> str:
        return str(self.operand.value if isinstance(self.operand, Literal) else self.operand)

    def __repr__(self) -> str:
        return describe(self.recording.program, self.operand)


@final
class TensorView(Arithmetic):
    """A tensor of a definition.

    The loop domain is the tensor's loop nest: its logical axes until `split`, `merge` or `reorder`
    derive others. Axis numbers of the schedule methods count loop axes, reduced ones included, and
    negative ones count from the last.
    """

    __slots__ = ("name",)
    name: TensorName

    def __init__(self, recording: Recording, name: TensorName) -> None:
        self.recording = recording
        self.name = name

    # What it is.

    @property
    def ndim(self) -> int:
        """Number of axes that a torch tensor of this value has."""
        return self._definition().ndim

    def size(self, dim: int) -> Val:
        """Global extent of tensor axis `dim`. UserError where there is no such axis."""
        call = Call("size", (dim,), receiver=self)
        return size_of(call, self, dim)

    def shape(self) -> list[Val]:
        """Global extents of the tensor axes."""
        return [self.size(dim) for dim in range(self.ndim)]

    def dtype(self) -> DataType:
        return self._definition().dtype

    def is_tensor(self) -> bool:
        return True

    def has_root(self) -> bool:
        """True where the logical axes derive from other ones (reshape, rfactor)."""
        return bool(self._definition().root)

    def get_root_domain(self) -> list[IterDomain]:
        """Empty where `has_root()` is False."""
        return self._axes([axis.name for axis in self._definition().root])

    def get_logical_domain(self) -> list[IterDomain]:
        """The tensor axes, with reduced axes among them."""
        return self._axes([axis.name for axis in self._definition().logical])

    def get_loop_domain(self) -> list[IterDomain]:
        return self._axes(self._schedule().leaves)

    def extent_of(self, axis: AxisName) -> Val:
        """Global extent of any axis of this tensor, by name."""
        return scalar(self.recording, self.recording.program.all_axes(self.name)[axis].extent)

    def domain(self) -> TensorDomain:
        """The axes, for printing."""
        return TensorDomain(self)

    def axis(self, index: int) -> IterDomain:
        """Loop axis number `index`."""
        leaves = self._schedule().leaves
        if not isinstance(index, int) or isinstance(index, bool):
            raise UserTypeError(f"{self.name}.axis({index!r}): an axis number is an int")
        if not -len(leaves) <= index < len(leaves):
            raise UserError(
                f"{self.name}.axis({index}): must lie in [-{len(leaves)}, {len(leaves)}); "
                f"the loop axes are {self.domain()}"
            )
        return iter_domain(self, leaves[index])

    # Its schedule.

    def split(self, axis: int, factor: int, inner_split: bool = True) -> TensorView:
        """Replace loop axis `axis` by (outer, inner).

        `factor` is the extent of inner, or of outer if not `inner_split`; the other has the rest,
        rounded up.
        """
        keywords = {} if inner_split is True else {"inner_split": inner_split}
        return self._split(Call("split", (axis, factor), keywords, self), axis, factor, inner_split)

    def inner_split(self, axis: int, factor: int) -> TensorView:
        """Replace loop axis `axis` by (outer, inner) with inner of extent `factor`."""
        return self._split(Call("inner_split", (axis, factor), receiver=self), axis, factor, True)

    def outer_split(self, axis: int, factor: int) -> TensorView:
        """Replace loop axis `axis` by (outer, inner) with outer of extent `factor`."""
        return self._split(Call("outer_split", (axis, factor), receiver=self), axis, factor, False)

    def _split(self, call: Call, axis: int, factor: int, inner_split: bool) -> TensorView:
        return self._change(call, transforms.split, axis, factor, inner_split)

    def merge(self, axis_o: int, axis_i: int) -> TensorView:
        """Replace two loop axes by one, at the place of `axis_o`, the more significant one."""
        call = Call("merge", (axis_o, axis_i), receiver=self)
        return self._change(call, transforms.merge, axis_o, axis_i)

    def reorder(self, order: Mapping[int, int]) -> TensorView:
        """Move loop axis `old` to place `new` for each pair; the others keep their order."""
        if not isinstance(order, Mapping):
            raise UserTypeError(
                f"{self.name}.reorder({order!r}): takes a mapping of places, as {{0: 1}}"
            )
        order = dict(order)
        return self._change(Call("reorder", (order,), receiver=self), transforms.reorder, order)

    def swizzle1d(self, x: int, parallel_type: ParallelType, offset: int = 0) -> TensorView:
        """Let each rank begin loop axis `x` at its own number along a mesh axis, or `offset` behind
        it: ring order. With an offset of 1 it ends with its own number."""
        given = (x, parallel_type, offset) if offset else (x, parallel_type)
        call = Call("swizzle1d", given, receiver=self)
        if not isinstance(parallel_type, ParallelType):
            raise UserTypeError(f"{call}: takes a ParallelType")
        if not isinstance(offset, int):
            raise UserTypeError(f"{call}: the offset is a number of iterations")
        return self._change(call, transforms.swizzle1d, x, parallel_type, offset)

    def rfactor(self, axes: Sequence[int]) -> TensorView:
        """Reduce loop axes `axes` in a new tensor, and the other reduced axes here.

        Returns the new tensor, of which this one becomes the reduction. Tensors that are defined
        together (by welford) are scheduled like this one and taken apart together;
        `fd.sched.rfactor` returns all of their new tensors.
        """
        return rfactor_together([self], axes)[0]

    def siblings(self) -> list[TensorView]:
        """The other tensors that the same expression defines: welford has three results."""
        definition = self.recording.program.fusion.definition(self.name)
        names = () if definition is None else definition.outs
        return [tensor_view(self.recording, name) for name in names if name != self.name]

    def cache_after(self, propagate_allocation_domain: bool = True) -> TensorView:
        """Let all readers read a copy of this tensor instead; returns the copy.

        The copy has the same loops and, unless told otherwise, memory order. In a kernel it is a
        register.
        """
        keywords = {} if propagate_allocation_domain else {"propagate_allocation_domain": False}
        return self._define(
            Call("cache_after", keywords=keywords, receiver=self),
            lambda program: transforms.cache_after(
                program, self.name, propagate_allocation=propagate_allocation_domain
            ),
        )

    def cache_before(self) -> TensorView:
        """Compute this tensor in a new one, of which it becomes a copy; returns the new one."""
        return self._define(
            Call("cache_before", receiver=self),
            lambda program: transforms.cache_before(program, self.name),
        )

    def set_memory_type(self, memory_type: MemoryType) -> None:
        """Say where the tensor lives. Inputs and outputs are global or symmetric."""
        call = Call("set_memory_type", (memory_type,), receiver=self)
        if not isinstance(memory_type, MemoryType):
            raise UserTypeError(f"{call}: takes a MemoryType")
        self._change(call, transforms.set_memory_type, memory_type)

    def set_device_mesh(self, mesh: DeviceMesh | ir_mesh.DeviceMesh) -> None:
        """Place the tensor on a mesh: replicated, until loop axes are parallelized over mesh axes.

        Takes the `mesh` of a DistributedTensor, too. A tensor that has a mesh is annotated:
        propagation never changes it.
        """
        if isinstance(mesh, ir_mesh.DeviceMesh):
            mesh = DeviceMesh(mesh)
        if not isinstance(mesh, DeviceMesh):
            raise UserTypeError(
                f"{self.name}.set_device_mesh({mesh!r}): takes a multidevice.DeviceMesh"
            )
        call = Call("set_device_mesh", (mesh.ranks,), receiver=self)
        self._change(call, transforms.set_device_mesh, mesh.ranks)

    def set_allocation_domain(
        self, ids: Sequence[IterDomain], new_contiguity: bool | Sequence[bool | None]
    ) -> None:
        """Lay the tensor out in memory with axes `ids`, slowest first.

        `ids` are logical or loop axes; mesh and stream loops have no memory. `new_contiguity`: one
        flag for all axes, or one an axis. UserError unless they make a permutation of the logical
        axes.
        """
        call = Call("set_allocation_domain", (ids, new_contiguity), receiver=self)
        if not isinstance(ids, list | tuple):
            raise UserTypeError(f"{call}: ids are a list of axes of {self.name}")
        flags = [new_contiguity] if isinstance(new_contiguity, bool) else new_contiguity
        if not isinstance(flags, list | tuple) or not all(
            isinstance(f, bool | None) for f in flags
        ):
            raise UserTypeError(f"{call}: new_contiguity is a bool, or a list of bools and Nones")
        names = self.own_axes(call, ids)
        self._change(call, transforms.set_allocation_domain, names, new_contiguity)

    def own_axes(self, call: Call, ids: Sequence[object]) -> tuple[AxisName, ...]:
        """The names of handles that must be axes of this tensor."""
        if any(not isinstance(axis, IterDomain) or axis.tensor is not self for axis in ids):
            raise UserError(f"{call}: takes axes of {self.name}")
        return tuple(axis.name for axis in ids if isinstance(axis, IterDomain))

    def _change(self, call: Call, verb: Callable[..., Program], *arguments: object) -> TensorView:
        self.recording.change(call, lambda program: verb(program, self.name, *arguments))
        return self

    def _define(
        self, call: Call, verb: Callable[[Program], tuple[Program, TensorName]]
    ) -> TensorView:
        (name,) = self.recording.define(call, lambda program: _single(verb(program)))
        return tensor_view(self.recording, name)

    # Printing.

    def to_source(self) -> str:
        return source_name(self.name)

    def to_text(self) -> str:
        return self.name

    def __repr__(self) -> str:
        schedule = self._schedule()
        definition = self._definition()
        logical = tuple(axis.name for axis in definition.logical)
        text = describe(self.recording.program, self.name)
        if schedule.leaves != logical or schedule.bindings or len(logical) > definition.ndim:
            text += f", loops {self.domain()}"
        if schedule.inline_depth:
            text += f", {schedule.inline_depth} loops shared with its readers"
        if schedule.memory is not MemoryType.global_:
            text += f", in {schedule.memory.value} memory"
        return text if schedule.mesh is None else f"{text} on {schedule.mesh}"

    def _definition(self) -> TensorDef:
        return self.recording.program.tensor(self.name)

    def _schedule(self) -> Schedule:
        return self.recording.program.schedule(self.name)

    def _axes(self, names: Sequence[AxisName]) -> list[IterDomain]:
        return [iter_domain(self, name) for name in names]


Value = TensorView | Val | Scalar
"""What a pointwise operation takes."""


def tensor_view(recording: Recording, name: str) -> TensorView:
    """The handle of a tensor."""
    return recording.handle(name, lambda: TensorView(recording, TensorName(name)))


def rfactor_together(tensors: Sequence[TensorView], axes: Sequence[int]) -> list[TensorView]:
    """`TensorView.rfactor` of the first of some tensors that one expression defines.

    Returns the new tensor of each.
    """
    first, axes = tensors[0], list(axes)
    call = Call("rfactor", (axes,), receiver=first)
    if len(tensors) > 1:
        call = Call("fd.sched.rfactor", (list(tensors), axes))

    def verb(program: Program) -> tuple[Program, list[str]]:
        definition = program.fusion.definition(first.name)
        program, parts = transforms.rfactor(program, first.name, axes)
        outs = () if definition is None else definition.outs
        part_of: dict[str, str] = dict(zip(outs, parts, strict=True))
        return program, [part_of[tensor.name] for tensor in tensors]

    return [tensor_view(first.recording, name) for name in first.recording.define(call, verb)]


def scalar(recording: Recording, operand: ScalarOperand) -> Val:
    """The handle of a scalar. Constants have no name: each call makes another handle."""
    if isinstance(operand, Literal):
        return Val(recording, operand)
    return recording.handle(("scalar", operand), lambda: Val(recording, operand))


def size_of(call: Call, tensor: TensorView, dim: int) -> Val:
    """Global extent of tensor axis `dim`."""
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise UserTypeError(f"{call}: dim must be an int, got {type(dim).__name__}")
    ndim = tensor.ndim
    if not -ndim <= dim < ndim:
        raise UserError(f"{call}: dim must lie in [-{ndim}, {ndim}); the tensor is {tensor!r}")
    axis = tensor.recording.program.tensor(tensor.name).tensor_axes[dim]
    return scalar(tensor.recording, axis.extent)


def recording_of(call: Call, values: Sequence[object], bound: Recording | None = None) -> Recording:
    """`bound` or, without it, the recording that the handles among `values` belong to.

    UserTypeError where there is neither, UserError for a handle of another definition.
    """
    handles = [value for value in values if isinstance(value, Handle)]
    recording = handles[0].recording if bound is None and handles else bound
    if recording is None:
        raise UserTypeError(
            f"{call}: takes at least one TensorView or Val; for Python scalars alone use fd.ops"
        )
    for handle in handles:
        recording.own(call, handle)
    return recording


def to_operand(call: Call, value: object) -> Operand:
    """What the IR reads for one argument of a pointwise operation."""
    return value.name if isinstance(value, TensorView) else to_scalar_operand(call, value)


def to_scalar_operand(call: Call, value: object) -> ScalarOperand:
    """What the IR reads for a Val or a Python scalar."""
    match value:
        case Val(operand=Const(value=size)):
            return build.literal(size)
        case Val():
            return value.operand
        case bool() | int() | float():
            return constant(value, dtype_of_value(value), call)
        case _:
            raise UserTypeError(
                f"{call}: takes TensorViews, Vals and Python scalars, got {type(value).__name__}; "
                "torch tensors enter a program as its inputs (fd.from_pytorch or fd.define_tensor)"
            )


def apply_function(
    function: str, values: Sequence[object], bound: Recording | None = None
) -> TensorView | Val:
    """Record a row of SCALAR_FUNCTIONS: a TensorView if any operand is one, else a Val.

    `bound`: the definition that must own the operands, by default that of the first one.
    """
    call = Call(f"fd.ops.{function}", tuple(values))
    recording = recording_of(call, values, bound)
    operands = tuple(to_operand(call, value) for value in values)
    given = [value.operand if isinstance(value, Val) else value for value in values]
    size = fold_sizes(function, given)
    if size is not None:
        return scalar(recording, size)
    (name,) = recording.define(
        call, lambda program: _single(build.pointwise(program, function, operands))
    )
    if any(isinstance(value, TensorView) for value in values):
        return tensor_view(recording, name)
    return scalar(recording, ScalarName(name))


def _single(built: tuple[Any, str]) -> tuple[Any, tuple[str]]:
    program, name = built
    return program, (name,)
