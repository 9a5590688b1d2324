# SPDX-License-Identifier: Apache-2.0
"""Whatever comes in, something good comes out: no 5xx, no hang, no request left behind at the rank.

Schemathesis makes requests from the server's own OpenAPI document, right and wrong ones; hypothesis makes bodies that
are nearly right.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import hypothesis
import msgspec
import pytest
from hypothesis import given, settings

from kit.answering import CALL, TEMPLATE, ids
from kit.fake_rank import FakeRank, output
from kit.fuzzing import BODIES, CALM
from kit.live_server import LiveServer, config
from kit.tiny_model import END
from kvrail.runtime.messages import Abort, Submit, ToFront, ToRank

schemathesis = pytest.importorskip("schemathesis")


class Bookkeeper:
    """Answers each request in two steps, of which a client may see only the first, and knows what is open."""

    def __init__(self) -> None:
        self.open: set[str] = set()

    def __call__(self, rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
        if isinstance(message, Abort):
            self.open.discard(message.request_id)
        elif isinstance(message, Submit):
            self.open.add(message.request_id)
            choices = range(getattr(message.sampling, "n", 1))
            for choice in choices:
                for finish, text in ((None, f"Well. {CALL}"[:9]), ("stop", f"Well. {CALL}"[9:])):
                    tokens = [*ids(text), *([END] if finish else [])]
                    made = output(message.request_id, tokens, finish)
                    if choice:
                        made.items[0] = msgspec.structs.replace(made.items[0], choice=choice)
                    yield made
            self.open.discard(message.request_id)


@pytest.fixture(scope="module")
def server(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Bookkeeper]]:
    """One server for all examples."""
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "chat.jinja").write_text(TEMPLATE)
    keeper = Bookkeeper()
    with tempfile.TemporaryDirectory(prefix="kvrail-t") as short:
        endpoint = f"ipc://{short}/rank"
        live = LiveServer(config("single", model, chat_template=str(folder / "chat.jinja")), [endpoint])
        rank = FakeRank(endpoint, keeper, max_model_len=4096)
        live.wait_ready()
        try:
            yield live, keeper
        finally:
            live.stop()
            rank.stop()


@pytest.fixture(scope="module")
def client(server: tuple[Any, Bookkeeper]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server[0].url, timeout=20, trust_env=False) as client:
        yield client


def good(response: Any, keeper: Bookkeeper) -> None:
    """No fault of the server, an error body where there is an error, and nothing left behind."""
    status = response.status_code
    assert status < 500 or status == 501, f"{status} {response.text}"
    if status >= 400:
        assert json.loads(response.text)["error"]["message"]
    else:
        assert '"error":' not in response.text[:9]
    deadline = time.monotonic() + 5  # the rank may have its last line still to run
    while keeper.open and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not keeper.open


def ask_all(cases: Any, keeper: Bookkeeper, statuses: set[int]) -> None:
    """Some cases of one operation; their statuses are added."""

    @CALM
    @given(cases)
    def ask(case: Any) -> None:
        response = case.call(timeout=20)
        statuses.add(response.status_code)
        good(response, keeper)

    ask()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(300)
def test_requests_made_from_the_document(server: tuple[Any, Bookkeeper], client: httpx.Client) -> None:
    live, keeper = server
    document = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
    document.config.update(base_url=live.url)
    seen: dict[str, set[int]] = {}
    for found in document.get_all_operations():
        operation = found.ok()
        statuses = seen[operation.label] = set()
        for mode in schemathesis.GenerationMode:
            with contextlib.suppress(hypothesis.errors.Unsatisfiable):  # nothing can be wrong with a bare GET
                ask_all(operation.as_strategy(generation_mode=mode), keeper, statuses)
    # Right ones were among them, and wrong ones.
    assert {200, 400} <= seen["POST /v1/responses"] | seen["POST /v1/chat/completions"], seen
    assert 400 in seen["POST /v1/completions"], seen
    assert 200 in seen["POST /tokenize"], seen


@pytest.mark.timeout(300)
@settings(CALM, max_examples=250)
@given(BODIES)
def test_bodies_that_are_nearly_right(
    server: tuple[Any, Bookkeeper], client: httpx.Client, case: tuple[str, dict[str, Any]]
) -> None:
    path, body = case
    headers = {"content-type": "application/json"}
    good(client.post(path, content=json.dumps(body).encode(), headers=headers), server[1])


@pytest.mark.parametrize(
    "data",
    [
        b'{"messages": ' + b"[" * 100_000,
        b'{"messages": [{"role": "user", "content": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}]}",
        b'{"messages": [{"role": "user", "content": "x"}], "seed": ' + b"1" * 10_000 + b"}",
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b"\x00\xff",
        b"null",
        b'"text"',
    ],
)
def test_bodies_made_to_hurt(server: tuple[Any, Bookkeeper], client: httpx.Client, data: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/responses"):
        response = client.post(path, content=data, headers={"content-type": "application/json"})
        assert response.status_code == 400, response.text
        good(response, server[1])
