# SPDX-License-Identifier: Apache-2.0
"""One rank's transfer layer in a process of its own, driven by JSON lines: what kit.link_ranks starts.

argv[1] is the configuration (see Peer). Commands come on stdin, events and answers go to stdout, each as one line.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvrail.transfer.cuda import open_device
from kvrail.transfer.gpu import Gpu
from kvrail.transfer.layout import PageLayout
from kvrail.transfer.link_events import LinkKey, LinkOptions, LinkUp, PeerAddress, PeerBeat, Received
from kvrail.transfer.links import Links
from kvrail.transfer.memory import PAGE_POOL, Pools
from kvrail.transfer.ucx import open_context, open_reactor
from kvrail.transfer.wire import Beat, Cancel, Doorbell


class Peer:
    """The objects of a rank, in the order in which they are opened and closed."""

    def __init__(self, config: dict[str, Any]) -> None:
        options = config["options"] | {"socket_dir": Path(config["options"]["socket_dir"])}
        self.options = LinkOptions(**options)
        self.layout = PageLayout(**config["layout"])
        overrides = config.get("ucx", {})
        self.cuda = None if config["cuda"] is None else open_device(config["cuda"], None)
        on_gpu = self.cuda is not None
        self.context = open_context(
            self.options.put_transport, self.options.kv_host, overrides=overrides, cuda=on_gpu
        )
        self.reactor = open_reactor(self.context, spin_us=0, copy_threads=1, cuda=self.cuda)
        pages, page_bytes = config["pages"], self.layout.page_bytes
        # Pinned: host pages that the GPU of this rank copies (a rank on a CPU with --lane peer).
        pin = self.cuda if config["pinned"] else None
        on_device = self.cuda if not config["pinned"] else None
        self.pools = Pools.allocate(self.context, pages=pages, page_bytes=page_bytes, cuda=on_device, pin=pin)
        self.key = LinkKey(os.urandom(16), config["rank"])
        self.links = Links(
            reactor=self.reactor,
            identity=self.key,
            token=bytes.fromhex(config["token"]),
            layout=self.layout,
            pools=self.pools,
            options=self.options,
            accept=config["accept"],
            gpu=gpu_of(self.cuda, config["mps"]),
        )
        self.steps = 0
        self.moving = True
        self.peers: set[LinkKey] = set()
        self.writers: list[Any] = []

    def turn(self) -> None:
        """One turn of a step loop."""
        self.steps += self.moving
        for key in self.peers:
            self.links.set_beat(key, Beat(steps=self.steps, state="serving"))
        for event in self.links.poll(time.monotonic()):
            if isinstance(event, LinkUp):
                self.peers.add(event.key)
                lane = event.lane
                tell(
                    event="LinkUp",
                    key=text(event.key),
                    epoch=event.epoch,
                    lane=lane.label,
                    fence=lane.fence,
                    reason=lane.reason,
                    same_host=lane.same_host,
                    transport=lane.transport,
                    slow=lane.slow,
                    rails=lane.rails,
                    probes=lane.probes,
                )
            elif isinstance(event, Received):
                tell(
                    event="Received",
                    key=text(event.key),
                    message=type(event.message).__name__,
                    epoch=event.message.epoch,
                )
            elif not isinstance(event, PeerBeat):
                fields = event._asdict()
                key = fields.pop("key")
                tell(event=type(event).__name__, key=key and text(key), **fields)

    def do(self, command: dict[str, Any]) -> object:
        key = LinkKey(bytes.fromhex(command["key"][0]), command["key"][1]) if "key" in command else None
        size = self.layout.page_bytes
        match command["do"]:
            case "address":
                address = self.links.address
                return [address.incarnation.hex(), *address[1:]]
            case "connect":
                incarnation, *rest = command["peer"]
                self.links.connect(PeerAddress(bytes.fromhex(incarnation), *rest))
            case "disconnect":
                self.links.disconnect(key, "asked to")
            case "fence":
                self.links.fence(key, "asked to")
            case "send":
                self.links.send(key, Cancel(ticket=b"t", epoch=command["epoch"], reason="hello"))
            case "fill":
                self.pools.pages.write(command["page"] * size, bytes([command["value"]]) * size)
            case "look":
                return [sorted(set(self.pools.pages.read(page * size, size))) for page in command["pages"]]
            case "push":
                writer = self.links.writer(key, command["writer"], 10.0)
                source = np.array(command["source"], dtype=np.uint32)
                target = np.array(command["target"], dtype=np.uint32)
                for _ in range(command.get("times", 1)):
                    writer.push(
                        PAGE_POOL, self.pools.pages.address, source, target, way=command.get("way", "")
                    )
                bell = Doorbell(ticket=b"t", epoch=command["epoch"], status="landed")
                from kvrail.transfer.wire import encode

                writer.ring(encode(bell))
                self.writers.append(writer)
            case "freeze_steps":
                self.moving = False
            case "fds":
                return len(os.listdir("/proc/self/fd"))
            case "unproven":
                return [[*text(key), epoch] for key, epoch in self.links.unproven]
            case "close":
                return self.close()
            case other:
                raise AssertionError(other)
        return None

    def close(self) -> bool:
        self.writers.clear()
        unmappable = self.links.close()
        if unmappable:
            self.pools.close()
            self.reactor.close()
            self.context.close()
        else:
            self.pools.leave_open()
        return unmappable


def gpu_of(cuda: Any, mps: str) -> Gpu | None:
    return None if cuda is None else Gpu(uuid=cuda.uuid, name=cuda.name, mps=mps)


def text(key: LinkKey) -> list[object]:
    return [key.incarnation.hex(), key.rank]


def tell(**fields: object) -> None:
    print(json.dumps(fields, default=str), flush=True)


def main() -> None:
    peer = Peer(json.loads(sys.argv[1]))
    tell(event="Ready", key=text(peer.key))
    stdin = ""
    os.set_blocking(0, False)
    while True:
        select.select([0, peer.links.fileno()], [], [], 0.02)
        peer.turn()
        try:
            data = os.read(0, 65536).decode()
        except BlockingIOError:
            continue
        if not data:
            return  # The test has gone.
        *lines, stdin = (stdin + data).split("\n")
        for line in lines:
            command = json.loads(line)
            try:
                tell(answer=command["id"], value=peer.do(command))
            except Exception as error:
                tell(answer=command["id"], error=f"{type(error).__name__}: {error}")
            if command["do"] == "close":
                return


if __name__ == "__main__":
    main()
