# SPDX-License-Identifier: Apache-2.0
"""The splitter between vLLM's own output processor and an engine core that the test plays: order, loss, cancel."""

from __future__ import annotations

import asyncio
import contextlib
import time
import warnings
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

with warnings.catch_warnings():
    # Those of torch, with which vLLM compiles as it is imported.
    warnings.simplefilter("ignore")
    pytest.importorskip(
        "vllm.v1.engine.async_llm", reason="vLLM is not installed (scripts/test_vllm makes an environment)"
    )

from prometheus_client import CollectorRegistry
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.metrics.stats import IterationStats

from kvrail.runtime.vllm.compat import decode_sampling, first_token_of, outputs_of, prefill_request
from kvrail.runtime.vllm.core_tap import CoreTap
from kvrail.runtime.vllm.counters import SplitCounters
from kvrail.runtime.vllm.notes import NOTES, Notes
from kvrail.runtime.vllm.peers import Peer, PrefillRefused
from kvrail.runtime.vllm.spec import FirstToken, Logprobs, PrefillCall
from kvrail.runtime.vllm.splitting import RequestSplitter

PROMPT = [5, 6, 7, 8]
ANSWER = [11, 12, 13]


class Core:
    """An engine core that says what the test lets it say."""

    def __init__(self) -> None:
        self.requests: dict[str, EngineCoreRequest] = {}
        self.aborted: list[str] = []
        self._said: asyncio.Queue[Any] = asyncio.Queue()

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self.requests[request.request_id] = request

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    async def get_output_async(self) -> Any:
        return await self._said.get()

    def say(self, request_id: str, tokens: list[int], reason: FinishReason | None = None) -> None:
        output = EngineCoreOutput(request_id=request_id, new_token_ids=tokens, finish_reason=reason)
        self._said.put_nowait(outputs_of(0, [output]))


class Peers:
    """Prefill engines that answer when the test lets them."""

    version, model = "0", "m"

    def __init__(self) -> None:
        self.calls: list[PrefillCall] = []
        self.answer: asyncio.Future[FirstToken] = asyncio.get_running_loop().create_future()
        self.cancelled = False
        self.usable = True

    def choose(self, affinity: bytes) -> Peer | None:
        return Peer((b"i" * 16, 0), "http://pe", "127.0.0.1", 4000, 4001) if self.usable else None

    async def prefill(self, peer: Peer, call: PrefillCall) -> FirstToken:
        self.calls.append(call)
        try:
            return await self.answer
        except asyncio.CancelledError:
            self.cancelled = True
            raise


class Server:
    """What AsyncLLM does with a core client, in a few lines."""

    def __init__(self, *, never: bool = False) -> None:
        self.core, self.peers = Core(), Peers()
        self.tap = CoreTap(self.core)
        config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=64))
        self.tap.splitter = self.splitter = RequestSplitter(
            self.tap,
            config,
            self.peers,  # type: ignore[arg-type]
            SplitCounters(CollectorRegistry()),
            local_prefill="never" if never else "auto",
            short=0,
        )
        self.processor = OutputProcessor(None, log_stats=True)
        self.notes = Notes()
        self.handler = asyncio.create_task(self._handle())

    async def _handle(self) -> None:
        while True:
            outputs = await self.tap.get_output_async()
            found = self.processor.process_outputs(outputs.outputs, outputs.timestamp, IterationStats())
            if found.reqs_to_abort:
                await self.tap.abort_requests_async(found.reqs_to_abort)

    async def ask(self, name: str = "r", **sampling: Any) -> RequestOutputCollector:
        params = SamplingParams(
            **{"temperature": 0.0, "max_tokens": 3, "detokenize": False, **sampling},
            output_kind=RequestOutputKind.DELTA,
        )
        request = EngineCoreRequest(
            request_id=name,
            external_req_id=name,
            prompt_token_ids=list(PROMPT),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        queue = RequestOutputCollector(params.output_kind, name)
        self.processor.add_request(request, None, None, 0, queue)
        token = NOTES.set(self.notes)
        await self.tap.add_request_async(request)
        NOTES.reset(token)
        await settle()
        return queue

    async def abort(self, name: str = "r") -> None:
        await self.tap.abort_requests_async(self.processor.abort_requests([name], internal=True))
        await settle()

    def check_idle(self) -> None:
        assert not self.tap.taps
        assert not self.splitter.running
        assert not self.processor.request_states


@contextlib.asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[Server]:
    server = Server(**options)
    try:
        yield server
        server.check_idle()
    finally:
        server.handler.cancel()
        server.tap._pump.cancel() if server.tap._pump else None
        await asyncio.gather(server.handler, return_exceptions=True)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def read(queue: RequestOutputCollector) -> tuple[list[int], str | None]:
    """All tokens, and how it finished."""
    tokens: list[int] = []
    async with asyncio.timeout(5):
        while True:
            output = await queue.get()
            tokens += output.outputs[0].token_ids
            if output.finished:
                return tokens, output.outputs[0].finish_reason


def run(test: Any) -> None:
    asyncio.run(test)


def test_two_legs_make_one_answer() -> None:
    async def test() -> None:
        async with serving() as server:
            queue = await server.ask(max_tokens=3, min_tokens=2)
            (call,) = server.peers.calls
            asked = decode_sampling(call.sampling)
            assert (asked.max_tokens, asked.min_tokens, asked.temperature) == (1, 1, 0.0)
            assert np.frombuffer(call.tokens, "<u4").tolist() == PROMPT
            (parked,) = server.core.requests.values()
            assert parked.prompt_token_ids[:-1] == PROMPT
            assert (parked.sampling_params.max_tokens, parked.sampling_params.min_tokens) == (2, 1)
            assert parked.sampling_params.extra_args["kv_transfer_params"] == {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "ticket": call.ticket.hex(),
                "remote_host": "127.0.0.1",
                "remote_port": 4000,
                "first_token": "handoff",
            }
            # The core is early.
            server.core.say(parked.request_id, ANSWER[1:2])
            await settle()
            assert queue.get_nowait() is None
            server.peers.answer.set_result(FirstToken(token=ANSWER[0], stopped=False, cached_tokens=2))
            await settle()
            assert server.notes.route == "remote"
            server.core.say(parked.request_id, ANSWER[2:], FinishReason.LENGTH)
            assert await read(queue) == (ANSWER, "length")

    run(test())


@pytest.mark.parametrize("reason", ["stop token", "length"])
def test_token_1_ends_it(reason: str) -> None:
    async def test() -> None:
        async with serving() as server:
            queue = await server.ask(max_tokens=1 if reason == "length" else 3)
            (call,) = server.peers.calls
            if reason == "length":
                assert not server.core.requests
                assert call.ticket == b"", "its KV stays where it is"
                server.peers.answer.set_result(FirstToken(token=9, stopped=False))
            else:
                server.peers.answer.set_result(FirstToken(token=9, stopped=True, stop_reason=9))
            assert await read(queue) == ([9], "length" if reason == "length" else "stop")
            await settle()
            assert server.core.aborted == list(server.core.requests)

    run(test())


@pytest.mark.parametrize("lost", ["call", "kv", "kv behind token 1"])
def test_a_lost_leg_is_computed_here(lost: str) -> None:
    async def test() -> None:
        async with serving() as server:
            queue = await server.ask(min_tokens=2)
            (parked,) = list(server.core.requests.values())
            if lost == "call":
                server.peers.answer.set_exception(PrefillRefused("http://pe: HTTP 429"))
            elif lost == "kv":
                server.core.say(parked.request_id, [], FinishReason.ERROR)
            else:
                server.peers.answer.set_result(FirstToken(token=ANSWER[0], stopped=False))
                await settle()
                server.core.say(parked.request_id, [], FinishReason.ERROR)
            await settle()
            again = list(server.core.requests.values())[1]
            params = again.sampling_params
            assert not (params.extra_args or {}).get("kv_transfer_params")
            if lost == "kv behind token 1":
                assert again.prompt_token_ids == [*PROMPT, ANSWER[0]]
                assert (params.max_tokens, params.min_tokens) == (2, 1)
                rest = ANSWER[1:]
            else:
                assert again.prompt_token_ids == PROMPT
                assert (params.max_tokens, params.min_tokens) == (3, 2)
                rest = ANSWER
            assert server.peers.cancelled == (lost == "kv")
            assert server.notes.route == "local"
            server.core.say(parked.request_id, [99], None)  # What an attempt that was given up still says.
            server.core.say(again.request_id, rest, FinishReason.LENGTH)
            assert await read(queue) == (ANSWER, "length")

    run(test())


@pytest.mark.parametrize("when", ["before", "after token 1", "after a fall back"])
def test_a_client_leaves(when: str) -> None:
    async def test() -> None:
        async with serving() as server:
            await server.ask()
            if when == "after token 1":
                server.peers.answer.set_result(FirstToken(token=1, stopped=False))
            if when == "after a fall back":
                server.peers.answer.set_exception(PrefillRefused("gone"))
            await settle()
            await server.abort()
            assert set(server.core.aborted) == set(server.core.requests)
            assert server.peers.cancelled == (when == "before")

    run(test())


def test_where_local_prefill_is_forbidden() -> None:
    async def test() -> None:
        async with serving(never=True) as server:
            server.peers.usable = False
            queue = await server.ask()
            assert await read(queue) == ([], "error")
            assert server.notes.refusal is not None
            assert server.notes.refusal[0] == 503
            queue = await server.ask("s", presence_penalty=1.0)
            assert await read(queue) == ([], "error")
            assert server.notes.refusal[0] == 400
            assert "presence_penalty" in server.notes.refusal[1]
            server.peers.usable = True
            queue = await server.ask("t")
            server.peers.answer.set_exception(PrefillRefused("gone"))
            assert await read(queue) == ([], "error")
            assert server.notes.refusal == (503, "gone, and --local-prefill is never")
            assert not [name for name in server.core.requests if name not in server.core.aborted]

    run(test())


def test_a_client_cannot_steer_transfers() -> None:
    async def test() -> None:
        async with serving() as server:
            server.peers.usable = False
            steer = {
                "kv_transfer_params": {
                    "do_remote_prefill": True,
                    "remote_host": "10.0.0.1",
                    "ticket": "00" * 16,
                }
            }
            queue = await server.ask(extra_args={**steer, "mine": 1})
            assert server.core.requests["r"].sampling_params.extra_args == {"mine": 1}
            server.core.say("r", [4], FinishReason.LENGTH)
            assert await read(queue) == ([4], "length")
            server.peers.usable = True
            await server.ask("s", extra_args=steer)
            (parked,) = [x for x in server.core.requests.values() if x.request_id != "r"]
            given = parked.sampling_params.extra_args["kv_transfer_params"]
            assert given["remote_host"] == "127.0.0.1"
            assert given["ticket"] == server.peers.calls[0].ticket.hex() != "00" * 16
            await server.abort("s")

    run(test())


def test_logprobs_of_token_1() -> None:
    async def test() -> None:
        async with serving() as server:
            queue = await server.ask(max_tokens=1, logprobs=1)
            values = np.array([-0.5, -0.25], "<f4")
            logprobs = Logprobs(np.array([9, 4], "<i4").tobytes(), values.tobytes(), 2)
            server.peers.answer.set_result(FirstToken(token=9, stopped=False, logprobs=logprobs))
            output = await queue.get()
            (found,) = output.outputs[0].logprobs
            assert {token: (one.logprob, one.rank) for token, one in found.items()} == {
                9: (-0.5, 2),
                4: (-0.25, 1),
            }
            assert output.num_cached_tokens == 0

    run(test())


def test_a_prefill_is_asked_and_answered_exactly() -> None:
    params = SamplingParams(
        temperature=0.5, stop_token_ids=[3], logit_bias={1: 2.0}, min_tokens=4, max_tokens=9
    )
    params.update_from_generation_config({}, 2)
    again = decode_sampling(msgspec.msgpack.encode(params))
    assert (again.eos_token_id, again.all_stop_token_ids, again.logit_bias) == (2, {2, 3}, {1: 2.0})
    request = prefill_request("p", [1], again, {"ticket": "t"}, None, 0)
    assert (request.sampling_params.max_tokens, request.sampling_params.min_tokens) == (1, 1)
    said = EngineCoreOutput(request_id="p", new_token_ids=[3], finish_reason=FinishReason.STOP, stop_reason=3)
    assert first_token_of(said) == FirstToken(token=3, stopped=True, stop_reason=3)
    assert (
        first_token_of(EngineCoreOutput(request_id="p", new_token_ids=[], finish_reason=FinishReason.ERROR))
        is None
    )
