"""Imported first: sets aside what torch has made, until the package is imported.

Importing torch leaves hundreds of thousands of objects that live as long as the process, and a full
collection due, which would go through them all while this package is imported: 0.1 s, longer than
everything else there. So they are out of the collector's sight meanwhile. Where the user has set
objects aside with `gc.freeze`, as servers do before they fork, nothing is done.
"""

from __future__ import annotations

import gc
from typing import Final


def _freeze() -> bool:
    """Whether objects were set aside here."""
    if gc.get_freeze_count() > 0:
        return False
    gc.freeze()
    return True


_IS_OURS: Final = _freeze()


def give_back() -> None:
    """Let the collector see again what was set aside."""
    if _IS_OURS:
        gc.unfreeze()
