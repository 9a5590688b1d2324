# SPDX-License-Identifier: Apache-2.0
"""Does the prefix cache change answers, and what does it save? Turns of a conversation with it and without.

Greedy, token for token. A cache that never hits would prove nothing, so later turns must hit. It says what the cache
saves, too: prompt tokens computed and taken from the cache, and the time to the first token of both.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Annotated, Literal

import httpx
import typer
from rich.console import Console
from rich.markup import escape

from kvrail.frontend.asking import cache_page_tokens
from kvrail.frontend.conversations import Conversation, Turn, take_turn

__all__ = ["Report", "check", "main"]


@dataclass
class Report:
    """Pairs of turns (without, with the cache), and what was wrong with them."""

    turns: list[tuple[Turn, Turn]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """All turns came, were equal, and hit where they had to."""
        return bool(self.turns) and not self.problems


async def check(
    url: str,
    *,
    turns: int,
    words: int,
    question_words: int,
    max_tokens: int,
    seed: int,
    page_tokens: int,
    say: Console,
    headers: dict[str, str] | None = None,
) -> Report:
    """One conversation. Each turn goes first without the cache (which stores nothing), then with it."""
    report = Report()
    talk = Conversation(seed, shared_words=0, own_words=words, question_words=question_words)
    async with httpx.AsyncClient(base_url=url, timeout=600, headers=headers, trust_env=False) as client:
        for number in range(1, turns + 1):
            talk.ask()
            try:
                plain = await take_turn(client, talk.messages, max_tokens, prefix_cache=False)
                cached = await take_turn(client, talk.messages, max_tokens)
            except (httpx.HTTPError, RuntimeError) as error:
                report.problems.append(f"turn {number}: {error!r}")
                break
            before = report.turns[-1][1].prompt_tokens if report.turns else 0
            report.turns.append((plain, cached))
            report.problems += _faults(number, plain, cached, before, page_tokens)
            say.print(
                f"  turn {number}: {cached.prompt_tokens} prompt tokens, {cached.cached_tokens} hit, "
                f"{cached.computed} computed; first token after {cached.first_token_s:.3f} s, "
                f"without the cache {plain.first_token_s:.3f} s "
                f"({cached.first_token_s / max(plain.first_token_s, 1e-9):.0%})",
                highlight=False,
                soft_wrap=True,
            )
            talk.answered(cached.text)
    return report


def _faults(number: int, plain: Turn, cached: Turn, before: int, page_tokens: int) -> list[str]:
    """What is wrong with a turn; `before`: prompt tokens of the turn before, all of which were computed or cached."""
    faults = []
    if plain.tokens != cached.tokens:
        pairs = zip(plain.tokens, cached.tokens, strict=False)
        place = next(
            (n for n, (a, b) in enumerate(pairs) if a != b), min(len(plain.tokens), len(cached.tokens))
        )
        faults.append(f"turn {number}: the answers differ from token {place} on")
    if plain.cached_tokens:
        faults.append(f"turn {number}: {plain.cached_tokens} tokens hit, though the request forbade it")
    # The last page of the turn before was not full; and a template may end a prompt otherwise than it continues it.
    expected = (before - 16) // page_tokens * page_tokens
    if cached.cached_tokens < expected:
        faults.append(f"turn {number}: only {cached.cached_tokens} tokens hit; {expected} had to")
    return faults


def main(
    url: Annotated[str, typer.Option(help="URL of a CE or a single engine")],
    turns: Annotated[int, typer.Option(min=2, help="turns of the conversation")] = 3,
    words: Annotated[
        int, typer.Option(min=1, help="words of its first message (a word is one or two tokens)")
    ] = 1500,
    question_words: Annotated[int, typer.Option(min=1, help="words of each question")] = 20,
    max_tokens: Annotated[int, typer.Option(min=1, help="tokens per answer")] = 32,
    seed: Annotated[int, typer.Option(help="another number: another conversation")] = 0,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        typer.Option(help="that of the engine; in 16 bits differences are reported, no failure"),
    ] = "float32",
    api_key: Annotated[str | None, typer.Option(help="API key")] = None,
) -> None:
    """Compare cached with uncached answers, turn by turn. Exits 0 only when all are equal and later turns hit."""
    say = Console()
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    page_tokens = cache_page_tokens("check_prefix_cache", url, headers)
    report = asyncio.run(
        check(
            url,
            turns=turns,
            words=words,
            question_words=question_words,
            max_tokens=max_tokens,
            seed=seed,
            page_tokens=page_tokens,
            say=say,
            headers=headers,
        )
    )
    for line in report.problems:
        say.print(f"  [red]{escape(line)}[/]", highlight=False, soft_wrap=True)
    differ = any("differ" in line for line in report.problems)
    good = report.good or (
        dtype != "float32" and differ and all("differ" in line for line in report.problems)
    )
    say.print("[bold green]equal[/]" if report.good else "[bold red]NOT equal, or no hits[/]")
    raise typer.Exit(0 if good else 1)


if __name__ == "__main__":
    typer.run(main)
