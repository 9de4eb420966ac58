"""The one door to modules that are slow to import, or not there everywhere."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Final

from meshfuse.base.errors import Unsupported

OPTIONAL_MODULES: Final = {
    "meshfuse.host.check": "all files of meshfuse",
    "rich": "pip install rich",
    "torch.distributed._symmetric_memory": "a build of torch with distributed support",
    "torch.distributed.tensor": "a build of torch with distributed support",
    "triton": "pip install triton",
    "typer": "pip install typer",
}
"""Each with the way to get it. A submodule may be loaded, too: its entry is that of its parent."""


def load(name: str) -> ModuleType:
    """Import the module on first use. If it is missing: Unsupported, saying how to get it."""
    remedy = _remedy(name)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Unsupported(f"module {name} cannot be imported ({error}); needs {remedy}") from error


def is_available(name: str) -> bool:
    """Whether `load` would succeed. Imports the module if so."""
    try:
        load(name)
    except Unsupported:
        return False
    return True


def _remedy(name: str) -> str:
    for module, remedy in OPTIONAL_MODULES.items():
        if name == module or name.startswith(f"{module}."):
            return remedy
    raise KeyError(f"{name} is no optional module: import it at the top of the file")
