# SPDX-License-Identifier: Apache-2.0
"""What Python does on its own in a process where each pause is one between two tokens: collecting, changing threads."""

from __future__ import annotations

import gc
import sys

__all__ = ["begin_serving"]

# A thread that wants the interpreter while another computes in Python gets it after this long (Python: 5 ms). Such are
# the event loop of a front that writes down a conversation in a thread, and the step loop beside compiling grammars.
_TURN_S = 0.0005


def begin_serving() -> None:
    """To be called once, when everything that start-up makes is there, and before the first request.

    A full collection takes a tenth of a second or more where torch is loaded, nearly all of it for modules and classes
    that never go away. They are set aside here: what collections look at from now on is what requests have made.
    """
    sys.setswitchinterval(_TURN_S)
    gc.collect()
    gc.freeze()
