# SPDX-License-Identifier: Apache-2.0
"""What processes have in /dev/shm by name, and what there is nobody's: another test may have segments there, too."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["orphans", "segments"]

_FOLDER = Path("/dev/shm")


def segments(pid: int) -> set[str]:
    """Names that a process has mapped or open; none when it is gone."""
    found: set[str] = set()
    process = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError):
        found.update(
            line.split(maxsplit=5)[5]
            for line in (process / "maps").read_text().splitlines()
            if f"{_FOLDER}/" in line
        )
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(os.readlink(descriptor))
    # One without a name any more is followed by " (deleted)".
    names = {path.removeprefix(f"{_FOLDER}/") for path in found if path.startswith(f"{_FOLDER}/")}
    return {name for name in names if (_FOLDER / name).exists()}


def orphans() -> set[str]:
    """Names that no process has: what dead ones have left."""
    names = set(os.listdir(_FOLDER))
    for process in Path("/proc").iterdir():
        if names and process.name.isdecimal():
            names -= segments(int(process.name))
    # Its owner may have ended meanwhile and removed it.
    return {name for name in names if (_FOLDER / name).exists()}
