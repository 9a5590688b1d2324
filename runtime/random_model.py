# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of a chosen shape with seeded random weights: for measuring speed, where answers mean nothing.

The same shape and seed give the same weights on the same kind of device, so engines on several hosts agree.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer

from kvrail.runtime.device import open_device
from kvrail.runtime.drawn_weights import draw, keep_seed
from kvrail.runtime.errors import ConfigError

__all__ = ["SHAPES", "main", "make_model"]

# The 8B shape is that of the measurements in doc/numbers.md; "tiny" is for trying the rest on a CPU.
SHAPES: dict[str, dict[str, int]] = {
    "llama-8b": {
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 14336,
    },
    "tiny": {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_size": 256,
        "intermediate_size": 512,
    },
}
# The vocabulary of SmolLM2, whose tokenizer makes such a model usable over HTTP.
_VOCABULARY = 49152
_SHARD_BYTES = 4 << 30
_TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "*.jinja",
    "generation_config.json",
)


def make_model(
    folder: Path,
    shape: str,
    *,
    seed: int = 0,
    dtype: str = "bfloat16",
    device: str = "cpu",
    tokenizer: str = "",
    seed_only: bool = False,
) -> Path:
    """Write config.json and safetensors shards for SHAPES[shape] into `folder`, made if missing.

    `seed_only`: the seed instead of the shards; engines draw the weights when they load the model.
    `tokenizer`: a model folder whose tokenizer files are copied. Raises ConfigError.
    """
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    if shape not in SHAPES:
        raise ConfigError(f"--shape {shape}: must be one of {', '.join(SHAPES)}")
    if tokenizer and not any(Path(tokenizer).glob("tokenizer*")):
        raise ConfigError(f"--tokenizer {tokenizer}: no folder with the files of a tokenizer")
    place = open_device(device)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=_VOCABULARY,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        rms_norm_eps=1e-5,
        bos_token_id=1,
        eos_token_id=2,
        architectures=["LlamaForCausalLM"],
        dtype=dtype,
        **SHAPES[shape],
    )
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in _TOKENIZER if tokenizer else ():
        for file in Path(tokenizer).glob(pattern):
            shutil.copy(file, folder)
    config.save_pretrained(folder)
    if seed_only:
        keep_seed(folder, seed)
        return folder
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).state_dict()
    generator = torch.Generator(place).manual_seed(seed)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(_shards(shapes), 1):
        shard = f"model-{number:05}.safetensors"
        save_file(
            {name: _weights(shapes[name], place, generator) for name in names},
            folder / shard,
            metadata={"format": "pt"},
        )
        weight_map |= dict.fromkeys(names, shard)
    total = sum(value.nbytes for value in shapes.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return folder


def _shards(shapes: dict[str, torch.Tensor]) -> Iterator[list[str]]:
    """Names in order, a few GiB together: so much is held in host memory at once."""
    names: list[str] = []
    size = 0
    for name, value in shapes.items():
        if names and size + value.nbytes > _SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += value.nbytes
    yield names


def _weights(like: torch.Tensor, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    return draw(torch.empty(like.shape, dtype=like.dtype, device=device), generator).cpu()


def main(
    folder: Annotated[Path, typer.Argument(help="where to write the model")],
    shape: Annotated[str, typer.Option(help=" or ".join(SHAPES))] = "llama-8b",
    seed: Annotated[int, typer.Option(help="seed of the weights")] = 0,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"], typer.Option(help="number type of the weights")
    ] = "bfloat16",
    device: Annotated[str, typer.Option(help="where the weights are drawn: cpu, cuda or cuda:N")] = "cpu",
    tokenizer: Annotated[
        str, typer.Option(help="model folder to copy the tokenizer from (49,152 tokens)")
    ] = "",
    seed_only: Annotated[
        bool, typer.Option("--seed-only", help="write only the seed: each engine draws the weights by itself")
    ] = False,
) -> None:
    """Write a model with random weights: its shape and speed are real, its answers are noise."""
    try:
        make_model(
            folder, shape, seed=seed, dtype=dtype, device=device, tokenizer=tokenizer, seed_only=seed_only
        )
    except (ConfigError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    typer.echo(f"{folder}: {shape}, {dtype}, seed {seed}")


if __name__ == "__main__":
    typer.run(main)
