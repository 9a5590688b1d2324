# SPDX-License-Identifier: Apache-2.0
"""Token ids to text, one token at a time, without ever letting out half a character.

Each token stands for bytes, whatever stands around it, so the text of an answer is the UTF-8 of its tokens' bytes.
Two families of tokenizers are known: byte-level (each character of a token's name is one byte) and SentencePiece
with byte fallback (`▁` is a space, `<0xE2>` is a byte).
"""

from __future__ import annotations

import codecs
import copy
import json
import re
from collections.abc import Collection
from typing import Any

from tokenizers import Tokenizer

from kvrail.runtime.errors import ConfigError

__all__ = ["Detokenizer", "TokenBytes"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of each token. Special tokens have none (they are not text)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        self._byte_level = _is_byte_level(json.loads(tokenizer.to_str()).get("decoder"))
        self._bytes_of_char = {char: byte for byte, char in _byte_alphabet().items()}
        self._added = tokenizer.get_added_tokens_decoder()

    def showing(self, markers: Collection[str]) -> TokenBytes:
        """The same, but special tokens that a marker begins with or stands in are text."""
        shown = {
            token: str(added.content).encode()
            for token, added in self._added.items()
            if added.special and any(str(added.content) in marker for marker in markers)
        }
        if not shown:
            return self
        other = copy.copy(self)
        other._known = {**self._known, **shown}
        return other

    def showing_all(self) -> TokenBytes:
        """The same, but every special token is text."""
        return self.showing([str(added.content) for added in self._added.values()])

    def of(self, token: int) -> bytes:
        """The bytes of `token`; none for special tokens and for ids that the vocabulary lacks."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._look_up(token)
        return found

    def name(self, token: int) -> str:
        """A token for people: its text, or "bytes:\\xe2\\x82" when it is not whole characters."""
        added = self._added.get(token)
        if added is not None:
            return str(added.content)
        data = self.of(token)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _look_up(self, token: int) -> bytes:
        added = self._added.get(token)
        if added is not None:
            return b"" if added.special else str(added.content).encode()
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        if not self._byte_level:
            byte = _BYTE_TOKEN.fullmatch(name)
            return bytes([int(byte[1], 16)]) if byte else name.replace("▁", " ").encode()
        try:
            return bytes(self._bytes_of_char[char] for char in name)
        except KeyError:
            return name.encode()


class Detokenizer:
    """The text of one answer as it grows."""

    def __init__(self, tokens: TokenBytes) -> None:
        self._tokens = tokens
        # It holds back an unfinished character; bytes that can never become one turn into U+FFFD at once.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """The characters that this token completes; often one or more, sometimes none."""
        return self._decoder.decode(self._tokens.of(token))

    def flush(self) -> str:
        """The answer has ended: U+FFFD when it ended inside a character."""
        return self._decoder.decode(b"", final=True)


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    """Which family a tokenizer's decoder belongs to. Raises ConfigError for one that is neither."""
    steps = decoder.get("decoders", [decoder]) if decoder else []
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return True
    if kinds & {"ByteFallback", "Metaspace"}:
        return False
    raise ConfigError(
        f"the tokenizer's decoder ({', '.join(sorted(kinds)) or 'none'}) is not supported: "
        "byte-level and SentencePiece tokenizers are"
    )


def _byte_alphabet() -> dict[int, str]:
    """The character that stands for each byte in byte-level vocabularies.

    Printable Latin-1 stands for itself; the other bytes, in order, are the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    rest = (byte for byte in range(256) if byte not in alphabet)
    return alphabet | {byte: chr(0x100 + place) for place, byte in enumerate(rest)}
