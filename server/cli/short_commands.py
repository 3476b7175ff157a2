"""The commands that only call their implementation, which each imports when it runs."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Annotated, Literal

import typer

from engine.checkpoint.folder import DEMO_FOLDERS, model_folder
from engine.errors import ConfigError
from server import exit_codes
from server.cli.clean_exit import become, fail
from server.cli.console import say
from server.settings import flags_page

ServerUrl = Annotated[
    str | None,
    typer.Option(
        help="URL, with or without /v1. Default: port 8000, or the only running server.",
        show_default=False,
    ),
]
ApiKey = Annotated[str | None, typer.Option(help="Default: $PENSTOCK_API_KEY.", show_default=False)]
Text = Annotated[
    str | None,
    typer.Argument(metavar="TEXT", help="Send TEXT, print the answer and exit."),
]


def chat(
    text: Text = None,
    url: ServerUrl = None,
    model: Annotated[str | None, typer.Option(help="Default: the server's first model.")] = None,
    api_key: ApiKey = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Default: the model's, or else 0.7.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens in an answer.")] = None,
    quick: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The same as TEXT.", hidden=True)
    ] = None,
) -> None:
    """Chat with a running server. Ctrl-C stops an answer; /bye or Ctrl-D ends the chat.

    Without TEXT, each line of a pipe is one question.
    """
    question = text if quick is None else quick
    options = {"temperature": temperature, "max_tokens": max_tokens}
    raise typer.Exit(_chat(question, url, own_key(api_key), model, system, options))


def own_key(given: str | None) -> str:
    """Return the key that the user has given, or the first one of the environment."""
    return given or os.environ.get("PENSTOCK_API_KEY", "").partition(",")[0]


def _chat(
    question: str | None,
    url: str | None,
    key: str,
    model: str | None,
    system: str | None,
    options: dict[str, float | None],
) -> int:
    """Chat, or ask one question; return the exit status."""
    from server.cli.api_client import ClientError
    from server.cli.chat import Chat, converse
    from server.cli.servers import ServerChoiceError, default_url

    try:
        partner = Chat(default_url() if url is None else url, key, model, system, **options)
    except (ClientError, ServerChoiceError) as error:
        raise fail(error, 1) from None
    with closing(partner):
        return converse(partner, question)


def inspect(
    text: Annotated[str, typer.Argument(metavar="REQUEST_ID|PROMPT", show_default=False)],
    url: ServerUrl = None,
    api_key: ApiKey = None,
) -> None:
    """Show why a request took its time, or how a prompt is tokenised.

    REQUEST_ID is the x-request-id of a recorded response: one whose request had the header
    X-Penstock-UI: 1, or arrived while such a request was running. Any other text is a prompt. Its
    tokens are printed with their ids, those in the prefix cache, and warnings.
    """
    from server.cli.api_client import ApiClient, ClientError
    from server.cli.inspect import show
    from server.cli.servers import ServerChoiceError, default_url

    try:
        with closing(ApiClient(default_url() if url is None else url, own_key(api_key))) as client:
            show(client, text)
    except (ClientError, ServerChoiceError) as error:
        raise fail(error, 1) from None


def open_pages(
    server: Annotated[
        str | None,
        typer.Argument(
            metavar="[URL|SERVER]",
            help="Its URL, or its model, port or process id on this machine.",
            show_default=False,
        ),
    ] = None,
    api_key: ApiKey = None,
) -> None:
    """Open the built-in pages of a running server in the browser.

    The link is printed, too. SERVER may be left out if only one is running, or one on port 8000.
    """
    from server.cli.api_client import ClientError
    from server.cli.open_pages import open_in_browser
    from server.cli.servers import ServerChoiceError

    try:
        open_in_browser(server, own_key(api_key))
    except (ClientError, ServerChoiceError) as error:
        raise fail(error, 1) from None


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one picture and exit.")] = False,
    url: ServerUrl = None,
    api_key: ApiKey = None,
) -> None:
    """Show live what a running server computes, and what waits.

    With a key that is not an admin's, only its own requests are listed. Ctrl-C ends it.
    """
    from rich.console import Console

    from server.cli.api_client import ApiClient, ClientError
    from server.cli.servers import ServerChoiceError, default_url
    from server.cli.top import show

    try:
        with closing(ApiClient(default_url() if url is None else url, own_key(api_key))) as client:
            show(client, Console(highlight=False), once=once)
    except (ClientError, ServerChoiceError) as error:
        raise fail(error, 1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def run(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="As for `penstock serve`.")
    ] = "demo",
    text: Text = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
) -> None:
    """Serve MODEL while you chat with it, and stop it at the end.

    MODEL is pulled first if it is not here. Use `penstock serve` for a server that keeps running.
    """
    from server.cli.run import served

    try:
        with served(model) as (url, key):
            status = _chat(text, url, key, None, system, {})
    except ConfigError as error:
        raise fail(error, exit_codes.BAD_CONFIG) from None
    raise typer.Exit(status)


def list_models() -> None:
    """List the models on this machine.

    These are the demo models, and the models in the Hugging Face cache (HF_HOME) with weights.
    """
    from server.cli.local_models import local_models, table_of

    typer.echo(table_of(local_models()))


def ps(api_key: ApiKey = None) -> None:
    """List the running servers of this user."""
    from server.cli.servers import running_servers, table_of

    servers = list(running_servers(own_key(api_key)))
    if servers:
        typer.echo(table_of(servers))
    else:
        say("No Penstock server is running. Start one with `penstock serve MODEL`.")


def stop(
    server: Annotated[
        str | None,
        typer.Argument(metavar="SERVER", help="Its model, port, URL or process id."),
    ] = None,
    api_key: ApiKey = None,
) -> None:
    """Stop a running server of this user.

    It finishes accepted requests first (SIGTERM). SERVER may be left out if only one is running.
    """
    from server.cli.servers import ServerChoiceError, running_servers, stop_server

    try:
        stopped = stop_server(list(running_servers(own_key(api_key))), server)
    except ServerChoiceError as error:
        raise fail(error, 1) from None
    say(f"Stopped {stopped}.")


def nanochat(
    directory: Annotated[
        Path, typer.Argument(help="A checkpoint folder (…/d20) or nanochat's base folder.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write. Default: nanochat-TAG.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Default: the highest step.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of tokenizer.pkl. Default: in the base folder.")
    ] = None,
) -> None:
    """Convert a nanochat checkpoint of any version. Code in its files is never executed."""
    given = {"--out": out, "--step": step, "--tokenizer": tokenizer}
    options = [part for flag, value in given.items() if value is not None for part in (flag, value)]
    become("engine.offline.nanochat.command", directory, *options)


def pull(
    name: Annotated[
        str, typer.Argument(metavar="ORG/NAME", help="Or the URL of its page on huggingface.co.")
    ],
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit; default: main.", show_default=False)
    ] = None,
    gguf_file: Annotated[
        str | None, typer.Option(help="A GGUF file, instead of safetensors.", show_default=False)
    ] = None,
) -> None:
    """Download a model from huggingface.co and print its path. Only weights (safetensors, or one
    GGUF file), the tokenizer and configuration files are downloaded; never code or pickles."""
    try:
        from server.cli.hub_url import from_url
        from server.cli.model_source import check_served
        from server.cli.pull import pull as pull_now

        if name in DEMO_FOLDERS:  # these ship with Penstock
            folder = model_folder(name)
        else:
            name, named_revision, named_file = from_url(name)
            file = gguf_file or named_file
            folder = pull_now(name, revision or named_revision, check_served, gguf_file=file)
        typer.echo(folder)
    except ConfigError as error:
        raise fail(error, exit_codes.BAD_CONFIG) from None


def merge(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to create.")],
    models: Annotated[list[str] | None, typer.Argument(metavar="[MODEL]...")] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="YAML file in mergekit's format, instead of flags.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="linear, ema, slerp, liti or lora (MODEL ADAPTER).")
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(help="slerp, liti: model at t = 0; default: the first MODEL.")
    ] = None,
    weight: Annotated[
        list[float] | None, typer.Option(help="linear: one per MODEL; default: equal weights.")
    ] = None,
    normalize: Annotated[
        bool | None, typer.Option(help="linear: divide weights by their sum; default: yes.")
    ] = None,
    decay: Annotated[float | None, typer.Option(help="ema: weight of the running average.")] = None,
    t: Annotated[float | None, typer.Option(help="slerp, liti: 0 is the base model.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="dtype of the result; default: the base model's.")
    ] = None,
) -> None:
    """Merge models, or a LoRA adapter into its base model."""
    from server.cli.merge import recipe_of

    try:
        document = recipe_of(
            recipe, models or [], method, base_model, weight or [], dtype,
            t=t, decay=decay, normalize=normalize,
        )  # fmt: skip
        text = json.dumps(document, default=str)
    except ConfigError as error:
        raise fail(error, exit_codes.BAD_CONFIG) from None
    except (TypeError, ValueError) as error:  # circular references, or keys that are no strings
        raise fail(f"The recipe is not valid: {error}", exit_codes.BAD_CONFIG) from None
    become("engine.offline.merge.merge", output, text)


def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As for `penstock serve`.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to create.")],
    quantization: Annotated[
        Literal["int8", "int4", "fp8"], typer.Option(help="Form of the linear weights.")
    ],
) -> None:
    """Write a folder with quantised weights (compressed-tensors)."""
    from engine.config import EngineConfig
    from server.cli.model_source import resolve_model
    from server.config import ServerConfig

    try:
        _, found = resolve_model(ServerConfig(), EngineConfig(model=model))
        model_folder(found.model)  # so that a wrong path is reported before torch is imported
    except ConfigError as error:
        raise fail(error, exit_codes.BAD_CONFIG) from None
    become("engine.offline.quantize.command", found.model, out, quantization)


def flags() -> None:
    """Print all settings and their defaults as Markdown."""
    typer.echo(flags_page(), nl=False)


def api() -> None:
    """Print the OpenAPI document: routes and parameters, as JSON."""
    become("server.api_document")  # commands do not import the application
