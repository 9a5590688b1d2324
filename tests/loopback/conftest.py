# SPDX-License-Identifier: Apache-2.0
"""Pairs of link ends: two in this process, or one here and one in a process of its own."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kit.remote import Remote

_PEER = Path(__file__).with_name("peer.py")
_spec = importlib.util.spec_from_file_location("loopback_peer", _PEER)
assert _spec is not None
assert _spec.loader is not None
peer_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(peer_module)


@pytest.fixture
def peers() -> Any:
    """The module of a link end: its class Peer, and what its ends agree on."""
    return peer_module


@pytest.fixture
def make_pair() -> Iterator[Callable[..., Any]]:
    """make_pair(transport, **options) → (writer end, receiver end) in this process, joined."""
    with ExitStack() as stack:

        def make(transport: str, **options: Any) -> tuple[Any, Any]:
            ends = tuple(peer_module.Peer(transport, reads=reads, **options) for reads in (False, True))
            for end in ends:
                stack.callback(end.close)
            ends[0].join(ends[1].card())
            ends[1].join(ends[0].card())
            return ends

        yield make


@pytest.fixture
def make_remote() -> Iterator[Callable[..., Any]]:
    """make_remote(transport, **options) → (end here, end in another process), joined.

    `reads_here`: of lane stream this is the reading end, else the other.
    """
    with ExitStack() as stack:

        def make(transport: str, reads_here: bool = False, **options: Any) -> tuple[Any, Remote]:
            remote = Remote(_PEER)
            stack.callback(remote.end)
            theirs = remote.do("open", transport=transport, reads=not reads_here, **options)
            here = peer_module.Peer(transport, reads=reads_here, **options)
            stack.callback(here.close)
            here.join(theirs)
            remote.do("join", card=here.card())
            return here, remote

        yield make
