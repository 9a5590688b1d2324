# SPDX-License-Identifier: Apache-2.0
"""/tokenize, /detokenize, /version, the model's card, and what is not here."""

from __future__ import annotations

from typing import Any

from kit.fake_rank import answers
from kit.tiny_model import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()


def test_texts_and_tokens(stand: Any) -> None:
    at = stand(answers([5]))
    text = "Grüß <|im_end|>"
    ids = list(TOKENIZER.encode(text).ids)
    said = at.client.post(
        "/tokenize", json={"model": "tiny", "prompt": text, "return_token_strs": True}
    ).json()
    assert (said["count"], said["tokens"], said["max_model_len"]) == (len(ids), ids, 256)
    assert said["token_strs"][0] == "G"
    assert said["token_strs"][-1] == "<|im_end|>"
    assert at.client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": text}
    assert at.client.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    talk = {"messages": [{"role": "user", "content": "Hi"}]}
    written = "<|im_start|>user\nHi<|im_end|>\n"
    for more, wanted in (
        ({}, written + "<|im_start|>assistant\n"),
        ({"add_generation_prompt": False}, written),
    ):
        tokens = at.client.post("/tokenize", json={**talk, **more}).json()["tokens"]
        assert at.client.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == wanted


def test_what_is_refused(stand: Any) -> None:
    at = stand(answers([5]))
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "Hi"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [10**6]}, "tokens[0]"),
        ("/detokenize", {"tokens": [10**30]}, "tokens[0]"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ):
        response = at.client.post(path, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), body
    assert at.client.post("/tokenize", json={"prompt": "a", "model": "other"}).status_code == 404


def test_about_the_server(stand: Any) -> None:
    at = stand(answers([5]))
    assert set(at.client.get("/version").json()) == {"version"}
    assert at.client.get("/v1/models/tiny").json()["id"] == "tiny"
    response = at.client.post("/v1/embeddings", json={"input": "a"})
    assert response.status_code == 501
    assert "generates text only" in response.json()["error"]["message"]
    document = at.client.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/responses", "/tokenize", "/version"} <= document["paths"].keys()
