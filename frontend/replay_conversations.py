# SPDX-License-Identifier: Apache-2.0
"""Conversations that grow turn by turn, side by side: hit rate and time to first token of each turn, and a plot."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.markup import escape

from kvrail.frontend.asking import cache_page_tokens
from kvrail.frontend.conversations import Conversation, Turn, take_turn
from kvrail.runtime.output_file import writable

__all__ = ["main", "plot", "replay"]


async def replay(
    url: str,
    *,
    conversations: int,
    turns: int,
    shared_words: int,
    own_words: int,
    question_words: int,
    max_tokens: int,
    concurrency: int,
    seed: int,
    headers: dict[str, str] | None = None,
) -> tuple[list[list[Turn]], list[list[Turn]]]:
    """Turns of every conversation, [turn][conversation], without and with the prefix cache.

    All take their first turn before any takes its second. Each turn is taken both ways, one way right after the other,
    so that both meet the same machine; which is first, changes from turn to turn.
    """
    sides = [
        [
            Conversation(
                seed * 1000 + n, shared_words=shared_words, own_words=own_words, question_words=question_words
            )
            for n in range(conversations)
        ]
        for _ in range(2)
    ]
    gate = asyncio.Semaphore(concurrency)
    done: tuple[list[list[Turn]], list[list[Turn]]] = ([], [])
    async with httpx.AsyncClient(base_url=url, timeout=600, headers=headers, trust_env=False) as client:

        async def one(talk: Conversation, use_cache: bool) -> Turn:
            talk.ask()
            async with gate:
                turn = await take_turn(client, talk.messages, max_tokens, prefix_cache=use_cache)
            talk.answered(turn.text)
            return turn

        for number in range(turns):
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                done[side].append(await asyncio.gather(*(one(talk, side == 1) for talk in sides[side])))
    return done


def plot(with_cache: Sequence[float], without: Sequence[float], hits: Sequence[float]) -> str:
    """An SVG: median milliseconds to the first token by turn, with and without the cache, and the share of hits."""
    width, height, left, top = 560, 300, 60, 30
    inner_w, inner_h = width - left - 60, height - top - 50
    most = max((*with_cache, *without)) * 1.1
    steps = max(1, len(with_cache) - 1)

    def x(turn: int) -> float:
        return left + inner_w * turn / steps

    def line(values: Sequence[float], scale: float, colour: str, dash: str = "") -> str:
        points = " ".join(f"{x(n):.1f},{top + inner_h * (1 - v / scale):.1f}" for n, v in enumerate(values))
        style = f' stroke-dasharray="{dash}"' if dash else ""
        return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"{style}/>'

    marks = []
    for part in range(5):
        y = top + inner_h * (1 - part / 4)
        marks.append(f'<line x1="{left}" x2="{left + inner_w}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d5dbe3"/>')
        marks.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{most * part / 4:.0f}</text>')
        marks.append(f'<text x="{left + inner_w + 8}" y="{y + 4:.1f}">{25 * part} %</text>')
    marks += [
        f'<text x="{x(n):.1f}" y="{top + inner_h + 20}" text-anchor="middle">{n + 1}</text>'
        for n in range(len(with_cache))
    ]
    lines = [
        line(without, most, "#b45309"),
        line(with_cache, most, "#1d4ed8"),
        line(hits, 1.0, "#4b5563", "5 4"),
    ]
    legend = [("without the cache, ms", "#b45309"), ("with it, ms", "#1d4ed8"), ("share of hits", "#4b5563")]
    keys = [
        f'<text x="{left + 165 * n}" y="18" fill="{colour}" font-weight="600">{name}</text>'
        for n, (name, colour) in enumerate(legend)
    ]
    below = f'<text x="{left + inner_w / 2:.0f}" y="{height - 8}" text-anchor="middle">turn</text>'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            'font-family="system-ui,sans-serif" font-size="13" fill="#33475b" '
            'aria-label="Median time to first token by turn, with and without the prefix cache">',
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
            *marks,
            *lines,
            *keys,
            below,
            "</svg>\n",
        ]
    )


def main(
    url: Annotated[str, typer.Option(help="URL of a CE or a single engine")],
    conversations: Annotated[int, typer.Option(min=1, help="conversations side by side")] = 10,
    turns: Annotated[int, typer.Option(min=1, help="turns of each")] = 6,
    shared_words: Annotated[int, typer.Option(min=1, help="words that all of them begin with")] = 300,
    own_words: Annotated[int, typer.Option(min=1, help="further words of each first message")] = 200,
    question_words: Annotated[int, typer.Option(min=1, help="words of each question")] = 40,
    max_tokens: Annotated[int, typer.Option(min=1, help="tokens per answer")] = 24,
    concurrency: Annotated[int, typer.Option(min=1, help="requests at once")] = 2,
    seed: Annotated[int, typer.Option(help="another number: other conversations")] = 1,
    svg: Annotated[Path | None, typer.Option(callback=writable, help="where to write the plot")] = None,
    api_key: Annotated[str | None, typer.Option(help="API key")] = None,
) -> None:
    """Replay growing conversations, each turn without and with the prefix cache."""
    say = Console()
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # First of all: asked side by side, what cannot answer would fail as often.
    cache_page_tokens("replay_conversations", url, headers)
    try:
        runs = asyncio.run(
            replay(
                url,
                conversations=conversations,
                turns=turns,
                shared_words=shared_words,
                own_words=own_words,
                question_words=question_words,
                max_tokens=max_tokens,
                concurrency=concurrency,
                seed=seed,
                headers=headers,
            )
        )
    except (httpx.HTTPError, RuntimeError) as error:
        Console(stderr=True).print(
            f"[bold red]replay_conversations:[/] {escape(repr(error))}", highlight=False, soft_wrap=True
        )
        raise typer.Exit(1) from None
    without, cached = ([[1e3 * t.first_token_s for t in turn] for turn in run] for run in runs)
    hits = [sum(t.cached_tokens for t in turn) / sum(t.prompt_tokens for t in turn) for turn in runs[1]]
    say.print(
        "| turn | prompt tokens | hits | first token, cached | without | ratio |\n|---|---|---|---|---|---|"
    )
    for number, turn in enumerate(runs[1]):
        ours, plain = statistics.median(cached[number]), statistics.median(without[number])
        prompt = statistics.mean(t.prompt_tokens for t in turn)
        say.print(
            f"| {number + 1} | {prompt:.0f} | {hits[number]:.0%} | {ours:.0f} ms | {plain:.0f} ms "
            f"| {ours / plain:.2f} |",
            highlight=False,
        )
    same = sum(
        a.tokens == b.tokens
        for ours, theirs in zip(*runs, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    )
    total = sum(t.cached_tokens for turn in runs[1] for t in turn) / sum(
        t.prompt_tokens for turn in runs[1] for t in turn
    )
    say.print(
        f"{total:.0%} of all prompt tokens hit; {same} of {conversations * turns} answers equal",
        highlight=False,
    )
    if svg is not None:
        svg.write_text(
            plot([statistics.median(t) for t in cached], [statistics.median(t) for t in without], hits)
        )


if __name__ == "__main__":
    typer.run(main)
