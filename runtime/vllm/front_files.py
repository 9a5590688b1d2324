# SPDX-License-Identifier: Apache-2.0
"""Two files between a connector and the front of its role: how the links are, and who the prefill engines are now.

Files, as the two live in processes that vLLM starts and connects in ways of its own. Each is replaced as a whole.
Without a front (plain `vllm serve`) there are none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvrail.runtime.link_board import LinkBoard, link_facts
from kvrail.runtime.messages import LinkReport, ToFront
from kvrail.transfer.link_events import LinkEvent, LinkKey

__all__ = ["Address", "PeersFile", "StatusFile"]

Address = tuple[str, int]
_LOOK_S = 0.5
# Counters of a busy engine change with every request.
_WRITE_S = 1.0
# Links that are over, in a file that is written anew whenever one changes.
_ENDED_SHOWN = 8


class PeersFile:
    """The addresses of the prefill engines, as they change. `read` is cheap, and called all the time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = (0, 0)
        self._due = 0.0

    def read(self, now: float) -> list[Address] | None:
        """The addresses when they may have changed since the last time, else None."""
        if now < self._due:
            return None
        self._due = now + _LOOK_S
        try:
            status = self._path.stat()
            seen = (status.st_mtime_ns, status.st_ino)
            if seen == self._seen:
                return None
            found = [_address(text) for text in json.loads(self._path.read_text())]
        except (OSError, ValueError):
            return None
        self._seen = seen
        return found


class StatusFile:
    """What the front shows at /lanes and counts in /metrics. Written by tensor-parallel rank 0."""

    def __init__(self, path: Path, rank: int, facts: Mapping[str, Any]) -> None:
        self._path = path
        self._rank = rank
        self._facts = dict(facts)
        self._board = LinkBoard(self._told, _ENDED_SHOWN)
        self._changed = True
        self._due = 0.0
        self._last = ""

    def note(self, event: LinkEvent) -> None:
        """Something happened on a link."""
        self._board.note(event)

    def tick(
        self,
        now: float,
        links: Mapping[LinkKey, tuple[str, float]],
        numbers: Callable[[], tuple[Mapping[str, float], Mapping[str, float]]],
    ) -> None:
        """Write what is new: at once when a link has changed, else once a second.

        `links`: address, and bytes that came over it. `numbers`: gauges and counters of the whole.
        """
        if not self._changed and now < self._due:
            return
        self._changed, self._due = False, now + _WRITE_S
        gauges, counters = numbers()
        found = [
            self._link(key, report, *links.get(key, ("", 0.0))) for key, report in self._board.reports.items()
        ]
        text = json.dumps({**self._facts, "links": found, "gauges": dict(gauges), "counters": dict(counters)})
        if text == self._last:
            return
        aside = self._path.with_suffix(".new")
        try:
            aside.write_text(text)
            os.replace(aside, self._path)
        except OSError:
            return  # The role is ending, and its folder is gone.
        self._last = text

    def _told(self, _: ToFront) -> None:
        self._changed = True

    def _link(self, key: LinkKey, report: LinkReport, address: str, arrived: float) -> dict[str, Any]:
        return {
            "rank": self._rank,
            "peer": key.incarnation.hex(),
            "peer_rank": key.rank,
            "address": address,
            **link_facts(report),
            "counters": {"bytes": arrived},
        }


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)
