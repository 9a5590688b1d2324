# SPDX-License-Identifier: Apache-2.0
"""The vLLM connector's workers over real links and real memory, with vLLM's steps told by hand."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.vllm_pair import Worker, free_port, ticket, until

pytestmark = pytest.mark.process
Start = Callable[..., Worker]
LANES: dict[str, dict[str, Any]] = {"cma": {}, "tcp": {"put_transport": "tcp"}, "stream": {"lane": "stream"}}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[Worker] = []

    def begin(role: str, extra: dict[str, Any], **more: Any) -> Worker:
        files = {"runtime_dir": str(tmp_path / "run"), "status_file": str(tmp_path / f"status-{len(made)}")}
        made.append(Worker(role, files | extra, **more))
        return made[-1]

    yield begin
    for worker in made:
        worker.close()


class Pair:
    def __init__(
        self, start: Start, ce: dict[str, Any] | None = None, pe: dict[str, Any] | None = None, **both: Any
    ):
        self.start, self.both, self.pe_extra = start, both, pe or {}
        self.port = free_port()
        self.pe = start("kv_producer", {"kv_port": self.port, **self.pe_extra}, **both)
        self.ce = start(
            "kv_consumer", {"peers": [f"127.0.0.1:{self.port}"], **(ce or {})}, **(both | {"blocks": 64})
        )
        self.move("warm", [1], 9)

    def wait_linked(self) -> None:
        """Return when there is a link between the two: a load waits three seconds for one, a busy machine may not."""
        until(lambda: self.ce.links().get(f"127.0.0.1:{self.port}") == "up")

    def move(self, request: str, blocks: list[int], value: float, tokens: int | None = None) -> str:
        """A whole transfer of `blocks` on the PE to the same plus 20 on the CE, told at once."""
        name = ticket()
        tokens = tokens or 16 * len(blocks)
        self.wait_linked()
        self.ce.step(loads=[self.ce.load(request, name, self.port, tokens, [b + 20 for b in blocks])])
        self.pe.step(
            calls=[(request, name, tokens)],
            chunks=[(request, tokens, blocks)],
            compute=[(b, value + b) for b in blocks],
        )
        self.pe.step(finished=[(request, 5, tokens, blocks, None)])
        self.ce.steps_until(lambda ce: request in ce.received)
        self.pe.steps_until(lambda pe: request in pe.sent)
        assert request not in self.ce.failed
        assert self.ce.look([b + 20 for b in blocks]) == [value + b for b in blocks]
        return name

    def check_idle(self) -> None:
        for worker in (self.pe, self.ce):
            assert not any(worker.gauges().values()), worker.gauges()
            worker.step()
            assert not worker.held
            assert len(worker.sent) == len(set(worker.sent))
            assert len(worker.received) == len(set(worker.received))


@pytest.fixture
def pair(start: Start) -> Pair:
    return Pair(start)


@pytest.mark.parametrize("extra", LANES.values(), ids=LANES)
def test_blocks_move_while_the_prompt_is_computed(start: Start, extra: dict[str, Any]) -> None:
    pair = Pair(start, extra, extra)
    name = ticket()
    # 40 tokens: the last block is half full and goes whole.
    pair.ce.step(loads=[pair.ce.load("r", name, pair.port, 40, [30, 8, 11], hand_off=True)])
    pair.pe.step(calls=[("r", name, 40)], chunks=[("r", 20, [2, 3])], compute=[(2, 2.0), (3, 3.0)])
    # The first block is full, and goes ahead; the second may still change.
    pair.pe.steps_until(lambda _: pair.ce.look([30]) == [2.0])
    assert pair.ce.look([8]) == [0.0]
    pair.pe.step(chunks=[("r", 40, [2, 3, 7])], compute=[(3, 33.0), (7, 7.0)])
    pair.ce.step()
    assert "r" not in pair.ce.received
    pair.pe.step(finished=[("r", 77, 40, [2, 3, 7], None)])
    pair.ce.steps_until(lambda ce: "r" in ce.received)
    assert pair.ce.look([30, 8, 11]) == [2.0, 33.0, 7.0]
    assert pair.ce.tokens["r"] == 77
    assert pair.ce.look([31, 9, 12, 0]) == [0.0] * 4
    pair.pe.steps_until(lambda pe: "r" in pe.sent)
    pair.check_idle()


def test_prefill_first_and_grant_after(pair: Pair) -> None:
    """As a router asks that calls one engine after the other: the ticket is the PE's, and known at the end only."""
    name = ticket()
    pair.pe.step(compute=[(4, 4.0), (5, 5.0)])
    pair.pe.step(finished=[("r", 5, 30, [4, 5], ["r", name, 30])])
    assert "r" not in pair.pe.sent
    # All but the last token of the prompt, which the CE computes itself.
    pair.ce.step(loads=[pair.ce.load("r", name, pair.port, 29, [41, 40])])
    pair.ce.steps_until(lambda ce: "r" in ce.received)
    assert pair.ce.look([41, 40]) == [4.0, 5.0]
    assert pair.ce.tokens == {}
    pair.pe.steps_until(lambda pe: "r" in pe.sent)
    pair.check_idle()


def test_several_groups_with_blocks_that_nobody_needs(start: Start) -> None:
    pair = Pair.__new__(Pair)
    pair.port = free_port()
    pair.pe = start("kv_producer", {"kv_port": pair.port}, groups=2)
    pair.ce = start("kv_consumer", {"peers": [f"127.0.0.1:{pair.port}"]}, groups=2, blocks=70)
    pair.wait_linked()
    name = ticket()
    # Group 1 is a sliding window: the CE wants only its last block, and the PE has let the first one go.
    pair.ce.step(loads=[pair.ce.load("r", name, pair.port, 48, [10, 0, 11, 0, 12, 60])])
    pair.pe.step(calls=[("r", name, 48)], chunks=[("r", 16, [1, 21])], compute=[(1, 1.0), (21, 21.0)])
    computed = [(b, float(b)) for b in (2, 3, 22, 23)]
    pair.pe.step(chunks=[("r", 48, [1, 0, 2, 22, 3, 23])], compute=computed)
    pair.pe.step(finished=[("r", 5, 48, [1, 0, 2, 22, 3, 23], None)])
    pair.ce.steps_until(lambda ce: "r" in ce.received)
    assert pair.ce.look([10, 11, 12, 60]) == [1.0, 2.0, 3.0, 23.0]
    assert pair.ce.look([0]) == [0.0]
    pair.pe.steps_until(lambda pe: "r" in pe.sent)
    pair.check_idle()


def test_a_block_out_of_the_window_here_and_wanted_there_fails_the_load(start: Start) -> None:
    pair = Pair.__new__(Pair)
    pair.port = free_port()
    pair.pe = start("kv_producer", {"kv_port": pair.port}, groups=2)
    pair.ce = start("kv_consumer", {"peers": [f"127.0.0.1:{pair.port}"]}, groups=2)
    pair.wait_linked()
    name = ticket()
    pair.pe.step(finished=[("r", 5, 32, [1, 0, 2, 22], ["r", name, 32])])
    pair.ce.step(loads=[pair.ce.load("r", name, pair.port, 32, [10, 30, 11, 31])])
    pair.ce.steps_until(lambda ce: "r" in ce.received)
    assert pair.ce.failed == {"r"}
    assert pair.ce.look([10, 30, 11, 31]) == [0.0] * 4
    pair.pe.steps_until(lambda pe: "r" in pe.sent)
    pair.check_idle()


def test_what_is_here_already_is_not_asked_for(pair: Pair) -> None:
    name = ticket()
    pair.ce.step(loads=[pair.ce.load("r", name, pair.port, 48, [50], start=32)])
    pair.pe.step(
        calls=[("r", name, 48)], chunks=[("r", 48, [5, 6, 7])], compute=[(b, float(b)) for b in (5, 6, 7)]
    )
    pair.pe.step(finished=[("r", 3, 48, [5, 6, 7], None)])
    pair.ce.steps_until(lambda ce: "r" in ce.received)
    assert pair.ce.look([50]) == [7.0]
    # And one that is here whole: the PE lets go at once, and vLLM, which does not wait, hears nothing.
    other = ticket()
    pair.pe.step(finished=[("s", 3, 31, [5, 6], ["s", other, 31])])
    pair.ce.step(loads=[pair.ce.load("s", other, pair.port, 30, [], start=30, unasked=True)])
    pair.pe.steps_until(lambda pe: "s" in pe.sent, 10)
    pair.ce.steps_until(lambda ce: not ce.gauges()["loads"])
    assert "s" not in pair.ce.received
    assert "unsent" not in pair.pe.do(do="counters")
    pair.check_idle()


def test_the_first_token_alone(pair: Pair) -> None:
    """A hand-off whose KV is all here waits for its token only."""
    name = ticket()
    pair.ce.step(loads=[pair.ce.load("r", name, pair.port, 32, [], start=32, hand_off=True)])
    pair.pe.step(calls=[("r", name, 32)], chunks=[("r", 32, [5, 6])])
    pair.pe.step(finished=[("r", 42, 32, [5, 6], None)])
    pair.ce.steps_until(lambda ce: "r" in ce.received)
    assert pair.ce.tokens["r"] == 42
    pair.pe.steps_until(lambda pe: "r" in pe.sent)
    pair.check_idle()


def test_requests_that_are_cancelled(pair: Pair) -> None:
    """In every phase: reported exactly once each, and only when nobody writes into their blocks any more."""
    # Before the PE has begun.
    early = ticket()
    pair.ce.step(loads=[pair.ce.load("early", early, pair.port, 32, [40, 41])])
    pair.ce.step(cancelled=["early"])
    pair.ce.steps_until(lambda ce: "early" in ce.received)
    # While it prefills.
    half = ticket()
    pair.ce.step(loads=[pair.ce.load("half", half, pair.port, 32, [42, 43])])
    pair.pe.step(calls=[("half", half, 32)], chunks=[("half", 16, [5])], compute=[(5, 5.0)])
    pair.pe.steps_until(lambda _: pair.ce.look([42]) == [5.0])
    pair.ce.step(cancelled=["half"])
    pair.ce.steps_until(lambda ce: "half" in ce.received)
    # What the PE computes for them afterwards goes nowhere.
    pair.pe.step(calls=[("early", early, 32)], chunks=[("early", 32, [6, 7]), ("half", 32, [5, 8])])
    pair.pe.step(finished=[("early", 1, 32, [6, 7], None), ("half", 1, 32, [5, 8], None)])
    pair.pe.steps_until(lambda pe: {"early", "half"} <= set(pe.sent))
    assert pair.ce.look([40, 41, 43]) == [0.0] * 3
    # After it has landed, when vLLM may have heard of it already: nothing more.
    pair.move("landed", [5, 6], 50)
    pair.ce.step(cancelled=["landed"])
    # The PE's own request is aborted: the load fails, and is reported once.
    pair.ce.step(loads=[pair.ce.load("gone", other := ticket(), pair.port, 32, [44, 45])])
    pair.pe.step(calls=[("gone", other, 32)], chunks=[("gone", 16, [9])])
    pair.pe.step(finished=[("gone", None, 0, [], None)])
    pair.ce.steps_until(lambda ce: "gone" in ce.received)
    pair.pe.steps_until(lambda pe: "gone" in pe.sent)
    assert pair.ce.failed == {"gone"}
    # A request that nobody ever told of is released at once.
    pair.pe.step(finished=[("unknown", 1, 16, [3], None)])
    pair.pe.steps_until(lambda pe: "unknown" in pe.sent)
    pair.check_idle()


def test_a_preempted_prefill_is_pushed_from_its_new_blocks(pair: Pair) -> None:
    name = ticket()
    pair.pe.step(calls=[("r", name, 32)], chunks=[("r", 16, [5])], compute=[(5, 5.0)])
    # vLLM takes the block away, and gives it to somebody else, before the grant comes.
    pair.pe.step(preempted=["r"], compute=[(5, 99.0)])
    pair.ce.step(loads=[pair.ce.load("r", name, pair.port, 32, [40, 41])])
    pair.pe.step()
    pair.pe.step(chunks=[("r", 32, [6, 7])], compute=[(6, 5.0), (7, 7.0)])
    pair.pe.step(finished=[("r", 1, 32, [6, 7], None)])
    pair.ce.steps_until(lambda ce: "r" in ce.received)
    assert pair.ce.look([40, 41]) == [5.0, 7.0]
    pair.pe.steps_until(lambda pe: "r" in pe.sent)
    pair.check_idle()


def test_a_grant_that_never_comes(start: Start) -> None:
    pair = Pair(start, pe={"meet_s": 0.5})
    # Blocks are held for the time of its own, which begins when the prefill is done.
    pair.pe.step(calls=[("r", ticket(), 16)], chunks=[("r", 16, [5])])
    pair.pe.step(finished=[("r", 1, 16, [5], None)])
    assert 0.3 < pair.pe.steps_until(lambda pe: "r" in pe.sent) < 5
    pair.check_idle()


@pytest.mark.parametrize("extra", LANES.values(), ids=LANES)
def test_the_prefill_engine_is_killed_and_comes_back(start: Start, extra: dict[str, Any]) -> None:
    pair = Pair(start, extra, extra)
    name = ticket()
    pair.ce.step(loads=[pair.ce.load("r", name, pair.port, 32, [42, 43])])
    pair.pe.step(calls=[("r", name, 32)], chunks=[("r", 16, [5])], compute=[(5, 5.0)])
    pair.pe.steps_until(lambda _: pair.ce.look([42]) == [5.0])
    pair.pe.kill()
    pair.ce.steps_until(lambda ce: "r" in ce.received and not ce.held)
    assert pair.ce.failed == {"r"}
    # Nobody is there: a load fails after a short while.
    pair.ce.step(loads=[pair.ce.load("s", ticket(), pair.port, 32, [44, 45])])
    pair.ce.steps_until(lambda ce: "s" in ce.received)
    # On the same port: another peer, and the link is there by itself.
    pair.pe = pair.start("kv_producer", {"kv_port": pair.port, **extra}, **pair.both)
    pair.ce.failed.clear()
    pair.pe.step()
    pair.move("again", [6, 7], 60)
    pair.check_idle()


def test_a_frozen_prefill_engine_keeps_the_blocks_and_not_the_request(pair: Pair) -> None:
    """vLLM hears at once that the load is over, and that its blocks are nobody's until the writer is quiet."""
    name = ticket()
    pair.ce.step(loads=[pair.ce.load("r", name, pair.port, 32, [42, 43])])
    pair.pe.step(calls=[("r", name, 32)], chunks=[("r", 16, [5])], compute=[(5, 5.0)])
    pair.pe.steps_until(lambda _: pair.ce.look([42]) == [5.0])
    pair.pe.freeze()
    # Over cma a frozen writer may go on.
    assert pair.ce.steps_until(lambda ce: "r" in ce.received) < 10
    assert pair.ce.failed == {"r"}
    assert list(pair.ce.held.values()) == [[42, 43]]
    assert pair.ce.gauges()["blocks_held_for"] == 1
    # vLLM may compute the request again under its name, and it may ask for another load meanwhile.
    pair.ce.step(cancelled=["r"])
    pair.ce.step(loads=[pair.ce.load("r", ticket(), pair.port, 32, [44, 45])])
    assert pair.ce.steps_until(lambda ce: ce.received.count("r") == 2) < 10
    assert list(pair.ce.held.values()) == [[42, 43]], "no link, so nothing was granted"
    pair.ce.received.pop()
    pair.pe.thaw()
    pair.ce.steps_until(lambda ce: not ce.held)
    assert pair.ce.received.count("r") == 1
    pair.pe.step(finished=[("r", 1, 32, [5, 6], None)])
    pair.pe.steps_until(lambda pe: "r" in pe.sent)
    pair.check_idle()


def test_the_completion_engine_is_killed(pair: Pair) -> None:
    name = ticket()
    pair.ce.step(loads=[pair.ce.load("r", name, pair.port, 32, [42, 43])])
    pair.pe.step(calls=[("r", name, 32)], chunks=[("r", 16, [5])], compute=[(5, 5.0)])
    pair.pe.steps_until(lambda _: pair.ce.look([42]) == [5.0])
    pair.ce.kill()
    pair.pe.step(finished=[("r", 1, 32, [5, 6], None)])
    pair.pe.steps_until(lambda pe: "r" in pe.sent)
    assert not any(pair.pe.gauges().values())


def test_peers_that_a_front_tells_of(start: Start, tmp_path: Path) -> None:
    """Prefill engines come and go by a file; a link that is no longer wanted ends, with all that it was to bring."""
    ports = [free_port(), free_port()]
    pes = [
        start("kv_producer", {"kv_port": port, "status_file": str(tmp_path / f"{port}")}) for port in ports
    ]
    peers, status = tmp_path / "peers", tmp_path / "status"
    ce = start("kv_consumer", {"peers_file": str(peers), "status_file": str(status)}, blocks=64)

    def tell(*ports: int) -> None:
        (tmp_path / "new").write_text(json.dumps([f"127.0.0.1:{port}" for port in ports]))
        (tmp_path / "new").rename(peers)

    def states(file: Path) -> dict[str, str]:
        links = json.loads(file.read_text())["links"] if file.exists() else []
        return {link["address"]: link["state"] for link in links}

    def until(holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not holds():
            assert time.monotonic() < deadline, status.read_text()
            time.sleep(0.05)

    early = ce.load("early", ticket(), ports[0], 16, [41])
    ce.step(loads=[early])
    ce.steps_until(lambda ce: "early" in ce.received)
    assert ce.failed == {"early"}, "nobody has told of that engine"
    tell(*ports)
    until(lambda: states(status) == {f"127.0.0.1:{port}": "up" for port in ports})
    until(lambda: list(states(tmp_path / f"{ports[0]}").values()) == ["up"])
    name = ticket()
    ce.step(loads=[ce.load("r", name, ports[0], 16, [42]), ce.load("s", ticket(), ports[1], 16, [43])])
    pes[0].step(calls=[("r", name, 16)], chunks=[("r", 16, [5])], compute=[(5, 5.0)])
    pes[0].step(finished=[("r", 1, 16, [5], None)])
    ce.steps_until(lambda ce: "r" in ce.received)
    assert ce.look([42]) == [5.0]
    tell(ports[0])
    ce.steps_until(lambda ce: ce.failed == {"early", "s"})
    # Its process lives, and may write over cma: the block comes back when it does not.
    assert list(ce.held.values()) == [[43]]
    pes[1].kill()
    ce.steps_until(lambda ce: not ce.held)
    until(lambda: list(states(status).values()).count("up") == 1)
    link = next(link for link in json.loads(status.read_text())["links"] if link["state"] == "up")
    assert link["counters"]["bytes"] > 0
    assert not any(ce.gauges().values())


def test_what_is_refused(start: Start, pair: Pair) -> None:
    """Unlisted peers, a ticket twice, another length, no such block: each load is reported once, as failed."""
    ce = pair.ce
    stranger = ce.load("stranger", ticket(), free_port(), 16, [40])
    ce.step(loads=[stranger])
    assert ce.steps_until(lambda ce: "stranger" in ce.received) < 2, "it was looked for"
    name = ticket()
    ce.step(loads=[ce.load("one", name, pair.port, 16, [41]), ce.load("two", name, pair.port, 16, [42])])
    ce.steps_until(lambda ce: "two" in ce.received)
    assert "one" not in ce.received
    outside = ticket()
    ce.step(loads=[ce.load("three", outside, pair.port, 16, [64])])
    pair.pe.step(calls=[("three", outside, 16)], chunks=[("three", 16, [5])], compute=[(5, 5.0)])
    ce.steps_until(lambda ce: "three" in ce.received)
    pair.pe.step(calls=[("one", name, 99)])
    ce.steps_until(lambda ce: "one" in ce.received)
    assert ce.failed == {"stranger", "two", "one", "three"}
    # What is behind the last block of a tensor belongs to the next one.
    assert ce.look([0]) == [0.0]
    pair.pe.step(finished=[("one", None, 0, [], None), ("three", 1, 16, [5], None)])
    pair.pe.steps_until(lambda pe: {"one", "three"} <= set(pe.sent))
    pair.check_idle()


@pytest.mark.parametrize(
    ("other", "word"),
    [
        ({"facts": {"model": "n"}}, "model: 'm' on the pe, 'n' on the ce"),
        ({"groups": 2}, "groups: 1 on the pe, 2 on the ce"),
        ({"tensors": 4}, "ranges"),
        ({"token": "b" * 32}, "cluster token"),
    ],
    ids=["model", "groups", "tensors", "token"],
)
def test_engines_that_differ_get_no_link_and_hear_why(start: Start, other: dict[str, Any], word: str) -> None:
    port = free_port()
    pe = start("kv_producer", {"kv_port": port})
    ce = start("kv_consumer", {"peers": [f"127.0.0.1:{port}"]}, **other)
    ce.step(loads=[ce.load("r", ticket(), port, 16, [4] * other.get("groups", 1))])
    ce.steps_until(lambda ce: "r" in ce.received)
    assert ce.failed == {"r"}
    pe.step()
    assert ce.process.stderr is not None
    # It dials again and again; on a busy machine the load may have failed before the other engine had started.
    assert any(word in line for line in ce.process.stderr)
