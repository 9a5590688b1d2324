# SPDX-License-Identifier: Apache-2.0
"""Increments add up to the text, and no increment ends inside a character."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from kit.tiny_model import END, byte_fallback_tokenizer, byte_level_tokenizer
from kvrail.frontend.detokenize import Detokenizer, TokenBytes
from kvrail.runtime.errors import ConfigError

TOKENIZERS = {"byte level": byte_level_tokenizer(), "byte fallback": byte_fallback_tokenizer()}


def increments(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    text = Detokenizer(TokenBytes(tokenizer))
    return [*(text.feed(token) for token in ids), text.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_an_emoji_of_many_tokens_comes_whole(name: str) -> None:
    ids = TOKENIZERS[name].encode("a🙂b").ids
    assert len(ids) == 6
    assert increments(TOKENIZERS[name], ids) == ["a", "", "", "", "🙂", "b", ""]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_character_cut_by_the_end_is_marked(name: str) -> None:
    ids = TOKENIZERS[name].encode("é").ids
    assert increments(TOKENIZERS[name], ids[:1]) == ["", "\ufffd"]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=20))
def test_increments_add_up(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    parts = increments(tokenizer, tokenizer.encode(text).ids)
    assert "".join(parts) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts)


def test_special_tokens_are_no_text_and_others_are() -> None:
    tokens = TokenBytes(TOKENIZERS["byte level"])
    assert tokens.of(END) == b""
    assert tokens.name(END) == "<|im_end|>"
    assert tokens.of(3) == b"<think>"
    assert tokens.of(10**6) == b""


def test_part_of_a_character_has_an_unmistakable_name() -> None:
    tokenizer = TOKENIZERS["byte level"]
    first = tokenizer.encode("é").ids[0]
    assert TokenBytes(tokenizer).name(first) == "bytes:\\xc3"


def test_bytes_that_are_no_text_do_not_hold_up_what_follows() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    assert increments(tokenizer, [3 + 0xFF, tokenizer.token_to_id("a")]) == ["\ufffd", "a", ""]


def test_another_kind_of_tokenizer_is_refused() -> None:
    tokenizer = Tokenizer(models.WordPiece({"a": 0}, unk_token="a"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="WordPiece"):
        TokenBytes(tokenizer)
