# SPDX-License-Identifier: Apache-2.0
"""Each processor against plain Python, alone and together, in batches in which the others want other things."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from kvrail.runtime.errors import BadRequest
from kvrail.runtime.messages import Sampling
from kvrail.runtime.processors import Row, TokenHistory, process
from kvrail.runtime.sampler import choice_seed, sample
from kvrail.runtime.sampling import check_sampling

VOCABULARY = 61
INF = math.inf


def sampling(**more: Any) -> Sampling:
    return Sampling(**({"max_tokens": 9, "seed": 1} | more))


def row(prompt: list[int], answer: list[int], allowed: set[int] | None = None, **more: Any) -> Row:
    history = TokenHistory(prompt, answer) if any("penalty" in name for name in more) else None
    mask = None
    if allowed is not None:
        bits = np.zeros(64, dtype=np.uint8)
        bits[list(allowed)] = 1
        mask = np.packbits(bits, bitorder="little")
    return Row(sampling(**more), len(prompt) + len(answer), len(answer), history, mask)


def plainly(
    logits: list[float], prompt: list[int], answer: list[int], allowed: set[int] | None, asked: Sampling
) -> list[float]:
    """What the documentation says, token by token."""
    counts = Counter(answer)
    bias = dict(asked.logit_bias)
    out = []
    for token, value in enumerate(logits):
        if allowed is not None and token not in allowed:
            value = -INF
        if len(answer) < asked.min_tokens and token in asked.stop_token_ids:
            value = -INF
        value += bias.get(token, 0.0)
        if token in counts or token in prompt:
            value = value / asked.repetition_penalty if value > 0 else value * asked.repetition_penalty
        value -= asked.frequency_penalty * counts[token]
        value -= asked.presence_penalty * (token in counts)
        out.append(value)
    return out


KINDS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "presence": {"presence_penalty": 0.7},
    "presence that rewards": {"presence_penalty": -1.5},
    "frequency": {"frequency_penalty": 0.4},
    "repetition": {"repetition_penalty": 1.3},
    "repetition that rewards": {"repetition_penalty": 0.5},
    "bias": {"logit_bias": [(3, 5.0), (60, -100.0), (0, 0.25)]},
    "least length": {"min_tokens": 6, "stop_token_ids": [2, 7]},
    "least length reached": {"min_tokens": 4, "stop_token_ids": [2, 7]},
    "all": {
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "repetition_penalty": 1.1,
        "logit_bias": [(1, 2.0), (5, -1.0)],
        "min_tokens": 6,
        "stop_token_ids": [5],
    },
}


@pytest.mark.parametrize("masked", [False, True])
def test_every_processor_equals_the_plain_one(masked: bool) -> None:
    rng = random.Random(1)
    rows, expected, logits = [], [], torch.randn(len(KINDS), VOCABULARY)
    for place, asked in enumerate(KINDS.values()):
        prompt = [rng.randrange(VOCABULARY) for _ in range(12)]
        answer = [rng.randrange(8) for _ in range(5)]
        allowed = {rng.randrange(VOCABULARY) for _ in range(20)} if masked and place % 2 else None
        rows.append(row(prompt, answer, allowed, **asked))
        expected.append(plainly(logits[place].tolist(), prompt, answer, allowed, sampling(**asked)))
    kept = logits.clone()
    found = process(logits, rows)
    assert (logits == kept).all(), "the model's logits are still needed for log-probabilities"
    assert torch.allclose(found, torch.tensor(expected), atol=1e-5)
    # In another company: the same bits.
    for place in range(len(rows)):
        assert torch.equal(process(logits[place : place + 1], rows[place : place + 1])[0], found[place])


def test_nothing_to_do_costs_nothing() -> None:
    logits = torch.randn(2, VOCABULARY)
    assert process(logits, [row([1], []), row([1], [2], min_tokens=1, stop_token_ids=[3])]) is logits


def test_history_grows() -> None:
    rng = random.Random(2)
    prompt = [rng.randrange(5000) for _ in range(30)]
    history, counts = TokenHistory(prompt), Counter(dict.fromkeys(prompt, 0))
    for _ in range(2000):
        token = rng.randrange(300)
        history.add(token)
        counts[token] += 1
    assert dict(zip(history.tokens.tolist(), history.counts.tolist(), strict=True)) == counts
    again = TokenHistory(prompt, [token for token, count in counts.items() for _ in range(count)])
    assert dict(zip(again.tokens.tolist(), again.counts.tolist(), strict=True)) == counts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_drawn(temperature: float) -> None:
    logits = torch.randn(1, VOCABULARY).expand(300, -1)
    allowed = {4, 33, 60}
    rows = [row([1], [], allowed, temperature=temperature, seed=seed) for seed in range(300)]
    tokens = {one[0] for one in sample(logits, rows)}
    assert tokens <= allowed
    assert (len(tokens) > 1) == (temperature > 0)


def test_a_row_without_any_token_left_fails_alone() -> None:
    logits = torch.randn(3, VOCABULARY)
    logits[0, 5] = -INF  # this is a legal logit
    logits[2, 5] = INF
    for temperature in (0.0, 1.0):
        more = {"temperature": temperature, "stop_token_ids": [7], "min_tokens": 1}
        good, empty, broken = sample(logits, [row([1], [], one, **more) for one in (None, {7}, None)])
        assert good[0] in range(VOCABULARY)
        assert "no token" in empty
        assert "not numbers" in broken


def test_logprobs_are_the_models_own() -> None:
    logits = torch.randn(1, VOCABULARY)
    ((token, note),) = sample(logits, [row([1], [], {9}, logprobs=2, logit_bias=[(9, 3.0)])])
    wanted = torch.log_softmax(logits[0], -1)
    assert token == 9
    assert note.logprob == pytest.approx(float(wanted[9]))
    assert [index for index, _ in note.top] == wanted.topk(2).indices.tolist()


def test_min_p() -> None:
    weights = torch.tensor([0.5, 0.26, 0.14, 0.1])
    logits = weights.log()[None].expand(2000, -1)
    rows = [Row(sampling(temperature=1.0, min_p=0.4), position) for position in range(2000)]
    found = np.bincount([one[0] for one in sample(logits, rows)], minlength=4) / 2000
    assert found[2:].tolist() == [0.0, 0.0]
    assert found[0] == pytest.approx(0.5 / 0.76, abs=0.04)
    # Before the temperature flattens: a share of the likeliest token's probability as it is drawn.
    hot = [Row(sampling(temperature=4.0, min_p=0.7), position) for position in range(300)]
    assert {one[0] for one in sample(logits[:300], hot)} == {0, 1, 2}


def test_a_token_does_not_depend_on_its_batch() -> None:
    rng = random.Random(3)
    logits = torch.randn(24, 5000) * 3
    rows = []
    for place in range(24):
        asked: dict[str, Any] = {"temperature": rng.choice([0.0, 0.7, 1.5]), "seed": place}
        asked |= {"top_p": rng.choice([1.0, 0.9, 0.5]), "top_k": rng.choice([0, 0, 5, 2000])}
        asked |= {"min_p": rng.choice([0.0, 0.05]), "frequency_penalty": rng.choice([0.0, 0.5])}
        rows.append(row([rng.randrange(5000) for _ in range(9)], [1, 2, 2], **asked, logprobs=2))
    together = sample(logits, rows)
    assert together == [sample(logits[n : n + 1], rows[n : n + 1])[0] for n in range(24)]
    order = list(range(24))
    rng.shuffle(order)
    shuffled = sample(logits[order], [rows[n] for n in order])
    assert [shuffled[order.index(n)] for n in range(24)] == together


def test_seeds_of_choices() -> None:
    assert choice_seed(7, 0) == 7
    assert choice_seed(-1, 0) == 2**64 - 1
    seeds = {choice_seed(seed, choice) for seed in range(20) for choice in range(20)}
    assert len(seeds) == 400
    # Two versions of the product must agree.
    assert choice_seed(7, 1) == 16112314163909438903


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"n": 0}, "n"),
        ({"min_p": 1.5}, "min_p"),
        ({"min_p": math.nan}, "min_p"),
        ({"presence_penalty": math.inf}, "presence_penalty"),
        ({"frequency_penalty": math.nan}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": math.inf}, "repetition_penalty"),
        ({"min_tokens": 10}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"logit_bias": [(61, 1.0)]}, "logit_bias"),
        ({"logit_bias": [(-1, 1.0)]}, "logit_bias"),
        ({"logit_bias": [(1, math.nan)]}, "logit_bias"),
        ({"logit_bias": [(1, 1.0), (1, 2.0)]}, "logit_bias"),
        ({"stop_token_ids": [61]}, "stop_token_ids"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ],
)
def test_what_means_nothing_is_refused(wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        check_sampling(sampling(**wrong), VOCABULARY)
    assert caught.value.param == param
