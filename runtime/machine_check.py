# SPDX-License-Identifier: Apache-2.0
"""Whether this machine has what the settings ask for, as far as that is known before anything listens or loads.

Opens no device and imports no torch, which takes seconds. What only a loaded model tells, a rank finds out by itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import ipaddress
import socket

from kvrail.runtime.config import LaunchConfig, environment
from kvrail.runtime.errors import ConfigError
from kvrail.transfer.errors import TransferError
from kvrail.transfer.interfaces import fault_for_ucx, ipv4_of, rdma_ports
from kvrail.transfer.memory import available_bytes, free_hugetlb_bytes
from kvrail.transfer.ucx import find_library

__all__ = ["check_machine"]

_GIB = 1 << 30


def check_machine(config: LaunchConfig) -> None:
    """Raise ConfigError, naming the flag and saying what to do, when a rank of this role could not start here."""
    gpu_bytes = _check_gpus(config)
    if config.attention == "flashinfer" and importlib.util.find_spec("flashinfer") is None:
        raise ConfigError(
            "--attention flashinfer: FlashInfer is not installed: install kvrail[cuda13] or kvrail[cuda12], or leave "
            "--attention out"
        )
    if config.engine == "embedded" or config.role != "single":
        _check_ucx(config)
        _check_kv_host(config.kv_host, calls=config.engine == "vllm")
    if config.engine == "embedded":
        _check_memory(config, gpu_bytes)


def _check_gpus(config: LaunchConfig) -> int | None:
    """The memory of the smallest GPU that this role takes, in bytes; None when it takes none."""
    last = config.device_of(config.dp - 1)
    if last is None:
        return None
    ranks = f" for --dp {config.dp}" if config.dp > 1 else ""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise ConfigError(
            f"--device {config.device}{ranks}: this machine has no NVIDIA driver (libcuda.so.1); "
            "install it, or take --device cpu"
        ) from None
    count = ctypes.c_int(0)
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    # CUDA_ERROR_NO_DEVICE is what it says of none.
    if status not in (0, 100):
        raise ConfigError(
            f"--device {config.device}{ranks}: the NVIDIA driver cannot be used (CUDA error {status}); see nvidia-smi"
        )
    if last >= count.value:
        raise ConfigError(
            f"--device {config.device}{ranks}: needs GPU {last}, and {count.value} are visible "
            "(CUDA_VISIBLE_DEVICES counts); take fewer, or --device cpu"
        )
    sizes = []
    for rank in range(config.dp):
        # Since CUDA 3.2 an ordinal and a device are the same number.
        size = ctypes.c_size_t(0)
        if driver.cuDeviceTotalMem_v2(ctypes.byref(size), config.device_of(rank)) == 0:
            sizes.append(size.value)
    return min(sizes, default=None)


def _check_ucx(config: LaunchConfig) -> None:
    try:
        find_library(config.ucx or environment("KVRAIL_UCX"))
    except TransferError as error:
        raise ConfigError(f"{'--ucx' if config.ucx else 'KVRAIL_UCX'}: {error}") from None


def _check_kv_host(host: str, *, calls: bool) -> None:
    """`calls`: prefill engines are called there by HTTP as well."""
    if host in (name for _, name in socket.if_nameindex()):
        try:
            ipv4_of(host)
        except OSError:
            raise ConfigError(
                f"--kv-host {host}: this interface has no IPv4 address; give an address"
            ) from None
        return
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    # UnicodeError: what no name of a host can look like.
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--kv-host {host}: {error}; give an address or interface of this machine"
        ) from None
    for family, kind, protocol, _, address in found:
        if address[0] in ("0.0.0.0", "::"):
            continue  # Any of them, which can be bound, and is not where the other side would find pages.
        # The kernel may lack a family of which a name has addresses, as IPv6.
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            interface = socket.if_indextoname(address[3]) if len(address) == 4 and address[3] else ""
            if interface and calls:
                raise ConfigError(
                    f"--kv-host {host}: with --engine vllm prefill engines are called there by HTTP, which cannot say "
                    "an address that needs an interface: give another address"
                )
            if interface and not rdma_ports() and (fault := fault_for_ucx(interface)):
                raise ConfigError(f"--kv-host {host}: {fault}")
            return
        if len(address) == 4 and not address[3] and ipaddress.IPv6Address(address[0]).is_link_local:
            raise ConfigError(
                f"--kv-host {host}: an IPv6 link-local address needs its interface: {host}%eth0, say"
            )
    raise ConfigError(
        f"--kv-host {host}: no network interface of this machine has that address; give one of its own"
    )


def _check_memory(config: LaunchConfig, gpu_bytes: int | None) -> None:
    """Refuse pools and host caches that would not even fit beside nothing. Defaults fit by themselves."""
    pools, cache = config.kv_memory_gb or 0.0, config.hicache_size_gb or 0.0
    if gpu_bytes is not None:
        if pools * _GIB > gpu_bytes:
            raise ConfigError(f"--kv-memory-gb {pools:g}: the GPU has {gpu_bytes / _GIB:.1f} GiB; take less")
        pools = 0.0
    available = available_bytes() + free_hugetlb_bytes()
    if (pools + cache) * config.dp * _GIB > available:
        asked = [f"--kv-memory-gb {pools:g}"] * bool(pools) + [f"--hicache-size-gb {cache:g}"] * bool(cache)
        ranks = f" for each of --dp {config.dp}" if config.dp > 1 else ""
        raise ConfigError(
            f"{' and '.join(asked)}{ranks}: this machine has {available / _GIB:.1f} GiB of memory available; take less"
        )
