# SPDX-License-Identifier: Apache-2.0
"""Tool calls in the text of an answer, found while it grows. What is no good call stays text, and nothing breaks.

A call is given out when it is complete: only then is it known to be one, and a client cannot be told to forget half
a call. Text before, between and after calls goes out as it comes; white space beside a call is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

__all__ = ["BlockReader", "LeadReader", "Part", "Schemas", "ToolCall", "ToolReader", "call_of", "parse_json"]

# The parameters' JSON schema of each tool of a request, by name.
Schemas = Mapping[str, Mapping[str, Any]]
# What stands inside a block → its calls. Raises an Exception of any kind for what is none.
ReadBlock = Callable[[str, Schemas], "list[ToolCall]"]
_NOT_A_CALL = (ValueError, TypeError, KeyError, IndexError, SyntaxError, RecursionError, MemoryError)


class ToolCall(NamedTuple):
    """`arguments`: the text of a JSON object."""

    name: str
    arguments: str


Part = str | ToolCall


class ToolReader(Protocol):
    """One answer's reader; `flush` once at its end."""

    def feed(self, text: str) -> list[Part]: ...

    def flush(self) -> list[Part]: ...


class _Reader:
    """What readers share: the text not yet given out, and how a block becomes calls or text."""

    def __init__(self, read: ReadBlock, schemas: Schemas) -> None:
        self._read = read
        self._schemas = schemas
        self._held = ""
        self._gap = ""
        self._called = False

    def _text(self, text: str) -> list[Part]:
        """Text for the client; white space at its end waits for what follows."""
        text = self._gap + text
        body = text.rstrip()
        self._gap = text[len(body) :]
        return [body] if body else []

    def _block(self, block: str, literal: str) -> list[Part]:
        """The calls of a block, or `literal` when it has none."""
        try:
            calls = self._read(block, self._schemas)
            if not calls or any(call.name not in self._schemas for call in calls):
                raise ValueError("no call of a tool of this request")
        except _NOT_A_CALL:
            return self._text(literal)
        self._gap, self._called = "", True
        return list(calls)

    def _last_gap(self) -> list[Part]:
        gap, self._gap = self._gap, ""
        return [gap] if gap and not self._called else []


class BlockReader(_Reader):
    """Calls between `begin` and `end`; without an end, up to the next `begin` or the answer's end.

    `around` are markers that stand around blocks and mean nothing to a client.
    """

    def __init__(
        self, read: ReadBlock, schemas: Schemas, begin: str, end: str, around: Sequence[str] = ()
    ) -> None:
        super().__init__(read, schemas)
        self._begin, self._end = begin, end
        self._markers = (begin, *around)
        self._inside = False
        self._searched = 0

    def feed(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while True:
            more = self._leave() if self._inside else self._enter()
            if more is None:
                return parts
            parts += more

    def flush(self) -> list[Part]:
        held, self._held = self._held, ""
        if self._inside:  # models end their answer instead of their call
            return [*self._block(held, self._begin + held), *self._last_gap()]
        return [*self._text(held), *self._last_gap()]

    def _enter(self) -> list[Part] | None:
        """The text before the next marker. None: no marker yet."""
        places = [(place, marker) for marker in self._markers if (place := self._held.find(marker)) >= 0]
        if not places:
            keep = max(_overlap(self._held, marker) for marker in self._markers)
            text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
            return self._text(text) or None
        place, marker = min(places)
        text, self._held = self._held[:place], self._held[place + len(marker) :]
        self._inside, self._searched = marker == self._begin, 0
        return self._text(text)

    def _leave(self) -> list[Part] | None:
        """The calls of the block that ends here. None: it has not ended."""
        end = self._end or self._begin
        place = self._held.find(end, self._searched)
        if place < 0:
            self._searched = max(0, len(self._held) - len(end))
            return None
        block, rest = self._held[:place], self._held[place + len(self._end) :]
        self._held, self._inside = rest, False
        return self._block(block, self._begin + block + self._end)


class LeadReader(_Reader):
    """An answer that is nothing but calls: it may be one as long as `may_be(text so far)`.

    What fails that test is text from there on; `marker` in front (a special token) is dropped.
    """

    def __init__(
        self, read: ReadBlock, schemas: Schemas, may_be: Callable[[str], bool], marker: str = ""
    ) -> None:
        super().__init__(read, schemas)
        self._may_be = may_be
        self._marker = marker
        self._plain = False

    def feed(self, text: str) -> list[Part]:
        if self._plain:
            return self._text(text)
        self._held += text
        head = self._held.lstrip()
        if self._marker and (self._marker.startswith(head) or head.startswith(self._marker)):
            return []
        if self._may_be(head):
            return []
        self._plain = True
        held, self._held = self._held, ""
        return self._text(held)

    def flush(self) -> list[Part]:
        held, self._held = self._held, ""
        if self._plain or not held:
            return [*self._text(held), *self._last_gap()]
        return [
            *self._block(held.strip().removeprefix(self._marker).strip(), held),
            *self._last_gap(),
        ]


def parse_json(text: str) -> Any:
    """JSON as the standard has it: NaN and infinities are refused. Raises ValueError."""
    return json.loads(text, parse_constant=_refuse_constant)


def call_of(name: Any, arguments: Any) -> ToolCall:
    """A call from parsed parts; arguments are an object, or the JSON text of one. Raises ValueError."""
    if isinstance(arguments, str):
        arguments = parse_json(arguments or "{}")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("a call has a name and an object of arguments")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    # A lone surrogate can be written in JSON only as an escape.
    return ToolCall(name, text if text.isascii() or _is_unicode(text) else json.dumps(arguments))


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a beginning of `marker`."""
    longest = min(len(marker) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)
