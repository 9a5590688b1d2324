# SPDX-License-Identifier: Apache-2.0
"""Pushes layer by layer (the connector's setting `push`), over real links and real memory, with steps told by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.vllm_pair import Worker, free_port, ticket, until

pytestmark = pytest.mark.process
# Of a block on the PE, in its three tensors.
COMPUTED = [3.0, 1003.0, 2003.0]


class Pair:
    def __init__(self, folder: Path, groups: int = 1) -> None:
        self.port = free_port()
        files = {"runtime_dir": str(folder / "run"), "status_file": str(folder / "pe")}
        self.pe = Worker("kv_producer", {"kv_port": self.port, "push": "layer", **files}, groups=groups)
        files["status_file"] = str(folder / "ce")
        peers = [f"127.0.0.1:{self.port}"]
        self.ce = Worker("kv_consumer", {"peers": peers, **files}, groups=groups, blocks=64)
        until(lambda: self.ce.links().get(peers[0]) == "up")

    def ask(self, request: str, tokens: int, blocks: list[int], **more: bool) -> None:
        """A request has come to both, and the PE has the grant."""
        name = ticket()
        self.ce.step(loads=[self.ce.load(request, name, self.port, tokens, blocks, **more)])
        self.pe.step(calls=[(request, name, tokens)])
        until(lambda: (held := self.pe.gauges())["target_pages"] > 0 == held["tickets_waiting"])

    def end(self, request: str, tokens: int, blocks: list[int]) -> None:
        """The PE samples; the CE has the KV, and nobody holds anything."""
        self.pe.step(finished=[(request, 5, tokens, blocks, None)])
        self.ce.steps_until(lambda ce: request in ce.received)
        self.pe.steps_until(lambda pe: request in pe.sent)
        assert not self.ce.failed
        self.check_idle()

    def check_idle(self) -> None:
        for worker in (self.pe, self.ce):
            until(lambda worker=worker: not any(worker.gauges().values()))
            worker.step()
            assert not worker.held
            assert len(worker.sent) == len(set(worker.sent))
            assert len(worker.received) == len(set(worker.received))


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.pe.close()
    made.ce.close()


def test_a_layer_is_there_before_the_next_is_computed(pair: Pair) -> None:
    pair.ask("r", 40, [30, 8, 11], hand_off=True)
    pair.pe.begin(chunks=[("r", 20, [2, 3])])
    pair.pe.layer(0, [(2, 2.0), (3, 9.0)])
    until(lambda: pair.ce.tensors(30) == [2.0, 0.0, 0.0])
    pair.pe.layer(1, [(2, 2.0), (3, 9.0)])
    until(lambda: pair.ce.tensors(30) == [2.0, 1002.0, 0.0])
    pair.pe.layer(2, [(2, 2.0), (3, 9.0)])
    until(lambda: pair.ce.tensors(30) == [2.0, 1002.0, 2002.0])
    pair.pe.end()
    # The second block was half full, and still changes.
    assert pair.ce.tensors(8) == [0.0, 0.0, 0.0]
    pair.pe.begin(chunks=[("r", 40, [2, 3, 7])])
    for tensor in range(3):
        pair.pe.layer(tensor, [(3, 3.0), (7, 7.0)])
        until(lambda tensor=tensor: pair.ce.tensors(8)[: tensor + 1] == COMPUTED[: tensor + 1])
        assert pair.ce.tensors(8)[tensor + 1 :] == [0.0] * (2 - tensor)
    pair.pe.end()
    pair.ce.step()
    assert "r" not in pair.ce.received
    pair.end("r", 40, [2, 3, 7])
    assert pair.ce.look([30, 8, 11]) == [2.0, 3.0, 7.0]
    assert pair.ce.tokens["r"] == 5
    pushed = pair.pe.do(do="counters")
    assert pushed["blocks"] == 3
    assert pushed["bytes_ahead"] == pushed["bytes"] == pair.ce.do(do="counters")["bytes"]


def test_a_grant_that_comes_in_the_middle_of_a_step(pair: Pair) -> None:
    """What is computed by then goes with the next layer, and nothing before it is computed."""
    name = ticket()
    pair.pe.step(calls=[("r", name, 48)], chunks=[("r", 16, [1])], compute=[(1, 1.0)])
    pair.pe.begin(chunks=[("r", 48, [1, 2, 3])])
    pair.pe.layer(0, [(2, 2.0), (3, 3.0)])
    pair.ce.step(loads=[pair.ce.load("r", name, pair.port, 48, [21, 22, 23])])
    until(lambda: pair.ce.look([21]) == [1.0])
    assert pair.ce.tensors(23) == [0.0, 0.0, 0.0]
    pair.pe.layer(1, [(2, 2.0), (3, 3.0)])
    until(lambda: pair.ce.tensors(23) == [3.0, 1003.0, 0.0])
    pair.pe.layer(2, [(2, 2.0), (3, 3.0)])
    pair.pe.end()
    pair.end("r", 48, [1, 2, 3])
    assert pair.ce.look([21, 22, 23]) == [1.0, 2.0, 3.0]


def test_layers_that_are_not_told_go_out_with_the_step(pair: Pair) -> None:
    """As in a step that runs as one CUDA graph."""
    pair.ask("r", 16, [21])
    pair.pe.begin(chunks=[("r", 16, [3])])
    pair.pe.layer(1, [(3, 3.0)])
    until(lambda: pair.ce.tensors(21) == [0.0, 1003.0, 0.0])
    pair.pe.do(do="compute", values=[(3, 3.0)])
    pair.pe.end()
    pair.end("r", 16, [3])
    pushed = pair.pe.do(do="counters")
    assert pushed["bytes_ahead"] * 3 == pushed["bytes"]
    assert pair.ce.tensors(21) == COMPUTED


def test_layers_of_several_groups_share_tensors(tmp_path: Path) -> None:
    """A block goes with the layers of its own group only: with the others' it is not computed yet."""
    pair = Pair(tmp_path, groups=2)
    try:
        pair.ask("r", 32, [20, 0, 21, 31])
        pair.pe.begin(chunks=[("r", 32, [1, 0, 2, 12])])
        pair.pe.layer(0, [(1, 1.0), (2, 2.0)], group=0)
        until(lambda: pair.ce.tensors(21)[0] == 2.0)
        pair.pe.layer(0, [(12, 12.0)], group=1)
        until(lambda: pair.ce.tensors(31) == [12.0, 0.0, 0.0])
        assert pair.ce.tensors(20) == [1.0, 0.0, 0.0]
        for tensor in (1, 2):
            pair.pe.layer(tensor, [(12, 12.0)], group=1)
            until(lambda tensor=tensor: pair.ce.tensors(31)[tensor] == tensor * 1000 + 12)
            assert pair.ce.tensors(21)[tensor] == 0.0
            pair.pe.layer(tensor, [(1, 1.0), (2, 2.0)], group=0)
        pair.pe.end()
        pair.end("r", 32, [1, 0, 2, 12])
        assert pair.ce.look([20, 21, 31]) == [1.0, 2.0, 12.0]
        assert pair.ce.tensors(0) == [0.0] * 3
    finally:
        pair.pe.close()
        pair.ce.close()


@pytest.mark.parametrize("who", ["the completion engine", "the prefill engine"])
def test_a_request_that_ends_between_two_layers(pair: Pair, who: str) -> None:
    pair.ask("r", 32, [21, 22])
    pair.pe.begin(chunks=[("r", 32, [2, 3])])
    pair.pe.layer(0, [(2, 2.0), (3, 3.0)])
    until(lambda: pair.ce.tensors(22)[0] == 3.0)
    if "completion" in who:
        pair.ce.step(cancelled=["r"])
        pair.ce.steps_until(lambda ce: "r" in ce.received)
    for tensor in (1, 2):
        pair.pe.layer(tensor, [(2, 2.0), (3, 3.0)])
    pair.pe.end()
    if "completion" in who:
        # Nothing comes into blocks that were given back.
        assert pair.ce.tensors(22) == [3.0, 0.0, 0.0]
        pair.pe.step(finished=[("r", 5, 32, [2, 3], None)])
    else:
        pair.pe.step(finished=[("r", None, 0, [], None)])
        pair.ce.steps_until(lambda ce: "r" in ce.received)
        assert pair.ce.failed == {"r"}
    pair.pe.steps_until(lambda pe: "r" in pe.sent)
    until(lambda: not any(pair.ce.gauges().values()))
    pair.ce.step()
    pair.check_idle()


def test_a_preempted_request_is_pushed_anew(pair: Pair) -> None:
    """vLLM takes the blocks between two steps and computes the prompt in others: no old byte comes after."""
    pair.ask("r", 32, [21, 22])
    pair.pe.begin(chunks=[("r", 16, [2])])
    for tensor in range(3):
        pair.pe.layer(tensor, [(2, 2.0)])
    pair.pe.end()
    pair.pe.step(preempted=["r"], compute=[(2, 99.0)])
    pair.pe.begin(chunks=[("r", 32, [5, 6])])
    for tensor in range(3):
        pair.pe.layer(tensor, [(5, 2.0), (6, 6.0)])
    pair.pe.end()
    pair.end("r", 32, [5, 6])
    assert pair.ce.look([21, 22]) == [2.0, 6.0]
