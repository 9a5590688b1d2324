# SPDX-License-Identifier: Apache-2.0
"""Files that a tool writes behind its work: one that could not be written is refused before it."""

from __future__ import annotations

import os
from pathlib import Path

import typer

__all__ = ["fault_of_output", "writable"]


def fault_of_output(path: Path) -> str:
    """Why no file can be written there, or ""."""
    if path.is_dir():
        return f"{path} is a folder"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return f"{path} may not be written"
    return ""


def writable(path: Path | None) -> Path | None:
    """A callback for options of typer that name such a file."""
    if path is not None and (fault := fault_of_output(path)):
        raise typer.BadParameter(fault)
    return path
