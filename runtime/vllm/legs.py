# SPDX-License-Identifier: Apache-2.0
"""One request on two engines: what happens when its parts end, fail or overtake each other. No I/O, no vLLM.

Two legs run at once. The prefill leg is a call that answers with token 1. The core leg is a request in the engine core
of this side: parked until the KV of the prompt has come, then it goes on from token 2. What the client gets is token
1 first, then what the core says; the core may be early, so it is held back until token 1 has gone out.

When a leg fails, a new attempt in the core computes what is missing: the prompt, or the prompt and token 1 if that was
sent already. Each attempt has a number, and what comes for an older one is nobody's.
"""

from __future__ import annotations

from typing import Generic, Literal, Protocol, TypeVar

__all__ = ["Attempt", "Ending", "Hands", "Split"]

Out = TypeVar("Out")
Made = TypeVar("Made", covariant=True)
# What the core gets: prompt (its KV comes from elsewhere) and a place for token 1; the prompt; prompt and token 1.
Attempt = Literal["handoff", "prompt", "behind token 1"]
# How an output of the core ends its request: not, by an error, or in any other way.
Ending = Literal["no", "error", "end"]


class Hands(Protocol[Made]):
    """What a split can do. None of these calls back."""

    def call_prefill(self) -> None:
        """Start the prefill leg."""

    def drop_prefill(self) -> None:
        """Give the prefill leg up, if it still runs."""

    def submit(self, number: int, attempt: Attempt) -> None:
        """Give the core a request."""

    def withdraw(self, number: int) -> None:
        """Take a request out of the core, if it is still there."""

    def failure(self, reason: str) -> Made:
        """An output that ends the answer with an error."""

    def note(self, what: Literal["remote", "fallback"], reason: str) -> None:
        """For logs and metrics: token 1 came from elsewhere; the prompt is computed here after all."""


class Split(Generic[Out]):
    """The state of one split request. Methods that may have something for the client return it, in order."""

    def __init__(self, hands: Hands[Out], *, may_fall_back: bool) -> None:
        self.done = False
        self._hands = hands
        self._may_fall_back = may_fall_back
        self._number = 0
        self._attempt: Attempt | None = None
        # Token 1 was sent; the core's own outputs were sent; the core has ended while it was held back.
        self._began = False
        self._went_on = False
        self._ended_early = False
        self._held: list[Out] = []

    def start(self, *, only_token_1: bool) -> None:
        """Begin both legs, or the prefill leg alone when there will be no token 2."""
        # First: the other leg waits for what this one begins.
        self._hands.call_prefill()
        if not only_token_1:
            self._submit("handoff")

    def token_1(self, output: Out, *, final: bool) -> list[Out]:
        """The prefill leg has answered. `final`: nothing follows."""
        if self.done or self._began or self._attempt == "prompt":
            return []
        self._began = True
        self._hands.note("remote", "")
        if final:
            self._end()
            return [output]
        held, self._held = self._held, []
        self._went_on = bool(held)
        self.done = self._ended_early
        return [output, *held]

    def prefill_failed(self, reason: str) -> list[Out]:
        """The prefill leg has ended without an answer."""
        if self.done or self._began or self._attempt == "prompt":
            return []
        return self._fall_back(reason)

    def core(self, number: int, output: Out, ending: Ending) -> list[Out]:
        """The core said something about attempt `number`."""
        if self.done or number != self._number:
            return []
        if self._attempt == "handoff":
            if ending == "error" and not self._went_on:
                return self._fall_back("the KV of the prompt did not arrive")
            if not self._began:
                self._held.append(output)
                self._ended_early = ending != "no"
                return []
        self._went_on = True
        self.done = ending != "no"
        return [output]

    def abort(self) -> None:
        """Nobody wants the rest."""
        if not self.done:
            self._end()

    def _end(self) -> None:
        self.done = True
        self._held.clear()
        self._hands.drop_prefill()
        if self._attempt is not None:
            self._hands.withdraw(self._number)

    def _fall_back(self, reason: str) -> list[Out]:
        self._held.clear()
        self._ended_early = False
        self._hands.drop_prefill()
        if self._attempt is not None:
            self._hands.withdraw(self._number)
        if not self._may_fall_back:
            self.done = True
            return [self._hands.failure(reason)]
        self._hands.note("fallback", reason)
        self._submit("behind token 1" if self._began else "prompt")
        return []

    def _submit(self, attempt: Attempt) -> None:
        self._number += 1
        self._attempt = attempt
        self._hands.submit(self._number, attempt)
