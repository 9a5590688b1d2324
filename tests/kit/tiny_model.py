# SPDX-License-Identifier: Apache-2.0
"""Tokenizers small enough to read: byte-level with one token a byte, and SentencePiece-like with byte fallback."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

__all__ = ["CHATML", "END", "byte_fallback_tokenizer", "byte_level_tokenizer", "write_model_folder"]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# The id of <|im_end|> in both tokenizers.
END = 2


def byte_level_tokenizer() -> Tokenizer:
    """Ids 0-2 special, 3 "<think>" (not special), 4 … 259 the bytes in alphabet order; no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: 4 + place for place, char in enumerate(alphabet)}
    vocabulary |= {token: place for place, token in enumerate((*_SPECIAL, "<think>"))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """Ids 0-2 special, 3 … 258 <0x00> … <0xFF>, then some characters and ▁."""
    vocabulary = {token: place for place, token in enumerate(_SPECIAL)}
    vocabulary |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocabulary |= {char: 259 + place for place, char in enumerate("▁abcdefghijklmnopqrstuvwxyz")}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<|endoftext|>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    return tokenizer


def write_model_folder(folder: Path, tokenizer: Tokenizer | None = None) -> Path:
    """Everything of a checkpoint that the text side reads; no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer or byte_level_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "chat_template": CHATML})
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, 0]}))
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    (folder / "config.json").write_text(
        json.dumps({"vocab_size": size, "model_type": "llama", "max_position_embeddings": 4096})
    )
    return folder
