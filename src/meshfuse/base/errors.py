"""The error classes. Each derives from the built-in type that users of the field catch."""

from __future__ import annotations


class MeshfuseError(Exception):
    """Base of every error that meshfuse raises on purpose."""


class UserError(MeshfuseError, RuntimeError):
    """A call that cannot be honoured. Restates the call and says what would be accepted."""


class UserTypeError(MeshfuseError, TypeError):
    """An argument of the wrong Python type."""


class UserValueError(MeshfuseError, ValueError):
    """An argument of the right type with an unusable value."""


class UserAssertionError(MeshfuseError, AssertionError):
    """A promise about call order or results that does not hold."""


class Unsupported(MeshfuseError, RuntimeError):
    """A legal program that this version cannot run. Names the tensor and what would do."""


class InvariantError(MeshfuseError, RuntimeError):
    """A bug in meshfuse: a stage produced a value that the verifier of the next stage refuses."""


class ScheduleError(UserError):
    """A schedule that the target cannot express.

    `code` is a short stable word for the rule broken, `hint` the way out.
    """

    def __init__(self, code: str, tensor: str, axis: str | None, message: str, hint: str) -> None:
        place = tensor if axis is None else f"{tensor}, axis {axis}"
        super().__init__(f"[{code}] {place}: {message}. {hint}")
        self.code = code
        self.tensor = tensor
        self.axis = axis
        self.hint = hint


class CommunicationError(MeshfuseError, RuntimeError):
    """A collective that did not complete. Names the rank that is missing and the operation."""
