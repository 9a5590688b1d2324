# SPDX-License-Identifier: Apache-2.0
"""Sampling: cuts, determinism, independence of the batch, and that the frequencies are those of the logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvrail.runtime.messages import Sampling
from kvrail.runtime.processors import Row
from kvrail.runtime.sampler import sample, uniform


def _sampling(**more) -> Sampling:
    return Sampling(**({"max_tokens": 1, "seed": 1, "temperature": 1.0} | more))


def _tokens(logits, requests) -> list[int]:
    return [choice[0] for choice in sample(logits, [Row(*request) for request in requests])]


def test_greedy_is_the_argmax() -> None:
    logits = torch.randn(5, 300)
    assert _tokens(logits, [(_sampling(temperature=0.0), 0)] * 5) == logits.argmax(-1).tolist()


def test_uniform_is_fixed_for_ever() -> None:
    """Two versions of the product must agree, so these numbers are part of the protocol."""
    assert uniform(0, 0) == pytest.approx(0.011546754286331562, abs=1e-15)
    assert uniform(1, 0) != uniform(0, 0) != uniform(0, 1)
    assert uniform(-1, 5) == uniform((1 << 64) - 1, 5)
    draws = [uniform(3, n) for n in range(4000)]
    assert all(0 <= draw < 1 for draw in draws)
    assert np.histogram(draws, 8)[0].min() > 400


def test_a_token_does_not_depend_on_its_batch() -> None:
    logits = torch.randn(16, 5000) * 3
    requests = [
        (_sampling(seed=n, temperature=0.2 * n, top_p=1 - n / 40, top_k=(n % 4) * 30), n * 7)
        for n in range(16)
    ]
    together = _tokens(logits, requests)
    assert together == [_tokens(logits[n : n + 1], requests[n : n + 1])[0] for n in range(16)]
    assert together[::-1] == _tokens(logits.flip(0), requests[::-1])


def test_seed_and_position_decide() -> None:
    logits = torch.zeros(1, 1000).expand(200, -1)
    by_seed = _tokens(logits, [(_sampling(seed=n), 3) for n in range(200)])
    by_position = _tokens(logits, [(_sampling(), n) for n in range(200)])
    assert len(set(by_seed)) > 150
    assert len(set(by_position)) > 150


@pytest.mark.parametrize("cut", [{}, {"top_k": 3}, {"top_p": 0.75}, {"top_k": 4, "top_p": 0.8}])
def test_frequencies(cut) -> None:
    weights = np.array([0.4, 0.05, 0.3, 0.1, 0.15])
    logits = torch.from_numpy(np.log(weights)).float()[None].expand(4000, -1)
    found = np.bincount(_tokens(logits, [(_sampling(**cut), n) for n in range(4000)]), minlength=5) / 4000
    kept = {
        "": [0, 2, 4, 3, 1],
        "top_k": [0, 2, 4],
        "top_p": [0, 2, 4],  # 0.4 + 0.3 < 0.75
        "top_k top_p": [0, 2, 4],  # of the best four (0.95): 0.4 + 0.3 < 0.76
    }[" ".join(cut)]
    expected = np.zeros(5)
    expected[kept] = weights[kept] / weights[kept].sum()
    assert np.abs(found - expected).max() < 0.03
    assert not found[expected == 0].any()


def test_top_p_behind_the_sorted_head_is_right() -> None:
    """Nearly flat logits: the cut lies behind the first thousand tokens."""
    logits = torch.linspace(0, 1e-3, 6000)[None].expand(300, -1)
    found = _tokens(logits, [(_sampling(top_p=0.5), n) for n in range(300)])
    assert min(found) >= 2990
    assert max(found) > 5900


def test_ties_are_cut_by_index() -> None:
    logits = torch.zeros(1, 3000).expand(50, -1)
    assert set(_tokens(logits, [(_sampling(top_k=2), n) for n in range(50)])) == {0, 1}


def test_low_temperature_and_extreme_logits() -> None:
    logits = torch.tensor([[1e4, -1e4, 9.9e3, 0.0]])
    assert _tokens(logits, [(_sampling(temperature=1e-6), 0)]) == [0]
    assert _tokens(logits * 0 + 1.0, [(_sampling(temperature=1e6), 0)])[0] in range(4)


def test_not_a_number_is_told() -> None:
    logits = torch.zeros(2, 10)
    logits[0, 3] = math.nan
    first, second = sample(logits, [Row(_sampling(), 0)] * 2)
    assert "not numbers" in first
    assert second[0] in range(10)


def test_logprobs() -> None:
    logits = torch.randn(1, 50)
    want = torch.log_softmax(logits[0], -1)
    ((token, logprob),) = sample(logits, [Row(_sampling(temperature=0.0, logprobs=3), 0)])
    assert logprob.logprob == pytest.approx(float(want[token]))
    assert [index for index, _ in logprob.top] == want.topk(3).indices.tolist()
    ((_, none),) = sample(logits, [Row(_sampling(), 0)])
    ((_, chosen),) = sample(logits, [Row(_sampling(logprobs=0), 0)])
    assert none is None
    assert chosen.top == []
