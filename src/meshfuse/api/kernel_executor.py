"""KernelExecutor: a program as one kernel, by the schedule that its user wrote."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

import torch

from meshfuse.api.devices import Device
from meshfuse.api.enumerations import SchedulerType
from meshfuse.api.executor_cache import FusionExecutorCache
from meshfuse.api.fusion_view import FusionView
from meshfuse.base.errors import UserError, UserTypeError


@final
class KernelExecutor:
    """Compiles a program into one kernel, and runs it.

        fd.sched.split(y, 1, 16)
        executor = KernelExecutor()
        executor.compile(fd.fusion, [x])
        [y] = executor.run([x])

    Grid loops stand outermost, then serial ones, then lanes; an unscheduled program is one serial
    loop nest. On a mesh the kernel computes on what one rank holds, and all that it needs must lie
    there. The ids are kept for whoever runs many.
    """

    __slots__ = ("_cache", "concrete_id", "fusion_id", "group_id", "runtime_id")

    def __init__(
        self, fusion_id: int = 0, concrete_id: int = 0, runtime_id: int = 0, group_id: int = 0
    ) -> None:
        self.fusion_id = fusion_id
        self.concrete_id = concrete_id
        self.runtime_id = runtime_id
        self.group_id = group_id
        self._cache: FusionExecutorCache | None = None

    def compile(
        self,
        fusion: FusionView,
        args: Iterable[object] = (),
        *,
        scheduler_type: SchedulerType = SchedulerType.none,
        device: Device | None = None,
    ) -> None:
        """Compile the program as it is scheduled now; a second call replaces the first.

        `args` are an example of what it will run on. Without them the layouts that the inputs were
        declared with count, and arguments that promise more compile once more. `scheduler_type`
        says who scheduled, and changes nothing.

        Raises ScheduleError for a schedule that no kernel can have, Unsupported for an operation
        that kernels do not have, UserError for a program without outputs and for tensors of which
        other ranks hold a part.
        """
        if not isinstance(fusion, FusionView):
            raise UserTypeError(
                f"KernelExecutor.compile({fusion!r}): takes a definition's fusion, as fd.fusion"
            )
        if not fusion.outputs():
            raise UserError("KernelExecutor.compile: the program has no outputs; call add_output")
        cache = FusionExecutorCache(fusion, self.fusion_id, auto_schedule=False)
        cache.prepare(list(args), device)
        self._cache = cache

    def is_compiled(self) -> bool:
        """Whether `run` may be called."""
        return self._cache is not None

    def run(self, args: Iterable[object], *, device: Device | None = None) -> list[torch.Tensor]:
        """Run on this rank's arguments; return the outputs as plain tensors.

        UserError where nothing is compiled, and for arguments that do not fit.
        """
        if self._cache is None:
            raise UserError("KernelExecutor.run: nothing is compiled; call compile(fusion, args)")
        return self._cache.run(args, device)

    def is_programmatic_dependent_launch_enabled(self) -> bool:
        """False: a property of GPU kernels."""
        return False
