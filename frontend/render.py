# SPDX-License-Identifier: Apache-2.0
"""A conversation or a text to token ids, once: the checkpoint's own chat template and tokenizer.

The tokenizer is used directly (a folder with tokenizer.json), which starts in a fraction of a second; only older
tokenizers are read through transformers.
"""

from __future__ import annotations

import asyncio
import json
import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from kvrail.frontend.checkpoint_code import CheckpointRenderer, checkpoint_code
from kvrail.frontend.detokenize import TokenBytes
from kvrail.frontend.template import ChatRenderer, ChatTemplate, Conversation, template_text
from kvrail.frontend.tokenizing import Backend, TextEncoder
from kvrail.runtime.errors import BadRequest, ConfigError
from kvrail.runtime.grammar import Grammars

__all__ = ["Prompt", "Renderer"]

_log = logging.getLogger(__name__)
# Conversations with more characters (tools, calls and thoughts among them) are written down in a thread.
_SHORT_TALK = 8192


class Prompt(NamedTuple):
    """A rendered conversation: its token ids, and the end of its text (up to where the answer begins)."""

    tokens: npt.NDArray[np.uint32]
    tail: str


class Renderer:
    """The text side of a model. Safe to use from several tasks.

    `eos_ids`: tokens that end an answer. `vocabulary`: ids below this may appear in a prompt. `chat`: None for a
    model without a chat template; `no_chat` then says why.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        chat: ChatRenderer | None,
        special_tokens: Mapping[str, str],
        eos_ids: Sequence[int],
        vocabulary: int,
        max_model_len: int | None = None,
        add_bos: bool = False,
        backend: Backend = "hf",
        verify_rate: float = 0.0,
        no_chat: str = "this model has no chat template: use /v1/completions",
    ) -> None:
        self.eos_ids = list(eos_ids)
        self.vocabulary = vocabulary
        # The longest sequence that the checkpoint was made for, where that is known without loading it.
        self.max_model_len = max_model_len
        self.token_bytes = TokenBytes(tokenizer)
        self.encoder = TextEncoder(tokenizer, backend=backend, verify_rate=verify_rate)
        # Characters; no text of more than n times this many has n tokens.
        self.longest_token = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)
        self.grammars = Grammars(tokenizer.to_str, vocabulary)
        self._tokenizer = tokenizer
        self._bos_id = tokenizer.token_to_id(special_tokens.get("bos_token", "")) if add_bos else None
        self._chat = chat
        self._no_chat = no_chat

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        thinking: bool = False,
        chat_template: str | Path | None = None,
        trust_remote_code: bool = False,
        backend: Backend = "hf",
        verify_rate: float = 0.0,
    ) -> Renderer:
        """From a model folder (whoever launches has made one of a GGUF file or a hub name).

        `chat_template`: a file to use instead of the checkpoint's own. Raises ConfigError when there is no usable
        tokenizer or template.
        """
        path = Path(model)
        given = _template_file(chat_template) if chat_template else None
        settings: dict[str, Any] = {"backend": backend, "verify_rate": verify_rate}
        if not (path / "tokenizer.json").is_file():
            tokenizer, template, settings["special_tokens"], more = _through_transformers(path)
            settings |= more
        else:
            config = _json(path / "tokenizer_config.json")
            model_config = _json(path / "config.json")
            tokenizer = _tokenizer(path / "tokenizer.json")
            special = _special_tokens(config)
            template = template_text(path, config)
            settings |= {
                "special_tokens": special,
                "eos_ids": _eos_ids(path, model_config, tokenizer, special.get("eos_token")),
                "vocabulary": int(
                    model_config.get("vocab_size") or tokenizer.get_vocab_size(with_added_tokens=True)
                ),
                "max_model_len": model_config.get("max_position_embeddings"),
                "add_bos": config.get("add_bos_token") is True,
            }
        template = given or template
        chat: ChatRenderer | None = None
        if template:
            chat = ChatTemplate(template, settings["special_tokens"], thinking=thinking)
        elif code := checkpoint_code(path):
            if trust_remote_code:
                chat = CheckpointRenderer(code, thinking=thinking)
            else:
                settings["no_chat"] = (
                    f"this model renders prompts by its own code ({code.name}), which runs only with "
                    "--trust-remote-code; --chat-template FILE is another way"
                )
                _log.warning("chat: %s", settings["no_chat"])
        return cls(tokenizer, chat=chat, **settings)

    @property
    def source(self) -> str:
        """The text of the chat template, or of the code in its place; empty without any."""
        return self._chat.source if self._chat else ""

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template has a place for tools."""
        return self._chat is not None and self._chat.takes_tools

    async def chat(
        self, conversation: Conversation, check: Callable[[int], None] = lambda characters: None
    ) -> Prompt:
        """A conversation, up to where the answer begins. Raises BadRequest.

        `check` hears how many characters it is written down with, and may refuse them before they become tokens.
        """
        if _is_short(conversation):
            text = self.chat_text(conversation)
        else:
            text = await asyncio.to_thread(self.chat_text, conversation)
        check(len(text))
        # The template writes BOS itself where the model wants one.
        return Prompt(await self.encoder.encode(text, special=False), text[-256:])

    async def text(self, text: str, *, special: bool = True) -> npt.NDArray[np.uint32]:
        """Token ids of plain text, with BOS where the tokenizer adds one. Raises BadRequest when there are none."""
        tokens = await self.encoder.encode(text, special=special)
        if special and self._bos_id is not None and tokens[:1].tolist() != [self._bos_id]:
            tokens = np.insert(tokens, 0, self._bos_id)
        if not len(tokens):
            raise BadRequest("prompt: must not be empty", param="prompt")
        return tokens

    def ids(self, tokens: list[int], param: str = "prompt") -> npt.NDArray[np.uint32]:
        """Token ids as they came, checked against the vocabulary. Raises BadRequest."""
        try:
            # (numpy takes three times as long to read a list of Python's integers.)
            found = np.frombuffer(array("q", tokens), np.int64)
            wrong = np.flatnonzero(found.view(np.uint64) >= self.vocabulary)
        except OverflowError:
            wrong = np.asarray([n for n, token in enumerate(tokens) if not 0 <= token < self.vocabulary])
        if len(wrong):
            place = int(wrong[0])
            raise BadRequest(
                f"{param}[{place}]: {tokens[place]} is no token id of this model (0 to {self.vocabulary - 1})",
                param=f"{param}[{place}]",
            )
        return found.astype(np.uint32)

    def chat_text(self, conversation: Conversation) -> str:
        """The conversation as the model wants it written. Raises BadRequest when the template refuses it."""
        if self._chat is None:
            raise BadRequest(self._no_chat, param="messages")
        return self._chat.render(conversation)

    async def decode(self, tokens: list[int]) -> str:
        """The text of token ids, special ones included."""
        # As a batch of one: `decode` keeps the GIL, and so the event loop, for as long as it takes.
        texts = await asyncio.to_thread(self._tokenizer.decode_batch, [tokens], skip_special_tokens=False)
        return str(texts[0])


def _is_short(conversation: Conversation) -> bool:
    """Whether little enough goes into it for the event loop to wait. Looks at no more than that takes."""
    left = _SHORT_TALK
    parts: list[Any] = [conversation.messages, conversation.tools, conversation.options]
    while parts and left > 0:
        part = parts.pop()
        if isinstance(part, str):
            left -= len(part)
        elif isinstance(part, Mapping):
            left -= len(part)
            parts += () if left < 0 else (*part.keys(), *part.values())
        elif isinstance(part, Sequence):
            left -= len(part)
            parts += () if left < 0 else part
    return left > 0


def _template_file(file: str | Path) -> str:
    try:
        return Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read --chat-template {file}: {error}") from None


def _tokenizer(file: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"{file} cannot be read: {error}") from None
    # Padding of the prompt would be wrong, and truncation must never happen silently.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    return {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token") and isinstance(value, str | dict)
    }


def _eos_ids(path: Path, model_config: dict[str, Any], tokenizer: Tokenizer, token: str | None) -> list[int]:
    """Every token that ends an answer, by the generation config, the model config and the tokenizer."""
    named = _json(path / "generation_config.json").get("eos_token_id")
    if named is None:
        named = model_config.get("eos_token_id")
    found = set(named) if isinstance(named, list) else {named}
    found.add(tokenizer.token_to_id(token) if token else None)
    return sorted(number for number in found if isinstance(number, int))


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    return content if isinstance(content, dict) else {}


def _through_transformers(path: Path) -> tuple[Tokenizer, str | None, dict[str, str], dict[str, Any]]:
    """Tokenizers without tokenizer.json: transformers converts them (slow to import)."""
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"no tokenizer can be read from {path}: {error}") from None
    eos = loaded.eos_token_id
    more = {
        "eos_ids": [] if eos is None else [eos],
        "vocabulary": len(loaded),
        "add_bos": bool(getattr(loaded, "add_bos_token", False)),
    }
    special = {name: str(value) for name, value in loaded.special_tokens_map.items()}
    template = loaded.chat_template if isinstance(loaded.chat_template, str) else None
    return loaded.backend_tokenizer, template, special, more
