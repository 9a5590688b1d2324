# SPDX-License-Identifier: Apache-2.0
"""What the links of a split carried between two moments, from the prefill engine's /lanes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from kvrail.frontend.split_bench.engines import Engine

__all__ = ["Carried", "Link", "Links", "added", "look"]

# Ranks report a few times a second.
_REPORT_S = 0.6
_BY_WAY = "bytes_by_"


@dataclass(frozen=True)
class Link:
    """One PE rank to one CE rank. `probed_gb_per_s`: the fastest of its start-up probes. Counters since it came up.

    `by_way`: bytes by each way of a lane that has several.
    """

    pe_rank: int
    ce_rank: int
    lane: str
    memory: str
    probed_gb_per_s: float
    slow: str
    pages: float
    bytes: float
    tickets: float
    unhidden_s: float
    by_way: Mapping[str, float] = field(default_factory=dict)

    @property
    def key(self) -> tuple[int, int]:
        """Its two ranks."""
        return self.pe_rank, self.ce_rank


@dataclass(frozen=True)
class Links:
    """All links of a PE at one moment."""

    links: tuple[Link, ...]

    def since(self, before: Links, seconds: float) -> Carried:
        """What came on top; `seconds`: how long the load ran."""
        old = {link.key: link for link in before.links}
        gained = [_plus(link, old[link.key], -1) if link.key in old else link for link in self.links]
        return Carried(seconds, tuple(gained))


@dataclass(frozen=True)
class Carried:
    """Counters of every link over some seconds."""

    seconds: float
    links: tuple[Link, ...]

    @property
    def bytes(self) -> float:
        """Of all links."""
        return sum(link.bytes for link in self.links)

    @property
    def tickets(self) -> float:
        """Prompts whose pages came to their doorbell."""
        return sum(link.tickets for link in self.links)

    @property
    def fairness(self) -> float | None:
        """The slowest link over the mean of all, by bytes; None when nothing was pushed."""
        mean = statistics.fmean(link.bytes for link in self.links) if self.links else 0.0
        return min(link.bytes for link in self.links) / mean if mean else None

    @property
    def unhidden_ms(self) -> float | None:
        """Of a prompt: from its last chunk computed to its doorbell out."""
        return 1e3 * sum(link.unhidden_s for link in self.links) / self.tickets if self.tickets else None

    @property
    def probed_ms(self) -> float | None:
        """What the bytes of a prompt take at the probed speed of their link."""
        if not self.tickets or any(link.bytes and not link.probed_gb_per_s for link in self.links):
            return None
        seconds = sum(link.bytes / 1e9 / link.probed_gb_per_s for link in self.links if link.bytes)
        return 1e3 * seconds / self.tickets

    @property
    def hidden(self) -> float | None:
        """Share of that time that is over when the prompt is computed; 0 where the rest takes longer than all."""
        if not self.probed_ms or self.unhidden_ms is None:
            return None
        return max(0.0, 1.0 - self.unhidden_ms / self.probed_ms)

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "seconds": round(self.seconds, 3),
            "bytes": self.bytes,
            "gb_per_s": round(self.bytes / 1e9 / self.seconds, 4) if self.seconds else 0.0,
            "prompts": self.tickets,
            "fairness": self.fairness,
            "unhidden_ms_per_prompt": self.unhidden_ms,
            "at_probed_speed_ms_per_prompt": self.probed_ms,
            "hidden_share": self.hidden,
            "links": [vars(link) for link in self.links],
        }


def look(engine: Engine) -> Links:
    """The links of a split's PE, when its ranks have reported what they did last."""
    assert engine.pe is not None
    time.sleep(_REPORT_S)
    response = httpx.get(f"{engine.pe.url}/lanes", timeout=10, trust_env=False)
    response.raise_for_status()
    return Links(tuple(_link(link) for link in response.json()["links"] if link["state"] == "up"))


def added(parts: Sequence[Carried]) -> Carried:
    """The sum of several times."""
    sums: dict[tuple[int, int], Link] = {}
    for link in (link for part in parts for link in part.links):
        sums[link.key] = _plus(link, sums[link.key], 1) if link.key in sums else link
    return Carried(sum(part.seconds for part in parts), tuple(sums.values()))


def _plus(one: Link, other: Link, sign: int) -> Link:
    return replace(
        one,
        pages=one.pages + sign * other.pages,
        bytes=one.bytes + sign * other.bytes,
        tickets=one.tickets + sign * other.tickets,
        unhidden_s=one.unhidden_s + sign * other.unhidden_s,
        by_way={
            way: one.by_way.get(way, 0.0) + sign * other.by_way.get(way, 0.0)
            for way in {**one.by_way, **other.by_way}
        },
    )


def _link(found: dict[str, Any]) -> Link:
    counters: dict[str, float] = found["counters"]
    probes: Sequence[dict[str, Any]] = found["probes"]
    transport = f"/{found['transport']}" if found["lane"] in ("put", "peer") else ""
    return Link(
        pe_rank=found["rank"],
        ce_rank=found["peer_rank"],
        lane=f"{found['lane']}{transport}",
        memory=found["memory"],
        probed_gb_per_s=max((probe["gb_per_s"] for probe in probes), default=0.0),
        slow=found["slow"],
        pages=counters.get("pages", 0.0),
        bytes=counters.get("bytes", 0.0),
        tickets=counters.get("tickets", 0.0),
        unhidden_s=counters.get("unhidden_seconds", 0.0),
        by_way={
            name.removeprefix(_BY_WAY): value for name, value in counters.items() if name.startswith(_BY_WAY)
        },
    )
