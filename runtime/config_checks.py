# SPDX-License-Identifier: Apache-2.0
"""Checks of single settings: in which range each number must lie, and what URLs and lanes look like."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from kvrail.runtime.errors import ConfigError

__all__ = ["LANES", "check_lane", "check_ranges", "is_base_url", "is_http_url", "is_lane", "is_origin"]

# What a lane may be called, for people (put/ takes other transports of UCX as well).
LANES = "shm, peer, stream, put, put/cma, put/tcp or put/cuda_ipc"
# Indices of pages and slots are 32 bits wide, of which Python's engines use 31.
_MOST = 2**31 - 1
_MOST_GIB = 2**20
_WEEK_S = 7 * 86400
# Least and most, both possible, of each number that was given. What is far beyond any use is a slip of the keyboard,
# and some would hurt the machine: so many threads, or rows for so many sequences, nobody has.
_RANGES: Final[dict[str, tuple[float, float]]] = {
    "dp": (1, 256),
    "page_tokens": (16, 256),
    "kv_pages": (2, _MOST),
    "state_slots": (1, _MOST),
    "hicache_size_gb": (0, _MOST_GIB),
    "hicache_state_slots": (1, _MOST),
    "hicache_state_interval": (1, _MOST),
    "max_model_len": (2, _MOST),
    "max_prompt_tokens": (1, _MOST),
    "max_num_seqs": (1, 2**16),
    "max_num_batched_tokens": (16, 2**24),
    "max_queue": (0, 2**20),
    "threads": (1, 1024),
    "copy_threads": (1, 64),
    "spin_us": (0, 10**6),
    "verify_kv": (0, 1),
    "tokenizer_verify_rate": (0, 1),
    "local_prefill_max_tokens": (0, _MOST),
    "heartbeat_s": (0.01, 60),
}
# The same, where nothing is too little.
_ABOVE_ZERO: Final[dict[str, float]] = {
    "kv_memory_gb": _MOST_GIB,
    "link_share": 1,
    "max_body_mb": 4096,
    "request_timeout_s": _WEEK_S,
}


def check_ranges(config: object) -> None:
    """Raise ConfigError for a number of the LaunchConfig `config` that is out of its range, naming its flag."""
    for name, (least, most) in _RANGES.items():
        value = getattr(config, name)
        if value is not None and not least <= value <= most:
            raise ConfigError(f"{_flag(name)} must be between {least} and {most}")
    for name, most in _ABOVE_ZERO.items():
        value = getattr(config, name)
        if value is not None and not 0 < value <= most:
            raise ConfigError(f"{_flag(name)} must be above 0 and at most {most}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def is_http_url(url: str) -> bool:
    """Whether it is the URL of a server."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, an IPv6 address without its bracket
        return False


def is_base_url(url: str) -> bool:
    """Whether paths can be put behind it: no query, no name or password."""
    if not is_http_url(url):
        return False
    parts = urlsplit(url)
    return not (parts.query or parts.fragment or parts.username or parts.password)


def is_origin(text: str) -> bool:
    """Whether a browser would say so of a page: a scheme, a host, perhaps a port, and not even a slash behind it."""
    return is_base_url(text) and not urlsplit(text).path


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
