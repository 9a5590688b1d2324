# SPDX-License-Identifier: Apache-2.0
"""A completion rank over a real ledger, without links or a model: what it tells its front, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvrail.runtime.completion import Completion
from kvrail.runtime.messages import Granted, Sampling, Submit
from kvrail.transfer.layout import PageLayout
from kvrail.transfer.link_events import LaneInfo, LinkKey, LinkUp
from kvrail.transfer.pages import PagePool
from kvrail.transfer.receiver import Receiver
from kvrail.transfer.wire import pack_u32

__all__ = ["OTHER", "A", "B", "Bench"]

LAYOUT = PageLayout(model_id="m", layers=1, kv_heads=1, head_dim=1, dtype="float32", page_tokens=16)
A, B, OTHER = (LinkKey(name * 16, 0) for name in (b"a", b"b", b"o"))
SAMPLING = Sampling(max_tokens=4, seed=1)


class Bench:
    """A real ledger over a pool of 40 pages (16 a link, 4 kept back); the engine and the links only take notes."""

    def __init__(self, seats: int = 8) -> None:
        self.sent: list[Any] = []
        self.local: list[str] = []
        self.resumed: list[tuple[str, dict[int, int]]] = []
        self.adopted: list[tuple[str, dict[int, int]]] = []
        pool = PagePool(40, growth_reserve=4)
        self.receiver = Receiver(pool, LAYOUT, incarnation=b"c" * 16, rank=0, link_share=0.4)
        for key in (A, B):
            self.receiver.link_up(0, key, 1, "worker")
        engine: Any = SimpleNamespace(
            layout=LAYOUT,
            vocab_size=100,
            add=lambda request, tokens, sampling, cache: self.local.append(request),
            resume=lambda request, tokens, sampling, first_tokens, cache: self.resumed.append(
                (request, first_tokens)
            ),
            adopt=lambda request, tokens, sampling, first_tokens, **landed: self.adopted.append(
                (request, first_tokens)
            ),
            abort=lambda request: None,
            prefix_keys=lambda tokens, cache: [],
            has_work=True,
        )
        links: Any = SimpleNamespace(send=lambda key, message: None, fence=lambda key, reason: None)
        self.role = Completion(
            engine=engine,
            pool=pool,
            pools=SimpleNamespace(),  # type: ignore[arg-type]
            links=links,
            receiver=self.receiver,
            send=self.sent.append,
            verify_share=0.0,
            seats=seats,
            largest_ticket=16,
        )

    def link_up(self, *keys: LinkKey, epoch: int = 2) -> None:
        """Those links work, in a new epoch; from here on the rank knows of them, and not only its ledger."""
        for key in keys:
            self.role.on_link(0, LinkUp(key, epoch, LaneInfo("put", "tcp", "4 KiB pages", "worker")))
        self.sent.clear()

    def submit(self, request: str, peer: LinkKey, pages: int, **options: Any) -> None:
        """A request for a prompt of so many pages."""
        tokens = pack_u32([1] * (pages * 16))
        self.role.handle(
            0,
            Submit(request_id=request, tokens=tokens, sampling=SAMPLING, peer=tuple(peer), **options),
        )

    def told(self, now: float = 1) -> list[Any]:
        """What the front hears in one turn."""
        self.role.tick(now)
        sent = list(self.sent)
        self.sent.clear()
        return sent

    def granted(self, now: float = 1) -> list[str]:
        """The requests that get their tickets in one turn; the rest stays in `sent`."""
        self.role.tick(now)
        found = [message.request_id for message in self.sent if isinstance(message, Granted)]
        self.sent[:] = [message for message in self.sent if not isinstance(message, Granted)]
        return found
