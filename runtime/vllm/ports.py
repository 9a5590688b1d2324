# SPDX-License-Identifier: Apache-2.0
"""Where the connector of a prefill engine will listen: chosen by its front, which tells completion engines."""

from __future__ import annotations

import random

from kvrail.runtime.errors import ConfigError
from kvrail.transfer.control_socket import listen_tcp
from kvrail.transfer.errors import TransferError

__all__ = ["free_ports", "told_host"]

# Below the ports that systems give to outgoing connections: what is free now is still free when the model is loaded.
_RANGE = range(14600, 30000)
_TRIES = 64


def free_ports(host: str, wanted: int | None, count: int) -> int:
    """The first of `count` neighbouring ports of `host` (an address, a name or an interface) that are free.

    `wanted`: take these. Raises ConfigError when they are not free, or when no others are.
    """
    problem = "no ports are free"
    for _ in range(_TRIES if wanted is None else 1):
        first = random.choice(_RANGE[:-count]) if wanted is None else wanted
        try:
            for port in range(first, first + count):
                listen_tcp(host, port).close()
        except (TransferError, OSError, OverflowError) as error:
            problem = str(error)
        else:
            return first
    raise ConfigError(f"--kv-host {host}: {problem}; choose another with --kv-host and --kv-port")


def told_host(host: str) -> str:
    """The numeric address of `host`. Raises ConfigError."""
    try:
        listener = listen_tcp(host, 0)
    except (TransferError, OSError) as error:
        raise ConfigError(f"--kv-host {host}: {error}") from None
    with listener:
        address: str = listener.getsockname()[0]
    return f"[{address}]" if ":" in address else address
