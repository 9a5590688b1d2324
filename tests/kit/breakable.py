# SPDX-License-Identifier: Apache-2.0
"""A split system for tests that break it: two CEs, one PE that may be killed and replaced, and the single engine.

The PE computes in small steps, so that a long prompt is pushed in many pieces. `ce` gets its pages over lane shm,
`ce_tcp` over put/tcp; a third one over stream is started when a test asks for it (`over`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kit.asking import Asking, ask, make_prompt
from kit.cluster import Server, serving, wait_until
from kit.slow_model import write_slow_model

__all__ = [
    "COMMON",
    "LONG",
    "PAGE_TOKENS",
    "SMALL_LONGEST",
    "Breakable",
    "breakable_split",
    "held",
    "wait_idle",
]

PAGE_TOKENS = 16
# A prompt of thirty pages, which the PE computes in steps of one page.
LONG = 480
# What fits into the pool of `Breakable.small`.
SMALL_LONGEST = 640
COMMON = ("--dtype", "float32", "--page-tokens", str(PAGE_TOKENS), "--log-level", "debug")
# Whatever a role holds for requests; all of it is 0 when none is there.
_HELD = (
    "kvrail_pages_held",
    "kvrail_tickets",
    "kvrail_quarantined_pages",
    "kvrail_requests_open",
    "kvrail_rank_requests",
    "kvrail_sequences_running",
    "kvrail_sequences_waiting",
    "kvrail_front_waiting",
)


def held(server: Server) -> dict[str, float]:
    """What a role holds now, by metric; empty when it holds nothing."""
    return {name: value for name in _HELD if (value := server.metric(name))}


def wait_idle(*servers: Server, within_s: float = 30) -> None:
    """Return when every role holds nothing, by what its rank reported after this call."""

    def fresh(server: Server) -> bool:
        # A rank reports four times a second, at the end of a turn: two turns later it has seen what was sent to it.
        before = server.metric("kvrail_steps_total")
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            if server.metric("kvrail_steps_total") >= before + 2:
                return True
            time.sleep(0.05)
        return False

    def idle() -> bool:
        return all(fresh(server) and not held(server) for server in servers)

    try:
        wait_until(idle, within_s, "nothing is held", *servers)
    except AssertionError as error:
        found = {server.role: held(server) for server in servers}
        raise AssertionError(f"held: {found}\n{error}") from None
    for server in servers:
        assert "kvrail_pages_held" in server.http.get("/metrics").text


class Breakable:
    """See above. `ask_expected` compares with the single engine."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self.model = write_slow_model(folder / "model")
        self.single = self._start("single", "--kv-pages", "256")
        self._pe = self._start_pe(None, ())
        url = self._pe.url
        self.ce = self.start_ce("--pe-url", url)
        self.ce_tcp = self.start_ce("--pe-url", url, "--lane", "put", "--put-transport", "tcp")
        self.by_lane = {"shm": self.ce, "put/tcp": self.ce_tcp}
        self._pe_flags: tuple[str, ...] = ()
        self._small: Server | None = None
        self._gone: set[object] = set()
        self.single.wait_ready()
        self.pe()

    def _start(self, role: str, *flags: str, port: int | None = None) -> Server:
        server = Server(role, self.model, self.folder, *COMMON, *flags, port=port)
        self._stack.enter_context(serving(server))
        return server

    def start_ce(self, *flags: str) -> Server:
        """One more CE. It ends with the whole system."""
        return self._start("ce", "--kv-pages", "256", "--link-share", "0.6", *flags)

    def over(self, lane: str) -> Server:
        """The CE whose pages come over that lane (shm, put/tcp, stream); linked with the PE."""
        if lane not in self.by_lane:
            self.by_lane[lane] = self.start_ce("--pe-url", self.pe().url, "--lane", lane)
            self.wait_linked(self.by_lane[lane].wait_ready())
        return self.by_lane[lane]

    @property
    def ces(self) -> tuple[Server, ...]:
        """All of them."""
        return tuple(self.by_lane.values())

    def _start_pe(self, port: int | None, flags: tuple[str, ...]) -> Server:
        return self._start("pe", "--max-num-batched-tokens", "16", "--kv-pages", "80", *flags, port=port)

    def pe(self, *flags: str) -> Server:
        """The PE, with these extra flags, linked with all CEs: the one that runs, or a new one on the same port."""
        if self._pe.process.poll() is not None or self._pe_flags != flags:
            self.replace_pe(*flags)
        self._pe.wait_ready()
        for ce in self.ces:
            ce.wait_ready()
            self.wait_linked(ce)
        return self._pe

    def replace_pe(self, *flags: str) -> Server:
        """Start a new PE on the same port, without waiting for it."""
        if self._pe.process.poll() is None:
            self._pe.stop()
        # A CE may take a moment to see that the old one is gone; a link to that one is no link.
        self._gone |= {link["peer"] for ce in self.ces for link in self.links(ce)}
        self._pe, self._pe_flags = self._start_pe(self._pe.port, flags), flags
        return self._pe

    def small(self, lane: str = "auto") -> Server:
        """A CE with four seats and room for four small prompts, that never prefills; linked with the PE. `lane`: of one
        that has to be started.
        """
        pe = self.pe()
        if self._small is None or self._small.process.poll() is not None:
            limits = ("--kv-pages", "48", "--link-share", "0.9", "--max-num-seqs", "4", "--max-queue", "3")
            self._small = self.start_ce(
                "--pe-url", pe.url, "--lane", lane, "--local-prefill", "never", *limits
            )
        self.wait_linked(self._small.wait_ready())
        return self._small

    def wait_linked(self, ce: Server, within_s: float = 40) -> None:
        """Return when `ce` has a link to the present PE that works."""

        wait_until(lambda: self.linked(ce), within_s, f"{ce.role} {ce.port} is linked", ce, self._pe)

    def linked(self, ce: Server) -> bool:
        """Whether the link of `ce` to the present PE works."""
        return [link["state"] for link in self.links(ce) if link["peer"] not in self._gone] == ["up"]

    def wait_unlinked(self, within_s: float = 20) -> None:
        """Return when the CEs have seen that the PE is gone."""
        ces = self.ces
        wait_until(lambda: not any(self.linked(ce) for ce in ces), within_s, "all links are down", *ces)

    def links(self, ce: Server) -> list[dict[str, object]]:
        """The links of a CE to whoever is at the PE's URL now, as /lanes shows them."""
        found = ce.http.get("/lanes").json()["links"]
        return [link for link in found if link["peer_url"] == self._pe.url]

    def tokens(self, prompt: Sequence[int], max_tokens: int) -> list[str]:
        """What the single engine answers."""
        answer = ask(self.single, prompt, max_tokens)
        assert answer.status == 200, answer.summary
        assert not answer.error
        return answer.tokens

    def begin_push(self, ce: Server, length: int = LONG, max_tokens: int = 6, longest: int = 1200) -> Asking:
        """A request of which some pages have been pushed to `ce`, while at least half of them are still to come.

        `longest`: how long the prompt may become where that takes several attempts.
        """
        while True:
            before = self._pe.metric("kvrail_link_pages_total")
            asking = Asking(ce, make_prompt(length), max_tokens)

            def pushed(before: float = before) -> float:
                return self._pe.metric("kvrail_link_pages_total") - before

            wait_until(lambda read=pushed: read() > 0, 30, "pages are pushed", self._pe, ce)
            if not asking.first_token.is_set() and pushed() <= length / PAGE_TOKENS / 2:
                return asking
            # The PE reports four times a second, which was too late this time.
            self.check(asking.wait())
            length = min(2 * length, longest)

    def check(self, answer: Asking) -> None:
        """A whole answer, equal to the single engine's."""
        assert answer.status == 200, answer.summary
        assert not answer.error, answer.summary
        assert not answer.torn, answer.summary
        assert answer.tokens == self.tokens(answer.prompt, answer.max_tokens)


@contextlib.contextmanager
def breakable_split(folder: Path) -> Iterator[Breakable]:
    """A running system; nothing of it outlives the block."""
    with contextlib.ExitStack() as stack:
        yield Breakable(folder, stack)
    # Whatever was done to them: no role had an error that it did not expect.
    for log in folder.glob("*.log"):
        text = log.read_text(errors="replace")
        assert "Traceback" not in text, f"{log.name}: {text[text.index('Traceback') :][:4000]}"
