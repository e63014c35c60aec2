"""Stands for the folder of this name where an editable install still maps the module to this file."""

from pathlib import Path

__path__ = [str(Path(__file__).with_suffix(""))]

from pagoda.compat.radix.interface import *  # noqa: F403
from pagoda.compat.radix.manager import *  # noqa: F403
from pagoda.compat.radix.picture import *  # noqa: F403
from pagoda.compat.radix.requests import *  # noqa: F403
from pagoda.compat.radix.sizing import *  # noqa: F403
