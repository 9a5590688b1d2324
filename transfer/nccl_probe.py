# SPDX-License-Identifier: Apache-2.0
"""One of two ranks that measure NCCL's send/recv, through torch.distributed: single blocks, and lists of pages.

Started by `runtime doctor --nccl` as a process of its own, so that NCCL's log settings touch nobody else. Rank 0
sends, rank 1 receives; a JSON object goes to the file named. Page lists go as an NCCL connector sends them: one
operation a page, batched.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kvrail.transfer.errors import TransferError
from kvrail.transfer.nccl_meeting import meet
from kvrail.transfer.rendezvous import rendezvous_address

__all__ = ["main", "page_operations"]

_KIB, _MIB = 1 << 10, 1 << 20
_BLOCKS = tuple(1 << shift for shift in range(12, 31, 2))
# (page bytes, pages): 256 MiB each, but for pages so small that a batch would take seconds.
_LISTS = (
    (4 * _KIB, 4096),
    (64 * _KIB, 4096),
    (512 * _KIB, 512),
    (1 * _MIB, 256),
    (4 * _MIB, 64),
    (64 * _MIB, 8),
)
_REDUCED = (64 * _KIB, 1 * _MIB, 64 * _MIB)
# One group of more operations takes NCCL's work queue to its limits.
_GROUP = 4096
_WARM, _ROUNDS = 2, 7


def page_operations(rows: torch.Tensor, pages: list[int], *, send: bool, peer: int) -> list[list[dist.P2POp]]:
    """Groups of point-to-point operations, one a page of `rows` [pages, bytes], in this order."""
    act = dist.isend if send else dist.irecv
    made = [dist.P2POp(act, rows[page], peer) for page in pages]
    return [made[at : at + _GROUP] for at in range(0, len(made), _GROUP)]


class _Probe:
    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self._gate = torch.zeros(1, device=device)

    def blocks(self) -> list[dict[str, Any]]:
        """One contiguous block by size."""
        found = []
        for size in _BLOCKS:
            block = self._fresh(size)

            def move(block: torch.Tensor = block) -> None:
                if self._rank == 0:
                    dist.send(block, 1)
                else:
                    dist.recv(block, 0)

            found.append(self._record("block", size, 1, move, block))
            del block
        return found

    def lists(self) -> list[dict[str, Any]]:
        """Pages in random order on both sides."""
        found = []
        for size, count in _LISTS:
            rows = self._fresh(size * count).view(count, size)
            order = torch.randperm(count, generator=torch.Generator().manual_seed(self._rank)).tolist()

            def move(rows: torch.Tensor = rows, order: list[int] = order) -> None:
                for group in page_operations(rows, order, send=self._rank == 0, peer=1 - self._rank):
                    for work in dist.batch_isend_irecv(group):
                        work.wait()

            found.append(self._record("pages", size, count, move, rows, order))
            del rows
        return found

    def reductions(self) -> None:
        """All-reduce at a few sizes: NCCL's log then says which algorithms it picks."""
        for size in _REDUCED:
            dist.all_reduce(torch.ones(size // 4, device=self._device))
        torch.cuda.synchronize(self._device)

    def _fresh(self, size: int) -> torch.Tensor:
        """Rank 0: a pattern that both know. Rank 1: poison."""
        return (
            self._pattern(size)
            if self._rank == 0
            else torch.full((size,), 0xA5, dtype=torch.uint8, device=self._device)
        )

    def _pattern(self, size: int) -> torch.Tensor:
        generator = torch.Generator(self._device).manual_seed(size)
        return torch.randint(0, 256, (size,), dtype=torch.uint8, device=self._device, generator=generator)

    def _record(
        self,
        what: str,
        size: int,
        count: int,
        move: Callable[[], None],
        memory: torch.Tensor,
        order: list[int] | None = None,
    ) -> dict[str, Any]:
        times = []
        for turn in range(_WARM + _ROUNDS):
            dist.all_reduce(self._gate)
            torch.cuda.synchronize(self._device)
            begun = time.perf_counter()
            move()
            torch.cuda.synchronize(self._device)
            if turn >= _WARM:
                times.append(time.perf_counter() - begun)
        verified = True
        if self._rank == 1:
            verified = self._arrived(memory, order)
        median = statistics.median(times)
        return {
            "what": what,
            "page_bytes": size,
            "pages": count,
            "median_us": round(1e6 * median, 2),
            "gb_per_s": round(size * count / median / 1e9, 3),
            "us_per_page": round(1e6 * median / count, 3),
            "verified": verified,
        }

    def _arrived(self, memory: torch.Tensor, order: list[int] | None) -> bool:
        expected = self._pattern(memory.numel())
        if order is None:
            return torch.equal(memory, expected)
        sent = torch.randperm(len(order), generator=torch.Generator().manual_seed(0))
        rows = expected.view(memory.shape)[sent.to(self._device)]
        return torch.equal(memory[torch.tensor(order, device=self._device)], rows)


def main() -> None:
    """Join the other rank, measure, write what was found. Fails with an error in the file instead."""
    parser = argparse.ArgumentParser(description="one rank of the NCCL probe")
    parser.add_argument("--rank", type=int, choices=(0, 1), required=True)
    parser.add_argument("--rendezvous", required=True, help="host:port of rank 0")
    parser.add_argument("--device", type=int, required=True)
    parser.add_argument("--within", type=float, default=60.0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = torch.device("cuda", options.device)
    found: dict[str, Any] = {"rank": options.rank, "device": options.device}
    try:
        torch.cuda.set_device(device)
        found["name"] = torch.cuda.get_device_name(device)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        host, port = rendezvous_address(options.rendezvous)
        facts = {
            "NCCL": found["nccl"],
            # What draws the pattern that both know.
            "torch": torch.__version__.partition("+")[0],
            "kvrail's list of sizes": repr((_BLOCKS, _LISTS, _REDUCED)),
        }
        store = meet(host, port, rank=options.rank, within_s=options.within, facts=facts)
        dist.init_process_group(
            "nccl",
            store=store,
            rank=options.rank,
            world_size=2,
            timeout=timedelta(seconds=options.within),
            device_id=device,
        )
        probe = _Probe(options.rank, device)
        probe.reductions()
        found["rows"] = probe.blocks() + probe.lists()
        dist.destroy_process_group()
    except TransferError as error:
        found["error"] = str(error)
    except Exception as error:  # whatever it is, the parent must hear of it
        found["error"] = f"{type(error).__name__}: {error}"
    options.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
