# SPDX-License-Identifier: Apache-2.0
"""The `runtime` command. The flags of `launch` are generated from LaunchConfig: each is written once, there."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from kvrail.runtime.config import LaunchConfig
from kvrail.runtime.errors import ConfigError
from kvrail.runtime.output_file import writable
from kvrail.runtime.role_settings import ROLES, roles_of

__all__ = ["app", "main"]

app = typer.Typer(
    name="runtime",
    help="Serve a language model from prefill engines and completion engines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


# The first setting of each group in the help of `launch`.
_GROUPS = {
    "role": "Role and model",
    "host": "Addresses",
    "max_model_len": "Engine and memory",
    "device": "Device",
    "threads": "Engine and memory",
    "routing": "Requests",
    "lane": "Links and lanes",
    "local_prefill": "Requests",
    "verify_kv": "Links and lanes",
    "token_file": "Secrets, files, logs",
}


def _launch_command() -> Callable[..., None]:
    """A function whose parameters are the fields of LaunchConfig, for typer to read."""
    hints = typing.get_type_hints(LaunchConfig)
    parameters = []
    group = ""
    for field in dataclasses.fields(LaunchConfig):
        group = _GROUPS.get(field.name, group)
        kind, default = hints[field.name], field.default
        if kind == tuple[str, ...]:
            kind, default = list[str], []
        text, metavar = field.metadata["help"], None
        if (roles := roles_of(field.name)) != ROLES:
            text = f"{', '.join(roles)}: {text}"
        if typing.get_origin(kind) is typing.Literal:
            # Not in the column of types: the widest would leave no room for the names of the flags.
            choices, metavar = typing.get_args(kind), "<choice>"
            if not all(re.search(rf"\b{choice}\b", text) for choice in choices):
                text += f": {', '.join(choices[:-1])} or {choices[-1]}"
        flag = "--" + field.name.replace("_", "-")
        if default is True:
            flag += "/--no" + flag.removeprefix("-")
        option: Any = typer.Option(flag, help=text, metavar=metavar, rich_help_panel=group)
        if field.name == "vllm_args":
            option = typer.Argument(help=text, metavar="-- ARGUMENT")
        parameters.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if default is dataclasses.MISSING else default,
                annotation=Annotated[kind, option],
            )
        )

    def launch(**flags: Any) -> None:
        """Start one role: its HTTP server and its rank processes. Ctrl-C stops all of them."""
        from kvrail.frontend.launch import launch_role  # only this command needs the server's imports

        settings: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in flags.items()
        }
        raise typer.Exit(launch_role(LaunchConfig(**settings)))

    launch.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    launch.__annotations__ = {p.name: p.annotation for p in parameters}
    return launch


app.command("launch")(_launch_command())


@app.command("doctor")
def doctor(
    kv_host: Annotated[
        str, typer.Option(help="address (or interface) that links would listen on")
    ] = "127.0.0.1",
    ucx: Annotated[str | None, typer.Option(help="which UCX: wheel, system, or a folder")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", callback=writable, help="also write the findings to this file")
    ] = None,
    nccl: Annotated[
        bool,
        typer.Option("--nccl", help="instead: measure NCCL between two GPUs, and say which way it takes"),
    ] = False,
    rendezvous: Annotated[
        str | None, typer.Option(help="with --nccl, between two hosts: HOST:PORT of rank 0, on both")
    ] = None,
    rank: Annotated[int | None, typer.Option(min=0, max=1, help="with --rendezvous: 0 or 1")] = None,
) -> None:
    """Say what this machine offers: UCX and its transports, a loopback put, memory, same-host lanes; or NCCL."""
    if nccl:
        from kvrail.frontend.doctor_nccl import examine_nccl

        raise typer.Exit(examine_nccl(rendezvous=rendezvous, rank=rank, json_file=json_file))
    if rendezvous is not None or rank is not None:
        raise typer.BadParameter("--rendezvous and --rank are for --nccl")
    from kvrail.frontend.doctor import examine

    raise typer.Exit(examine(kv_host=kv_host, ucx=ucx, json_file=json_file))


@app.command("convert")
def convert(
    model: Annotated[str, typer.Argument(help="GGUF file, a folder with one, or a hub name")],
    out: Annotated[str | None, typer.Option(help="folder to write (default: the cache)")] = None,
) -> None:
    """Convert a GGUF model to a safetensors folder once, so that later starts take seconds."""
    from kvrail.frontend.convert import convert_model

    raise typer.Exit(convert_model(model, out))


def main() -> None:
    """Entry point of `runtime`: settings that cannot work end in one clear line, not a traceback."""
    try:
        app()
    except ConfigError as error:
        Console(stderr=True).print(
            f"[bold red]runtime:[/] {escape(str(error))}", highlight=False, soft_wrap=True
        )
        sys.exit(2)


if __name__ == "__main__":
    main()
