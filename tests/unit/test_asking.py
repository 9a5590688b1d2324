# SPDX-License-Identifier: Apache-2.0
"""What tools ask a server before their work: no proxy in between, and a reason in place of a stack of calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvrail.frontend import check_identity, check_storm
from kvrail.frontend.asking import ask, asker, cache_page_tokens

_ANSWERS = {
    "/ce/cache": (200, b'{"role": "ce", "page_tokens": 16}'),
    "/pe/cache": (200, b'{"role": "pe", "page_tokens": 16}'),
    "/loading/cache": (503, b'{"error": {"message": "the model is loading"}}'),
}


class _Server(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, body = _ANSWERS[self.path]
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server, in an environment whose proxy does not exist."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("check", [check_identity.main, check_storm.main])
@pytest.mark.parametrize("lane", ["foo", "put/", "shm/tcp", ""])
def test_a_lane_that_there_is_not_is_refused_before_anybody_is_asked(
    check: Callable[..., None], lane: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        check(ref="http://127.0.0.1:1", split="http://127.0.0.1:1", expect_lane=lane)
    assert ended.value.code == 2
    assert f"--expect-lane {lane}: must be shm, peer, stream, put, put/cma" in capsys.readouterr().err


def test_no_proxy_stands_between_a_tool_and_its_server(url: str) -> None:
    assert cache_page_tokens("tool", f"{url}/ce", {}) == 16


@pytest.mark.parametrize(
    ("path", "reason"),
    [("/pe", "is a prefill engine"), ("/loading", "the model is loading")],
)
def test_what_cannot_serve_a_tool_is_said(
    url: str, path: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cache_page_tokens("tool", f"{url}{path}", {})
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("there", ["http://127.0.0.1:1/cache", "127.0.0.1:8888/cache"])
def test_nobody_there(there: str, capsys: pytest.CaptureFixture[str]) -> None:
    with asker({}) as client, pytest.raises(SystemExit) as ended:
        ask("tool", client, there)
    assert ended.value.code == 2
    assert f"cannot ask {there}" in capsys.readouterr().err
