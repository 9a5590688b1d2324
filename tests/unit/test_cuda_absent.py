# SPDX-License-Identifier: Apache-2.0
"""Without a GPU: what is refused, in which words, and that the stub tells of everything that the module has."""

from __future__ import annotations

import ast
import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvrail.transfer import ucx
from kvrail.transfer.cuda import open_device
from kvrail.transfer.device_pool import DevicePool
from kvrail.transfer.errors import CudaFailed, TransferError, UcxFailed
from kvrail.transfer.memory import Pools

STUB = Path(ucx.__file__).with_name("_ucx.pyi")


def native() -> Any:
    ucx.load_library()
    from kvrail.transfer import _ucx

    return _ucx


def test_a_machine_without_a_driver_says_so() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        pytest.skip("there is a driver")
    with pytest.raises(CudaFailed, match=r"NVIDIA driver .* libcuda.so.1.*; install it") as told:
        native().CudaDevice(0)
    assert (told.value.call, told.value.status) == ("dlopen", "NO_DRIVER")
    with pytest.raises(CudaFailed, match="NO_DRIVER"):
        open_device(0, None)


def test_the_stub_names_everything_and_nothing_else() -> None:
    module = native()
    tree = ast.parse(STUB.read_text())
    told = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    told |= {
        node.target.id
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert {name for name in dir(module) if not name.startswith("_")} - {"UcxError", "CudaError"} == told
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            members = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
            there = {name for name in vars(getattr(module, node.name)) if not name.startswith("_")}
            assert there == {name for name in members if not name.startswith("_")}, node.name


def test_gpu_ways_need_a_gpu() -> None:
    context = ucx.open_context("tcp", "127.0.0.1")
    reactor = ucx.open_reactor(context, spin_us=0, copy_threads=0)
    link = reactor.open_link(epoch=1, cookie=1)
    with pytest.raises(ValueError, match="without a CUDA device"):
        link.import_peer(0, handle=b"\0" * 64, offset=0, nbytes=4096, unit_bytes=4096)
    one = np.zeros(1, np.uint32)
    with pytest.raises(ValueError, match="way is kernel"):
        link.writer(1, ttl_s=1.0).push(0, 4096, one, one, way="nvlink")  # type: ignore[arg-type]
    link.close()
    reactor.close()
    context.close()


class Memory:
    def __init__(self) -> None:
        self.address, self.closed = 1 << 40, False

    def close(self) -> None:
        self.closed = True


class Device:
    """Has memory; whether UCX knows it is what the tests are about."""

    def __init__(self, free: int = 1 << 30) -> None:
        self.free = free
        self.given: list[Memory] = []

    def allocate(self, nbytes: int) -> Memory:
        if nbytes > self.free:
            raise CudaFailed("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY", f"{nbytes} needed, {self.free} free")
        self.given.append(Memory())
        return self.given[-1]

    def make_current(self) -> None:
        pass


class HostOnly:
    """A UCX without its CUDA transports."""

    def register(self, address: int, nbytes: int, memory: str) -> None:
        raise UcxFailed("register", -22, "UCX sees host memory where cuda was announced")


def test_a_ucx_without_cuda_is_refused_and_nothing_kept() -> None:
    device: Any = Device()
    context: Any = HostOnly()
    with pytest.raises(
        CudaFailed, match=r"pool pages: UCX cannot use GPU memory .*cuda_copy, cuda_ipc"
    ) as told:
        DevicePool(context, device, units=4, unit_bytes=4096)
    assert told.value.status == "UCX_WITHOUT_CUDA"
    assert device.given[0].closed


def test_a_gpu_without_room_is_named_with_what_to_do() -> None:
    device: Any = Device(free=1 << 20)
    context: Any = HostOnly()
    with pytest.raises(CudaFailed, match=r"pool pages: .*needed, 1048576 free.*--kv-pages") as told:
        DevicePool(context, device, units=1024, unit_bytes=4096)
    assert told.value.status == "CUDA_ERROR_OUT_OF_MEMORY"


def test_units_that_the_kernels_cannot_copy_are_refused() -> None:
    device: Any = Device()
    context: Any = HostOnly()
    with pytest.raises(ValueError, match="multiple of 16"):
        DevicePool(context, device, units=4, unit_bytes=24)


def test_pools_that_cannot_all_be_had_leave_nothing() -> None:
    device: Any = Device()
    context: Any = HostOnly()
    with pytest.raises(TransferError):
        Pools.allocate(context, pages=4, page_bytes=4096, cuda=device)
    assert all(memory.closed for memory in device.given)


def test_pools_of_a_cpu_have_no_fence() -> None:
    context = ucx.open_context("tcp", "127.0.0.1")
    pools = Pools.allocate(context, pages=4, page_bytes=4096)
    assert pools.fence(None) is None
    assert pools.fence(0) is None
    pools.close()
    context.close()


def test_a_list_of_transports_has_those_of_cuda_when_asked() -> None:
    assert ucx.context_settings("cma", "127.0.0.1", cuda=True)["TLS"].endswith("cuda_copy,cuda_ipc")
    assert "cuda" not in ucx.context_settings("cma", "127.0.0.1")["TLS"]
    assert "TLS" not in ucx.context_settings("auto", "127.0.0.1", cuda=True)
