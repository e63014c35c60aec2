"""The errors that Pagoda raises on purpose.

::

    PagodaError
    ├── ConfigError (ValueError)          an object cannot be built as configured
    ├── CapacityError (RuntimeError)      too few ids are free: .what, .wanted, .free, .total
    ├── MissingError (RuntimeError)       a model is missing and could not be fetched
    ├── UsageError                        the caller made a mistake
    │   ├── ArgumentError (ValueError)    wrong type, dtype, shape, device or length
    │   ├── IdError                       one id is wrong: .id, .position
    │   │   ├── OutOfRangeError (IndexError)
    │   │   ├── NotHeldError              the id is not held
    │   │   │   └── DoubleFreeError       the id was freed twice
    │   │   └── AlreadyHeldError          the id is not free
    │   ├── StaleError                    the result of an earlier call is no longer valid
    │   └── CaptureError                  a device tensor is needed while a graph is being captured
    └── InvariantError (AssertionError)   a bug in Pagoda: .number, see docs/invariants.md

A call that raises any of these, except InvariantError, has changed nothing.
"""

from __future__ import annotations

__all__ = [
    "AlreadyHeldError",
    "ArgumentError",
    "CapacityError",
    "CaptureError",
    "ConfigError",
    "DoubleFreeError",
    "IdError",
    "InvariantError",
    "MissingError",
    "NotHeldError",
    "OutOfRangeError",
    "PagodaError",
    "StaleError",
    "UsageError",
]


class PagodaError(Exception):
    """The base class of all errors that Pagoda raises on purpose."""


class ConfigError(PagodaError, ValueError):
    """An object cannot be built as configured; the message names the argument and the reason."""


class CapacityError(PagodaError, RuntimeError):
    """A call needs more ids than are free; it took none. `what` names the kind of id."""

    def __init__(self, what: str, wanted: int, free: int, total: int) -> None:
        self.what, self.wanted, self.free, self.total = what, wanted, free, total
        super().__init__(what, wanted, free, total)

    def __str__(self) -> str:
        # Python refuses to print integers of thousands of digits.
        wanted = self.wanted if self.wanted < 10**18 else "more than 10^18"
        return f"out of {self.what}: {wanted} wanted, {self.free} free of {self.total}"


class MissingError(PagodaError, RuntimeError):
    """A model is missing and could not be fetched or stored; the message says what to do."""


class UsageError(PagodaError):
    """The caller made a mistake."""


class ArgumentError(UsageError, ValueError):
    """An argument has the wrong type, dtype, shape, device or length."""


class IdError(UsageError):
    """One id is wrong: `id`, found at index `position` of its argument."""

    def __init__(self, message: str, id: int, position: int) -> None:
        self.message, self.id, self.position = message, id, position
        super().__init__(message, id, position)

    def __str__(self) -> str:
        return self.message


class OutOfRangeError(IdError, IndexError):
    """The id does not exist. Id 0 is padding wherever ids begin at 1."""


class NotHeldError(IdError):
    """The id is not held: it was freed earlier or never allocated."""


class DoubleFreeError(NotHeldError):
    """The id is duplicated in one call, or was freed and is waiting for its fence."""


class AlreadyHeldError(IdError):
    """A specific id was requested that is not free."""


class StaleError(UsageError):
    """The result of an earlier call is no longer valid: repeat that call."""


class CaptureError(UsageError):
    """The call needs a new device tensor while its stream is being captured: call it before the capture."""


class InvariantError(PagodaError, AssertionError):
    """A bug in Pagoda. `number` refers to docs/invariants.md; please report it."""

    def __init__(self, number: int, message: str) -> None:
        self.number, self.message = number, message
        super().__init__(number, message)

    def __str__(self) -> str:
        return (
            f"invariant {self.number} is broken: {self.message} (this is a bug in Pagoda, please report it)"
        )
