# SPDX-License-Identifier: Apache-2.0
"""What NCCL's debug log (NCCL_DEBUG=INFO) says about the ways it took: transports, networks, algorithms, version."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["NcclFacts", "parse_log"]

_VERSION = re.compile(r"NCCL version (\d+\.\d+\.\d+)(?:\+cuda([\d.]+))?")
# Channel 00/1 : 0[0] -> 1[1] [send] via NET/Socket/0(0)/GDRDMA. Connection 0 is of collectives, 1 of send/recv.
_CHANNEL = re.compile(
    r"Channel (\d+)/(\d+) : (\d+)(?:\[\w+\])? -> (\d+)(?:\[\w+\])?(?: \[(send|receive)\])? via (\S+)"
)
# The network's own number, and the proxy's rank, differ from channel to channel and say nothing about the way.
_NUMBERS = re.compile(r"/\d+(?:\(\d+\))?(?=/|$)")
_NETWORK = re.compile(r"NCCL INFO Using network (\S+)")
_INTERFACE = re.compile(r"NET/(\w+) : Using (\[.*)$")
_NO_NETWORK = re.compile(r"Failed to initialize NET plugin (\w+)")
_TUNED = re.compile(r"NCCL INFO (\w+): (\d+) Bytes -> Algo (\w+) proto (\w+)")
_CHANNELS = re.compile(
    r"(\d+) coll channels, (?:\d+ collnet channels, )?(\d+) nvls channels, (\d+) p2p channels"
)
_WARNING = re.compile(r"NCCL WARN (.*)$")
_SETTING = re.compile(r"(NCCL_\w+) set by environment to (\S+?)\.?$")


@dataclass
class NcclFacts:
    """`transports`: how many connections of each kind go "a -> b", those of send/recv and of collectives apart.

    `algorithms`: (collective, bytes) → "RING/SIMPLE". All empty when the log says nothing of it.
    """

    version: str = ""
    cuda: str = ""
    network: str = ""
    interfaces: list[str] = field(default_factory=list)
    sendrecv: dict[str, Counter[str]] = field(default_factory=dict)
    collectives: dict[str, Counter[str]] = field(default_factory=dict)
    algorithms: dict[tuple[str, int], str] = field(default_factory=dict)
    channels: dict[str, int] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @property
    def transport(self) -> str:
        """The transport of send/recv between the two ranks, e.g. P2P/CUMEM; of collectives when nothing was sent."""
        found: Counter[str] = Counter()
        for ways in (self.sendrecv or self.collectives).values():
            found += ways
        return " + ".join(name for name, _ in found.most_common())


def parse_log(lines: Iterable[str]) -> NcclFacts:
    """Read a log; lines of several ranks may be mixed."""
    facts = NcclFacts()
    for line in lines:
        line = line.rstrip()
        if found := _VERSION.search(line):
            facts.version, facts.cuda = found[1], found[2] or ""
        elif found := _CHANNEL.search(line):
            way = _NUMBERS.sub("", found[6])
            where = facts.sendrecv if int(found[2]) else facts.collectives
            where.setdefault(f"{found[3]} -> {found[4]}", Counter())[way] += 1
        elif found := _NETWORK.search(line):
            facts.network = found[1]
        elif found := _INTERFACE.search(line):
            name = f"{found[1]} {found[2]}".strip()
            if name not in facts.interfaces:
                facts.interfaces.append(name)
        elif found := _NO_NETWORK.search(line):
            facts.interfaces = [name for name in facts.interfaces if not name.startswith(f"{found[1]} ")]
        elif found := _TUNED.search(line):
            facts.algorithms[found[1], int(found[2])] = f"{found[3]}/{found[4]}"
        elif found := _CHANNELS.search(line):
            facts.channels = {"collective": int(found[1]), "nvls": int(found[2]), "sendrecv": int(found[3])}
        elif found := _SETTING.search(line):
            facts.settings[found[1]] = found[2]
        elif (found := _WARNING.search(line)) and found[1] not in facts.warnings:
            facts.warnings.append(found[1])
    return facts
