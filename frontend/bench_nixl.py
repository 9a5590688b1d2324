# SPDX-License-Identifier: Apache-2.0
"""NIXL as one of the ways that transfer-bench measures, when its package is installed (it is not a dependency).

Its faster mode: no progress thread, both sides poll. A WRITE with a notification; complete when the receiver's Python
holds the notification.
"""

from __future__ import annotations

import base64
import importlib
import importlib.util
import time
from typing import Any

from kvrail.frontend.bench_rank import Indices
from kvrail.transfer.device_pool import DevicePool
from kvrail.transfer.errors import TransferError
from kvrail.transfer.memory import HostPool

__all__ = ["NixlReceiver", "NixlSender", "nixl_version"]

_BATCH_S = 60.0

Pool = HostPool | DevicePool


def nixl_version() -> str | None:
    """The version of the installed package, or None."""
    if importlib.util.find_spec("nixl") is None:
        return None
    try:
        importlib.import_module("nixl._api")
    except ImportError:
        return None
    from importlib.metadata import PackageNotFoundError, version

    for name in ("nixl", "nixl-cu12", "nixl-cu13"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def _place(pool: Pool) -> tuple[str, int]:
    """NIXL's word for the kind of memory, and the device."""
    return ("VRAM", pool.cuda.ordinal) if isinstance(pool, DevicePool) else ("DRAM", 0)


def _agent(name: str, pool: Pool) -> Any:
    api = importlib.import_module("nixl._api")
    agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    kind, device = _place(pool)
    agent.register_memory([(pool.address, pool.nbytes, device, "")], kind)
    return agent


def _pages(pool: Pool) -> list[tuple[int, int, int]]:
    size, (_, device) = pool.unit_bytes, _place(pool)
    return [(pool.address + at * size, size, device) for at in range(pool.units)]


class NixlReceiver:
    def __init__(self, pool: Pool) -> None:
        self._agent = _agent("receiver", pool)
        # What the sender needs: our metadata and where our pages are.
        self.card = {
            "metadata": base64.b64encode(self._agent.get_agent_metadata()).decode(),
            "pages": _pages(pool),
            "kind": _place(pool)[0],
        }

    def await_batch(self, number: int, target: Indices) -> int:
        deadline = time.monotonic() + _BATCH_S
        while time.monotonic() < deadline:
            if self._agent.get_new_notifs():
                return time.monotonic_ns()
        raise TransferError(f"no notification of batch {number}")

    def push(self, number: int, source: Indices, target: Indices) -> None:
        raise TransferError("the receiver only receives")

    def settle(self) -> None:
        pass

    def close(self) -> None:
        self._agent = None


class NixlSender:
    def __init__(self, pool: Pool, card: dict[str, Any]) -> None:
        self._agent = _agent("sender", pool)
        peer = self._agent.add_remote_agent(base64.b64decode(card["metadata"]))
        self._local = self._agent.prep_xfer_dlist("", _pages(pool), _place(pool)[0])
        self._remote = self._agent.prep_xfer_dlist(
            peer, [tuple(page) for page in card["pages"]], card["kind"]
        )
        self._handle: Any = None

    def push(self, number: int, source: Indices, target: Indices) -> None:
        self._handle = self._agent.make_prepped_xfer(
            "WRITE", self._local, source.tolist(), self._remote, target.tolist(), b"landed"
        )
        state = self._agent.transfer(self._handle)
        deadline = time.monotonic() + _BATCH_S
        # The notification goes out from inside these calls.
        while state == "PROC":
            if time.monotonic() > deadline:
                raise TransferError("NIXL did not finish")
            state = self._agent.check_xfer_state(self._handle)
        if state != "DONE":
            raise TransferError(f"NIXL: {state}")

    def await_batch(self, number: int, target: Indices) -> int:
        raise TransferError("the sender only sends")

    def settle(self) -> None:
        self._agent.release_xfer_handle(self._handle)

    def close(self) -> None:
        self._agent = None
