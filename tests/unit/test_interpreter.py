# SPDX-License-Identifier: Apache-2.0
"""What start-up made costs later collections nothing, and a thread that computes does not keep others waiting."""

from __future__ import annotations

import subprocess
import sys

# In a process of its own: what is set aside stays so for good.
_PROGRAM = """
import gc, threading, time
from kvrail.runtime.interpreter import begin_serving

made = [[number] for number in range(400_000)]

def collection():
    began = time.thread_time()
    gc.collect()
    return time.thread_time() - began

before = min(collection() for _ in range(3))
begin_serving()
after = min(collection() for _ in range(3))
assert after < before / 10, (before, after)

class Node:
    pass

node = Node()
node.itself = node
del node
assert gc.collect() >= 1, "what came later is collected as ever"

running = True
def compute():
    while running:
        sum(range(100))
thread = threading.Thread(target=compute)
thread.start()
waits = []
for _ in range(40):
    began = time.perf_counter()
    time.sleep(0.001)
    waits.append(time.perf_counter() - began - 0.001)
running = False
thread.join()
assert min(waits) < 0.004, waits
"""


def test_what_start_up_made_is_not_looked_at_again() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", _PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
