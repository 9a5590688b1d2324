# SPDX-License-Identifier: Apache-2.0
"""A conversation as the text that its model wants: the checkpoint's own chat template, sandboxed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Protocol

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvrail.runtime.errors import BadRequest, ConfigError

__all__ = ["ChatRenderer", "ChatTemplate", "Conversation", "template_text"]

# Stands for the end of the last message, so that the text can be cut there; no message holds it.
_END = "\ue0f1\ue0f2\ue0f1"
_OURS = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})


@dataclass(frozen=True)
class Conversation:
    """What is to be rendered. `options`: chat_template_kwargs. `continue_final`: the last message goes on."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final: bool = False


class ChatRenderer(Protocol):
    """Anything that writes a conversation down. `source`: what it is made of, read for the marks that it uses."""

    source: str
    takes_tools: bool

    def render(self, conversation: Conversation) -> str: ...


class ChatTemplate:
    """A Jinja template. `thinking`: default of enable_thinking (and of `thinking`, as some families call it)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, thinking: bool) -> None:
        self.source = source
        self.takes_tools = "tools" in source
        self._template = _compile(source)
        self._defaults = {**special_tokens, "enable_thinking": thinking, "thinking": thinking}

    def render(self, conversation: Conversation) -> str:
        """The text of a conversation. Raises BadRequest when the template refuses it."""
        if taken := _OURS & conversation.options.keys():
            name = f"chat_template_kwargs.{min(taken)}"
            raise BadRequest(f"{name}: has a field of its own in the request", param="chat_template_kwargs")
        messages: Sequence[Mapping[str, Any]] = conversation.messages
        if conversation.continue_final:
            last = messages[-1]
            messages = [*messages[:-1], {**last, "content": f"{last.get('content') or ''}{_END}"}]
        try:
            text = self._template.render(
                {
                    **self._defaults,
                    **conversation.options,
                    "messages": messages,
                    "tools": list(conversation.tools) or None,
                    "add_generation_prompt": conversation.add_generation_prompt
                    and not conversation.continue_final,
                }
            )
        except (
            jinja2.TemplateError,
            ArithmeticError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise BadRequest(
                f"messages: the chat template refuses this conversation: {error}", param="messages"
            ) from None
        if not conversation.continue_final:
            return text
        cut = text.rfind(_END)
        if cut < 0:
            raise BadRequest(
                "continue_final_message: the chat template does not write the last message down",
                param="continue_final_message",
            )
        return text[:cut].replace(_END, "")


def template_text(path: Path, config: Mapping[str, Any]) -> str | None:
    """A folder's chat template: a file of its own, or in tokenizer_config.json (there perhaps one of several)."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _compile(template: str) -> jinja2.Template:
    """A chat template, with what templates of the Hub expect to find; sandboxed, as it comes with the weights."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], autoescape=False
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise ConfigError(f"the checkpoint's chat template cannot be compiled: {error}") from None


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which would change prompts."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
