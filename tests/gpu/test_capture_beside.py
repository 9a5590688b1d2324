# SPDX-License-Identifier: Apache-2.0
"""Links are set up in the process of an engine that may be capturing CUDA graphs: vLLM does, when it starts."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from kvrail.transfer._ucx import CudaDevice

pytestmark = pytest.mark.gpu


def test_our_calls_neither_fail_nor_spoil_a_capture_on_another_thread(cuda: CudaDevice) -> None:
    ones = torch.ones(1 << 20, device="cuda")
    found = ones * 2
    torch.cuda.synchronize()
    graph, begun, done = torch.cuda.CUDAGraph(), threading.Event(), threading.Event()
    errors: list[Exception] = []

    def beside() -> None:
        begun.wait(20)
        try:
            for _ in range(20):
                memory = cuda.allocate(1 << 20)
                memory.write(0, b"abcd")
                assert memory.read(0, 4) == b"abcd"
                memory.ipc_handle()
                memory.close()
        except Exception as error:
            errors.append(error)
        done.set()

    thread = threading.Thread(target=beside)
    thread.start()
    # The default mode, which forbids calls on all threads but those that say that they do not care.
    with torch.cuda.graph(graph):
        begun.set()
        assert done.wait(20)
        found.copy_(ones * 3)
    thread.join()
    assert not errors, errors
    graph.replay()
    torch.cuda.synchronize()
    assert (found == 3).all()
