# SPDX-License-Identifier: Apache-2.0
"""Two network namespaces that stand for two hosts: one wire between them, and one from the second to the tests.

A host of its own has a file system of its own too: `inside` hides the other one's sockets under an empty mount,
which only the command that it starts can see.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from ipaddress import IPv4Address
from pathlib import Path
from typing import NamedTuple

import pytest

__all__ = ["Namespaces", "listening", "two_hosts"]

# Test networks of RFC 2544, routed nowhere; others for each process, since two runs may share a machine.
_KV, _FRONT = f"198.18.{os.getpid() % 256}", f"198.19.{os.getpid() % 256}"


class Namespaces(NamedTuple):
    """Names and addresses. `front`: where the second host answers the tests. `*_local`: of the same wire as `*_kv`."""

    first: str
    second: str
    first_kv: str = f"{_KV}.1"
    second_kv: str = f"{_KV}.2"
    front: str = f"{_FRONT}.2"
    first_local: str = "fe80::77:1%kv0"
    second_local: str = "fe80::77:2%kv0"

    def inside(self, name: str, hidden: Path) -> list[str]:
        """The words that run a command in a namespace where the folder `hidden` is empty."""
        # `ip netns exec` brings mounts of its own, and the /sys of that namespace, which UCX reads.
        hide = f'mount -t tmpfs none "{hidden}" && exec "$@"'
        return ["ip", "netns", "exec", name, "sh", "-c", hide, "sh"]


@contextlib.contextmanager
def two_hosts() -> Iterator[Namespaces]:
    """Make them, and remove them in any case; skips the test, saying why, where they cannot be made."""
    if os.getuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the `ip` command of iproute2")
    names = Namespaces(f"kvrail-a{os.getpid()}", f"kvrail-b{os.getpid()}")
    outer, inner = f"kvo{os.getpid() % 100000}", "front0"
    steps = [f"ip netns add {name}" for name in (names.first, names.second)]
    # The same name at both ends, as UCX chooses by it.
    steps += [f"ip link add kv0 netns {names.first} type veth peer name kv0 netns {names.second}"]
    steps += [f"ip link add {outer} type veth peer name {inner} netns {names.second}"]
    steps += [f"ip addr add {_FRONT}.1/24 dev {outer}", f"ip link set {outer} up"]
    for name, device, address in (
        (names.first, "kv0", names.first_kv),
        (names.second, "kv0", names.second_kv),
        (names.second, inner, names.front),
    ):
        steps += [f"ip -n {name} addr add {address}/24 dev {device}", f"ip -n {name} link set {device} up"]
    for name, local in ((names.first, names.first_local), (names.second, names.second_local)):
        steps += [f"ip -n {name} -6 addr add {local.partition('%')[0]}/64 dev kv0 nodad"]
    steps += [f"ip -n {name} link set lo up" for name in (names.first, names.second)]
    try:
        for step in steps:
            done = subprocess.run(step.split(), capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"no network namespaces here: {step}: {done.stderr.strip()}")
        yield names
    finally:
        # The wires go with the namespaces that hold an end of them.
        for name in (names.first, names.second):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", outer], capture_output=True, check=False)


def listening(pid: int) -> set[str]:
    """Addresses of all listening TCP sockets in the network namespace of a process; "ipv6" for any such."""
    found = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        local, state = line.split()[1], line.split()[3]
        if state == "0A":
            found.add(str(IPv4Address(int.from_bytes(bytes.fromhex(local.partition(":")[0]), "little"))))
    six = Path(f"/proc/{pid}/net/tcp6")
    if six.exists() and any(line.split()[3] == "0A" for line in six.read_text().splitlines()[1:]):
        found.add("ipv6")
    return found
