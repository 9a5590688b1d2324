# SPDX-License-Identifier: Apache-2.0
"""Token events to what a client reads: text increments, stop strings, log-probabilities, usage, finish reasons.

`Answer` turns outputs into `Piece`s; a `Form` writes pieces as chat or completion objects, whole or as server-sent
events. One answer is written by the same code whether it is streamed or not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from kvrail.frontend.detokenize import Detokenizer, TokenBytes
from kvrail.frontend.envelope import error_body
from kvrail.frontend.reading import Delta, Reading
from kvrail.frontend.stop import StopMatcher
from kvrail.frontend.tool_calls import ToolCall
from kvrail.runtime.errors import RuntimeFault
from kvrail.runtime.messages import Output
from kvrail.transfer.wire import TokenLogprob, unpack_u32

__all__ = [
    "DONE",
    "Answer",
    "ChatForm",
    "CompletionForm",
    "Echo",
    "Form",
    "Piece",
    "TokenNote",
    "event",
    "usage_of",
]

DONE = b"data: [DONE]\n\n"


class TokenNote(NamedTuple):
    """One token of the answer with its log-probability; None for the first token of a prompt, which has none."""

    token: int
    logprob: TokenLogprob | None


class Piece(NamedTuple):
    """What one event adds to an answer. `finish_reason` is set in the last piece of an answer."""

    text: str
    notes: list[TokenNote]
    finish_reason: str | None


class Echo(NamedTuple):
    """A prompt that is wanted back in front of the answer. `only`: no answer is wanted."""

    text: str
    tokens: Sequence[int]
    only: bool = False


class Answer:
    """One growing answer: detokenised, cut at stop strings, counted.

    `include_stop`: the stop string or token that ends it is part of it. Stop strings count behind `min_tokens`.
    """

    def __init__(
        self,
        tokens: TokenBytes,
        *,
        prompt_tokens: int,
        stops: Sequence[str],
        stop_token_ids: Sequence[int],
        include_stop: bool = False,
        min_tokens: int = 0,
        echo: Echo | None = None,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self.cached_tokens = 0
        self._text = Detokenizer(tokens)
        self._stop = StopMatcher(stops, include=include_stop)
        self._stop_token_ids = frozenset(() if include_stop else stop_token_ids)
        self._min_tokens = min_tokens
        self._echo = echo
        self._prompt_notes: list[TokenLogprob] = []

    def take_prompt(self, logprobs: Sequence[TokenLogprob]) -> None:
        """Log-probabilities of the next tokens of the prompt. They come before the first token of the answer."""
        self._prompt_notes += logprobs

    def feed(self, output: Output) -> Piece:
        """The next piece. Once it carries a finish reason the answer has ended: a stop string ends it here."""
        tokens = unpack_u32(output.tokens).tolist()
        self.cached_tokens = output.cached_tokens
        text: list[str] = []
        notes: list[TokenNote] = []
        if self._echo is not None:
            text.append(self._echo.text)
            if output.logprobs or self._prompt_notes:
                known = [None, *self._prompt_notes]
                notes += [TokenNote(*one) for one in zip(self._echo.tokens, known, strict=True)]
            if self._echo.only:
                return Piece(self._echo.text, notes, "length")
            self._echo = None
        for place, token in enumerate(tokens):
            self.completion_tokens += 1
            last = output.finish_reason is not None and place == len(tokens) - 1
            if last and output.finish_reason == "stop" and token in self._stop_token_ids:
                break  # the end token is counted, as it was computed, but it is no part of the answer
            if place < len(output.logprobs):
                notes.append(TokenNote(token, output.logprobs[place]))
            more = self._text.feed(token)
            text.append(more if self.completion_tokens <= self._min_tokens else self._stop.feed(more))
            if self._stop.matched is not None:
                return Piece("".join(text), notes, "stop")
        if output.finish_reason is not None:
            text.append(self._stop.feed(self._text.flush()))
            text.append(self._stop.flush())
        return Piece("".join(text), notes, output.finish_reason)


def usage_of(answers: Sequence[Sequence[Answer]]) -> dict[str, Any]:
    """Token counts of a response: the answers to each prompt, which counts once.

    Cached: prompt tokens whose KV a prefix cache had, wherever the prompt was prefilled.
    """
    prompt = sum(choices[0].prompt_tokens for choices in answers)
    completion = sum(answer.completion_tokens for choices in answers for answer in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(max(answer.cached_tokens for answer in choices) for choices in answers)
        },
    }


class Form:
    """How one kind of answer is written. Made for one answer of a response, which is its choice `index`.

    `running_usage`: gives the usage so far, for streams whose every event carries it.
    """

    prefix = ""
    whole_kind = ""
    chunk_kind = ""

    def __init__(
        self, request_id: str, model: str, tokens: TokenBytes, *, logprobs: bool, include_usage: bool
    ) -> None:
        self._head = {"id": f"{self.prefix}-{request_id}", "created": int(time.time()), "model": model}
        self._tokens = tokens
        self._logprobs = logprobs
        self._include_usage = include_usage
        self.index = 0
        self.running_usage: Callable[[], dict[str, Any]] | None = None

    def opening(self) -> list[bytes]:
        """What a stream begins with, before the first piece."""
        return []

    def chunk(self, piece: Piece) -> list[bytes]:
        """A piece as server-sent events; none when it says nothing."""
        raise NotImplementedError

    def closing(self, usage: dict[str, Any]) -> list[bytes]:
        """What a good stream ends with."""
        if not self._include_usage:
            return [DONE]
        return [event({**self._head, "object": self.chunk_kind, "choices": [], "usage": usage}), DONE]

    def failed(self, fault: RuntimeFault) -> list[bytes]:
        """What ends a stream that cannot go on."""
        return [event(error_body(fault))]

    def whole(self, pieces: Sequence[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        text = "".join(piece.text for piece in pieces)
        notes = [note for piece in pieces for note in piece.notes]
        choice = {"index": self.index, **self._content(text), "logprobs": self._noted(notes)}
        choice["finish_reason"] = pieces[-1].finish_reason
        return {**self._head, "object": self.whole_kind, "choices": [choice], "usage": usage}

    def _content(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _noted(self, notes: list[TokenNote]) -> dict[str, Any] | None:
        raise NotImplementedError

    def _event(self, choice: dict[str, Any]) -> bytes:
        body = {**self._head, "object": self.chunk_kind, "choices": [{"index": self.index, **choice}]}
        if self._include_usage:
            body["usage"] = self.running_usage() if self.running_usage is not None else None
        return event(body)


class ChatForm(Form):
    """`chat.completion` and `chat.completion.chunk`."""

    prefix, whole_kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        request_id: str,
        model: str,
        tokens: TokenBytes,
        *,
        logprobs: bool,
        include_usage: bool,
        reading: Reading | None = None,
    ) -> None:
        super().__init__(request_id, model, tokens, logprobs=logprobs, include_usage=include_usage)
        self._reading = reading or Reading()
        self._reader = self._reading.reader()
        self._calls = 0

    def opening(self) -> list[bytes]:
        return [self._delta({"role": "assistant", "content": ""})]

    def chunk(self, piece: Piece) -> list[bytes]:
        events = []
        for delta in self._read(piece):
            if delta.reasoning:
                events.append(self._delta({"reasoning_content": delta.reasoning}))
            for call in delta.calls:
                events += [self._delta({"tool_calls": [part]}) for part in self._call_parts(call)]
            if delta.content:
                events.append(self._delta({"content": delta.content}, piece.notes))
                piece = piece._replace(notes=[])
        if piece.notes:
            events.append(self._delta({"content": ""}, piece.notes))
        if piece.finish_reason is not None:
            events.append(self._event({"delta": {}, "logprobs": None, "finish_reason": self._reason(piece)}))
        return events

    def whole(self, pieces: Sequence[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        deltas = [delta for piece in pieces for delta in self._read(piece)]
        calls = [self._call(call) for delta in deltas for call in delta.calls]
        content = "".join(delta.content for delta in deltas)
        message: dict[str, Any] = {"role": "assistant", "content": content or None if calls else content}
        if reasoning := "".join(delta.reasoning for delta in deltas):
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        notes = [note for piece in pieces for note in piece.notes]
        choice = {"index": self.index, "message": message, "logprobs": self._noted(notes)}
        choice["finish_reason"] = self._reason(pieces[-1])
        return {**self._head, "object": self.whole_kind, "choices": [choice], "usage": usage}

    def _read(self, piece: Piece) -> list[Delta]:
        deltas = [self._reader.feed(piece.text)] if piece.text else []
        return deltas if piece.finish_reason is None else [*deltas, self._reader.flush()]

    def _reason(self, piece: Piece) -> str | None:
        return "tool_calls" if self._calls and piece.finish_reason == "stop" else piece.finish_reason

    def _call(self, call: ToolCall) -> dict[str, Any]:
        assert self._reading.tools is not None
        self._calls += 1
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": self._reading.tools.call_id(), "type": "function", "function": function}

    def _call_parts(self, call: ToolCall) -> list[dict[str, Any]]:
        """A call as clients of streams expect it: who is called, then with what."""
        index, head = self._calls, self._call(call)
        head["function"] = {"name": call.name, "arguments": ""}
        return [{"index": index, **head}, {"index": index, "function": {"arguments": call.arguments}}]

    def _delta(self, delta: dict[str, Any], notes: Sequence[TokenNote] = ()) -> bytes:
        logprobs = self._noted(list(notes)) if notes else None
        return self._event({"delta": delta, "logprobs": logprobs, "finish_reason": None})

    def _noted(self, notes: list[TokenNote]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        return {
            "content": [
                {
                    **self._named(note.token, note.logprob.logprob),
                    "top_logprobs": [self._named(*one) for one in note.logprob.top],
                }
                for note in notes
                if note.logprob is not None
            ]
        }

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._tokens.name(token),
            "logprob": _finite(logprob),
            "bytes": list(self._tokens.of(token)),
        }


class CompletionForm(Form):
    """`text_completion`, whole and in chunks."""

    prefix, whole_kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, request_id: str, model: str, tokens: TokenBytes, *, logprobs: bool, include_usage: bool
    ) -> None:
        super().__init__(request_id, model, tokens, logprobs=logprobs, include_usage=include_usage)
        self._offset = 0

    def chunk(self, piece: Piece) -> list[bytes]:
        if not (piece.text or piece.notes or piece.finish_reason):
            return []
        logprobs = self._noted(piece.notes)
        return [self._event({"text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason})]

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _noted(self, notes: list[TokenNote]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        names = [self._tokens.name(note.token) for note in notes]
        offsets = []
        for name in names:
            offsets.append(self._offset)
            self._offset += len(name)
        return {
            "tokens": names,
            "token_logprobs": [
                None if note.logprob is None else _finite(note.logprob.logprob) for note in notes
            ],
            "top_logprobs": [self._likeliest(note) for note in notes],
            "text_offset": offsets,
        }

    def _likeliest(self, note: TokenNote) -> dict[str, float] | None:
        """The likeliest tokens by name, and the chosen one when it is not among them (so one more than asked for)."""
        if note.logprob is None:
            return None
        named = {self._tokens.name(token): _finite(logprob) for token, logprob in note.logprob.top}
        if named:
            named.setdefault(self._tokens.name(note.token), _finite(note.logprob.logprob))
        return named


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _finite(logprob: float) -> float:
    """JSON has no -inf; the OpenAI API writes -9999.0 for it."""
    return max(logprob, -9999.0)
