# SPDX-License-Identifier: Apache-2.0
"""`runtime launch`: one front process and its ranks, started together, stopped together."""

from __future__ import annotations

import asyncio
import dataclasses
import faulthandler
import logging
import signal
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from kvrail.frontend.server import listening_socket, serve
from kvrail.frontend.tls import check_certificate, client_trust
from kvrail.frontend.vllm_launch import run_vllm
from kvrail.runtime.config import LaunchConfig
from kvrail.runtime.control.auth import load_cluster_token
from kvrail.runtime.control.rank_client import RankClient
from kvrail.runtime.errors import ConfigError
from kvrail.runtime.interpreter import begin_serving
from kvrail.runtime.machine_check import check_machine
from kvrail.runtime.process import RankProcesses
from kvrail.runtime.vllm.command import check_settings
from kvrail.runtime.vllm.installed import installed_version

__all__ = ["launch_role"]

_log = logging.getLogger(__name__)
# How a rank ends that was told to: in good order, or, as long as it loads and heeds nothing, by the signal itself.
_TOLD_TO_END = (0, -signal.SIGTERM)


def launch_role(config: LaunchConfig) -> int:
    """Serve until told to stop; returns the exit status. A rank that dies takes the role down: 1.

    2: the settings cannot work, as far as a rank alone could find out. Else that is a ConfigError, before listening.
    """
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(
        level=config.log_level.upper(),
        format=f"%(asctime)s %(levelname)s {config.role} front %(name)s: %(message)s",
    )
    for chatty in ("httpx", "httpcore"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    if config.engine == "vllm":
        check_settings(config)
        installed_version()
    if config.role == "ce" and not config.pe_url:
        _log.warning("no --pe-url: this engine prefills every prompt by itself")
    token = load_cluster_token(config)
    check_certificate(config)
    client_trust(config)
    check_machine(config)
    # First: a port that is taken should be said before a model is loaded.
    listener = listening_socket(config)
    if config.engine == "vllm":
        return run_vllm(config, token, listener)
    found = _with_model_folder(config)
    if found is None:
        return 2
    config = found
    with RankProcesses(config, token) as ranks:
        return asyncio.run(_run(config, ranks, token, listener))


def _with_model_folder(config: LaunchConfig) -> LaunchConfig | None:
    """The same settings, with --model as a folder that the front and all ranks can load; None: there is none.

    Fetching and converting happen here, once, in a process of their own: they need torch, and this one does not.
    """
    folder = Path(config.model).expanduser()
    if not folder.exists() and (folder.is_absolute() or folder.parent.is_dir()):
        raise ConfigError(f"--model {config.model}: no such file or folder")  # at once; torch takes seconds
    if not ((folder / "config.json").is_file() and any(folder.glob("*.safetensors"))):
        command = [sys.executable, "-P", "-m", "kvrail.frontend.cli", "convert", config.model]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            return None  # It has said why.
        folder = Path(done.stdout.strip())
    return dataclasses.replace(config, model=str(folder.resolve()), served_model_name=config.model_name)


async def _run(config: LaunchConfig, ranks: RankProcesses, token: bytes, listener: object) -> int:
    clients = [RankClient(number, endpoint) for number, endpoint in enumerate(ranks.endpoints)]
    stop = asyncio.Event()
    # From before the first rank to after the last one; in between, the server has handlers of its own.
    _heed_signals(stop)
    ranks.start()
    watcher = asyncio.create_task(_watch(ranks, stop))
    loading = [
        asyncio.create_task(_show_loading(config, clients)),
        asyncio.create_task(_begin_when_loaded(clients)),
    ]
    try:
        await serve(config, clients, token=token, listener=listener, stop=stop)  # type: ignore[arg-type]
    finally:
        _heed_signals(stop)
        status = watcher.result() if watcher.done() else 0
        for task in (watcher, *loading):
            task.cancel()
        await asyncio.gather(watcher, *loading, return_exceptions=True)
    await asyncio.to_thread(ranks.stop)
    return status


def _heed_signals(stop: asyncio.Event) -> None:
    """SIGTERM and SIGINT ask for an orderly stop, also where they would end the process and leave its folder."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


async def _watch(ranks: RankProcesses, stop: asyncio.Event) -> int:
    """Ask the server to stop when a rank process has ended, and return what that means for this role's exit status.

    0: it was told to end; 2: it refused its settings, and has said why; 1: anything else.
    """
    while True:
        if dead := ranks.dead():
            wrong = [(rank, status) for rank, status in dead if status not in _TOLD_TO_END]
            for rank, status in wrong:
                _log.error("rank %d ended with exit status %d: stopping this role", rank, status)
            stop.set()
            ends = {status for _, status in wrong}
            return 2 if ends == {2} else int(bool(ends))
        await asyncio.sleep(0.2)


async def _begin_when_loaded(clients: list[RankClient]) -> None:
    while any(client.ready is None for client in clients):
        await asyncio.sleep(0.05)
    begin_serving()


async def _show_loading(config: LaunchConfig, clients: list[RankClient]) -> None:
    """On a terminal, a spinner until every rank is ready; the log says the rest."""
    if not sys.stderr.isatty():
        return
    with Console(stderr=True).status("") as status:
        while waiting := [client for client in clients if client.ready is None]:
            status.update(
                f"loading {config.model_name}: {len(clients) - len(waiting)} of {len(clients)} ranks ready"
            )
            await asyncio.sleep(0.2)
