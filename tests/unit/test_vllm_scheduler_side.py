# SPDX-License-Identifier: Apache-2.0
"""The connector in vLLM's scheduler, told requests and steps by hand: what vLLM, routers and workers hear of it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvrail.runtime.vllm.engine_facts import first_needed
from kvrail.runtime.vllm.meta import ForScheduler, StepFacts
from kvrail.runtime.vllm.scheduler_side import SchedulerSide, put_first_token
from kvrail.runtime.vllm.settings import Settings

BLOCK = 16
TICKET = "0123456789abcdef" * 2
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
LOAD = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "ticket": TICKET,
    "remote_host": "127.0.0.1",
    "remote_port": 7000,
}


def side(role: str, *, recompute: bool = False, windows: tuple[int | None, ...] = (None,)) -> SchedulerSide:
    extra: dict[str, Any] = {"peers": ["localhost:7000"]} if role == "kv_consumer" else {"kv_port": 7000}
    specs = [SimpleNamespace(sliding_window=window) for window in windows]
    return SchedulerSide(
        Settings.of(role, extra),
        block_tokens=BLOCK,
        needed=[first_needed(spec) for spec in specs],
        engine_id="engine",
        recompute=recompute,
        end_with_error=lambda one: setattr(one, "status", SimpleNamespace(name="TO_FAIL")),
    )


def request(name: str, tokens: int, params: dict[str, Any] | None) -> Any:
    made = SimpleNamespace(
        request_id=name,
        kv_transfer_params=params,
        num_tokens=tokens,
        num_prompt_tokens=tokens,
        num_computed_tokens=0,
        prompt_token_ids=list(range(tokens)),
        _all_token_ids=list(range(tokens)),
        output_token_ids=[],
        block_hashes=[],
        status=SimpleNamespace(name="RUNNING"),
        skip_reading_prefix_cache=False,
    )
    made.update_block_hashes = lambda: made.block_hashes.extend(
        tuple(made._all_token_ids[at : at + BLOCK])
        for at in range(len(made.block_hashes) * BLOCK, len(made._all_token_ids) - BLOCK + 1, BLOCK)
    )
    made.update_block_hashes()
    return made


def step(
    one: SchedulerSide,
    scheduled: dict[str, int] | None = None,
    tables: dict[str, list[list[int]]] | None = None,
    preempted: tuple[str, ...] = (),
) -> StepFacts:
    scheduled = scheduled or {}
    output = SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        preempted_req_ids=set(preempted),
    )
    tables_of: Callable[[str], list[list[int]] | None] = (tables or {}).get
    return one.build(output, tables_of)


def end(one: Any, status: str = "FINISHED_LENGTH_CAPPED", *tokens: int) -> Any:
    one.status = SimpleNamespace(name=status)
    one.output_token_ids = list(tokens)
    return one


# --- a prefill engine ---------------------------------------------------------------------------------------------


def test_chunks_are_told_as_they_are_scheduled() -> None:
    pe = side("kv_producer")
    asked = request("r", 40, PREFILL | {"ticket": TICKET})
    pe.on_new_request(asked)
    pe.on_new_request(asked)
    assert pe.external_tokens(asked, 0) == (0, False)
    facts = step(pe, {"r": 20}, {"r": [[3, 4]]})
    assert [(call.request_id, call.ticket.hex(), call.tokens) for call in facts.calls] == [("r", TICKET, 40)]
    assert [(chunk.computed, chunk.pages) for chunk in facts.chunks] == [(20, [3, 4])]
    asked.num_computed_tokens = 20
    # vLLM has put down a block more than the prompt needs.
    facts = step(pe, {"r": 20}, {"r": [[3, 4, 9, 10]]})
    assert facts.calls == []
    assert [(chunk.computed, chunk.pages) for chunk in facts.chunks] == [(40, [3, 4, 9])]
    asked.num_computed_tokens = 40
    assert step(pe, {"r": 1}, {"r": [[3, 4, 9, 10]]}).chunks == []
    held, answer = pe.finished(end(asked, "FINISHED_LENGTH_CAPPED", 77), [[3, 4, 9, 10]])
    assert held
    assert answer == LOAD | {"remote_engine_id": "engine", "remote_num_tokens": 40}
    (told,) = step(pe).finished
    assert (told.token, told.computed, told.pages, told.call) == (77, 40, [3, 4, 9], None)
    assert pe.busy
    pe.hear(sent=["r"], received=(), news=ForScheduler())
    assert not pe.busy


def test_a_request_without_a_ticket_gets_one_at_its_end() -> None:
    pe = side("kv_producer")
    asked = request("r", 20, PREFILL)
    pe.on_new_request(asked)
    facts = step(pe, {"r": 20}, {"r": [[3, 4]]})
    assert (facts.calls, facts.chunks) == ([], [])
    held, answer = pe.finished(end(asked, "FINISHED_STOPPED", 2), [[3, 4]])
    assert held
    (told,) = step(pe).finished
    assert told.call is not None
    assert told.call.ticket.hex() == answer["ticket"]  # type: ignore[index]
    assert len(told.call.ticket) == 16
    assert told.call.tokens == 20


@pytest.mark.parametrize("given", [True, False])
def test_aborted_prefills(given: bool) -> None:
    pe = side("kv_producer")
    asked = request("r", 20, PREFILL | ({"ticket": TICKET} if given else {}))
    pe.on_new_request(asked)
    # Whoever was told of a ticket must hear that it is over; else nothing is held.
    assert pe.finished(end(asked, "FINISHED_ABORTED"), [[]]) == (given, None)
    facts = step(pe)
    assert [(told.request_id, told.token) for told in facts.finished] == ([("r", None)] if given else [])


def test_a_preempted_prefill_is_told_anew() -> None:
    pe = side("kv_producer")
    asked = request("r", 40, PREFILL | {"ticket": TICKET})
    pe.on_new_request(asked)
    step(pe, {"r": 20}, {"r": [[3, 4]]})
    asked.num_computed_tokens = 0
    assert step(pe, preempted=("r", "other")).preempted == ["r"]
    (chunk,) = step(pe, {"r": 16}, {"r": [[7]]}).chunks
    assert (chunk.computed, chunk.pages) == (16, [7])


class Keeper:
    def __init__(self) -> None:
        self.kept: dict[str, list[int]] = {}

    def keep(self, name: str, blocks: list[int]) -> bool:
        self.kept[name] = blocks
        return True

    def let_go(self, name: str) -> None:
        self.kept.pop(name, None)


@pytest.mark.parametrize(("tokens", "kept"), [(47, [20]), (48, []), (46, [])])
def test_a_block_that_leaves_the_window_with_the_last_token_is_kept_until_it_is_sent(
    tokens: int, kept: list[int]
) -> None:
    """With 47 tokens and a window of 32, the last token still sees token 15, which the next one does not."""
    pe = side("kv_producer", windows=(None, 32))
    pe.keeper = keeper = Keeper()
    asked = request("r", tokens, PREFILL)
    pe.on_new_request(asked)
    step(pe, {"r": tokens}, {"r": [[1, 2, 3], [20, 21, 22]]})
    first = (tokens - 31) // BLOCK
    left = [[1, 2, 3], [0] * first + [20, 21, 22][first:]]
    held, _ = pe.finished(end(asked, "FINISHED_LENGTH_CAPPED", 7), left)
    assert held
    assert keeper.kept.get("r", []) == kept
    (told,) = step(pe).finished
    assert told.pages[1] == (kept or [left[1][0]])[0]
    pe.hear(sent=["r"], received=(), news=ForScheduler())
    assert keeper.kept == {}


# --- a completion engine ------------------------------------------------------------------------------------------


def test_a_plain_load_asks_for_all_but_the_last_token() -> None:
    ce = side("kv_consumer")
    asked = request("r", 40, LOAD)
    ce.on_new_request(asked)
    assert ce.external_tokens(asked, 16) == (23, True)
    assert ce.external_tokens(asked, 16) == (23, True)
    ce.after_alloc(asked, [[5, 8, 9]], 23)
    facts = step(ce)
    assert facts.idle
    (load,) = facts.loads
    assert (load.token_start, load.token_end, load.pages) == (16, 39, [8, 9])
    assert (load.peer, load.ticket.hex(), load.hand_off) == (("127.0.0.1", 7000), TICKET, False)
    # vLLM asks again when it has arrived, and when it was preempted later.
    ce.after_alloc(asked, [[5, 8, 9]], 0)
    assert ce.external_tokens(asked, 0) == (0, False)
    ce.hear(sent=(), received=["r"], news=ForScheduler())
    assert step(ce).loads == []
    assert ce.finished(end(asked, "FINISHED_STOPPED", 1), [[5, 8, 9]]) == (False, None)
    facts = step(ce)
    assert (facts.cancelled, facts.idle, ce.busy) == ([], False, False)


def test_a_hand_off_waits_for_its_token_and_puts_it_in_place() -> None:
    ce = side("kv_consumer")
    asked = request("r", 33, LOAD | {"first_token": "handoff"})
    ce.on_new_request(asked)
    assert ce.external_tokens(asked, 0) == (32, True)
    ce.after_alloc(asked, [[5, 8]], 32)
    (load,) = step(ce).loads
    assert (load.token_start, load.token_end, load.pages, load.hand_off) == (0, 32, [5, 8], True)
    ce.hear(sent=(), received=["r"], news=ForScheduler(tokens={"r": 1234, "other": 5}))
    assert asked.prompt_token_ids == asked._all_token_ids == [*range(32), 1234]


def test_a_hand_off_whose_kv_is_all_here_waits_all_the_same() -> None:
    ce = side("kv_consumer")
    asked = request("r", 33, LOAD | {"first_token": "handoff"})
    asked.skip_reading_prefix_cache = True
    ce.on_new_request(asked)
    assert not asked.skip_reading_prefix_cache, "vLLM would not wait for anything"
    assert ce.external_tokens(asked, 32) == (1, True)
    ce.after_alloc(asked, [[5, 8, 11]], 1)
    (load,) = step(ce).loads
    assert (load.token_start, load.token_end, load.pages) == (32, 32, [])


def test_a_plain_load_whose_kv_is_all_here_lets_the_other_side_go() -> None:
    ce = side("kv_consumer")
    asked = request("r", 33, LOAD)
    assert ce.external_tokens(asked, 32) == (0, False)
    ce.after_alloc(asked, [[5, 8, 11]], 0)
    (load,) = step(ce).loads
    assert (load.token_start, load.token_end, load.pages, load.unasked) == (32, 32, [], True)
    assert ce.finished(end(asked, "FINISHED_STOPPED", 1), [[5]]) == (False, None)
    assert step(ce).cancelled == []


def test_a_load_that_is_aborted_is_cancelled_and_waited_for() -> None:
    ce = side("kv_consumer")
    asked = request("r", 40, LOAD)
    ce.external_tokens(asked, 0)
    ce.after_alloc(asked, [[5, 8, 9]], 39)
    assert ce.finished(end(asked, "FINISHED_ABORTED"), [[5, 8, 9]]) == (False, None)
    facts = step(ce)
    assert (len(facts.loads), facts.cancelled, ce.busy) == (1, ["r"], True)
    ce.hear(sent=(), received=["r"], news=ForScheduler())
    assert not ce.busy
    # One that had not begun to load is nobody's business.
    other = request("s", 40, LOAD)
    ce.on_new_request(other)
    assert ce.finished(end(other, "FINISHED_ABORTED"), [[]]) == (False, None)
    assert step(ce).cancelled == []


def test_blocks_of_a_lost_load_are_kept_until_they_are_quiet() -> None:
    """vLLM lets them go when it hears of the failure, whether it ends the request or computes it elsewhere."""
    ce = side("kv_consumer")
    ce.keeper = keeper = Keeper()
    asked = request("r", 40, LOAD)
    ce.external_tokens(asked, 0)
    ce.after_alloc(asked, [[5, 8, 9]], 39)
    # Aborted in the very step in which its failure was reported.
    assert ce.finished(end(asked, "FINISHED_ABORTED"), [[5, 8, 9]]) == (False, None)
    ce.hear(sent=(), received=["r"], news=ForScheduler(held={"t/0": [5, 8, 9], "t/1": [5, 8, 9]}))
    assert list(keeper.kept) == ["t/0", "t/1"]
    assert ce.busy
    assert step(ce).idle
    ce.hear(sent=(), received=(), news=ForScheduler(quiet={"t/1", "unknown"}))
    assert list(keeper.kept) == ["t/0"]
    ce.hear(sent=(), received=(), news=ForScheduler(quiet={"t/0"}))
    assert (keeper.kept, ce.busy) == ({}, False)
    # Told in one step.
    ce.hear(sent=(), received=(), news=ForScheduler(held={"u/0": [1]}, quiet={"u/0"}))
    assert (keeper.kept, ce.busy) == ({}, False)
    ce.keeper = None
    with pytest.raises(RuntimeError, match="cannot hold"):
        ce.hear(sent=(), received=(), news=ForScheduler(held={"v/0": [1]}))


@pytest.mark.parametrize("known", [True, False])
def test_a_placeholder_is_never_computed(known: bool) -> None:
    """vLLM asks again for a request whose load failed, to compute it."""
    ce = side("kv_consumer", recompute=True)
    asked = request("r", 33, LOAD | {"first_token": "handoff"})
    ce.external_tokens(asked, 0)
    ce.after_alloc(asked, [[5, 8]], 32)
    ce.hear(sent=(), received=["r"], news=ForScheduler(tokens={"r": 7} if known else {}))
    assert ce.external_tokens(asked, 0) == ((0, False) if known else (None, False))
    assert asked.status.name == ("RUNNING" if known else "TO_FAIL")
    assert asked.prompt_token_ids[-1] == (7 if known else 32)


@pytest.mark.parametrize(
    ("params", "peer"),
    [
        ({"remote_port": 7001}, ("127.0.0.1", 7001)),
        ({"remote_host": "10.9.8.7"}, ("10.9.8.7", 7000)),
        ({"remote_host": "localhost"}, ("127.0.0.1", 7000)),
        ({"remote_port": "7000"}, ("127.0.0.1", 0)),
        ({"ticket": "xyz"}, ("", 0)),
        ({"ticket": None}, ("", 0)),
    ],
)
def test_what_a_request_says_of_its_peer_goes_to_the_workers_to_judge(
    params: dict[str, Any], peer: tuple[str, int]
) -> None:
    """It is loaded, and fails as vLLM's policy says; it is never computed as if nothing had been asked."""
    ce = side("kv_consumer")
    asked = request("r", 40, LOAD | params)
    assert ce.external_tokens(asked, 0) == (39, True)
    ce.after_alloc(asked, [[5, 8, 9]], 39)
    assert step(ce).loads[0].peer == peer


def test_requests_that_concern_nobody_else() -> None:
    for role in ("kv_producer", "kv_consumer"):
        one = side(role)
        asked = request("r", 40, None)
        assert one.external_tokens(asked, 0) == (0, False)
        one.after_alloc(asked, [[1, 2, 3]], 0)
        facts = step(one, {"r": 40}, {"r": [[1, 2, 3]]})
        assert facts == StepFacts()
        assert one.finished(end(asked, "FINISHED_STOPPED", 1), [[1, 2, 3]]) == (False, None)
    # The wrong way round: it runs here alone.
    assert side("kv_producer").external_tokens(request("r", 40, LOAD), 0) == (0, False)
    assert side("kv_consumer").finished(end(request("r", 40, PREFILL), "FINISHED_STOPPED", 1), [[]]) == (
        False,
        None,
    )


@pytest.mark.parametrize("tokens", [15, 16, 17, 32])
def test_the_first_token_changes_the_hash_of_its_block(tokens: int) -> None:
    asked = request("r", tokens, None)
    put_first_token(asked, 999)
    fresh = request("s", tokens, None)
    fresh._all_token_ids[-1] = 999
    fresh.block_hashes.clear()
    fresh.update_block_hashes()
    assert asked.block_hashes == fresh.block_hashes
