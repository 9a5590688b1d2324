# SPDX-License-Identifier: Apache-2.0
"""For all tests: signals as a terminal gives them, also when the run was started in the background or under nohup."""

from __future__ import annotations

import signal

import pytest

# A child inherits what is ignored here, and then no test could stop it by ctrl-C or a hang-up.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    """What is too much for every run, and clients that live in an environment of their own."""
    parser.addoption("--litellm-python", help="Python of an environment with litellm, for its tests")
    parser.addoption(
        "--all-families", action="store_true", help="start a split of every model family, not of a few"
    )
