"""What the ranks of one host tell one another through memory that they share: a few numbers, in
microseconds, where gloo takes hundreds.

Each rank has two slots, one for collectives of odd numbers and one for even ones. It writes what it
says into its own, and reads those of the others when they have the same number. Two are enough: a
rank comes to number k + 2 when all have come to k + 1, and so have read what was said in k.

A slot's number is written last. Not every CPU keeps that order for others to see; so there is a
checksum, and who finds it wrong looks again.

The memory is a file without a name, of which nothing is left when the ranks have ended, in whatever
way. The first rank makes it, the others open it through the first one's process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from mmap import mmap
from secrets import randbits
from struct import pack, unpack
from tempfile import TemporaryFile
from typing import final
from zlib import crc32

from meshfuse.dist.agreement import Gather
from meshfuse.dist.board import identify_process
from meshfuse.dist.deadlines import SPIN_SECONDS, poll

FOLDER = "/dev/shm"
"""A file system in memory."""

_WORD = 8
_SLOT_WORDS = 64
"""More than a line of any cache, so that ranks that write do not disturb one another."""
_HEAD_WORDS = 3
MOST_NUMBERS = _SLOT_WORDS - _HEAD_WORDS


@final
class Mailbox:
    """The slots of a team, for its rank at `place`; `memory` begins as zeros.

    A slot: the number of the collective, the checksum, how many numbers are said, and these.
    """

    __slots__ = ("_bytes", "_place", "_ranks", "_words")

    def __init__(self, memory: mmap | bytearray, place: int, ranks: int) -> None:
        self._bytes = memoryview(memory)
        self._words = self._bytes.cast("Q")
        self._place = place
        self._ranks = ranks

    def send(self, sequence: int, mine: Sequence[int]) -> Mail:
        """Say at most MOST_NUMBERS numbers of 64 bits in the collective of this number.

        Numbers grow. Before it sends again a rank waits for the mail, or for a later collective of
        the same ranks.
        """
        self._write(sequence, mine)
        return Mail(self, sequence, range(self._ranks))

    def has_come(self, place: int, sequence: int) -> bool:
        """Whether a rank has said what it has to say in the collective of this number."""
        return max(self._words[_start(place, half)] for half in range(2)) >= sequence

    def take_back(self, sequence: int) -> None:
        """Of what was sent in this collective: who has not read it yet waits for it."""
        self._words[_start(self._place, sequence)] = 0

    def _write(self, sequence: int, numbers: Sequence[int]) -> None:
        start = _start(self._place, sequence)
        said = pack(f"={1 + len(numbers)}q", len(numbers), *numbers)
        at = (start + 2) * _WORD
        self._bytes[at : at + len(said)] = said
        self._words[start + 1] = _checksum(sequence, said)
        self._words[start] = sequence

    def read(self, place: int, sequence: int) -> list[int] | None:
        """What a rank says; None as long as it has not come."""
        start = _start(place, sequence)
        if self._words[start] != sequence:
            return None
        count = self._words[start + 2]
        if count > MOST_NUMBERS:
            return None
        at = (start + 2) * _WORD
        said = bytes(self._bytes[at : at + (1 + count) * _WORD])
        if self._words[start + 1] != _checksum(sequence, said):
            return None
        return list(unpack(f"={1 + count}q", said)[1:])


def _start(place: int, sequence: int) -> int:
    """The first word of a slot."""
    return (2 * place + sequence % 2) * _SLOT_WORDS


def _checksum(sequence: int, said: bytes) -> int:
    return crc32(said, sequence & 0xFFFFFFFF)


@final
class Mail:
    """What the ranks say in one collective."""

    __slots__ = ("_absent", "_found", "_mailbox", "sequence")

    def __init__(self, mailbox: Mailbox, sequence: int, places: Sequence[int]) -> None:
        self.sequence = sequence
        self._mailbox = mailbox
        self._absent = list(places)
        self._found: dict[int, list[int]] = {}

    def is_completed(self) -> bool:
        """Whether all have come."""
        while self._absent:
            said = self._mailbox.read(self._absent[-1], self.sequence)
            if said is None:
                return False
            self._found[self._absent.pop()] = said
        return True

    def comes_soon(self) -> bool:
        """Whether all come while it is worth to look for nothing else."""
        return poll(self.is_completed, SPIN_SECONDS)

    def take_back(self) -> None:
        """This rank gives up: those that come later are not to go on as if it were there."""
        self._mailbox.take_back(self.sequence)

    def read(self) -> list[list[int]]:
        """What each rank has said, by place, when all have come."""
        return [said for _, said in sorted(self._found.items())]


def join_mailbox(gather: Gather, place: int, ranks: int) -> Mailbox | None:
    """The mailbox of a team whose ranks all come here. None, on all of them, where they are not on
    one host, or one of them does not get at the memory.

    Raises what `gather` does.
    """
    process, token = identify_process(), randbits(63)
    size = (2 * ranks * _SLOT_WORDS + 1) * _WORD
    made = _make_file(size, token) if place == 0 and process.namespace else None
    try:
        handle = -1 if made is None else made
        said = gather([process.host_number, process.pid, handle, token])
        _, maker, handle, token = said[0]
        if handle < 0 or len({host for host, *_ in said}) > 1:
            return None
        memory = _open_file(maker, handle, size, token)
        is_open = gather([memory is not None])
    finally:
        if made is not None:
            os.close(made)
    if memory is None or not all(has for (has,) in is_open):
        return None
    return Mailbox(memory, place, ranks)


def _make_file(size: int, token: int) -> int | None:
    """A file of zeros that ends with the token; None where there is no room for it."""
    try:
        with TemporaryFile(dir=FOLDER) as file:
            os.posix_fallocate(file.fileno(), 0, size)  # or a write might find no room, and end us
            os.pwrite(file.fileno(), pack("=q", token), size - _WORD)
            return os.dup(file.fileno())
    except OSError:
        return None


def _open_file(process: int, handle: int, size: int, token: int) -> mmap | None:
    """What a process has open, if it may be opened and is what is meant."""
    try:
        mine = os.open(f"/proc/{process}/fd/{handle}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        memory = mmap(mine, size)
    except (OSError, ValueError):
        return None
    finally:
        os.close(mine)
    return memory if unpack("=q", memory[-_WORD:]) == (token,) else None
