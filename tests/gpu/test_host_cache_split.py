# SPDX-License-Identifier: Apache-2.0
"""A whole split on GPUs with a pinned host cache at the PE: no token changes, and hits go out beside the prefill."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
import torch

from kit.caches import Caches, fresh
from kit.cluster import serving
from kit.split import start_single, start_split, wait_for_links
from kit.tiny_checkpoint import tiny_checkpoint

# The same promises as on CPUs.
from process.test_prefix_cache import (
    test_a_prompt_that_the_ce_has_whole_needs_no_page_but_a_doorbell,
    test_after_a_flush_nothing_hits,
    test_clients_that_leave_while_pages_are_copied_and_pushed,
    test_conversations_under_pressure,
    test_left_out_and_salted_requests_share_nothing,
    test_pages_go_straight_from_the_host_cache_to_the_ce,
    test_side_by_side_with_shared_beginnings,
    test_turn_two_pushes_only_what_the_ce_lacks,
)

__all__ = [
    "test_a_prompt_that_the_ce_has_whole_needs_no_page_but_a_doorbell",
    "test_after_a_flush_nothing_hits",
    "test_clients_that_leave_while_pages_are_copied_and_pushed",
    "test_conversations_under_pressure",
    "test_left_out_and_salted_requests_share_nothing",
    "test_pages_go_straight_from_the_host_cache_to_the_ce",
    "test_side_by_side_with_shared_beginnings",
    "test_turn_two_pushes_only_what_the_ce_lacks",
]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not torch.cuda.is_available(), reason=f"no CUDA device (torch {torch.__version__})"),
]

# Both sides on one GPU where there is only one.
CE_DEVICE = f"cuda:{min(1, max(0, torch.cuda.device_count() - 1))}"
LANES = {"peer": "peer", "put/cuda_ipc": "put"}
PE_FLAGS = ("--device", "cuda:0", "--kv-pages", "40", "--hicache-size-gb", "0.06")
FLAGS = ("--attention", "torch", "--max-num-batched-tokens", "64")


@pytest.fixture(scope="module", params=LANES)
def caches(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caches]:
    folder = tmp_path_factory.mktemp("caches")
    model = tiny_checkpoint(folder / "model", "llama")
    single = start_single(model, folder, "--device", "cuda:0", "--attention", "torch")
    split = start_split(
        model, folder, request.param, 16, *FLAGS, "--lane", LANES[request.param], pe_flags=PE_FLAGS,
        ce_flags=("--device", CE_DEVICE),
    )  # fmt: skip
    with serving(single, split.pe, split.ce):
        wait_for_links(split.ce, split.pe, within_s=120)
        single.wait_ready()
        yield Caches(split.pe, split.ce, single, folder)


def test_the_cache_is_shown(caches: Caches) -> None:
    caches.same(fresh(50))
    caches.pages()
    (rank,) = httpx.get(f"{caches.pe.url}/cache", timeout=10).json()["ranks"]
    assert caches.pe.metric("kvrail_hicache_stored_pages_total") >= 3, rank
    assert caches.pe.metric("kvrail_hicache_save_seconds_total") > 0
    assert "(pinned)" in caches.pe.log.read_text()


def test_a_model_with_windows_hits_with_its_states(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("windows")
    model = tiny_checkpoint(folder / "model", "gemma3")
    single = start_single(model, folder, "--device", "cuda:0", "--attention", "torch")
    split = start_split(
        model, folder, "peer", 16, *FLAGS, "--lane", "peer",
        pe_flags=(*PE_FLAGS, "--hicache-state-interval", "2"), ce_flags=("--device", CE_DEVICE),
    )  # fmt: skip
    with serving(single, split.pe, split.ce):
        wait_for_links(split.ce, split.pe, within_s=120)
        single.wait_ready()
        caches = Caches(split.pe, split.ce, single, folder)
        prompt = fresh(6 * 16 + 5)
        assert caches.same(prompt) == 0
        assert caches.same([*prompt, *fresh(3)]) == 6 * 16
        caches.pages()
        caches.push_out()
        caches.flush(caches.ce)
        assert caches.same([*prompt, *fresh(7)]) == 6 * 16
        caches.pages()
        assert caches.pe.metric("kvrail_hicache_stored_states_total") > 4
