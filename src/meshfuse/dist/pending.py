"""A collective under way, for who has posted it."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.dist.collectives import Posting
from meshfuse.dist.deadlines import Deadline
from meshfuse.dist.groups import Group


@final
@frozen_dataclass
class Pending:
    """A collective under way; `wait` on it before `out` is read, and once."""

    posting: Posting
    group: Group | None
    seconds: float

    def wait(self, seconds: float | None = None) -> None:
        """Block until `out` may be read (on CUDA: the current stream waits), for `seconds` or the
        default.

        Raises CommunicationError naming operation and missing ranks: see deadlines.wait.
        """
        if self.group is not None and self.posting.work is not None:
            self.group.wait(
                self.posting, Deadline.after(self.seconds if seconds is None else seconds)
            )

    def when_arrived(self, tell: Callable[[], None]) -> None:
        """Call `tell` once the transport is done with what was posted: on any thread, or now.

        On CUDA it is called now, on a stream that has the transport's end behind it. The wait may
        have more to do: what has arrived is put in its place there.
        """
        work = self.posting.work
        if work is None:
            tell()
        else:
            work.get_future().add_done_callback(lambda done: tell())
