# SPDX-License-Identifier: Apache-2.0
"""Two PEs, one of which is killed or stands still: the other gets its requests, also where the CE never prefills."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.asking import Asking, ask, make_prompt
from kit.breakable import COMMON, LONG, wait_idle
from kit.cluster import Server, serving, wait_until
from kit.slow_model import write_slow_model

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(240)]


class Two:
    """The single engine, two PEs that compute in small steps, a CE that falls back (lane shm) and one that never does
    (lane put/tcp, whose pages a fence frees).
    """

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self.model = write_slow_model(self.folder / "model")
        self.single = self._start("single", "--kv-pages", "256")
        self.pes = [self._start_pe(), self._start_pe()]
        urls = [word for pe in self.pes for word in ("--pe-url", pe.url)]
        ce = ("--kv-pages", "256", "--link-share", "0.4", *urls)
        self.auto = self._start("ce", *ce)
        self.never = self._start(
            "ce", *ce, "--local-prefill", "never", "--lane", "put", "--put-transport", "tcp"
        )
        self.single.wait_ready()

    def _start(self, role: str, *flags: str, port: int | None = None) -> Server:
        server = Server(role, self.model, self.folder, *COMMON, *flags, port=port)
        self._stack.enter_context(serving(server))
        return server

    def _start_pe(self, step: int = 16, port: int | None = None) -> Server:
        self._step = step
        return self._start("pe", "--max-num-batched-tokens", str(step), "--kv-pages", "160", port=port)

    def whole(self, step: int = 16) -> Two:
        """Both PEs run, with steps of so many tokens, and are linked with both CEs."""
        for pe in self.pes:
            if pe.process.poll() is None and step != self._step:
                pe.stop()
        for number, pe in enumerate(self.pes):
            if pe.process.poll() is not None:
                self.pes[number] = self._start_pe(step, pe.port)
        for server in (*self.pes, self.auto, self.never):
            server.wait_ready()
        for ce in (self.auto, self.never):
            wait_until(lambda ce=ce: self.links_up(ce) == 2, 60, "both PEs are linked", ce, *self.pes)
        return self

    def links_up(self, ce: Server) -> int:
        return [link["state"] for link in ce.http.get("/lanes").json()["links"]].count("up")

    def begin(self, ce: Server) -> tuple[Asking, Server, Server]:
        """A long request, some of whose pages have been pushed; who pushes them, and the other PE."""
        before = [pe.metric("kvrail_link_pages_total") for pe in self.pes]
        asking = Asking(ce, make_prompt(2 * LONG))

        def pushing() -> list[Server]:
            return [
                pe
                for pe, count in zip(self.pes, before, strict=True)
                if pe.metric("kvrail_link_pages_total") > count
            ]

        wait_until(lambda: bool(pushing()), 30, "pages are pushed", ce, *self.pes)
        (busy,) = pushing()
        assert not asking.first_token.is_set()
        return asking, busy, self.pes[1 - self.pes.index(busy)]

    def check(self, answer: Asking) -> None:
        """Prefilled elsewhere, and the single engine's answer."""
        assert (answer.status, answer.error, answer.torn) == (200, "", False), answer.summary
        assert answer.route == "remote"
        assert answer.tokens == ask(self.single, answer.prompt, answer.max_tokens).tokens


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    with contextlib.ExitStack() as stack:
        yield Two(tmp_path_factory.mktemp("two"), stack)


@pytest.mark.parametrize("how", ["killed", "frozen"])
@pytest.mark.parametrize("policy", ["auto", "never"])
def test_requests_of_a_lost_engine_go_to_the_other_one(two: Two, how: str, policy: str) -> None:
    two.whole()
    ce = two.auto if policy == "auto" else two.never
    moves, local = ce.metric("kvrail_prefill_moves_total"), ce.metric("kvrail_prefills_local_total")
    asking, lost, other = two.begin(ce)
    lost.kill() if how == "killed" else lost.freeze()
    try:
        two.check(asking.wait())
        # New ones, too: they never meet the lost one.
        two.check(ask(ce, make_prompt(50)))
        assert ce.metric("kvrail_prefill_moves_total") == moves + 1
        assert ce.metric("kvrail_prefills_local_total") == local
    finally:
        lost.thaw()
    wait_idle(ce, other)
    if how == "frozen":
        wait_idle(lost)


def test_a_first_token_that_is_out_stays_when_the_other_engine_takes_over(two: Two) -> None:
    """One step for the whole prompt, so that all its pages travel behind the first token, over tcp."""
    two.whole(step=2048)
    ce = two.never
    for _ in range(16):
        moves, landed = ce.metric("kvrail_prefill_moves_total"), ce.metric("kvrail_ticket_landed_total")
        asking = Asking(ce, make_prompt(2 * LONG))
        assert asking.first_token.wait(60)
        # Who has it cannot be asked as quickly as that.
        for pe in two.pes:
            pe.freeze()
        try:
            time.sleep(0.4)  # the CE's counters are at most a quarter of a second old
            first = list(asking.tokens)
            late = ce.metric("kvrail_ticket_landed_total") > landed or len(first) > 1
            two.pes[0].thaw()
            asking.wait()
        finally:
            two.pes[1].thaw()
        two.check(asking)
        assert asking.tokens[:1] == first[:1]
        if not late and ce.metric("kvrail_prefill_moves_total") > moves:
            break
    else:
        raise AssertionError("the doorbell was always faster, or the first PE had it")
    wait_idle(ce, *two.pes)
