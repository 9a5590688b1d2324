# SPDX-License-Identifier: Apache-2.0
"""What is noted about the HTTP request at hand, from where its prompts are split up to where its answer goes out."""

from __future__ import annotations

import contextvars
from dataclasses import dataclass, field

__all__ = ["NOTES", "Notes"]


@dataclass
class Notes:
    """`routes`: where each of its prompts was prefilled, by the newest word. `refusal`: status and reason, in place of
    whatever vLLM would answer.
    """

    routes: list[str] = field(default_factory=list)
    refusal: tuple[int, str] | None = None

    @property
    def route(self) -> str:
        """The header of the answer: elsewhere only if all of them were; "" while nothing is known."""
        known = [route for route in self.routes if route]
        if not known:
            return ""
        return "remote" if all(route == "remote" for route in known) else "local"


# Set for each HTTP request. vLLM serves one in several tasks, all of which get a copy of the context: of this name.
NOTES: contextvars.ContextVar[Notes | None] = contextvars.ContextVar("kvrail_notes", default=None)
