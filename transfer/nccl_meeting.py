# SPDX-License-Identifier: Apache-2.0
"""How the two ranks of the NCCL probe meet: by torch's TCPStore, and only if they would measure the same.

NCCL itself neither says who is missing nor compares versions: it waits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from kvrail.transfer.errors import TransferError

__all__ = ["meet"]


def meet(host: str, port: int, *, rank: int, within_s: float, facts: Mapping[str, str]) -> Any:
    """The store of both ranks; rank 0 listens at `port`, rank 1 dials it. Returns when both have the same `facts`.

    Raises TransferError saying what to do: nobody came within `within_s` seconds, the port is taken, or which fact
    differs. Then the other rank hears of the difference as well.
    """
    other = 1 - rank
    missing = (
        f"rank {other} did not come to {host}:{port} within {within_s:g} s: start it on the other host at the same "
        f"time, with the same --rendezvous and --rank {other}, and see that this port of rank 0 is open to it"
    )
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, 2, rank == 0, timeout=timedelta(seconds=within_s), wait_for_workers=False
        )
    except dist.DistNetworkError as error:
        if rank == 0:
            raise TransferError(f"port {port} cannot be listened on: {_first_line(error)}") from None
        raise TransferError(f"{missing} ({_first_line(error)})") from None
    # Two that say the same rank would overwrite each other's facts, and wait for nobody.
    if store.add(f"here {rank}", 1) > 1:
        raise TransferError(f"there are two of --rank {rank}: give one of them --rank {other}")
    try:
        store.set(f"facts {rank}", json.dumps(dict(facts)))
        theirs: dict[str, str] = json.loads(store.get(f"facts {other}"))
        # Rank 0 is the store: it must not go before the other has read.
        if rank == 0:
            store.wait(["read"])
        else:
            store.set("read", "")
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise TransferError(f"{missing} ({_first_line(error)})") from None
    for name in sorted(facts.keys() | theirs.keys()):
        ours, there = facts.get(name, "none"), theirs.get(name, "none")
        if ours != there:
            raise TransferError(
                f"{name} is {ours} here and {there} at rank {other}: install the same on both hosts"
            )
    return store


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
