# SPDX-License-Identifier: Apache-2.0
"""Two plain vLLM servers with the connector behind a small router: texts of one vLLM, and nothing held afterwards."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kit.vllm_pair import free_port, ticket
from kit.vllm_servers import Router, VllmServer, random_prompt, text_of

pytest.importorskip(
    "vllm.sampling_params", reason="vLLM is not installed (scripts/test_vllm makes an environment)"
)

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(900)]
WORDS = (
    "The quick brown fox jumps over the lazy dog while seven wizards brew coffee in the old tower by the sea"
)
# Around the edges of vLLM's blocks of 128 tokens, and of a window of 512.
LENGTHS = (1, 2, 127, 128, 129, 255, 256, 639, 640, 641, 767, 1151, 1153)


def models() -> list[Any]:
    found = []
    for name, what in (("KVRAIL_TEST_MODEL", "full"), ("KVRAIL_TEST_MODEL_WINDOWS", "windows")):
        folder = os.environ.get(name, "")
        reason = f"{name} names no model folder (scripts/test_vllm)"
        found.append(pytest.param(folder, id=what, marks=() if folder else pytest.mark.skip(reason=reason)))
    return found


@pytest.fixture(scope="module", params=models())
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    folder, port, model = tmp_path_factory.mktemp("v"), free_port(), Path(request.param)
    pe = VllmServer(model, folder, "pe", {"kv_port": port})
    ce = VllmServer(model, folder, "ce", {"peers": [f"127.0.0.1:{port}"]})
    router = Router(pe, ce, port)
    try:
        for server in (pe, ce):
            server.wait_ready()
        yield router
    finally:
        for server in (router.pe, router.ce):
            server.stop()


@pytest.fixture(scope="module")
def vocabulary(pair: Router) -> list[int]:
    return pair.pe.tokens(WORDS)


@pytest.mark.parametrize("way", ["at once", "one after the other"])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_pair_answers_as_one_engine(pair: Router, vocabulary: list[int], length: int, way: str) -> None:
    prompt = random_prompt(vocabulary, length, seed=length + 10_000 * len(way))
    split = pair.ways[way](prompt, 10)
    # The prefill engine alone; the second time both have the prompt in their prefix caches.
    alone = text_of(pair.pe.complete(prompt, 10))
    assert split == alone
    assert pair.ways[way](prompt, 10) == alone


def test_many_at_a_time(pair: Router, vocabulary: list[int]) -> None:
    prompts = [random_prompt(vocabulary, 20 + 37 * at, seed=at) for at in range(24)]
    ways = list(pair.ways.values())
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        split = list(pool.map(lambda at: ways[at % 2](prompts[at], 12), range(len(prompts))))
    alone = [text_of(pair.pe.complete(prompt, 12)) for prompt in prompts]
    assert split == alone
    for server in (pair.pe, pair.ce):
        server.wait_idle()


@pytest.mark.parametrize("after_s", [0.02, 0.3, 1.5])
@pytest.mark.parametrize("who", ["client of the completion engine", "client of the prefill engine"])
def test_clients_that_leave_hold_nothing(
    pair: Router, vocabulary: list[int], who: str, after_s: float
) -> None:
    name, prompt = ticket(), random_prompt(vocabulary, 1200, seed=int(after_s * 1000) + len(who))
    of_ce = (pair.ce, [*prompt, 1], pair.into(name))
    of_pe = (pair.pe, prompt, pair.out(name))
    (leaving, text, params), (other, rest, others) = (of_ce, of_pe) if "completion" in who else (of_pe, of_ce)
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(other.complete(rest, 1, others)))
    thread.start()
    leaving.begin_and_leave(text, params, after_s)
    thread.join()
    if other is pair.pe:
        # It prefills on for its own client, who gets what was asked for.
        assert "choices" in answers[0]
    for server in (pair.pe, pair.ce):
        server.wait_idle()


@pytest.mark.parametrize(
    "change",
    [{"remote_port": 9}, {"remote_host": "10.1.2.3"}, {"ticket": "no"}, {"remote_port": None}],
    ids=["port", "host", "ticket", "none"],
)
def test_requests_that_name_nobody_known_fail_at_once(
    pair: Router, vocabulary: list[int], change: dict[str, Any]
) -> None:
    begun = time.monotonic()
    prompt = random_prompt(vocabulary, 100, seed=1)
    assert pair.ce.complete(prompt, 5, pair.into(ticket()) | change) == {"error": 500}
    assert time.monotonic() - begun < 10
    pair.ce.wait_idle()


def test_a_prefill_engine_that_is_killed_and_started_again(pair: Router, vocabulary: list[int]) -> None:
    prompt = random_prompt(vocabulary, 1500, seed=3)
    legs: list[tuple[dict[str, Any], dict[str, Any]]] = []
    thread = threading.Thread(target=lambda: legs.append(pair.legs(prompt, 10)))
    thread.start()
    time.sleep(0.5)
    pair.pe.kill()
    thread.join(30)
    assert legs, "the completion engine's client waits for an engine that is dead"
    assert legs[0][1] == {"error": 500}
    pair.ce.wait_idle()
    # The completion engine goes on, and has the link again as soon as there is somebody at the other end.
    assert "choices" in pair.ce.complete(prompt[:50], 5)
    pair.pe = VllmServer(pair.pe.model, pair.pe.log.parent, "pe-again", {"kv_port": pair.kv_port})
    pair.pe.wait_ready()
    time.sleep(6)  # The longest pause between two attempts.
    split = pair.at_once(prompt[:300], 8)
    assert split == text_of(pair.pe.complete(prompt[:300], 8))
    for server in (pair.pe, pair.ce):
        server.wait_idle()


def test_many_requests_and_clients_that_leave(pair: Router, vocabulary: list[int]) -> None:
    """Two hundred, eight at any moment, every fifth client of either side leaves in some phase."""
    draw = random.Random(7)
    lengths = [draw.randint(1, 500) for _ in range(200)]
    ways = list(pair.ways.values())

    def ask(number: int) -> str:
        prompt = random_prompt(vocabulary, lengths[number], seed=50_000 + number)
        if number % 5:
            return ways[number % 2](prompt, 6)
        name, after_s = ticket(), 0.01 + number % 50 / 25
        if number % 2:
            pair.ce.begin_and_leave([*prompt, 1], pair.into(name), after_s)
        else:
            pair.pe.begin_and_leave(prompt, pair.out(name), after_s)
        return ""

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        split = list(pool.map(ask, range(200)))
    assert "error" not in " ".join(split)
    for number in range(1, 200, 13):
        if number % 5:
            prompt = random_prompt(vocabulary, lengths[number], seed=50_000 + number)
            assert split[number] == text_of(pair.pe.complete(prompt, 6))
    for server in (pair.pe, pair.ce):
        server.wait_idle(60)


def test_a_prefill_engine_that_is_frozen(pair: Router, vocabulary: list[int]) -> None:
    """Its process may write on when it thaws: the request is over at once, the blocks are nobody's until then."""
    prompt = random_prompt(vocabulary, 1500, seed=9)
    with frozen_while_it_pushes(pair, prompt) as name:
        began = time.monotonic()
        assert name.result(60) == {"error": 500}
        assert time.monotonic() - began < 30
        assert pair.ce.busy().keys() == {"vllm:kv_cache_usage_perc"}
        # The others go on, in other blocks.
        assert "choices" in pair.ce.complete(prompt[:200], 5)
    for server in (pair.ce, pair.pe):
        server.wait_idle(60)
    assert pair.at_once(prompt, 5) == text_of(pair.pe.complete(prompt, 5))


@contextlib.contextmanager
def frozen_while_it_pushes(
    pair: Router, prompt: list[int], *, plain: bool = False
) -> Iterator[concurrent.futures.Future[dict[str, Any]]]:
    """The prefill engine stands still in the middle of a prompt; what the completion engine answers."""
    name, params = ticket(), pair.into(ticket())
    params |= {"ticket": name}
    tokens = [*prompt, 1]
    if plain:
        del params["first_token"]
        tokens = prompt

    def prefill() -> None:
        # It may be done before it stands still, or be cut off.
        with contextlib.suppress(httpx.HTTPError):
            pair.pe.complete(prompt, 1, pair.out(name))

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        answer = pool.submit(pair.ce.complete, tokens, 8, params)
        pool.submit(prefill)
        time.sleep(0.7)
        pair.pe.freeze()
        try:
            yield answer
        finally:
            pair.pe.thaw()


def test_failed_loads_are_recomputed_where_vllm_is_told_to(pair: Router, vocabulary: list[int]) -> None:
    """And never with a placeholder in them. A new completion engine takes the place of the old one."""
    pair.ce.stop()
    pair.ce = VllmServer(
        pair.pe.model,
        pair.pe.log.parent,
        "ce-again",
        {"peers": [f"127.0.0.1:{pair.kv_port}", f"127.0.0.1:{(nobody := free_port())}"]},
        policy="recompute",
    )
    pair.ce.wait_ready()
    prompt = random_prompt(vocabulary, 300, seed=1)
    params = pair.into(ticket()) | {"remote_port": nobody}
    plain = {name: value for name, value in params.items() if name != "first_token"}
    assert text_of(pair.ce.complete(prompt, 8, plain)) == text_of(pair.pe.complete(prompt, 8))
    began = time.monotonic()
    assert pair.ce.complete([*prompt, 1], 8, params) == {"error": 500}
    assert time.monotonic() - began < 20
    pair.ce.wait_idle()
    assert pair.at_once(prompt, 8) == text_of(pair.pe.complete(prompt, 8))
    # While somebody may still write into the blocks of the first attempt, it is computed in others.
    for seed in (21, 22):
        prompt = random_prompt(vocabulary, 1500, seed=seed)
        with frozen_while_it_pushes(pair, prompt, plain=seed == 21) as answer:
            found = answer.result(60)
            assert pair.ce.busy().keys() == {"vllm:kv_cache_usage_perc"}
        if seed == 21:
            assert text_of(found) == text_of(pair.pe.complete(prompt, 8))
        else:
            assert found == {"error": 500}
        for server in (pair.ce, pair.pe):
            server.wait_idle(60)
