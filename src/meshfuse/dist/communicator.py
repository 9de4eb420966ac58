"""The communicator: which rank this process is, and the collectives it takes part in.

It stands on the default process group of torch.distributed if there is one. Otherwise on the
launcher's environment: then the first communication sets up the default process group itself.
Otherwise the process is alone. Groups of ranks are made when first used, and dropped when the
default process group they stood on is destroyed. This module never loads torch.distributed.tensor.
"""

# torch.distributed documents its stores but does not declare them as exports:
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import atexit
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from threading import RLock
from typing import Any, ClassVar, final
from zlib import crc32

import torch
import torch.distributed as dist

from meshfuse.base import optional
from meshfuse.base.errors import CommunicationError, InvariantError, UserError
from meshfuse.base.options import options_from_environment
from meshfuse.dist import collectives
from meshfuse.dist.agreement import Agreement, CommunicationSequence, find_difference
from meshfuse.dist.attachment import Attachment, Bound, attach
from meshfuse.dist.calls import IN_ANOTHER_THREAD, Call, CallLog
from meshfuse.dist.collectives import CollectiveRequest
from meshfuse.dist.deadlines import read_timeout
from meshfuse.dist.groups import CONTROL, Group, form_group
from meshfuse.dist.history import CallHistory
from meshfuse.dist.joining import join_launch
from meshfuse.dist.kept_memory import KeptMemories, order_in_memory
from meshfuse.dist.launcher import ALONE, Launch, Place, read_launch
from meshfuse.dist.mailbox import join_mailbox
from meshfuse.dist.pending import Pending
from meshfuse.dist.symmetric import SymmetricTransport, join_transport
from meshfuse.dist.transfers import SharedChunk
from meshfuse.ir.mesh import DeviceMesh

_C10D = dist.distributed_c10d if dist.is_available() else None
"""Asked directly: dist.group.WORLD is a frame more, in every call."""
BARRIER_NUMBER = -1
"""In place of the host program's number, for what no host program asked for."""


def _default_group() -> dist.ProcessGroup | None:
    """None before it is initialized."""
    return None if _C10D is None else _C10D._world.default_pg


@final
class CallEntry:
    """The way to the collectives of calls that ranks agree on alike. `has_readers`: peers may read
    inputs where they are."""

    __slots__ = ("_agreed", "_attachment", "_communicator", "_has_readers")

    def __init__(
        self,
        communicator: Communicator,
        attachment: Attachment,
        agreed: Sequence[tuple[CallHistory, Agreement]],
        has_readers: bool,
    ) -> None:
        self._has_readers = has_readers
        self._communicator = communicator
        self._attachment = attachment
        self._agreed = tuple(agreed)

    def bind(self, bound: Bound) -> None:
        """Let go of groups, who has looked them up, when the process group that they stand on is
        destroyed; that may have happened in another thread already."""
        self._attachment.bound.add(bound)
        if self._attachment.is_closed:
            bound.forget()

    def enter(
        self, call: Call | None, inputs: Sequence[object] = (), seconds: float | None = None
    ) -> CallLog:
        """A call comes to its collectives; `leave` of the log that this returns ends them.

        All ranks of each agreement's team make sure that they are about to do the same, within
        `seconds` or the default, and that inputs which peers may read lie alike. Raises UserError
        while another thread is in a call, and as Communicator.agree does.
        """
        attachment = self._attachment
        calls, mine = attachment.calls, [call]  # a list: known by identity
        try:
            if calls.turn.setdefault(None, mine) is not mine:
                raise UserError(IN_ANOTHER_THREAD)
            calls.current = call
            for history, agreement in self._agreed:
                if not history.has_followed(agreement.key):
                    calls.entered = call
                    self._communicator.agree(agreement, seconds)
                if self._has_readers and attachment.kept_memory:
                    calls.entered = call
                    team = agreement.team
                    memory_history = attachment.memory_history(team)
                    self._communicator.agree_on_memory(
                        team, inputs, attachment.kept_memory, memory_history
                    )
            calls.entered = call
        except BaseException:
            if calls.turn.get(None) is mine:
                calls.leave()
            raise
        return calls


@final
class Communicator:
    """This process among the ranks of the job. `instance()` is the process' own."""

    _instance: ClassVar[Communicator | None] = None
    _instance_lock: ClassVar[RLock] = RLock()

    def __init__(self, environ: Mapping[str, str], timeout: float | None = None) -> None:
        """`environ` may hold a launcher's variables, MESHFUSE_TIMEOUT, and options; `timeout`
        (seconds) goes before the second. With the option `multidevice` disabled the process is
        alone, whatever else stands there. `has_replays`: calls may be replayed as graphs."""
        self.timeout = read_timeout(environ) if timeout is None else timeout
        self._environ = environ
        options = options_from_environment(environ)
        self._is_off = options.is_disabled("multidevice")
        self.has_replays = not options.is_disabled("graph_replay")
        self._launch: Launch | None = None if self._is_off else read_launch(environ)
        self._attachment: Attachment | None = None
        self.here = self._place_on(None)
        """As `place`, on the default process group that `instance` has found: no call looks for it
        twice."""
        self.calls: CallLog | None = None
        """Of this rank, on that process group. None for a process that is alone."""
        self._lock = RLock()

    @classmethod
    def instance(cls) -> Communicator:
        """The communicator of this process, made at the first call."""
        found = cls._instance
        if found is None:
            with cls._instance_lock:
                if cls._instance is None:
                    cls._instance = Communicator(os.environ)
                    atexit.register(cls._instance.close)
                found = cls._instance
        attachment = found._attachment
        world = None if attachment is None else attachment.world
        if _C10D is not None and _C10D._world.default_pg is not world:
            found._find_attachment()  # tells the peers early that this process lives
        return found

    def size(self) -> int:
        """Number of ranks; 1 for a process that is alone."""
        return self.place().size

    def rank(self) -> int:
        return self.place().rank

    def local_size(self) -> int:
        """Number of ranks on this host."""
        return self.place().local_size

    def local_rank(self) -> int:
        return self.place().local_rank

    def device(self) -> torch.device:
        """The device of this rank: `cuda:<local rank>`, or the CPU where there is no GPU."""
        if torch.cuda.is_available():
            return torch.device("cuda", self.local_rank())
        return torch.device("cpu")

    def place(self) -> Place:
        """Rank and size, here and in all."""
        self._find_attachment()
        return self.here

    def post(self, request: CollectiveRequest) -> Pending:
        """Start a collective; every rank of its team posts the same ones in the same order.

        Raises CommunicationError if the group is broken or cannot be formed in time, UserError for
        ranks that this job does not have.
        """
        if request.transfer is not None and request.src.is_cuda and len(request.team) > 1:
            group = self._joined_group(request.team, request.src.device, request)
            if group.transport is not None:
                return Pending(group.post(request), group, self.timeout)
        if collectives.moves_nothing(request):
            return Pending(collectives.perform_alone(request), None, self.timeout)
        group = self.group(request.team, request.src.device.type, request)
        return Pending(group.post(request), group, self.timeout)

    def reserve(self, chunk: SharedChunk) -> torch.Tensor:
        """Memory for a chunk that this rank will deliver, or that its peers will fetch, which they
        reach if there is such."""
        transport = None
        if len(chunk.team) > 1:
            transport = self._transport(chunk.team, chunk.device, chunk.cause)
        if transport is None:
            return chunk.ordinary()
        strides, dtype = chunk.strides, chunk.dtype
        return transport.allocate(chunk.shape, strides, dtype, chunk.most_bytes, lasts=chunk.lasts)

    def give_back(self, team: tuple[int, ...], memory: Sequence[torch.Tensor]) -> None:
        """The program lets go of what it reserved for its peers to fetch. All ranks of the team do
        so at the same place among their calls."""
        attachment = self._attachment
        group = None if attachment is None else attachment.joined.get(team)
        if group is not None and group.transport is not None:
            for chunk in memory:
                group.transport.give_back(chunk)

    def keep(
        self, team: tuple[int, ...], shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory for a tensor of the user's that peers can reach; ordinary memory where there is no
        such. All ranks of the team ask alike, in one order."""
        transport = None
        if device.type == "cuda" and len(team) > 1:
            transport = self._transport(team, device, f"symmetric memory of shape {tuple(shape)}")
        if transport is None:
            return torch.empty(tuple(shape), dtype=dtype, device=device)
        tensor, kept = transport.keep(team, shape, dtype)
        self._attach(tensor).kept_memory.add(kept)
        return tensor

    def agree_on_memory(
        self,
        team: tuple[int, ...],
        inputs: Sequence[object],
        memory: KeptMemories,
        history: CallHistory,
    ) -> None:
        """Make sure that inputs which lie in memory that users keep lie alike on all ranks. With
        gaps or in another order they are copied to be read, so their order counts.

        Raises UserError where they do not; as `agree`, ranks meet only if they do not expect it.
        """
        places = tuple(
            (position, found[0].team, found[0].serial, found[1], order_in_memory(value))
            for position, value in enumerate(inputs)
            if isinstance(value, torch.Tensor) and (found := memory.find(value)) is not None
        )
        if not history.has_followed(places):
            said = self.gather(team, [crc32(repr(places).encode())], "symmetric inputs")
            if any(theirs != said[0] for theirs in said):
                raise UserError(
                    f"execute: ranks {team} pass inputs in different symmetric memory; on rank "
                    f"{self.rank()} they are (input, ranks of the memory, its number, byte, axes) "
                    f"{places}. All ranks must pass what they got from the same calls of "
                    "symmetric_empty"
                )
            history.note(places)

    def _transport(
        self, team: tuple[int, ...], device: torch.device, purpose: object
    ) -> SymmetricTransport | None:
        return self._joined_group(team, device, purpose).transport

    def _joined_group(self, team: tuple[int, ...], device: torch.device, purpose: object) -> Group:
        """The group of a team with its symmetric memory, which all its ranks ask for alike. Where
        there is none, a warning has said why, once."""
        attachment = self._attach(purpose)
        group = attachment.joined.get(team)
        if group is not None:
            return group
        group = self.group(team, device.type, purpose)
        store = dist.PrefixStore("symmetric", group.board.notices)
        gather = partial(self.gather, team)
        group.transport, reason = join_transport(gather, team, self.rank(), device, store)
        attachment.joined[team] = group
        if reason:
            text = f"meshfuse: chunks between ranks {team} go through NCCL: {reason}"
            warnings.warn(text, UserWarning, stacklevel=2)
        return group

    def begin_call(self, program: str) -> Call | None:
        """A call begins of a program, which the text stands for on all ranks, on the default
        process group that `instance` has found. None for a process that is alone.

        Where it ends with an error before it comes to its collectives, `refuse` tells the peers
        that wait in it.
        """
        return None if self.calls is None else self.calls.count(program)

    @contextmanager
    def in_call(self, program: str | None) -> Iterator[Call | None]:
        """A call from its begin to its end; None for a program that ranks do not run together."""
        call = None if program is None else self.begin_call(program)
        try:
            yield call
        except BaseException as error:
            if call is not None:
                self.refuse(call, error)
            raise

    def refuse(self, call: Call, error: BaseException) -> None:
        """A call that `begin_call` gave has ended with an error."""
        if self._attachment is not None:
            self._attachment.calls.refuse(call, error)

    def entry(self, agreements: Sequence[Agreement], has_readers: bool = False) -> CallEntry:
        """The way to the collectives of calls that ranks agree on so. `has_readers`: peers may read
        their inputs."""
        attachment = self._attach(agreements[0].purpose)
        agreed = [(attachment.history(found.team), found) for found in agreements]
        return CallEntry(self, attachment, agreed, has_readers)

    def enter(self, team: Sequence[int], purpose: str, seconds: float | None = None) -> CallLog:
        """As CallEntry.enter, for collectives that no program has: `purpose` is all that they
        depend on."""
        agreement = CommunicationSequence.of(team, [purpose]).at({})
        return self.entry([agreement]).enter(None, seconds=seconds)

    def agree(self, agreement: Agreement, seconds: float | None = None) -> None:
        """Make sure that all ranks of a team are about to do the same, for the same sizes.

        Ranks meet for it if the call is not the one that all expect. Nothing was posted yet: where
        all come and two differ, on all ranks CommunicationError (of the programs) or UserError (of
        sizes) breaks no group. A rank that compares with one that does not gets a
        CommunicationError, and tells the peers; so does one whose peers do not come in time.
        """
        attachment = self._attach(agreement.purpose)
        history = attachment.history(agreement.team)
        if not history.has_followed(agreement.key):
            self._compare(agreement, self.timeout if seconds is None else seconds)
            history.note(agreement.key)

    def compare(self, agreement: Agreement, seconds: float | None = None) -> None:
        """As `agree`, but ranks meet in any case."""
        attachment = self._attach(agreement.purpose)
        self._compare(agreement, self.timeout if seconds is None else seconds)
        attachment.history(agreement.team).note(agreement.key)

    def gather(
        self, team: tuple[int, ...], mine: Sequence[int], purpose: str, seconds: float | None = None
    ) -> list[list[int]]:
        """What every rank of a team says, in its order; all say equally many numbers of 64 bits,
        and all have come when this returns.

        Raises CommunicationError as Group.gather does.
        """
        if len(team) == 1:
            return [list(mine)]
        limit = self.timeout if seconds is None else seconds
        return self.group(team, CONTROL, purpose).gather(mine, purpose, limit)

    def gather_texts(self, team: tuple[int, ...], mine: str, purpose: str) -> list[str]:
        """As `gather`, of texts."""
        if len(team) == 1:
            return [mine]
        control = self.group(team, CONTROL, purpose)
        place, store = control.posted, control.board.notices
        if mine:
            store.set(f"text {place} {control.board.rank}", mine)
        spoke = self.gather(team, [bool(mine)], purpose)
        return [
            store.get(f"text {place} {rank}").decode() if has_text else ""
            for rank, [has_text] in zip(team, spoke, strict=True)
        ]

    def _compare(self, agreement: Agreement, seconds: float) -> None:
        def gather(mine: Sequence[int]) -> list[list[int]]:
            return self.gather(team, mine, cause, seconds)

        team, cause = agreement.team, f"an agreement on {agreement.purpose}"
        try:
            control = self.group(team, CONTROL, agreement.purpose)
            difference = find_difference(agreement, control.board, gather)
        except (CommunicationError, KeyboardInterrupt) as error:
            self.give_up(str(error) or f"interrupted before {agreement.purpose}")
            raise
        if difference is not None:
            raise CommunicationError(difference)

    def run(self, request: CollectiveRequest, seconds: float | None = None) -> torch.Tensor:
        """Post, wait, and return `out`."""
        self.post(request).wait(seconds)
        return request.out

    def barrier(self, seconds: float | None = None) -> None:
        """Block until all ranks have come here. Nothing to do for a process that is alone."""
        place = self.place()
        if place.size == 1:
            return
        token, tokens = torch.zeros(1), torch.empty(place.size)
        team, cause = tuple(range(place.size)), "a barrier"
        request = CollectiveRequest(BARRIER_NUMBER, "all_gather", team, token, tokens, None, cause)
        log = self.enter(team, cause, seconds)
        try:
            self.run(request, seconds)
        finally:
            log.leave()

    def group(self, team: tuple[int, ...], device_type: str, purpose: object) -> Group:
        """The group of these ranks, in this order, for tensors of a device type; formed if it is
        new."""
        with self._lock:
            attachment = self._attach(purpose)
            rank, size = attachment.place.rank, attachment.place.size
            if rank not in team:
                raise InvariantError(f"{purpose}: rank {rank} is not in the team")
            if not all(0 <= member < size for member in team):
                raise UserError(f"{purpose}: this job has {size} ranks only, 0 to {size - 1}")
            key = (team, device_type)
            if key not in attachment.groups:
                board = attachment.board(team, device_type)
                store = dist.PrefixStore("backend", board.notices)
                watch = attachment.watch_for(device_type)
                group = attachment.groups[key] = form_group(
                    device_type, board, store, self.timeout, purpose, watch
                )
                if device_type == CONTROL:
                    gather = partial(self.gather, team, purpose=str(purpose))
                    group.mailbox = join_mailbox(gather, team.index(rank), len(team))
            return attachment.groups[key]

    def torch_mesh(self, mesh: DeviceMesh, device_type: str) -> Any:
        """The mesh as torch has it, made once for each default process group.

        torch makes process groups for it, so all ranks of the job must come here when it is new.
        """
        with self._lock:
            attachment = self._attach(f"the torch mesh of {mesh}")
            key = (mesh, device_type)
            if key not in attachment.torch_meshes:
                tensor_module = optional.load("torch.distributed.tensor")
                attachment.torch_meshes[key] = tensor_module.DeviceMesh(
                    device_type,
                    torch.tensor(mesh.ids).view(mesh.shape),
                    mesh_dim_names=mesh.names if all(mesh.names) else None,
                )
            return attachment.torch_meshes[key]

    def give_up(self, reason: str) -> None:
        """Tell all peers that this rank will not come to its next collectives; their waits end
        with `reason`."""
        attachment = self._attachment
        if attachment is not None:
            for group in attachment.groups.values():
                group.abandon(reason)

    def close(self) -> None:
        """Release all groups. Later communications make new ones."""
        with self._lock:
            if self._attachment is not None:
                self._attachment.close()
                self._stand_on(None)

    def _find_attachment(self) -> Attachment | None:
        """What stands on the present default process group; attaches to a new one, forgets one
        destroyed."""
        if self._is_off:
            return None
        attachment = self._attachment
        if _default_group() is (None if attachment is None else attachment.world):
            return attachment
        with self._lock:
            world = _default_group()  # by now another thread may have made one, and attached
            if self._attachment is not None and self._attachment.world is not world:
                self.close()
            if self._attachment is None and world is not None:
                self._stand_on(attach(world, self._environ))
            return self._attachment

    def _stand_on(self, attachment: Attachment | None) -> None:
        self._attachment, self.here = attachment, self._place_on(attachment)
        is_alone = attachment is None or attachment.place.size == 1
        self.calls = None if attachment is None or is_alone else attachment.calls

    def _place_on(self, attachment: Attachment | None) -> Place:
        if attachment is not None:
            return attachment.place
        return ALONE if self._launch is None else self._launch.place

    def _attach(self, purpose: object) -> Attachment:
        attachment = self._find_attachment()
        if attachment is None:
            if self._is_off:
                raise CommunicationError(
                    f"{purpose}: this process is alone, for MESHFUSE_DISABLE says multidevice"
                )
            if self._launch is None:
                raise CommunicationError(
                    f"{purpose}: this process is alone. Start it with torchrun, or call "
                    "torch.distributed.init_process_group first, or use multidevice.simulate"
                )
            join_launch(self._launch, self.timeout, purpose)
            attachment = self._find_attachment()
        assert attachment is not None
        return attachment
