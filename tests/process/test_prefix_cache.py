# SPDX-License-Identifier: Apache-2.0
"""Prefix caches of a real split: the PE's host cache, the CE's own pages, and neither changes a token."""

from __future__ import annotations

import asyncio
import io
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from kit.asking import Asking
from kit.caches import Caches, fresh
from kit.cluster import Server, serving, wait_until
from kit.split import MODEL, ask, start_single, start_split, wait_for_links
from kit.tiny_checkpoint import tiny_checkpoint
from kvrail.frontend.check_prefix_cache import check
from kvrail.frontend.replay_conversations import replay

if TYPE_CHECKING:
    from conftest import Cluster

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

PAGE = 16
# A pool of 40 pages on the PE: a few prompts, and the older ones are in the host cache only.
PE_FLAGS = ("--kv-pages", "40", "--max-num-batched-tokens", "64")


@pytest.fixture(scope="module")
def caches(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caches]:
    folder = tmp_path_factory.mktemp("caches")
    split = start_split(cluster.model("llama"), folder, "shm", PAGE, pe_flags=PE_FLAGS)
    with serving(split.pe, split.ce):
        wait_for_links(split.ce, split.pe)
        yield Caches(split.pe, split.ce, cluster.single("shm"), folder)


def test_turn_two_pushes_only_what_the_ce_lacks(caches: Caches) -> None:
    prompt = fresh(5 * PAGE + 3)
    assert caches.same(prompt) == 0
    before = caches.pages()
    assert caches.same([*prompt, *fresh(2 * PAGE)]) == 5 * PAGE
    after = caches.pages()
    assert (after[0] - before[0], after[1] - before[1]) == (3, 1)


def test_a_prompt_that_the_ce_has_whole_needs_no_page_but_a_doorbell(caches: Caches) -> None:
    prompt = fresh(4 * PAGE)
    caches.same(prompt)
    before = caches.pages()
    # The last page is computed again all the same: somebody must say the first token.
    assert caches.same(prompt) == 3 * PAGE
    after = caches.pages()
    assert (after[0] - before[0], after[1] - before[1]) == (0, 1)


def test_pages_go_straight_from_the_host_cache_to_the_ce(caches: Caches) -> None:
    """Neither side's pool has them: the ticket asks for all, and what the host has goes from there, verified."""
    prompt = fresh(8 * PAGE + 5)
    caches.same(prompt)
    caches.pages()
    caches.push_out()
    caches.pages()
    caches.flush(caches.ce)
    straight = caches.pe.metric("kvrail_pages_pushed_from_host_total")
    hits = caches.pe.metric("kvrail_hicache_hit_tokens_total")
    before = caches.pages()
    assert caches.same([*prompt, *fresh(3)]) == 8 * PAGE
    assert caches.pages()[0] - before[0] == 9
    assert caches.pe.metric("kvrail_hicache_hit_tokens_total") - hits > 0
    assert caches.pe.metric("kvrail_pages_pushed_from_host_total") - straight > 0
    assert caches.ce.metric("kvrail_checksum_mismatches_total") == 0


def test_conversations_under_pressure(caches: Caches) -> None:
    """The real check, three conversations, with the PE's pool too small for all of them."""
    for seed in range(3):
        said = Console(file=io.StringIO(), width=200)
        report = asyncio.run(
            check(
                caches.ce.url,
                turns=3,
                words=30,
                question_words=5,
                max_tokens=8,
                seed=seed,
                page_tokens=PAGE,
                say=said,
            )
        )
        assert report.good, f"{report.problems}\n{said.file.getvalue()}"
    assert caches.pe.metric("kvrail_hicache_stored_pages_total") > 40
    caches.pages()


def test_a_replay_takes_each_turn_both_ways(caches: Caches) -> None:
    without, cached = asyncio.run(
        replay(
            caches.ce.url,
            conversations=3,
            turns=3,
            shared_words=20,
            own_words=10,
            question_words=5,
            max_tokens=6,
            concurrency=2,
            seed=7,
        )
    )
    assert [len(turn) for turn in without] == [len(turn) for turn in cached] == [3, 3, 3]
    for plain, ours in zip(without, cached, strict=True):
        assert [turn.tokens for turn in plain] == [turn.tokens for turn in ours]
        assert all(turn.cached_tokens == 0 < turn.first_token_s for turn in plain)
    assert all(turn.cached_tokens > 0 for turn in cached[2])
    caches.pages()


def test_side_by_side_with_shared_beginnings(caches: Caches) -> None:
    root = fresh(6 * PAGE)
    prompts = [[*root[: random.randrange(1, len(root))], *fresh(random.randrange(1, 40))] for _ in range(12)]
    wanted = [
        ask(
            caches.single.url, prompt=one, max_tokens=5, prefix_cache=False, logprobs=0, ignore_eos=True
        ).json()
        for one in prompts
    ]
    for _ in range(2):
        asked = [Asking(caches.ce, one, 5) for one in prompts]
        for one, single in zip(asked, wanted, strict=True):
            tokens = single["choices"][0]["logprobs"]["tokens"]
            assert one.wait().status == 200, one.summary
            assert one.tokens == tokens
        caches.push_out()
    caches.pages()


def test_left_out_and_salted_requests_share_nothing(caches: Caches) -> None:
    prompt = fresh(4 * PAGE + 1)
    assert caches.same(prompt, prefix_cache=False) == 0
    assert caches.same(prompt, cache_salt="one") == 0
    assert caches.same(prompt, cache_salt="two") == 0
    assert caches.same(prompt) == 0
    assert caches.same(prompt, prefix_cache=False) == 0
    assert caches.same(prompt, cache_salt="two") == 4 * PAGE
    caches.pages()


def test_clients_that_leave_while_pages_are_copied_and_pushed(caches: Caches) -> None:
    prompt = fresh(20 * PAGE)
    caches.same(prompt)
    for delay in range(8):
        caches.push_out()
        caches.flush(caches.ce)
        asking = Asking(caches.ce, [*prompt, *fresh(30)], 20)
        asking.first_token.wait(0.002 * delay)
        asking.hang_up()
    caches.pages()
    assert caches.same(prompt) >= 0
    caches.pages()


def test_after_a_flush_nothing_hits(caches: Caches) -> None:
    prompt = fresh(3 * PAGE + 2)
    caches.same(prompt)
    caches.pages()
    flushed = caches.flush(caches.pe)
    assert flushed["pool_pages"] >= 3
    assert flushed["host_pages"] >= 3
    assert caches.pe.metric("kvrail_hicache_pages_used") == 0
    assert caches.same(prompt) == 0


def test_a_restarted_pe_has_nothing_and_the_ce_still_has_its_part(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("restart")
    split = start_split(cluster.model("llama"), folder, "shm", PAGE, pe_flags=PE_FLAGS)
    with serving(split.pe, split.ce):
        wait_for_links(split.ce, split.pe)
        caches = Caches(split.pe, split.ce, cluster.single("shm"), folder)
        prompt = fresh(6 * PAGE + 4)
        caches.same(prompt)
        before = caches.pages()[0]
        split.pe.kill()
        flags = (
            "--served-model-name",
            MODEL,
            "--dtype",
            "float32",
            "--page-tokens",
            str(PAGE),
        )
        again = Server("pe", cluster.model("llama"), folder, *flags, *PE_FLAGS, port=split.pe.port)
        with serving(again):
            wait_until(
                lambda: (
                    again.http.get("/ready").status_code == 200 and split.ce.metric("kvrail_link_up") >= 1
                ),
                90,
                "the new pe is linked",
                again,
                split.ce,
            )
            caches.pe = again
            assert caches.same([*prompt, *fresh(PAGE)]) == 0
            assert split.ce.metric("kvrail_ticket_matched_tokens_total") == 6 * PAGE
            # The metric of a link lives as long as the link.
            caches.pages()
            assert again.metric("kvrail_link_pages_total") == 2
            assert before == 7


def test_conversations_of_a_model_with_windows(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """States come back from the host cache, and the CE asks for the ring and for the pages that it lacks."""
    folder = tmp_path_factory.mktemp("windows")
    model = tiny_checkpoint(folder / "gemma3", "gemma3")
    flags = (*PE_FLAGS, "--hicache-state-interval", "2")
    split = start_split(model, folder, "shm", PAGE, pe_flags=flags)
    single = start_single(model, folder)
    with serving(split.pe, split.ce, single):
        wait_for_links(split.ce, split.pe)
        caches = Caches(split.pe, split.ce, single.wait_ready(), folder)
        prompt = fresh(9 * PAGE + 5)
        assert caches.same(prompt) == 0
        caches.pages()
        caches.push_out()
        caches.pages()
        before = caches.pages()[0]
        assert caches.same([*prompt, *fresh(20)]) == 9 * PAGE
        assert caches.pages()[0] - before == 2
        assert caches.same([*prompt[: 5 * PAGE], *fresh(20)]) == 4 * PAGE
        assert caches.pe.metric("kvrail_hicache_stored_states_total") > 4
        report = asyncio.run(
            check(
                split.ce.url,
                turns=3,
                words=30,
                question_words=5,
                max_tokens=8,
                seed=9,
                page_tokens=PAGE,
                say=Console(file=io.StringIO()),
            )
        )
        assert report.good, report.problems
        caches.pages()
