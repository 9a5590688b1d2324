# SPDX-License-Identifier: Apache-2.0
"""A whole checkpoint in a folder: random weights of a real family, a tokenizer with a name for every token, EOS."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from kit.tiny_families import tiny_random_model
from kit.tiny_model import CHATML, byte_level_tokenizer

__all__ = ["MAX_LENGTH", "VOCABULARY", "first_tokens", "tiny_checkpoint", "write_eos"]

# More than the token ids that check_identity draws.
VOCABULARY = 2048
MAX_LENGTH = 640


def tiny_checkpoint(
    folder: Path, family: str, *, seed: int = 1, eos: Sequence[int] = (2,), **changes: Any
) -> Path:
    """A tiny model of a family (a name in tiny_families), fp32, in `folder`. Equal arguments give equal weights.

    `changes`: other fields of its configuration.
    """
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "max_position_embeddings": MAX_LENGTH,
        # Not tied: a tied random model says its last token again and again, whatever lies in its KV cache.
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": list(eos),
        # Sharp enough that attention, and so every page of KV, decides about the next token.
        "initializer_range": 0.3,
    }
    model = tiny_random_model(family, **(settings | changes))
    model.save_pretrained(folder)
    _tokenizer().save(str(folder / "tokenizer.json"))
    names = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    write_eos(folder, eos)
    return folder


def write_eos(folder: Path, eos: Sequence[int]) -> None:
    """Name the tokens that end an answer."""
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(eos)}))


def first_tokens(folder: Path, prompt: Sequence[int], count: int) -> list[int]:
    """The greedy answer of transformers' own code, whatever EOS says."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def _tokenizer() -> Tokenizer:
    """Byte-level, and words of its own for the ids that no byte has: equal texts then mean equal tokens."""
    content = json.loads(byte_level_tokenizer().to_str())
    known = content["model"]["vocab"]
    taken = set(known.values()) | {token["id"] for token in content["added_tokens"]}
    known |= {f"Ġw{number}": number for number in range(VOCABULARY) if number not in taken}
    return Tokenizer.from_str(json.dumps(content))
