# SPDX-License-Identifier: Apache-2.0
"""HTTP calls from engine to engine, over connections that are kept open between them.

Nothing is ever sent twice: a call that failed may have been heard. (aiohttp repeats only what HTTP calls idempotent,
when a kept connection turns out to be closed; a POST is not.)
"""

from __future__ import annotations

import math
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import aiohttp

__all__ = ["CallFailed", "KeptConnections", "Reply"]

# No answer of an engine comes near it; whatever is larger is no answer of ours.
_LARGEST_REPLY = 1 << 24


class CallFailed(Exception):
    """No answer, or none that can be read. The other side may have heard the call all the same."""


class Reply(NamedTuple):
    """An answer, whatever its status. `retry_after_s`: what its headers ask for, if they do so in a number."""

    status: int
    body: bytes
    retry_after_s: float | None = None

    @property
    def ok(self) -> bool:
        """2xx."""
        return 200 <= self.status < 300


class KeptConnections:
    """`call` is all there is to it. `to`: what https peers must prove, or the Unix socket of the one server behind all
    URLs. `idle_s`: how long an unused connection is kept.

    That must be less than servers keep theirs, or a call meets a connection that is being closed. To be made and closed
    in the event loop that calls.
    """

    def __init__(self, to: ssl.SSLContext | Path, *, idle_s: float = 15.0) -> None:
        # As many as there are calls at once: a limit would make a first token wait for another one's prefill.
        connector: aiohttp.BaseConnector = (
            aiohttp.UnixConnector(str(to), keepalive_timeout=idle_s, limit=0)
            if isinstance(to, Path)
            else aiohttp.TCPConnector(ssl=to, keepalive_timeout=idle_s, limit=0)
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        )

    async def call(
        self,
        method: Literal["GET", "POST"],
        url: str,
        *,
        headers: Mapping[str, str],
        body: bytes = b"",
        timeout_s: float | None,
        connect_s: float = 3.0,
    ) -> Reply:
        """One request and its answer, within `timeout_s` in all (None: as long as it takes).

        Raises CallFailed; cancelled, it hangs up.
        """
        limits = aiohttp.ClientTimeout(total=timeout_s, sock_connect=connect_s)
        try:
            async with self._session.request(
                method, url, data=body, headers=headers, timeout=limits, allow_redirects=False
            ) as answer:
                content = bytearray()
                async for piece in answer.content.iter_any():
                    content += piece
                    if len(content) > _LARGEST_REPLY:
                        raise CallFailed(f"an answer of more than {_LARGEST_REPLY >> 20} MiB")
                return Reply(answer.status, bytes(content), _retry_after_s(answer.headers))
        except aiohttp.ConnectionTimeoutError:
            raise CallFailed(f"cannot connect: no connection within {connect_s:g} s") from None
        except TimeoutError:
            raise CallFailed(f"no answer within {timeout_s or 0:g} s") from None
        except (aiohttp.ClientConnectorError, aiohttp.InvalidURL, UnicodeError) as error:
            # (UnicodeError: a name that no resolver takes.)
            raise CallFailed(f"cannot connect: {_why(error)}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise CallFailed(f"the connection broke: {error or type(error).__name__}") from None

    async def close(self) -> None:
        """Hang up."""
        await self._session.close()


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """The finer header first: `Retry-After` knows whole seconds only (or a date, which needs a common clock)."""
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            seconds = float(headers[name]) * unit
        except (KeyError, ValueError):
            continue
        if 0 <= seconds < math.inf:
            return seconds
    return None


def _why(error: Exception) -> str:
    """What aiohttp ran into, without what it tells of itself."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if not isinstance(cause, OSError):
        return str(cause)
    if not isinstance(cause, ssl.SSLError) and (cause.errno or 0) > 0:
        return os.strerror(cause.errno or 0)
    return cause.strerror or str(cause)
