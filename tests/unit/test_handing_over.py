# SPDX-License-Identifier: Apache-2.0
"""A hand-off record is what the engine sampled; one that cannot be right fails its request, and only that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvrail.runtime.completion import Completion
from kvrail.runtime.engine_protocol import StepOutput
from kvrail.runtime.handing_over import fault_of_hand_off, hand_off_record
from kvrail.runtime.messages import Abort, Failed, Outputs, Sampling, Submit
from kvrail.transfer.layout import PageLayout
from kvrail.transfer.link_events import LaneInfo, LinkKey, LinkUp, Received
from kvrail.transfer.pages import PagePool
from kvrail.transfer.receiver import Receiver
from kvrail.transfer.wire import (
    Cancel,
    Doorbell,
    FirstSample,
    FirstToken,
    Grant,
    HandOff,
    TokenLogprob,
    decode,
    encode,
    pack_u32,
)

LAYOUT = PageLayout(model_id="m", layers=1, kv_heads=1, head_dim=1, dtype="float32", page_tokens=16)
PE = LinkKey(b"p" * 16, 0)
NOTE = TokenLogprob(logprob=-0.5, top=[(4, -0.5), (9, -2.0)])
SAMPLING = Sampling(max_tokens=5, seed=3, n=2, logprobs=2)
GOOD = HandOff(
    first_token=4,
    logprob=NOTE,
    seed=3,
    next_position=41,
    cached_tokens=16,
    others=[FirstSample(token=9, finish_reason="stop", logprob=NOTE)],
)


def test_a_record_is_what_was_sampled() -> None:
    outputs = [
        StepOutput("r", 40, 4, None, 16, NOTE, choice=0),
        StepOutput("r", 40, 9, "stop", 16, NOTE, choice=1),
    ]
    record = hand_off_record(SAMPLING, 40, outputs)
    assert record == GOOD
    assert not record.ended
    assert fault_of_hand_off(record, SAMPLING, 40, 100) == ""
    message = FirstToken(ticket=b"t" * 16, epoch=1, hand_off=record)
    assert decode(encode(message)) == message


def test_a_record_ends_the_request_when_each_choice_has_ended() -> None:
    ended = msgspec.structs.replace(GOOD, finish_reason="length")
    assert ended.ended
    assert [one.finish_reason for one in ended.firsts] == ["length", "stop"]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "version": ({"version": 9}, "version 9"),
    "seed": ({"seed": 4}, "stands elsewhere"),
    "position": ({"next_position": 40}, "stands elsewhere"),
    "cached": ({"cached_tokens": 41}, "41 of 40"),
    "choices": ({"others": []}, "1 of 2 choices"),
    "token": ({"first_token": 100}, "100 is no token"),
    "negative": ({"first_token": -1}, "-1 is no token"),
    "reason": ({"finish_reason": "abort"}, "'abort' is no reason"),
    "logprobs": ({"logprob": None}, "missing"),
    "top": ({"logprob": TokenLogprob(logprob=-1.0, top=[(100, 0.0)])}, "no token"),
    "of another choice": ({"others": [FirstSample(token=700, logprob=NOTE)]}, "700 is no token"),
}


class Bench:
    """A real role and ledger, one granted request; engine and link only take notes."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.on_link: list[Any] = []
        self.adopted: list[dict[int, int]] = []
        self.pool = PagePool(8)
        engine: Any = SimpleNamespace(
            layout=LAYOUT,
            vocab_size=100,
            has_work=False,
            prefix_keys=lambda tokens, cache: [],
            abort=lambda request, choice=None: self.told.append(("abort", choice)),
            adopt=lambda *_, first_tokens, **__: self.adopted.append(dict(first_tokens)),
        )
        self.role = Completion(
            engine=engine,
            pool=self.pool,
            pools=SimpleNamespace(),  # type: ignore[arg-type]
            links=SimpleNamespace(send=lambda key, message: self.on_link.append(message)),  # type: ignore[arg-type]
            receiver=Receiver(self.pool, LAYOUT, incarnation=b"c" * 16, rank=0, link_share=1.0),
            send=self.told.append,
            verify_share=0.0,
            seats=4,
            largest_ticket=8,
        )
        self.role.on_link(0, LinkUp(PE, 1, LaneInfo("shm", "memcpy", "host", "process")))
        tokens = pack_u32(range(40))
        self.role.handle(0, Submit(request_id="r", tokens=tokens, sampling=SAMPLING, peer=PE))
        self.role.tick(0)
        (self.grant,) = (message for message in self.on_link if isinstance(message, Grant))

    def first(self, hand_off: HandOff) -> None:
        self.role.on_link(1, Received(PE, FirstToken(ticket=self.grant.ticket, epoch=1, hand_off=hand_off)))

    def bell(self, hand_off: HandOff) -> None:
        bell = Doorbell(ticket=self.grant.ticket, epoch=1, status="landed", token_end=40, hand_off=hand_off)
        self.role.on_link(2, Received(PE, bell))
        self.role.tick(2)

    def outputs(self) -> list[Any]:
        return [item for message in self.told if isinstance(message, Outputs) for item in message.items]


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("ahead", [True, False])
def test_a_wrong_record_fails_its_request_only(name: str, ahead: bool) -> None:
    changes, says = WRONG[name]
    bench = Bench()
    wrong = msgspec.structs.replace(GOOD, **changes)
    if ahead:
        bench.first(wrong)
        # The pages are given back only behind the proof that the answer to the cancel is.
        assert any(isinstance(message, Cancel) for message in bench.on_link)
    bench.bell(wrong)
    (failed,) = [message for message in bench.told if isinstance(message, Failed)]
    assert failed.status == 502
    assert says in failed.reason
    assert (bench.outputs(), bench.adopted) == ([], [])
    assert bench.pool.free == 8
    bench.pool.check()


@pytest.mark.parametrize("ahead", [True, False])
def test_every_choice_gets_its_first_token_and_the_live_ones_are_decoded(ahead: bool) -> None:
    bench = Bench()
    if ahead:
        bench.first(GOOD)
    bench.bell(GOOD)
    told = [(one.choice, one.tokens, one.finish_reason, one.logprobs) for one in bench.outputs()]
    assert told == [(0, pack_u32([4]), None, [NOTE]), (1, pack_u32([9]), "stop", [NOTE])]
    assert bench.adopted == [{0: 4}]


def test_a_choice_that_the_front_ends_before_the_pages_are_here_is_not_decoded() -> None:
    bench = Bench()
    both = msgspec.structs.replace(GOOD, others=[FirstSample(token=9, logprob=NOTE)])
    bench.first(both)
    bench.role.handle(1, Abort(request_id="r", choice=0))
    bench.bell(both)
    assert bench.adopted == [{1: 9}]
    bench.role.handle(3, Abort(request_id="r", choice=1))
    assert ("abort", None) in bench.told
