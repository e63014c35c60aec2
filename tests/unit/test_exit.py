"""How a program ends that still has our objects: without a word on stderr."""

import subprocess
import sys

import pytest

HOLDERS = {
    "thread": """
def work():
    while True:
        tree.match([1, 2])
        held, parts
        time.sleep(0.001)
threading.Thread(target=work, daemon=True).start()
time.sleep(0.02)
""",
    "thread with objects of its own": """
def work():
    own = pagoda.PrefixTree()
    lease = own.lock(own.match([1]))
    ready.set()
    time.sleep(60)
ready = threading.Event()
threading.Thread(target=work, daemon=True).start()
ready.wait()
""",
    "signal handler": "signal.signal(signal.SIGTERM, lambda *_, held=held, parts=parts: None)",
    "exit handler": "atexit.register(lambda held=held, parts=parts: tree.match([1]))",
    "listener": """
class Listener:
    def __call__(self, event): pass
listener = Listener()
listener.tree, listener.held = tree, held
tree.listen(listener)
tree.insert([7, 8], [7, 8])
sys.kept = listener
""",
    "log handler": """
class Handler(logging.Handler):
    def emit(self, record): pass
handler = Handler()
handler.held = held, parts
logging.getLogger().addHandler(handler)
""",
    "traceback": """
def fail(own):
    own.free([3])
try:
    fail(parts[0])
except pagoda.PagodaError as error:
    sys.last_value = error
""",
}
PROGRAM = """
import atexit, logging, signal, sys, threading, time
import pagoda
tree = pagoda.PrefixTree()
tree.insert([1, 2, 3], [1, 2, 3])
held = tree.lock(tree.match([1, 2]))
layout = pagoda.Layout([pagoda.FullAttention(kv_heads=1, k_dim=4, v_dim=4)], 4)
parts = [pagoda.FreeList(8), pagoda.Manager(layout, {{"full": 8}}, num_rows=2, max_tokens=16)]
{holder}
"""


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_program_ends_quietly_with_our_objects_alive(holder: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(holder=HOLDERS[holder])],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_the_bindings_leak_nothing() -> None:
    """With the warnings on, which a lost reference would show: objects made and dropped, in cycles too."""
    program = """
from pagoda import _native
_native.set_leak_warnings(True)
class Listener:
    def __call__(self, event): self.event = event
for _ in range(2):
    listener = Listener()
    listener.tree = tree
    tree.listen(listener)
    lease = tree.lock(tree.match([1, 2, 3]))
    lease.__class__, tree.evict(0), tree.nodes(), tree.insert([5, 6], [5, 6])
    for wrong in (lambda: parts[0].free([3]), lambda: tree.match([True]), lambda: tree.match([[1]])):
        try:
            wrong()
        except pagoda.PagodaError as error:
            assert str(error)
    tree = pagoda.PrefixTree()
    tree.insert([1, 2, 3], [1, 2, 3])
"""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(holder=program)], capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
