# SPDX-License-Identifier: Apache-2.0
"""GGUF file → safetensors folder, once: weights dequantized tensor by tensor, config and tokenizer by transformers."""

from __future__ import annotations

import fcntl
import json
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvrail.runtime.architectures import refuse_unsupported
from kvrail.runtime.errors import ConfigError

__all__ = ["Progress", "convert_gguf"]

# Called with (what is being done, share done from 0 to 1).
Progress = Callable[[str, float], None]

_SHARD_BYTES = 4 << 30
# Architectures (by GGUF's names) whose tensors are those of transformers but for what _restored undoes.
_ARCHITECTURES = ("gemma2", "gemma3", "llama", "qwen2", "qwen3")


def convert_gguf(file: Path, folder: Path, progress: Progress | None = None) -> None:
    """Make `folder` the safetensors form of `file`, unless it is there already.

    Quantized weights become bfloat16; float32 and float16 files keep their type. The folder appears by a rename when
    it is complete; a second process waits for the first. Raises ConfigError for what cannot be converted.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        if progress and not folder.exists():
            progress(f"converting {file.name}", 0.0)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "config.json").is_file():
            return
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            _convert(file, scratch, progress)
            scratch.chmod(0o755)
            scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _convert(file: Path, folder: Path, progress: Progress | None) -> None:
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise ConfigError(f"{file}: transformers cannot read this GGUF file: {error}") from error
    refuse_unsupported(config, str(file))
    dtype = _write_weights(file, config, folder, progress)
    config.dtype = dtype
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _write_weights(file: Path, config: Any, folder: Path, progress: Progress | None) -> torch.dtype:
    from gguf import MODEL_ARCH, GGUFReader, get_tensor_name_map
    from gguf.quants import dequantize
    from transformers import AutoModelForCausalLM

    reader = GGUFReader(file)
    stored = {str(tensor.name): tensor for tensor in reader.tensors}
    if "rope_freqs.weight" in stored:
        raise ConfigError(f"{file}: its rotary scaling is not in the config; use the safetensors model")
    architecture = str(reader.get_field("general.architecture").contents())
    if architecture not in _ARCHITECTURES:
        raise ConfigError(
            f"{file}: {architecture} is not converted from GGUF ({', '.join(_ARCHITECTURES)} are); "
            "use the safetensors model"
        )
    arch = next(a for a in MODEL_ARCH if a.name.lower() == architecture)
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    config.tie_word_embeddings = "output.weight" not in stored
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    wanted = model.state_dict()
    config.architectures = [type(model).__name__]
    if config.tie_word_embeddings:
        wanted.pop("lm_head.weight", None)
    dtype = _target_dtype(reader)
    shards = _Shards(folder)
    for done, (name, shape) in enumerate((name, tuple(tensor.shape)) for name, tensor in wanted.items()):
        source = stored.pop(names.get_name(name, try_suffixes=(".weight", ".bias")) or "", None)
        if source is None:
            raise ConfigError(f"{file}: tensor {name} is missing")
        values = _restored(architecture, name, dequantize(source.data, source.tensor_type), config)
        if values.shape != shape:
            raise ConfigError(f"{file}: tensor {name} has shape {values.shape}, not {shape}")
        shards.add(name, torch.from_numpy(np.array(values)).to(dtype))
        if progress:
            progress(f"converting {file.name}", (done + 1) / len(wanted))
    shards.close()
    if stored:
        raise ConfigError(
            f"{file}: tensors that the {architecture} model does not have: {sorted(stored)[:5]}"
        )
    return dtype


def _target_dtype(reader: Any) -> torch.dtype:
    """float32 or float16 when most of the file's bytes are, else bfloat16."""
    sizes: Counter[str] = Counter()
    for tensor in reader.tensors:
        sizes[tensor.tensor_type.name] += int(tensor.n_bytes)
    return {"F32": torch.float32, "F16": torch.float16}.get(sizes.most_common(1)[0][0], torch.bfloat16)


def _restored(architecture: str, name: str, values: npt.NDArray[Any], config: Any) -> npt.NDArray[Any]:
    """The weight as transformers has it, from what GGUF keeps of it."""
    if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return _rotary_halves(values, heads)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        # GGUF adds the one that these norms add to their weights.
        return values - 1
    return values


def _rotary_halves(weight: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """GGUF interleaves the two rotary halves of each llama head; transformers keeps them one behind the other."""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


class _Shards:
    """Safetensors files of a few GiB each, with their index, so that only one shard is in memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors: dict[str, torch.Tensor] = {}
        self._names: list[list[str]] = []
        self._bytes = self._total = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self._tensors[name] = tensor
        self._bytes += tensor.nbytes
        if self._bytes >= _SHARD_BYTES:
            self._flush()

    def _flush(self) -> None:
        from safetensors.torch import save_file

        if self._tensors:
            path = self._folder / f"part{len(self._names):05d}.safetensors"
            save_file(self._tensors, path, metadata={"format": "pt"})
            path.chmod(0o644)
            self._names.append(list(self._tensors))
        self._total += self._bytes
        self._tensors, self._bytes = {}, 0

    def close(self) -> None:
        self._flush()
        count = len(self._names)
        if count == 1:
            (self._folder / "part00000.safetensors").rename(self._folder / "model.safetensors")
            return
        where: dict[str, str] = {}
        for number, names in enumerate(self._names):
            final = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            (self._folder / f"part{number:05d}.safetensors").rename(self._folder / final)
            where.update(dict.fromkeys(names, final))
        index = {"metadata": {"total_size": self._total}, "weight_map": where}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
