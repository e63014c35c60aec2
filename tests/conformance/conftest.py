"""Every class that hands out ids, one after the other."""

import pytest

from conformance.kinds import KINDS, Kind


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]
