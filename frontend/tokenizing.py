# SPDX-License-Identifier: Apache-2.0
"""Text to token ids by one of two tokenizers, never for long on the event loop, and checked by the other one.

The checkpoint's tokenizer as Hugging Face reads it (`hf`) is what counts. `fastokens` is several times faster; a
sample of texts is tokenised by both, and after the first difference only `hf` is used.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from kvrail.runtime.errors import BadRequest, ConfigError

__all__ = ["Backend", "TextEncoder"]

Backend = Literal["auto", "hf", "fastokens"]
_log = logging.getLogger(__name__)
# Longer texts are tokenised in a thread: hf takes about a millisecond for a thousand characters.
_SHORT_TEXT = 1024


class TextEncoder:
    """Safe to use from several tasks. `on_check` is told of each comparison whether both agreed (in any thread)."""

    def __init__(self, tokenizer: Tokenizer, *, backend: Backend = "hf", verify_rate: float = 0.0) -> None:
        self.on_check: Callable[[bool], None] = lambda same: None
        self._hf = tokenizer
        self._verify_rate = verify_rate
        self._fast = _fastokens(tokenizer, required=backend == "fastokens") if backend != "hf" else None

    @property
    def backend(self) -> str:
        """The tokenizer in use."""
        return "hf" if self._fast is None else "fastokens"

    async def encode(self, text: str, *, special: bool) -> npt.NDArray[np.uint32]:
        """Token ids [n]; `special`: with what the tokenizer puts around a text. Raises BadRequest."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BadRequest("the text contains a lone surrogate, which is no character") from None
        if len(text) < _SHORT_TEXT:
            return self._encode(text, special)
        return await asyncio.to_thread(self._encode, text, special)

    def _encode(self, text: str, special: bool) -> npt.NDArray[np.uint32]:
        if self._fast is None:
            return self._slowly(text, special)
        try:
            data, _ = self._fast.encode_batch_flat([text], add_special_tokens=special)
            tokens: npt.NDArray[np.uint32] = np.frombuffer(data, np.uint32)
        except BaseException as error:  # it documents none, and a panic in Rust is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            self._give_up(f"{type(error).__name__}: {error}")
            return self._slowly(text, special)
        if self._verify_rate and random.random() < self._verify_rate:
            wanted = self._slowly(text, special)
            same = np.array_equal(tokens, wanted)
            self.on_check(same)
            if not same:
                self._give_up(f"a text of {len(text)} characters has other tokens")
                return wanted
        return tokens

    def _slowly(self, text: str, special: bool) -> npt.NDArray[np.uint32]:
        # As a batch of one: `encode` keeps the GIL, and so the event loop, for as long as it takes.
        # Without offsets: freeing them takes longer than the loop should stand still.
        return np.array(self._hf.encode_batch_fast([text], add_special_tokens=special)[0].ids, np.uint32)

    def _give_up(self, reason: str) -> None:
        _log.error("fastokens differs from the checkpoint's tokenizer: %s; it is not used any more", reason)
        self._fast = None


def _fastokens(tokenizer: Tokenizer, *, required: bool) -> Any:
    """The fast reading of a tokenizer; None when there is none and none is `required`."""
    try:
        import fastokens

        return fastokens.Tokenizer.from_json_str(tokenizer.to_str())
    except ImportError:
        reason = "it is not installed (pip install fastokens)"
    except Exception as error:  # it reads not every kind of tokenizer, and raises what it likes
        reason = f"it cannot read this tokenizer: {error}"
    if required:
        raise ConfigError(f"--tokenizer-backend fastokens: {reason}")
    _log.info("tokenizer hf, not fastokens: %s", reason)
    return None
