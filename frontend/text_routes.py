# SPDX-License-Identifier: Apache-2.0
"""What a server says about texts and itself: /tokenize, /detokenize, /version; and that it has no embeddings."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

from fastapi import APIRouter, Response
from fastapi.routing import APIRoute
from pydantic import Field, model_validator

from kvrail.frontend.chat_shapes import Message, Shape, Tool
from kvrail.frontend.envelope import json_response
from kvrail.frontend.keyed_route import keyed_route
from kvrail.frontend.render import Renderer
from kvrail.frontend.template import Conversation
from kvrail.runtime.control.auth import ApiKeys
from kvrail.runtime.errors import RuntimeFault

__all__ = ["text_routes"]


class _TokenizeRequest(Shape):
    """A text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one(self) -> _TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give either prompt or messages")
        return self


class _DetokenizeRequest(Shape):
    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


class _NotImplemented(RuntimeFault):
    """A route of the API that this server has not."""

    status = 501
    kind = "invalid_request_error"


def text_routes(
    renderer: Renderer,
    keys: ApiKeys,
    check_model: Callable[[str | None], int],
    check_text: Callable[[int], None],
) -> APIRouter:
    """The routes. `check_model` gives the longest context; `check_text` refuses texts of too many characters."""
    router = APIRouter(route_class=keyed_route(keys))

    @router.post("/tokenize")
    async def tokenize(body: _TokenizeRequest) -> Response:
        longest = check_model(body.model)
        if body.messages is not None:
            check_text(sum(len(message.content or "") for message in body.messages))
            conversation = Conversation(
                messages=[message.for_template() for message in body.messages],
                tools=[tool.for_template() for tool in body.tools or ()],
                options=body.chat_template_kwargs or {},
                add_generation_prompt=body.add_generation_prompt is not False,
                continue_final=bool(body.continue_final_message),
            )
            tokens = (await renderer.chat(conversation, check_text)).tokens.tolist()
        else:
            assert body.prompt is not None
            check_text(len(body.prompt))
            special = body.add_special_tokens is not False
            ids = await renderer.text(body.prompt, special=special) if body.prompt else None
            tokens = [] if ids is None else ids.tolist()
        names = [renderer.token_bytes.name(token) for token in tokens] if body.return_token_strs else None
        return json_response(
            {"count": len(tokens), "max_model_len": longest, "tokens": tokens, "token_strs": names}
        )

    @router.post("/detokenize")
    async def detokenize(body: _DetokenizeRequest) -> Response:
        check_model(body.model)
        return json_response({"prompt": await renderer.decode(renderer.ids(body.tokens, "tokens").tolist())})

    @router.post("/v1/embeddings")
    async def embeddings() -> Response:
        raise _NotImplemented("embeddings: this server generates text only")

    async def say_version() -> Response:
        return json_response({"version": _version()})

    # As with the health routes, no key: what asks is a monitor.
    router.add_api_route("/version", say_version, methods=["GET"], route_class_override=APIRoute)
    return router


def _version() -> str:
    try:
        return version("kvrail")
    except PackageNotFoundError:  # a source tree that was never installed
        return "0+source"
