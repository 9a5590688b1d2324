# SPDX-License-Identifier: Apache-2.0
"""Which UCX a process gets: the wheel's, a folder's, and never two."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvrail.transfer import ucx
from kvrail.transfer.errors import TransferError


def run(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def wheel() -> Path:
    spec = importlib.util.find_spec("libucx")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the UCX wheel is not installed")
    return Path(next(iter(spec.submodule_search_locations))) / "lib"


def test_the_wheel_is_the_default() -> None:
    facts = ucx.load_library()
    assert facts.path.parent.resolve() == wheel().resolve()
    assert facts.version >= (*ucx.OLDEST_UCX, 0)
    assert ucx.load_library("wheel") == facts


def test_a_folder_can_be_named() -> None:
    assert run(f"from kvrail.transfer import ucx; print(ucx.load_library({str(wheel())!r}).path)").startswith(
        str(wheel())
    )


def test_a_second_ucx_is_refused(tmp_path: Path) -> None:
    ucx.load_library()
    with pytest.raises(TransferError, match="already uses the UCX in"):
        ucx.load_library(str(tmp_path))


def test_a_folder_without_ucx_is_refused(tmp_path: Path) -> None:
    told = run(
        "from kvrail.transfer import ucx\n"
        f"try: ucx.load_library({str(tmp_path)!r})\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    assert told.startswith("TransferError UCX cannot be loaded from")


def test_the_log_goes_to_stderr() -> None:
    code = (
        "import os; os.environ['UCX_LOG_LEVEL'] = 'info'\n"
        "from kvrail.transfer import ucx; ucx.open_context('tcp', '127.0.0.1').close()"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == ""
    assert "UCX" in done.stderr


def test_a_hangup_still_ends_the_process() -> None:
    code = (
        "import os, signal, time\n"
        "from kvrail.transfer import ucx; ucx.open_context('tcp', '127.0.0.1')\n"
        "os.kill(os.getpid(), signal.SIGHUP); time.sleep(20)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=60).returncode == -signal.SIGHUP


def test_ending_without_closing_anything_is_clean() -> None:
    run(
        "from kvrail.transfer import ucx\n"
        "context = ucx.open_context('cma', '127.0.0.1')\n"
        "reactor = ucx.open_reactor(context, spin_us=50, copy_threads=2)\n"
        "here, there = (reactor.open_link(epoch=1, cookie=1) for _ in range(2))\n"
        "here.connect(there.address()); here.send(b'x'); writer = here.writer(1, ttl_s=9.0)"
    )


def test_a_reactor_that_gets_no_threads_is_refused_and_leaves_nothing_behind() -> None:
    run(
        "import os, resource, signal\n"
        "from kvrail.transfer import ucx\n"
        "context = ucx.open_context('tcp', '127.0.0.1')\n"
        "ucx.open_reactor(context, spin_us=0, copy_threads=1).close()\n"
        "left = lambda: (sorted(os.listdir('/proc/self/fd')), len(os.listdir('/proc/self/task')))\n"
        "before = left()\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))  # room for a few stacks\n"
        "try:\n"
        "    ucx.open_reactor(context, spin_us=0, copy_threads=64)\n"
        "    raise SystemExit('64 stacks of 8 MiB in 64 MiB?')\n"
        "except OSError as error:\n"
        "    assert 'unavailable' in str(error), error\n"
        "resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "assert left() == before\n"
        "assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()\n"
        "ucx.open_reactor(context, spin_us=0, copy_threads=64).close()\n"
        "context.close()"
    )


def test_event_kinds_are_those_of_the_native_module() -> None:
    ucx.load_library()
    from kvrail.transfer import _ucx

    assert {kind.name: int(kind) for kind in ucx.EventKind} == {
        name.removeprefix("EVENT_"): value for name, value in vars(_ucx).items() if name.startswith("EVENT_")
    }
