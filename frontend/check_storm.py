# SPDX-License-Identifier: Apache-2.0
"""Clients that leave at random moments must leave nothing behind: a storm of them, then answers that must be right.

Requests are cut while they wait, while their pages are in flight and while they decode. Afterwards as many normal ones
must get the single engine's tokens over pages really pushed, no checksum may be wrong, and no role may hold anything.
"""

from __future__ import annotations

import asyncio
import random
import re
import ssl
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.markup import escape

from kvrail.frontend.asking import ask, asker
from kvrail.frontend.check_identity import check
from kvrail.frontend.load.answer import read
from kvrail.frontend.load.prompts import Prompts
from kvrail.frontend.load.request import Target, post
from kvrail.frontend.refusing import refuse
from kvrail.frontend.two_servers import refuse_no_lane, split_card
from kvrail.runtime.config_checks import LANES

__all__ = ["HELD", "StormReport", "main", "storm"]

# Whatever a role holds for requests; all of it is 0 when none is there. doc/metrics.md.
HELD = (
    "pages_held",
    "tickets",
    "quarantined_pages",
    "requests_open",
    "rank_requests",
    "sequences_running",
    "sequences_waiting",
    "front_waiting",
)
_ANSWER_S = 300.0
# A cut after twice the time to the first token hits waiting, prefill, push and decoding alike.
_PATIENCE = 2.0


@dataclass
class StormReport:
    """What came of it. `moments`: how far the cut requests were."""

    moments: Counter[str] = field(default_factory=Counter)
    cut_in_flight: float = 0.0
    compared: int = 0
    pages: float = 0.0
    verified: float = 0.0
    held: dict[str, dict[str, float]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class _Metrics:
    """Sums of a server's metrics over all ranks and links."""

    def __init__(self, text: str) -> None:
        self._sums: defaultdict[str, float] = defaultdict(float)
        for name, value in re.findall(r"^kvrail_(\w+)(?:\{.*?\})? (\S+)$", text, re.MULTILINE):
            self._sums[name] += float(value)

    def __getitem__(self, name: str) -> float:
        return self._sums.get(name, 0.0)

    def __contains__(self, name: object) -> bool:
        return name in self._sums


async def _metrics(client: httpx.AsyncClient, url: str) -> _Metrics:
    response = await client.get(f"{url}/metrics")
    response.raise_for_status()
    return _Metrics(response.text)


async def _settled(client: httpx.AsyncClient, url: str, within_s: float) -> tuple[_Metrics, dict[str, float]]:
    """The metrics once nothing is held, by what ranks reported after this call; or what is still held at the end.

    Ranks report a few times a second: only what came some steps later counts.
    """
    before = (await _metrics(client, url))["steps_total"]
    deadline = time.monotonic() + within_s
    while True:
        now = await _metrics(client, url)
        held = {name: now[name] for name in HELD if now[name]}
        if now["steps_total"] >= before + 2:
            if not held or time.monotonic() > deadline:
                return now, held
        elif time.monotonic() > deadline:
            return now, held or {"steps_total": now["steps_total"]}
        await asyncio.sleep(0.1)


async def storm(
    ref: str,
    split: str,
    pes: Sequence[str],
    *,
    model: str,
    lengths: tuple[int, int],
    cancels: int,
    normals: int,
    max_tokens: int,
    concurrency: int,
    expect_lane: str | None,
    within_s: float,
    headers: dict[str, str],
    seed: int,
    say: Console,
) -> StormReport:
    """Cut `cancels` requests, then compare `normals`, then wait until nothing is held. Prompts are of token ids."""
    report = StormReport()
    draw = random.Random(seed)
    prompts, target = Prompts(model, (300, 2000), seed), Target(split, tuple(headers.items()))
    async with httpx.AsyncClient(
        timeout=30, headers=headers, trust_env=False, verify=ssl.create_default_context()
    ) as client:
        before = await _metrics(client, split)
        gate = asyncio.Semaphore(concurrency)

        async def ask(number: int, tokens: int, hang_up_after_s: float | None) -> Any:
            body = prompts.body(draw.randint(*lengths), tokens, number)
            async with gate:
                return read(
                    await post(
                        target, prompts.path, body, "", within_s=_ANSWER_S, hang_up_after_s=hang_up_after_s
                    )
                )

        # How long a first token takes with that many at once: cuts are spread around it.
        whole = await asyncio.gather(*(ask(n, 1, None) for n in range(concurrency)))
        bad = [trace.error for trace in whole if trace.error]
        if bad:
            report.problems.append(f"before the storm: {bad[0]}")
            return report
        patience = _PATIENCE * sorted(trace.first_s for trace in whole)[len(whole) // 2]
        say.print(
            f"first token after {1e3 * patience / _PATIENCE:.0f} ms with {concurrency} at once; cutting {cancels}"
        )
        calm = await _metrics(client, split)
        cut = await asyncio.gather(
            *(ask(1000 + n, max_tokens, draw.uniform(0, patience)) for n in range(cancels))
        )
        for trace in cut:
            if trace.error:
                report.problems.append(f"in the storm: {trace.error}")
            moment = "decoding" if trace.arrivals else "before the first token"
            report.moments[moment if trace.hung_up else "finished first"] += 1
        say.print(", ".join(f"{count} {what}" for what, count in report.moments.items()), highlight=False)

        quiet = Console(quiet=True)
        answers = await check(
            ref,
            split,
            model=model,
            expect_lane=expect_lane,
            prompts=[
                [draw.randrange(300, 2000) for _ in range(draw.randint(*lengths))] for _ in range(normals)
            ],
            max_tokens=max_tokens,
            concurrency=concurrency,
            chat=False,
            say=quiet,
            headers=headers,
        )
        report.compared, report.pages = answers.compared, answers.pages
        report.problems += answers.differences + answers.not_remote + answers.problems
        for url in (split, *pes):
            after, held = await _settled(client, url, within_s)
            if "pages_held" not in after:
                report.problems.append(f"{url}/metrics does not say which pages are held")
            if held:
                report.held[url] = held
                report.problems.append(f"{url} still holds {held} after {within_s:g} s")
            if url == split:
                report.verified = after["pages_verified_total"] - before["pages_verified_total"]
                wrong = after["checksum_mismatches_total"] - before["checksum_mismatches_total"]
                if wrong:
                    report.problems.append(f"{wrong:.0f} requests failed by a wrong checksum")
                # Normal tickets land all; what was granted in excess was cut before its doorbell.
                report.cut_in_flight = (after["ticket_granted_total"] - calm["ticket_granted_total"]) - (
                    after["ticket_landed_total"] - calm["ticket_landed_total"]
                )
    if not report.cut_in_flight:
        report.problems.append(
            "no request was cut between its grant and its doorbell: try longer prompts (--longest)"
        )
    if not report.verified:
        report.problems.append("no page was checked by checksum: launch the CE with --verify-kv 1")
    return report


def main(
    ref: Annotated[str, typer.Option(help="URL of a single engine")],
    split: Annotated[str, typer.Option(help="URL of the CE of a split")],
    cancels: Annotated[int, typer.Option(min=1, help="requests that are cut")] = 200,
    normals: Annotated[int, typer.Option(min=1, help="requests that are compared afterwards")] = 200,
    concurrency: Annotated[int, typer.Option(min=1, help="requests at once")] = 16,
    shortest: Annotated[int, typer.Option(min=1, help="tokens of the shortest prompt")] = 16,
    longest: Annotated[
        int | None, typer.Option(min=1, help="and of the longest (default: half the model's)")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="tokens per answer")] = 32,
    expect_lane: Annotated[str | None, typer.Option(help=f"lane that must carry the pages: {LANES}")] = None,
    within: Annotated[float, typer.Option(min=0.1, help="seconds until nothing may be held any more")] = 60.0,
    seed: Annotated[int, typer.Option(min=0, help="other prompts and moments")] = 1,
    api_key: Annotated[str | None, typer.Option(help="API key for both")] = None,
) -> None:
    """Cut many requests at random moments, then compare as many. Exits 0 only when all is right and nothing is held."""
    refuse_no_lane("check_storm", expect_lane)
    if longest is not None and longest < shortest:
        raise typer.BadParameter(f"--longest {longest} is less than --shortest {shortest}")
    say = Console()
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with asker(headers) as client:
        card = split_card("check_storm", client, ref, split)
        links = ask("check_storm", client, f"{split}/lanes")["links"]
    pes = sorted({link["peer_url"] for link in links if link["state"] == "up" and link["peer_url"]})
    if not pes:
        refuse("check_storm", f"{split} has no link to a prefill engine")
    most = int(card["max_model_len"]) - max_tokens
    if most < shortest:
        refuse(
            "check_storm",
            f"{split} takes {card['max_model_len']} tokens, prompt and answer: less than --shortest",
        )
    upper = min(longest or most // 2, most)
    report = asyncio.run(
        storm(
            ref,
            split,
            pes,
            model=card["id"],
            lengths=(min(shortest, upper), upper),
            cancels=cancels,
            normals=normals,
            max_tokens=max_tokens,
            concurrency=concurrency,
            expect_lane=expect_lane,
            within_s=within,
            headers=headers,
            seed=seed,
            say=say,
        )
    )
    say.print(
        f"{report.cut_in_flight:.0f} cut between grant and doorbell; {report.compared} compared afterwards, "
        f"{report.pages:.0f} pages over lane {expect_lane or 'any'}, {report.verified:.0f} pages checked by checksum"
    )
    for line in report.problems:
        say.print(f"  [red]{escape(line)}[/]", highlight=False, soft_wrap=True)
    say.print(
        "[bold red]NOT clean[/]" if report.problems else "[bold green]clean[/]: equal answers, nothing held"
    )
    raise typer.Exit(1 if report.problems else 0)


if __name__ == "__main__":
    typer.run(main)
