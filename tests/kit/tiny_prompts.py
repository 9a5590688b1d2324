# SPDX-License-Identifier: Apache-2.0
"""Prompts for tiny random models, the same each time, and how what was computed from them is compared."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["VOCABULARY", "prompt", "same_values"]

# Of the tiny models of tests/engine and tests/gpu.
VOCABULARY = 997


def prompt(length: int, seed: int = 0) -> npt.NDArray[np.uint32]:
    """Token ids, none of them special."""
    return np.random.default_rng([seed, length]).integers(4, VOCABULARY, length).astype(np.uint32)


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all are equal, whatever their types; memory that nobody has written (NaN) equals itself."""
    return torch.allclose(a.float(), b.float(), rtol=0, atol=0, equal_nan=True)
