# SPDX-License-Identifier: Apache-2.0
"""What the runtime raises, and what each means to an HTTP client.

RuntimeFault(status, type)
├── BadRequest        400  the request cannot be served as written
├── TooLong           400  prompt (plus max_tokens) exceeds the model's length
├── Overloaded        429  queue full; carries retry_after_s
├── Unavailable       503  no engine can take it now; carries retry_after_s
├── TimedOut          504  it took longer than --request-timeout-s
├── Cancelled         499  the client went away (never sent)
└── EngineFailed      500  the engine failed this request
ConfigError           (not HTTP) a setting is wrong; the process does not start
"""

from __future__ import annotations

__all__ = [
    "BadRequest",
    "Cancelled",
    "ConfigError",
    "EngineFailed",
    "Overloaded",
    "RuntimeFault",
    "TimedOut",
    "TooLong",
    "Unavailable",
    "fault_of",
]


class ConfigError(Exception):
    """A setting is wrong, or two settings contradict each other. The text says which and what to do."""


class RuntimeFault(Exception):
    """A request failed. `status` is the HTTP status, `kind` the OpenAI error type."""

    status = 500
    kind = "server_error"

    def __init__(self, message: str, *, retry_after_s: float | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.param = param


class BadRequest(RuntimeFault):
    status = 400
    kind = "invalid_request_error"


class TooLong(BadRequest):
    pass


class Overloaded(RuntimeFault):
    status = 429
    kind = "rate_limit_error"


class Unavailable(RuntimeFault):
    status = 503
    kind = "service_unavailable"


class TimedOut(RuntimeFault):
    status = 504
    kind = "timeout_error"


class Cancelled(RuntimeFault):
    status = 499
    kind = "cancelled"


class EngineFailed(RuntimeFault):
    pass


def fault_of(status: int, message: str, retry_after_s: float | None = None) -> RuntimeFault:
    """The fault that an HTTP status from inside (a rank, another engine) means."""
    if status == 429:
        return Overloaded(message, retry_after_s=retry_after_s or 1.0)
    if status == 503:
        return Unavailable(message, retry_after_s=retry_after_s or 1.0)
    return BadRequest(message) if 400 <= status < 500 else EngineFailed(message)
