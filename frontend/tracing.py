# SPDX-License-Identifier: Apache-2.0
"""One request as OpenTelemetry spans over both engines, sent to --otlp-endpoint; without it, nothing at all.

The completion engine makes the request's span (below the client's, when it sends `traceparent`), with one for the
wait and one for the answer; the prefill engine makes its own below, as the call carries the context on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from kvrail.runtime.errors import ConfigError

__all__ = ["Span", "Tracing"]


class Span:
    """One span; without tracing it is inert. Times are those of time.monotonic()."""

    def __init__(self, tracing: Tracing, name: str, started: float, context: Any) -> None:
        self._tracing = tracing
        self._span = tracing.begin(name, started, context)

    @property
    def context(self) -> Any:
        """For spans below this one."""
        return self._tracing.context_of(self._span)

    def headers(self) -> dict[str, str]:
        """What a call to another engine carries."""
        return self._tracing.headers(self.context)

    def below(self, name: str, started: float, ended: float, **attributes: Any) -> None:
        """A part that is over."""
        if self._span is not None:
            Span(self._tracing, name, started, self.context).end(ended, **attributes)

    def end(self, ended: float | None = None, error: str = "", **attributes: Any) -> None:
        """It is over; with `error` it failed."""
        if self._span is None:
            return
        self._span.set_attributes({f"kvrail.{name}": value for name, value in attributes.items()})
        if error:
            from opentelemetry.trace import StatusCode

            self._span.set_status(StatusCode.ERROR, error)
        self._span.end(self._tracing.wall_ns(time.monotonic() if ended is None else ended))


class Tracing:
    """The exporter of one front. Raises ConfigError when the packages are missing."""

    def __init__(self, endpoint: str | None, role: str) -> None:
        self._tracer: Any = None
        self._provider: Any = None
        if endpoint is None:
            return
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(f"--otlp-endpoint needs `pip install kvrail[otel]`: {error}") from None
        self._provider = TracerProvider(resource=Resource.create({"service.name": f"kvrail-{role}"}))
        # On a thread of its own; what it cannot send is dropped, never waited for.
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=5)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
        self._tracer = self._provider.get_tracer("kvrail")

    def span(self, name: str, carrier: Mapping[str, str], started: float | None = None) -> Span:
        """A span below the one that `carrier` (headers) names, if any."""
        context = None
        if self._tracer is not None:
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            context = TraceContextTextMapPropagator().extract(dict(carrier))
        return Span(self, name, time.monotonic() if started is None else started, context)

    def begin(self, name: str, started: float, context: Any) -> Any:
        """The library's span, or None."""
        if self._tracer is None:
            return None
        return self._tracer.start_span(name, context=context, start_time=self.wall_ns(started))

    def context_of(self, span: Any) -> Any:
        """The library's context of a span, or None."""
        if span is None:
            return None
        from opentelemetry.trace import set_span_in_context

        return set_span_in_context(span)

    def headers(self, context: Any) -> dict[str, str]:
        """`traceparent` of a context."""
        carrier: dict[str, str] = {}
        if context is not None:
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            TraceContextTextMapPropagator().inject(carrier, context)
        return carrier

    @staticmethod
    def wall_ns(moment: float) -> int:
        """Spans are timed by the wall clock."""
        return time.time_ns() - int((time.monotonic() - moment) * 1e9)

    def close(self) -> None:
        """Send what is left, briefly."""
        if self._provider is not None:
            self._provider.shutdown()
