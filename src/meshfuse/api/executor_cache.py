"""`fd.fec`: what one definition has compiled, and the most recent call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import final

import torch

from meshfuse.api.bound_call import (
    Bound,
    CallKey,
    Wishes,
    check_ranks,
    check_taken,
    options_of_call,
    posted_by_this_rank,
    take_inputs,
)
from meshfuse.api.debug_output import debug_output, kernel_text, scheduled_text
from meshfuse.api.devices import Device, read_device
from meshfuse.api.explain import communications, explain_compilation, explain_definition
from meshfuse.api.form_choices import FormChoices
from meshfuse.api.frozen_program import (
    FrozenProgram,
    GlobalSizes,
    freeze_program,
    given_sizes,
)
from meshfuse.api.fusion_view import FusionView
from meshfuse.api.hot_calls import (
    MOST_CALLS,
    Conditions,
    HotCall,
    Kind,
    facts_of_inputs,
    remember_call,
)
from meshfuse.api.overlap_choice import OverlapChoice, Overlapping, read_overlap
from meshfuse.api.prepared import Prepared
from meshfuse.api.prepared_calls import PreparedCalls
from meshfuse.api.profiling import CallProfiler, FusionProfile, active_profiler
from meshfuse.api.results import plain_result, public_sharding, wrap_result
from meshfuse.api.sharding import Sharding
from meshfuse.api.user_schedule import UserSchedules
from meshfuse.base.bounded import BoundedTable
from meshfuse.base.errors import UserAssertionError, UserError
from meshfuse.base.trace import Trace
from meshfuse.dist.calls import Call
from meshfuse.dist.communicator import Communicator
from meshfuse.facts.overlap_form import Overlap
from meshfuse.host.direct import replays_of
from meshfuse.host.nodes import Communicate, HostProgram
from meshfuse.host.plan import Executable
from meshfuse.pipeline import Compilation
from meshfuse.runtime.arguments import (
    Argument,
    declared_signature,
    list_inputs,
    signature_of,
)


@final
class FusionExecutorCache:
    """The compiled forms of one definition, by signature; they live in the process's FusionCache.

    `FusionExecutorCache(fd.fusion)` is one for the program as it stands. Not `auto_schedule`: that
    program is one kernel, as it is scheduled. Safe to use from several threads.
    """

    __slots__ = (
        "_choices",
        "_debug_output",
        "_enable",
        "_frozen",
        "_hot_calls",
        "_last",
        "_last_hot",
        "_prepared",
        "_profile",
        "_recording",
        "_warned",
        "fusion_id",
    )

    def __init__(
        self,
        fusion: FusionView,
        fusion_id: int = 0,
        auto_schedule: bool = True,
        schedule: Callable[[], None] | None = None,
        scheduler: str = "",
        enable: Sequence[str] = (),
    ) -> None:
        """`schedule`, if given, schedules the program as one kernel: see UserSchedules.

        `scheduler`, if given, has taken the program, which is one segment of another. `enable`:
        options of all calls, besides those in the environment.
        """
        self._enable = enable
        self.fusion_id = fusion_id
        self._recording = fusion.recording
        self._frozen: FrozenProgram | None = None
        schedules: UserSchedules | None = None
        if schedule is not None or not auto_schedule:
            schedules = UserSchedules(self._recording, schedule or _leave_as_it_is)
        self._prepared = PreparedCalls(scheduler, schedules)
        self._hot_calls: BoundedTable[Kind, HotCall] = BoundedTable(MOST_CALLS)
        self._last_hot: HotCall | None = None
        self._choices = FormChoices()
        self._last: Prepared | None = None
        self._profile: FusionProfile | None = None
        self._debug_output: str | None = None
        self._warned = False
        if self._recording.program.fusion.outputs:
            self.frozen_program()

    # Running.

    def execute(
        self,
        inputs: Iterable[object],
        *,
        device: Device | None = None,
        global_sizes: GlobalSizes | None = None,
        overlap: Overlapping | None = None,
        _enable_options: Sequence[str] = (),
        _disable_options: Sequence[str] = (),
    ) -> list[torch.Tensor]:
        """Run on this rank's inputs, as `FusionDefinition.execute` does."""
        return self.run(
            inputs,
            device,
            _enable_options,
            _disable_options,
            global_sizes=global_sizes,
            overlap=overlap,
        )

    def run(
        self,
        inputs: Iterable[object],
        device: Device | None = None,
        enable: Sequence[str] = (),
        disable: Sequence[str] = (),
        *,
        is_auto: bool = False,
        profile: bool = False,
        capture: bool = False,
        global_sizes: GlobalSizes | None = None,
        overlap: Overlapping | None = None,
        profiler: CallProfiler | None = None,
    ) -> list[torch.Tensor]:
        """Run on this rank's inputs: `FusionDefinition.execute`, of a program that is fixed.

        `is_auto` passes over the user's schedule; `profile` and `capture` keep what `profile()` and
        `get_debug_output()` say about the call. `profiler` measures it, if it is given.
        """
        # no frame for what is as it was: a small program is as fast as its host
        communicator = Communicator.instance()
        frozen = self._frozen or self.frozen_program()
        calls = communicator.calls if frozen.meshes else None
        call = None if calls is None else calls.count(frozen.key)
        try:  # as in communicator.in_call, which takes longer
            values = inputs if isinstance(inputs, list) else list_inputs(inputs)
            kind = None
            if profiler is None and (profile or active_profiler() is not None):
                profiler = CallProfiler()
            is_usual = profiler is None and device is None and not (enable or disable or capture)
            last = self._last_hot
            if (
                is_usual
                and last is not None
                and not global_sizes
                and last.is_like(values, communicator, is_auto, overlap)
            ):
                results = last.run(values, communicator, call)
                self._last, self._debug_output = last.prepared, None
                return results
            given = given_sizes(frozen, global_sizes) if global_sizes else {}
            if is_usual:
                if overlap is not None and not isinstance(overlap, str | Overlap):
                    read_overlap("execute", overlap, frozen.options)  # raises: it is compared below
                conditions = Conditions.of_call(frozen, communicator, is_auto, overlap, given)
                facts = facts_of_inputs(values)
                kind = None if facts is None else (conditions, facts)
                known = None if kind is None else self._hot_calls.get(kind)
                if known is not None:
                    results = known.run(values, communicator, call)
                    self._last, self._last_hot, self._debug_output = known.prepared, known, None
                    return results
            wishes = Wishes(device, enable, disable, is_auto, profile, capture, overlap)
            return self._run_anew(values, given, wishes, communicator, call, kind, profiler)
        except BaseException as error:
            if call is not None:
                communicator.refuse(call, error)
            raise

    def _run_anew(
        self,
        values: Sequence[object],
        given: Mapping[str, int],
        wishes: Wishes,
        communicator: Communicator,
        call: Call | None,
        kind: Kind | None,
        profiler: CallProfiler | None,
    ) -> list[torch.Tensor]:
        """A call that is checked, and compiled if need be. Later ones of its `kind` are not."""
        check_ranks(self.frozen_program(), communicator.size())
        trace = None if profiler is None else profiler.trace
        bound = self.bind(
            values,
            communicator.rank(),
            wishes.device,
            wishes.enable,
            wishes.disable,
            wishes.is_auto,
            wishes.profile,
            trace,
            wishes.capture,
            given,
        )
        bound = self.in_chosen_form(bound, wishes.overlap, communicator, trace)
        executor = bound.prepared.compiled.executor
        outputs = executor.run(bound.arguments, communicator, trace, bound.given, call)
        if profiler is not None:
            measured = profiler.finish(executor.ids.fusion, bound.arguments, outputs)
            self._profile = measured if wishes.profile else self._profile
        self._debug_output = self._dump(bound) if wishes.capture else None
        executable = executor.compile(communicator.rank())
        results = self.deliver(bound, outputs, executable)
        if kind is not None:
            conditions, _ = kind
            hot = remember_call(
                conditions,
                values,
                bound.arguments,
                bound.prepared,
                executable,
                outputs,
                results,
                bound.given,
            )
            if hot is not None:
                self._hot_calls.put(kind, hot)
        return results

    def bind(
        self,
        inputs: Iterable[object],
        rank: int,
        device: Device | None = None,
        enable: Sequence[str] = (),
        disable: Sequence[str] = (),
        is_auto: bool = False,
        redo: bool = False,
        trace: Trace | None = None,
        capture: bool = False,
        given: Mapping[str, int] | None = None,
    ) -> Bound:
        """Check one rank's inputs and find, or make, the program compiled for them.

        `given`: global sizes by symbol, beside those that the inputs say. `is_auto` passes over the
        user's schedule, `redo` asks for it again. What options dump of a program is printed when it
        is compiled, unless the caller captures it.
        """
        frozen = self.frozen_program()
        options = options_of_call(frozen, enable, disable)
        sizes = dict(given or {})
        arguments, where = self._arguments(frozen, inputs, rank, device, sizes)
        is_scheduled = self._prepared.are_scheduled and not is_auto
        key = CallKey(signature_of(arguments), str(where), options, is_scheduled)
        prepared = self._prepared.find(key)
        if prepared is None or (redo and is_scheduled):
            prepared = self._prepared.make(frozen, key, trace, redo=redo)
            if options.dump and not capture:
                print(self._dump(Bound(arguments, prepared, key)), end="")
        return Bound(arguments, prepared, key, sizes)

    def in_form(self, bound: Bound, form: Overlap, trace: Trace | None = None) -> Bound:
        """The call in another form of overlap, compiled now or before."""
        if bound.key.form == form:
            return bound
        key = replace(bound.key, form=form)
        prepared = self._prepared.find(key)
        if prepared is None:
            prepared = self._prepared.make(self.frozen_program(), key, trace)
        return replace(bound, prepared=prepared, key=key)

    def in_chosen_form(
        self,
        bound: Bound,
        overlap: Overlapping | None,
        communicator: Communicator,
        trace: Trace | None,
        is_captured: bool = False,
    ) -> Bound:
        """A call in its plain form in the one that it asks for, or that is found best; of those
        that a graph can repeat if it `is_captured`."""
        wanted = read_overlap("execute", overlap, bound.key.options)
        is_one_part = bound.key.is_scheduled or self._prepared.are_segments
        in_form = partial(self.in_form, bound, trace=trace)
        choice = self._choices.find(
            self.frozen_program(), bound, in_form, wanted, is_one_part, communicator, is_captured
        )
        if choice is None:
            return bound
        found = in_form(choice.form)
        return replace(found, prepared=replace(found.prepared, choice=choice))

    def has_run(self) -> bool:
        """Whether any call has been answered."""
        return self._last is not None

    def prepare(self, example: Sequence[object], device: Device | None = None) -> None:
        """Compile for inputs like these; without any, for inputs laid out as they are declared."""
        frozen, rank = self.frozen_program(), Communicator.instance().rank()
        if example or not frozen.expected:
            prepared = self.bind(example, rank, device).prepared
        else:
            where = read_device(device) or torch.device("cpu")
            signature = declared_signature(frozen.expected, str(where))
            options = options_of_call(frozen, (), ())
            key = CallKey(signature, str(where), options, self._prepared.are_scheduled)
            prepared = self._prepared.make(frozen, key)
        prepared.compiled.executor.compile(rank)

    def _arguments(
        self,
        frozen: FrozenProgram,
        inputs: Iterable[object],
        rank: int,
        device: Device | None,
        given: dict[str, int],
    ) -> tuple[list[Argument], torch.device]:
        """As `check_taken`, of inputs as they are passed. Warns once of one that requires grad."""
        taken, with_grad = take_inputs(frozen, inputs, rank, given)
        if with_grad is not None and not self._warned:
            self._warned = True
            warnings.warn(
                f"input {with_grad} requires grad: meshfuse computes no gradients, and its outputs "
                "do not require grad",
                UserWarning,
                stacklevel=6,
            )
        return check_taken(frozen, taken, device, rank)

    def deliver(
        self, bound: Bound, outputs: Sequence[torch.Tensor], executable: Executable
    ) -> list[torch.Tensor]:
        """The outputs as users get them. The call becomes the most recent one."""
        self._last = bound.prepared
        if not self.frozen_program().meshes:
            return [plain_result(output) for output in outputs]
        program = executable.program
        shapes = executable.result_shapes(bound.arguments, bound.given)
        shown = [s for s, o in zip(shapes, program.outputs, strict=True) if o.alias is None]
        placed = zip(outputs, bound.prepared.outputs, shown, strict=True)
        return [wrap_result(*result) for result in placed]

    # Answers about any call.

    def is_compiled(self, inputs: Iterable[object], device: Device | None = None) -> bool:
        """Whether a call with inputs like these compiles nothing."""
        rank = Communicator.instance().rank()
        found = self._find(inputs, device)
        return found is not None and found.compiled.executor.is_compiled(rank)

    def get_scheduled_ir(
        self,
        inputs: Iterable[object],
        tensor_transforms: bool = False,
        device: Device | None = None,
    ) -> str:
        """The kernels' programs with their loops, compiled for inputs like these.

        With `tensor_transforms`, the tile program that each was lowered to, too. UserError where
        they are not compiled.
        """
        return scheduled_text(self._compilation_for(inputs, device), tensor_transforms)

    def get_cuda_kernel(
        self,
        inputs: Iterable[object],
        intrinsic_code: bool = False,
        device: Device | None = None,
    ) -> str:
        """The source of the kernels compiled for inputs like these: C++ on a CPU.

        `intrinsic_code` adds the functions that each begins with. UserError where they are not
        compiled.
        """
        return kernel_text(self._compilation_for(inputs, device), intrinsic_code)

    def frozen_program(self) -> FrozenProgram:
        """The program, fixed; its text is hashed once."""
        if self._frozen is not None:
            return self._frozen
        with self._recording.lock:
            if self._frozen is None:
                self._frozen = freeze_program(self._recording.program, self._enable)
            return self._frozen

    # Answers about the most recent call.

    def fusion(self) -> FusionView:
        return FusionView(self._recording)

    def get_output_shardings(self) -> list[Sharding]:
        """The sharding of each output that the most recent call returned; [] without meshes."""
        found = [public_sharding(sharding) for sharding in self._recent().outputs]
        return [sharding for sharding in found if sharding is not None]

    def communications(self) -> tuple[Communicate, ...]:
        """The collectives of the most recent call, in the order in which they were posted."""
        return communications(self.host_program())

    def host_program(self) -> HostProgram:
        """What every rank did in the most recent call."""
        return self.recent_compilation().host

    def recent_compilation(self) -> Compilation:
        """What the most recent call ran, and how it was made."""
        return self._recent().compiled.compilation

    def overlap(self) -> OverlapChoice | None:
        """In which form of overlap the most recent call ran, and why; None where there was no
        choice: without meshes or communications, and for overlap="off"."""
        return self._recent().choice

    def get_most_recent_scheduled_ir(self, tensor_transforms: bool = False) -> str:
        """As `get_scheduled_ir`, of the most recent call."""
        return scheduled_text(self._recent().compiled.compilation, tensor_transforms)

    def profile(self) -> FusionProfile:
        """That of the most recent call that asked for one."""
        if self._profile is None:
            raise UserAssertionError(
                "profile(): no call was profiled; use fd.execute(inputs, profile=True)"
            )
        return self._profile

    def debug_output(self) -> str | None:
        """What options dumped of the most recent call; None unless it captured that."""
        return self._debug_output

    def explain(self) -> str:
        """What the compiler did with the most recent call, and why; before it, the program."""
        if self._last is None:
            return explain_definition(self._recording.program)
        compiled, rank = self._last.compiled, Communicator.instance().rank()
        calls = replays_of(compiled.executor.compile(rank))
        return explain_compilation(compiled.compilation, self._last.choice, calls)

    def _recent(self) -> Prepared:
        if self._last is None:
            raise UserError("this definition has not been executed: there is no call to report on")
        return self._last

    # Parts of a call.

    def _find(self, inputs: Iterable[object], device: Device | None) -> Prepared | None:
        """What is compiled for inputs like these, without the options of single calls."""
        if self._frozen is None:
            return None
        rank = Communicator.instance().rank()
        arguments, where = self._arguments(self._frozen, inputs, rank, device, {})
        options = options_of_call(self._frozen, (), ())
        are_scheduled = self._prepared.are_scheduled
        return self._prepared.find(
            CallKey(signature_of(arguments), str(where), options, are_scheduled)
        )

    def _compilation_for(self, inputs: Iterable[object], device: Device | None) -> Compilation:
        found = self._find(inputs, device)
        if found is None:
            raise UserError("Fusion is not compiled! Execute it on inputs like these first.")
        return found.compiled.compilation

    def _dump(self, bound: Bound) -> str:
        compiled, program = bound.prepared.compiled, self.frozen_program().program
        postings = partial(posted_by_this_rank, bound)
        return debug_output(bound.key.options, program, compiled.compilation, postings)


def _leave_as_it_is() -> None:
    """The schedule of a program that is scheduled already."""
