# SPDX-License-Identifier: Apache-2.0
"""The answers of one response: to one or several prompts, one or several to each, as they grow side by side.

Each prompt is a job of its own, prefilled once; its answers are choices of that job. A choice that a stop string ends
is dropped at its rank, the others go on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from kvrail.frontend.dispatch import Job
from kvrail.frontend.stream import Answer, Form, Piece, usage_of
from kvrail.runtime.errors import EngineFailed
from kvrail.runtime.messages import Output

__all__ = ["Choice", "Prompted", "merged", "number", "pieces_of", "whole"]

_Item = TypeVar("_Item")


class Choice:
    """One answer of a response: how it grows, how it is written, and, when it is not streamed, what it is so far."""

    def __init__(self, answer: Answer, form: Form) -> None:
        self.answer = answer
        self.form = form
        self.pieces: list[Piece] = []


class Prompted(NamedTuple):
    """A prompt and its answers."""

    job: Job
    choices: Sequence[Choice]


def number(prompted: Sequence[Prompted], *, running_usage: bool) -> Callable[[], dict[str, Any]]:
    """Give each choice its index in the response; returns what tells the usage of all of them."""
    answers = [[choice.answer for choice in one.choices] for one in prompted]

    def usage() -> dict[str, Any]:
        return usage_of(answers)

    forms = [choice.form for one in prompted for choice in one.choices]
    for index, form in enumerate(forms):
        form.index = index
        form.running_usage = usage if running_usage else None
    return usage


async def pieces_of(
    prompted: Prompted, outputs: AsyncGenerator[Output, None]
) -> AsyncGenerator[tuple[Choice, Piece], None]:
    """The pieces of a prompt's answers; the last one of each has a finish reason.

    With the last piece of all, the job is over everywhere.
    """
    job, choices = prompted
    going = set(range(len(choices)))
    async with contextlib.aclosing(outputs):
        last: tuple[Choice, Piece] | None = None
        async for output in outputs:
            job.route = output.route
            if output.prompt_logprobs:
                for choice in choices:
                    choice.answer.take_prompt(output.prompt_logprobs)
                continue
            if output.choice not in going:
                continue
            choice = choices[output.choice]
            piece = choice.answer.feed(output)
            if piece.finish_reason is not None:
                going.discard(output.choice)
                if not going:
                    # Behind a stop string, which the engine does not know, the closing tells it.
                    job.outcome = piece.finish_reason
                    last = (choice, piece)
                    break
                if output.finish_reason is None:
                    job.drop_choice(output.choice)
            yield choice, piece
        if last is None:
            raise EngineFailed("the engine ended the answer without saying why")
    yield last


async def merged(sources: Sequence[AsyncGenerator[_Item, None]]) -> AsyncGenerator[_Item, None]:
    """What several generators give, as it comes. The first failure ends them all; closing this closes them."""
    if len(sources) == 1:
        async with contextlib.aclosing(sources[0]):
            async for only in sources[0]:
                yield only
        return
    arrived: asyncio.Queue[tuple[_Item | None, Exception | None]] = asyncio.Queue()

    async def pull(source: AsyncGenerator[_Item, None]) -> None:
        failure: Exception | None = None
        try:
            async with contextlib.aclosing(source):
                async for item in source:
                    arrived.put_nowait((item, None))
        except Exception as error:
            failure = error
        arrived.put_nowait((None, failure))

    tasks = [asyncio.create_task(pull(source)) for source in sources]
    try:
        going = len(tasks)
        while going:
            item, failure = await arrived.get()
            if failure is not None:
                raise failure
            if item is not None:
                yield item
            else:
                going -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def whole(prompted: Sequence[Prompted], usage: dict[str, Any]) -> dict[str, Any]:
    """The body of a response that is not streamed."""
    bodies = [choice.form.whole(choice.pieces, usage) for one in prompted for choice in one.choices]
    if len(bodies) == 1:
        return bodies[0]
    return {**bodies[0], "choices": [choice for body in bodies for choice in body["choices"]]}
