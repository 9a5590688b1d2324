# SPDX-License-Identifier: Apache-2.0
"""What goes from a prefill rank's pools to a native writer: from where, behind which work, in which parts and ways."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from kvrail.runtime.engine_protocol import Engine
from kvrail.runtime.host_cache import HostPrefixCache
from kvrail.runtime.link_board import LinkBoard
from kvrail.transfer.checksums import pack_checksums, page_checksums
from kvrail.transfer.link_events import LinkKey, Probe
from kvrail.transfer.memory import Pools
from kvrail.transfer.planner import Planner, count_runs
from kvrail.transfer.tickets import PAGE_POOL, Push
from kvrail.transfer.wire import Doorbell

if TYPE_CHECKING:
    from kvrail.transfer import _ucx

__all__ = ["PagePushes"]


class PagePushes:
    """Carries out the ledger's pushes. `counters` and `board` are told what went out."""

    def __init__(
        self,
        engine: Engine,
        pools: Pools,
        cache: HostPrefixCache | None,
        board: LinkBoard,
        counters: Counter[str],
    ) -> None:
        self._engine = engine
        self._pools = pools
        self._cache = cache
        self._board = board
        self._counters = counters
        self._planners: dict[LinkKey, Planner] = {}
        # Behind all of the model's work so far; one serves everything that a step has computed.
        self._fence: _ucx.CudaFence | None = None
        # Of a step that is being queued: the layers that are, and a fence behind them.
        self._layers: list[tuple[int, _ucx.CudaFence]] = []

    def link_up(self, key: LinkKey, probes: tuple[Probe, ...]) -> None:
        """How fast a link is, by which ways."""
        self._planners[key] = Planner.of(probes)

    def link_down(self, key: LinkKey) -> None:
        """A link is over."""
        self._planners.pop(key, None)

    def parts(self, link: LinkKey, tokens: int) -> int:
        """In how many parts the last `tokens` tokens of a prompt should leave."""
        planner = self._planners.get(link)
        return planner.parts(tokens * self._engine.layout.token_bytes) if planner else 1

    def layers_queued(self, layers: int) -> None:
        """The work that stores KV of the first `layers` layers is queued: they can be pushed behind that."""
        fence = self._pools.fence(self._engine.stream)
        assert fence is not None, "an engine with a stream has its pools on a GPU"
        self._layers.append((layers, fence))

    def step_queued(self) -> None:
        """So is the rest of the step."""
        self._fence = None

    def step_over(self) -> None:
        """What is pushed from now on is not of that step."""
        self._fence = None
        self._layers.clear()

    def push(self, writer: _ucx.Writer, push: Push) -> None:
        """Have `writer` write these units. They may be what a step that is queued is going to compute."""
        memory = self._pools.pages if push.pool == PAGE_POOL else self._pools.state
        assert memory is not None
        if push.cached:
            self._push_cached(writer, push, memory.address, memory.unit_bytes)
        else:
            self._push_computed(writer, push, memory.address, memory.unit_bytes)
        units = {"pages" if push.pool == PAGE_POOL else "states": len(push.target)}
        self._board.count(LinkKey(*push.link), bytes=len(push.target) * memory.unit_bytes, **units)

    def _push_computed(self, writer: _ucx.Writer, push: Push, address: int, unit_bytes: int) -> None:
        """The layers that are queued before the rest, each part behind its fence.

        The copies wait on the GPU for the model's work, and this thread for neither.
        """
        begin = 0
        if push.pool == PAGE_POOL:
            layer_bytes = unit_bytes // max(1, self._engine.layout.layers)
            for layers, fence in self._layers:
                end = layers * layer_bytes
                self._push_own(writer, push, address, fence, end - begin, (begin, end - begin))
                begin = end
        part = (begin, unit_bytes - begin) if begin else None
        self._push_own(writer, push, address, self._computed(), unit_bytes - begin, part)

    def _push_own(
        self,
        writer: _ucx.Writer,
        push: Push,
        address: int,
        after: _ucx.CudaFence | None,
        nbytes: int,
        part: tuple[int, int] | None = None,
    ) -> None:
        """From our pools, behind `after`: `nbytes` of each unit, which are that `part` of it, or all."""
        key, count = LinkKey(*push.link), len(push.target)
        planner = self._planners.get(key)
        runs = count if part else count_runs(push.source, push.target)
        way = planner.choose(count * nbytes, runs) if planner else None
        writer.push(push.pool, address, push.source, push.target, after=after, way=way or "", part=part)
        if way:
            self._board.count(key, **{f"bytes_by_{way}": count * nbytes})

    def _push_cached(self, writer: _ucx.Writer, push: Push, address: int, unit_bytes: int) -> None:
        """What came from the host cache, while the rest of the prompt is computed: straight from there.

        On a GPU from its pool, right behind the copy into it: a second trip over PCIe would slow down the first, which
        the rest of the prompt waits for, and take longer than one between GPUs.
        """
        assert self._cache is not None
        self._counters["pages_pushed_from_host"] += len(push.target)
        if self._cache.in_stream_order:
            self._push_own(writer, push, address, self._cache.behind_loads(), unit_bytes)
            return
        for span in self._cache.spans(push.source):
            writer.push(push.pool, span.address, span.units, push.target[span.where])

    def _computed(self) -> _ucx.CudaFence | None:
        """What the GPU has to have done before pages of this step may be read; None on a CPU, where it is done."""
        if self._fence is None:
            self._fence = self._pools.fence(self._engine.stream)
        return self._fence

    def summed(self, bell: Doorbell, pages: npt.NDArray[np.uint32], state_slot: int) -> Doorbell:
        """The doorbell with the checksums of what was pushed. Waits for the model's work."""
        after = self._computed()
        sums = pack_checksums(page_checksums(self._pools.pages, pages, after))
        bell = msgspec.structs.replace(bell, checksums=sums)
        if state_slot >= 0 and self._pools.state is not None:
            slot = np.array([state_slot], dtype=np.uint32)
            state_sum = int(page_checksums(self._pools.state, slot, after)[0])
            bell = msgspec.structs.replace(bell, state_checksum=state_sum)
        return bell
