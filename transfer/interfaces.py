# SPDX-License-Identifier: Apache-2.0
"""Network interfaces of this host, and IPv6 link-local addresses, which mean something on one interface only.

`fe80::1%eth0` names the wire behind eth0 by the name that this host has for it. So an address goes to a peer without
its scope, and whoever dials it adds the interface of its own --kv-host.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from kvrail.transfer.errors import TransferError

__all__ = ["fault_for_ucx", "interface_of", "ipv4_of", "rdma_ports", "with_our_scope"]

_SIOCGIFADDR = 0x8915
_IF_INET6 = Path("/proc/net/if_inet6")
_LINK_SCOPE = 0x20


def interface_of(host: str) -> str:
    """The interface that `host` is the name or an address of. Raises TransferError. (Needs a loaded UCX.)"""
    from kvrail.transfer import _ucx

    interfaces = _ucx.interfaces()
    if any(name == host for name, _ in interfaces):
        return host
    by_address = {address.split("%")[0]: name for name, address in interfaces}
    try:
        found = socket.getaddrinfo(host, None)
    except OSError as error:
        raise TransferError(f"--kv-host {host}: {error}") from error
    for address in sorted(info[4] for info in found):
        # Several interfaces may have the same link-local address.
        if len(address) == 4 and address[3]:
            return socket.if_indextoname(address[3])
        if str(address[0]).startswith("127."):
            return "lo"
        if str(address[0]) in by_address:
            return by_address[str(address[0])]
    raise TransferError(f"--kv-host {host}: no network interface of this machine has that address")


def ipv4_of(name: str) -> str:
    """The IPv4 address of an interface. Raises OSError when it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        asked = struct.pack("40s", name.encode())
        return socket.inet_ntoa(fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, asked)[20:24])


def fault_for_ucx(name: str) -> str:
    """Why UCX cannot use tcp on this interface, and what to do; "" when nothing speaks against it."""
    with contextlib.suppress(OSError):
        ipv4_of(name)
        return ""
    with contextlib.suppress(OSError):
        for line in _IF_INET6.read_text().splitlines():
            _, _, _, scope, _, interface = line.split()
            if interface == name and int(scope, 16) != _LINK_SCOPE:
                return ""
    return (
        "UCX, which carries every link's messages, does not use IPv6 link-local addresses, and "
        f"{name} has no other one: give it an address (of any private network, on both hosts)"
    )


def rdma_ports() -> list[str]:
    """RDMA ports of this host, as UCX calls them."""
    ports = Path("/sys/class/infiniband").glob("*/ports/*")
    return sorted(f"{port.parent.parent.name}:{port.name}" for port in ports)


def with_our_scope(host: str, kv_host: str) -> str:
    """A peer's numeric address as this side, which listens on `kv_host`, dials it. Raises TransferError."""
    try:
        # One with a scope has it from this host's user.
        local = "%" not in host and ":" in host and ipaddress.IPv6Address(host).is_link_local
    except ValueError:
        return host
    return f"{host}%{kv_host.partition('%')[2] or interface_of(kv_host)}" if local else host
