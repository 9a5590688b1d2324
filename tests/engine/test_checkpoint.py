# SPDX-License-Identifier: Apache-2.0
"""Finding, converting, fingerprinting and refusing models."""

from __future__ import annotations

import json
import shutil

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kit.tiny_families import WINDOW, tiny_random_model
from kvrail.kernels.attention import StepPlan
from kvrail.runtime import checkpoint
from kvrail.runtime.checkpoint import cache_dir, load_tokenizer, open_checkpoint, resolve_model
from kvrail.runtime.errors import ConfigError
from kvrail.runtime.gguf_files import convert_gguf
from kvrail.runtime.model import PagedModel
from kvrail.transfer.errors import LayoutMismatch
from kvrail.transfer.layout import require_equal


def _write_gguf(path, model, *, quantize=None, extra=None):
    """A tiny llama as GGUF: the rotary halves of q and k interleaved, norms in float32."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    words = ["<s>", "</s>"] + [chr(33 + n) for n in range(90)] + ["ab", "cd"]
    words += [f"w{n}" for n in range(config.vocab_size - len(words))]
    writer.add_token_list(words)
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        if name == "lm_head.weight":
            continue
        for kind, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if kind in name:
                halves = values.reshape(heads, 2, -1, values.shape[1])
                values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if quantize is not None and values.ndim == 2:
            packed = gguf.quants.quantize(values, quantize)
            writer.add_tensor(target, packed, raw_dtype=quantize)
        else:
            writer.add_tensor(target, values)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def tied(models, tmp_path_factory):
    """A tied llama whose hidden size suits quantized blocks, and its folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=200,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        eos_token_id=1,
    )
    return AutoModelForCausalLM.from_config(config)


def test_gguf_gives_the_same_weights(tied, tmp_path) -> None:
    file = tmp_path / "tiny.gguf"
    _write_gguf(file, tied)
    steps: list[float] = []
    convert_gguf(file, tmp_path / "out", lambda _, share: steps.append(share))
    found = load_file(tmp_path / "out" / "model.safetensors")
    wanted = {name: tensor for name, tensor in tied.state_dict().items() if name != "lm_head.weight"}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert steps == sorted(steps)
    assert steps[-1] == 1.0
    opened = open_checkpoint(str(tmp_path / "out"))
    assert opened.resolve_dtype("auto") == "float32"
    assert opened.eos_token_ids == (1,)
    assert opened.config.architectures == ["LlamaForCausalLM"]
    PagedModel.load(opened, "auto", 16)
    assert load_tokenizer(opened.folder).convert_tokens_to_ids("ab") == 92
    assert not list(tmp_path.glob(".out-*")), "the scratch folder stayed"


def test_quantized_gguf_is_converted_once_into_the_cache(tied, tmp_path, monkeypatch) -> None:
    import gguf

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    _write_gguf(tmp_path / "model" / "tiny.Q8_0.gguf", tied, quantize=gguf.GGMLQuantizationType.Q8_0)
    first = resolve_model(str(tmp_path / "model"))
    assert first.is_relative_to(cache_dir())
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(str(tmp_path / "model" / "tiny.Q8_0.gguf")) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    found = load_file(first / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    assert found[name].dtype == torch.bfloat16
    assert torch.allclose(found[name].float(), tied.state_dict()[name], atol=2e-3)


def test_gguf_that_cannot_be_converted(tied, tmp_path) -> None:
    _write_gguf(tmp_path / "rope.gguf", tied, extra={"rope_freqs.weight": np.ones(8, dtype=np.float32)})
    with pytest.raises(ConfigError, match="rotary scaling"):
        convert_gguf(tmp_path / "rope.gguf", tmp_path / "out")
    _write_gguf(
        tmp_path / "more.gguf", tied, extra={"blk.0.attn_norm_2.weight": np.ones(8, dtype=np.float32)}
    )
    with pytest.raises(ConfigError, match=r"attn_norm_2"):
        convert_gguf(tmp_path / "more.gguf", tmp_path / "out")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(ConfigError, match=r"broken\.gguf"):
        convert_gguf(tmp_path / "broken.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_not_a_model(tmp_path, models, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="no such file or folder"):
        resolve_model(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="neither"):
        resolve_model(str(tmp_path))
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ConfigError, match=r"name one of them: a\.gguf, b\.gguf"):
        resolve_model(str(tmp_path))
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ConfigError, match="give the folder"):
        resolve_model(str(tmp_path / "weights.bin"))
    with pytest.raises(ConfigError, match="hub cannot give it"):
        resolve_model("nobody/such-a-model")


@pytest.mark.parametrize(
    ("kind", "change", "match"),
    [
        ("llama", {"model_type": "llama4_text"}, "model type 'llama4_text' is not supported"),
        ("llama", {"model_type": "qwen3_next"}, "model type 'qwen3_next' is not supported"),
        ("gemma3", {"model_type": "gemma3"}, "model type 'gemma3' is not supported"),
        (
            "qwen3",
            {"layer_types": ["full_attention", "chunked_attention"]},
            "layers of type chunked_attention",
        ),
        ("gemma3", {"use_bidirectional_attention": True}, "later tokens"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantized"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        (
            "olmo3",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
            "dynamic",
        ),
    ],
)
def test_refused_by_name(models, tmp_path, kind, change, match) -> None:
    folder = tmp_path / "model"
    shutil.copytree(models.checkpoint(kind).folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigError, match=match):
        open_checkpoint(str(folder))


def test_model_id_names_the_weights(models, tmp_path) -> None:
    original = models.checkpoint("llama")
    moved = tmp_path / "elsewhere"
    shutil.copytree(original.folder, moved)
    assert open_checkpoint(str(moved)).model_id == original.model_id
    data = bytearray((moved / "model.safetensors").read_bytes())
    data[-100] ^= 1
    (moved / "model.safetensors").write_bytes(data)
    assert open_checkpoint(str(moved)).model_id != original.model_id
    ids = {models.checkpoint(kind).model_id for kind in ("llama", "qwen2", "qwen3", "mistral")}
    assert len(ids) == 4


def test_layout(models) -> None:
    layout = models.checkpoint("qwen3").layout("bfloat16", 32)
    assert layout.shape == (2, 2, 32, 2, 16)
    assert layout.dtype == "bfloat16"
    assert (layout.state_bytes, layout.window, layout.window_layers) == (0, 0, 0)
    assert models.checkpoint("llama").eos_token_ids == (2, 3)


@pytest.mark.parametrize(
    ("kind", "full", "windowed", "kv_heads", "head_dim"),
    [
        ("mistral", 2, 0, 2, 16),
        ("mistral-window", 0, 2, 2, 16),
        ("qwen2-window", 1, 1, 2, 16),
        ("gpt_oss", 1, 2, 2, 16),
        # Latent attention expanded: as many KV heads as heads, as wide as the wider of K and V.
        ("deepseek_v3", 2, 0, 4, 24),
    ],
)
def test_full_layers_in_pages_windowed_ones_in_the_slot(
    models, kind, full, windowed, kv_heads, head_dim
) -> None:
    layout = models.checkpoint(kind).layout("float32", 16)
    assert layout.shape == (full, 2, 16, kv_heads, head_dim)
    assert layout.page_bytes == full * 2 * 16 * kv_heads * head_dim * 4
    assert layout.ring_shape == (windowed, 2, WINDOW if windowed else 0, kv_heads, head_dim)
    assert layout.state_bytes == windowed * 2 * WINDOW * kv_heads * head_dim * 4
    other = msgspec.structs.replace(layout, window=layout.window + 1, state_bytes=layout.state_bytes + 8)
    assert other.fingerprint != layout.fingerprint
    with pytest.raises(LayoutMismatch) as found:
        require_equal(layout, other)
    assert set(found.value.fields) == {"window", "state_bytes"}


def test_self_check_refuses_wrong_attention(models, monkeypatch) -> None:
    right = StepPlan.attend

    def wrong(self, layer, query, key, value, scaling, **more):
        return right(self, layer, query, key, value, scaling * 1.1, **more)

    monkeypatch.setattr(StepPlan, "attend", wrong)
    with pytest.raises(ConfigError, match="self-check failed: the llama model over pages differs"):
        PagedModel.load(models.checkpoint("llama"), "float32", 16)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "minimax_m2", "deepseek_v3", "gpt_oss"])
def test_experts_in_16_bits_pass_the_self_check(models, monkeypatch, family: str) -> None:
    """Near ties between experts fall elsewhere when anything is rounded: no sign of a wrong attention."""
    PagedModel.load(models.checkpoint(family), "bfloat16", 16)
    right = StepPlan.attend

    def wrong(self, layer, query, key, value, scaling, **more):
        return -right(self, layer, query, key, value, scaling, **more)

    monkeypatch.setattr(StepPlan, "attend", wrong)
    with pytest.raises(ConfigError, match="self-check failed"):
        PagedModel.load(models.checkpoint(family), "bfloat16", 16)


def test_weights_that_do_not_load(models, tmp_path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(models.checkpoint("llama").folder, folder)
    (folder / "model.safetensors").write_bytes(bytes(100))
    with pytest.raises(ConfigError, match="cannot be loaded"):
        PagedModel.load(checkpoint.open_checkpoint(str(folder)), "float32", 16)


def _write_gemma_gguf(path, model, architecture: str = "gemma3"):
    """A tiny gemma3 as GGUF: one added to the weights of norms, a SentencePiece vocabulary."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_sliding_window(config.sliding_window)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("llama")
    words = ["<pad>", "<eos>", "<bos>", "<unk>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    words += [f"▁w{n}" for n in range(config.vocab_size - len(words))]
    writer.add_token_list(words)
    writer.add_token_scores([-float(n) for n in range(len(words))])
    writer.add_token_types([3] * 3 + [2] + [6] * 256 + [1] * (len(words) - 260))
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            values = tensor.numpy() + float(name.endswith("norm.weight"))
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_of_a_family_with_windows(tmp_path) -> None:
    torch.manual_seed(4)
    settings = {"vocab_size": 400, "eos_token_id": 1, "tie_word_embeddings": True, "hidden_size": 64}
    model = tiny_random_model("gemma3", **settings)
    _write_gemma_gguf(tmp_path / "tiny.gguf", model)
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(
        torch.allclose(tensor, found[name], atol=1e-6)
        for name, tensor in model.state_dict().items()
        if name in found
    )
    opened = open_checkpoint(str(tmp_path / "out"))
    assert (opened.config.model_type, opened.config.sliding_window) == ("gemma3_text", WINDOW)
    assert opened.layout("float32", 16).window == WINDOW
    PagedModel.load(opened, "auto", 16)


def test_gguf_of_a_family_whose_tensors_are_stored_in_another_way(tmp_path) -> None:
    model = tiny_random_model("gemma3", vocab_size=400, eos_token_id=1, hidden_size=64)
    _write_gemma_gguf(tmp_path / "tiny.gguf", model, "gpt-oss")
    with pytest.raises(ConfigError, match="gpt-oss"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
