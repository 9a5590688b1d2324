# SPDX-License-Identifier: Apache-2.0
"""The OpenAI routes of a completion engine, and of a single one. The response starts only with the first output.

So a request that fails before has a real status code, and the header that tells where the prompt was prefilled is
true. A stream that fails later ends with an error event and without [DONE].
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from kvrail.frontend.dispatch import Dispatcher, Job
from kvrail.frontend.envelope import (
    NoSuchModel,
    Unauthorized,
    error_body,
    json_response,
    request_id,
    until_disconnect,
)
from kvrail.frontend.protocol import ChatRequest, CompletionRequest, GenerationRequest
from kvrail.frontend.render import Renderer
from kvrail.frontend.stream import Answer, ChatForm, CompletionForm, Form, Piece, event
from kvrail.runtime.config import LaunchConfig
from kvrail.runtime.control.auth import ApiKeys
from kvrail.runtime.control.rank_client import RankClient
from kvrail.runtime.control.routing import affinity_key
from kvrail.runtime.errors import Cancelled, EngineFailed, RuntimeFault, Unavailable
from kvrail.runtime.messages import Output

__all__ = ["openai_routes"]

_log = logging.getLogger(__name__)
# How much of a bare prompt stands for its conversation in routing: continued prompts begin alike.
_AFFINITY_CHARS = 1024
_AFFINITY_TOKENS = 256


def openai_routes(
    config: LaunchConfig,
    ranks: Sequence[RankClient],
    dispatcher: Dispatcher,
    renderer: Renderer,
    keys: ApiKeys,
) -> APIRouter:
    """The /v1 routes. With an API key file, every one of them needs a key."""

    class KeyedRoute(APIRoute):
        """Asks for the key, and what kind of body comes, before the body is read."""

        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def guarded(request: Request) -> Response:
                if not keys.allow(request.headers.get("authorization")):
                    raise Unauthorized("give a valid API key: Authorization: Bearer …")
                kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
                if request.method == "POST" and kind != "application/json":
                    raise HTTPException(415, "the body must be JSON: Content-Type: application/json")
                return await handle(request)

            return guarded

    def longest() -> int | None:
        lengths = [rank.ready.max_model_len for rank in ranks if rank.ready is not None]
        return min(lengths, default=None)

    def check_model(body: GenerationRequest) -> int:
        """The longest prompt plus answer; refuses other models than ours."""
        if body.model not in (None, config.model_name):
            raise NoSuchModel(
                f"model {body.model!r} is not served here, but {config.model_name!r} is", param="model"
            )
        limit = longest()
        if limit is None:
            raise Unavailable("the model is loading", retry_after_s=2.0)
        return limit

    router = APIRouter(prefix="/v1", route_class=KeyedRoute)

    @router.post("/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        limit = check_model(body)
        messages = [
            {
                "role": "system" if message.role == "developer" else message.role,
                "content": message.content,
                **({"name": message.name} if message.name else {}),
            }
            for message in body.messages
        ]
        options = body.chat_template_kwargs
        tokens = await renderer.chat(messages, options.enable_thinking if options else None)
        first_words = next((m.content for m in body.messages if m.role == "user"), body.messages[0].content)
        job = _job(request, "chat", body, tokens, limit, first_words)
        return await answer(request, body, job, ChatForm)

    @router.post("/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        limit = check_model(body)
        if isinstance(body.prompt, str):
            tokens, first_words = await renderer.text(body.prompt), body.prompt[:_AFFINITY_CHARS]
        else:
            tokens = renderer.ids(body.prompt)
            first_words = repr(tokens[:_AFFINITY_TOKENS])
        job = _job(request, "completions", body, tokens, limit, first_words)
        return await answer(request, body, job, CompletionForm)

    def _job(
        request: Request,
        api: str,
        body: GenerationRequest,
        tokens: list[int],
        limit: int,
        first_words: str,
    ) -> Job:
        return Job(
            request_id=request_id(request),
            api=api,
            tokens=tokens,
            sampling=body.sampling(len(tokens), limit, renderer.eos_ids),
            affinity=affinity_key(first_words),
            cache=body.cache_use,
        )

    async def answer(request: Request, body: GenerationRequest, job: Job, form_kind: type[Form]) -> Response:
        text = Answer(
            renderer.token_bytes,
            prompt_tokens=len(job.tokens),
            stops=body.stop,
            stop_token_ids=job.sampling.stop_token_ids,
        )
        form = form_kind(
            job.request_id,
            config.model_name,
            renderer.token_bytes,
            logprobs=job.sampling.logprobs is not None,
            include_usage=body.include_usage,
        )
        outputs = dispatcher.run(job)
        async with until_disconnect(request.receive):
            first = await anext(outputs)
        pieces = _pieces(job, first, outputs, text)
        if body.stream:
            return _EventStream(_events(pieces, text, form), {"x-kvrail-prefill": first.route})
        async with contextlib.aclosing(pieces), until_disconnect(request.receive):
            whole = [piece async for piece in pieces]
        # By now it may be "local": a prefill engine lost behind the first token means that the prompt was computed
        # again here. The header of a stream is out by then.
        return json_response(form.whole(whole, text.usage), headers={"x-kvrail-prefill": job.route})

    def card() -> dict[str, object]:
        return {
            "id": config.model_name,
            "object": "model",
            "created": started,
            "owned_by": "kvrail",
            "max_model_len": longest(),
        }

    started = int(time.time())

    @router.get("/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [card()]})

    @router.get("/models/{name:path}")
    async def model(name: str) -> Response:
        if name != config.model_name:
            raise NoSuchModel(
                f"model {name!r} is not served here, but {config.model_name!r} is", param="model"
            )
        return json_response(card())

    return router


async def _pieces(
    job: Job, first: Output, outputs: AsyncGenerator[Output, None], answer: Answer
) -> AsyncGenerator[Piece, None]:
    """The pieces of an answer; the last one has a finish reason, and by then the job is over everywhere."""
    async with contextlib.aclosing(outputs):
        output: Output | None = first
        while output is not None:
            job.route = output.route
            piece = answer.feed(output)
            if piece.finish_reason is not None:
                break
            yield piece
            output = await anext(outputs, None)
        else:
            raise EngineFailed("the engine ended the answer without saying why")
        if output.finish_reason is None:
            job.outcome = "stop"  # a stop string: the engine does not know it, and is told by the closing
    yield piece


async def _events(
    pieces: AsyncGenerator[Piece, None], answer: Answer, form: Form
) -> AsyncGenerator[bytes, None]:
    """The body of a stream."""
    async with contextlib.aclosing(pieces):
        try:
            opening = form.opening()
            async for piece in pieces:
                events = opening + form.chunk(piece)
                opening = []
                if events:
                    yield b"".join(events)
            yield b"".join(form.closing(answer.usage))
        except Cancelled:
            raise
        except RuntimeFault as fault:
            yield event(error_body(fault))
        except Exception:
            # The status has been sent; this is the only way left to say that the answer is not whole.
            _log.exception("a stream failed")
            yield event(error_body(EngineFailed("internal error")))


class _EventStream(Response):
    """Server-sent events, for as long as the client listens."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[bytes, None], headers: dict[str, str]) -> None:
        self.status_code = 200
        self.background = None
        self._chunks = chunks
        # Proxies that collect a whole answer before they pass it on would undo the streaming.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._chunks):
            with contextlib.suppress(Cancelled):
                async with until_disconnect(receive):
                    await send(
                        {
                            "type": "http.response.start",
                            "status": self.status_code,
                            "headers": self.raw_headers,
                        }
                    )
                    async for chunk in self._chunks:
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
