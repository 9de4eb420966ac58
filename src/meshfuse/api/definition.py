"""FusionDefinition: a program, said call by call, and run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import Any, overload

import torch

from meshfuse.api.capture import CapturedProgram, capture_program
from meshfuse.api.devices import Device
from meshfuse.api.executor_cache import FusionExecutorCache
from meshfuse.api.frozen_program import GlobalSizes, given_sizes
from meshfuse.api.fusion_view import FusionView
from meshfuse.api.kernel_executor import KernelExecutor
from meshfuse.api.measured_timeline import check_measured, measure_timeline
from meshfuse.api.ops import Operations
from meshfuse.api.overlap_choice import (
    Overlapping,
    check_segments_overlap,
    form_unmeasured,
)
from meshfuse.api.predicted_timeline import predict_timeline
from meshfuse.api.profiling import FusionProfile
from meshfuse.api.recording import Call, Recording
from meshfuse.api.repro import fake_inputs, repro_script
from meshfuse.api.scalar_inputs import as_input, define_scalar, define_vector
from meshfuse.api.scheduling import Scheduling
from meshfuse.api.segments import DefinitionSegment, run_segments, segments_of
from meshfuse.api.tensor_arguments import read_tensor_arguments
from meshfuse.api.tensor_view import TensorView, Val, tensor_view
from meshfuse.api.timeline import Timeline
from meshfuse.api.validation import (
    check_outputs,
    copies_of,
    draws_undone,
)
from meshfuse.base.dtypes import DataType, Scalar
from meshfuse.base.errors import Unsupported, UserAssertionError, UserError, UserTypeError
from meshfuse.dist.communicator import Communicator
from meshfuse.host.capture import LEAST_WARM_UPS
from meshfuse.host.device_rates import DeviceRates
from meshfuse.ir import build
from meshfuse.runtime.torch_types import from_torch_dtype


class EmptyDefinitionError(UserError, NotImplementedError):
    """A definition that has nothing to run."""


class FusionDefinition:
    """A program on global shapes, and the schedule of the tensors that the user cares about.

        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, -1], contiguity=True)
            fd.add_output(fd.ops.sum(fd.ops.exp(x), [1]))
        [y] = fd.execute([torch.randn(4, 8)])

    Or as a subclass, which writes the same calls into its methods:

        class RowSums(FusionDefinition):
            def definition(self):
                self.x = self.define_tensor([-1, -1], contiguity=True)
                self.add_output(self.ops.sum(self.ops.exp(self.x), [1]))
        [y] = RowSums().execute([torch.randn(4, 8)])

    The first `execute` fixes the program. Handles stay readable.

    It is open in `definition`, `schedule` and `multidevice_schedule`, which do nothing here and are
    never called with super(); all else is final.
    """

    def __init__(self) -> None:
        self._recording = Recording()
        self._is_defined = False
        self._segments_profile: FusionProfile | None = None
        self.ops = Operations(self._recording)
        self.fusion = FusionView(self._recording)
        self.fec = FusionExecutorCache(
            self.fusion, schedule=self.schedule if self._overrides("schedule") else None
        )
        self.sched = Scheduling(self._recording)
        self.ke: KernelExecutor | None = None
        """What `manual_execute` runs, once it has been called."""
        self.segments: list[DefinitionSegment] = []
        self.fake_inputs: list[object] | None = None
        """The inputs of the latest call with `save_repro_inputs`: FakeTensors and scalars."""

    # What a subclass may define.

    def definition(self) -> None:
        """Define inputs, operations and outputs. Runs once, before the program is fixed."""

    def multidevice_schedule(self) -> None:
        """Place tensors on meshes. Runs once, after `definition`; kernels are scheduled for it."""

    def schedule(self) -> None:
        """Schedule the whole program as one kernel. Runs once per input signature and device.

        The handles of `definition` then stand for a copy of the program, concretised and not cut
        into segments. A definition may not have `multidevice_schedule`, too.
        """

    def _overrides(self, hook: str) -> bool:
        return getattr(type(self), hook) is not getattr(FusionDefinition, hook)

    def __enter__(self) -> FusionDefinition:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing to undo; an exception goes on."""

    # Inputs.

    @overload
    def define_tensor(
        self,
        shape: Sequence[int],
        contiguity: bool | Sequence[bool | None] = False,
        dtype: DataType = DataType.Float,
        is_cpu: bool = False,
        stride_order: Sequence[int] = (),
    ) -> TensorView: ...
    @overload
    def define_tensor(
        self,
        sizes: Sequence[int],
        strides: Sequence[int],
        dtype: DataType = DataType.Float,
        static_sizes: bool = False,
        is_cpu: bool = False,
    ) -> TensorView: ...
    def define_tensor(self, *arguments: Any, **keywords: Any) -> TensorView:
        """The next input tensor, on global shapes.

        By shape: -1 is symbolic, 1 broadcasts, others are static. `contiguity`, slowest axis first:
        True if the axis joins the next faster one without a gap (stride 1 for the fastest), False
        for any stride, None for a broadcast axis; or one flag for all axes. `stride_order` numbers
        the axes from the fastest, 0.
        By sizes and strides: layout from the strides; sizes other than 1 become symbolic unless
        `static_sizes`.
        """
        described = read_tensor_arguments(arguments, keywords)
        (name,) = self._recording.define(
            described.to_call(),
            lambda program: as_input(
                build.define_tensor(
                    program,
                    described.shape,
                    described.dtype,
                    described.contiguity,
                    described.stride_order,
                    described.is_cpu,
                )
            ),
        )
        return tensor_view(self._recording, name)

    def from_pytorch(self, tensor: torch.Tensor, static_sizes: bool = False) -> TensorView:
        """The next input tensor, with the type, rank and layout of `tensor`."""
        if not isinstance(tensor, torch.Tensor):
            raise UserTypeError(
                f"from_pytorch({tensor!r}): takes a torch tensor, got {type(tensor).__name__}"
            )
        return self.define_tensor(
            sizes=list(tensor.size()),
            strides=list(tensor.stride()),
            dtype=from_torch_dtype(tensor.dtype),
            static_sizes=static_sizes,
            is_cpu=tensor.is_cpu and tensor.dim() == 0,
        )

    def define_scalar(
        self, value: Scalar | DataType | None = None, dtype: DataType = DataType.Null
    ) -> Val:
        """The next input scalar, by default Double; a constant if `value` is given."""
        return define_scalar(self._recording, value, dtype)

    def define_vector(self, size: int) -> list[Val]:
        """`size` input scalars of type Int; `execute` takes a list in their place."""
        return define_vector(self._recording, size)

    # Outputs.

    def add_output(self, output: TensorView, alias_input: TensorView | None = None) -> None:
        """The next result.

        With `alias_input`: written into that input's memory instead, and not returned.
        """
        arguments = (output,) if alias_input is None else (output, alias_input)
        call = Call("fd.add_output", arguments)
        for argument in arguments:
            if not isinstance(argument, TensorView):
                raise UserError(
                    f"{call}: Non-TensorView outputs are not supported, "
                    f"got {type(argument).__name__}"
                )
            self._recording.own(call, argument)
        alias = None if alias_input is None else alias_input.name
        self._recording.change(call, lambda program: build.add_output(program, output.name, alias))

    def validate_definition(self) -> tuple[bool, str | None]:
        """Whether there is something to run, and if not why."""
        with self._recording.lock:
            self._run_definition()
        fusion = self._recording.program.fusion
        if not fusion.tensors and not fusion.scalars:
            return False, (
                "Fusion is empty! Use `with FusionDefinition() as fd: ...` to define a fusion."
            )
        if not fusion.outputs:
            return False, "Fusion is empty! It has no outputs: call fd.add_output(tensor)."
        return True, None

    # Running.

    def execute(
        self,
        inputs: Iterable[Any],
        *,
        device: Device | None = None,
        override_user_schedule: bool = False,
        capture_debug_output: bool = False,
        print_repro: bool = False,
        profile: bool = False,
        save_repro_inputs: bool = False,
        global_sizes: GlobalSizes | None = None,
        overlap: Overlapping | None = None,
        _enable_options: Sequence[str] = (),
        _disable_options: Sequence[str] = (),
    ) -> list[torch.Tensor]:
        """Run on `inputs`, in order of definition; return the outputs, in order of `add_output`.

        Tensors are local: on a mesh each rank passes its shards. An output on a mesh is a
        DistributedTensor, unless the program is scheduled by `schedule()`. Runs under no_grad. The
        first call fixes the program and compiles it; later calls with inputs alike in type and
        layout reuse what was compiled.

        `override_user_schedule`: schedule automatically, whatever `schedule()` says.
        `capture_debug_output`: what MESHFUSE_DUMP asks for goes to `get_debug_output()`, not to
        stdout. `print_repro`: print `repro_script_for(inputs)` first. `profile`: measure this call
        for `profile()`; runs `schedule()` again. `save_repro_inputs`: keep what `last_repro_script`
        needs. `global_sizes`: the global shapes of inputs, by number or view, where ranks hold
        blocks of different sizes of an axis of size -1 (DistributedTensors say theirs); without
        it, such a size is what this rank holds times the ranks. `overlap`: "auto", the default, has
        loops around communications where a race at the first call finds that quicker, "require"
        has the best such form, "off" none, multidevice.Overlap.chunks(n) or .peers() that one.
        `_enable_options` and `_disable_options` name options for this call, on top of those in the
        environment (MESHFUSE_ENABLE, MESHFUSE_DISABLE). After `segment`, segments run one by one,
        with `device` and `profile`.
        """
        if self.ke is not None:
            raise UserAssertionError(
                "execute: KernelExecutor already exists! Use manual_execute() to execute the "
                "fusion."
            )
        if not self._recording.frozen:  # asked here, too: no frame in each call for what was done
            self.freeze("execute")
        if save_repro_inputs or print_repro:
            inputs = list(inputs)
        if save_repro_inputs:
            self.fake_inputs = fake_inputs(inputs)
        if print_repro:
            print(self.repro_script_for(inputs))
        if self.segments:
            whole = self._recording.program
            given_sizes(self.fec.frozen_program(), global_sizes or {})
            check_segments_overlap(overlap, self.fec.frozen_program().options)
            outputs, measured = run_segments(
                self.segments, whole, inputs, device, profile, global_sizes
            )
            self._segments_profile = measured if profile else self._segments_profile
            return outputs
        return self.fec.run(
            inputs,
            device,
            _enable_options,
            _disable_options,
            is_auto=bool(override_user_schedule),
            profile=profile,
            capture=capture_debug_output,
            global_sizes=global_sizes,
            overlap=overlap,
        )

    def capture(
        self,
        inputs: Iterable[Any],
        *,
        copy_inputs: bool = True,
        warm_ups: int = LEAST_WARM_UPS,
        device: Device | None = None,
        global_sizes: GlobalSizes | None = None,
        overlap: Overlapping | None = None,
    ) -> CapturedProgram:
        """The program as one CUDA graph, its collectives included, for inputs like these.

        Calling what is returned replays it, without the host's work: see CapturedProgram. It reads
        copies of the inputs, or with `copy_inputs=False` these tensors themselves. Before that the
        program runs `warm_ups` times, 3 or more, on a stream of its own; inputs keep their values.
        All ranks capture together: then they agree, under the deadline, and later no more.

        Raises Unsupported without a CUDA device, for inputs on the CPU, and for programs that draw
        random numbers, wait for the device, or move chunks between peers; and as `execute`.
        """
        self._check_runs_whole("capture")
        self.freeze("capture")
        options = (copy_inputs, warm_ups, device, global_sizes, overlap)
        return capture_program(self.fec, inputs, *options)

    def _check_runs_whole(self, call: str) -> None:
        if self.ke is not None or self.segments:
            raise UserAssertionError(
                f"{call}: is of what execute runs as one program, but this definition runs by "
                "manual_execute, or segment by segment"
            )

    def manual_execute(
        self, inputs: Iterable[Any], heuristic_params: None = None
    ) -> list[torch.Tensor]:
        """Run the whole program as one kernel, by the schedule that was written with its tensors.

        An unscheduled program is one serial loop nest. Returns plain tensors. The first call fixes
        the program and compiles it; later ones reuse that. On a mesh, inputs are this rank's
        shards, and the kernel computes on what lies on this rank. `heuristic_params` are those of
        GPU kernels: there are none yet.

        Raises ScheduleError for a schedule that is no legal form, UserAssertionError after
        `execute`.
        """
        if self.fec.has_run():
            raise UserAssertionError(
                "manual_execute: FusionExecutorCache already exists! Use execute() to execute the "
                "fusion, or write its schedule into a new FusionDefinition."
            )
        if heuristic_params is not None:
            raise Unsupported("manual_execute(heuristic_params): kernels for CPUs have none")
        self.freeze("manual_execute")
        arguments = list(inputs)
        if self.ke is None:
            executor = KernelExecutor()
            executor.compile(self.fusion, arguments)
            self.ke = executor
        return self.ke.run(arguments)

    def freeze(self, reason: str) -> None:
        """Fix the program.

        `reason` is the call that needs it; EmptyDefinitionError where there is nothing to run,
        UserAssertionError for both `schedule` and `multidevice_schedule`.
        """
        if self._recording.frozen:
            return
        with self._recording.lock:
            valid, message = self.validate_definition()
            if not valid:
                raise EmptyDefinitionError(f"{reason}: {message}")
            self._recording.frozen = True

    def _run_definition(self) -> None:
        """`definition` and `multidevice_schedule`, once. One that raises leaves nothing behind."""
        if self._is_defined:
            return
        if self._overrides("schedule") and self._overrides("multidevice_schedule"):
            raise UserAssertionError(
                f"{type(self).__name__} defines both schedule() and multidevice_schedule(): a "
                "program is scheduled as one kernel, or placed on meshes and scheduled "
                "automatically"
            )
        recording = self._recording
        before = recording.program, list(recording.journal)
        self._is_defined = True
        try:
            self.definition()
            self.multidevice_schedule()
        except BaseException:
            recording.program, recording.journal = before
            self._is_defined = False
            raise

    def validate(
        self,
        inputs: Iterable[Any],
        reference_outputs: Sequence[torch.Tensor] | None = None,
        device: Device | None = None,
        **options: Any,
    ) -> list[torch.Tensor]:
        """Execute, with `options` of `execute`, check the outputs and return them.

        They are compared with `reference_outputs` (UserAssertionError if they differ, NaN being
        equal to nothing), else with the program evaluated op by op (UserError, NaN being NaN). How
        closely depends on types and on how much is reduced: see get_val_tolerances.
        """
        before, inputs = copies_of(inputs)
        self.freeze("validate")
        with nullcontext() if reference_outputs is not None else draws_undone(self.fusion):
            outputs = self.execute(inputs, device=device, **options)
        check_outputs(self.fusion, outputs, reference_outputs, before)
        return outputs

    def manual_validate(
        self, inputs: Iterable[Any], reference_outputs: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """As `validate`, by `manual_execute`."""
        before, inputs = copies_of(inputs)
        outputs = self.manual_execute(inputs)
        check_outputs(self.fusion, outputs, reference_outputs, before)
        return outputs

    def segment(self, inputs: Iterable[Any]) -> None:
        """Cut the program, for inputs like these, into `segments`: what one executor runs each.

        From then on `execute` runs them one by one. Raises Unsupported for a program that updates
        inputs in place.
        """
        self.freeze("segment")
        rank = Communicator.instance().rank()
        bound = self.fec.bind(inputs, rank, is_auto=True)
        self.segments = segments_of(bound.prepared.compiled.compilation.segmented)

    # What was done.

    def profile(self) -> FusionProfile:
        """What the latest `execute(..., profile=True)` took; UserAssertionError without one."""
        if self.segments and self._segments_profile is not None:
            return self._segments_profile
        return self.fec.profile()

    def get_debug_output(self) -> str | None:
        """What the latest call dumped; None unless it had `capture_debug_output`."""
        return self.fec.debug_output()

    def last_repro_script(self) -> str:
        """A script that repeats the latest `execute(..., save_repro_inputs=True)`."""
        if self.fake_inputs is None:
            raise UserAssertionError(
                "fd.last_repro_script() needs the inputs of a call: run "
                "fd.execute(inputs, save_repro_inputs=True) first"
            )
        return self.repro_script_for(self.fake_inputs)

    def repro_script_for(self, inputs: Iterable[Any] | None = None) -> str:
        """A script that makes this definition, and runs it on inputs like these."""
        with self._recording.lock:
            self._run_definition()
        return repro_script(repr(self), inputs)

    def explain(self) -> str:
        """What the compiler did with the most recent call, and why, as text."""
        return self.fec.explain()

    def timeline(
        self,
        inputs: Sequence[object] | None = None,
        *,
        measured: bool = False,
        rank: int | None = None,
        rates: DeviceRates | None = None,
        link_classes: Mapping[str, str] | None = None,
        bandwidths: Mapping[str, float] | None = None,
        global_sizes: GlobalSizes | None = None,
        overlap: Overlapping | None = None,
    ) -> Timeline:
        """What a rank does when: one lane for compute, one for communications.

        Predicted, without devices, for any mesh: `inputs`, `link_classes` and `bandwidths` as
        `multidevice.plan` takes them, `rank` is 0 by default, `rates` are those of the devices,
        CPU_RATES by default; the program stays open, and a schedule of its user's is passed over.
        `measured`: by a call of `execute` with these inputs, `global_sizes` and `overlap`, on this
        rank; the outputs are dropped, and it compiles first what no call before it has. A
        prediction is of the plain form, or of the one that `overlap` is.

        Raises UserError for arguments that the other kind takes, and what `plan` or `execute` do.
        """
        if measured:
            check_measured(inputs, rank, rates, link_classes, bandwidths)
            self._check_runs_whole("timeline(measured=True)")
            self.freeze("timeline")
            return measure_timeline(self.fec, inputs or (), global_sizes, overlap)
        valid, message = self.validate_definition()
        if not valid:
            raise EmptyDefinitionError(f"timeline: {message}")
        form = form_unmeasured("timeline", overlap)
        program = self._recording.program
        return predict_timeline(
            program, inputs, rank, rates, link_classes, bandwidths, global_sizes, form
        )

    def __repr__(self) -> str:
        """Python that defines this program: `exec` it and call `nvfuser_fusion(fd)`."""
        lines = ["def nvfuser_fusion(fd : FusionDefinition) -> None :"]
        lines += [f"    {statement}" for statement in self._recording.journal or ["pass"]]
        return "\n".join(lines) + "\n"
