# SPDX-License-Identifier: Apache-2.0
"""Models of a chosen shape with random weights: they can be served, and a seed decides about all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kit.tiny_model import write_model_folder
from kvrail.runtime import random_model
from kvrail.runtime.checkpoint import load_tokenizer, open_checkpoint
from kvrail.runtime.drawn_weights import drawn_model, drawn_seed
from kvrail.runtime.errors import ConfigError
from kvrail.runtime.model import PagedModel
from kvrail.runtime.random_model import SHAPES, make_model


def test_it_is_a_model(tmp_path: Path, monkeypatch) -> None:
    # Several shards, as a large one has.
    monkeypatch.setattr(random_model, "_SHARD_BYTES", 10 << 20)
    made = make_model(tmp_path / "a", "tiny", tokenizer=str(write_model_folder(tmp_path / "tokens")))
    assert len(list(made.glob("*.safetensors"))) > 2
    index = json.loads((made / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in made.glob("*.safetensors")}
    assert load_tokenizer(made).decode([4]) != ""
    opened = open_checkpoint(str(made))
    assert opened.resolve_dtype("auto") == "bfloat16"
    # Its self-check compares it with transformers' own forward.
    model = PagedModel.load(opened, "auto", 16)
    assert (model.layout.layers, model.layout.head_dim) == (
        SHAPES["tiny"]["num_hidden_layers"],
        SHAPES["tiny"]["head_dim"],
    )


def test_the_seed_decides(tmp_path: Path) -> None:
    names = [make_model(tmp_path / name, "tiny", seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    ids = [open_checkpoint(str(name)).model_id for name in names]
    assert ids[0] == ids[1] != ids[2]


def test_unknown_shapes_and_devices_are_refused(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(ConfigError, match="--shape huge: must be one of llama-8b, tiny"):
        make_model(tmp_path, "huge")
    with pytest.raises(ConfigError, match="--device tpu: must be cpu, cuda or cuda:N"):
        make_model(tmp_path, "tiny", device="tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ConfigError, match=r"--device cuda: torch (.* was built without CUDA|finds no usable)"
    ):
        make_model(tmp_path, "tiny", device="cuda")


def test_a_seed_stands_for_the_weights(tmp_path: Path) -> None:
    written = make_model(tmp_path / "written", "tiny", seed=3)
    kept = make_model(tmp_path / "kept", "tiny", seed=3, seed_only=True)
    assert sum(file.stat().st_size for file in kept.glob("*.safetensors")) < 1000
    cpu = torch.device("cpu")
    config = open_checkpoint(str(kept)).config
    assert drawn_seed(written) is None
    assert drawn_seed(kept) == 3
    drawn = drawn_model(config, torch.bfloat16, cpu, 3).state_dict()
    loaded = {}
    for file in written.glob("*.safetensors"):
        loaded |= load_file(file)
    assert drawn.keys() == loaded.keys()
    assert all(torch.equal(drawn[name], loaded[name]) for name in drawn)
    # It is served as any other.
    PagedModel.load(open_checkpoint(str(kept)), "auto", 16)
