# SPDX-License-Identifier: Apache-2.0
"""Load any OpenAI server and report time to first token, time between tokens, tokens a second and errors.

With two URLs the servers take turns, so that both meet the same machine and their difference means something: the
hand-over cost of a split is the difference of its time to first token to that of a single engine.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import platform
import ssl
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.markup import escape

from kvrail.frontend.load.arrivals import Load, run_load
from kvrail.frontend.load.prompts import Prompts, TextLength, read_vocab
from kvrail.frontend.load.report import Cell, compare, comparison_table, table
from kvrail.frontend.load.request import Target
from kvrail.frontend.refusing import refuse
from kvrail.runtime.output_file import writable

__all__ = ["main", "measure"]

# "16 streams of 512 in / 256 out and a prompt of 16k every 0.75 s": doc/numbers.md.
_MIXED = Load(512, 256, concurrency=16, seconds=30.0, long_in=16384, long_out=1, long_every_s=0.75)
_LAG_MS = 3.0
_CPU_SHARE = 0.7


def measure(
    loads: list[Load],
    targets: list[Target],
    prompts: dict[str, Prompts],
    *,
    rounds: int,
    warm_up: bool,
    say: Console,
) -> list[dict[str, Any]]:
    """Each load in turn; within a load the servers take turns, `rounds` each. Records as in `Cell.record`."""
    records = []
    numbers = itertools.count()
    for load in loads:
        cells = [Cell(target.url, _name(load), _facts(load, rounds)) for target in targets]
        with say.status(_name(load)) as status:
            if warm_up:
                for target in targets:
                    asyncio.run(_warm_up(load, target, prompts[target.url], next(numbers)))
            for turn in range(rounds):
                status.update(f"{_name(load)}: round {turn + 1} of {rounds}")
                first = 1_000_000 * next(numbers)
                # Who begins changes, so that neither always comes second.
                for place in range(len(targets)) if turn % 2 == 0 else reversed(range(len(targets))):
                    target = targets[place]
                    cells[place].add(asyncio.run(run_load(load, target, prompts[target.url], first)))
        records += [cell.record() for cell in cells]
    return records


async def _warm_up(load: Load, target: Target, prompts: Prompts, number: int) -> None:
    """One request of each length, alone: what a server does once only (compiling, growing) is not what is measured."""
    first = 1_000_000 * number + 999_000
    await run_load(Load(load.tokens_in, min(load.tokens_out, 16), requests=1), target, prompts, first)
    if load.long_every_s is not None:
        await run_load(Load(load.long_in, 1, requests=1), target, prompts, first + 1)


def _name(load: Load) -> str:
    how = f"{load.rate:g}/s" if load.rate is not None else f"x {load.concurrency}"
    name = f"{load.tokens_in} in, {load.tokens_out} out {how}"
    return name + (
        f", {load.long_in} in every {load.long_every_s:g} s" if load.long_every_s is not None else ""
    )


def _facts(load: Load, rounds: int) -> dict[str, Any]:
    facts = {
        "in": load.tokens_in,
        "out": load.tokens_out,
        "concurrency": load.concurrency if load.rate is None else None,
        "rate": load.rate,
        "rounds": rounds,
    }
    if load.long_every_s is not None:
        facts |= {"long_in": load.long_in, "long_out": load.long_out, "long_every_s": load.long_every_s}
    return facts


def _card(target: Target, model: str | None) -> dict[str, Any]:
    """The model that the server offers, or the one of this name."""
    try:
        # Without a proxy, as the requests that are measured.
        response = httpx.get(
            f"{target.url}/v1/models",
            headers=dict(target.headers),
            timeout=30,
            trust_env=False,
            verify=ssl.create_default_context(),
        )
        if response.status_code != 200:
            refuse(
                "bench_serve", f"{target.url}/v1/models: HTTP {response.status_code}: {response.text[:300]}"
            )
        cards: list[dict[str, Any]] = response.json()["data"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError) as error:
        refuse("bench_serve", f"cannot ask {target.url}/v1/models: {error}")
    for card in cards:
        if model in (None, card["id"]):
            return card
    refuse("bench_serve", f"{target.url} serves {', '.join(card['id'] for card in cards)}, and not {model}")


def _text_length(target: Target, prompts: Prompts) -> TextLength:
    """Ask twice, to learn how many tokens a word has there."""
    counts = []
    for words in (16, 64):
        text = prompts.words(words, words)
        what = {"messages": [{"role": "user", "content": text}]} if prompts.chat else {"prompt": text}
        body = {"model": prompts.model, "max_tokens": 1, **what}
        response = httpx.post(
            f"{target.url}{prompts.path}",
            json=body,
            headers=dict(target.headers),
            timeout=600,
            trust_env=False,
            verify=ssl.create_default_context(),
        )
        if response.status_code != 200:
            refuse(
                "bench_serve",
                f"{target.url}{prompts.path}: HTTP {response.status_code}: {response.text[:300]}",
            )
        counts.append((words, int(response.json()["usage"]["prompt_tokens"])))
    return TextLength.from_counts(counts[0], counts[1])


def _lengths(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise typer.BadParameter(f"--in {text}: token counts such as 128,4096")
    return found


def main(
    url: Annotated[list[str], typer.Option(help="server (give two, and they take turns)")],
    tokens_in: Annotated[str, typer.Option("--in", help="tokens of a prompt; several: a load each")] = "512",
    tokens_out: Annotated[int, typer.Option("--out", min=1, help="tokens of an answer")] = 64,
    concurrency: Annotated[int, typer.Option(min=1, help="requests at any moment")] = 1,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="instead: arrivals a second (Poisson)")
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="requests of each load and server")] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.1, help="instead: seconds of each load and server")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="turns that these are divided into")] = None,
    long_in: Annotated[int, typer.Option(min=1, help="tokens of the long prompts of --long-every")] = 16384,
    long_out: Annotated[int, typer.Option(min=1, help="tokens of their answers")] = 1,
    long_every: Annotated[
        float | None, typer.Option(min=0.01, help="seconds between long prompts, beside the rest")
    ] = None,
    mixed: Annotated[
        bool, typer.Option("--mixed", help="16 streams of 512 in, 256 out, and 16k in every 0.75 s, for 30 s")
    ] = False,
    chat: Annotated[bool, typer.Option(help="chat completions (implies --text)")] = False,
    text: Annotated[
        bool, typer.Option(help="prompts of words, not of token ids; lengths are close then")
    ] = False,
    vocab: Annotated[str, typer.Option(help="token ids are drawn from FIRST:END")] = "300:2000",
    logprobs: Annotated[
        bool, typer.Option(help="ask for log-probabilities: every token names itself")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="other prompts")] = 0,
    model: Annotated[str | None, typer.Option(help="model (default: the server's first)")] = None,
    api_key: Annotated[str | None, typer.Option(help="API key for all servers")] = None,
    warm_up: Annotated[
        bool, typer.Option(help="first one request of each length that does not count")
    ] = True,
    within: Annotated[
        float, typer.Option(min=1, help="seconds after which an answer counts as an error")
    ] = 600.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", callback=writable, help="also write everything to this file")
    ] = None,
) -> None:
    """Load OpenAI servers and report latencies and rates. Exits 1 when any request failed."""
    say = Console()
    if not 1 <= len(url) <= 2:
        raise typer.BadParameter("--url: one server, or two to compare")
    headers = (("Authorization", f"Bearer {api_key}"),) if api_key else ()
    targets = [Target(one.rstrip("/"), headers) for one in url]
    if len({target.url for target in targets}) < len(targets):
        raise typer.BadParameter("--url: twice the same server")
    try:
        ids = read_vocab(vocab)
    except ValueError:
        raise typer.BadParameter(f"--vocab {vocab}: FIRST:END, such as 300:2000") from None
    if mixed:
        span = seconds or _MIXED.seconds
        turns = rounds or (1 if len(url) == 1 else 2)
        assert span is not None
        loads = [Load(**{**vars(_MIXED), "seconds": span / turns, "within_s": within})]
    else:
        count = None if seconds is not None else requests or max(8, 2 * concurrency)
        # One at a time: every request has its counterpart right beside it.
        turns = rounds or (
            count if count is not None and concurrency == 1 and rate is None and len(url) == 2 else 1
        )
        loads = [
            Load(
                length,
                tokens_out,
                concurrency=concurrency,
                rate=rate,
                requests=None if count is None else max(1, count // turns),
                seconds=None if seconds is None else seconds / turns,
                long_in=long_in,
                long_out=long_out,
                long_every_s=long_every,
                within_s=within,
            )
            for length in _lengths(tokens_in)
        ]
    prompts = {}
    for target in targets:
        card = _card(target, model)
        longest = max(
            max(load.tokens_in + load.tokens_out, (load.long_in + load.long_out) if load.long_every_s else 0)
            for load in loads
        )
        if card.get("max_model_len") is not None and longest > card["max_model_len"]:
            refuse(
                "bench_serve",
                f"{target.url} takes {card['max_model_len']} tokens, prompt and answer; {longest} are wanted",
            )
        extra: dict[str, Any] = {"logprobs": True} if chat else {"logprobs": 0}
        made = Prompts(card["id"], ids, seed, chat=chat, extra=tuple(extra.items()) if logprobs else ())
        if text or chat:
            made = Prompts(**{**vars(made), "text": _text_length(target, made)})
        prompts[target.url] = made
    began = datetime.now(UTC)
    started = time.perf_counter()
    records = measure(loads, targets, prompts, rounds=turns, warm_up=warm_up, say=say)
    say.print(table(records))
    entries = compare(records) if len(targets) == 2 else []
    if entries:
        say.print(comparison_table(entries))
    _warn(records, say)
    if json_file is not None:
        whole = {
            "command": sys.argv,
            "began": began.isoformat(timespec="seconds"),
            "seconds": round(time.perf_counter() - started, 1),
            "machine": {
                "cores": os.cpu_count(),
                "system": platform.platform(),
                "python": platform.python_version(),
            },
            "records": records,
            "second_against_first": entries,
        }
        json_file.write_text(json.dumps(whole, indent=1) + "\n")
    if any(record["errors"] for record in records):
        raise typer.Exit(1)


def _warn(records: list[dict[str, Any]], say: Console) -> None:
    for record in records:
        for message, count in record["error_messages"].items():
            say.print(
                f"[red]{record['url']}: {count} x {escape(message)}[/]", highlight=False, soft_wrap=True
            )
        own = record["generator"]
        if own["lag_p99_ms"] > _LAG_MS or own["cpu_share"] > _CPU_SHARE:
            say.print(
                f"[yellow]{record['load']} at {record['url']}: the generator was busy or kept from its core (late by "
                f"{own['lag_p99_ms']:.1f} ms at p99, {100 * own['cpu_share']:.0f} % of a core): times are too long[/]",
                highlight=False,
                soft_wrap=True,
            )
        for label, kind in record["kinds"].items():
            if kind["tokens_per_chunk"] > 1.1:
                say.print(
                    f"[yellow]{record['load']} ({label}) at {record['url']}: {kind['tokens_per_chunk']:.2f} tokens a "
                    "chunk; times between chunks are not times between tokens[/]",
                    highlight=False,
                    soft_wrap=True,
                )
    worst = max(record["generator"]["cpu_us_per_chunk"] for record in records)
    say.print(f"the generator took {worst:.0f} µs of CPU a chunk at most", style="dim", highlight=False)


if __name__ == "__main__":
    typer.run(main)
