# SPDX-License-Identifier: Apache-2.0
"""Which way each batch of a link takes: the one that the link's own measurements predict to be done first. Pure.

The start-up probes of a way (bytes, coalesced runs, µs) give three costs: what a batch costs at all, what each run
of neighbouring units adds (a copy engine and UCX have work for each, the page-copy kernel has none), and what each
byte adds. No size is written down anywhere: on another link, or another machine, the same batch may go another way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvrail.transfer.link_events import Probe, Way

__all__ = ["Cost", "Planner", "count_runs"]

# Ways by how little they disturb the model: a copy engine and UCX take no SM from it, the kernel takes a few.
_GENTLE: tuple[Way, ...] = ("engine", "put", "stream", "shm", "kernel")
# Predictions that differ by less say the same: medians of a few probes scatter by as much.
_SCATTER = 1.1
# What a copy that begins beside the model's computing costs that, however short it is: 0.7 to 1 ms over NVLink, between
# two H200 at their power limit (doc/numbers.md).
_BURST_S = 1e-3
# Smaller pieces of a page take longer to copy than they save.
_MOST_PARTS = 8


class Cost(NamedTuple):
    """What a batch takes by one way, in seconds: latency_s + per_run_s * runs + per_byte_s * bytes. None negative."""

    latency_s: float
    per_run_s: float
    per_byte_s: float

    def seconds(self, nbytes: int, runs: int) -> float:
        """From the push until all of it has landed and the doorbell is out."""
        return self.latency_s + self.per_run_s * runs + self.per_byte_s * nbytes

    @classmethod
    def fit(cls, probes: Iterable[Probe]) -> Cost:
        """The costs, none negative, that come nearest to these probes of one way (at least one).

        Nearest by share and not by µs: the short probe says all that is known of the latency. What the probes cannot
        tell apart (every one is a single run) is counted as latency.
        """
        measured = [(1.0, float(probe.runs), float(probe.nbytes), probe.us * 1e-6) for probe in probes]
        if not measured:
            raise ValueError("no probe of this way")
        rows = np.array(measured)
        terms = rows[:, :3] / rows[:, 3:]
        # Scaled, so that bytes and runs weigh alike for the solver.
        scale = np.abs(terms).max(axis=0)
        best, least = np.zeros(3), float(len(rows))
        # A least-squares answer without negative costs is the best of those of the seven choices of terms.
        for count in (1, 2, 3):
            for chosen in map(list, combinations((0, 2, 1), count)):
                if np.linalg.matrix_rank(terms[:, chosen] / scale[chosen]) < count:
                    continue
                found, *_ = np.linalg.lstsq(terms[:, chosen] / scale[chosen], np.ones(len(rows)), rcond=None)
                miss = float(np.square(terms[:, chosen] / scale[chosen] @ found - 1.0).sum())
                if (found >= 0).all() and miss < least - 1e-12:
                    best, least = np.zeros(3), miss
                    best[chosen] = found / scale[chosen]
        return cls(float(best[0]), float(best[1]), float(best[2]))


class Planner:
    """The ways of one link, with their costs."""

    def __init__(self, costs: Mapping[Way, Cost]) -> None:
        self.costs = {way: costs[way] for way in _GENTLE if way in costs}

    @classmethod
    def of(cls, probes: Iterable[Probe]) -> Planner:
        """From all probes of a link, of whatever ways."""
        by_way: dict[Way, list[Probe]] = {}
        for probe in probes:
            by_way.setdefault(probe.way, []).append(probe)
        return cls({way: Cost.fit(found) for way, found in by_way.items()})

    def choose(self, nbytes: int, runs: int) -> Way | None:
        """The way for a batch; None when nothing was measured. Of those that are as good as the fastest, the one that
        disturbs the model least.
        """
        if len(self.costs) < 2:
            return next(iter(self.costs), None)
        seconds = {way: cost.seconds(nbytes, runs) for way, cost in self.costs.items()}
        enough = min(seconds.values()) * _SCATTER
        return next(way for way, found in seconds.items() if found <= enough)

    def parts(self, nbytes: int) -> int:
        """In how many parts a batch that becomes ready bit by bit should leave, so that little is left to wait for.

        n parts leave 1/n of it to the end, and disturb what makes them ready n times.
        """
        seconds = min((cost.seconds(nbytes, 1) for cost in self.costs.values()), default=0.0)
        return max(1, min(_MOST_PARTS, math.isqrt(int(seconds / _BURST_S))))

    @property
    def gb_per_s(self) -> float:
        """What the best way reaches in the long run; infinite when the probes were too short to tell, 0 without any."""
        per_byte = min((cost.per_byte_s for cost in self.costs.values()), default=float("inf"))
        return 1e-9 / per_byte if per_byte > 0 else float("inf")


def count_runs(source: npt.NDArray[np.uint32], target: npt.NDArray[np.uint32]) -> int:
    """How many runs of units that are neighbours, in order, on both sides these lists [n] are."""
    if not len(source):
        return 0
    # Unsigned differences wrap; one step up is 1 all the same.
    return 1 + int(np.count_nonzero((np.diff(source) != 1) | (np.diff(target) != 1)))
