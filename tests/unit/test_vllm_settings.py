# SPDX-License-Identifier: Apache-2.0
"""What a user may set for the vLLM connector, what two engines compare, and that mistakes are named."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvrail.runtime.errors import ConfigError
from kvrail.runtime.vllm.engine_facts import block_layout, block_tokens, check_parallel, first_needed
from kvrail.runtime.vllm.kv_tensors import Geometry, Range
from kvrail.runtime.vllm.settings import Settings
from kvrail.transfer.errors import LayoutMismatch
from kvrail.transfer.layout import BlockLayout, PageLayout, require_equal

PEER = {"peers": ["127.0.0.1:7000"]}


def test_the_environment_s_choice_of_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRAIL_UCX", "system")
    assert Settings.of("kv_producer", {}).ucx == "system"
    assert Settings.of("kv_producer", {"ucx": "wheel"}).ucx == "wheel"


def test_defaults_and_names() -> None:
    pe = Settings.of("kv_producer", {})
    assert (pe.role, pe.kv_host, pe.kv_port, pe.lane, pe.told_host) == (
        "pe",
        "127.0.0.1",
        14579,
        "auto",
        "127.0.0.1",
    )
    ce = Settings.of(
        "kv_consumer", {"peers": ["localhost:7000", "127.0.0.1:7000", "127.0.0.1:7010"], "meet_s": 5}
    )
    assert ce.peers == (("127.0.0.1", 7000), ("127.0.0.1", 7010))
    assert ce.peer_of("localhost", 7000) == ce.peer_of("127.0.0.1", 7000) == ("127.0.0.1", 7000)
    assert ce.peer_of("127.0.0.1", 7001) is ce.peer_of("127.0.0.1", "7000") is None
    assert ce.meet_s == 5.0


@pytest.mark.parametrize(
    ("role", "extra", "word"),
    [
        ("kv_both", {}, "needs kv_producer .* or kv_consumer"),
        (None, {}, "needs kv_producer"),
        ("kv_producer", {"kv_prot": 1}, "unknown key 'kv_prot'"),
        ("kv_producer", {"kv_port": "1"}, "kv_port must be a int, not '1'"),
        ("kv_producer", {"kv_port": True}, "kv_port must be"),
        ("kv_producer", {"lane": "nvlink"}, "lane must be auto or shm or peer or stream or put"),
        ("kv_producer", {"meet_s": -1}, "meet_s must not be negative"),
        ("kv_producer", {"kv_host": "10.0.0.1"}, "token_file"),
        ("kv_consumer", {}, 'needs "peers"'),
        ("kv_consumer", {"peers": ["127.0.0.1"]}, "not host:port"),
        ("kv_consumer", {"peers": ["127.0.0.1:0"]}, "not host:port"),
        ("kv_consumer", {"peers": "127.0.0.1:1"}, "peers must be a list"),
    ],
)
def test_mistakes_are_named(role: str | None, extra: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        Settings.of(role, extra)


def spec(kind: str = "FullAttentionSpec", **fields: Any) -> Any:
    made = type(kind, (), {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": "float32"} | fields)
    return made()


def groups(*specs: Any, **more: Any) -> Any:
    made = [SimpleNamespace(kv_cache_spec=one, layer_names=[f"l{at}"]) for at, one in enumerate(specs)]
    return SimpleNamespace(kv_cache_groups=made, kv_cache_layout="LBHNC", hash_block_size=None, **more)


def test_groups_that_can_be_moved() -> None:
    assert block_tokens(groups(spec(), spec("SlidingWindowSpec", sliding_window=64))) == 16
    mamba = type("MambaSpec", (), {"block_size": 16})()
    with pytest.raises(ConfigError, match="layers such as l1 keep a MambaSpec"):
        block_tokens(groups(spec(), mamba))
    with pytest.raises(ConfigError, match="of several"):
        block_tokens(groups(spec(), spec(block_size=32)))
    fine = groups(spec())
    fine.hash_block_size = 8
    with pytest.raises(ConfigError, match="not of 8 tokens"):
        block_tokens(fine)


def test_what_is_needed_of_a_window() -> None:
    assert [first_needed(spec())(n) for n in (0, 100)] == [0, 0]
    window = first_needed(spec(sliding_window=32))
    assert [window(n) for n in (0, 31, 32, 48)] == [0, 0, 1, 17]
    chunked = first_needed(spec(attention_chunk_size=32))
    assert [chunked(n) for n in (31, 32, 48)] == [0, 32, 32]


@pytest.mark.parametrize("name", ["pipeline_parallel_size", "decode_context_parallel_size"])
def test_ways_of_spreading_a_model_that_are_refused(name: str) -> None:
    fields = {"pipeline_parallel_size": 1, "tensor_parallel_size": 2}
    check_parallel(SimpleNamespace(parallel_config=SimpleNamespace(**fields)))
    with pytest.raises(ConfigError, match=name):
        check_parallel(SimpleNamespace(parallel_config=SimpleNamespace(**(fields | {name: 2}))))


def layout(
    tmp_path: Path, *, version: str = "1", isa: str = "vec", size: int = 2, **fields: Any
) -> BlockLayout:
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    config = SimpleNamespace(
        model_config=SimpleNamespace(model=str(tmp_path), revision=None, dtype="torch.float32"),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(tensor_parallel_size=size),
    )
    geometry = Geometry(6, 1024, "tensor", (Range(4096, 1, (("l0",),)),))
    layer = SimpleNamespace(isa=isa)
    return block_layout(
        config, groups(spec(**fields)), geometry, version=version, rank=0, layers={"l0": layer}
    )


def test_each_difference_is_named(tmp_path: Path) -> None:
    ours = layout(tmp_path)
    require_equal(ours, layout(tmp_path))
    for theirs, word in (
        (layout(tmp_path, version="2"), "engine: 'vllm 1' on the pe, 'vllm 2' on the ce"),
        (layout(tmp_path, isa="amx"), "attention: .*vec.* on the pe, .*amx.* on the ce"),
        # Alone: the number of heads and the size of blocks, say, follow from it.
        (
            layout(tmp_path, size=4, num_kv_heads=1),
            r"\(tensor_parallel_size: '2' on the pe, '4' on the ce\)$",
        ),
        (layout(tmp_path, head_size=128), "group_0: .*heads of 64"),
        (layout(tmp_path, block_size=32), "page_tokens: 16 on the pe, 32 on the ce"),
        (
            PageLayout(model_id="m", layers=1, kv_heads=1, head_dim=8, dtype="float32", page_tokens=16),
            "kind: 'blocks' on the pe, 'pages' on the ce",
        ),
    ):
        with pytest.raises(LayoutMismatch, match=word):
            require_equal(ours, theirs)


def test_pages_of_several_groups() -> None:
    made = BlockLayout(page_tokens=16, groups=3, unit_bytes=8, ranges=(2, 1), order="tensor", facts={})
    assert made.page_bytes == 24
    assert [made.pages_for(n) for n in (0, 1, 16, 17)] == [0, 3, 3, 6]
    assert [made.whole_pages(n) for n in (15, 16, 33)] == [0, 3, 6]


def test_layers_are_not_pushed_where_steps_are_cut_into_microbatches() -> None:
    cut = SimpleNamespace(parallel_config=SimpleNamespace(use_ubatching=True))
    check_parallel(cut)
    check_parallel(SimpleNamespace(parallel_config=SimpleNamespace(use_ubatching=False)), by_layer=True)
    with pytest.raises(ConfigError, match="microbatches"):
        check_parallel(cut, by_layer=True)
