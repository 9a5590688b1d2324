# SPDX-License-Identifier: Apache-2.0
"""Which devices the demo's three engines take: GPUs with the room that reach each other, else the CPU.

As a program it looks at the GPUs and prints what it found: the demo itself must hold no CUDA context, which takes
memory, and a GPU in exclusive mode takes one process only.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kvrail.runtime.checkpoint import cache_dir
from kvrail.runtime.config import mps_sign

__all__ = ["NEED_BYTES", "Devices", "GpuFound", "choose", "look"]

# Of GPU memory for one engine: the model in float32, its pool, a CUDA context, workspaces.
NEED_BYTES = 3 << 30
_LOOK_WITHIN_S = 120.0


class GpuFound(msgspec.Struct, frozen=True):
    """One GPU: what it has free, and whether GPU 0 can write into its memory."""

    name: str
    free_bytes: int
    in_reach: bool


class Devices(NamedTuple):
    """--device of the prefill engine, and of the completion engine and the single engine that it is compared with.

    `reason`: why not GPUs ("" when it is GPUs).
    """

    pe: str
    ce: str
    reason: str = ""


_CPU = Devices("cpu", "cpu")


def choose(found: Sequence[GpuFound], mps: str = "") -> Devices:
    """The prefill engine on the first GPU, the other two on the last one that it reaches and that has the room."""
    if not found:
        return _CPU._replace(reason="no GPU")
    if mps:
        return _CPU._replace(reason=f"GPUs are shared through MPS ({mps}), which no lane between GPUs allows")
    if found[0].free_bytes < NEED_BYTES:
        return _CPU._replace(reason=_too_full(0, found[0], 1))
    for number in range(len(found) - 1, -1, -1):
        engines = 2 if number else 3
        if found[number].in_reach and found[number].free_bytes >= engines * NEED_BYTES:
            return Devices("cuda:0", f"cuda:{number}")
    return _CPU._replace(reason=_too_full(0, found[0], 3))


def look() -> Devices:
    """Look at the GPUs of this machine, in a process of its own, and choose."""
    import torch

    if torch.version.cuda is None or not torch.cuda.device_count():
        return choose([])
    command = [sys.executable, "-P", "-m", "kvrail.frontend.demo_gpus"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LOOK_WITHIN_S, check=False)
    except subprocess.TimeoutExpired:
        return _CPU._replace(reason=f"the GPUs did not answer within {_LOOK_WITHIN_S:.0f} s")
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return _CPU._replace(reason=f"the GPUs cannot be used: {said[-1]}")
    return choose(msgspec.json.decode(done.stdout, type=list[GpuFound]), mps_sign())


def _too_full(number: int, gpu: GpuFound, engines: int) -> str:
    return (
        f"GPU {number} ({gpu.name}) has {gpu.free_bytes / 2**30:.1f} GiB free, "
        f"and the demo wants {engines * NEED_BYTES / 2**30:.0f} there"
    )


def main() -> None:
    """Open every GPU as a rank would, and print what was found."""
    import torch

    from kvrail.transfer.cuda import open_device

    found = []
    for number in range(torch.cuda.device_count()):
        # Its kernels are compiled here, so that the engines find them.
        device = open_device(number, cache_dir())
        if device.shared_by_mps:
            sys.exit(f"{device.name} is shared through MPS, which no lane between GPUs allows")
        found.append(
            GpuFound(
                device.name,
                torch.cuda.mem_get_info(number)[0],
                number == 0 or torch.cuda.can_device_access_peer(0, number),
            )
        )
    sys.stdout.write(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main()
