# SPDX-License-Identifier: Apache-2.0
"""The listening socket: where it listens, what is said when it cannot, and that small answers go out at once."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from kit.live_server import config
from kvrail.frontend.server import listening_socket
from kvrail.runtime.errors import ConfigError


def test_small_answers_are_not_held_back() -> None:
    with contextlib.closing(listening_socket(config("single", Path("m")))) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        with (
            socket.create_connection(listener.getsockname()),
            contextlib.closing(listener.accept()[0]) as connection,
        ):
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_taken_port_is_named() -> None:
    with contextlib.closing(listening_socket(config("single", Path("m")))) as listener:
        port = listener.getsockname()[1]
        taken = config("single", Path("m"))
        object.__setattr__(taken, "port", port)
        with pytest.raises(ConfigError, match=str(port)):
            listening_socket(taken)
