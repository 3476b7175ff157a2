"""`penstock launch`: the command line of `server.cli.launch`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from server.cli.clean_exit import fail
from server.cli.short_commands import ApiKey, ServerUrl, own_key

ClientName = Literal["aider", "claude", "codex", "continue", "opencode", "qwen-code"]


def launch(
    client: Annotated[ClientName, typer.Argument(metavar="CLIENT", show_default=False)],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ARGUMENT...]", help="For the client.", show_default=False),
    ] = None,
    url: ServerUrl = None,
    model: Annotated[str | None, typer.Option(help="Default: the server's first model.")] = None,
    api_key: ApiKey = None,
    only_print: Annotated[
        bool, typer.Option("--print", help="Print a shell script instead of starting it.")
    ] = False,
) -> None:
    """Start a coding agent that uses a running server.

    CLIENT is aider, claude, codex, continue, opencode or qwen-code. It gets a configuration of its
    own, and contacts no other host. Yours stays as it is.
    """
    from server.cli.api_client import ClientError
    from server.cli.launch.start import launch as start
    from server.cli.servers import ServerChoiceError, default_url

    address = default_url if url is None else lambda: url
    try:
        start(client, address(), own_key(api_key), model, arguments or [], only_print=only_print)
    except (ClientError, ServerChoiceError) as error:
        raise fail(error, 1) from None
