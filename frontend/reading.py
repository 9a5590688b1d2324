# SPDX-License-Identifier: Apache-2.0
"""The text of a chat answer as its parts: thinking, content, tool calls. One reader for one answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrail.frontend.reasoning import ReasoningReader, Thought
from kvrail.frontend.tool_calls import Schemas, ToolCall, ToolReader
from kvrail.frontend.tool_formats import ToolFormat

__all__ = ["ChatReader", "Delta", "Reading"]


@dataclass
class Delta:
    """What some more text adds to a chat message."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)


@dataclass(frozen=True)
class Reading:
    """How the answers of one request are to be read. `thinking`: the prompt has opened the thinking."""

    marks: Thought | None = None
    thinking: bool = False
    tools: ToolFormat | None = None
    schemas: Schemas = field(default_factory=dict)
    # Calls beyond these are left out (parallel_tool_calls: false); None: any number.
    most_calls: int | None = None

    def reader(self) -> ChatReader:
        """A reader for one answer."""
        return ChatReader(self)

    @property
    def markers(self) -> Sequence[str]:
        """Texts that must be seen even where they are special tokens."""
        return (*(self.marks or ()), *(self.tools.markers if self.tools else ()))


class ChatReader:
    """Feed it the text of one answer; `flush` once at the end."""

    def __init__(self, reading: Reading) -> None:
        self._thoughts = ReasoningReader(reading.marks, inside=reading.thinking) if reading.marks else None
        self._calls_left = reading.most_calls
        self._tools: ToolReader | None = reading.tools.reader(reading.schemas) if reading.tools else None

    def feed(self, text: str) -> Delta:
        """What `text` adds for certain."""
        reasoning, content = self._thoughts.feed(text) if self._thoughts else ("", text)
        return self._delta(reasoning, content, ended=False)

    def flush(self) -> Delta:
        """What was held back."""
        reasoning, content = self._thoughts.flush() if self._thoughts else ("", "")
        return self._delta(reasoning, content, ended=True)

    def _delta(self, reasoning: str, content: str, *, ended: bool) -> Delta:
        if self._tools is None:
            return Delta(reasoning, content)
        parts = self._tools.feed(content) if content else []
        if ended:
            parts += self._tools.flush()
        text = "".join(part for part in parts if isinstance(part, str))
        calls = [part for part in parts if isinstance(part, ToolCall)]
        if self._calls_left is not None:
            calls = calls[: self._calls_left]
            self._calls_left -= len(calls)
        return Delta(reasoning, text, calls)
