# SPDX-License-Identifier: Apache-2.0
"""Runs another program that is asked to stop when its parent dies: python -m kvrail.runtime.bound PARENT COMMAND…

For what a tool starts for itself: killed, the tool cannot stop it. The wish outlives `exec`, and is the kernel's to
carry out.
"""

from __future__ import annotations

import os
import signal
import sys

from kvrail.runtime.process import die_with_parent

__all__ = ["bound_command", "main"]


def bound_command(command: list[str]) -> list[str]:
    """`command`, to be started by this very process, as one that gets SIGTERM when this process dies."""
    return [sys.executable, "-P", "-m", "kvrail.runtime.bound", str(os.getpid()), *command]


def main() -> None:
    """Entry point."""
    die_with_parent(int(sys.argv[1]), signal.SIGTERM)
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
