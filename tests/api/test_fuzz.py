# SPDX-License-Identifier: Apache-2.0
"""Whatever comes in, something good comes out: no 5xx, no hang, no request left behind at the rank.

Schemathesis makes requests from the server's own OpenAPI document, right and wrong ones; hypothesis makes bodies that
are nearly right.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import hypothesis
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kit.answering import CALL, TEMPLATE, WEATHER, ids
from kit.fake_rank import FakeRank, output
from kit.live_server import LiveServer, config
from kit.tiny_model import END
from kvrail.runtime.messages import Abort, Submit, ToFront, ToRank

schemathesis = pytest.importorskip("schemathesis")

CALM = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


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
    assert {200, 400} <= seen["POST /v1/completions"], seen
    assert 200 in seen["POST /tokenize"], seen


WORDS = st.sampled_from(
    ["", "a", "stop", "text", "function", "auto", "weather", "\x00", "é🙂", "\ud800", "user"]
)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": WORDS | JUNK},
    optional={"tool_calls": JUNK, "tool_call_id": WORDS, "name": WORDS, "reasoning_content": WORDS},
)
FIELDS: dict[str, Any] = {
    "stream": st.booleans(),
    "max_tokens": st.integers(-1, 10) | JUNK,
    "temperature": st.floats(-1, 3) | JUNK,
    "top_p": st.floats(-1, 2),
    "top_k": st.integers(-2, 2**70),
    "seed": st.integers(-(2**70), 2**70),
    "stop": st.lists(WORDS, max_size=3) | WORDS | JUNK,
    "stream_options": st.just({"include_usage": True}) | JUNK,
    "tools": st.just([WEATHER]) | JUNK,
    "tool_choice": st.sampled_from(["auto", "none", "required"]) | JUNK,
    "parallel_tool_calls": st.booleans(),
    "chat_template_kwargs": st.dictionaries(WORDS, JUNK, max_size=2) | JUNK,
    "continue_final_message": st.booleans(),
    "add_generation_prompt": st.booleans(),
    "response_format": st.just({"type": "json_object"}) | JUNK,
    "n": st.integers(0, 3) | JUNK,
    "logprobs": st.booleans() | st.integers(0, 3),
    "top_logprobs": st.integers(0, 3),
    "logit_bias": st.dictionaries(WORDS | st.just("5"), st.floats(-200, 200), max_size=2),
    "min_tokens": st.integers(-1, 5) | JUNK,
    "echo": st.booleans(),
}
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": st.lists(MESSAGE, max_size=3)},
    "/v1/completions": {"prompt": WORDS | JUNK | st.lists(st.integers(0, 300), max_size=5)},
    "/v1/responses": {"input": WORDS | st.lists(MESSAGE | JUNK, max_size=3)},
    "/tokenize": {"prompt": WORDS | JUNK},
    "/detokenize": {"tokens": st.lists(st.integers(-1, 300)) | JUNK},
}
BODIES = st.sampled_from(sorted(PATHS)).flatmap(
    lambda path: st.tuples(st.just(path), st.fixed_dictionaries(PATHS[path], optional=FIELDS))
)


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
