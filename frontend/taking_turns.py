# SPDX-License-Identifier: Apache-2.0
"""How a request that takes the event loop for long shares it: between two pieces of its work all others get on."""

from __future__ import annotations

import asyncio

__all__ = ["others_first"]

# A token takes so many turns of the loop from the rank's socket to its client's: the socket is readable, its message is
# there, the stream's event is there, the write; and one to spare.
_TURNS = 5


async def others_first() -> None:
    """Come back when whatever has arrived for other requests is on its way to their clients."""
    for _ in range(_TURNS):
        await asyncio.sleep(0)
