"""`fd.sched`: schedule tensors, one by one or all alike.

Every schedule method of a TensorView is a function here, too, that takes the tensor first. Axis
numbers count loop axes, reduced ones included; negative ones count from the last.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import final, overload

from meshfuse.api.enumerations import SchedulerType
from meshfuse.api.fusion_view import FusionView
from meshfuse.api.iter_domain import IterDomain
from meshfuse.api.mesh import DeviceMesh
from meshfuse.api.recording import Call, Recording
from meshfuse.api.tensor_view import TensorView, rfactor_together
from meshfuse.base.errors import Unsupported, UserError, UserTypeError
from meshfuse.ir import transforms
from meshfuse.ir.axes import TensorName
from meshfuse.ir.mesh import ParallelType
from meshfuse.ir.program import Program
from meshfuse.ir.schedule import MemoryType
from meshfuse.schedulers import propagation, registry

_SCHEDULERS: Mapping[SchedulerType, str] = {
    SchedulerType.pointwise: "pointwise",
    SchedulerType.reduction: "reduction",
    SchedulerType.inner_persistent: "normalization",
    SchedulerType.outer_persistent: "normalization",
    SchedulerType.inner_outer_persistent: "normalization",
    SchedulerType.expr_eval: "expr_eval",
}
"""What this version has for each of the kinds; the three persistent ones are one scheduler."""


@final
class Scheduling:
    """Schedule functions: `fd.sched` is bound to `fd`, `meshfuse.schedule` to its arguments'."""

    def __init__(self, recording: Recording | None = None) -> None:
        self._recording = recording

    # One tensor.

    def split(self, tv: TensorView, axis: int, factor: int, inner_split: bool = True) -> TensorView:
        """Replace a loop by (outer, inner); `factor` is the extent of inner, else of outer."""
        return self._own("split", tv).split(axis, factor, inner_split)

    def inner_split(self, tv: TensorView, axis: int, factor: int) -> TensorView:
        """Replace a loop by (outer, inner) with inner of extent `factor`."""
        return self._own("inner_split", tv).inner_split(axis, factor)

    def outer_split(self, tv: TensorView, axis: int, factor: int) -> TensorView:
        """Replace a loop by (outer, inner) with outer of extent `factor`."""
        return self._own("outer_split", tv).outer_split(axis, factor)

    def merge(self, tv: TensorView, axis_o: int, axis_i: int) -> TensorView:
        """Replace two loops by one, at the place of `axis_o`, the more significant one."""
        return self._own("merge", tv).merge(axis_o, axis_i)

    def reorder(self, tv: TensorView, order: Mapping[int, int]) -> TensorView:
        """Move loop `old` to place `new` for each pair; the others keep their order."""
        return self._own("reorder", tv).reorder(order)

    def swizzle1d(
        self, tv: TensorView, x: int, parallel_type: ParallelType, offset: int = 0
    ) -> TensorView:
        """Let each rank begin a loop at its own number along a mesh axis, or `offset` behind it:
        ring order."""
        return self._own("swizzle1d", tv).swizzle1d(x, parallel_type, offset)

    def parallelize(self, tv: TensorView, axis: int, parallel_type: ParallelType) -> None:
        """Bind a loop to a mesh axis, the stream loop, or a parallelism of the kernel."""
        self._own("parallelize", tv).axis(axis).parallelize(parallel_type)

    @overload
    def rfactor(self, tv: TensorView, axes: Sequence[int]) -> TensorView: ...
    @overload
    def rfactor(self, tv: Sequence[TensorView], axes: Sequence[int]) -> list[TensorView]: ...
    def rfactor(
        self, tv: TensorView | Sequence[TensorView], axes: Sequence[int]
    ) -> TensorView | list[TensorView]:
        """Reduce loops `axes` in a new tensor, and the other reduced loops in `tv`.

        Of tensors that are defined together, given as a list, each gets a new tensor; the first one
        is the one whose schedule all of them take over.
        """
        if isinstance(tv, TensorView):
            return self._own("rfactor", tv).rfactor(axes)
        tensors = [self._own("rfactor", each) for each in tv]
        together = [] if not tensors else [tensors[0], *tensors[0].siblings()]
        if not tensors or {id(each) for each in tensors} != {id(each) for each in together}:
            raise UserError(
                f"{Call('sched.rfactor', (list(tv), list(axes)))}: takes a tensor, or a list of "
                f"all that one operation defines: {[each.name for each in together]}"
            )
        return rfactor_together(tensors, axes)

    def cache_after(self, tv: TensorView, propagate_allocation_domain: bool = True) -> TensorView:
        """Let all readers of `tv` read a copy of it; returns the copy."""
        return self._own("cache_after", tv).cache_after(propagate_allocation_domain)

    def cache_before(self, tv: TensorView) -> TensorView:
        """Compute `tv` in a new tensor, of which it becomes a copy; returns the new one."""
        return self._own("cache_before", tv).cache_before()

    # Memory and meshes.

    def set_memory_type(self, tv: TensorView, memory_type: MemoryType) -> None:
        """Say where `tv` lives. Inputs and outputs are global or symmetric."""
        self._own("set_memory_type", tv).set_memory_type(memory_type)

    def set_allocation_domain(
        self,
        tv: TensorView,
        ids: Sequence[IterDomain],
        new_contiguity: bool | Sequence[bool | None],
    ) -> None:
        """Lay `tv` out in memory with axes `ids`, slowest first."""
        self._own("set_allocation_domain", tv).set_allocation_domain(ids, new_contiguity)

    def set_allocation_as_loop(self, tv: TensorView) -> None:
        """Lay `tv` out in the order of its loops, without gaps; mesh loops have no memory.

        UserError, naming the axis, if that is no order of the tensor's axes.
        """
        self._apply("set_allocation_as_loop", tv, transforms.set_allocation_as_loop)

    def set_loop_domain(self, tv: TensorView, ids: Sequence[IterDomain]) -> None:
        """Put the loops of `tv` in this order. UserError unless `ids` are all of its loops."""
        call = Call("fd.sched.set_loop_domain", (tv, list(ids)))
        names = self._own("set_loop_domain", tv).own_axes(call, ids)
        tv.recording.change(call, lambda p: transforms.set_loop_domain(p, tv.name, names))

    def set_device_mesh(self, tv: TensorView, mesh: DeviceMesh) -> None:
        """Place `tv` on a mesh."""
        self._own("set_device_mesh", tv).set_device_mesh(mesh)

    def _set_device_mesh(self, tv: TensorView, mesh: DeviceMesh) -> None:
        self.set_device_mesh(tv, mesh)

    # Many tensors.

    def transform_like(
        self, reference_tv: TensorView, selected_tensors: Sequence[TensorView] = ()
    ) -> None:
        """Split, merge and order the loops of all tensors, or of those selected, alike.

        A tensor takes over what concerns its own axes. What it has split, bound or inlined itself
        stays.
        """
        targets = self._own_all("transform_like", selected_tensors)
        self._apply(
            "transform_like",
            reference_tv,
            lambda p, name: propagation.transform_like(p, name, targets),
            {"selected_tensors": list(selected_tensors)},
        )

    def parallelize_like(
        self,
        reference_tv: TensorView,
        pos: int = -1,
        selected_tensors: Sequence[TensorView] = (),
        selected_parallel_types: Collection[ParallelType] = (),
        propagate_padding: bool = True,
    ) -> None:
        """Bind the loops that correspond to the first `pos` of `reference_tv` as those are bound.

        By default: all loops, all tensors but inputs, all parallel types. `propagate_padding`
        changes nothing: loops are not padded.
        """
        targets = self._own_all("parallelize_like", selected_tensors)
        types = sorted(selected_parallel_types, key=str)
        self._apply(
            "parallelize_like",
            reference_tv,
            lambda p, name: propagation.parallelize_like(p, name, pos, targets, types),
            {
                "pos": pos,
                "selected_tensors": list(selected_tensors),
                "selected_parallel_types": types,
            },
        )

    def bounded_transform_backward(
        self,
        from_: TensorView,
        pos: int,
        to: Sequence[TensorView],
        propagate_parallel_type: bool = False,
    ) -> None:
        """Schedule what `from_` is computed from, back to the tensors `to`, like `from_`.

        Only as far as its first `pos` loops need it; -1 is all of them.
        """
        bounds = self._own_all("bounded_transform_backward", to)
        self._apply(
            "bounded_transform_backward",
            from_,
            lambda p, name: propagation.bounded_transform_backward(
                p, name, pos, bounds, parallel_types=propagate_parallel_type
            ),
            {"pos": pos, "to": list(to), "propagate_parallel_type": propagate_parallel_type},
        )

    def inline_most(self, selected_tensors: Sequence[TensorView] = ()) -> None:
        """Let all tensors, or those selected, share as many loops as their readers allow."""
        targets = self._own_all("inline_most", selected_tensors)
        said = {"selected_tensors": list(selected_tensors)} if targets else {}
        call = Call("fd.sched.inline_most", (), said)
        self._bound(call, selected_tensors).change(
            call, lambda program: propagation.inline_most(program, targets)
        )

    def inline_at(
        self,
        reference_tv: TensorView,
        pos: int = -1,
        best_effort: bool = False,
        selected_tensors: Sequence[TensorView] = (),
    ) -> None:
        """Let tensors share the loops that correspond to the first `pos` of `reference_tv`.

        UserError for one that cannot be shared; with `best_effort` the loops outside it are.
        """
        targets = self._own_all("inline_at", selected_tensors)
        self._apply(
            "inline_at",
            reference_tv,
            lambda p, name: propagation.inline_at(p, name, pos, targets, best_effort=best_effort),
            {
                "pos": pos,
                "best_effort": best_effort,
                "selected_tensors": list(selected_tensors),
            },
        )

    # Automatic schedules, on request.

    def can_schedule(
        self, fusion: FusionView, scheduler_type: SchedulerType, inputs: Iterable[object] = ()
    ) -> tuple[bool, str]:
        """Whether a scheduler takes the program as one kernel, and if not why.

        Schedulers see extents as they are declared; `inputs` change nothing.
        """
        reason = _refuse(fusion.recording.program, scheduler_type)
        if reason is None:
            return True, ""
        return False, f"Scheduler _{scheduler_type}_ ***rejected*** because : {reason}"

    def find_compatible_schedulers(
        self, fusion: FusionView, inputs: Iterable[object] = ()
    ) -> list[SchedulerType]:
        """The schedulers that take the program as one kernel, in the order in which they count."""
        program = fusion.recording.program
        return [kind for kind in _SCHEDULERS if _refuse(program, kind) is None]

    def schedule(
        self, fusion: FusionView, scheduler_type: SchedulerType, inputs: Iterable[object] = ()
    ) -> None:
        """Schedule all tensors, which are not scheduled yet, as a scheduler would.

        UserError where it does not take the program.
        """
        recording = fusion.recording
        reason = _refuse(recording.program, scheduler_type)
        if reason is not None:
            raise UserError(f"schedule(fusion, {scheduler_type}): {reason}")
        kind = _SCHEDULERS[scheduler_type]
        call = Call("fd.sched.schedule", (fusion, scheduler_type, []))
        recording.change(call, lambda program: registry.schedule(program, kind)[0])

    # Whose.

    def _own(self, function: str, tv: object) -> TensorView:
        call = Call(f"sched.{function}", (tv,))
        if not isinstance(tv, TensorView):
            raise UserTypeError(f"{call}: takes a TensorView, got {type(tv).__name__}")
        return tv if self._recording is None else self._recording.own(call, tv)

    def _own_all(self, function: str, tensors: Sequence[object]) -> list[TensorName]:
        return [self._own(function, tensor).name for tensor in tensors]

    def _bound(self, call: Call, tensors: Sequence[TensorView]) -> Recording:
        if self._recording is not None:
            return self._recording
        if not tensors:
            raise UserTypeError(f"{call}: which definition's? Use fd.sched, or select tensors")
        return tensors[0].recording

    def _apply(
        self,
        function: str,
        tv: TensorView,
        verb: Callable[[Program, TensorName], Program],
        options: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """Record a function of one tensor that changes schedules. Empty options go without say."""
        tensor = self._own(function, tv)
        said = {
            name: value for name, value in options.items() if value is not False and value != []
        }
        call = Call(f"fd.sched.{function}", (tensor,), said)
        tensor.recording.change(call, lambda program: verb(program, tensor.name))


def _refuse(program: Program, scheduler_type: SchedulerType) -> str | None:
    """Why a scheduler does not take a program; None if it does."""
    if not isinstance(scheduler_type, SchedulerType):
        raise UserTypeError(f"takes a SchedulerType, got {scheduler_type!r}")
    if scheduler_type not in _SCHEDULERS:
        known = ", ".join(str(kind) for kind in _SCHEDULERS)
        return f"there is no {scheduler_type} scheduler in this version; there are {known}"
    for tensor, schedule in program.schedules.items():
        if schedule.mesh is not None:
            raise Unsupported(
                f"can_schedule: {tensor} lies on {schedule.mesh}: schedulers see what one rank "
                "holds, and execute asks them"
            )
        if schedule.steps or schedule.bindings:
            return f"{tensor} is scheduled already"
    refusal = registry.refusal_of(program, _SCHEDULERS[scheduler_type])
    return None if refusal is None else str(refusal)
