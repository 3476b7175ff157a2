"""Start a coding agent with a configuration of its own that leads to one server."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from engine.errors import clipped, printable
from server.cli.api_client import ApiClient, ClientError, document, server_address
from server.cli.console import say
from server.cli.launch.clients import CLIENTS
from server.cli.launch.setup import KEY_VARIABLE, NO_KEY, Client, Setup, Target

PRIVATE = 0o700  # the client keeps its sessions there


def launch(
    name: str, url: str, key: str, model: str | None, arguments: Sequence[str], *, only_print: bool
) -> None:
    """Replace this process with the client, or print what would be set.

    `arguments` are added to the client's command. Raises ClientError if the server, its model or
    the client does not fit.
    """
    client = CLIENTS[name]
    with closing(ApiClient(url, key)) as http:
        facts = served_model(http, model)
    folder = settings_folder(name, os.environ)
    target = target_of(url, facts, key, folder)
    check_model(client, facts, target.context)
    setup = client.setup(target)
    if only_print:
        sys.stdout.write(script_of(client, target, setup, arguments))
        return
    program = shutil.which(client.command)
    if program is None:
        raise ClientError(f"{client.command} is not in the PATH. Install it: {client.package}")
    say(summary_of(client, target, setup))
    write_files(target.folder, setup)
    command = [program, *setup.arguments, *arguments]
    sys.stdout.flush()
    try:
        os.execve(program, command, environment_of(target, setup, os.environ))
    except OSError as error:
        raise ClientError(f"Cannot start {program}: {error.strerror}") from None


def served_model(client: ApiClient, wanted: str | None) -> dict[str, Any]:
    """Return the facts of the model with this name, or of the first one. Raises ClientError."""
    with client.errors():
        listed = document(client.http.get("/v1/models")).get("data")
    models = {str(model["id"]): model for model in listed or []}
    if not models:
        raise ClientError(f"The server at {client.url} lists no model.")
    name = next(iter(models)) if wanted is None else wanted
    if name not in models:
        known = ", ".join(map(clipped, models))
        raise ClientError(f"The server has no model {clipped(name)}; give --model one of: {known}.")
    found: dict[str, Any] = models[name]
    if not isinstance(found.get("max_model_len"), int):
        raise ClientError(f"The server at {client.url} does not say how long its context is.")
    return found


def target_of(url: str, facts: Mapping[str, Any], key: str, folder: Path) -> Target:
    address = server_address(url, key)
    return Target(
        url=str(address.url).rstrip("/"),
        key=key or NO_KEY,
        model=facts["id"],
        context=facts["max_model_len"],
        folder=folder,
        is_here=address.is_here,
    )


def check_model(client: Client, facts: Mapping[str, Any], context: int) -> None:
    """Raise ClientError unless the model can chat and its context holds the client's prompt."""
    model = facts["id"]
    capabilities = facts.get("capabilities", ())
    if "chat" not in capabilities:
        raise ClientError(f"{model} has no chat template, which {client.title} needs.")
    if context < client.prompt_tokens:
        raise ClientError(
            f"{client.title} sends about {client.prompt_tokens:,} tokens before the first word, "
            f"but {model} is served with a context of {context:,}. Serve it with a larger "
            "--max-model-len, or another model."
        )
    if client.calls_tools and "tools" not in capabilities:
        say(
            f"penstock: warning: The chat template of {model} shows no tools, which "
            f"{client.title} calls to read and change files."
        )


def settings_folder(name: str, environ: Mapping[str, str]) -> Path:
    """Return the folder of a client's own configuration and sessions."""
    state = environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "penstock" / "launch" / name


def environment_of(target: Target, setup: Setup, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the client: the user's own, with the changes of `setup`."""
    kept = {name: value for name, value in environ.items() if name not in setup.unset}
    return {**kept, **direct_access(target, environ), **setup.environment}


def direct_access(target: Target, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that keep requests to a loopback address from a proxy."""
    if not target.is_here:
        return {}
    host = server_address(target.url, "").url.host
    given = environ.get("NO_PROXY") or environ.get("no_proxy")
    hosts = f"{given},{host}" if given else host
    return {"NO_PROXY": hosts, "no_proxy": hosts}


def write_files(folder: Path, setup: Setup) -> None:
    """Write the client's configuration. Raises ClientError if the folder cannot be written."""
    try:
        folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        missing = [name for name in setup.first_files if not (folder / name).exists()]
        new = {name: setup.first_files[name] for name in missing}
        for name, text in {**new, **setup.files}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    except OSError as error:
        raise ClientError(f"Cannot write {folder}: {error.strerror}") from None


def summary_of(client: Client, target: Target, setup: Setup) -> str:
    """Return what was set, for the terminal, without the key."""
    lines = [
        f"penstock: {client.title} with {target.model} at {target.url}",
        f"  context   {target.context:,} tokens; {client.title} sends about "
        f"{client.prompt_tokens:,} before the first word",
        f"  settings  {target.folder}",
    ]
    lines += [f"  file      {name}" for name in {**setup.first_files, **setup.files}]
    lines += [f"  unset     {name}" for name in setup.unset if name in os.environ]
    lines += [f"  set       {text}" for text in shown_environment(target, setup)]
    if setup.arguments:
        lines.append(f"  with      {shlex.join(setup.arguments)}")
    return "\n".join(lines)


def shown_environment(target: Target, setup: Setup) -> list[str]:
    """Return the variables as a shell writes them. The key is a reference to its variable."""
    variables = {**direct_access(target, os.environ), **setup.environment}
    shown = []
    for name, value in variables.items():
        is_key = value == target.key != NO_KEY
        reference = f'"${{{KEY_VARIABLE}:?}}"'  # a shell stops if it is not set
        shown.append(f"{name}={reference if is_key else shlex.quote(value)}")
    return shown


def script_of(client: Client, target: Target, setup: Setup, arguments: Sequence[str]) -> str:
    """Return a shell script that does what `launch` does."""
    lines = [
        "#!/bin/sh",
        f"# {client.title} with {printable(target.model)}: a context of {target.context} tokens.",
        f"# It sends about {client.prompt_tokens} tokens before the first word.",
        f"mkdir -p -m 700 {shlex.quote(str(target.folder))}",
    ]
    for name, text in {**setup.first_files, **setup.files}.items():
        path = shlex.quote(str(target.folder / name))
        test = f"[ -e {path} ] || " if name in setup.first_files else ""
        if "/" in name:
            lines.append(f"mkdir -p {shlex.quote(str((target.folder / name).parent))}")
        lines += [f"{test}cat > {path} <<'END'", text, "END"]
    lines += [f"unset {name}" for name in setup.unset]
    lines += [f"export {text}" for text in shown_environment(target, setup)]
    lines.append(shlex.join(["exec", client.command, *setup.arguments, *arguments]))
    return "\n".join(lines) + "\n"
