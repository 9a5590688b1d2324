# SPDX-License-Identifier: Apache-2.0
"""Answers of a prescribed form: what clients of OpenAI and vLLM ask for, as one grammar, checked before anything else.

`response_format`, `guided_json|regex|choice|grammar` and `structured_outputs` say the same in three ways.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark
from pydantic import BeforeValidator, Field, model_validator

from kvrail.frontend.chat_shapes import Shape
from kvrail.frontend.sampling_fields import SamplingFields
from kvrail.runtime.errors import BadRequest, Unavailable
from kvrail.runtime.grammar import Grammars

__all__ = ["StructuredFields", "check_grammar", "json_grammar"]

_MOST_CHOICES = 1024
# Characters of a regular expression or a grammar. To read a long one takes seconds.
_LONGEST = 1 << 17
# Longer than any honest grammar takes; a client waits no longer for one.
_COMPILE_WITHIN_S = 10.0


def _schema(schema: Any) -> Any:
    """A JSON schema as an object, or as its text."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise ValueError("is not valid JSON") from None
    if schema is not None and not isinstance(schema, dict):
        raise ValueError("must be a JSON schema")
    return schema


_Schema = Annotated[dict[str, Any] | None, BeforeValidator(_schema)]
_Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=_MOST_CHOICES)]


class _JsonSchema(Shape):
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], BeforeValidator(_schema)] = Field(alias="schema")
    strict: bool | None = None


class _ResponseFormat(Shape):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> _ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError('json_schema goes with {"type": "json_schema"}, and only with it')
        return self


class _StructuredOutputs(Shape):
    # "json" is a method of every shape.
    json_: _Schema = Field(None, alias="json")
    regex: str | None = Field(None, max_length=_LONGEST)
    choice: _Choices | None = None
    grammar: str | None = Field(None, max_length=_LONGEST)
    json_object: bool | None = None


class StructuredFields(SamplingFields):
    """The fields that prescribe a form; at most one of them."""

    response_format: _ResponseFormat | None = None
    guided_json: _Schema = None
    guided_regex: str | None = Field(None, max_length=_LONGEST)
    guided_choice: _Choices | None = None
    guided_grammar: str | None = Field(None, max_length=_LONGEST)
    structured_outputs: _StructuredOutputs | None = None

    @model_validator(mode="after")
    def _says_one_thing(self) -> StructuredFields:
        wanted = self._wanted()
        if len(wanted) > 1:
            raise ValueError(f"{wanted[1][0]}: only one form of the answer can be prescribed")
        return self

    @property
    def prescribed(self) -> bool:
        """Whether any form is prescribed."""
        return bool(self._wanted())

    def grammar(self) -> tuple[str, str] | None:
        """(the field that prescribes a form, its grammar). Raises BadRequest for text that is no grammar."""
        for field, kind, value in self._wanted():
            try:
                return field, _GRAMMARS[kind](value)
            except Exception as error:  # the library raises what its parts raise
                raise BadRequest(f"{field}: {error}"[:400], param=field) from None
        return None

    def _wanted(self) -> list[tuple[str, str, Any]]:
        """(field, kind, value) of each."""
        found: list[tuple[str, str, Any]] = []
        form, outputs = self.response_format, self.structured_outputs
        if form is not None and form.json_schema is not None:
            found.append(("response_format", "json", form.json_schema.schema_))
        elif form is not None and form.type == "json_object":
            found.append(("response_format", "json", {"type": "object"}))
        for kind in ("json", "regex", "choice", "grammar"):
            if (value := getattr(self, f"guided_{kind}")) is not None:
                found.append((f"guided_{kind}", kind, value))
        if outputs is not None:
            given = {"json": outputs.json_, "regex": outputs.regex, "choice": outputs.choice}
            given |= {"grammar": outputs.grammar, "object": {} if outputs.json_object else None}
            found += [("structured_outputs", kind, one) for kind, one in given.items() if one is not None]
        return found


def json_grammar(schema: dict[str, Any]) -> str:
    """The grammar of JSON texts by a schema."""
    return LLMatcher.grammar_from_json_schema(schema)


def _choice_grammar(choices: list[str]) -> str:
    names = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices))
    return LLMatcher.grammar_from_lark(f"start: {names}")


_GRAMMARS: dict[str, Callable[[Any], str]] = {
    "json": json_grammar,
    "object": lambda _: json_grammar({"type": "object"}),
    "regex": LLMatcher.grammar_from_regex,
    "choice": _choice_grammar,
    # Lark, or the GBNF of llama.cpp.
    "grammar": lambda text: LLMatcher.grammar_from_lark(any_to_lark(text)),
}


async def check_grammar(grammars: Grammars, grammar: str, eos_ids: list[int], field: str) -> None:
    """Return when the grammar is known to compile. Raises BadRequest, naming `field`."""
    compiling = grammars.begin(grammar, eos_ids)
    try:
        async with asyncio.timeout(_COMPILE_WITHIN_S):
            # Shielded: others wait for the same one, and whoever asks again must not find it cancelled.
            await asyncio.shield(asyncio.wrap_future(compiling))
    except BadRequest as fault:
        raise BadRequest(f"{field}: {fault.message}", param=field) from None
    except TimeoutError:
        if not (compiling.running() or compiling.done()):
            raise Unavailable("other grammars are being compiled", retry_after_s=_COMPILE_WITHIN_S) from None
        raise BadRequest(f"{field}: the grammar takes too long to compile", param=field) from None
