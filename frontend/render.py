# SPDX-License-Identifier: Apache-2.0
"""A conversation or a text to token ids, once: the checkpoint's own chat template and tokenizer.

The tokenizer is used directly (a folder with tokenizer.json), which starts in a fraction of a second; only older
tokenizers are read through transformers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from kvrail.frontend.detokenize import TokenBytes
from kvrail.runtime.errors import BadRequest, ConfigError

__all__ = ["Renderer"]

# Texts from this length on are tokenised in a thread, so that they do not hold up everybody's streams.
_LONG_TEXT = 8192


class Renderer:
    """The text side of a model. Immutable after construction; safe to use from several tasks.

    `eos_ids`: tokens that end an answer. `vocabulary`: ids below this may appear in a prompt.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template: str | None,
        special_tokens: dict[str, str],
        eos_ids: Sequence[int],
        vocabulary: int,
        add_bos: bool = False,
        thinking: bool = False,
    ) -> None:
        self.eos_ids = list(eos_ids)
        self.vocabulary = vocabulary
        self.token_bytes = TokenBytes(tokenizer)
        self._tokenizer = tokenizer
        self._special_tokens = special_tokens
        self._bos_id = tokenizer.token_to_id(special_tokens.get("bos_token", "")) if add_bos else None
        self._thinking = thinking
        self._template = _compile(template) if template else None

    @classmethod
    def load(cls, model: str | Path, *, thinking: bool = False) -> Renderer:
        """From a model folder (whoever launches has made one of a GGUF file or a hub name).

        Raises ConfigError when it has no usable tokenizer.
        """
        path = Path(model)
        if not (path / "tokenizer.json").is_file():
            return _through_transformers(path, thinking)
        config = _json(path / "tokenizer_config.json")
        model_config = _json(path / "config.json")
        try:
            tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # the library raises plain Exception
            raise ConfigError(f"{path / 'tokenizer.json'} cannot be read: {error}") from None
        special = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in config.items()
            if name.endswith("_token") and isinstance(value, str | dict)
        }
        # Padding of the prompt would be wrong, and truncation must never happen silently.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        vocabulary = int(model_config.get("vocab_size") or tokenizer.get_vocab_size(with_added_tokens=True))
        return cls(
            tokenizer,
            template=_template_text(path, config),
            special_tokens=special,
            eos_ids=_eos_ids(path, model_config, tokenizer, special.get("eos_token")),
            vocabulary=vocabulary,
            add_bos=config.get("add_bos_token") is True,
            thinking=thinking,
        )

    async def chat(
        self, messages: Sequence[dict[str, Any]], enable_thinking: bool | None = None
    ) -> list[int]:
        """Token ids of a conversation, up to where the answer begins. Raises BadRequest."""
        text = self.chat_text(messages, enable_thinking)
        # The template writes BOS itself where the model wants one.
        return await self._encode(text, special=False)

    async def text(self, text: str) -> list[int]:
        """Token ids of plain text, with BOS where the tokenizer adds one. Raises BadRequest when there are none."""
        tokens = await self._encode(text, special=True)
        if self._bos_id is not None and tokens[:1] != [self._bos_id]:
            tokens = [self._bos_id, *tokens]
        if not tokens:
            raise BadRequest("prompt: must not be empty", param="prompt")
        return tokens

    def ids(self, tokens: list[int]) -> list[int]:
        """Token ids as they came, checked against the vocabulary. Raises BadRequest."""
        for place, token in enumerate(tokens):
            if not 0 <= token < self.vocabulary:
                raise BadRequest(
                    f"prompt[{place}]: {token} is no token id of this model (0 to {self.vocabulary - 1})",
                    param=f"prompt[{place}]",
                )
        return tokens

    def chat_text(self, messages: Sequence[dict[str, Any]], enable_thinking: bool | None = None) -> str:
        """The conversation as the model wants it written. Raises BadRequest when the template refuses it."""
        if self._template is None:
            raise BadRequest("this model has no chat template: use /v1/completions", param="messages")
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=True,
                enable_thinking=self._thinking if enable_thinking is None else enable_thinking,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise BadRequest(
                f"messages: the chat template refuses this conversation: {error}", param="messages"
            ) from None

    async def _encode(self, text: str, *, special: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BadRequest("the text contains a lone surrogate, which is no character") from None
        if len(text) < _LONG_TEXT:
            return list(self._tokenizer.encode(text, add_special_tokens=special).ids)
        # As a batch of one: `encode` keeps the GIL, and so the event loop, for as long as it takes.
        encodings = await asyncio.to_thread(self._tokenizer.encode_batch, [text], add_special_tokens=special)
        return list(encodings[0].ids)


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


def _to_json(value: Any, indent: int | None = None) -> str:
    """Jinja's own filter escapes HTML, which would change prompts."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _template_text(path: Path, config: dict[str, Any]) -> str | None:
    """The chat template: a file of its own, or in tokenizer_config.json (there perhaps one of several)."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    return template


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


def _through_transformers(path: Path, thinking: bool) -> Renderer:
    """Tokenizers without tokenizer.json: transformers converts them (slow to import)."""
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"no tokenizer can be read from {path}: {error}") from None
    eos = loaded.eos_token_id
    return Renderer(
        loaded.backend_tokenizer,
        template=loaded.chat_template if isinstance(loaded.chat_template, str) else None,
        special_tokens={name: str(value) for name, value in loaded.special_tokens_map.items()},
        eos_ids=[] if eos is None else [eos],
        vocabulary=len(loaded),
        add_bos=bool(getattr(loaded, "add_bos_token", False)),
        thinking=thinking,
    )
