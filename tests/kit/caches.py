# SPDX-License-Identifier: Apache-2.0
"""A split with prefix caches, compared with a single engine: who pushed what, and when all is quiet."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import httpx

from kit.cluster import Server, wait_until
from kit.split import ask

__all__ = ["Caches", "fresh"]


class Caches:
    """A split with small pools, the single engine to compare with, and the cluster token."""

    def __init__(self, pe: Server, ce: Server, single: Server, folder: Path) -> None:
        self.pe, self.ce, self.single = pe, ce, single
        self._token = (folder / "run" / "cluster-token").read_text().strip()

    def flush(self, server: Server) -> dict[str, Any]:
        header = {"Authorization": f"Bearer {self._token}"}
        response = httpx.post(f"{server.url}/cache/flush", headers=header, timeout=30)
        assert response.status_code == 200, response.text
        (rank,) = response.json()["ranks"]
        found: dict[str, Any] = rank
        return found

    def push_out(self) -> None:
        """Fill the PE's own pool with other prompts, one after the other."""
        for _ in range(3):
            assert ask(self.ce.url, prompt=fresh(400), max_tokens=1).status_code == 200

    def same(self, prompt: list[int], **fields: Any) -> int:
        """The split answers as the single engine does; returns the prompt tokens that hit on the PE."""
        # An answer that ends with its first token needs no page at all.
        body = {"prompt": prompt, "max_tokens": 6, "logprobs": 0, "ignore_eos": True}
        wanted = ask(self.single.url, **{**body, "prefix_cache": False}).json()
        response = ask(self.ce.url, **{**body, **fields})
        assert response.status_code == 200, response.text
        assert response.headers["x-kvrail-prefill"] == "remote"
        got = response.json()
        assert got["choices"][0]["logprobs"]["tokens"] == wanted["choices"][0]["logprobs"]["tokens"]
        return int(got["usage"]["prompt_tokens_details"]["cached_tokens"])

    def pages(self) -> tuple[float, float]:
        """(pages, tickets) that the CE has received, once all is quiet."""
        for _ in range(2):
            # By reports that are newer than whatever has just been asked.
            seen = self.steps()
            wait_until(
                lambda seen=seen: (
                    all(new > old for new, old in zip(self.steps(), seen, strict=True)) and self.quiet()
                ),
                30,
                "nothing is held",
                self.ce,
                self.pe,
            )
        return (self.ce.metric("kvrail_link_pages_total"), self.ce.metric("kvrail_link_tickets_total"))

    def steps(self) -> list[float]:
        return [server.metric("kvrail_steps_total") for server in (self.pe, self.ce)]

    def quiet(self) -> bool:
        names = ("pages_held", "tickets", "requests_open", "hicache_copies", "hicache_pages_pinned")
        return all(server.metric(f"kvrail_{name}") == 0 for server in (self.pe, self.ce) for name in names)


def fresh(length: int) -> list[int]:
    """Token ids that no test has used before."""
    return [random.randrange(300, 2000) for _ in range(length)]
