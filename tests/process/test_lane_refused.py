# SPDX-License-Identifier: Apache-2.0
"""Two sides that cannot agree on a lane: no link, no answer over another way, and the reason wherever one looks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx
import pytest

from kit.cluster import Server, serving, wait_until
from kit.split import MODEL, ask, links

if TYPE_CHECKING:
    from conftest import Cluster

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

REASON = "the two sides differ in --lane"


@pytest.fixture(scope="module")
def ce(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Wants shm from a PE that may only put over tcp."""
    pe, model = cluster.split("put/tcp").pe, cluster.model("llama")
    flags = ("--served-model-name", MODEL, "--dtype", "float32", "--page-tokens", "16", "--kv-pages", "64")
    # The runtime folder is the cluster's: the same token.
    folder = pe.log.parent
    server = Server(
        "ce", model, folder, *flags, "--lane", "shm", "--pe-url", pe.url, "--local-prefill", "never"
    )
    with serving(server):
        wait_until(lambda: [link["state"] for link in links(server)] == ["refused"], 60, "refused", server)
        yield server


def test_lanes_and_ready_name_the_reason(ce: Server) -> None:
    (link,) = links(ce)
    assert REASON in link["reason"]
    assert "shm" in link["reason"]
    ready = httpx.get(f"{ce.url}/ready")
    assert ready.status_code == 503
    assert any(REASON in reason for reason in ready.json()["reasons"])
    assert REASON in ce.log.read_text()
    assert httpx.get(f"{ce.url}/health").status_code == 200


def test_a_request_is_refused_at_once(ce: Server) -> None:
    for stream in (False, True):
        answer = ask(ce.url, prompt=[300, 301], stream=stream)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert "no prefill engine is connected" in answer.json()["error"]["message"]


def test_the_pe_and_its_other_links_do_not_mind(cluster: Cluster, ce: Server) -> None:
    split = cluster.split("put/tcp")
    assert REASON in split.pe.log.read_text()
    answer = ask(split.ce.url, prompt=[300, 301, 302])
    assert answer.status_code == 200
    assert answer.headers["x-kvrail-prefill"] == "remote"
