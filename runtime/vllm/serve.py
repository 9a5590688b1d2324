# SPDX-License-Identifier: Apache-2.0
"""The vLLM server process of a role: vLLM's own API server, with ours between its serving layer and its engine core.

Started as `python -m kvrail.runtime.vllm.serve <arguments of vLLM>`, with a ChildSpec as the first line on stdin. That
pipe stays open for as long as the front lives: when it closes, this process and all that it started end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from typing import Any

import msgspec

from kvrail.runtime.vllm.installed import check_version
from kvrail.runtime.vllm.spec import ChildSpec
from kvrail.transfer.errors import TransferError

__all__ = ["main"]

# From when the front is gone until everything is killed. vLLM's orderly end takes less.
_LAST_S = 5.0


def main() -> None:
    """Serve until told to stop by SIGTERM, or until the front is gone."""
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=ChildSpec)
    threading.Thread(target=_end_with_front, args=(sys.stdin.buffer.fileno(),), daemon=True).start()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    import uvloop
    import vllm
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from kvrail.runtime.vllm.call_server import CallServer
    from kvrail.runtime.vllm.compat import replace_core_client, server_parts
    from kvrail.runtime.vllm.core_tap import CoreTap
    from kvrail.runtime.vllm.server_side import ServerSide

    check_version(vllm.__version__)
    _log_as_vllm_does()

    def tapped(core: Any, config: Any) -> CoreTap:
        asyncio.get_running_loop()  # All that follows belongs to the loop of the API server.
        tap = CoreTap(core)
        side = ServerSide(spec, tap, config, vllm.__version__)
        if spec.role == "pe":
            try:
                CallServer(spec, tap, side)
            except (TransferError, OSError) as error:
                logging.getLogger(__name__).error(
                    "this prefill engine cannot start: calls could not be taken on port %d: %s",
                    spec.call_port,
                    error,
                )
                raise
        return tap

    replace_core_client(tapped)
    parts = server_parts()
    parser = parts.make_arg_parser(FlexibleArgumentParser(description="vLLM behind kvrail"))
    arguments = parser.parse_args(sys.argv[1:])
    parts.validate(arguments)
    uvloop.run(parts.run_server(arguments))


def _log_as_vllm_does() -> None:
    """Our own lines go where vLLM's go."""
    ours, theirs = logging.getLogger("kvrail"), logging.getLogger("vllm")
    ours.handlers, ours.propagate = list(theirs.handlers), False
    ours.setLevel(theirs.getEffectiveLevel())


def _end_with_front(pipe: int) -> None:
    """Wait for the other end of `pipe` to close; then end, and take the engine core and the workers along."""
    while os.read(pipe, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    # Whatever is left then, this process included: nobody is there to look after it.
    time.sleep(_LAST_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
