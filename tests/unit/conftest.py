"""Fixtures of the unit tests."""

from typing import Any

import pytest

from pagoda.tree import PrefixTree
from twin import PrefixTwin


@pytest.fixture(params=[PrefixTree, PrefixTwin], ids=["native", "twin"])
def kind(request: pytest.FixtureRequest) -> Any:
    """The native tree and its twin, one after the other."""
    return request.param
