# SPDX-License-Identifier: Apache-2.0
"""Prompts are what transformers would make of them, from the checkpoint's own template and tokenizer."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kit.tiny_model import END, write_model_folder
from kvrail.frontend.render import Renderer
from kvrail.frontend.template import Conversation
from kvrail.runtime.errors import BadRequest, ConfigError

TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Grüß dich 🙂 <|im_end|>"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "tojson & <b>"},
]


def chat(renderer: Renderer, talk: list[dict[str, str]] = TALK, **more: Any) -> list[int]:
    return asyncio.run(renderer.chat(Conversation(talk, **more))).tokens.tolist()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path / "tiny")


@pytest.mark.parametrize("thinking", [False, True])
def test_chat_equals_transformers(folder: Path, thinking: bool) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    wanted = theirs.apply_chat_template(
        TALK, add_generation_prompt=True, enable_thinking=thinking, return_dict=False
    )
    assert chat(Renderer.load(folder, thinking=thinking)) == wanted
    # What the request says counts more than the default.
    assert chat(Renderer.load(folder, thinking=not thinking), options={"enable_thinking": thinking}) == wanted


def test_a_long_text_is_the_same_as_its_parts(folder: Path) -> None:
    renderer = Renderer.load(folder)
    short, long = asyncio.run(renderer.text("ab ")), asyncio.run(renderer.text("ab " * 5000))
    assert long.tolist() == short.tolist() * 5000


def test_a_long_text_does_not_hold_up_the_event_loop(folder: Path) -> None:
    renderer = Renderer.load(folder)

    async def run() -> tuple[float, float]:
        gaps = []
        started = last = time.monotonic()
        encoding = asyncio.create_task(renderer.text("ab " * 100_000))
        while not encoding.done():
            await asyncio.sleep(0.001)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
        # The last gap holds the making of the list of ids, which needs the interpreter.
        return max(gaps[:-1]), last - started

    longest, whole = asyncio.run(run())
    assert longest < whole / 3


def test_a_model_that_is_nowhere_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        Renderer.load(tmp_path / "nowhere" / "at" / "all")


def test_every_end_token_is_found(folder: Path) -> None:
    assert Renderer.load(folder).eos_ids == [0, END]
    # A null says nothing: then the model's own config counts.
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 5}))
    assert Renderer.load(folder).eos_ids == [END, 5]


def test_bos_is_added_once_where_the_tokenizer_says_so(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "add_bos_token": True}))
    renderer = Renderer.load(folder)
    assert asyncio.run(renderer.text("a"))[0] == 1
    assert asyncio.run(renderer.text("<|im_start|>a")).tolist().count(1) == 1


@pytest.mark.parametrize(
    ("more", "aside"),
    [
        ({}, False),
        ({"messages": [{"role": "user", "content": "x" * 10_000}]}, True),
        ({"messages": [{"role": "user", "content": ""}] * 1000}, True),
        (
            {
                "messages": [
                    {"role": "assistant", "content": "", "tool_calls": [{"arguments": {"x" * 10_000: 1}}]}
                ]
            },
            True,
        ),
        ({"messages": [{"role": "assistant", "content": "", "reasoning_content": "x" * 10_000}]}, True),
        ({"tools": [{"function": {"parameters": {"enum": ["x"] * 10_000}}}]}, True),
        ({"options": {"note": "x" * 10_000}}, True),
    ],
)
def test_long_conversations_are_written_down_aside(
    folder: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], aside: bool
) -> None:
    renderer = Renderer.load(folder)
    threads = []

    def note(conversation: Conversation) -> str:
        threads.append(threading.current_thread())
        return "x"

    monkeypatch.setattr(renderer, "chat_text", note)
    asyncio.run(renderer.chat(Conversation(**{"messages": TALK, **more})))
    assert [thread is not threading.main_thread() for thread in threads] == [aside]


def test_the_template_may_refuse(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(BadRequest, match="roles must alternate"):
        chat(Renderer.load(folder))


def test_a_template_cannot_reach_out(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(BadRequest):
        chat(Renderer.load(folder))


def test_a_broken_template_stops_the_start(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ConfigError, match="chat template"):
        Renderer.load(folder)


def test_token_ids_are_checked(folder: Path) -> None:
    renderer = Renderer.load(folder)
    assert renderer.ids([0, renderer.vocabulary - 1]).tolist() == [0, renderer.vocabulary - 1]
    for wrong in (-1, renderer.vocabulary):
        with pytest.raises(BadRequest, match=r"prompt\[1\]"):
            renderer.ids([0, wrong])


def test_a_template_of_one_s_own(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}!")
    renderer = Renderer.load(folder, chat_template=tmp_path / "mine.jinja")
    assert renderer.chat_text(Conversation(TALK)) == "Be kind.!"
    with pytest.raises(ConfigError, match="--chat-template"):
        Renderer.load(folder, chat_template=tmp_path / "nowhere")


def test_the_last_message_goes_on_where_it_ends(folder: Path) -> None:
    renderer = Renderer.load(folder)
    talk = [*TALK[:2], {"role": "assistant", "content": "It is "}]
    assert renderer.chat_text(Conversation(talk, continue_final=True)).endswith(
        "<|im_start|>assistant\nIt is "
    )
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(BadRequest, match="continue_final_message"):
        Renderer.load(folder).chat_text(Conversation(talk, continue_final=True))


CODE = """
def encode_messages(messages, thinking_mode, drop_thinking=True):
    tools = [tool["function"]["name"] for tool in messages[0].get("tools", [])]
    return f"{thinking_mode} {tools} " + "|".join(m["role"] + ":" + m["content"] for m in messages)
"""


def test_code_of_a_checkpoint_runs_only_when_it_may(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(BadRequest, match="no chat template"):
        chat(Renderer.load(folder))
    (folder / "encoding").mkdir()
    (folder / "encoding" / "encoding_x.py").write_text(CODE)
    with pytest.raises(BadRequest, match="--trust-remote-code"):
        chat(Renderer.load(folder))
    renderer = Renderer.load(folder, trust_remote_code=True)
    talk = [{"role": "user", "content": "Hi"}]
    assert renderer.chat_text(Conversation(talk)) == "chat [] user:Hi"
    tools = [{"type": "function", "function": {"name": "now"}}]
    told = Conversation(talk, tools=tools, options={"thinking": True, "drop_thinking": False})
    assert renderer.takes_tools
    assert renderer.chat_text(told) == "thinking ['now'] system:|user:Hi"
    with pytest.raises(BadRequest, match=r"chat_template_kwargs\.colour"):
        renderer.chat_text(Conversation(talk, options={"colour": 1}))
    # The first thing that counts is the template.
    (folder / "chat_template.jinja").write_text("template")
    assert Renderer.load(folder, trust_remote_code=True).chat_text(Conversation(talk)) == "template"
    (folder / "chat_template.jinja").unlink()
    (folder / "encoding.py").write_text("import nothing_of_this_name")
    with pytest.raises(ConfigError, match="nothing_of_this_name"):
        Renderer.load(folder, trust_remote_code=True)
