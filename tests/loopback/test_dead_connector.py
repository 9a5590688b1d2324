# SPDX-License-Identifier: Apache-2.0
"""A peer that dies right after it has connected costs an endpoint, not the process: our settings of UCX see to that."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kvrail.transfer.ucx import context_settings, load_library

PROGRAM = Path(__file__).with_name("dead_connector.c")


def test_an_endpoint_to_a_peer_that_has_just_died_fails(tmp_path: Path) -> None:
    library = load_library().path.parent
    compiler, headers = shutil.which("cc"), library.parent / "include"
    if compiler is None or not (headers / "ucp").is_dir():
        pytest.skip("no C compiler on the path, or no headers beside UCX")
    program = tmp_path / "dead_connector"
    link = [f"-L{library}", f"-Wl,-rpath,{library}", "-lucp", "-lucs"]
    subprocess.run([compiler, "-O1", "-I", headers, "-o", program, PROGRAM, *link], check=True)
    settings = [f"{name}={value}" for name, value in context_settings("tcp", "127.0.0.1").items()]
    done = subprocess.run(
        [program, *settings],
        env={**os.environ, "UCX_LOG_LEVEL": "fatal"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "Endpoint timeout\n"), done
