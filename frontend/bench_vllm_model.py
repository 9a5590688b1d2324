# SPDX-License-Identifier: Apache-2.0
"""The model of scripts/bench_vllm when none is named: so small that the hand-over takes most of the time."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from kvrail.runtime.random_model import make_model

__all__ = ["tiny_model"]


def tiny_model(folder: Path, dtype: str) -> Path:
    """A Llama of two layers with random weights, and a tokenizer in which every id is a word of its own."""
    make_model(folder, "tiny", dtype=dtype)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    # Whatever such a model answers, each token is text: so each is streamed in a chunk of its own.
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "w1", "eos_token": "w2"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder
