# SPDX-License-Identifier: Apache-2.0
"""The vLLM server of a role as its front sees it: one child process with all that it starts, gone when the front is.

It has a process group of its own, so that a crash of the server leaves no engine core or worker behind: the front kills
the group. A crash of the front closes a pipe, on which the server ends itself and its group.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from types import TracebackType

import msgspec

from kvrail.runtime.config import LaunchConfig, child_environment
from kvrail.runtime.process import private_directory
from kvrail.runtime.vllm.command import server_command, server_variables, tensor_parallel_size
from kvrail.runtime.vllm.ports import free_ports, told_host
from kvrail.runtime.vllm.spec import ChildSpec

__all__ = ["VllmProcess"]


class VllmProcess:
    """The server process and the private folder of its socket. A context manager."""

    def __init__(self, config: LaunchConfig, token: bytes) -> None:
        self._config = config
        self._token = token
        self._process: subprocess.Popen[bytes] | None = None
        self.directory, self._lock = private_directory(config)
        self.socket = self.directory / "vllm.sock"
        self.status_file = self.directory / "connector.json"

    def __enter__(self) -> VllmProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start it. It answers on `socket` once the model is loaded."""
        config = self._config
        links = config.role != "single"
        ranks = tensor_parallel_size(config)
        # Those of the ranks, and one for calls.
        port = free_ports(config.kv_host, config.kv_port, ranks + 1) if links else 0
        process = subprocess.Popen(
            server_command(config, self.directory, port),
            stdin=subprocess.PIPE,
            env=child_environment(VLLM_NO_USAGE_STATS="1") | server_variables(config),
            process_group=0,
        )
        self._process = process
        spec = ChildSpec(
            role=config.role,
            token=self._token,
            pe_urls=config.pe_url,
            ssl_ca_certs=config.ssl_ca_certs,
            local_prefill=config.local_prefill,
            local_prefill_max_tokens=config.local_prefill_max_tokens,
            routing=config.routing,
            status_file=str(self.status_file) if links else "",
            peers_file=str(self.directory / "peers.json") if links else "",
            # By its definition, a ticket lives longer than the longest step takes.
            stuck_s=2 * config.ticket_ttl_s,
            address=f"{told_host(config.kv_host)}:{port}" if config.role == "pe" else "",
            call_port=port + ranks,
            ssl_certfile=config.ssl_certfile,
            ssl_keyfile=config.ssl_keyfile,
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # It has ended already, and says so by its exit status.
            # Not closed: that would tell it that this process is gone.
            process.stdin.write(msgspec.json.encode(spec) + b"\n")
            process.stdin.flush()

    def dead(self) -> int | None:
        """The exit status of the server when it has ended."""
        return None if self._process is None else self._process.poll()

    def stop(self, grace_s: float = 3.0) -> None:
        """Let it end by itself for a while, then kill all of it. Removes the folder."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(grace_s)
            self._kill_group(self._process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            if self._process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    self._process.stdin.close()
        shutil.rmtree(self.directory, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _kill_group(self, group: int) -> None:
        """The server, its engine core, its workers. Waits until the kernel has cleared them away, within a second."""
        deadline = time.monotonic() + 1.0
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(group, signal.SIGKILL)
                if self._process is not None:
                    self._process.poll()
                time.sleep(0.02)
