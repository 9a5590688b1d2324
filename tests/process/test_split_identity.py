# SPDX-License-Identifier: Apache-2.0
"""The split gives the single engine's tokens, on each lane; and the check that says so can say no."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from socket import SOCK_DGRAM
from types import SimpleNamespace
from typing import TYPE_CHECKING

import psutil
import pytest
from rich.console import Console

from kit.cluster import Server, serving, wait_until
from kit.split import MODEL, ask, links
from kit.tiny_checkpoint import MAX_LENGTH, tiny_checkpoint
from kvrail.frontend.check_identity import Report, check, make_prompts

if TYPE_CHECKING:
    from conftest import Cluster

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

LANES = ["shm", "put/cma", "put/tcp", "stream"]


def compare(single: Server, ce: Server, lane: str, page_tokens: int, concurrency: int) -> tuple[Report, str]:
    """The real check, with what it printed."""
    said = Console(file=io.StringIO(), width=200)
    report = asyncio.run(
        check(
            single.url,
            ce.url,
            model=MODEL,
            expect_lane=lane,
            prompts=make_prompts(page_tokens, MAX_LENGTH - 12),
            max_tokens=12,
            concurrency=concurrency,
            chat=True,
            say=said,
        )
    )
    return report, said.file.getvalue()


def nothing_held(server: Server) -> bool:
    held = ("pages_owned", "pages_quarantined", "tickets_open")
    return all(server.metric(f"kvrail_{name}") == 0 for name in held)


@pytest.mark.parametrize("lane", LANES)
def test_equal_remote_and_over_the_lane(cluster: Cluster, lane: str) -> None:
    split, single = cluster.split(lane), cluster.single(lane)
    for concurrency in (1, 8):
        report, said = compare(single, split.ce, lane, split.page_tokens, concurrency)
        assert report.good, f"{report}\n{said}"
        assert report.compared >= 20
        # Every prompt has one page at least, and all of them were pushed.
        assert report.pages >= report.compared
    assert split.ce.metric("kvrail_checksum_mismatches_total") == 0
    assert split.ce.metric("kvrail_pages_verified_total") >= report.pages
    wait_until(lambda: nothing_held(split.ce) and nothing_held(split.pe), 10, "nothing is held", split.ce)


@pytest.mark.parametrize("lane", LANES)
def test_pages_are_counted_where_they_went(cluster: Cluster, lane: str) -> None:
    split = cluster.split(lane)
    name, _, transport = lane.partition("/")
    where = {"lane": name, **({"transport": transport} if transport else {})}

    def pages(server: Server, **labels: str) -> float:
        return server.metric("kvrail_link_pages_total", **labels)

    before, all_before, sent_before = pages(split.ce, **where), pages(split.ce), pages(split.pe)
    prompt = [400 + (7 * i) % 1500 for i in range(2 * split.page_tokens + 1)]
    answer = ask(split.ce.url, prompt=prompt, max_tokens=2)
    assert answer.status_code == 200
    assert answer.headers["x-kvrail-prefill"] == "remote"
    wait_until(lambda: pages(split.ce, **where) == before + 3, 10, "three pages over the lane", split.ce)
    # None has taken another way, and the other side says the same.
    assert pages(split.ce) == all_before + 3
    wait_until(lambda: pages(split.pe) == sent_before + 3, 10, "the pe counts the same", split.pe)


@pytest.mark.parametrize("lane", LANES)
def test_lanes_shows_the_link(cluster: Cluster, lane: str) -> None:
    split = cluster.split(lane)
    for server in (split.pe, split.ce):
        (link,) = (link for link in links(server) if link["state"] == "up")
        assert lane in (link["lane"], f"{link['lane']}/{link['transport']}")
        assert link["memory"].startswith("host")
        assert [probe["bytes"] for probe in link["probes"]] == [4096, 262144, 4194304]
        assert all(probe["gb_per_s"] > 0 for probe in link["probes"])
    assert links(split.ce)[0]["peer_url"] == split.pe.url


@pytest.mark.parametrize("lane", LANES)
def test_nothing_listens_beyond_this_machine(cluster: Cluster, lane: str) -> None:
    split = cluster.split(lane)
    for server in (split.pe, split.ce):
        sockets = [s for pid in server.pids() for s in psutil.Process(pid).net_connections("inet")]
        open_to = {s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN or s.type == SOCK_DGRAM}
        assert open_to == {"127.0.0.1"}


@pytest.fixture(scope="module")
def stranger(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A CE that prefills everything by itself, with other weights under the same name."""
    folder = tmp_path_factory.mktemp("stranger")
    model = tiny_checkpoint(folder / "model", "llama", seed=2)
    flags = ("--served-model-name", MODEL, "--dtype", "float32", "--page-tokens", "16", "--kv-pages", "512")
    pe_url = cluster.split("shm").pe.url
    server = Server("ce", model, folder, *flags, "--pe-url", pe_url, "--local-prefill", "always")
    with serving(server):
        yield server.wait_ready()


class TestTheCheckCanFail:
    """`check_identity` as a program, with its exit status."""

    def run(self, ref: Server, split: Server, *flags: str) -> tuple[int, str]:
        command = [sys.executable, "-P", "-m", "kvrail.frontend.check_identity", "--prompts", "4"]
        command += ["--ref", ref.url, "--split", split.url, "--max-tokens", "6", "--concurrency", "2"]
        done = subprocess.run(
            [*command, "--no-chat", *flags],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "COLUMNS": "200"},
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    def test_it_passes_when_all_is_well(self, cluster: Cluster) -> None:
        status, said = self.run(cluster.single("shm"), cluster.split("shm").ce, "--expect-lane", "shm")
        assert status == 0, said
        assert "4 compared, 0 different, 0 not remote" in said

    def test_other_tokens(self, cluster: Cluster, stranger: Server) -> None:
        status, said = self.run(stranger, cluster.split("shm").ce, "--expect-lane", "shm")
        assert status == 1, said
        assert "4 compared, 4 different, 0 not remote" in said
        assert "token 0: ref" in said
        assert "logit gap" in said

    def test_equal_but_local(self, cluster: Cluster) -> None:
        # The wrong way round.
        status, said = self.run(cluster.split("shm").ce, cluster.single("shm"))
        assert status == 1, said
        assert "4 compared, 0 different, 4 not remote" in said
        assert "x-kvrail-prefill is 'local'" in said

    def test_equal_but_over_another_lane(self, cluster: Cluster) -> None:
        status, said = self.run(cluster.single("shm"), cluster.split("shm").ce, "--expect-lane", "put/tcp")
        assert status == 1, said
        assert "4 compared, 0 different, 0 not remote, 0 pages and states over lane put/tcp" in said
        assert "no page or state received over lane put/tcp" in said

    def test_bfloat16_tolerates_differences_only(self, cluster: Cluster, stranger: Server) -> None:
        status, said = self.run(stranger, cluster.split("shm").ce, "--dtype", "bfloat16")
        assert status == 0, said
        status, said = self.run(cluster.split("shm").ce, cluster.single("shm"), "--dtype", "bfloat16")
        assert status == 1, said

    def test_one_server_under_two_names(self, cluster: Cluster) -> None:
        split = cluster.split("shm").ce
        for ref in (split.url, split.url.replace("127.0.0.1", "localhost")):
            status, said = self.run(SimpleNamespace(url=ref), split)  # type: ignore[arg-type]
            assert status == 2, said
            assert "are one server: its answers would be compared with themselves" in said

    def test_a_server_that_is_not_there(self, cluster: Cluster, tmp_path: Path) -> None:
        split = cluster.split("shm").ce
        command = [sys.executable, "-P", "-m", "kvrail.frontend.check_identity", "--split", split.url]
        done = subprocess.run(
            [*command, "--ref", "http://127.0.0.1:9"], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode != 0
        assert "cannot ask http://127.0.0.1:9/v1/models: " in done.stdout + done.stderr
        assert "Traceback" not in done.stderr
