# SPDX-License-Identifier: Apache-2.0
"""A PE and a CE with the links between them, for tests: started together, ready when every link is up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from kit.cluster import Server, wait_until

__all__ = ["MODEL", "Split", "ask", "links", "start_single", "start_split", "wait_for_links"]

# The name that every server of a test gives its model.
MODEL = "tiny"
_COMMON = ("--served-model-name", MODEL, "--dtype", "float32", "--log-level", "info")


class Split(NamedTuple):
    """`lane`: the one that its pages must take."""

    pe: Server
    ce: Server
    lane: str
    page_tokens: int


def start_split(
    model: Path,
    folder: Path,
    lane: str,
    page_tokens: int,
    *flags: str,
    pe_flags: Sequence[str] = (),
    ce_flags: Sequence[str] = (),
) -> Split:
    """Start both; they load in parallel. `wait_for_links` before use. The CE never prefills by itself."""
    pages = ("--page-tokens", str(page_tokens), "--kv-pages", str(16384 // page_tokens))
    common = (*_COMMON, *pages, "--require-lane", lane, *flags)
    pe = Server("pe", model, folder, *common, *pe_flags)
    ce = Server("ce", model, folder, *common, "--pe-url", pe.url, "--local-prefill", "never", *ce_flags)
    return Split(pe, ce, lane, page_tokens)


def start_single(model: Path, folder: Path, *flags: str) -> Server:
    """The engine to compare with: the same model, unsplit."""
    return Server("single", model, folder, *_COMMON, "--page-tokens", "16", "--kv-pages", "1024", *flags)


def links(server: Server) -> list[dict[str, Any]]:
    """The links in /lanes."""
    found: list[dict[str, Any]] = httpx.get(f"{server.url}/lanes", timeout=10).json()["links"]
    return found


def wait_for_links(ce: Server, *others: Server, count: int = 1, within_s: float = 90) -> None:
    """Return when `count` links of the CE are up."""

    def up() -> bool:
        for server in (ce, *others):
            assert server.process.poll() is None, f"{server.role} has ended\n{server.tail()}"
        return sum(link["state"] == "up" for link in links(ce)) >= count

    wait_until(up, within_s, f"{count} links of the ce are up", ce, *others)


def ask(url: str, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    """One greedy request, unless `body` says otherwise; no error is raised for any status."""
    body = {"model": MODEL, "temperature": 0, "max_tokens": 4, **body}
    return httpx.post(f"{url}{path}", json=body, timeout=60)
