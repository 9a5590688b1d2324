# SPDX-License-Identifier: Apache-2.0
"""For all tests: signals as a terminal gives them, also when the run was started in the background or under nohup.

And who runs which when several workers do (scripts/test).
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kit.shares import Shares

# A child inherits what is ignored here, and then no test could stop it by ctrl-C or a hang-up.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    """What is too much for every run, and clients that live in an environment of their own."""
    parser.addoption("--litellm-python", help="Python of an environment with litellm, for its tests")
    parser.addoption(
        "--all-families", action="store_true", help="start a split of every model family, not of a few"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """In a worker of pytest-xdist: a shorter name for its folder, since paths of Unix sockets are short."""
    if hasattr(config, "workerinput"):
        folder = Path(config.option.basetemp)
        config.option.basetemp = folder.with_name(config.workerinput["workerid"].removeprefix("gw"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Shares:
    """See kit/shares.py."""
    from kit.shares import Shares

    return Shares(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a worker of pytest-xdist: its scheduler takes the shares in this order."""
    if hasattr(config, "workerinput"):
        from kit.shares import sort_by_share

        sort_by_share(items)
