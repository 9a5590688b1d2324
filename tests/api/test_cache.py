# SPDX-License-Identifier: Apache-2.0
"""Prefix caching as clients and operators see it: request fields, /cache, /cache/flush, routing by prefix."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from kit.fake_rank import FakeRank, answers, output
from kit.live_server import TOKEN
from kvrail.runtime.control.auth import bearer_header
from kvrail.runtime.messages import CacheFlushed, CacheUse, FlushCache, Stats, Submit, ToFront, ToRank

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "Hi"}]}


def flushes(rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
    if isinstance(message, FlushCache):
        yield CacheFlushed(number=message.number, pool_pages=3 + rank.rank, host_pages=9)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, CacheUse()),
        ({"prefix_cache": True}, CacheUse()),
        ({"prefix_cache": False}, CacheUse(use=False)),
        ({"cache_salt": "mine"}, CacheUse(salt="mine")),
    ],
)
def test_request_fields_reach_the_rank(stand, fields, wanted) -> None:
    one = stand(answers([5]))
    assert one.client.post(CHAT, json={**ASK, **fields}).status_code == 200
    (submit,) = one.rank.wait_for(Submit)
    assert submit.cache == wanted


@pytest.mark.parametrize("fields", [{"prefix_cache": "no"}, {"cache_salt": ""}, {"cache_salt": 7}])
def test_wrong_fields_are_named(stand, fields) -> None:
    response = stand(answers([5])).client.post(CHAT, json={**ASK, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == next(iter(fields))


def test_flushing_needs_the_cluster_token_and_asks_every_rank(stand) -> None:
    one = stand(flushes, flushes)
    both = [f'kvrail_rank_ready{{rank="{n}"}} 1.0' for n in range(2)]
    one.server.wait_until("/metrics", lambda response: all(ready in response.text for ready in both))
    assert one.client.post("/cache/flush").status_code == 401
    assert not [m for rank in one.ranks for m in rank.received if isinstance(m, FlushCache)]
    response = one.client.post("/cache/flush", headers=bearer_header(TOKEN))
    assert response.json() == {
        "ranks": [
            {"rank": 0, "pool_pages": 3, "host_pages": 9},
            {"rank": 1, "pool_pages": 4, "host_pages": 9},
        ]
    }


def test_a_rank_that_goes_while_it_flushes_is_no_hang(stand) -> None:
    def goes(rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
        if isinstance(message, FlushCache):
            rank._stopped.set()
        yield from ()

    response = stand(goes).client.post("/cache/flush", headers=bearer_header(TOKEN))
    assert response.status_code == 503
    assert "gone" in response.json()["error"]["message"]


def test_the_summary_shows_pool_and_host(stand) -> None:
    one = stand(answers([5]))
    one.rank.send(
        Stats(
            steps=1,
            gauges={"pages_cached": 4.0, "pages_held": 1.0, "hicache_pages": 10.0},
            counters={"hicache_hit_tokens": 32.0, "steps": 1.0},
        )
    )
    body = one.server.wait_until("/cache", lambda response: bool(response.json()["ranks"])).json()
    assert body == {
        "role": "single",
        "page_tokens": 16,
        "ranks": [{"rank": 0, "pool": {"cached": 4.0}, "host": {"pages": 10.0, "hit_tokens": 32.0}}],
    }


def test_routing_by_prefix_goes_where_the_prompt_was_before(stand) -> None:
    def slow(rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
        if isinstance(message, Submit):
            yield output(message.request_id, [5], "length")

    one = stand(slow, slow, slow, routing="prefix")

    def served_by(prompt: list[int], **fields: object) -> int:
        before = [len(rank.received) for rank in one.ranks]
        response = one.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, **fields})
        assert response.status_code == 200
        (number,) = [n for n, rank in enumerate(one.ranks) if len(rank.received) > before[n]]
        return number

    # Prompts that differ in their first page spread by their affinity; what follows stays with its beginning.
    for seed in range(6):
        prompt = [20 + seed] * 40
        first = served_by(prompt)
        assert {served_by([*prompt, *range(20, 20 + n)]) for n in (1, 30, 60)} == {first}
