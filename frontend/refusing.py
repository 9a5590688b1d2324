# SPDX-License-Identifier: Apache-2.0
"""How a tool of the command line refuses: one line on stderr that says why, and status 2."""

from __future__ import annotations

from typing import NoReturn

from rich.console import Console
from rich.markup import escape

__all__ = ["refuse"]


def refuse(tool: str, why: str) -> NoReturn:
    """End the program `tool`. Status 2: it did not run, and 1 stays for what it found."""
    Console(stderr=True).print(f"[bold red]{tool}:[/] {escape(why)}", highlight=False, soft_wrap=True)
    raise SystemExit(2)
