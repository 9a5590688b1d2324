# SPDX-License-Identifier: Apache-2.0
"""Does the split answer exactly as one engine does? Greedy, token for token, and only over pages really pushed.

Every prompt goes to both servers. Equal answers are not enough: each answer of the split must say that its prompt
was prefilled remotely, and the CE's metrics must show the pages arriving over the expected lane. Comparing local
with local would prove nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import secrets
import ssl
import time
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import httpx
import typer
from rich.console import Console

from kvrail.frontend.asking import ask, asker
from kvrail.frontend.two_servers import refuse_no_lane, split_card
from kvrail.runtime.config_checks import LANES

__all__ = ["Report", "check", "main", "make_prompts", "pages_received"]

_TEXTS = (
    "The history of the lighthouse begins long before electric light.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "In 1969, three astronauts left for the moon. When they returned,",
    "Die Würde des Menschen ist unantastbar. 日本語のテキスト 🙂 and back to English:",
)
# Longer than from one report of a rank to the next.
_REPORTED_S = 0.6
# A model whose every layer has a window has no pages, and one without any no states.
_ARRIVED = r"^kvrail_link_(?:pages|states)_total\{(.*?)\} (\S+)$"
_CHAT = (
    ("What is the capital of France?", "And of Italy?", "Which of the two is larger?"),
    ("Tell me a short story about a fox.", "Continue it.", "Give it a title."),
)


@dataclass
class Report:
    """What the comparison found. `good` only when everything held."""

    compared: int = 0
    differences: list[str] = field(default_factory=list)
    not_remote: list[str] = field(default_factory=list)
    pages: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """All equal, all remote, pages seen on the lane."""
        return self.compared > 0 and not (self.differences or self.not_remote or self.problems)


def make_prompts(
    page_tokens: int, longest: int, count: int | None = None, *, window: int = 0
) -> list[list[int] | str]:
    """Prompts of one token to several pages, around each page boundary (as token ids), and some texts.

    With a `window` (tokens that sliding-window layers see) also around that, and well beyond it.

    Token ids lie between 300 and 2000, which any real vocabulary has; the draw is seeded: same prompts each time.
    """
    page = page_tokens
    lengths = [1, 2, 3, 15, page - 1, page, page + 1, page + page // 2, 2 * page - 1, 2 * page, 2 * page + 1]
    lengths += [3 * page + 5, 4 * page, 31, 64, 100]
    if window:
        lengths += [window - 1, window, window + 1, 2 * window + 3, 3 * window]
    draw = random.Random(7)
    prompts: list[list[int] | str] = [
        [draw.randrange(300, 2000) for _ in range(length)]
        for length in sorted(set(lengths))
        if 0 < length <= longest
    ]
    prompts += list(_TEXTS)
    if count is not None:
        # A spread over the lengths rather than the first few.
        prompts = [prompts[i * len(prompts) // count] for i in range(count)]
    return prompts


async def _answer(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> tuple[list[Any], str, str]:
    """(tokens with logprobs, text, route) of one greedy answer; raises on any HTTP error."""
    response = await client.post(path, json=body)
    if response.status_code != 200:
        raise RuntimeError(f"{client.base_url}{path}: HTTP {response.status_code}: {response.text[:300]}")
    choice = response.json()["choices"][0]
    route = response.headers.get("x-kvrail-prefill", "")
    if "message" in choice:
        content = choice["logprobs"]["content"]
        tokens = [(t["token"], t["logprob"], [o["logprob"] for o in t["top_logprobs"]]) for t in content]
        return tokens, choice["message"]["content"], route
    logprobs = choice["logprobs"]
    tops = [sorted(top.values(), reverse=True) for top in logprobs["top_logprobs"]]
    return list(zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True)), choice["text"], route


def _difference(ref: tuple[list[Any], str, str], split: tuple[list[Any], str, str]) -> str | None:
    """The first difference, with the reference's logit gap there; None when equal."""
    if [t[0] for t in ref[0]] == [t[0] for t in split[0]] and ref[1] == split[1]:
        return None
    for place, (ours, theirs) in enumerate(itertools.zip_longest(ref[0], split[0])):
        if ours is None or theirs is None or ours[0] != theirs[0]:
            top = ours[2] if ours else []
            gap = f", logit gap of the reference {top[0] - top[1]:.4g}" if len(top) > 1 else ""
            return f"token {place}: ref {ours[0] if ours else None!r}, split {theirs[0] if theirs else None!r}{gap}"
    return f"texts differ: {ref[1]!r} / {split[1]!r}"


async def pages_received(client: httpx.AsyncClient, lane: str | None, *, beyond: float = -1.0) -> float:
    """Pages and state slots that the CE has received by one-sided writes, over `lane` ("shm", "put/cma", …; None: any).

    Ranks report a few times a second: waits up to two seconds for more than `beyond`, and until nothing more comes.
    """
    deadline = time.monotonic() + 2.0
    last = -1.0
    while True:
        text = (await client.get("/metrics")).text
        total = 0.0
        for labels, value in re.findall(_ARRIVED, text, re.MULTILINE):
            found = dict(re.findall(r'(\w+)="(.*?)"', labels))
            if lane is None or lane in (found["lane"], f"{found['lane']}/{found['transport']}"):
                total += float(value)
        if beyond < total == last or time.monotonic() > deadline:
            return total
        last = total
        await asyncio.sleep(_REPORTED_S)


async def check(
    ref_url: str,
    split_url: str,
    *,
    model: str,
    expect_lane: str | None,
    prompts: list[list[int] | str],
    max_tokens: int,
    concurrency: int,
    chat: bool,
    say: Console,
    headers: dict[str, str] | None = None,
) -> Report:
    """Compare all prompts (and, with `chat`, multi-turn conversations) at one concurrency."""
    report = Report()
    # Of its own: what the CE still has from an earlier round would not be pushed again.
    salt = secrets.token_hex(8)
    settings: dict[str, Any] = {"timeout": 300, "headers": headers, "trust_env": False}
    settings["verify"] = ssl.create_default_context()
    settings["limits"] = httpx.Limits(max_connections=concurrency + 2)
    async with (
        httpx.AsyncClient(base_url=ref_url, **settings) as ref,
        httpx.AsyncClient(base_url=split_url, **settings) as split,
    ):
        before = await pages_received(split, expect_lane)
        gate = asyncio.Semaphore(concurrency)
        expected = len(prompts) + (sum(map(len, _CHAT)) if chat else 0)

        async def compare(name: str, path: str, body: dict[str, Any]) -> str:
            body = {"model": model, "temperature": 0, "max_tokens": max_tokens, "cache_salt": salt, **body}
            async with gate:
                try:
                    wanted, got = await asyncio.gather(_answer(ref, path, body), _answer(split, path, body))
                except (httpx.HTTPError, RuntimeError) as error:
                    report.problems.append(f"{name}: {error!r}")
                    say.print(f"  {name:<24} [red]failed[/]: {error!r}", highlight=False)
                    return ""
            report.compared += 1
            found = _difference(wanted, got)
            if found:
                report.differences.append(f"{name}: {found}")
            if got[2] != "remote":
                report.not_remote.append(f"{name}: x-kvrail-prefill is {got[2]!r}")
            verdict = "[green]equal[/]" if not found else f"[red]{found}[/]"
            say.print(
                f"  {report.compared:>2}/{expected} {name:<24} {verdict}  ({len(wanted[0])} tokens, {got[2] or '?'})",
                highlight=False,
            )
            return wanted[1]

        async def converse(name: str, questions: tuple[str, ...]) -> None:
            messages: list[dict[str, str]] = []
            for turn, question in enumerate(questions):
                messages.append({"role": "user", "content": question})
                body = {"messages": messages, "logprobs": True, "top_logprobs": 2}
                answer = await compare(f"{name} turn {turn + 1}", "/v1/chat/completions", body)
                messages = [*messages, {"role": "assistant", "content": answer}]

        jobs = [
            compare(
                f"{len(p)} token ids" if isinstance(p, list) else f"text {p[:14]!r}",
                "/v1/completions",
                {"prompt": p, "logprobs": 2},
            )
            for p in prompts
        ]
        talks = [converse(f"chat {n + 1}", questions) for n, questions in enumerate(_CHAT)] if chat else []
        await asyncio.gather(*jobs, *talks)
        report.pages = await pages_received(split, expect_lane, beyond=before) - before
    if report.pages <= 0:
        report.problems.append(
            f"the CE's metrics show no page or state received over lane {expect_lane or 'any'}"
        )
    return report


def _rounds(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise typer.BadParameter(f"--concurrency {text}: requests at once, such as 1,8")
    return found


def main(
    ref: Annotated[str, typer.Option(help="URL of a single engine")],
    split: Annotated[str, typer.Option(help="URL of the CE of a split")],
    expect_lane: Annotated[
        str | None,
        typer.Option(help=f"lane that must carry the pages: {LANES}"),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="tokens per answer")] = 32,
    concurrency: Annotated[str, typer.Option(help="requests at once, comma-separated rounds")] = "1,8",
    prompts: Annotated[int | None, typer.Option(min=1, help="how many prompts (default: all)")] = None,
    chat: Annotated[bool, typer.Option(help="also multi-turn conversations")] = True,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        typer.Option(
            help="that of the engines; in 16 bits differences are reported with their logit gap, no failure"
        ),
    ] = "float32",
    api_key: Annotated[str | None, typer.Option(help="API key for both")] = None,
) -> None:
    """Compare a split with a single engine, token for token. Exits 0 only when all answers are equal and remote."""
    rounds = _rounds(concurrency)
    refuse_no_lane("check_identity", expect_lane)
    say = Console()
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with asker(headers) as client:
        card = split_card("check_identity", client, ref, split)
        lanes = ask("check_identity", client, f"{split}/lanes")
        page_tokens, window = lanes["page_tokens"], lanes["window"]
    longest = int(card["max_model_len"]) - max_tokens
    good = True
    for wide in rounds:
        say.print(f"concurrency {wide}:")
        report = asyncio.run(
            check(
                ref,
                split,
                model=card["id"],
                expect_lane=expect_lane,
                prompts=make_prompts(page_tokens, longest, prompts, window=window),
                max_tokens=max_tokens,
                concurrency=wide,
                chat=chat,
                say=say,
                headers=headers,
            )
        )
        say.print(
            f"{report.compared} compared, {len(report.differences)} different, {len(report.not_remote)} not remote, "
            f"{report.pages:.0f} pages and states over lane {expect_lane or 'any'}"
        )
        for line in report.differences + report.not_remote + report.problems:
            say.print(f"  [red]{line}[/]", highlight=False)
        tolerated = dtype != "float32" and not (report.not_remote or report.problems)
        good = good and (report.good or tolerated)
    say.print("[bold green]identical[/]" if good else "[bold red]NOT identical[/]")
    raise typer.Exit(0 if good else 1)


if __name__ == "__main__":
    typer.run(main)
