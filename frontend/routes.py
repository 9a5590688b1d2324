# SPDX-License-Identifier: Apache-2.0
"""The OpenAI routes of a completion engine, and of a single one. The response starts only with the first output.

So a request that fails before has a real status code, and the header that tells where the prompt was prefilled is
true. A stream that fails later ends with an error event and without [DONE].
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request, Response
from starlette.types import Receive, Scope, Send

from kvrail.frontend.chatting import ChatRules, schema_of_calls
from kvrail.frontend.choices import Choice, Prompted, merged, number, pieces_of, whole
from kvrail.frontend.deadline import in_time
from kvrail.frontend.detokenize import Detokenizer, TokenBytes
from kvrail.frontend.dispatch import Dispatcher, Job
from kvrail.frontend.envelope import (
    NoSuchModel,
    json_response,
    request_id,
    until_disconnect,
)
from kvrail.frontend.keyed_route import keyed_route
from kvrail.frontend.protocol import ChatRequest, CompletionRequest, GenerationRequest
from kvrail.frontend.render import Renderer
from kvrail.frontend.responses_form import ResponsesForm
from kvrail.frontend.responses_shapes import ResponsesRequest
from kvrail.frontend.stream import Answer, ChatForm, CompletionForm, Echo, Form, Piece
from kvrail.frontend.structured import check_grammar, json_grammar
from kvrail.frontend.taking_turns import others_first
from kvrail.frontend.text_routes import text_routes
from kvrail.runtime.config import LaunchConfig
from kvrail.runtime.control.auth import ApiKeys
from kvrail.runtime.control.rank_client import RankClient
from kvrail.runtime.control.routing import affinity_key
from kvrail.runtime.errors import BadRequest, Cancelled, EngineFailed, RuntimeFault, TooLong, Unavailable
from kvrail.runtime.sampling import check_sampling

__all__ = ["openai_routes"]

_log = logging.getLogger(__name__)
# How much of a bare prompt stands for its conversation in routing: continued prompts begin alike.
_AFFINITY_CHARS = 1024
_APIS = {"/v1/chat/completions": "chat", "/v1/responses": "responses", "/v1/completions": "completions"}
_AFFINITY_TOKENS = 256
# More token ids than these take long enough to check for others to be let through before and behind.
_LONG_PROMPT = 4096


def openai_routes(
    config: LaunchConfig,
    ranks: Sequence[RankClient],
    dispatcher: Dispatcher,
    renderer: Renderer,
    keys: ApiKeys,
) -> APIRouter:
    """The /v1 routes. With an API key file, every one of them needs a key."""

    rules = ChatRules(config, renderer)

    def longest() -> int | None:
        lengths = [rank.ready.max_model_len for rank in ranks if rank.ready is not None]
        return min(lengths, default=None)

    def at_most() -> int | None:
        """The same, as far as it is known: while the model loads, what its checkpoint and the flags allow."""
        known = (config.max_model_len, renderer.max_model_len)
        return longest() or min((length for length in known if length is not None), default=None)

    def check_loaded() -> None:
        if longest() is None:
            raise Unavailable("the model is loading", retry_after_s=2.0)

    def check_model(model: str | None, *, loaded: bool = True) -> int:
        """The longest prompt plus answer; refuses other models than ours.

        Without `loaded` it may be more than there will be: what is too long for that can be refused now, and trying
        again later would help nobody.
        """
        if model not in (None, config.model_name):
            raise NoSuchModel(
                f"model {model!r} is not served here, but {config.model_name!r} is", param="model"
            )
        limit = at_most()
        if loaded or limit is None:
            check_loaded()
        assert limit is not None
        return limit

    def check_text(characters: int) -> None:
        """Refuse what is too long whatever its tokens are, before anything is spent on it."""
        most = config.max_prompt_tokens or at_most() or 0
        if characters > most * renderer.longest_token:
            raise TooLong(f"the prompt has {characters} characters; it may have {most} tokens at most")

    router = APIRouter(
        prefix="/v1",
        route_class=keyed_route(
            keys,
            ignore_unknown=config.ignore_unknown_fields,
            check_room=lambda path: dispatcher.check_room(_APIS[path]),
        ),
    )

    @router.post("/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await converse(body, request, "chat", ChatForm)

    @router.post("/responses")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        return await converse(
            body.as_chat(), request, "responses", functools.partial(ResponsesForm, body=body)
        )

    async def converse(body: ChatRequest, request: Request, api: str, form: Callable[..., Form]) -> Response:
        limit = check_model(body.model, loaded=False)
        rules.check(body)
        grammar = await grammar_of(body)
        check_text(sum(len(message.content or "") for message in body.messages))
        # Again: there may be more in it than contents, and what of it counts only its template tells.
        prompt = await renderer.chat(body.conversation(), check_text)
        reading = rules.reading(body, prompt.tail)
        job = _job(request, api, body, prompt.tokens, limit, _first_words(body), grammar)
        form = functools.partial(form, reading=reading)
        return await answer(request, body, [(job, reading.markers, None)], form)

    @router.post("/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        limit = check_model(body.model, loaded=False)
        grammar = await grammar_of(body)
        several = len(body.prompt) > 1
        prompts: list[tuple[Job, Sequence[str], Echo | None]] = []
        for place, prompt in enumerate(body.prompt):
            if isinstance(prompt, str):
                check_text(len(prompt))
                tokens, first_words = await renderer.text(prompt), prompt[:_AFFINITY_CHARS]
            else:
                long = len(prompt) > _LONG_PROMPT
                if long:
                    await others_first()
                tokens = renderer.ids(prompt, f"prompt[{place}]" if several else "prompt")
                if long:
                    await others_first()
                first_words = repr(prompt[:_AFFINITY_TOKENS])
            echo = None
            if body.echo:
                text = prompt if isinstance(prompt, str) else _text_of(prompt, renderer, body)
                echo = Echo(text, tokens.tolist(), only=body.prompt_only)
            job = _job(request, "completions", body, tokens, limit, first_words, grammar, place)
            prompts.append((job, (), echo))
        return await answer(request, body, prompts, CompletionForm)

    async def grammar_of(body: GenerationRequest) -> str:
        """What the answer must follow, known to compile, or ""."""
        schema = schema_of_calls(body) if isinstance(body, ChatRequest) else None
        if schema is not None and body.prescribed:
            raise BadRequest(
                "tool_choice: a call and a form of the answer exclude each other", param="tool_choice"
            )
        if schema is None and not body.prescribed:
            return ""
        found = (
            ("tools", json_grammar(schema)) if schema is not None else await asyncio.to_thread(body.grammar)
        )
        if found is None:
            return ""
        await check_grammar(renderer.grammars, found[1], renderer.eos_ids, found[0])
        return found[1]

    def _job(
        request: Request,
        api: str,
        body: GenerationRequest,
        tokens: npt.NDArray[np.uint32],
        limit: int,
        first_words: str,
        grammar: str,
        place: int = 0,
    ) -> Job:
        param = "messages" if isinstance(body, ChatRequest) else "prompt"
        if config.max_prompt_tokens is not None and len(tokens) > config.max_prompt_tokens:
            raise TooLong(
                f"the prompt has {len(tokens)} tokens (--max-prompt-tokens {config.max_prompt_tokens})",
                param=param,
            )
        sampling = body.sampling(len(tokens), limit, renderer.eos_ids, param=param)
        check_sampling(sampling, renderer.vocabulary)
        if grammar:
            sampling = msgspec.structs.replace(sampling, grammar=grammar, eos_ids=renderer.eos_ids)
        now, most_s = time.monotonic(), config.request_timeout_s
        return Job(
            started=now,
            trace={"traceparent": trace} if (trace := request.headers.get("traceparent")) else {},
            deadline=None if most_s is None else now + most_s,
            request_id=f"{request_id(request)}.{place}" if place else request_id(request),
            api=api,
            tokens=tokens,
            sampling=sampling,
            affinity=affinity_key(first_words),
            cache=body.cache_use,
        )

    async def answer(
        request: Request,
        body: GenerationRequest,
        prompts: Sequence[tuple[Job, Sequence[str], Echo | None]],
        form_kind: Callable[..., Form],
    ) -> Response:
        """Serve the jobs; beside each stand the special tokens that are text in its answers, and its echo."""
        check_loaded()
        prompted = [
            Prompted(job, [choice(request, body, job, markers, echo, form_kind) for _ in range(body.choices)])
            for job, markers, echo in prompts
        ]
        usage = number(prompted, running_usage=body.continuous_usage)
        pieces = merged([pieces_of(one, in_time(one.job, dispatcher.run(one.job))) for one in prompted])
        async with until_disconnect(request.receive):
            first = await anext(pieces)
        forms = [choice.form for one in prompted for choice in one.choices]
        if body.stream:
            headers = {"x-kvrail-prefill": _route(prompted)}
            return _EventStream(_events(first, pieces, forms, usage), headers)
        async with contextlib.aclosing(pieces), until_disconnect(request.receive):
            first[0].pieces.append(first[1])
            async for one, piece in pieces:
                one.pieces.append(piece)
        # By now it may be "local": a prefill engine lost behind the first token means that the prompt was computed
        # again here. The header of a stream is out by then.
        return json_response(whole(prompted, usage()), headers={"x-kvrail-prefill": _route(prompted)})

    def choice(
        request: Request,
        body: GenerationRequest,
        job: Job,
        markers: Sequence[str],
        echo: Echo | None,
        form_kind: Callable[..., Form],
    ) -> Choice:
        """One answer that is yet to come."""
        text = Answer(
            _shown(renderer, body, markers),
            prompt_tokens=len(job.tokens),
            stops=body.stop,
            stop_token_ids=job.sampling.stop_token_ids,
            include_stop=bool(body.include_stop_str_in_output),
            min_tokens=job.sampling.min_tokens,
            echo=echo,
        )
        form = form_kind(
            request_id(request),
            config.model_name,
            renderer.token_bytes,
            logprobs=job.sampling.logprobs is not None,
            include_usage=body.include_usage,
        )
        return Choice(text, form)

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

    both = APIRouter()
    both.include_router(router)
    both.include_router(text_routes(renderer, keys, check_model, check_text))
    return both


def _first_words(body: ChatRequest) -> str:
    """What stands for a conversation in routing."""
    first = next((message for message in body.messages if message.role == "user"), body.messages[0])
    return first.content or ""


def _shown(renderer: Renderer, body: GenerationRequest, markers: Sequence[str]) -> TokenBytes:
    """How tokens become text in an answer to `body`."""
    if body.skip_special_tokens is False:
        return renderer.token_bytes.showing_all()
    return renderer.token_bytes.showing(markers) if markers else renderer.token_bytes


def _text_of(tokens: Sequence[int], renderer: Renderer, body: GenerationRequest) -> str:
    """The text of a prompt that came as token ids."""
    text = Detokenizer(_shown(renderer, body, ()))
    return "".join(text.feed(token) for token in tokens) + text.flush()


def _route(prompted: Sequence[Prompted]) -> str:
    """Where the prompts were prefilled: elsewhere only if all of them were. Those without an output do not count."""
    return "remote" if all(one.job.route in ("remote", "") for one in prompted) else "local"


async def _events(
    first: tuple[Choice, Piece],
    pieces: AsyncGenerator[tuple[Choice, Piece], None],
    forms: Sequence[Form],
    usage: Callable[[], dict[str, Any]],
) -> AsyncGenerator[bytes, None]:
    """The body of a stream."""
    async with contextlib.aclosing(pieces):
        try:
            opening = [event for form in forms for event in form.opening()]
            if opening := opening + first[0].form.chunk(first[1]):
                yield b"".join(opening)
            async for choice, piece in pieces:
                if events := choice.form.chunk(piece):
                    yield b"".join(events)
            yield b"".join(forms[0].closing(usage()))
        except Cancelled:
            raise
        except RuntimeFault as fault:
            yield b"".join(forms[0].failed(fault))
        except Exception:
            # The status has been sent; this is the only way left to say that the answer is not whole.
            _log.exception("a stream failed")
            yield b"".join(forms[0].failed(EngineFailed("internal error")))


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
