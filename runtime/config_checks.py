# SPDX-License-Identifier: Apache-2.0
"""Checks of single settings that take more than a comparison."""

from __future__ import annotations

from urllib.parse import urlsplit

from kvrail.runtime.errors import ConfigError

__all__ = ["LANES", "check_lane", "is_http_url", "is_lane"]

# What a lane may be called, for people (put/ takes other transports of UCX as well).
LANES = "shm, peer, stream, put, put/cma, put/tcp or put/cuda_ipc"


def is_http_url(url: str) -> bool:
    """Whether it is the URL of a server."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, an IPv6 address without its bracket
        return False


def is_lane(label: str) -> bool:
    """Whether a lane may be called so: shm, peer, stream, put, or put/ and a transport."""
    name, slash, transport = label.partition("/")
    return name == "put" and bool(transport) if slash else name in ("shm", "peer", "stream", "put")


def check_lane(required: str | None, lane: str, put_transport: str) -> None:
    """Raise ConfigError for a --require-lane that no lane is called, or that the other flags rule out."""
    if required is None:
        return
    name, _, transport = required.partition("/")
    if not is_lane(required):
        raise ConfigError(f"--require-lane {required}: must be {LANES}")
    if lane not in ("auto", name):
        raise ConfigError(f"--require-lane {required} cannot hold with --lane {lane}")
    if transport and put_transport not in ("auto", transport):
        raise ConfigError(f"--require-lane {required} cannot hold with --put-transport {put_transport}")
