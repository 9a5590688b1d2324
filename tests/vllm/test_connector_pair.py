# SPDX-License-Identifier: Apache-2.0
"""Two plain vLLM servers with the connector behind a small router: texts of one vLLM, and nothing held afterwards."""

from __future__ import annotations

import concurrent.futures
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    log = pair.pe.log
    model = Path(pair.pe.process.args[pair.pe.process.args.index("--model") + 1])  # type: ignore[union-attr, index, arg-type]
    pair.pe = VllmServer(model, log.parent, "pe-again", {"kv_port": pair.kv_port})
    pair.pe.wait_ready()
    time.sleep(6)  # The longest pause between two attempts.
    split = pair.at_once(prompt[:300], 8)
    assert split == text_of(pair.pe.complete(prompt[:300], 8))
    for server in (pair.pe, pair.ce):
        server.wait_idle()


def test_failed_loads_are_recomputed_where_vllm_is_told_to(vllm_model: Path, tmp_path: Path) -> None:
    """And never with a placeholder in them."""
    ce = VllmServer(vllm_model, tmp_path, "ce", {"peers": [f"127.0.0.1:{free_port()}"]}, policy="recompute")
    try:
        ce.wait_ready()
        router = Router(ce, ce, 9)
        prompt = random_prompt(ce.tokens(WORDS), 300, seed=1)
        params = router.into(ticket())
        plain = {name: value for name, value in params.items() if name != "first_token"}
        assert text_of(ce.complete(prompt, 8, plain)) == text_of(ce.complete(prompt, 8))
        ce.begin_and_leave([*prompt, 1], params, 3.0)
        ce.wait_idle()
        assert "waits until it is aborted" in ce.log.read_text()
    finally:
        ce.stop()
