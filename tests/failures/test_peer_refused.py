# SPDX-License-Identifier: Apache-2.0
"""Peers that do not fit (page size, model, token): the link is refused with the reason, and prompts are served here."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit.asking import ask, make_prompt
from kit.breakable import COMMON, Breakable, wait_idle
from kit.cluster import Server, serving, wait_until
from kit.slow_model import write_slow_model

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(180)]


def test_other_page_size_and_other_model(split: Breakable, tmp_path: Path) -> None:
    """One CE, two PEs that it must not take pages from."""
    pe = split.pe()
    other_model = write_slow_model(tmp_path / "other", heads=2)
    sizes = ("--page-tokens", "32", "--kv-pages", "64")
    other = Server("pe", other_model, split.folder, *COMMON, *sizes)
    ce = Server("ce", split.model, split.folder, *COMMON, *sizes, "--pe-url", pe.url, "--pe-url", other.url)
    with serving(other, ce):
        ce.wait_ready()
        other.wait_ready()

        def reasons() -> dict[object, str]:
            links = ce.http.get("/lanes").json()["links"]
            return {link["peer_url"]: link["reason"] for link in links if link["state"] == "refused"}

        wait_until(lambda: reasons().keys() == {pe.url, other.url}, 30, "both links are refused", ce, other)
        # The side whose link was refused says which field differs, and both values.
        assert "page_tokens" in reasons()[pe.url]
        assert "16 on the pe, 32 on the ce" in reasons()[pe.url]
        assert "kv_heads" in reasons()[other.url] or "model" in reasons()[other.url], reasons()
        assert all(ce.logged(reason) for reason in reasons().values())
        answer = ask(ce, make_prompt(70))
        split.check(answer)
        assert answer.route == "local"
        wait_idle(ce, pe, other)


def test_wrong_cluster_token(split: Breakable, tmp_path: Path) -> None:
    """Nobody learns anything from the PE; the CE says what is wrong, and serves by itself."""
    pe = split.pe()
    token = tmp_path / "token"
    token.write_text("not-the-token-of-this-cluster")
    token.chmod(0o600)
    ce = split.start_ce("--pe-url", pe.url, "--token-file", str(token))
    with serving(ce):
        ce.wait_ready()
        answer = ask(ce, make_prompt(20))
        split.check(answer)
        assert answer.route == "local"
        engines = ce.http.get("/lanes").json()["prefill_engines"]
        assert [engine["url"] for engine in engines] == [pe.url]
        assert "token" in engines[0]["trouble"]
        assert ce.logged(engines[0]["trouble"])
        assert ce.http.get("/lanes").json()["links"] == []
        wait_idle(ce, pe)
