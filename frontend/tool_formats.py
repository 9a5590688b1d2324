# SPDX-License-Identifier: Apache-2.0
"""The ways in which families of models write tool calls, by name, and which one a chat template teaches."""

from __future__ import annotations

import ast
import json
import re
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvrail.frontend.tool_calls import (
    BlockReader,
    LeadReader,
    Schemas,
    ToolCall,
    ToolReader,
    call_of,
    parse_json,
)

__all__ = ["FORMATS", "ToolFormat", "forced_format", "format_of_template"]

_DS = "<｜tool▁{}｜>"
_DSML = "｜DSML｜"
_PYTHON_TAG = "<|python_tag|>"
_SEPARATORS = re.compile(r"[\s;,]*")
_LITERALS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True)
class ToolFormat:
    """`markers`: texts that a reader looks for and that may be special tokens of the model."""

    name: str
    reader: Callable[[Schemas], ToolReader]
    markers: tuple[str, ...] = ()
    short_ids: bool = False

    def call_id(self) -> str:
        """A new id for a call. Mistral's templates take none that has not nine letters and digits."""
        if self.short_ids:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


def format_of_template(template: str) -> str:
    """The name of the format that a chat template teaches its model, or "none"."""
    signs = [
        (f"<{_DSML}", "deepseek_v32"),
        (_DS.format("call▁begin"), "deepseek_v3"),
        ("[TOOL_CALLS]", "mistral"),
        ("<function=", "qwen3_coder"),
        ("<tool_call>", "hermes"),
        ("[func_name1(", "pythonic"),
        (_PYTHON_TAG, "llama3_json"),
        ('{"name": function name, "parameters"', "llama3_json"),
    ]
    return next((name for sign, name in signs if sign in template), "none")


def forced_format(named: str | None) -> ToolFormat:
    """What a grammar makes a model write: one tool's arguments and nothing else, or a list of calls."""

    def arguments(text: str, schemas: Schemas) -> list[ToolCall]:
        assert named is not None
        return [call_of(named, parse_json(text))]

    read = _objects if named is None else arguments
    return ToolFormat("json", lambda schemas: LeadReader(read, schemas, lambda head: True))


def _objects(text: str, schemas: Schemas) -> list[ToolCall]:
    """JSON objects, or a list of them, one after the other: {"name": …, "arguments" or "parameters": {…}}."""
    decoder = json.JSONDecoder(parse_constant=lambda name: parse_json(name))
    calls: list[ToolCall] = []
    place = _skip(text, 0)
    while place < len(text):
        value, place = decoder.raw_decode(text, place)
        for one in value if isinstance(value, list) else [value]:
            if not isinstance(one, dict):
                raise ValueError("a call is an object")
            inner = one.get("function")
            call = inner if isinstance(inner, dict) else one
            calls.append(call_of(call["name"], call.get("arguments", call.get("parameters", {}))))
        place = _skip(text, place)
    return calls


def _skip(text: str, place: int) -> int:
    found = _SEPARATORS.match(text, place)
    return found.end() if found else place


def _mistral(text: str, schemas: Schemas) -> list[ToolCall]:
    """A JSON list, or `name[ARGS]{…}` (perhaps with [CALL_ID]id in between)."""
    text = text.strip()
    if text.startswith(("[", "{")) and not text.startswith("[ARGS]"):
        return _objects(text, schemas)
    name, brace, rest = text.partition("{")
    name = name.partition("[ARGS]")[0].partition("[CALL_ID]")[0].strip()
    return [call_of(name, parse_json(brace + rest))]


def _deepseek(text: str, schemas: Schemas) -> list[ToolCall]:
    """V3.1 writes name, separator, JSON; V3 writes the type first, then the name and JSON in a fence."""
    head, _, tail = text.partition(_DS.format("sep"))
    name, fence, fenced = tail.partition("```json")
    if fence:
        return [call_of(name.strip(), parse_json(fenced.rpartition("```")[0]))]
    return [call_of(head.strip(), parse_json(tail))]


def _dsml(text: str, schemas: Schemas) -> list[ToolCall]:
    name, quote, body = text.partition('">')
    parameter = re.compile(
        rf'\s*<{_DSML}parameter name="([^"]+)" string="(true|false)">(.*?)</{_DSML}parameter>\s*', re.DOTALL
    )
    if not quote or parameter.sub("", body).strip():
        raise ValueError("a call that is not whole")
    found = parameter.findall(body)
    return [
        call_of(name, {key: value if plain == "true" else parse_json(value) for key, plain, value in found})
    ]


def _tagged(text: str, schemas: Schemas) -> list[ToolCall]:
    """`name>` and <parameter=key> value </parameter>; the tool's schema says which values are no strings."""
    name, bracket, body = text.partition(">")
    parameter = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
    if not bracket or parameter.sub("", body).strip():
        raise ValueError("a call that is not whole")
    name = name.strip()
    known = schemas[name].get("properties", {})
    found = parameter.findall(body)
    return [call_of(name, {key: _typed(value, known.get(key, {})) for key, value in found})]


def _typed(value: str, schema: Any) -> Any:
    if not isinstance(schema, dict) or schema.get("type", "string") == "string":
        return value
    try:
        return parse_json(value)
    except ValueError:
        return value


def _python(text: str, schemas: Schemas) -> list[ToolCall]:
    """[name(key=literal, …), …]: read, never run."""
    tree = ast.parse(text.strip(), mode="eval").body
    calls = tree.elts if isinstance(tree, ast.List) else [tree]
    found = []
    for call in calls:
        if not isinstance(call, ast.Call) or call.args or any(word.arg is None for word in call.keywords):
            raise ValueError("no call with named arguments")
        found.append(
            call_of(ast.unparse(call.func), {word.arg: _literal(word.value) for word in call.keywords})
        )
    return found


def _literal(node: ast.expr) -> Any:
    """A Python literal, in which JSON's true, false and null may stand as well."""
    match node:
        case ast.Name(id=name) if name in _LITERALS:
            return _LITERALS[name]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_literal(element) for element in elements]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {str(ast.literal_eval(key)): _literal(value) for key, value in pairs if key is not None}
    return ast.literal_eval(node)


def _may_be_object(head: str) -> bool:
    squeezed = "".join(head[:200].split())
    return any(
        w.startswith(squeezed) or squeezed.startswith(w) for w in ('{"name"', '{"type"', '{"function"', '[{"')
    )


def _may_be_python(head: str) -> bool:
    return re.match(r"\[?\s*\Z|\[\s*[A-Za-z_][\w.]*\s*(\(|\Z)", head) is not None


def _blocks(read: Any, begin: str, end: str, *around: str) -> Callable[[Schemas], ToolReader]:
    return lambda schemas: BlockReader(read, schemas, begin, end, around)


_ALL = (
    ToolFormat("hermes", _blocks(_objects, "<tool_call>", "</tool_call>"), ("<tool_call>", "</tool_call>")),
    ToolFormat(
        "qwen3_coder",
        _blocks(_tagged, "<function=", "</function>", "<tool_call>", "</tool_call>"),
        ("<tool_call>", "</tool_call>"),
    ),
    ToolFormat(
        "llama3_json",
        lambda schemas: LeadReader(_objects, schemas, _may_be_object, _PYTHON_TAG),
        (_PYTHON_TAG,),
    ),
    ToolFormat(
        "pythonic",
        lambda schemas: LeadReader(_python, schemas, _may_be_python, _PYTHON_TAG),
        (_PYTHON_TAG,),
    ),
    ToolFormat(
        "mistral",
        _blocks(_mistral, "[TOOL_CALLS]", ""),
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        short_ids=True,
    ),
    ToolFormat(
        "deepseek_v3",
        _blocks(
            _deepseek,
            _DS.format("call▁begin"),
            _DS.format("call▁end"),
            _DS.format("calls▁begin"),
            _DS.format("calls▁end"),
        ),
        tuple(_DS.format(part) for part in ("call▁begin", "call▁end", "calls▁begin", "calls▁end", "sep")),
    ),
    ToolFormat(
        "deepseek_v32",
        _blocks(
            _dsml,
            f'<{_DSML}invoke name="',
            f"</{_DSML}invoke>",
            *(f"<{slash}{_DSML}{word}>" for slash in ("", "/") for word in ("function_calls", "tool_calls")),
        ),
        (_DSML,),
    ),
)
FORMATS = {form.name: form for form in _ALL}
