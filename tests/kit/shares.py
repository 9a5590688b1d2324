# SPDX-License-Identifier: Apache-2.0
"""Which tests go to one worker of pytest-xdist, and in which order: files whole, those with common servers together.

Starting engines is what takes the time, so tests of a shared system (`Breakable`, `Cluster`) are one share, whichever
files they are in. Long shares begin first, and those that start no process fill what remains at the end.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    import pytest

__all__ = ["Shares", "sort_by_share"]

_TESTS = Path(__file__).parents[1]
# How a file asks for its servers (for the models of a cluster alone they need not run).
_SYSTEMS = {r"split: Breakable": "the breakable split", r"cluster\.(split|single|start)\(": "the cluster"}


class Shares(LoadScopeScheduling):  # type: ignore[misc]
    """Gives a worker the next share when it has nearly done the one before."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        # The order is that of `sort_by_share`, not by the number of tests.
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def remove_node(self, node: Any) -> str | None:
        """What a worker was at when it ended, as by a time-out. That has failed; only the rest is run again."""
        units = self.assigned_work[node].values()
        ended_in = next((name for unit in units for name, done in unit.items() if not done), None)
        for unit in units:
            if ended_in in unit:
                unit[ended_in] = True
        super().remove_node(node)
        return ended_in

    def _split_scope(self, nodeid: str) -> str:
        return _share(nodeid.partition("::")[0])[1]


def sort_by_share(items: list[pytest.Item]) -> None:
    """The same order in every worker."""
    items.sort(key=lambda item: _share(item.nodeid.partition("::")[0])[0])


@functools.cache
def _share(file: str) -> tuple[int, str]:
    """(when, which) of a test file, by its text: the controller, which deals them out, imports none."""
    text = (_TESTS.parent / file).read_text()
    for place, (asks, system) in enumerate(_SYSTEMS.items()):
        if re.search(rf"\b{asks}", text):
            return place, system
    return len(_SYSTEMS) + ("mark.process" not in text), file
