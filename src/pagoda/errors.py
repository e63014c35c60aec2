"""Every error that Pagoda raises on purpose.

::

    PagodaError
    ├── ConfigError (ValueError)          an object was asked for that cannot be built
    ├── CapacityError (RuntimeError)      ids ran out: .what, .wanted, .free, .total
    ├── MissingError (RuntimeError)       a model is not here, and could not be fetched
    ├── UsageError                        a call that its caller got wrong
    │   ├── ArgumentError (ValueError)    wrong type, dtype, shape, device or length
    │   ├── IdError                       one id is wrong: .id, .position
    │   │   ├── OutOfRangeError (IndexError)
    │   │   ├── NotHeldError              freed, but not held
    │   │   │   └── DoubleFreeError       freed twice, and we know it
    │   │   └── AlreadyHeldError          taken, but not free
    │   ├── StaleError                    what was found is no longer there
    │   └── CaptureError                  would make a device tensor while a graph is captured
    └── InvariantError (AssertionError)   a bug in Pagoda: .number, see docs/invariants.md

A call that raises any of these but the last has changed nothing.
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
    """The root: catch it to catch everything that Pagoda raises on purpose."""


class ConfigError(PagodaError, ValueError):
    """An object was asked for that cannot be built; the message says which argument and why."""


class CapacityError(PagodaError, RuntimeError):
    """Fewer ids are free than a call needs. `what` names them; nothing was taken."""

    def __init__(self, what: str, wanted: int, free: int, total: int) -> None:
        self.what, self.wanted, self.free, self.total = what, wanted, free, total
        super().__init__(what, wanted, free, total)

    def __str__(self) -> str:
        # Python prints no integer of thousands of digits.
        wanted = self.wanted if self.wanted < 10**18 else "more than 10^18"
        return f"out of {self.what}: {wanted} wanted, {self.free} free of {self.total}"


class MissingError(PagodaError, RuntimeError):
    """A model is not here, and could not be fetched or kept; the message says what to do."""


class UsageError(PagodaError):
    """A call that its caller got wrong."""


class ArgumentError(UsageError, ValueError):
    """An argument of the wrong type, dtype, shape, device or length."""


class IdError(UsageError):
    """One id of a call is wrong: `id`, standing at `position` of its argument."""

    def __init__(self, message: str, id: int, position: int) -> None:
        self.message, self.id, self.position = message, id, position
        super().__init__(message, id, position)

    def __str__(self) -> str:
        return self.message


class OutOfRangeError(IdError, IndexError):
    """No such id; 0 is padding in every space that begins at 1."""


class NotHeldError(IdError):
    """The id is not held: it was freed before, or never allocated."""


class DoubleFreeError(NotHeldError):
    """The id stands twice in one call, or was freed and waits for its fence."""


class AlreadyHeldError(IdError):
    """The id is asked for by name but is not free."""


class StaleError(UsageError):
    """What an earlier call found is no longer there: ask again."""


class CaptureError(UsageError):
    """The call would make a device tensor, and the stream is being captured: call it before."""


class InvariantError(PagodaError, AssertionError):
    """A bug in Pagoda. `number` is that of docs/invariants.md; please report it."""

    def __init__(self, number: int, message: str) -> None:
        self.number, self.message = number, message
        super().__init__(number, message)

    def __str__(self) -> str:
        return (
            f"invariant {self.number} is broken: {self.message} (this is a bug in Pagoda, please report it)"
        )
