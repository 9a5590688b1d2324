# SPDX-License-Identifier: Apache-2.0
"""A client that streams one completion on a thread of its own, and can hang up in the middle.

Tokens are compared by name, not by text: half a character of text looks like any other half.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import threading
from collections.abc import Sequence
from typing import Any

from kit.cluster import Server
from kit.slow_model import FIRST_TEXT_TOKEN, VOCABULARY

__all__ = ["Asking", "ask", "make_prompt"]


def make_prompt(length: int) -> list[int]:
    """Token ids that no test has used before, so no prefix cache knows them."""
    return [random.randrange(FIRST_TEXT_TOKEN, VOCABULARY) for _ in range(length)]


class Asking:
    """One greedy completion of exactly `max_tokens` tokens, under way from construction on.

    After `wait`: `status`, `route` (x-kvrail-prefill), `tokens`, and `error` (body or event; "" when all is well).
    A stream that just stops, without its [DONE] and without an error event, is `torn`.
    """

    def __init__(self, server: Server, prompt: Sequence[int], max_tokens: int = 6) -> None:
        self.prompt, self.max_tokens = list(prompt), max_tokens
        self.status, self.route, self.error, self.torn = 0, "", "", False
        self.retry_after: str | None = None
        self.tokens: list[str] = []
        self.first_token = threading.Event()
        self._hung_up = False
        # Longer than any test waits: a hang must be seen as a hang.
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        self._connection.connect()
        self._socket: socket.socket = self._connection.sock
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def hang_up(self) -> None:
        """Close the connection, as a browser tab does."""
        self._hung_up = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)

    def wait(self, within_s: float = 60) -> Asking:
        """Return when the answer has ended, in whatever way."""
        self._thread.join(within_s)
        assert not self._thread.is_alive(), (
            f"no end of the answer within {within_s} s; tokens so far: {self.tokens}"
        )
        return self

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    @property
    def summary(self) -> str:
        """For assertion messages."""
        return f"HTTP {self.status}, {self.route}, {len(self.tokens)} tokens, torn {self.torn}: {self.error}"

    def _run(self) -> None:
        try:
            self._ask()
        except (OSError, http.client.HTTPException) as error:
            if not self._hung_up:
                self.torn = True
                self.error = self.error or f"{type(error).__name__}: {error}"
        finally:
            self._connection.close()
            self.first_token.set()

    def _ask(self) -> None:
        body = {
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 0,
            "stream": True,
        }
        headers = {"Content-Type": "application/json", "Connection": "close"}
        self._connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = self._connection.getresponse()
        self.status, self.route = response.status, response.getheader("x-kvrail-prefill", "")
        self.retry_after = response.getheader("retry-after")
        if response.status != 200:
            self.error = response.read().decode()
            return
        for line in iter(response.readline, b""):
            if line.strip() == b"data: [DONE]":
                return
            if line.startswith(b"data: "):
                self._event(json.loads(line[6:]))
        self.torn = not self.error

    def _event(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = event["error"]["message"]
            return
        self.tokens += event["choices"][0]["logprobs"]["tokens"]
        self.first_token.set()


def ask(server: Server, prompt: Sequence[int], max_tokens: int = 6, within_s: float = 60) -> Asking:
    """Ask and wait for the end."""
    return Asking(server, prompt, max_tokens).wait(within_s)
