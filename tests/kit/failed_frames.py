# SPDX-License-Identifier: Apache-2.0
"""A hook for conftest files: what failed has been reported, so its frames let go of what they hold.

The frames of a failed test live on with its exception, and so do its tensors; a pool that is viewed cannot be closed,
so the clean-up would fail as well, and whatever shares the process with it.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Generator

import pytest

__all__ = ["pytest_runtest_makereport"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Clear the frames of the failure, and of what led to it, as soon as the report has been written."""
    report = yield
    error = call.excinfo.value if call.excinfo is not None else None
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        for frame, _ in traceback.walk_tb(error.__traceback__):
            with contextlib.suppress(RuntimeError):  # still running: pytest's own
                frame.clear()
                # pytest has looked at them: until Python 3.12 that leaves a copy, which is renewed by looking again.
                _ = frame.f_locals
        error = error.__cause__ or error.__context__
    return report
