# SPDX-License-Identifier: Apache-2.0
"""Two completion ranks and two prefill engines of two ranks each: every pair is linked, and all of them work."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kit.cluster import Server, serving, wait_until
from kit.split import MODEL, ask, links, wait_for_links

if TYPE_CHECKING:
    from conftest import Cluster

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

_FLAGS = ("--served-model-name", MODEL, "--dtype", "float32", "--page-tokens", "16", "--kv-pages", "256")


@pytest.fixture(scope="module")
def servers(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Server, list[Server]]]:
    """(CE with affinity, CE with least-loaded, the two PEs). The second CE has one rank."""
    folder, model = tmp_path_factory.mktemp("many"), cluster.model("llama")
    pes = [Server("pe", model, folder, *_FLAGS, "--dp", "2") for _ in range(2)]
    urls = [flag for pe in pes for flag in ("--pe-url", pe.url)]
    ce = Server("ce", model, folder, *_FLAGS, *urls, "--dp", "2", "--local-prefill", "never")
    balanced = Server(
        "ce", model, folder, *_FLAGS, *urls, "--routing", "least-loaded", "--local-prefill", "never"
    )
    with serving(ce, balanced, *pes):
        wait_for_links(ce, *pes, count=8, within_s=150)
        wait_for_links(balanced, *pes, count=4, within_s=60)
        yield ce, balanced, pes


def talk(url: str, words: str, turns: int = 1) -> list[dict[str, Any]]:
    """A conversation; returns the usage of each turn. Every answer was prefilled remotely."""
    messages: list[dict[str, str]] = [{"role": "user", "content": words}]
    found = []
    for turn in range(turns):
        answer = ask(url, "/v1/chat/completions", messages=messages, max_tokens=3)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-kvrail-prefill"] == "remote"
        body = answer.json()
        found.append(body["usage"])
        messages += [body["choices"][0]["message"], {"role": "user", "content": f"Go on, {turn}."}]
    return found


def tickets(server: Server) -> Counter[tuple[int, str, int]]:
    """Tickets by (our rank, peer, peer's rank), as /lanes counts them; and where nothing was, nothing."""
    return Counter(
        {(n["rank"], n["peer"], n["peer_rank"]): int(n["counters"]["tickets"]) for n in links(server)}
    )


def settled(
    server: Server, before: Counter[tuple[int, str, int]], total: int
) -> Counter[tuple[int, str, int]]:
    """What has come on top of `before`, once it is `total` (ranks report a few times a second)."""
    wait_until(lambda: (tickets(server) - before).total() == total, 15, f"{total} tickets in /lanes", server)
    return tickets(server) - before


def test_every_pair_is_linked(servers: tuple[Server, Server, list[Server]]) -> None:
    ce, balanced, pes = servers
    found = links(ce)
    assert len(found) == 8
    assert {link["state"] for link in found} == {"up"}
    assert {link["lane"] for link in found} == {"shm"}
    assert Counter(link["peer_url"] for link in found) == {pe.url: 4 for pe in pes}
    assert len({(link["rank"], link["peer"], link["peer_rank"]) for link in found}) == 8
    assert len(links(balanced)) == 4
    for pe in pes:
        # Two ranks of one CE and one of the other, at each of its two ranks.
        assert len([link for link in links(pe) if link["state"] == "up"]) == 6


def test_affinity_sticks_and_spreads(servers: tuple[Server, Server, list[Server]]) -> None:
    ce, _, pes = servers
    before = tickets(ce)
    for number in range(12):
        usages = talk(ce.url, f"conversation {number}: a first message of more than one page", turns=3)
        # All turns of one conversation found the pages of the turn before: they came to the same prefill rank.
        assert usages[0]["prompt_tokens_details"]["cached_tokens"] < 48
        for earlier, later in itertools.pairwise(usages):
            assert later["prompt_tokens_details"]["cached_tokens"] >= earlier["prompt_tokens"] // 16 * 16
    used = settled(ce, before, 36)
    # Whole conversations only, each on one link.
    assert all(count % 3 == 0 for count in used.values())
    assert {rank for rank, _, _ in used} == {0, 1}
    peers = {link["peer"]: link["peer_url"] for link in links(ce)}
    assert {peers[peer] for _, peer, _ in used} == {pe.url for pe in pes}


def test_least_loaded_uses_everything(servers: tuple[Server, Server, list[Server]]) -> None:
    _, balanced, _ = servers
    before = tickets(balanced)

    # One and the same prompt, many times at once: affinity would send all of it to one place. Long, and computed each
    # time: what is over in a moment loads nobody.
    body = {"prompt": [*range(10, 250)], "max_tokens": 2, "prefix_cache": False}
    with (
        httpx.Client(base_url=balanced.url, timeout=60, trust_env=False) as client,
        ThreadPoolExecutor(16) as pool,
    ):
        posted = pool.map(lambda _: client.post("/v1/completions", json=body).status_code, range(64))
        assert set(posted) == {200}
    used = settled(balanced, before, 64)
    assert len(used) == 4, used


def test_a_prefill_engine_that_leaves_takes_nothing_with_it(
    servers: tuple[Server, Server, list[Server]], tmp_path: Path
) -> None:
    ce, _, pes = servers
    pes[0].stop()
    wait_until(
        lambda: sum(link["state"] == "up" for link in links(ce)) == 4, 30, "only links to the other pe", ce
    )
    before = tickets(ce)
    for number in range(6):
        talk(ce.url, f"after the loss, conversation {number}")
    settled(ce, before, 6)
    assert httpx.get(f"{ce.url}/ready").status_code == 200

    def told() -> bool:
        engines = httpx.get(f"{ce.url}/lanes").json()["prefill_engines"]
        return pes[0].url in [engine["url"] for engine in engines if engine["trouble"]]

    # The front asks each PE about once a second.
    wait_until(told, 15, "the pe that left is named", ce)
