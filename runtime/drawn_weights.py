# SPDX-License-Identifier: Apache-2.0
"""Random weights from a seed: written to files, or kept as the seed alone and drawn where the model is loaded.

A benchmark of a model's shape needs no weights that mean anything. A folder that holds only the seed is made at once
and loads in seconds, where tens of gigabytes would have to be written and read. The same seed gives the same weights
on the same kind of device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

__all__ = ["draw", "drawn_model", "drawn_seed", "keep_seed"]

_NAME = "model.safetensors"
_KEY = "kvrail_seed"


def draw(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Fill `value` in place. Norms are ones; matrices keep the spread of what they multiply, as a real model's do."""
    if value.ndim == 1:
        return value.fill_(1.0)
    return value.normal_(0.0, value.shape[1] ** -0.5, generator=generator)


def keep_seed(folder: Path, seed: int) -> None:
    """Let `folder` stand for weights drawn from `seed`."""
    from safetensors.torch import save_file

    save_file({"seed": torch.tensor([seed])}, folder / _NAME, metadata={"format": "pt", _KEY: str(seed)})


def drawn_seed(folder: Path) -> int | None:
    """The seed that `folder` holds instead of weights, or None. Raises what safetensors raises."""
    from safetensors import safe_open

    if not (folder / _NAME).is_file():
        return None
    with safe_open(folder / _NAME, "pt") as file:
        seed = (file.metadata() or {}).get(_KEY)
    return None if seed is None else int(seed)


def drawn_model(config: Any, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    """The model of a transformers `config`, its weights drawn on `device`."""
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for value in model.state_dict().values():
            draw(value, generator)
    return model.eval()
