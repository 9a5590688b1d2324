# SPDX-License-Identifier: Apache-2.0
"""An answer in the shapes of the Responses API: output items, whole or as typed events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from kvrail.frontend.detokenize import TokenBytes
from kvrail.frontend.reading import Reading
from kvrail.frontend.responses_shapes import ResponsesRequest
from kvrail.frontend.stream import Form, Piece
from kvrail.frontend.tool_calls import ToolCall
from kvrail.runtime.errors import RuntimeFault

__all__ = ["ResponsesForm"]


class ResponsesForm(Form):
    """Builds the output items as pieces come; every step of it is an event. Made for one request."""

    def __init__(
        self,
        request_id: str,
        model: str,
        tokens: TokenBytes,
        *,
        logprobs: bool,
        include_usage: bool,
        reading: Reading,
        body: ResponsesRequest,
    ) -> None:
        super().__init__(request_id, model, tokens, logprobs=logprobs, include_usage=include_usage)
        self._id = request_id
        self._reading = reading
        self._reader = reading.reader()
        self._events: list[bytes] = []
        self._number = 0
        self._output: list[dict[str, Any]] = []
        # The item that grows, and its text so far.
        self._open: dict[str, Any] | None = None
        self._text: list[str] = []
        self._reason: str | None = None
        self._response = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": model,
            "output": self._output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def opening(self) -> list[bytes]:
        self._event_of("response.created", response=self._response)
        self._event_of("response.in_progress", response=self._response)
        return self._take()

    def chunk(self, piece: Piece) -> list[bytes]:
        deltas = [self._reader.feed(piece.text)] if piece.text else []
        if piece.finish_reason is not None:
            deltas.append(self._reader.flush())
        for delta in deltas:
            if delta.reasoning:
                self._grow("reasoning", delta.reasoning)
            if delta.content:
                self._grow("message", delta.content)
            for call in delta.calls:
                self._call(call)
        if piece.finish_reason is not None:
            self._reason = piece.finish_reason
            if not self._output:
                self._begin("message")  # an empty answer is a message, too
            self._end()
        return self._take()

    def closing(self, usage: dict[str, Any]) -> list[bytes]:
        self._finish(usage)
        self._event_of(f"response.{self._response['status']}", response=self._response)
        return self._take()

    def whole(self, pieces: Sequence[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        for piece in pieces:
            self.chunk(piece)
        self._finish(usage)
        return self._response

    def failed(self, fault: RuntimeFault) -> list[bytes]:
        code = "rate_limit_exceeded" if fault.status == 429 else "server_error"
        self._response |= {"status": "failed", "error": {"code": code, "message": fault.message}}
        self._event_of("response.failed", response=self._response)
        return self._take()

    def _finish(self, usage: dict[str, Any]) -> None:
        if self._reason == "length":
            self._response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
            self._output[-1]["status"] = "incomplete"
        else:
            self._response["status"] = "completed"
        self._response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
            "output_tokens": usage["completion_tokens"],
            # Not counted apart from the rest.
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }

    def _grow(self, kind: str, text: str) -> None:
        """Add to the item of this kind that is open, or to a new one."""
        if self._open is None or self._open["type"] != kind:
            self._end()
            self._begin(kind)
        self._text.append(text)
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        self._event_of(f"response.{_PART[kind]}.delta", **self._place(0), delta=text, **more)

    def _begin(self, kind: str) -> None:
        item: dict[str, Any] = {"id": f"{_PREFIX[kind]}_{self._id}_{len(self._output)}", "type": kind}
        item |= {"role": "assistant"} if kind == "message" else dict[str, Any](summary=[])
        self._open = item | {"status": "in_progress", "content": []}
        self._output.append(self._open)
        self._event_of("response.output_item.added", output_index=self._index, item=self._open)
        self._event_of("response.content_part.added", **self._place(0), part=_part(kind, ""))

    def _end(self) -> None:
        """Close the item that is open."""
        if self._open is None:
            return
        kind, text = self._open["type"], "".join(self._text)
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        self._event_of(f"response.{_PART[kind]}.done", **self._place(0), text=text, **more)
        self._event_of("response.content_part.done", **self._place(0), part=_part(kind, text))
        self._open |= {"status": "completed", "content": [_part(kind, text)]}
        self._event_of("response.output_item.done", output_index=self._index, item=self._open)
        self._open, self._text = None, []

    def _call(self, call: ToolCall) -> None:
        """A call is known whole."""
        assert self._reading.tools is not None
        self._end()
        item: dict[str, Any] = {
            "id": f"fc_{self._id}_{len(self._output)}",
            "type": "function_call",
            "name": call.name,
        }
        item |= {"call_id": self._reading.tools.call_id(), "arguments": "", "status": "in_progress"}
        self._output.append(item)
        self._event_of("response.output_item.added", output_index=self._index, item=item)
        where: dict[str, Any] = {"item_id": item["id"], "output_index": self._index}
        self._event_of("response.function_call_arguments.delta", **where, delta=call.arguments)
        done = {"name": call.name, "arguments": call.arguments}
        self._event_of("response.function_call_arguments.done", **where, **done)
        item |= {"arguments": call.arguments, "status": "completed"}
        self._event_of("response.output_item.done", output_index=self._index, item=item)

    @property
    def _index(self) -> int:
        return len(self._output) - 1

    def _place(self, content_index: int) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": self._index, "content_index": content_index}

    def _event_of(self, kind: str, **fields: Any) -> None:
        body = msgspec.json.encode({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        self._events.append(b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n")

    def _take(self) -> list[bytes]:
        events, self._events = self._events, []
        return events


_PREFIX = {"message": "msg", "reasoning": "rs"}
_PART = {"message": "output_text", "reasoning": "reasoning_text"}


def _part(kind: str, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": _PART[kind], "text": text}
    return part | {"annotations": [], "logprobs": []} if kind == "message" else part
