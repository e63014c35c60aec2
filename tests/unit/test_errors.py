"""The error tree: what is what, that its drawing is true, and that errors travel between processes."""

import pickle

import pytest

from pagoda import errors


def test_the_tree():
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.CapacityError, RuntimeError)
    assert issubclass(errors.DoubleFreeError, errors.NotHeldError)
    assert issubclass(errors.InvariantError, AssertionError)
    for name in (
        "ArgumentError",
        "OutOfRangeError",
        "NotHeldError",
        "AlreadyHeldError",
        "StaleError",
        "CaptureError",
    ):
        assert issubclass(getattr(errors, name), errors.UsageError)
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.PagodaError)


def test_the_drawing_names_every_error_once():
    drawing = errors.__doc__ or ""
    for name in errors.__all__:
        lines = [line for line in drawing.splitlines() if line.strip("│├└─ ").split(" ")[0] == name]
        assert len(lines) == 1, name


@pytest.mark.parametrize(
    "error",
    [
        errors.CapacityError("pages", 3, 2, 9),
        errors.DoubleFreeError("ids[0] = 4 stands twice", 4, 0),
        errors.InvariantError(3, "a summary bit is wrong"),
        errors.ConfigError("size = -1"),
    ],
)
def test_errors_survive_pickling(error: errors.PagodaError):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_messages():
    assert str(errors.CapacityError("pages", 3, 2, 9)) == "out of pages: 3 wanted, 2 free of 9"
    assert "invariant 3 is broken" in str(errors.InvariantError(3, "x"))
