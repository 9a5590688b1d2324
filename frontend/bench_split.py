# SPDX-License-Identifier: Apache-2.0
"""A split of some GPUs against single engines on the same GPUs: starts all of them, drives each with the same loads.

(load) fixed lengths at rising concurrency; (push) what the links carry while every rank prefills; (mixed) streams
beside long prompts; (handover) one client; (replay) conversations that grow. For `load` on GPUs every engine has its
GPUs to itself, one after another; else all run at once and take turns, so that they meet the same machine (with less
memory for pages each). Each part stops at its limit of time.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.markup import escape
from rich.status import Status

from kvrail.frontend.chart import write
from kvrail.frontend.load.prompts import Prompts, read_vocab
from kvrail.frontend.refusing import refuse
from kvrail.frontend.split_bench.campaign import LIMITS, Campaign
from kvrail.frontend.split_bench.charts import charts
from kvrail.frontend.split_bench.engines import MODEL, plans
from kvrail.frontend.split_bench.places import joined, read_places
from kvrail.frontend.split_bench.report import markdown
from kvrail.frontend.split_bench.runner import Row, Runner, Settings
from kvrail.runtime.control.routing import Policy
from kvrail.runtime.output_file import writable

__all__ = ["main"]

_LINE_EVERY_S = 5.0
_LAG_MS = 3.0
_CPU_SHARE = 0.7


def _numbers(text: str, flag: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise typer.BadParameter(f"{flag} {text}: numbers such as 1,16")
    return found


def _limits(parts: str, limits: str) -> dict[str, float]:
    """Seconds of each chosen part."""
    found = dict(LIMITS)
    for item in filter(None, limits.split(",")):
        name, _, seconds = item.partition("=")
        try:
            found[name] = float(seconds)
        except ValueError:
            found[name] = 0.0
        if name not in LIMITS or found[name] <= 0:
            raise typer.BadParameter(f"--limits {item}: such as load=300; parts are {', '.join(LIMITS)}")
    chosen = parts.split(",")
    if unknown := set(chosen) - set(LIMITS):
        raise typer.BadParameter(f"--parts {', '.join(sorted(unknown))}: parts are {', '.join(LIMITS)}")
    return {name: seconds for name, seconds in found.items() if name in chosen}


def main(
    model: Annotated[str, typer.Option(help="model of all engines, as for runtime launch")],
    pe_gpus: Annotated[str, typer.Option(help="GPUs of the PE, as 0-3; or cpu (cpu,cpu: two ranks)")],
    ce_gpus: Annotated[str, typer.Option(help="GPUs of the CE, as 4-7; or cpu")],
    parts: Annotated[str, typer.Option(help="which, in this order")] = ",".join(LIMITS),
    limits: Annotated[
        str,
        typer.Option(
            help="seconds of parts, as load=300,mixed=60 (default: "
            + ", ".join(f"{n} {s:g}" for n, s in LIMITS.items())
            + ")"
        ),
    ] = "",
    start_within: Annotated[
        float, typer.Option(min=1, help="seconds that engines may take to start")
    ] = 300.0,
    tokens_in: Annotated[int, typer.Option("--in", min=1, help="load: tokens of a prompt")] = 4096,
    tokens_out: Annotated[int, typer.Option("--out", min=2, help="load: tokens of an answer")] = 256,
    concurrency: Annotated[str, typer.Option(help="load: requests at any moment")] = "1,4,16,64,256,512",
    per_stream: Annotated[int, typer.Option(min=1, help="load: requests of each stream")] = 2,
    push_in: Annotated[int, typer.Option(min=1, help="push: tokens of a prompt")] = 16384,
    push_requests: Annotated[int, typer.Option(min=1, help="push: prompts for each rank that prefills")] = 16,
    mixed_s: Annotated[float, typer.Option(min=0.2, help="mixed: seconds for each engine")] = 30.0,
    mixed_streams: Annotated[int | None, typer.Option(min=1, help="mixed: default 16 for two GPUs")] = None,
    mixed_in: Annotated[int, typer.Option(min=1, help="mixed: tokens of the streams' prompts")] = 512,
    mixed_out: Annotated[int, typer.Option(min=2, help="mixed: tokens of their answers")] = 256,
    mixed_long_in: Annotated[int, typer.Option(min=1, help="mixed: tokens of the long prompts")] = 16384,
    mixed_every: Annotated[
        float | None, typer.Option(min=0.01, help="mixed: seconds between these (default: 0.75 for two GPUs)")
    ] = None,
    handover_in: Annotated[str, typer.Option(help="handover: tokens of the prompts")] = "128,4096,32768",
    rounds: Annotated[int, typer.Option(min=1, help="handover: requests of each length and engine")] = 10,
    conversations: Annotated[
        int | None, typer.Option(min=1, help="replay: side by side (default: 8 a GPU)")
    ] = None,
    turns: Annotated[int, typer.Option(min=1, help="replay: turns of each")] = 10,
    shared_words: Annotated[int, typer.Option(min=1, help="replay: words that all begin with")] = 800,
    task_words: Annotated[int, typer.Option(min=1, help="replay: words of the first message")] = 800,
    turn_words: Annotated[int, typer.Option(min=1, help="replay: words of a tool's result")] = 300,
    answer_tokens: Annotated[int, typer.Option(min=2, help="replay: tokens of an answer")] = 64,
    routing: Annotated[str, typer.Option(help="replay: routings")] = "affinity,least-loaded",
    host_cache_gb: Annotated[
        str | None,
        typer.Option(help="replay: GiB of the host cache of each rank (default: 0,8; 0,0.25 on CPUs)"),
    ] = None,
    kv_gb: Annotated[
        float | None,
        typer.Option(min=0.001, help="GiB for pages of an engine that is alone (default: the engine's own)"),
    ] = None,
    kv_gb_shared: Annotated[
        float | None,
        typer.Option(min=0.001, help="GiB for pages where engines share (default: 16 on GPUs, 0.25 on CPUs)"),
    ] = None,
    launch_flags: Annotated[
        str, typer.Option(help="further flags for every runtime launch, each for the roles that have it")
    ] = "",
    pe_flags: Annotated[str, typer.Option(help="further flags for the PE")] = "",
    ce_flags: Annotated[str, typer.Option(help="further flags for the CE")] = "",
    vocab: Annotated[str, typer.Option(help="token ids are drawn from FIRST:END")] = "300:2000",
    seed: Annotated[int, typer.Option(min=0, help="other prompts")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", callback=writable, help="also write everything to this file")
    ] = None,
    markdown_file: Annotated[
        Path | None, typer.Option("--markdown", callback=writable, help="also write the tables there")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", callback=writable, help="charts: .html or .png")
    ] = None,
) -> None:
    """Compare a split with single engines. Exits 1 when a request failed or an engine did not start."""
    limits_s = _limits(parts, limits)
    try:
        pe, ce = read_places(pe_gpus, "--pe-gpus"), read_places(ce_gpus, "--ce-gpus")
        wanted, everything = plans(pe, ce), joined(pe, ce)
    except ValueError as error:
        refuse("bench_split", str(error))
    if plot_file is not None and plot_file.suffix not in (".html", ".htm", ".png"):
        raise typer.BadParameter(f"--plot {plot_file}: a file that ends in .html or .png")
    try:
        ids = read_vocab(vocab)
    except ValueError:
        raise typer.BadParameter(f"--vocab {vocab}: FIRST:END, such as 300:2000") from None
    for name in routing.split(","):
        if name not in get_args(Policy):
            raise typer.BadParameter(f"--routing {name}: {', '.join(get_args(Policy))}")
    for size in (host_cache_gb or "0").split(","):
        if not re.fullmatch(r"\d+(\.\d+)?", size):
            raise typer.BadParameter(f"--host-cache-gb {host_cache_gb}: GiB such as 0,8")
    pairs = max(1.0, everything.count / 2)
    settings = Settings(
        tokens_in=tokens_in,
        tokens_out=tokens_out,
        concurrency=_numbers(concurrency, "--concurrency"),
        per_stream=per_stream,
        push_in=push_in,
        push_requests=push_requests,
        mixed_s=mixed_s,
        mixed_streams=mixed_streams or round(16 * pairs),
        mixed_in=mixed_in,
        mixed_out=mixed_out,
        mixed_long_in=mixed_long_in,
        mixed_every_s=mixed_every or round(0.75 / pairs, 4),
        handover_in=_numbers(handover_in, "--handover-in"),
        rounds=rounds,
        conversations=conversations or 8 * everything.count,
        turns=turns,
        shared_words=shared_words,
        task_words=task_words,
        turn_words=turn_words,
        answer_tokens=answer_tokens,
    )
    for number in (signal.SIGTERM, signal.SIGHUP):
        # As by ctrl-C: the engines are stopped on the way out.
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    say = Console()
    rows: list[Row] = []
    whole: dict[str, Any] = {
        "command": sys.argv,
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "python": platform.python_version(),
        },
        "devices": {"pe": pe_gpus, "ce": ce_gpus},
        "settings": vars(settings),
        "rows": rows,
    }
    logs = Path(tempfile.mkdtemp(prefix="kvrail-bench-split-logs-"))
    began = time.monotonic()
    trouble = "interrupted"
    try:
        with say.status("starting") as status:
            campaign = Campaign(
                plans=wanted,
                settings=settings,
                limits_s=limits_s,
                runner=Runner(Prompts(MODEL, ids, seed), _progress(say, status), rows.append),
                logs=logs,
                start_within_s=start_within,
                flags=("--model", model, *shlex.split(launch_flags)),
                pe_flags=shlex.split(pe_flags),
                ce_flags=shlex.split(ce_flags),
                kv_gb=kv_gb,
                kv_gb_shared=kv_gb_shared,
                routing=routing.split(","),
                host_cache_gb=(host_cache_gb or ("0,0.25" if everything.first is None else "0,8")).split(","),
            )
            trouble = campaign.run()
    finally:
        # What was found is kept, also by ctrl-C and when a later engine does not start.
        whole |= {"seconds": round(time.monotonic() - began, 1), "trouble": trouble}
        device = "CPU rank" if everything.first is None else "GPU"
        _write(whole, markdown(rows, settings, device), say, json_file, markdown_file)
        drawn = charts(rows, device)
        if plot_file is not None and drawn:
            with contextlib.suppress(ValueError) if sys.exc_info()[0] else contextlib.nullcontext():
                write(
                    drawn, plot_file, "bench_split", f"{' '.join(sys.argv[1:])}; all scales are logarithmic"
                )
    # What a part's time did not allow for is no failure of an engine, and the tables say it.
    failed = sum(row.get("errors", 0) for row in rows if not row.get("cut"))
    _warn(rows, say)
    if trouble:
        Console(stderr=True).print(
            f"[bold red]bench_split:[/] {escape(trouble)}", highlight=False, soft_wrap=True
        )
    if trouble or failed:
        raise typer.Exit(1)


def _progress(say: Console, status: Status) -> Callable[[str], None]:
    """Where there is no terminal, a line now and then instead of one that changes."""
    last = [0.0]

    def tell(text: str) -> None:
        status.update(escape(text))
        if not say.is_terminal and time.monotonic() - last[0] > _LINE_EVERY_S:
            last[0] = time.monotonic()
            say.print(text, markup=False, highlight=False, soft_wrap=True)

    return tell


def _write(
    whole: dict[str, Any], text: str, say: Console, json_file: Path | None, markdown_file: Path | None
) -> None:
    say.print(text, markup=False, highlight=False, soft_wrap=True)
    if markdown_file is not None:
        markdown_file.write_text(f"`{shlex.join(whole['command'])}`, {whole['began']}\n\n{text}")
    if json_file is not None:
        json_file.write_text(json.dumps(whole, indent=1) + "\n")


def _warn(rows: Sequence[Row], say: Console) -> None:
    for row in rows:
        own = row.get("generator")
        if own and (own["lag_p99_ms"] > _LAG_MS or own["cpu_share"] > _CPU_SHARE):
            say.print(
                f"[yellow]{row['part']}, {row['engine']}: the generator was busy or kept from its core (late by "
                f"{own['lag_p99_ms']:.1f} ms at p99, {100 * own['cpu_share']:.0f} % of a core): times are too long[/]",
                highlight=False,
                soft_wrap=True,
            )
        for message in [] if row.get("cut") else list(row.get("error_messages", ()))[:3]:
            say.print(
                f"[red]{row['part']}, {row['engine']}: {escape(message)}[/]", highlight=False, soft_wrap=True
            )


if __name__ == "__main__":
    typer.run(main)
