# SPDX-License-Identifier: Apache-2.0
"""One request is one trace over both engines, at a real OTLP collector; a collector that is gone harms nobody."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from kit.fake_rank import FakeRank, output
from kvrail.runtime.messages import Accepted, Connect, Granted, Prefill, PrefillDone, Submit, ToFront, ToRank

service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
pytest.importorskip("opentelemetry.sdk")
CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 4}
TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """(its URL, (service, span) of what came)."""
    spans: list[tuple[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = service.ExportTraceServiceRequest()
            body.ParseFromString(self.rfile.read(int(self.headers["content-length"])))
            for resource in body.resource_spans:
                name = next(
                    a.value.string_value for a in resource.resource.attributes if a.key == "service.name"
                )
                spans.extend((name, span) for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", spans
    server.shutdown()
    server.server_close()
    thread.join()


def test_one_trace_over_both_engines(stand: Any, collector: tuple[str, list[tuple[str, Any]]]) -> None:
    url, spans = collector

    def pe_behave(rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
        if isinstance(message, Prefill):
            yield Accepted(request_id=message.request_id)
            ce.rank.send(output(message.request_id, [70], route="remote"))
            ce.rank.send(output(message.request_id, [71], "length", route="remote"))
            yield PrefillDone(request_id=message.request_id, ok=True, cached_tokens=16)

    def ce_behave(rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
        if isinstance(message, Submit):
            yield Granted(request_id=message.request_id, ticket=b"t" * 16)

    pe = stand(pe_behave, role="pe", otlp_endpoint=url)
    pe.server.wait_ready()
    ce = stand(
        ce_behave, role="ce", pe_url=(pe.server.url,), otlp_endpoint=url, local_prefill="never", ready=False
    )
    ce.rank.send(ce.rank.ready)
    ce.rank.wait_for(Connect)
    ce.rank.link(pe.rank)
    ce.server.wait_ready()
    headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    assert ce.client.post(CHAT, json=ASK, headers=headers).status_code == 200
    deadline = time.monotonic() + 15
    while len(spans) < 5 and time.monotonic() < deadline:
        time.sleep(0.05)
    found = {span.name: (name, span) for name, span in spans}
    assert found.keys() == {"kvrail chat", "wait for a place", "first token", "answer", "kvrail prefill"}
    assert {span.trace_id.hex() for _, span in spans} == {TRACE}
    root = found["kvrail chat"][1]
    assert root.parent_span_id.hex() == "b7ad6b7169203331"
    assert all(span.parent_span_id == root.span_id for _, span in spans if span is not root)
    assert (found["kvrail chat"][0], found["kvrail prefill"][0]) == ("kvrail-ce", "kvrail-pe")
    said = {attribute.key: attribute.value for attribute in root.attributes}
    assert (said["kvrail.outcome"].string_value, said["kvrail.completion_tokens"].int_value) == ("length", 2)
    for _, span in spans:
        # A start is computed from two clocks, read one after the other: to the nanosecond they need not agree.
        assert root.start_time_unix_nano - 1_000_000 <= span.start_time_unix_nano <= span.end_time_unix_nano
    assert "secret" not in str(spans)


def test_a_collector_that_is_not_there(stand: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", "opentelemetry")

    def answers(rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
        if isinstance(message, Submit):
            yield output(message.request_id, [70], "length")

    at = stand(answers, otlp_endpoint="http://127.0.0.1:9")
    assert at.client.post(CHAT, json=ASK).status_code == 200
