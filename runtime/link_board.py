# SPDX-License-Identifier: Apache-2.0
"""What a rank tells its front about its links: one report for each change of state, and running counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import msgspec

from kvrail.runtime.messages import LinkDropped, LinkReport, ToFront
from kvrail.transfer.link_events import (
    LinkDown,
    LinkEvent,
    LinkKey,
    LinkRefusal,
    LinkUp,
    PeerBeat,
    PeerStuck,
    Recovered,
    Suspect,
)

__all__ = ["MOST_ENDED", "LinkBoard", "forget_ended", "link_facts"]

State = Literal["connecting", "up", "suspect", "down", "refused"]
# So many links that have ended are remembered: a PE hears of a new peer at every restart of a CE, for ever.
MOST_ENDED = 32


_Key = TypeVar("_Key", bound=tuple[bytes, int])


class LinkBoard:
    """The last known state of each link, in words for people and metrics. Decides nothing.

    Of links that have ended only the newest `most_ended` are remembered.
    """

    def __init__(self, send: Callable[[ToFront], None], most_ended: int = MOST_ENDED) -> None:
        self._send = send
        self._most_ended = most_ended
        self._reports: dict[LinkKey, LinkReport] = {}
        self._counters: dict[LinkKey, Counter[str]] = {}
        # Stuck peers, with the step count at which they stood still.
        self._stuck: dict[LinkKey, int] = {}
        self._steps: dict[LinkKey, int] = {}

    @property
    def reports(self) -> Mapping[LinkKey, LinkReport]:
        """What was reported last of each link."""
        return self._reports

    def connecting(self, key: LinkKey) -> None:
        """The front asked for this link; nothing is known yet."""
        self._report(key, "connecting")

    def drop(self, key: LinkKey) -> None:
        """The front has forgotten this link: its end, if that is still to come, is news for nobody."""
        for table in (self._reports, self._counters, self._stuck, self._steps):
            table.pop(key, None)
        self._send(LinkDropped(incarnation=key.incarnation, rank=key.rank))

    def count(self, key: LinkKey, **amounts: float) -> None:
        """Add to the counters of a link (pages, states, bytes, tickets, failures); not of one that is forgotten."""
        if key not in self._reports:
            return
        counters = self._counters.setdefault(key, Counter())
        for name, amount in amounts.items():
            counters[name] += amount  # type: ignore[assignment]

    def counters(self) -> list[tuple[str, int, dict[str, float]]]:
        """(peer incarnation hex, rank, counters) of each link."""
        return [(key.incarnation.hex(), key.rank, dict(found)) for key, found in self._counters.items()]

    def up(self) -> list[LinkKey]:
        """Links that carry messages now."""
        return [key for key, report in self._reports.items() if report.state in ("up", "suspect")]

    def note(self, event: LinkEvent) -> None:
        """Report what this event changes.

        A link that comes up, or is refused, is news whoever it is with. What else happens to one that is not known is
        not: it was dropped, or has ended long ago.
        """
        if not isinstance(event, LinkUp | LinkRefusal) and event.key not in self._reports:
            return
        match event:
            case LinkUp(key, epoch, lane):
                self._counters.setdefault(key, Counter(pages=0, states=0, bytes=0, tickets=0))
                self._set(
                    LinkReport(
                        incarnation=key.incarnation,
                        rank=key.rank,
                        state="up",
                        epoch=epoch,
                        lane=lane.name,
                        transport=lane.transport,
                        memory=lane.memory,
                        reason=lane.reason,
                        probes=[probe[:] for probe in lane.probes],
                        same_host=lane.same_host,
                        slow=lane.slow,
                        rails=lane.rails,
                    )
                )
            case LinkDown(key, _, reason):
                self._report(key, "down", reason)
            case LinkRefusal(key, reason) if key is not None:
                self._report(key, "refused", reason)
            case Suspect(key):
                self._report(key, "suspect", "heartbeats are missing")
            case Recovered(key):
                self._report(key, "up")
            case PeerStuck(key, for_s):
                self._stuck[key] = self._steps.get(key, 0)
                self._report(
                    key, "suspect", f"its process lives, its step loop stands still for {for_s:.0f} s"
                )
            case PeerBeat(key, beat):
                self._steps[key] = beat.steps
                if key in self._stuck and self._stuck[key] != beat.steps:
                    del self._stuck[key]
                    self._report(key, "up")
            case _:
                pass

    def _report(self, key: LinkKey, state: State, reason: str = "") -> None:
        old = self._reports.get(key)
        if old is None:
            self._set(LinkReport(incarnation=key.incarnation, rank=key.rank, state=state, reason=reason))
        elif (old.state, old.reason) != (state, reason):
            # The lane stays in the report of a link that is down: it says what was lost.
            self._set(msgspec.structs.replace(old, state=state, reason=reason))

    def _set(self, report: LinkReport) -> None:
        link = LinkKey(report.incarnation, report.rank)
        for key in forget_ended(self._reports, link, report, self._most_ended):
            for table in (self._counters, self._stuck, self._steps):
                table.pop(key, None)
        self._send(report)


def forget_ended(
    reports: dict[_Key, LinkReport], key: _Key, report: LinkReport, most: int = MOST_ENDED
) -> list[_Key]:
    """Put in a report as the newest; take out, and return, those that ended longest ago, beyond the newest `most`."""
    reports.pop(key, None)
    reports[key] = report
    ended = [key for key, known in reports.items() if known.state in ("down", "refused")]
    oldest = ended[: max(0, len(ended) - most)]
    for key in oldest:
        del reports[key]
    return oldest


def link_facts(report: LinkReport) -> dict[str, Any]:
    """What `/lanes` tells of a link, but for who is at its ends and what it has carried."""
    return {
        "state": report.state,
        "reason": report.reason,
        "epoch": report.epoch,
        "lane": report.lane,
        "transport": report.transport,
        "memory": report.memory,
        "same_host": report.same_host,
        "slow": report.slow,
        "rails": report.rails,
        "probes": [
            {"bytes": size, "gb_per_s": speed, "us": time_us, "runs": runs, "way": way}
            for size, speed, time_us, runs, way in report.probes
        ],
    }
