# SPDX-License-Identifier: Apache-2.0
"""Which UCX library this process uses, and how a context is set up; the only way to the native module.

The library is chosen before the native module is imported: glibc then takes the one that is already loaded. All
settings go to the context that they are for, never into the environment.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kvrail.transfer.errors import TransferError
from kvrail.transfer.interfaces import fault_for_ucx, interface_of, rdma_ports

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kvrail.transfer._ucx import Context, CudaDevice, Reactor

__all__ = [
    "OLDEST_UCX",
    "EventKind",
    "LibraryFacts",
    "PutTransport",
    "checksum_pages",
    "context_settings",
    "find_library",
    "load_library",
    "open_context",
    "open_reactor",
]

OLDEST_UCX = (1, 20)
PutTransport = Literal["auto", "cma", "tcp"]

# Dependencies first. Not libucm: alone it lacks symbols of libucs.
_LIBRARIES = ("libucs.so.0", "libuct.so.0", "libucp.so.0")


class EventKind(IntEnum):
    """First field of a native event; what each means is told in _ucx.pyi."""

    MESSAGE = 1
    CONTROL = 2
    LINK_ERROR = 3
    FENCED = 4
    FLUSHED = 5
    PROGRESS = 6
    RUNG = 7
    QUIET = 8
    FAILED = 9


@dataclass(frozen=True)
class LibraryFacts:
    """The UCX library in use. `copy` is the instruction set with which lane shm copies."""

    path: Path
    version: tuple[int, int, int]
    copy: str


def load_library(choice: str | None = None) -> LibraryFacts:
    """Load UCX, then the native module; once a process, later calls with the same choice change nothing.

    `choice`: "wheel" (the libucx package; the default), "system" (whatever the loader finds), or a folder that
    holds libucp.so.0. Raises TransferError when it is not there, is older than 1.20, or when another package has
    already loaded a different UCX: two in one process would share half of their symbols.
    """
    choice = choice or "wheel"
    folder = None if choice == "system" else _wheel_folder() if choice == "wheel" else Path(choice)
    loaded = _loaded_libucp()
    if loaded is None:
        _load(folder)
        loaded = _loaded_libucp()
        if loaded is None:
            raise TransferError("UCX was loaded, but its libucp is not mapped under that name")
    if folder is not None and loaded.parent.resolve() != folder.resolve():
        raise TransferError(
            f"this process already uses the UCX in {loaded.parent}, {folder} was asked for: "
            "load kvrail first, or choose that folder with KVRAIL_UCX"
        )
    from kvrail.transfer import _ucx

    version = _ucx.library_version()
    if version[:2] < OLDEST_UCX:
        raise TransferError(
            f"UCX {_dotted(version)} at {loaded} is too old, {_dotted(OLDEST_UCX)} or newer is needed"
        )
    return LibraryFacts(path=loaded, version=version, copy=_ucx.copy_kind())


def find_library(choice: str | None = None) -> None:
    """Raise TransferError when `load_library(choice)` would. Of the wheel only that there is one: loading takes 0.4 s.

    Anything else is loaded into this process.
    """
    if (choice or "wheel") == "wheel":
        _wheel_folder()
    else:
        load_library(choice)


def context_settings(put_transport: PutTransport, kv_host: str, *, cuda: bool = False) -> dict[str, str]:
    """UCX settings (names without the UCX_ prefix) of a context that listens on the interface of `kv_host` only.

    `cuda`: it is to register GPU memory.
    """
    settings = {
        # With rendezvous on, peer error mode drops every zero-copy put lane and emulates puts, slowly.
        "RNDV_THRESH": "inf",
        # What would have been emulated all the same is then an error.
        "PROTO_EMULATION_ENABLE": "n",
        # Both, or a cut connection is not noticed for a minute. A frozen peer is noticed by our heartbeats only.
        "KEEPALIVE_INTERVAL": "1s",
        "TCP_USER_TIMEOUT": "3s",
        # A connection that waits for its peer would keep the progress thread, and so every other link, waiting. And
        # where it fails at once, while it stands in for one that a dying peer has made to us, UCX frees the endpoint
        # under our hands.
        "TCP_CONN_NB": "y",
        "NET_DEVICES": ",".join(_devices(kv_host, rdma=put_transport == "auto")),
    }
    # A list of transports that leaves these out takes GPU memory for host memory.
    gpu = ",cuda_copy,cuda_ipc" if cuda else ""
    if ":" in kv_host:
        settings["TCP_AF_PRIO"] = "inet6,inet"
    if put_transport == "tcp":
        settings["TLS"] = "tcp,self" + gpu
        return settings
    # Without these, peer error mode sends the messages of one host over tcp.
    settings |= {"SYSV_ERROR_HANDLING": "y", "POSIX_ERROR_HANDLING": "y"}
    if put_transport == "cma":
        settings["TLS"] = "cma,sysv,posix,tcp,self" + gpu
    return settings


def open_context(
    put_transport: PutTransport,
    kv_host: str,
    *,
    library: str | None = None,
    overrides: Mapping[str, str] | None = None,
    cuda: bool = False,
) -> Context:
    """A UCX context with the settings above.

    `overrides`: settings that win over ours, for instance what the user has put into UCX_* variables; names with
    or without UCX_. Raises UcxFailed when UCX refuses one or does not know it, TransferError when no interface has
    the address `kv_host`.
    """
    load_library(library)
    from kvrail.transfer import _ucx

    settings = context_settings(put_transport, kv_host, cuda=cuda)
    settings |= {name.removeprefix("UCX_"): value for name, value in (overrides or {}).items()}
    return _ucx.Context(settings)


def open_reactor(
    context: Context, *, spin_us: int, copy_threads: int, cuda: CudaDevice | None = None
) -> Reactor:
    """The progress thread (and copy threads) of `context`; one a process is enough. `cuda`: for pools on that GPU."""
    from kvrail.transfer import _ucx

    return _ucx.Reactor(context, spin_us=spin_us, copy_threads=copy_threads, cuda=cuda)


def checksum_pages(base: int, page_bytes: int, pages: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
    """64-bit checksum of each page [n] of a pool at address `base` (definition: csrc/checksum.h)."""
    load_library(_loaded_choice())
    from kvrail.transfer import _ucx

    return _ucx.checksum_pages(base, page_bytes, pages)


def _wheel_folder() -> Path:
    spec = importlib.util.find_spec("libucx")
    if spec is None or not spec.submodule_search_locations:
        raise TransferError(
            "no UCX wheel is installed: install kvrail with the extra cpu, cuda12 or cuda13, or use the system's UCX "
            "with KVRAIL_UCX=system"
        )
    return Path(next(iter(spec.submodule_search_locations))) / "lib"


def _load(folder: Path | None) -> None:
    for name in _LIBRARIES:
        try:
            ctypes.CDLL(name if folder is None else str(folder / name))
        except OSError as error:
            where = "the system" if folder is None else str(folder)
            raise TransferError(
                f"UCX cannot be loaded from {where} ({error}): install UCX {_dotted(OLDEST_UCX)} or newer there, or "
                "use the wheel"
            ) from error


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _loaded_libucp() -> Path | None:
    """Where the libucp of this process lies. Copies under other names (NIXL brings one) do not clash with it."""
    pattern = re.compile(r"/libucp\.so(\.\d+)*$")
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if pattern.search(path):
            return Path(path)
    return None


def _loaded_choice() -> str | None:
    loaded = _loaded_libucp()
    return None if loaded is None else str(loaded.parent)


def _devices(kv_host: str, *, rdma: bool) -> list[str]:
    name = interface_of(kv_host)
    ports = rdma_ports() if rdma and name != "lo" else []
    if not ports and (fault := fault_for_ucx(name)):
        raise TransferError(f"--kv-host {kv_host}: {fault}")
    return [name, *ports]
