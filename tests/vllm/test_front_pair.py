# SPDX-License-Identifier: Apache-2.0
"""A pair of roles with vLLM answers as a single vLLM does; lost prefill engines and clients that leave cost nothing."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from kit.cluster import Server, serving, wait_until
from kit.vllm_roles import CASES, STUCK_S, Case, answer_of, engine_core, vllm_role

pytest.importorskip(
    "vllm.sampling_params", reason="vLLM is not installed (scripts/test_vllm makes an environment)"
)

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(600)]
_START_S = 240


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("v")


@pytest.fixture(scope="module")
def single(vllm_model: Path, folder: Path) -> dict[str, Any]:
    """What a single vLLM answers. It is gone before the pair starts: each needs gigabytes."""
    server = vllm_role("single", vllm_model, folder)
    with serving(server):
        server.wait_ready(_START_S)
        found = {case.name: answer_of(server.url, case) for case in CASES}
        assert server.stop() < 8
    assert {route for _, route in found.values()} == {"local"}
    return {name: answer for name, (answer, _) in found.items()}


class Pair:
    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.pe = vllm_role("pe", model, folder)
        self.ce = vllm_role("ce", model, folder, "--pe-url", self.pe.url)

    def wait_linked(self) -> None:
        for server in (self.pe, self.ce):
            server.wait_ready(_START_S)
        wait_until(lambda: self.trouble() == "", 60, "the link is up", self.pe, self.ce)

    def trouble(self) -> str:
        return str(self.ce.http.get("/lanes").json()["prefill_engines"][0]["trouble"])

    def prefills(self, route: str) -> float:
        return self.ce.metric("kvrail_prefills_total", route=route)

    def check_idle(self) -> None:
        """Nothing is held once nobody asks."""

        def idle() -> bool:
            return all(
                server.metric("kvrail_rank_requests") == 0
                and server.metric("vllm:num_requests_running") == 0
                and server.metric("vllm:num_requests_waiting") == 0
                and server.metric("vllm:kv_cache_usage_perc") == 0
                and not any(connector_gauges(server).values())
                for server in (self.pe, self.ce)
            )

        wait_until(idle, 30, "no block is held at idle", self.pe, self.ce)


def connector_gauges(server: Server) -> dict[str, float]:
    (status,) = (server.log.parent / "run").glob(f"{server.role}-{server.process.pid}-*.run/connector.json")
    return dict(json.loads(status.read_text())["gauges"])


@pytest.fixture(scope="module")
def pair(vllm_model: Path, folder: Path, single: dict[str, Any]) -> Iterator[Pair]:
    started = Pair(vllm_model, folder)
    with serving(started.pe, started.ce):
        started.wait_linked()
        yield started
        for server in (started.ce, started.pe):
            assert server.stop() < 8


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_as_a_single_vllm(pair: Pair, single: dict[str, Any], case: Case) -> None:
    answer, route = answer_of(pair.ce.url, case)
    assert answer == single[case.name]
    assert route == case.route


def test_the_pages_went_over_a_link(pair: Pair) -> None:
    answer_of(pair.ce.url, CASES[1])

    def told() -> bool:
        (link,) = pair.ce.http.get("/lanes").json()["links"]
        return bool(link["state"] == "up" and link["counters"]["bytes"] > 0)

    wait_until(told, 10, "the link has carried bytes", pair.ce)
    assert pair.ce.metric("kvrail_landed_total") > 0
    assert pair.ce.metric("kvrail_failed_total") == 0
    pair.check_idle()


def test_the_official_client(pair: Pair, single: dict[str, Any]) -> None:
    client = openai.OpenAI(base_url=f"{pair.ce.url}/v1", api_key="none", timeout=120)
    case = next(case for case in CASES if case.name == "streamed completion")
    chunks = list(client.completions.create(**case.body))
    assert "".join(chunk.choices[0].text for chunk in chunks) == single[case.name]["choices"][0]["text"]
    assert [model.id for model in client.models.list()] == ["m"]
    raw = client.responses.with_raw_response.create(
        model="m", input="Say a few words.", max_output_tokens=8, temperature=0
    )
    assert raw.headers["x-kvrail-prefill"] == "remote"
    assert raw.parse().output_text
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="m", prompt="x", max_tokens=-1)


def test_token_1_comes_before_the_hand_over(pair: Pair) -> None:
    """It is passed on when the prefill engine has it, and nothing waits for the whole answer."""
    body = {"model": "m", "prompt": "Count: 1, 2, 3,", "max_tokens": 60, "temperature": 0, "stream": True}
    with httpx.stream(
        "POST", f"{pair.ce.url}/v1/completions", json=body, timeout=60, trust_env=False
    ) as answer:
        arrived = [time.monotonic() for line in answer.iter_lines() if line.startswith("data: {")]
    assert len(arrived) >= 60
    assert arrived[-1] - arrived[0] > 0.2


def test_clients_leave_in_every_phase(pair: Pair) -> None:
    def leave(after_s: float) -> None:
        body = {"model": "m", "prompt": [int(after_s * 1e4) + 5] * 700, "max_tokens": 200, "ignore_eos": True}
        with pytest.raises(httpx.TimeoutException):
            httpx.post(
                f"{pair.ce.url}/v1/completions", json=body, timeout=httpx.Timeout(after_s), trust_env=False
            )

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(leave, [0.02 * n + 0.01 for n in range(40)]))
    pair.check_idle()
    answer_of(pair.ce.url, CASES[0])


def test_many_at_once(pair: Pair, single: dict[str, Any]) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda case: answer_of(pair.ce.url, case), CASES))
    texts = [
        (_texts(answer), _texts(single[case.name])) for case, (answer, _) in zip(CASES, found, strict=True)
    ]
    assert [ours for ours, _ in texts] == [theirs for _, theirs in texts]
    pair.check_idle()


def _texts(answer: dict[str, Any]) -> list[str]:
    """Without log-probabilities, whose last digits depend on who was computed together."""
    return [choice["text"] if "text" in choice else str(choice["message"]) for choice in answer["choices"]]


def test_a_frozen_prefill_engine(pair: Pair, single: dict[str, Any]) -> None:
    """It answers nobody, and no connection breaks: the link's heartbeats find it out."""
    before = pair.prefills("fallback")
    pair.pe.freeze()
    try:
        case = next(case for case in CASES if case.name == "completion")
        answer, route = answer_of(pair.ce.url, case)
        assert (_texts(answer), route) == (_texts(single[case.name]), "local")
        assert pair.prefills("fallback") == before + 1
    finally:
        pair.pe.thaw()
    wait_until(lambda: pair.trouble() == "", 60, "the link is up again", pair.pe, pair.ce)
    assert answer_of(pair.ce.url, CASES[0])[1] == "remote"
    pair.check_idle()


def test_a_completion_engine_whose_core_hangs(pair: Pair, single: dict[str, Any]) -> None:
    """The server in front of it lives: streams end with an error, and others get a 503, until it goes on."""
    core = engine_core(pair.ce)
    body = {
        "model": "m",
        "prompt": "Count: 1, 2, 3,",
        "max_tokens": 400,
        "temperature": 0,
        "ignore_eos": True,
    }
    with (
        httpx.Client(base_url=pair.ce.url, timeout=STUCK_S + 30, trust_env=False) as client,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer,
    ):
        events = (line for line in answer.iter_lines() if line.startswith("data: "))
        next(events)
        core.suspend()
        try:
            waits = pool.submit(client.post, "/v1/completions", json=body)
            last = json.loads(list(events)[-1].removeprefix("data: "))
            assert "has not finished a step" in last["error"]["message"]
            assert waits.result().status_code == 503
            assert "has not finished a step" in waits.result().json()["error"]["message"]
            began = time.monotonic()
            refused = client.post("/v1/completions", json=body)
            assert (refused.status_code, time.monotonic() - began < 5) == (503, True)
            assert "retry-after" in refused.headers
            assert client.get("/ready").status_code == 503
        finally:
            core.resume()
    pair.ce.wait_ready(30)
    case = next(case for case in CASES if case.name == "completion")
    wait_until(lambda: pair.trouble() == "", 60, "the link is up", pair.pe, pair.ce)
    assert answer_of(pair.ce.url, case) == (single[case.name], "remote")
    pair.check_idle()


def test_a_prefill_engine_whose_core_hangs(pair: Pair, single: dict[str, Any]) -> None:
    """Its front and its links live. Everybody is answered all the same, and soon nobody goes there any more."""
    names = ("chat of several blocks", "one token", "two tokens", "streamed completion", "token ids")
    cases = [case for case in CASES if case.name in names]
    core = engine_core(pair.pe)
    core.suspend()
    try:
        with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
            found = list(pool.map(lambda case: answer_of(pair.ce.url, case), cases))
        for case, (answer, route) in zip(cases, found, strict=True):
            assert (case.name, _texts(answer), route) == (case.name, _texts(single[case.name]), "local")
        wait_until(
            lambda: "has not finished a step" in pair.trouble(), STUCK_S + 10, "it is found out", pair.ce
        )
        assert pair.pe.http.get("/ready").status_code == 503
        began = time.monotonic()
        assert answer_of(pair.ce.url, CASES[0])[1] == "local"
        assert time.monotonic() - began < STUCK_S / 2
    finally:
        core.resume()
    wait_until(lambda: pair.trouble() == "", 60, "it can be used again", pair.pe, pair.ce)
    assert answer_of(pair.ce.url, CASES[0])[1] == "remote"
    pair.check_idle()


def test_two_hundred_requests(pair: Pair, single: dict[str, Any]) -> None:
    """Eight at any moment, every fourth client leaves; no answer differs, and nothing is held afterwards."""
    cases = [case for case in CASES if case.route == "remote" and not case.body.get("logprobs")]

    def ask(number: int) -> None:
        case = cases[number % len(cases)]
        if number % 4 == 3:
            with contextlib.suppress(httpx.TimeoutException), httpx.Client(trust_env=False) as client:
                after_s = 0.05 + number % 40 / 20
                client.post(f"{pair.ce.url}{case.path}", json=case.body, timeout=httpx.Timeout(after_s))
            return
        answer, _ = answer_of(pair.ce.url, case)
        assert (case.name, _texts(answer)) == (case.name, _texts(single[case.name]))

    before = pair.prefills("remote")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(200)))
    pair.check_idle()
    assert pair.prefills("remote") - before > 100


def test_a_lost_prefill_engine(pair: Pair, single: dict[str, Any]) -> None:
    """Killed in the middle of prefills: everybody gets an answer, and the next ones come from here alone."""
    before = pair.prefills("fallback") + pair.prefills("local")
    cases = [case for case in CASES if case.route == "remote"]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(answer_of, pair.ce.url, case) for case in cases]
        time.sleep(0.6)
        pair.pe.kill()
        for case, one in zip(cases, asked, strict=True):
            assert _texts(one.result()[0]) == _texts(single[case.name])
    assert pair.prefills("fallback") + pair.prefills("local") > before
    answer, route = answer_of(pair.ce.url, CASES[0])
    assert (_texts(answer), route) == (_texts(single[CASES[0].name]), "local")
    assert pair.trouble() != ""
    # Started again under the same URL it is found again.
    pair.pe = vllm_role("pe", pair.model, pair.folder, port=pair.pe.port)
    with serving(pair.pe):
        pair.pe.wait_ready(_START_S)
        wait_until(lambda: pair.trouble() == "", 60, "the new engine is linked", pair.pe, pair.ce)
        assert answer_of(pair.ce.url, CASES[0])[1] == "remote"
        pair.check_idle()
        pair.pe.stop()
