# SPDX-License-Identifier: Apache-2.0
"""One split system for all tests that break it: starting engines is what takes the time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kit.breakable import Breakable, breakable_split


@pytest.fixture(scope="session")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Breakable]:
    """PE, two CEs and the single engine. Tests that kill the PE leave it to the next `split.pe()` to replace it."""
    with breakable_split(tmp_path_factory.mktemp("split")) as system:
        yield system
