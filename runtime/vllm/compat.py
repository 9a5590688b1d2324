# SPDX-License-Identifier: Apache-2.0
"""The insides of vLLM that the server process leans on, each in one function: what to look at when a version changes.

Checked with 0.26 to 0.33. Besides these: EngineCoreClient (add_request_async, abort_requests_async, get_output_async,
shutdown), OutputProcessor.request_states, SamplingParams.extra_args, and the options --middleware, --uds and
--kv-transfer-config.
"""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists

from kvrail.runtime.vllm.legs import Ending
from kvrail.runtime.vllm.spec import FirstToken, Logprobs

__all__ = [
    "decode_sampling",
    "default_sampling",
    "ending_of",
    "failed_output",
    "first_token_of",
    "first_token_output",
    "model_digest",
    "outputs_of",
    "prefill_request",
    "renamed",
    "replace_core_client",
    "server_parts",
    "text_from_the_end",
    "transfer_params",
    "variant",
    "without_transfer_params",
]

_SAMPLING = msgspec.msgpack.Decoder(SamplingParams)
# Of a prompt, behind which an answer's text is made: many more than one character can have.
_CONTEXT_TOKENS = 64
_IDS, _VALUES = np.dtype("<i4"), np.dtype("<f4")
# Where a finished request's text would go on; neither matters to tokens.
_NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version")


class ServerParts(NamedTuple):
    """What `vllm serve` is made of: its arguments, their check, and the server itself (a coroutine function)."""

    make_arg_parser: Callable[[Any], Any]
    validate: Callable[[Any], None]
    run_server: Callable[[Any], Any]


def server_parts() -> ServerParts:
    """Where this version has them."""
    try:
        from vllm.entrypoints.launchers.api_server.entry import run_server
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    except ImportError:  # 0.26
        from vllm.entrypoints.openai.api_server import run_server
        from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    return ServerParts(make_arg_parser, validate_parsed_serve_args, run_server)


def replace_core_client(wrap: Callable[[Any, Any], Any]) -> None:
    """Have every AsyncLLM that is made from now on talk to `wrap(its core client, its VllmConfig)`."""
    make = EngineCoreClient.make_async_mp_client

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
        return wrap(make(*args, **kwargs), config)

    EngineCoreClient.make_async_mp_client = staticmethod(wrapped)


def default_sampling() -> Any:
    """SamplingParams of which nothing has been set."""
    return SamplingParams()


def decode_sampling(encoded: bytes) -> Any:
    """SamplingParams from msgpack. Raises msgspec.MsgspecError, and vLLM's own errors for values out of range."""
    return _SAMPLING.decode(encoded)


def model_digest(config: Any) -> str:
    """What two engines must have in common for their tokens to be of one model: its configuration and number type."""
    found = config.model_config.hf_config.to_dict()
    found = {name: value for name, value in found.items() if name not in _NOT_OF_THE_MODEL}
    text = json.dumps([found, str(config.model_config.dtype)], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def transfer_params(request: Any) -> dict[str, Any] | None:
    """What a request says about the transfer of its KV."""
    extra = request.sampling_params.extra_args if request.sampling_params is not None else None
    return (extra or {}).get("kv_transfer_params")


def without_transfer_params(request: Any) -> Any:
    """The request, or a copy that says nothing about transfers."""
    if transfer_params(request) is None:
        return request
    request, params = copy.copy(request), copy.copy(request.sampling_params)
    params.extra_args = {k: v for k, v in params.extra_args.items() if k != "kv_transfer_params"} or None
    request.sampling_params = params
    return request


def variant(
    request: Any, request_id: str, tokens: Sequence[int], *, fewer: int, transfer: dict[str, Any] | None
) -> Any:
    """A copy with another name and prompt, with `fewer` tokens to compute, and with transfer parameters."""
    request, params = copy.copy(request), copy.copy(request.sampling_params)
    params.max_tokens -= fewer
    params.min_tokens = max(0, params.min_tokens - fewer)
    if transfer is not None:
        params.extra_args = {**(params.extra_args or {}), "kv_transfer_params": transfer}
    request.request_id, request.prompt_token_ids = request_id, list(tokens)
    request.sampling_params = params
    return request


def prefill_request(
    request_id: str,
    tokens: list[int],
    sampling: Any,
    transfer: dict[str, Any] | None,
    cache_salt: str | None,
    priority: int,
) -> Any:
    """A request for one token."""
    sampling.max_tokens = 1
    sampling.min_tokens = min(sampling.min_tokens, 1)
    sampling.extra_args = {"kv_transfer_params": transfer} if transfer is not None else None
    return EngineCoreRequest(
        request_id=request_id,
        external_req_id=request_id,
        prompt_token_ids=tokens,
        mm_features=None,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=cache_salt,
        data_parallel_rank=None,
        priority=priority,
    )


def text_from_the_end(client: Any, request_id: str, tokens: Sequence[int]) -> None:
    """Have the text of an answer that AsyncLLM `client` expects made behind the end of its prompt `tokens`.

    Behind all of it, which is what vLLM does, the first token's text waits until the whole prompt has been decoded,
    twice: 36 ms for 32,768 tokens. What is decoded behind the end alone is the same, unless that is no text at all or
    only part of a character; then nothing is changed. (vLLM's slow detokenizer takes the last 7 tokens.)
    """
    state = client.output_processor.request_states.get(request_id)
    detokenizer = getattr(state, "detokenizer", None)
    if not isinstance(detokenizer, FastIncrementalDetokenizer) or detokenizer.output_token_ids:
        return
    end = list(tokens[-_CONTEXT_TOKENS:])
    special = detokenizer.skip_special_tokens
    text = detokenizer.tokenizer.decode(end, skip_special_tokens=special)
    if len(end) < len(tokens) and text and not text.endswith("\ufffd"):
        detokenizer.stream = type(detokenizer.stream)(ids=end, skip_special_tokens=special)


def renamed(output: Any, request_id: str) -> Any:
    """The output under another request's name, without when it was queued: its request had been seen before."""
    output.request_id = request_id
    if output.events:
        output.events = [event for event in output.events if event.type == EngineCoreEventType.PREEMPTED]
    return output


def ending_of(output: Any) -> Ending:
    """How it ends its request: "no", "error" or "end"."""
    if output.finish_reason is None:
        return "no"
    return "error" if output.finish_reason == FinishReason.ERROR else "end"


def failed_output(request_id: str) -> Any:
    """An output that ends the request with an error."""
    return EngineCoreOutput(request_id=request_id, new_token_ids=[], finish_reason=FinishReason.ERROR)


def first_token_of(output: Any) -> FirstToken | None:
    """What a prefill's only output says, or None when it has no token."""
    if len(output.new_token_ids) != 1 or output.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
        return None
    logprobs = None
    if output.new_logprobs is not None:
        logprobs = Logprobs(
            np.asarray(output.new_logprobs.logprob_token_ids[0], _IDS).tobytes(),
            np.asarray(output.new_logprobs.logprobs[0], _VALUES).tobytes(),
            int(output.new_logprobs.sampled_token_ranks[0]),
        )
    return FirstToken(
        token=output.new_token_ids[0],
        stopped=output.finish_reason == FinishReason.STOP,
        stop_reason=output.stop_reason,
        cached_tokens=output.prefill_stats.num_cached_tokens if output.prefill_stats is not None else 0,
        logprobs=logprobs,
    )


def first_token_output(
    request_id: str, first: FirstToken, *, prompt_tokens: int, since: float, last: bool
) -> Any:
    """Token 1 as the engine core would have said it. `since`: when the prompt came, of time.monotonic().

    `last`: the answer may have no further token.
    """
    output = EngineCoreOutput(
        request_id=request_id,
        new_token_ids=[first.token],
        events=[
            EngineCoreEvent.new_event(kind, since)
            for kind in (EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED)
        ],
    )
    if first.stopped:
        output.finish_reason, output.stop_reason = FinishReason.STOP, first.stop_reason
    elif last:
        output.finish_reason = FinishReason.LENGTH
    if first.logprobs is not None:
        output.new_logprobs = LogprobsLists(
            np.frombuffer(first.logprobs.tokens, _IDS).reshape(1, -1),
            np.frombuffer(first.logprobs.values, _VALUES).reshape(1, -1),
            np.array([first.logprobs.rank]),
        )
    output.prefill_stats = PrefillStats()
    output.prefill_stats.set(prompt_tokens, first.cached_tokens, 0)
    return output


def outputs_of(engine: int, outputs: list[Any]) -> Any:
    """What get_output_async returns."""
    return EngineCoreOutputs(engine_index=engine, outputs=outputs)
