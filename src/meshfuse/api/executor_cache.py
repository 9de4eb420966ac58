"""`fd.fec`: what one definition has compiled, and the most recent call."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

import torch

from meshfuse.api.explain import communications, explain_compilation, explain_definition
from meshfuse.api.fusion_view import FusionView
from meshfuse.api.recording import Recording
from meshfuse.api.results import public_sharding, wrap_result
from meshfuse.api.sharding import Sharding
from meshfuse.base.errors import UserError, UserTypeError
from meshfuse.base.options import Options, options_from_environment, with_options
from meshfuse.cache import CompiledProgram, FusionCache, fingerprint
from meshfuse.dist.communicator import Communicator
from meshfuse.dist.tensor import DistributedTensor
from meshfuse.facts import sharding as facts
from meshfuse.host.nodes import Communicate, HostProgram
from meshfuse.ir.axes import TensorName
from meshfuse.ir.mesh import DeviceMesh
from meshfuse.ir.program import Program
from meshfuse.runtime.arguments import (
    Argument,
    Expected,
    ExpectedTensor,
    Signature,
    check_arguments,
    expected_inputs,
    flatten_inputs,
    signature_of,
)

Device = torch.device | str | int


@final
@dataclass(frozen=True, slots=True)
class FrozenProgram:
    """The program of a definition that runs, and what is asked of every call.

    `shardings` are those of the inputs; `meshes` has each mesh with the first tensor that lies on
    it; `options` are the environment's, when the program was fixed.
    """

    program: Program
    key: str
    expected: tuple[Expected, ...]
    shardings: tuple[facts.Sharding | None, ...]
    meshes: dict[DeviceMesh, TensorName]
    options: Options


@final
@dataclass(frozen=True, slots=True)
class Prepared:
    """A compiled program, and the shardings of what it returns."""

    compiled: CompiledProgram
    outputs: tuple[facts.Sharding, ...]
    updates: tuple[tuple[int, facts.Sharding], ...]
    """Inputs that are updated in place, by position, in the order of their outputs."""


@final
@dataclass(frozen=True, slots=True)
class Bound:
    """The arguments of one call, checked, and what runs on them."""

    arguments: list[Argument]
    prepared: Prepared


@final
class FusionExecutorCache:
    """The compiled forms of one definition, by signature; they live in the process's FusionCache.

    Safe to use from several threads.
    """

    __slots__ = ("_frozen", "_last", "_prepared", "_recording", "_warned")

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._frozen: FrozenProgram | None = None
        self._prepared: dict[tuple[Signature, str, Options], Prepared] = {}
        self._last: Prepared | None = None
        self._warned = False

    # Running.

    def run(
        self,
        inputs: Iterable[object],
        device: Device | None = None,
        enable: Sequence[str] = (),
        disable: Sequence[str] = (),
    ) -> list[torch.Tensor]:
        """Run on this rank's inputs: `FusionDefinition.execute`, of a program that is fixed."""
        communicator = Communicator.instance()
        self._check_ranks(communicator)
        bound = self.bind(inputs, communicator.rank(), device, enable, disable)
        outputs = bound.prepared.compiled.executor.run(bound.arguments, communicator)
        return self.deliver(bound.prepared, outputs)

    def bind(
        self,
        inputs: Iterable[object],
        rank: int,
        device: Device | None = None,
        enable: Sequence[str] = (),
        disable: Sequence[str] = (),
    ) -> Bound:
        """Check one rank's inputs and find, or make, the program compiled for them."""
        frozen = self.frozen_program()
        options = frozen.options
        if enable or disable:
            options = with_options(options, enable, disable)
        flat: list[Argument | complex] = []
        for value in flatten_inputs(inputs):
            flat.append(self._take(frozen, len(flat), value))
        wanted = read_device(device)
        if frozen.meshes and all(rank not in mesh.ids for mesh in frozen.meshes):
            arguments = [value for value in flat if not isinstance(value, complex)]
            where = torch.device("cpu") if wanted is None else wanted
        else:
            arguments, where = check_arguments(frozen.expected, flat, wanted)
        return Bound(arguments, self._prepare(frozen, arguments, where, options))

    def deliver(self, prepared: Prepared, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs as users get them. The call becomes the most recent one."""
        self._last = prepared
        return [wrap_result(*pair) for pair in zip(outputs, prepared.outputs, strict=True)]

    def frozen_program(self) -> FrozenProgram:
        """The program, fixed; its text is hashed once."""
        with self._recording.lock:
            if self._frozen is None:
                self._frozen = _freeze(self._recording.program)
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
        return self._recent().compiled.compilation.host

    def explain(self) -> str:
        """What the compiler did with the most recent call, and why; before it, the program."""
        if self._last is None:
            return explain_definition(self._recording.program)
        return explain_compilation(self._last.compiled.compilation)

    def _recent(self) -> Prepared:
        if self._last is None:
            raise UserError("this definition has not been executed: there is no call to report on")
        return self._last

    # Parts of a call.

    def _check_ranks(self, communicator: Communicator) -> None:
        size = communicator.size()
        for mesh, tensor in self.frozen_program().meshes.items():
            if max(mesh.ids) >= size:
                raise UserError(
                    f"execute: {tensor} lies on {mesh}, but this job has {size} "
                    f"{'process' if size == 1 else 'processes'}: start it with torchrun "
                    f"--nproc-per-node={max(mesh.ids) + 1}, or run all ranks in this process with "
                    "multidevice.simulate"
                )

    def _take(
        self, frozen: FrozenProgram, position: int, value: Argument | complex
    ) -> Argument | complex:
        """One argument as kernels take it: DistributedTensors by their shards, none with grad."""
        if not isinstance(value, torch.Tensor):
            return value
        if isinstance(value, DistributedTensor):
            _check_sharding(frozen, position, value)
            value = value.local
        if not value.requires_grad:
            return value
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"input {position} requires grad: meshfuse computes no gradients, and its outputs "
                "do not require grad",
                UserWarning,
                stacklevel=5,
            )
        return value.detach()

    def _prepare(
        self,
        frozen: FrozenProgram,
        arguments: Sequence[Argument],
        device: torch.device,
        options: Options,
    ) -> Prepared:
        signature = signature_of(arguments)
        key = (signature, str(device), options)
        found = self._prepared.get(key)
        if found is None:
            store = FusionCache.instance()
            compiled = store.find(frozen.program, frozen.key, signature, device, options)
            found = self._prepared.setdefault(key, _prepare_results(compiled))
        return found


def read_device(device: Device | None) -> torch.device | None:
    """The device that a call names. An int is the number of a GPU."""
    match device:
        case None:
            return None
        case torch.device():
            return _numbered(device)
        case int() if not isinstance(device, bool) and device >= 0:
            return torch.device("cuda", device)
        case str():
            return _numbered(_parse_device(device))
        case _:
            raise UserTypeError(
                f"execute(device={device!r}): takes a torch.device, its name, or a GPU's number"
            )


def _numbered(device: torch.device) -> torch.device:
    """`cuda` is the current GPU."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)


def _parse_device(device: str) -> torch.device:
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise UserError(f"execute(device={device!r}): {str(error).splitlines()[0]}") from None


def _freeze(program: Program) -> FrozenProgram:
    meshes: dict[DeviceMesh, TensorName] = {}
    for tensor in program.fusion.tensors:
        mesh = program.schedule(tensor).mesh
        if mesh is not None:
            meshes.setdefault(mesh, tensor)
    expected = expected_inputs(program)
    shardings = tuple(
        facts.sharding_of(program, want.name) if isinstance(want, ExpectedTensor) else None
        for want in expected
    )
    key = fingerprint(program)
    options = options_from_environment(os.environ)
    return FrozenProgram(program, key, expected, shardings, meshes, options)


def _prepare_results(compiled: CompiledProgram) -> Prepared:
    program = compiled.compilation.segmented.program
    fusion = program.fusion
    updates = tuple(
        (fusion.inputs.index(output.alias), facts.sharding_of(program, output.alias))
        for output in fusion.outputs
        if output.alias is not None
    )
    shown = (output.tensor for output in fusion.outputs if output.alias is None)
    shardings = tuple(facts.written_sharding_of(program, name) for name in shown)
    return Prepared(compiled, shardings, updates)


def _check_sharding(frozen: FrozenProgram, position: int, value: DistributedTensor) -> None:
    """UserError unless a DistributedTensor is sharded as the program's input at `position` is."""
    if position >= len(frozen.shardings):
        return  # too many inputs: the count is checked with all of them at hand
    wanted = frozen.shardings[position]
    if wanted is None:
        return
    if _placement(wanted) != _placement(value.sharding):
        raise UserError(
            f"input {position}, {frozen.expected[position]}, must be sharded as "
            f"{facts.describe(wanted)}, but got {facts.describe(value.sharding)}"
        )


def _placement(sharding: facts.Sharding) -> object:
    """What two shardings of a tensor must share: not its sizes, nor mesh axes of one rank."""
    mesh = sharding.mesh
    owners = tuple(
        tuple(d.owner for d in digits if d.owner and mesh and mesh.axis_size(d.owner) > 1)
        for digits in sharding.axes
    )
    return sharding.mesh, owners, dict(sharding.partial)
