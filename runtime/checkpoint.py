# SPDX-License-Identifier: Apache-2.0
"""From what a person writes as --model to a folder of safetensors whose architecture this engine computes rightly."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrail.runtime.architectures import kv_layout, refuse_unsupported
from kvrail.runtime.config import environment
from kvrail.runtime.errors import ConfigError
from kvrail.runtime.gguf_files import Progress, convert_gguf
from kvrail.transfer.layout import PageLayout

__all__ = [
    "Checkpoint",
    "Progress",
    "cache_dir",
    "convert_gguf",
    "fingerprint_of",
    "load_tokenizer",
    "open_checkpoint",
    "resolve_model",
]

# Keys of config.json that say how a file was written, not what the weights are.
_NOT_IDENTITY = ("_name_or_path", "_model_name_or_path", "dtype", "torch_dtype", "transformers_version")
_SAMPLE_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model on disk that was found fit to serve. `folder` has config.json, safetensors and the tokenizer."""

    folder: Path
    config: Any
    model_id: str
    eos_token_ids: tuple[int, ...]

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens that the model was made for."""
        return int(self.config.max_position_embeddings)

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return int(self.config.vocab_size)

    def resolve_dtype(self, wanted: str) -> str:
        """The dtype name to compute in: `wanted`, or for "auto" the one that the weights are stored in."""
        if wanted != "auto":
            return wanted
        stored = str(self.config.dtype or "float32").removeprefix("torch.")
        return stored if stored in ("float32", "bfloat16", "float16") else "float32"

    def layout(self, dtype: str, page_tokens: int) -> PageLayout:
        """The geometry of pages and state slots of this model computed in `dtype` ("auto" allowed)."""
        return kv_layout(
            self.config, model_id=self.model_id, dtype=self.resolve_dtype(dtype), page_tokens=page_tokens
        )


def open_checkpoint(model: str, progress: Progress | None = None) -> Checkpoint:
    """Find (or fetch, or convert) `model`, check that it can be served, and fingerprint it.

    Raises ConfigError saying what is wrong: not found, no weights, an unsupported architecture.
    """
    from transformers import AutoConfig

    folder = resolve_model(model, progress)
    try:
        config = AutoConfig.from_pretrained(folder)
    except (ValueError, OSError, KeyError) as error:
        raise ConfigError(f"--model {model}: config.json cannot be read: {error}") from error
    refuse_unsupported(config, model)
    return Checkpoint(
        folder=folder,
        config=config,
        model_id=fingerprint_of(folder),
        eos_token_ids=_eos_token_ids(folder, config),
    )


def resolve_model(model: str, progress: Progress | None = None) -> Path:
    """The safetensors folder for `model`: a folder, a GGUF file, a folder with one GGUF file, or a hub name."""
    path = Path(model).expanduser()
    if path.is_dir():
        if any(path.glob("*.safetensors")) and (path / "config.json").is_file():
            return path.resolve()
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return _converted(files[0], progress)
        if files:
            raise ConfigError(
                f"--model {model}: {len(files)} GGUF files in this folder; name one of them: "
                + ", ".join(file.name for file in files[:5])
            )
        raise ConfigError(
            f"--model {model}: this folder has neither config.json with *.safetensors nor a *.gguf file"
        )
    if path.is_file():
        if path.suffix == ".gguf":
            return _converted(path, progress)
        raise ConfigError(f"--model {model}: give the folder of a safetensors model, or a .gguf file")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not path.parent.is_dir():
        return _fetch(model, progress)
    raise ConfigError(f"--model {model}: no such file or folder")


def cache_dir() -> Path:
    """Where converted models are kept: kvrail under $XDG_CACHE_HOME, else under ~/.cache."""
    base = environment("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvrail"


def load_tokenizer(folder: Path) -> Any:
    """The checkpoint's own tokenizer, chat template included."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise ConfigError(f"the tokenizer in {folder} cannot be loaded: {error}") from error


def _converted(file: Path, progress: Progress | None) -> Path:
    target = cache_dir() / "models" / f"{file.stem}-{_sample_digest([file])[:16]}"
    convert_gguf(file, target, progress)
    return target


def _fetch(name: str, progress: Progress | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    if progress:
        progress(f"fetching {name}", 0.0)
    try:
        folder = snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "tokenizer*"])
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        offline = " (HF_HUB_OFFLINE is set)" if environment("HF_HUB_OFFLINE") else ""
        raise ConfigError(
            f"--model {name}: no such folder, and the hub cannot give it{offline}: {error}"
        ) from error
    return Path(folder)


def fingerprint_of(folder: Path) -> str:
    """32 hex digits from the config and a sample of the weights: equal for equal models in any folder."""
    config = json.loads((folder / "config.json").read_text())
    identity = {key: value for key, value in sorted(config.items()) if key not in _NOT_IDENTITY}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode())
    digest.update(_sample_digest(sorted(folder.glob("*.safetensors"))).encode())
    return digest.hexdigest()[:32]


def _sample_digest(files: list[Path]) -> str:
    """A digest of each file's size, its first MiB (safetensors headers) and samples spread over the rest."""
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            digest.update(file.read(1 << 20))
            for part in range(1, 16):
                file.seek(size * part // 16)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _eos_token_ids(folder: Path, config: Any) -> tuple[int, ...]:
    """What ends an answer: generation_config.json, else config.json."""
    found: Any = None
    file = folder / "generation_config.json"
    if file.is_file():
        found = json.loads(file.read_text()).get("eos_token_id")
    if found is None:
        found = getattr(config, "eos_token_id", None)
    if found is None:
        return ()
    return tuple(int(token) for token in (found if isinstance(found, list) else [found]))
