"""Measured choices on disk: what one process has found out, the next need not measure.

One JSON file a choice, in MESHFUSE_CACHE_DIR, else in the user's cache directory. A file is written
beside its place and moved there, so that it is whole or not there.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

DIRECTORY_VARIABLE: Final = "MESHFUSE_CACHE_DIR"
SCHEMA: Final = 1
"""Goes up when what files hold, or how choices are made, changes."""
_FOLDER: Final = "choices"


def cache_directory(environ: Mapping[str, str]) -> Path | None:
    """Where files go; None where MESHFUSE_CACHE_DIR is set to nothing, which turns them off."""
    given = environ.get(DIRECTORY_VARIABLE)
    if given is not None:
        return Path(given) if given else None
    base = environ.get("XDG_CACHE_HOME") or None
    try:
        return (Path(base) if base else Path.home() / ".cache") / "meshfuse"
    except RuntimeError:  # nobody's home is known
        return None


def read_choice(directory: Path | None, key: Mapping[str, object]) -> dict[str, Any] | None:
    """What was written for exactly this key; None without it.

    A file that cannot be read, or is no such text, is passed over with a warning.
    """
    if directory is None:
        return None
    path = _path_of(directory, key)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["key"] == _stored(key):
            choice = found["choice"]
            return choice if isinstance(choice, dict) else _refuse(path, "it holds no choice")
        return _refuse(path, "it is of another key")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        return _refuse(path, f"{type(error).__name__}: {error}")


def write_choice(
    directory: Path | None, key: Mapping[str, object], choice: Mapping[str, object]
) -> None:
    """Keep a choice; where that cannot be, say so in a warning."""
    if directory is None:
        return
    path = _path_of(directory, key)
    text = json.dumps({"key": _stored(key), "choice": choice}, indent=1) + "\n"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        warnings.warn(
            f"meshfuse: a choice is not kept in {path}: {error}; {DIRECTORY_VARIABLE} names a "
            "directory for it, or is empty to keep none",
            UserWarning,
            stacklevel=2,
        )


def _path_of(directory: Path, key: Mapping[str, object]) -> Path:
    text = json.dumps(_stored(key), sort_keys=True)
    return directory / _FOLDER / f"{blake2b(text.encode(), digest_size=16).hexdigest()}.json"


def _stored(key: Mapping[str, object]) -> dict[str, Any]:
    """A key as it comes back from a file."""
    return json.loads(json.dumps({**key, "schema": SCHEMA}))


def _refuse(path: Path, reason: str) -> None:
    text = f"meshfuse: the choice in {path} is passed over, and made again: {reason}"
    warnings.warn(text, UserWarning, stacklevel=3)
