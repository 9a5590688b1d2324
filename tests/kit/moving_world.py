# SPDX-License-Identifier: Apache-2.0
"""A completion rank between a front, an engine and five prefill engines that may do anything, with all of it watched.

Completion, ledger, pool and checksums are the real ones. Simulated: the front (which believes what it is told, and
checks it), the engine (which owns pages until a sequence ends), the links, and the prefill engines behind them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from kvrail.runtime.completion import Completion
from kvrail.runtime.engine_protocol import StepOutput
from kvrail.runtime.messages import (
    Abort,
    Deferred,
    Failed,
    Granted,
    Move,
    Output,
    Outputs,
    PrefillFailed,
    Sampling,
    Stranded,
    Submit,
)
from kvrail.transfer.checksums import pack_checksums, page_checksums
from kvrail.transfer.errors import LinkLost
from kvrail.transfer.layout import PageLayout
from kvrail.transfer.link_events import (
    LaneInfo,
    LinkDown,
    LinkKey,
    LinkUp,
    Proven,
    Received,
    Recovered,
    Suspect,
)
from kvrail.transfer.pages import PagePool
from kvrail.transfer.receiver import Receiver
from kvrail.transfer.wire import (
    Cancel,
    Doorbell,
    FirstSample,
    FirstToken,
    Grant,
    HandOff,
    LinkMessage,
    Quiesced,
    pack_u32,
    unpack_u32,
)

__all__ = ["MovingWorld", "Peer"]

LAYOUT = PageLayout(model_id="m", layers=1, kv_heads=1, head_dim=1, dtype="float32", page_tokens=16)
PAGES, LARGEST = 60, 16
# Prefill engines sample below this, the engine here samples it.
OURS = 50
# So long a request may take whatever the prefill engines do: a wait for room and the life of a ticket, three times.
ENDS_WITHIN_S = 3 * (30 + 30 + 10)


@dataclass(eq=False)
class Asked:
    """A request, as its front and its client know it. `asked`: the peers, in order; `ahead`: its call without a grant,
    `deferred`: one that gets none.
    """

    id: str
    n: int
    pages: int
    asked: list[LinkKey]
    fallback: bool
    calls: list[bytes] = field(default_factory=list)
    ticket: bytes = b""
    ahead: bytes = b""
    deferred: bytes = b""
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    end: str = ""

    @property
    def open(self) -> list[int]:
        return [choice for choice in range(self.n) if choice not in self.ended] if not self.end else []


@dataclass(eq=False)
class Prefill:
    """A ticket at a prefill engine. `first`: what it has sampled."""

    grant: Grant
    first: HandOff | None = None
    cancelled: bool = False


@dataclass(eq=False)
class Peer:
    """One prefill engine on its host. `cut`: nothing passes, and the rank has not heard of it yet."""

    key: LinkKey
    lane: LaneInfo
    up: bool = False
    cut: bool = False
    silent: bool = False
    epoch: int = 0
    unproven: list[int] = field(default_factory=list)
    prefills: dict[bytes, Prefill] = field(default_factory=dict)


class Later(Executor):
    """Does what it was given when it is told to."""

    def __init__(self) -> None:
        self.given: list[tuple[Future[Any], Any, tuple[Any, ...]]] = []

    def submit(self, work: Any, /, *arguments: Any, **_: Any) -> Future[Any]:
        self.given.append((Future(), work, arguments))
        return self.given[-1][0]

    def run(self) -> None:
        for future, work, arguments in self.given:
            future.set_result(work(*arguments))
        self.given.clear()


class Sequences:
    """The engine: what it was given, until that has ended. It frees its pages itself, as the real one."""

    layout, vocab_size, has_work = LAYOUT, 100, True

    def __init__(self, world: MovingWorld) -> None:
        self.world = world
        self.load = Counter[str]()
        self.open: dict[str, set[int]] = {}
        self.owner: dict[str, str] = {}
        # What the front must have heard before anything comes behind it.
        self.behind: dict[str, Mapping[int, int]] = {}

    def prefix_keys(self, *_: Any) -> list[bytes]:
        return []

    def add(self, name: str, tokens: Any, sampling: Sampling, cache: Any) -> None:
        self._take(name, range(sampling.n), {})
        self.world.seen["prefilled here"] += 1

    def resume(
        self, name: str, tokens: Any, sampling: Sampling, first_tokens: Mapping[int, int], cache: Any
    ) -> None:
        self._take(name, first_tokens, first_tokens)
        self.world.seen["resumed here"] += 1

    def adopt(
        self,
        name: str,
        tokens: Any,
        sampling: Sampling,
        *,
        owner: str,
        first_tokens: Mapping[int, int],
        **_: Any,
    ) -> None:
        self._take(name, first_tokens, first_tokens)
        assert len(self.world.pool.pages_of(owner)) == self.world.requests[name].pages, (
            "KV of the whole prompt"
        )
        self.owner[name] = owner
        self.world.seen["adopted"] += 1

    def _take(self, name: str, choices: Sequence[int] | Mapping[int, int], firsts: Mapping[int, int]) -> None:
        assert name not in self.open, f"the engine gets {name} twice"
        assert choices, "a request without an open choice"
        self.open[name], self.behind[name] = set(choices), dict(firsts)

    def abort(self, name: str, choice: int | None = None) -> None:
        self.end(name, self.open.get(name, ()) if choice is None else (choice,))

    def end(self, name: str, choices: Any) -> None:
        if name in self.open:
            self.open[name] -= set(choices)
            if not self.open[name]:
                del self.open[name], self.behind[name]
                if owner := self.owner.pop(name, None):
                    self.world.pool.release(owner)


class MovingWorld:
    """`seen` counts what has happened. All `pick`s choose among what there is; nothing happens when there is none."""

    def __init__(self, seats: int = 6) -> None:
        self.now = 0.0
        self.seen: Counter[str] = Counter()
        self.pool = PagePool(PAGES, growth_reserve=4)
        self._minted = 0
        self.receiver = Receiver(
            self.pool, LAYOUT, incarnation=b"c" * 16, rank=0, link_share=0.4, random=self._mint
        )
        self.engine, self.checks = Sequences(self), Later()
        memory = np.zeros(PAGES * LAYOUT.page_bytes, dtype=np.uint8)
        self.memory: Any = SimpleNamespace(
            array=memory, address=memory.ctypes.data, unit_bytes=LAYOUT.page_bytes, name="pages", units=PAGES
        )
        self._sent: list[Any] = []
        links: Any = SimpleNamespace(send=self._on_link, fence=self._fence, set_beat=None)
        self.role = Completion(
            engine=self.engine,  # type: ignore[arg-type]
            pool=self.pool,
            pools=SimpleNamespace(pages=self.memory, state=None, cuda=None),  # type: ignore[arg-type]
            links=links,
            receiver=self.receiver,
            send=self._sent.append,
            verify_share=0.0,
            seats=seats,
            largest_ticket=LARGEST,
            checksums=self.checks,
        )
        lanes = (LaneInfo("put", "tcp", "m", "worker"), LaneInfo("shm", "memfd", "m", "process"))
        self.peers = [Peer(self._born(), lanes[place % 2]) for place in range(5)]
        self.requests: dict[str, Asked] = {}
        self._asks: dict[bytes, Asked] = {}
        self._stranded: list[Stranded] = []
        self._next_ticket = b""

    def _mint(self, size: int) -> bytes:
        self._minted += 1
        return self._minted.to_bytes(size, "big")

    def _born(self) -> LinkKey:
        return LinkKey(self._mint(16), 0)

    # --- the client and the front -----------------------------------------------------------------------------

    def submit(self, place: int, pages: int, n: int, fallback: bool, ahead: bool, late: bool) -> None:
        """A request comes in. `ahead`: its prefill engine has been called already; `late`: some time ago."""
        one = Asked(f"r{len(self.requests)}", n, pages, [self.peers[place].key], fallback)
        self.requests[one.id] = one
        called = None
        if ahead and self._next_ticket:
            called, one.ahead = (self._next_ticket, self.now - (9 if late else 0)), self._next_ticket
            self._next_ticket = b""
            one.calls.append(one.ahead)
        self._tell_rank(
            Submit(
                request_id=one.id,
                tokens=pack_u32([1] * (16 * pages)),
                sampling=Sampling(max_tokens=4, seed=1, n=n),
                peer=tuple(one.asked[0]),
                called=called,
                fallback=fallback,
            )
        )

    def leave(self, pick: int, choice: int | None) -> None:
        """The client has gone, or one of its choices has ended by a stop string."""
        if one := _picked([one for one in self.requests.values() if one.open], pick):
            told = [choice for choice in one.open if choice in one.tokens]
            if choice is not None and told and len(one.open) > 1:
                one.ended.add(_picked(told, choice))
                self._tell_rank(Abort(request_id=one.id, choice=_picked(told, choice)))
            else:
                self._end(one, "left")
                self._tell_rank(Abort(request_id=one.id))

    def call_fails(self, pick: int) -> None:
        """The prefill engine does not take a call; perhaps one that its request has left behind."""
        if one := _picked([one for one in self.requests.values() if one.open and one.calls], pick):
            ticket = _picked(one.calls, pick % 3)
            self._tell_rank(PrefillFailed(request_id=one.id, ticket=ticket, reason="HTTP 429"))

    def answer(self, pick: int, which: int) -> None:
        """Who is asked next, if anybody."""
        if found := _picked(self._stranded, pick):
            self._stranded.remove(found)
            one = self.requests[found.request_id]
            peer = (None, *found.others)[which % (1 + len(found.others))]
            if one.open and peer is not None:
                one.asked.append(LinkKey(*peer))
                self.seen[f"asked {len(one.asked)}"] += 1
            self._tell_rank(Move(request_id=one.id, peer=peer))

    def _tell_rank(self, message: Any) -> None:
        self.role.handle(self.now, message)
        self._hear()

    def _hear(self) -> None:
        while self._sent:
            message = self._sent.pop(0)
            match message:
                case Outputs():
                    for output in message.items:
                        self._output(self.requests[output.request_id], output)
                case Failed():
                    one = self.requests[message.request_id]
                    self._end(one, "failed")
                    lacks_room = "no room" in message.reason
                    assert not one.fallback or message.status != 503 or lacks_room, "it can be prefilled here"
                case Granted():
                    one = self._not_over(message.request_id)
                    assert message.ticket != one.deferred, "nothing was to come of that call"
                    assert self._asks.setdefault(message.ticket, one) is one
                    self.seen["granted as called for"] += message.ticket == one.ahead
                    one.ticket, one.ahead = message.ticket, b""
                    one.calls.append(message.ticket)
                    self._next_ticket = message.next_ticket or self._next_ticket
                case Deferred():
                    one = self._not_over(message.request_id)
                    assert one.ahead
                    one.deferred, one.ahead = one.ahead, b""
                case Stranded():
                    one = self._not_over(message.request_id)
                    assert len(one.asked) < 3, "three engines are enough"
                    assert message.others
                    assert not set(message.others) & set(one.asked), "nobody is asked twice"
                    one.ticket = one.ahead = b""
                    self.seen["stranded behind a first token"] += bool(one.tokens)
                    self._stranded.append(message)
                case _:
                    pass  # reports of links

    def _not_over(self, request_id: str) -> Asked:
        one = self.requests[request_id]
        assert one.open, f"{one} is over"
        return one

    def _end(self, one: Asked, how: str) -> None:
        assert not one.end, f"{one} ends twice"
        assert len(one.ended) < one.n or how == "done"
        one.end = how
        self.seen[how] += 1

    def _output(self, one: Asked, output: Output) -> None:
        if one.end == "left" or (output.choice in one.ended and output.choice not in one.tokens):
            return  # It was on its way.
        known = one.tokens.setdefault(output.choice, [])
        for token in unpack_u32(output.tokens).tolist():
            assert token == OURS or not known, "what is out stays, and what comes behind it is decoded"
            known.append(token)
        if output.choice in one.ended:
            return
        assert not one.end, f"{output} behind the end"
        if output.finish_reason is not None:
            one.ended.add(output.choice)
            if not one.open:
                self._end(one, "done")

    # --- the links and what is behind them --------------------------------------------------------------------

    def _at(self, key: LinkKey) -> Peer | None:
        return next((peer for peer in self.peers if peer.key == key), None)

    def _on_link(self, key: LinkKey, message: LinkMessage) -> None:
        peer = self._at(key)
        if peer is None or not peer.up or peer.cut:
            raise LinkLost("gone")
        if isinstance(message, Grant):
            assert message.ticket not in peer.prefills
            peer.prefills[message.ticket] = Prefill(message)
        elif isinstance(message, Cancel) and message.ticket in peer.prefills:
            peer.prefills[message.ticket].cancelled = True

    def _fence(self, key: LinkKey, reason: str) -> None:
        if peer := self._at(key):
            peer.cut = True
            peer.prefills.clear()
            self.seen["fenced"] += 1

    def link(self, place: int, what: str) -> None:
        """What happens to the link of that host, or to its process."""
        peer = self.peers[place]
        if what == "up" and not peer.up:
            peer.epoch, peer.up, peer.cut, peer.silent = peer.epoch + 1, True, False, False
            self._event(LinkUp(peer.key, peer.epoch, peer.lane))
        elif what == "cut" and peer.up:
            peer.cut = True
            peer.prefills.clear()
        elif what == "silent" and peer.up and not peer.silent:
            peer.silent = True
            self._event(Suspect(peer.key))
        elif what == "speaks" and peer.up and peer.silent:
            peer.silent = False
            self._event(Recovered(peer.key))
        elif what in ("down", "dies") and peer.up:
            peer.up = False
            peer.prefills.clear()
            peer.unproven.append(peer.epoch)
            self._event(LinkDown(peer.key, peer.epoch, "gone"))
        if (what == "proof" and peer.lane.fence == "worker") or what == "dies":
            while peer.unproven:
                self._event(Proven(peer.key, peer.unproven.pop(), peer.lane.fence))
        if what == "dies":
            self.peers[place] = Peer(self._born(), peer.lane)

    def _event(self, event: Any) -> None:
        self.role.on_link(self.now, event)
        self._hear()

    def peer_speaks(self, place: int, pick: int, word: str, token: int, ends: int) -> None:
        """One message about one of its tickets. `token`, `ends` (bits): of the choices, when it samples them now."""
        peer = self.peers[place]
        if not peer.up or peer.cut or (found := _picked(list(peer.prefills.items()), pick)) is None:
            return
        ticket, prefill = found
        if prefill.first is None and ticket in self._asks:
            prefill.first = _hand_off(prefill.grant.token_end, self._asks[ticket].n, token, ends)
        if word == "quiesced" and not prefill.cancelled:
            word = "landed"
        first, epoch = NONSENSE if "nonsense" in word else prefill.first, prefill.grant.epoch
        if first is None:
            word = "failed"
        message: LinkMessage
        if "first" in word:
            assert first is not None
            return self._event(Received(peer.key, FirstToken(ticket=ticket, epoch=epoch, hand_off=first)))
        if "landed" in word:
            message = Doorbell(
                ticket=ticket,
                epoch=epoch,
                status="landed",
                token_end=prefill.grant.token_end,
                hand_off=first,
                checksums=self._sums(prefill.grant, word)
                if word in ("landed summed", "landed damaged")
                else None,
            )
        elif word == "quiesced":
            message = Quiesced(ticket=ticket, epoch=epoch, proven=bool(ends % 2))
        else:
            message = Doorbell(ticket=ticket, epoch=epoch, status="failed", reason="no")
        del peer.prefills[ticket]
        self._event(Received(peer.key, message))

    def _sums(self, grant: Grant, word: str) -> bytes:
        sums = page_checksums(self.memory, unpack_u32(grant.pages))
        sums[0] ^= np.uint64(word == "landed damaged")
        return pack_checksums(sums)

    # --- this rank's loop -------------------------------------------------------------------------------------

    def step(self, pick: int, finish: Any) -> None:
        """The engine makes a token of each choice; those of some requests end."""
        outputs = []
        for place, (name, choices) in enumerate(list(self.engine.open.items())):
            for choice in sorted(choices):
                reason = finish if (pick + place + choice) % 3 == 0 else None
                outputs.append(
                    StepOutput(
                        computed=0,
                        cached_tokens=0,
                        sequence_id=name,
                        choice=choice,
                        token=OURS,
                        finish_reason=reason,
                    )
                )
                if reason:
                    self.engine.end(name, [choice])
        self.role.on_step(self.now, outputs)
        self._hear()

    def turn(self, seconds: float) -> None:
        """Time passes, and the loop comes round."""
        self.now += seconds
        self.role.tick(self.now)
        self._hear()
        self.check()

    # --- what must hold ---------------------------------------------------------------------------------------

    def check(self) -> None:
        """At the end of a turn."""
        self.pool.check()
        gauges = self.receiver.gauges()
        assert self.pool.quarantined == gauges["quarantined_pages"]
        looked_at = sum(len(arguments[0].pages) for _, _, arguments in self.checks.given)
        running = sum(len(self.pool.pages_of(owner)) for owner in self.engine.owner.values())
        assert self.pool.owned == gauges["ticket_pages"] + running + looked_at
        for one in self.requests.values():
            assert len(set(one.asked)) == len(one.asked) <= 3
        for name, firsts in self.engine.behind.items():
            one = self.requests[name]
            assert self.engine.open[name] == set(one.open), "decoded is what somebody wants"
            for choice in one.open:
                out = one.tokens.get(choice, [])
                assert out[:1] == ([firsts[choice]] if firsts else out[:1]), "decoded behind what is out"
                assert firsts or out[:1] in ([], [OURS]), "prefilled anew behind a first token that is out"
        for peer in self.peers:
            for ticket, prefill in peer.prefills.items() if peer.up and not peer.cut else ():
                one = self._asks[ticket]
                wanted = one.open and one.ticket == ticket
                assert prefill.cancelled or wanted, f"nobody tells the peer that {one} needs it no more"
                assert LinkKey(*peer.key) in one.asked

    def settle(self, silent: Literal["nobody", "engines", "front and engines"]) -> None:
        """Everybody gets an end, also when the prefill engines, and the front, never answer again."""
        waiting = sum(bool(one.open) for one in self.requests.values())
        # Who waits for a seat waits for all those that have one.
        until = self.now + waiting * ENDS_WITHIN_S
        while self.now < until and any(one.open for one in self.requests.values()):
            for place in range(len(self.peers)):
                self._repair(place)
                if silent == "nobody":
                    for _ in range(4):
                        self.peer_speaks(place, 0, "landed", 1, 0)
            if silent != "front and engines":
                self.answer(0, 1)
            self.checks.run()
            for shift in range(3):
                self.step(shift, "stop")
            self.turn(2)
        hung = [one for one in self.requests.values() if one.open]
        assert not hung
        self._let_go()

    def _repair(self, place: int) -> None:
        peer = self.peers[place]
        if peer.cut:
            self.link(place, "down")
        self.link(place, "proof")
        self.link(place, "up")
        self.link(place, "speaks")

    def _let_go(self) -> None:
        """All requests are over: nothing may be held, but for what only the end of a process proves quiet."""
        for _ in range(40):
            for place in range(len(self.peers)):
                self._repair(place)
            self.checks.run()
            self.turn(1)
        for place, peer in enumerate(self.peers):
            if peer.lane.fence == "process":
                self.link(place, "dies")
        self.turn(1)
        assert not self.engine.open
        assert not any(self.receiver.gauges().values()), self.receiver.gauges()
        assert self.receiver.next_deadline() is None
        assert self.pool.free == PAGES
        stats = self.role.stats(0)
        assert not stats.gauges["requests_open"] + stats.gauges["requests_without_room"]
        self.seen.update({name: int(count) for name, count in stats.counters.items()})
        self.role.close()


def _hand_off(prompt_tokens: int, n: int, token: int, ends: int) -> HandOff:
    firsts = [
        FirstSample(token=1 + (token + choice) % 9, finish_reason="stop" if ends >> choice & 1 else None)
        for choice in range(n)
    ]
    return HandOff(
        first_token=firsts[0].token,
        finish_reason=firsts[0].finish_reason,
        seed=1,
        next_position=prompt_tokens + 1,
        others=firsts[1:],
    )


NONSENSE = _hand_off(9999, 1, 1, 0)


def _picked(items: Sequence[Any], pick: int) -> Any:
    """One of `items`, None when there is none; shrinks to the newest."""
    return items[-1 - pick % len(items)] if items else None
