# SPDX-License-Identifier: Apache-2.0
"""Routes for clients: the key, the kind of the body and whether there is room are looked at before it is read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from kvrail.frontend.envelope import Unauthorized
from kvrail.frontend.taking_turns import others_first
from kvrail.runtime.control.auth import ApiKeys

__all__ = ["keyed_route"]


_log = logging.getLogger(__name__)
_MOST_TOLD = 256
# Far more than any conversation with all its tools has, and than any prompt has token ids. The size in bytes is no
# measure: of what costs time to check, a MiB holds a hundred thousand times as much as of plain text.
_MOST_FIELDS = 20_000
_MOST_ELEMENTS = 2_000_000
_MOST_MARKS = 1_000_000
# To read more bytes than these takes long enough for others to be let through before and after.
_LONG_BODY = 32_768


def keyed_route(
    keys: ApiKeys, *, ignore_unknown: bool = False, check_room: Callable[[str], None] | None = None
) -> type[APIRoute]:
    """The class of routes that need one of `keys`. `ignore_unknown`: fields that are not known are left out.

    `check_room` is given the path of each POST, and may refuse it before its body is read.
    """

    class KeyedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()
            known = _field_names(self) if ignore_unknown else None
            told: set[str] = set()

            async def guarded(request: Request) -> Response:
                if not keys.allow(request.headers.get("authorization")):
                    raise Unauthorized("give a valid API key: Authorization: Bearer …")
                kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
                if request.method == "POST" and kind != "application/json":
                    raise HTTPException(415, "the body must be JSON: Content-Type: application/json")
                if request.method == "POST":
                    if check_room is not None:
                        check_room(request.url.path)
                    request = _Lenient(request, known, told) if known else _Json(request)
                return await handle(request)

            return guarded

    return KeyedRoute


def _field_names(route: APIRoute) -> frozenset[str]:
    """The fields of the body that this route takes; empty when it takes none."""
    shape = route.body_field.field_info.annotation if route.body_field is not None else None
    if not (isinstance(shape, type) and issubclass(shape, BaseModel)):
        return frozenset()
    return frozenset(field.alias or name for name, field in shape.model_fields.items())


class _Json(Request):
    """A request whose body is JSON as the standard has it.

    Python's own reader takes NaN, infinities and lone surrogates, and no answer that repeats one could be written.
    """

    def __init__(self, request: Request) -> None:
        super().__init__(request.scope, request.receive)

    async def json(self) -> Any:
        body = await self.body()
        if len(body) > _LONG_BODY:
            await others_first()
        marks, commas = sum(map(body.count, (b"[", b"{", b":"))), body.count(b",")
        # Even to read so many would take seconds. Those in texts count as well; no text that a model takes has so many.
        if marks > _MOST_MARKS:
            raise _too_many_parts()
        try:
            found = msgspec.json.decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise HTTPException(
                400,
                f"the body is not valid JSON: {error}. It must be UTF-8, without NaN, infinities or lone surrogates, "
                "and not nested deeply",
            ) from None
        # With so few marks there is nothing to count: each field, object and list has one, each other element a comma.
        if marks > _MOST_FIELDS or marks + commas > _MOST_ELEMENTS:
            _check_size(found)
        if len(body) > _LONG_BODY:
            await others_first()
        return found


def _check_size(body: Any) -> None:
    """Refuse a body of so many small parts that to check each would hold up everybody's streams for seconds."""
    fields = elements = 0
    left = [body]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            fields += 1 + len(one)
            inside: Iterable[Any] = one.values()
        elif isinstance(one, list):
            fields += 1
            elements += len(one)
            inside = one
        else:
            continue
        if fields <= _MOST_FIELDS and elements <= _MOST_ELEMENTS:
            left += [part for part in inside if type(part) is dict or type(part) is list]
        if fields + len(left) > _MOST_FIELDS or elements > _MOST_ELEMENTS:
            raise _too_many_parts()


def _too_many_parts() -> HTTPException:
    return HTTPException(
        413,
        f"the body has too many parts: at most {_MOST_FIELDS} fields, objects and lists, "
        f"and {_MOST_ELEMENTS} elements of lists",
    )


class _Lenient(_Json):
    """A request whose body has known fields only. `told`: those that the log has named already."""

    def __init__(self, request: Request, known: frozenset[str], told: set[str]) -> None:
        super().__init__(request)
        self._known = known
        self._told = told

    async def json(self) -> Any:
        body = await super().json()
        if not isinstance(body, dict):
            return body
        for name in body.keys() - self._known - self._told:
            if len(self._told) < _MOST_TOLD:
                self._told.add(name)
                _log.warning("%s: the field %r is not known and is left out", self.url.path, name[:100])
        return {name: value for name, value in body.items() if name in self._known}
