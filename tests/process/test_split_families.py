# SPDX-License-Identifier: Apache-2.0
"""The split gives the single engine's tokens for families that keep more, or other things, than pages of plain KV.

Three by default: one without pages, one with sinks, one with pages and rings of two rotary embeddings. All of them:
`scripts/test tests/process/test_split_families.py --all-families`.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator

import pytest
from rich.console import Console

from kit.cluster import Server, serving, wait_until
from kit.split import MODEL, Split, start_single, start_split, wait_for_links
from kit.tiny_checkpoint import MAX_LENGTH, tiny_checkpoint
from kit.tiny_families import FAMILIES, WINDOW, WINDOWED
from kvrail.frontend.check_identity import check, make_prompts

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

# Family → page size, flags of the split: each lane, prompts in chunks and whole.
BY_DEFAULT: dict[str, tuple[int, tuple[str, ...]]] = {
    "mistral-window": (16, ("--max-num-batched-tokens", "24", "--state-slots", "16")),
    "gpt_oss": (128, ("--lane", "put", "--max-num-batched-tokens", "40")),
    "gemma3": (16, ("--lane", "put", "--put-transport", "tcp")),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "family" in metafunc.fixturenames:
        chosen = FAMILIES if metafunc.config.getoption("--all-families") else BY_DEFAULT
        metafunc.parametrize("family", list(chosen), scope="module")


@pytest.fixture(scope="module")
def servers(family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Split, Server]]:
    folder = tmp_path_factory.mktemp(family)
    model = tiny_checkpoint(folder / "model", family)
    page_tokens, flags = BY_DEFAULT.get(family, (16, ("--max-num-batched-tokens", "40")))
    lane = "put/tcp" if "tcp" in flags else "put/cma" if "put" in flags else "shm"
    split = start_split(model, folder, lane, page_tokens, *flags)
    single = start_single(model, folder)
    with serving(split.pe, split.ce, single):
        wait_for_links(split.ce, split.pe)
        split.ce.wait_ready()
        yield split, single.wait_ready()


def test_equal_remote_and_nothing_held(servers: tuple[Split, Server], family: str) -> None:
    split, single = servers
    window = WINDOW if family in WINDOWED else 0
    for concurrency in (1, 8):
        said = Console(file=io.StringIO(), width=200)
        report = asyncio.run(
            check(
                single.url,
                split.ce.url,
                model=MODEL,
                expect_lane=split.lane,
                prompts=make_prompts(split.page_tokens, MAX_LENGTH - 40, window=window),
                max_tokens=40,
                concurrency=concurrency,
                chat=True,
                say=said,
            )
        )
        assert report.good, f"{report}\n{said.file.getvalue()}"
        assert report.compared >= 20
        assert report.pages >= report.compared
    if window:
        assert split.ce.metric("kvrail_link_states_total") == split.ce.metric("kvrail_link_tickets_total")
    assert split.ce.metric("kvrail_checksum_mismatches_total") == 0

    def nothing_held(server: Server) -> bool:
        free, slots = (server.metric(f"kvrail_state_slots_{name}") for name in ("free", "capacity"))
        held = [server.metric(f"kvrail_{name}") for name in ("pages_held", "tickets")]
        return held == [0, 0] and free == slots and (slots > 0) is bool(window)

    wait_until(lambda: nothing_held(split.ce) and nothing_held(split.pe), 10, "nothing is held", split.ce)
