# SPDX-License-Identifier: Apache-2.0
"""A pair of vLLM engines that kvrail splits, against the same with vLLM's own NIXL connector: same vLLM, same prompts.

The pairs take turns on this host's CPU, one there at a time: NIXL's progress threads never sleep, and whoever stood
beside them would have fewer cores. Needs vLLM, and `pip install nixl`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from kvrail.frontend.launched import Launched, LaunchFailed, free_port
from kvrail.frontend.load.arrivals import Load, run_load
from kvrail.frontend.load.prompts import Prompts
from kvrail.frontend.load.report import Cell, compare, comparison_table, table
from kvrail.frontend.load.request import Target
from kvrail.frontend.refusing import refuse
from kvrail.runtime.bound import bound_command
from kvrail.runtime.config import child_environment

__all__ = ["main"]

_START_S = 600.0
_CONNECTORS = {"nixl": "NixlConnector", "nixl-push": "NixlPushConnector"}
_NAME = "m"


class _Plain:
    """A plain vLLM server or its router, in a session of its own, ended as a whole."""

    def __init__(self, name: str, logs: Path, command: Sequence[str], **variables: str) -> None:
        self.log = logs / f"{name}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                bound_command([sys.executable, "-P", "-m", *command]),
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**child_environment(OMP_NUM_THREADS="1", VLLM_NO_USAGE_STATS="1"), **variables},
                start_new_session=True,
            )

    def wait_ready(self, url: str, deadline: float) -> None:
        """Return when it answers; raises LaunchFailed."""
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(url, timeout=2, trust_env=False).status_code == 200:
                    return
            if self.process.poll() is not None or time.monotonic() > deadline:
                text = self.log.read_text(errors="replace")[-3000:]
                raise LaunchFailed(f"{self.log.stem} did not start; its log ends with:\n{text}")
            time.sleep(0.5)

    def stop(self) -> None:
        """End it and all that it started."""
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass(frozen=True)
class _Engines:
    """What all engines are given; `vllm`: in vLLM's own words."""

    model: str
    dtype: str
    max_model_len: int
    vllm: list[str]


def _common(engines: _Engines) -> list[str]:
    """Flags that kvrail and vLLM call alike."""
    flags = ["--model", engines.model, "--served-model-name", _NAME, "--dtype", engines.dtype]
    return [*flags, "--max-model-len", str(engines.max_model_len)]


def _kvrail(stack: contextlib.ExitStack, engines: _Engines, logs: Path) -> tuple[str, list[Launched]]:
    """URL, and the roles."""
    common = ["--engine", "vllm", *_common(engines), "--runtime-dir", str(logs / "run")]
    roles: list[Launched] = []
    for role in ("pe", "ce"):
        more = ["--pe-url", roles[0].url] if roles else []
        roles.append(Launched(role, free_port(), logs, *common, *more, "--", *engines.vllm))
        stack.callback(roles[-1].stop)
    return roles[1].url, roles


def _nixl(stack: contextlib.ExitStack, how: str, engines: _Engines, logs: Path) -> tuple[str, list[Any]]:
    """URL of the router, and what is to be ready: (process, URL)."""
    urls, waits = [], []
    for role in ("kv_producer", "kv_consumer"):
        port = free_port()
        transfer = {"kv_connector": _CONNECTORS[how], "kv_role": role, "kv_buffer_device": "cpu"}
        command = ["vllm.entrypoints.openai.api_server", *_common(engines)]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        command += ["--kv-transfer-config", json.dumps(transfer), *engines.vllm]
        server = _Plain(
            f"{how}-{role}",
            logs,
            command,
            VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1",
            VLLM_NIXL_SIDE_CHANNEL_PORT=str(free_port()),
            UCX_TLS="tcp,sm,self",
        )
        stack.callback(server.stop)
        urls.append(f"http://127.0.0.1:{port}")
        waits.append((server, f"{urls[-1]}/health"))
    port = free_port()
    router = _Plain(
        f"{how}-router",
        logs,
        ["kvrail.frontend.bench_vllm_router", "--port", str(port), "--prefill", urls[0], "--decode", urls[1]],
    )
    stack.callback(router.stop)
    url = f"http://127.0.0.1:{port}"
    return url, [*waits, (router, f"{url}/v1/models")]


def _wait_linked(url: str, deadline: float) -> None:
    while time.monotonic() < deadline:
        engines = httpx.get(f"{url}/lanes", timeout=5, trust_env=False).json()["prefill_engines"]
        if engines and not any(one["trouble"] for one in engines):
            return
        time.sleep(0.5)
    raise LaunchFailed(f"no link: {engines}")


def _start(stack: contextlib.ExitStack, who: str, engines: _Engines, logs: Path) -> str:
    """Start a pair, and return its URL when it serves."""
    deadline = time.monotonic() + _START_S
    if who == "kvrail":
        url, roles = _kvrail(stack, engines, logs)
        for role in roles:
            role.wait_ready(deadline)
        _wait_linked(url, deadline)
        return url
    url, waits = _nixl(stack, who, engines, logs)
    for server, asked in waits:
        server.wait_ready(asked, deadline)
    return url


def _turn(
    who: str, number: int, engines: _Engines, loads: list[Load], cells: list[Cell], say: Console
) -> None:
    """Start a pair, load it, stop it."""
    prompts = Prompts(_NAME, (300, 2000), 0)
    with (
        tempfile.TemporaryDirectory(prefix="bench_vllm") as folder,
        contextlib.ExitStack() as stack,
        say.status(f"turn {number + 1}, {who}: starting") as status,
    ):
        target = Target(_start(stack, who, engines, Path(folder)))
        for at, (load, cell) in enumerate(zip(loads, cells, strict=True)):
            status.update(f"turn {number + 1}, {who}: {cell.name}")
            first = 1_000_000 * (1 + number * len(loads) + at)
            # What a server does once only (compiling, growing) is not what is measured.
            warm_up = Load(load.tokens_in, min(load.tokens_out, 16), requests=1)
            asyncio.run(run_load(warm_up, target, prompts, first + 999_000))
            cell.add(asyncio.run(run_load(load, target, prompts, first)))


def main(
    model: Annotated[str, typer.Option(help="folder of a model")],
    against: Annotated[str, typer.Option(help="nixl or nixl-push")] = "nixl",
    tokens_in: Annotated[
        str, typer.Option("--in", help="tokens of a prompt; several: a load each")
    ] = "128,700,1500",
    tokens_out: Annotated[int, typer.Option("--out", min=2, help="tokens of an answer")] = 32,
    requests: Annotated[int, typer.Option(min=1, help="requests of each length, pair and turn")] = 10,
    turns: Annotated[int, typer.Option(min=1, help="how often each pair is started")] = 2,
    dtype: Annotated[str, typer.Option(help="number type of all engines")] = "bfloat16",
    max_model_len: Annotated[int, typer.Option(help="of all engines")] = 2048,
    vllm_args: Annotated[
        str, typer.Option(help="what else all engines are given, in vLLM's words")
    ] = "--max-num-seqs 16",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="also write everything to this file")
    ] = None,
) -> None:
    """Compare first-token and inter-token times of two pairs. Exits 1 when any request failed."""
    say = Console()
    if against not in _CONNECTORS:
        raise typer.BadParameter(f"--against {against}: {' or '.join(_CONNECTORS)}")
    try:
        lengths = [int(part) for part in tokens_in.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--in {tokens_in}: token counts such as 128,700") from None
    engines = _Engines(model, dtype, max_model_len, vllm_args.split())
    began, started = datetime.now(UTC), time.perf_counter()
    loads = [Load(length, tokens_out, concurrency=1, requests=requests) for length in lengths]
    cells = {
        who: [
            Cell(who, f"{load.tokens_in} in, {load.tokens_out} out", {"in": load.tokens_in, "turns": turns})
            for load in loads
        ]
        for who in (against, "kvrail")
    }
    try:
        for number in range(turns):
            # Who begins changes, so that neither always comes second.
            for who in list(cells) if number % 2 == 0 else reversed(cells):
                _turn(who, number, engines, loads, cells[who], say)
    except LaunchFailed as error:
        refuse("bench_vllm", str(error))
    records = [cell.record() for both in zip(*cells.values(), strict=True) for cell in both]
    say.print(table(records))
    entries = compare(records)
    say.print(comparison_table(entries))
    if json_file is not None:
        whole = {
            "command": sys.argv,
            "began": began.isoformat(timespec="seconds"),
            "seconds": round(time.perf_counter() - started, 1),
            "machine": {"system": platform.platform(), "python": platform.python_version()},
            "records": records,
            "kvrail_against_nixl": entries,
        }
        json_file.write_text(json.dumps(whole, indent=1) + "\n")
    if any(record["errors"] for record in records):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
