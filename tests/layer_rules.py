"""The laws of the source tree, as pure functions from (module path, source text) to violations.

A module path is relative to the package, with slashes: `ir/ops.py`. Nothing here imports the
package or reads a disk; test_layers.py applies the rules to the real files, and to planted
violations, so that each rule is seen to fail.
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

PACKAGE = "meshfuse"
TOP = "meshfuse"
"""Name of the room that is the package's own __init__.py, above all others."""

ROOMS = {
    "base": 0,
    "expr": 1,
    "ir": 2,
    "facts": 3,
    "passes": 4,
    "segment": 4,
    "schedulers": 4,
    "kernel": 5,
    "codegen": 6,
    "runtime": 7,
    "dist": 8,
    "host": 9,
    "pipeline": 10,
    "cache": 11,
    "api": 12,
    "multidevice": 13,  # names of api/, where users import them from
    "frontends": 13,
    "cli": 14,
    TOP: 15,
}
"""Room name -> floor. A room imports itself and lower floors."""

LAST_FLOOR_WITHOUT_TORCH = 6
TENSOR_LIBRARIES = ("torch", "numpy")
OPTIONAL_DOOR = "base/optional.py"
OPTIONAL_MODULES = (
    "torch.distributed.tensor",
    "torch.distributed._symmetric_memory",
    "triton",
    "typer",
    "rich",
)
"""Slow to import, or not there everywhere: base/optional.py loads them when they are needed."""

MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 100
EMPTY_NAMES = ("util", "utils", "helper", "helpers", "common", "misc", "manager", "managers")
EMPTY_SUFFIXES = tuple(f"_{name}" for name in EMPTY_NAMES)


@dataclass(frozen=True, slots=True)
class Violation:
    """One breach of a law: `path:line: [rule] text`."""

    path: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: [{self.rule}] {self.text}"


Rule = Callable[[str, ast.Module, str], Iterator[Violation]]
ImportNode = ast.Import | ast.ImportFrom


def check_source(path: str, source: str) -> tuple[Violation, ...]:
    """Every violation of every rule in one file of the package, in the order of `RULES`."""
    tree = ast.parse(source, filename=path)
    return tuple(found for rule in RULES for found in rule(path, tree, source))


def room_of(path: str) -> str | None:
    """The room that holds the file at `path`; None where the table names none."""
    if path == "__init__.py":
        return TOP
    name = PurePosixPath(path).parts[0].removesuffix(".py")
    return name if name in ROOMS and name != TOP else None


def room_of_module(name: str) -> str | None:
    """The room of an imported `meshfuse...` module; None where the table names none.

    `meshfuse` itself is the top room, as is what an import takes from it that is no room.
    """
    parts = name.split(".")
    return TOP if len(parts) == 1 else parts[1] if parts[1] in ROOMS else None


def check_room_exists(path: str, tree: ast.Module, source: str) -> Iterator[Violation]:
    """Each file stands in a room of the table."""
    if room_of(path) is None:
        yield Violation(path, 1, "room", f"stands in no room; the rooms are {', '.join(ROOMS)}")


def check_imports_point_down(path: str, tree: ast.Module, source: str) -> Iterator[Violation]:
    """A room imports lower floors only; its own files are free, its neighbours are not."""
    room = room_of(path)
    if room is None:
        return
    for node, module in imported_package_modules(tree):
        target = room_of_module(module)
        if target is None:
            yield Violation(path, node.lineno, "down", f"{module} is in no room")
        elif target != room and ROOMS[target] >= ROOMS[room]:
            text = f"{room} ({ROOMS[room]}) imports {module} ({ROOMS[target]})"
            yield Violation(path, node.lineno, "down", text)


def check_imports_are_absolute(path: str, tree: ast.Module, source: str) -> Iterator[Violation]:
    """No `from . import x`."""
    for node in imports(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield Violation(path, node.lineno, "absolute", "relative import")


def check_imports_stand_at_top(path: str, tree: ast.Module, source: str) -> Iterator[Violation]:
    """Imports come before all other statements, in no function, class, try or condition.

    `if TYPE_CHECKING:` counts as the top of the file; what it imports obeys the other rules.
    """
    if path == OPTIONAL_DOOR:
        return
    top = set(imports_at_top(tree))
    for node in imports(tree):
        if node not in top:
            yield Violation(path, node.lineno, "top", "import below the top of the file")


def check_optional_modules(path: str, tree: ast.Module, source: str) -> Iterator[Violation]:
    """Slow and optional modules load through base/optional.py alone."""
    if path == OPTIONAL_DOOR:
        return
    for node in imports(tree):
        for module in OPTIONAL_MODULES:
            if any(within(name, module) for name in imported_names(node)):
                text = f"{module} loads through {OPTIONAL_DOOR}"
                yield Violation(path, node.lineno, "optional", text)
    for call in loads_by_name(tree):
        text = f"loading a module by its name is for {OPTIONAL_DOOR}"
        yield Violation(path, call.lineno, "optional", text)


def check_torch_free(path: str, tree: ast.Module, source: str) -> Iterator[Violation]:
    """The compiler's own floors work on symbols: no tensor library below runtime/."""
    room = room_of(path)
    if room is None or ROOMS[room] > LAST_FLOOR_WITHOUT_TORCH:
        return
    for node in imports(tree):
        for library in TENSOR_LIBRARIES:
            if any(within(name, library) for name in imported_names(node)):
                text = f"{room} ({ROOMS[room]}) imports {library}"
                yield Violation(path, node.lineno, "torch-free", text)


def check_lengths(path: str, tree: ast.Module, source: str) -> Iterator[Violation]:
    """A file is one idea, a function one thing: both have an upper length."""
    lines = len(source.splitlines())
    if lines > MAX_FILE_LINES:
        yield Violation(path, 1, "length", f"{lines} lines; at most {MAX_FILE_LINES}")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            lines = node.end_lineno - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                text = f"{node.name} has {lines} lines; at most {MAX_FUNCTION_LINES}"
                yield Violation(path, node.lineno, "length", text)


def check_names_say_something(path: str, tree: ast.Module, source: str) -> Iterator[Violation]:
    """A file or room is named by a noun of the field."""
    for part in PurePosixPath(path).parts:
        name = part.removesuffix(".py")
        if name in EMPTY_NAMES or name.endswith(EMPTY_SUFFIXES):
            yield Violation(path, 1, "name", f"{name!r} does not say what is in it")


RULES: tuple[Rule, ...] = (
    check_room_exists,
    check_imports_point_down,
    check_imports_are_absolute,
    check_imports_stand_at_top,
    check_optional_modules,
    check_torch_free,
    check_lengths,
    check_names_say_something,
)


def imports(tree: ast.Module) -> Iterator[ImportNode]:
    """Every import statement, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node


def imports_at_top(tree: ast.Module) -> Iterator[ImportNode]:
    """The imports before the first other statement, those under `if TYPE_CHECKING:` included."""
    for position, node in enumerate(tree.body):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and is_type_checking(node.test):
            yield from (inner for inner in node.body if isinstance(inner, ImportNode))
        elif position > 0 or not is_docstring(node):
            return


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imported_names(node: ImportNode) -> tuple[str, ...]:
    """Dotted names that the import may load: `from a.b import c` gives a.b and a.b.c."""
    if isinstance(node, ast.Import):
        return tuple(alias.name for alias in node.names)
    if node.level or node.module is None:
        return ()
    return (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def imported_package_modules(tree: ast.Module) -> Iterator[tuple[ImportNode, str]]:
    """The package's own modules among the imports: `from meshfuse import ir` means meshfuse.ir.

    What `from meshfuse import x` takes and is no room comes from the top room.
    """
    for node in imports(tree):
        names = imported_names(node)
        if isinstance(node, ast.ImportFrom) and names[:1] == (PACKAGE,):
            for name in names[1:]:
                is_room = name.split(".")[1] in ROOMS
                yield node, name if is_room else PACKAGE
        elif isinstance(node, ast.ImportFrom):
            yield from ((node, name) for name in names[:1] if within(name, PACKAGE))
        else:
            yield from ((node, name) for name in names if within(name, PACKAGE))


def loads_by_name(tree: ast.Module) -> Iterator[ast.Call]:
    """Calls of `__import__`, `import_module` and `importlib.import_module`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name == "__import__" or name.split(".")[-1] == "import_module":
                yield node


def within(name: str, module: str) -> bool:
    """Whether dotted `name` is `module` or lies inside it."""
    return name == module or name.startswith(f"{module}.")
