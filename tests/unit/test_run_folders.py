# SPDX-License-Identifier: Apache-2.0
"""Folders of dead roles are cleared by the next role that starts; those of living ones never are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvrail.runtime.config import LaunchConfig
from kvrail.runtime.process import RankProcesses

_HOLDER = """
import sys
from kvrail.runtime.config import LaunchConfig
from kvrail.runtime.process import RankProcesses
ranks = RankProcesses(LaunchConfig(role="pe", model="m", runtime_dir=sys.argv[1]), b"")
print(ranks.directory, flush=True)
sys.stdin.read()
"""


def test_only_folders_that_no_process_holds_are_cleared(tmp_path_factory: pytest.TempPathFactory) -> None:
    base = tmp_path_factory.mktemp("run") / "run"
    command = [sys.executable, "-P", "-c", _HOLDER, str(base)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        theirs = Path(holder.stdout.readline().strip())
        # Its number may mean nothing here (another container); it lives all the same.
        renamed = theirs.rename(base / "pe-4194304-abcdef.run")
        with RankProcesses(LaunchConfig(role="ce", model="m", runtime_dir=str(base)), b"") as ours:
            assert renamed.is_dir()
            assert ours.directory.is_dir()
        assert not ours.directory.exists()
        holder.kill()
    with RankProcesses(LaunchConfig(role="ce", model="m", runtime_dir=str(base)), b""):
        assert not renamed.exists()
