# SPDX-License-Identifier: Apache-2.0
"""What a recorded answer says: when each token came, how many there were, and whether it is whole.

Chunks are dated by the read that brought them. A chunk that a server sends for several tokens is one arrival.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import h11
import msgspec

from kvrail.frontend.load.request import Recording

__all__ = ["Trace", "read"]

_SAID = 300


@dataclass(slots=True)
class Trace:
    """`arrivals`: perf_counter of each chunk with tokens. `error`: empty only for a whole, good answer.

    `tokens`, `prompt_tokens`, `cached_tokens`: from the server's usage; when it sends none, a token a chunk, and 0.
    """

    label: str
    begun: float
    ended: float
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    arrivals: list[float] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    done: bool = False
    hung_up: bool = False
    error: str = ""

    @property
    def first_s(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0] - self.begun


class _Logprobs(msgspec.Struct):
    tokens: list[str] | None = None
    content: list[dict[str, Any]] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: dict[str, Any] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None

    @property
    def said(self) -> str:
        """The text that it adds; a model's thoughts count."""
        if self.delta is None:
            return self.text or ""
        return str(self.delta.get("content") or self.delta.get("reasoning_content") or "")

    @property
    def opens(self) -> bool:
        """Whether it only opens a chat answer: a role, and no token yet."""
        return (
            self.delta is not None and "role" in self.delta and not self.said and self.finish_reason is None
        )


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    object: str | None = None
    message: str | None = None


_DECODER = msgspec.json.Decoder(_Event)


def read(recording: Recording) -> Trace:
    """Read what was recorded. Whatever is wrong with the answer is in `error`."""
    trace = Trace(recording.label, recording.begun, recording.ended, hung_up=recording.hung_up)
    trace.error = recording.error
    try:
        rest = _read_http(recording, trace)
    except (h11.RemoteProtocolError, msgspec.MsgspecError) as error:
        trace.error = trace.error or f"{type(error).__name__}: {error}"
        return trace
    if trace.error:
        return trace
    if trace.hung_up and trace.status in (0, 200):
        pass  # as much as was wanted
    elif trace.status != 200:
        trace.error = f"HTTP {trace.status}: {rest[:_SAID].decode(errors='replace')}"
    elif not trace.done:
        trace.error = "the stream ended without [DONE]"
    elif not trace.arrivals:
        trace.error = "no token came"
    trace.tokens = trace.tokens or len(trace.arrivals)
    return trace


def _read_http(recording: Recording, trace: Trace) -> bytes:
    """Take the answer apart; returns what is no server-sent event."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="POST", target="/", headers=[("Host", "recorded")]))
    connection.send(h11.EndOfMessage())
    rest = b""
    for came, data in (*recording.pieces, *(() if recording.hung_up else ((recording.ended, b""),))):
        connection.receive_data(data)
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA or event is h11.PAUSED:
                break
            if isinstance(event, h11.Response):
                trace.status = event.status_code
                trace.headers = {name.decode(): value.decode() for name, value in event.headers}
            elif isinstance(event, h11.Data):
                rest += bytes(event.data)
                if trace.status == 200:
                    *lines, rest = rest.split(b"\n")
                    for line in lines:
                        _read_line(line.rstrip(b"\r"), came, trace)
            elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                return rest
    return rest


def _read_line(line: bytes, came: float, trace: Trace) -> None:
    field_name, _, value = line.partition(b":")
    if field_name != b"data":
        return
    value = value.strip()
    if value == b"[DONE]":
        trace.done = True
        return
    event = _DECODER.decode(value)
    if event.error is not None or event.object == "error":
        message = event.error.get("message") if isinstance(event.error, dict) else event.error
        trace.error = trace.error or f"error event: {message or event.message}"[:_SAID]
        return
    if event.usage is not None:
        trace.tokens, trace.prompt_tokens = event.usage.completion_tokens, event.usage.prompt_tokens
        details = event.usage.prompt_tokens_details
        trace.cached_tokens = (details.cached_tokens or 0) if details is not None else 0
    if not event.choices or event.choices[0].opens:
        return
    choice = event.choices[0]
    # vLLM and others end a chat stream with a chunk that has nothing but the reason.
    if choice.said or choice.logprobs is not None or choice.finish_reason is None:
        trace.arrivals.append(came)
    trace.text.append(choice.said)
    if choice.logprobs is not None:
        trace.names += choice.logprobs.tokens or [str(one["token"]) for one in choice.logprobs.content or []]
