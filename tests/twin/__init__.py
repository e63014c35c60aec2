"""`PrefixTree` in plain Python, the oracle of its tests: the same calls, errors, nodes, order and events.

Written for clarity, not for speed. Nothing outside the tests imports it.
"""

from twin.tree import PrefixTwin
from twin.values import Freed, Inserted, Lease, Match

__all__ = ["Freed", "Inserted", "Lease", "Match", "PrefixTwin"]
