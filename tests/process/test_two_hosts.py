# SPDX-License-Identifier: Apache-2.0
"""A PE and a CE on two hosts (network namespaces): identity, and nothing listens where it must not."""

from __future__ import annotations

import asyncio
import io
import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from kit.cluster import Server, serving
from kit.namespaces import Namespaces, listening, two_hosts
from kit.split import MODEL, links, wait_for_links
from kvrail.frontend.check_identity import check, make_prompts

if TYPE_CHECKING:
    from conftest import Cluster

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

PORT = 8889


@pytest.fixture(scope="module")
def hosts() -> Iterator[Namespaces]:
    with two_hosts() as names:
        yield names


@pytest.fixture(scope="module", params=["put/tcp", "stream", "stream over link-local IPv6"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def lane(way: str) -> str:
    return way.partition(" ")[0]


@pytest.fixture(scope="module")
def servers(
    cluster: Cluster, hosts: Namespaces, tmp_path_factory: pytest.TempPathFactory, way: str, lane: str
) -> Iterator[tuple[Server, Server]]:
    """(PE, CE), each with a runtime folder that the other cannot see."""
    model, folder = cluster.model("llama"), tmp_path_factory.mktemp("hosts")
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(16))
    flags = ["--served-model-name", MODEL, "--dtype", "float32", "--page-tokens", "16", "--kv-pages", "1024"]
    flags += [
        "--put-transport",
        "tcp",
        "--require-lane",
        lane,
        "--token-file",
        str(token),
    ]
    local = way != lane
    kv = (hosts.first_local, hosts.second_local) if local else (hosts.first_kv, hosts.second_kv)
    for name in ("a", "b"):
        (folder / name).mkdir(mode=0o700)
    pe = Server(
        "pe",
        model,
        folder,
        *(*flags, "--runtime-dir", str(folder / "a"), "--kv-host", kv[0]),
        port=PORT,
        host=hosts.first_kv,
        inside=hosts.inside(hosts.first, folder / "b"),
    )
    ce = Server(
        "ce",
        model,
        folder,
        *(*flags, "--runtime-dir", str(folder / "b"), "--kv-host", kv[1]),
        *("--pe-url", pe.url, "--local-prefill", "never"),
        port=PORT,
        host=hosts.front,
        inside=hosts.inside(hosts.second, folder / "a"),
    )
    with serving(ce, pe):
        wait_for_links(ce, pe)
        yield pe, ce


def test_identity(cluster: Cluster, servers: tuple[Server, Server], lane: str) -> None:
    _, ce = servers
    said = Console(file=io.StringIO(), width=200)
    for concurrency in (1, 8):
        report = asyncio.run(
            check(
                cluster.single("put/tcp").url,
                ce.url,
                model=MODEL,
                expect_lane=lane,
                prompts=make_prompts(16, 600),
                max_tokens=10,
                concurrency=concurrency,
                chat=True,
                say=said,
            )
        )
        assert report.good, f"{report}\n{said.file.getvalue()}"
        assert report.compared >= 20


def test_the_ce_says_why_there_is_no_shm(servers: tuple[Server, Server], lane: str) -> None:
    (link,) = links(servers[1])
    assert (link["lane"], link["transport"], link["same_host"]) == (lane.removesuffix("/tcp"), "tcp", False)
    assert "no shm: " in link["reason"]
    assert "socket" in link["reason"]


def test_nothing_else_listens(hosts: Namespaces, servers: tuple[Server, Server], way: str, lane: str) -> None:
    pe, ce = servers
    # The links; UCX uses no link-local address.
    six = {"ipv6"} if way != lane else set()
    assert listening(pe.process.pid) == {hosts.first_kv} | six
    # (Of lane stream nobody listens any more.)
    assert listening(ce.process.pid) == {hosts.second_kv, hosts.front}


def test_both_stop_and_leave_nothing(servers: tuple[Server, Server]) -> None:
    for server in reversed(servers):
        assert server.stop() < 5
        assert server.process.returncode == 0
