"""Reads the fields of a model's config. In: a Hugging Face config in any form; out: validated values, or a
ConfigError that names the model and the field."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from pagoda.errors import ConfigError
from pagoda.layout._numbers import show

__all__ = ["Fields"]

_LARGEST = 2**40  # upper limit of a dimension, against nonsense
_LARGEST_FILE = 2**24
_TEXT_PARTS = ("text_config", "thinker_config", "llm_config", "language_config")
_MOST_NESTED = 4
# Fields that a nested config inherits unless it has them itself.
_OF_THE_WHOLE = ("model_type", "_name_or_path", "dtype", "torch_dtype")


class Fields:
    """The fields of one config, by name. A null field counts as missing."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self._values = values
        self.model_type = str(values.get("model_type") or "")
        self.where = where or f"a config of {show(self.model_type) if self.model_type else 'no model_type'}"

    @staticmethod
    def read(config: Any) -> Fields:
        """Read a config object, a dict, or the path of a config.json or its folder. Errors: ConfigError."""
        if isinstance(config, (str, PathLike)):
            return Fields(_load(Path(config)))
        is_object = callable(getattr(config, "to_dict", None)) and not isinstance(config, type)
        values = config.to_dict() if is_object else config
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"config: give a Hugging Face config, its dict or the path of its config.json, "
                f"not {type(config).__name__}"
            )
        return Fields(values)

    def text(self) -> Fields:
        """Return the text part of a multimodal model's config; otherwise the config itself."""
        found = dict(self._values)
        for _ in range(_MOST_NESTED):
            inner: Any = next((found[key] for key in _TEXT_PARTS if found.get(key) is not None), None)
            if hasattr(inner, "to_dict") and not isinstance(inner, type):
                inner = inner.to_dict()
            if not isinstance(inner, Mapping):
                return Fields(found)
            said = {
                key: value for key, value in inner.items() if value is not None or key not in _OF_THE_WHOLE
            }
            if "dtype" in said or "torch_dtype" in said:
                found = {key: value for key, value in found.items() if key not in ("dtype", "torch_dtype")}
            found = {key: found[key] for key in _OF_THE_WHOLE if key in found} | said
        raise self.error("its text_config is nested without end")

    def with_defaults(self, defaults: Mapping[str, Any]) -> Fields:
        """Return the same fields with defaults for missing ones; null fields stay null."""
        return Fields({**defaults, **self._values}, self.where)

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def integer(self, *names: str, default: int | None = None, low: int = 1, high: int = _LARGEST) -> int:
        """Return the first field present among `names`, an integer from `low` to `high`."""
        for name in names:
            value = self._values.get(name)
            if value is None:
                continue
            whole = int(value) if isinstance(value, float) and value.is_integer() else value
            if isinstance(whole, bool) or not isinstance(whole, int) or not low <= whole <= high:
                raise self.error(f"{name} should be an integer from {low} to {high}, not {show(value)}")
            return whole
        if default is None:
            raise self.error(f"it has no {' or '.join(names)}")
        return default

    def number(self, name: str, default: float) -> float:
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < _LARGEST:
            raise self.error(f"{name} should be a number above 0, not {show(value)}")
        return value

    def items(self, name: str) -> list[Any] | None:
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            raise self.error(f"{name} should be a list, not {show(value)}")
        return list(value)

    def integers(self, name: str) -> list[int] | None:
        """Return a list of integers, or None if the field is missing."""
        found = self.items(name)
        for each in found or ():
            if isinstance(each, bool) or not isinstance(each, int):
                raise self.error(f"{name} should be a list of integers, but contains {show(each)}")
        return found

    def inner(self, name: str) -> Fields | None:
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(f"{name} should be an object, not {show(value)}")
        return Fields(value, f"{name} of {self.where}")

    def error(self, what: str) -> ConfigError:
        return ConfigError(f"{self.where}: {what}")


def _load(path: Path) -> Mapping[str, Any]:
    """Return the object in a config.json, given its path or that of its folder."""
    shown = show(path, 200)
    try:
        file = path / "config.json" if path.is_dir() else path
        shown = show(file, 200)
        if file.exists() and not file.is_file():
            raise ConfigError(f"{shown} is not a regular file: give a config.json")
        with file.open("rb") as opened:
            text = opened.read(_LARGEST_FILE + 1)
    except (OSError, ValueError) as missing:  # ValueError: a path with a NUL in it
        reason = getattr(missing, "strerror", None) or missing
        raise ConfigError(f"{shown} cannot be read: {reason}: give a config.json") from None
    if len(text) > _LARGEST_FILE:
        raise ConfigError(f"{shown} is too large to be a config.json")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as broken:
        raise ConfigError(f"{shown} is not valid JSON: {str(broken)[:100]}") from None
    if not isinstance(values, Mapping):
        raise ConfigError(f"{shown} does not contain a JSON object: give a config.json")
    return values
