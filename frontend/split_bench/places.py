# SPDX-License-Identifier: Apache-2.0
"""Which devices an engine uses, as `--pe-gpus 0-3` says it, and what `runtime launch` must be told for that."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Places", "joined", "read_places"]


@dataclass(frozen=True)
class Places:
    """`count` ranks, a GPU each from GPU `first` on; `first` None: on the CPU."""

    first: int | None
    count: int

    @property
    def flags(self) -> tuple[str, ...]:
        """For `runtime launch`."""
        device = "cpu" if self.first is None else f"cuda:{self.first}"
        return ("--dp", str(self.count), "--device", device)

    @property
    def gpus(self) -> frozenset[int]:
        """GPU ordinals; empty on the CPU."""
        return frozenset() if self.first is None else frozenset(range(self.first, self.first + self.count))


def read_places(text: str, flag: str) -> Places:
    """From "0-3", "4,5", "0", "cpu" or "cpu,cpu" (two ranks). Raises ValueError, naming `flag`."""
    parts = [part.strip() for part in text.split(",")]
    if set(parts) == {"cpu"}:
        return Places(None, len(parts))
    gpus: list[int] = []
    for part in parts:
        found = re.fullmatch(r"(\d{1,3})(?:-(\d{1,3}))?", part)
        if found is None:
            raise ValueError(f"{flag} {text}: GPUs such as 0-3 or 4,5, or cpu (cpu,cpu: two ranks)")
        first, last = int(found[1]), int(found[2] or found[1])
        gpus += range(first, last + 1)
    if not gpus or gpus != list(range(gpus[0], gpus[0] + len(gpus))):
        raise ValueError(
            f"{flag} {text}: GPUs in a row, since rank i of an engine takes the i-th from its first"
        )
    return Places(gpus[0], len(gpus))


def joined(one: Places, two: Places) -> Places:
    """All devices of both, for a single engine. Raises ValueError when they are no row."""
    if (one.first is None) != (two.first is None):
        raise ValueError("--pe-gpus and --ce-gpus: both on GPUs or both cpu, or nothing can be compared")
    if one.first is None:
        return Places(None, one.count + two.count)
    gpus = sorted(one.gpus | two.gpus)
    if gpus[-1] - gpus[0] + 1 != len(gpus):
        raise ValueError(
            "--pe-gpus and --ce-gpus: together GPUs in a row (0-3 and 4-7), for the single engine that gets all of them"
        )
    return Places(gpus[0], len(gpus))
