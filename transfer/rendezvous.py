# SPDX-License-Identifier: Apache-2.0
"""Where two ranks on two hosts meet, as it stands on a command line."""

from __future__ import annotations

__all__ = ["rendezvous_address"]


def rendezvous_address(text: str) -> tuple[str, int]:
    """(host, port) of "HOST:PORT" or "[IPv6]:PORT". Raises ValueError."""
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not colon or not bare or (":" in bare) != host.startswith("["):
        raise ValueError(f"{text}: HOST:PORT, or [ADDRESS]:PORT for IPv6")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"{text}: the port must be 1 to 65535")
    return bare, int(port)
