# SPDX-License-Identifier: Apache-2.0
"""What a model thinks before it answers, told apart from the answer while it grows."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["REASONING", "ReasoningReader", "Thought", "reasoning_of_template"]


class Thought(NamedTuple):
    """The marks around a model's thinking."""

    begin: str
    end: str


_THINK = Thought("<think>", "</think>")
REASONING = {"deepseek_r1": _THINK, "qwen3": _THINK, "mistral": Thought("[THINK]", "[/THINK]")}


def reasoning_of_template(template: str) -> str:
    """The name of the marks that a chat template uses, or "none"."""
    return next((name for name, marks in REASONING.items() if marks.end in template), "none")


class ReasoningReader:
    """Splits one answer into thinking and the rest. Thinking stands first or nowhere.

    `inside`: the prompt has opened it already. White space around the marks is dropped.
    """

    def __init__(self, marks: Thought, *, inside: bool) -> None:
        self._marks = marks
        self._state = "thinking" if inside else "undecided"
        self._held = ""
        self._started = False

    def feed(self, text: str) -> tuple[str, str]:
        """(thinking, answer): what may be given out of each now."""
        if self._state == "answer":
            return "", self._answer(text)
        self._held += text
        if self._state == "undecided":
            head = self._held.lstrip()
            if head.startswith(self._marks.begin):
                self._state, self._held = "thinking", head[len(self._marks.begin) :]
            elif self._marks.begin.startswith(head):
                return "", ""
            else:
                self._state, self._started = "answer", True
                held, self._held = self._held, ""
                return "", held
        return self._think()

    def flush(self) -> tuple[str, str]:
        """The answer has ended: what was held back."""
        held, self._held = self._held, ""
        return (held.rstrip(), "") if self._state == "thinking" else ("", held)

    def _think(self) -> tuple[str, str]:
        held = self._held if self._started else self._held.lstrip()
        thought, mark, rest = held.partition(self._marks.end)
        if mark:
            self._state, self._held, self._started = "answer", "", False
            return thought.rstrip(), self._answer(rest)
        # White space and a beginning of the mark wait for what follows.
        cut = len(held)
        for size in range(min(len(self._marks.end) - 1, len(held)), 0, -1):
            if held.endswith(self._marks.end[:size]):
                cut -= size
                break
        cut = len(held[:cut].rstrip())
        self._held = held[cut:]
        self._started = self._started or cut > 0
        return held[:cut], ""

    def _answer(self, text: str) -> str:
        if not self._started:
            text = text.lstrip()
            self._started = bool(text)
        return text
