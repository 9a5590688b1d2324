# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that brings Python code instead of a chat template; it runs only under --trust-remote-code.

Known form: a file `encoding.py`, or `encoding/encoding_*.py`, with `encode_messages(messages, thinking_mode=…)` that
returns the text of the prompt; tools stand in the first message.
"""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from typing import Any

from kvrail.frontend.template import Conversation
from kvrail.runtime.errors import BadRequest, ConfigError

__all__ = ["CheckpointRenderer", "checkpoint_code"]


def checkpoint_code(path: Path) -> Path | None:
    """The file with the checkpoint's own renderer, or None."""
    found = [path / "encoding.py", *sorted((path / "encoding").glob("encoding_*.py"))]
    return next((file for file in found if file.is_file()), None)


class CheckpointRenderer:
    """Runs code that came with the weights, with all rights of this process."""

    def __init__(self, file: Path, *, thinking: bool) -> None:
        self.source = file.read_text("utf-8")
        self.takes_tools = "tools" in self.source
        self._thinking = thinking
        spec = importlib.util.spec_from_file_location("kvrail_checkpoint_encoding", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
            self._encode: Any = module.encode_messages
            self._known = set(inspect.signature(self._encode).parameters)
        except Exception as error:  # foreign code may raise anything
            raise ConfigError(
                f"{file} cannot be used to render prompts: {type(error).__name__}: {error}"
            ) from None

    def render(self, conversation: Conversation) -> str:
        """The text of a conversation. Raises BadRequest when the code refuses it."""
        if conversation.continue_final or not conversation.add_generation_prompt:
            raise BadRequest("continue_final_message: this checkpoint's renderer cannot do that")
        options = dict(conversation.options)
        thinking = options.pop("enable_thinking", options.pop("thinking", self._thinking))
        options.setdefault("thinking_mode", "thinking" if thinking else "chat")
        if unknown := options.keys() - self._known:
            raise BadRequest(
                f"chat_template_kwargs.{min(unknown)}: this checkpoint's renderer does not know it",
                param="chat_template_kwargs",
            )
        messages = [dict(message) for message in conversation.messages]
        if conversation.tools:
            if messages[0]["role"] != "system":
                messages.insert(0, {"role": "system", "content": ""})
            messages[0]["tools"] = list(conversation.tools)
        try:
            return str(self._encode(messages, **options))
        except Exception as error:  # foreign code may raise anything
            raise BadRequest(
                f"messages: the checkpoint's renderer refuses this conversation: {error}", param="messages"
            ) from None
