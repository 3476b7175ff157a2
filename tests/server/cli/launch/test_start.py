"""`penstock launch`: what it sets for each client, what it writes, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from server.cli.api_client import ClientError
from server.cli.launch.clients import CLIENTS
from server.cli.launch.setup import Target
from server.cli.launch.start import environment_of, launch
from tests.support.command_line import penstock

KEY = "sk-secret-7"
MODEL = {"id": "org/coder", "max_model_len": 40000, "capabilities": ["completion", "chat", "tools"]}
CONTEXT = 40000
# The catalog of a Codex: the first entry sends no apply_patch, the second no tools at all.
CATALOG = [
    {"slug": "functions", "apply_patch_tool_type": None, "context_window": 1},
    {"slug": "lite", "apply_patch_tool_type": "freeform", "use_responses_lite": True},
    {
        "slug": "fits",
        "apply_patch_tool_type": "freeform",
        "use_responses_lite": False,
        "context_window": 272000,
        "base_instructions": "long",
        "model_messages": {"instructions_template": "longer"},
        "shell_type": "unified_exec",
    },
]
# A client that prints what it was started with.
PROGRAM = f"""\
#!{sys.executable}
import json, os, sys
given = {{"arguments": sys.argv[1:], "environment": dict(os.environ)}}
catalog = {{"models": {CATALOG}}}
print(json.dumps(catalog if sys.argv[1:] == ["debug", "models", "--bundled"] else given))
"""


class Models(BaseHTTPRequestHandler):
    """GET /v1/models of a server with these models."""

    listed: tuple[dict[str, Any], ...] = (MODEL,)

    def do_GET(self) -> None:
        body = json.dumps({"data": self.listed}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Models)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


class StartedError(Exception):
    """Raised in place of the start of a client."""

    def __init__(self, program: str, command: list[str], environment: dict[str, str]) -> None:
        self.arguments = command[1:]
        self.environment = environment


def raise_started(program: str, command: list[str], environment: dict[str, str]) -> None:
    raise StartedError(program, command, environment)


@dataclass(frozen=True)
class User:
    """A user with all clients installed, in a home of their own."""

    home: Path
    url: str

    @property
    def files(self) -> dict[str, str]:
        found = [path for path in self.home.rglob("*") if path.is_file()]
        return {str(path.relative_to(self.home)): path.read_text() for path in found}

    def launch(self, name: str, *arguments: str, model: str | None = None) -> StartedError:
        with pytest.raises(StartedError) as started:
            launch(name, self.url, KEY, model, arguments, only_print=False)
        return started.value


@pytest.fixture
def user(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> User:
    home, programs = tmp_path / "home", tmp_path / "bin"
    home.mkdir()
    programs.mkdir()
    for client in CLIENTS.values():
        (programs / client.command).write_text(PROGRAM)
        (programs / client.command).chmod(0o755)
    for name in list(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(os, "execve", raise_started)
    return User(home, url)


@pytest.mark.parametrize("name", CLIENTS)
def test_launch_writes_only_below_its_own_folder(name: str, user: User) -> None:
    before = dict.fromkeys((".claude.json", ".aider.conf.yml", ".config/x"), "the user's")
    for file, text in before.items():
        (user.home / file).parent.mkdir(exist_ok=True)
        (user.home / file).write_text(text)
    user.launch(name)
    own = f".local/state/penstock/launch/{name}/"
    others = {file: text for file, text in user.files.items() if not file.startswith(own)}
    assert others == before
    assert (user.home / own).exists()
    assert (user.home / own).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("name", CLIENTS)
def test_launch_gives_the_key_only_in_the_environment(name: str, user: User) -> None:
    started = user.launch(name, "--", "the task")
    assert KEY in started.environment.values()
    assert KEY not in " ".join(started.arguments)
    assert KEY not in "".join(user.files.values())
    assert started.arguments[-2:] == ["--", "the task"]


@pytest.mark.parametrize("name", CLIENTS)
def test_launch_names_the_server_the_model_and_its_context(name: str, user: User) -> None:
    started = user.launch(name)
    texts = [*started.environment.values(), *started.arguments, *user.files.values()]
    for wanted in (user.url, MODEL["id"], str(CONTEXT)):
        assert any(wanted in text for text in texts), wanted


@pytest.mark.parametrize("name", CLIENTS)
def test_launch_print_writes_nothing_and_its_script_does_the_same(
    name: str, user: User, capfd: pytest.CaptureFixture[str]
) -> None:
    launch(name, user.url, KEY, None, ["the task", "it's"], only_print=True)
    script = capfd.readouterr().out
    assert KEY not in script
    assert user.files == {}
    environment = {**os.environ, "PENSTOCK_API_KEY": KEY}
    done = subprocess.run(
        ["sh", "-e", "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    printed, files = json.loads(done.stdout), user.files
    started = user.launch(name, "the task", "it's")
    assert printed["arguments"] == started.arguments
    same = {key: printed["environment"].get(key) for key in started.environment}
    assert same == started.environment
    assert {file: text.strip() for file, text in user.files.items()} == {
        file: text.strip() for file, text in files.items()
    }


@pytest.mark.parametrize("name", CLIENTS)
def test_launch_smaller_context_is_refused_with_both_numbers(
    name: str, user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = CLIENTS[name].prompt_tokens
    for context, fits in ((needed - 1, False), (needed, True)):
        monkeypatch.setattr(Models, "listed", ({**MODEL, "max_model_len": context},))
        if fits:
            user.launch(name)
            continue
        with pytest.raises(ClientError, match=rf"{needed:,} tokens .* context of {context:,}\."):
            launch(name, user.url, KEY, None, [], only_print=True)
        assert user.files == {}


def test_launch_says_what_it_set_and_how_much_context_is_needed(
    user: User, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "an account")
    user.launch("claude")
    said = capfd.readouterr().err
    assert "unset     ANTHROPIC_API_KEY\n" in said
    assert "context   40,000 tokens; Claude Code sends about 13,000 before the first word" in said
    assert "CLAUDE_CODE_ATTRIBUTION_HEADER=0" in said
    assert "CLAUDE_CODE_MAX_CONTEXT_TOKENS=40000" in said
    assert KEY not in said
    user.launch("codex")
    said = capfd.readouterr().err
    assert "file      models.json\n" in said
    assert "-c web_search=" in said.replace("'", "")


def test_launch_state_of_the_client_is_kept(user: User) -> None:
    user.launch("claude")
    [file] = user.files
    (user.home / file).write_text("its state")
    user.launch("claude")
    assert user.files == {file: "its state"}


def test_launch_codex_catalog_has_an_entry_with_the_tools_of_a_patching_model(user: User) -> None:
    started = user.launch("codex")
    [file] = user.files
    [entry] = json.loads(user.files[file])["models"]
    assert entry["slug"] == "org/coder"
    assert (entry["context_window"], entry["shell_type"]) == (CONTEXT, "unified_exec")
    assert entry["model_messages"] is None
    assert "*** Begin Patch" in entry["base_instructions"]
    assert set(entry) == set(CATALOG[-1])  # its version of Codex may refuse other members
    assert f'model_catalog_json="{user.home / file}"' in started.arguments


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("#!/bin/sh\nexit 3\n", "Cannot read the models of .*exit status 3"),
        ("#!/bin/sh\necho no JSON\n", "Cannot read the models of"),
        ("#!/bin/sh\necho '{}'\n", "Cannot read the models of"),
        ('#!/bin/sh\necho \'{"models": [{"slug": "x"}]}\'\n', "no model that patches files"),
    ],
)
def test_launch_codex_without_a_fitting_catalog_is_refused(
    user: User, program: str, message: str
) -> None:
    (user.home.parent / "bin" / "codex").write_text(program)
    with pytest.raises(ClientError, match=message):
        launch("codex", user.url, KEY, None, [], only_print=False)
    assert user.files == {}


def test_launch_other_accounts_of_the_user_are_hidden(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK"):
        monkeypatch.setenv(name, "1")
        assert name not in user.launch("claude").environment


def test_launch_model_is_the_first_or_the_given_one(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Models, "listed", (MODEL, {**MODEL, "id": "tuned"}))
    assert user.launch("claude").environment["ANTHROPIC_MODEL"] == "org/coder"
    assert user.launch("claude", model="tuned").environment["ANTHROPIC_MODEL"] == "tuned"
    with pytest.raises(ClientError, match=r"no model other; .*: org/coder, tuned"):
        launch("claude", user.url, KEY, "other", [], only_print=True)


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ((), "lists no model"),
        (({**MODEL, "capabilities": ["embedding"]},), "org/coder has no chat template"),
        (({**MODEL, "capabilities": ["completion"]},), "org/coder has no chat template"),
        (({"id": "other-server"},), "does not say how long its context is"),
    ],
)
def test_launch_unfit_server_is_refused_with_the_reason(
    user: User, listed: tuple[Any, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Models, "listed", listed)
    with pytest.raises(ClientError, match=message):
        launch("claude", user.url, KEY, None, [], only_print=True)


@pytest.mark.parametrize(("name", "warns"), [("claude", True), ("aider", False)])
def test_launch_template_without_tools_warns_clients_that_call_them(
    user: User,
    name: str,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Models, "listed", ({**MODEL, "capabilities": ["chat"]},))
    user.launch(name)
    assert ("shows no tools" in capfd.readouterr().err) == warns


@pytest.mark.parametrize("name", CLIENTS)
def test_launch_missing_client_can_only_be_printed(
    name: str, user: User, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    client = CLIENTS[name]
    with pytest.raises(
        ClientError, match=rf"{client.command} is not in the PATH.*{client.package}"
    ):
        launch(name, user.url, KEY, None, [], only_print=False)
    assert user.files == {}


def target(url: str, *, is_here: bool) -> Target:
    return Target(url, "none", "m", CONTEXT, Path("/own"), is_here)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "http://[::1]:8000"])
def test_environment_loopback_server_is_reached_without_a_proxy(url: str, user: User) -> None:
    proxies = {"HTTP_PROXY": "http://proxy", "NO_PROXY": "example.org"}
    for name in CLIENTS:
        local = target(url, is_here=True)
        environment = environment_of(local, CLIENTS[name].setup(local), proxies)
        assert environment["NO_PROXY"] == f"example.org,{url[7:-5].strip('[]')}"
        assert ("HTTP_PROXY" in environment) == (name != "qwen-code")


def test_environment_of_codex_has_a_closed_proxy_unless_the_user_has_one(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = user.launch("codex")
    assert started.environment["HTTPS_PROXY"] == "http://127.0.0.1:9"
    excluded = 'shell_environment_policy.exclude=["HTTPS_PROXY", "https_proxy"]'
    assert excluded in started.arguments, "its commands get the user's environment"
    monkeypatch.setenv("https_proxy", "http://proxy")
    started = user.launch("codex")
    assert (started.environment["https_proxy"], "HTTPS_PROXY" in started.environment) == (
        "http://proxy",
        False,
    )
    assert excluded not in started.arguments


def test_environment_remote_server_keeps_the_proxies(user: User) -> None:
    remote = target("https://models.example", is_here=False)
    proxies = {"HTTPS_PROXY": "http://proxy"}
    for client in CLIENTS.values():
        environment = environment_of(remote, client.setup(remote), proxies)
        assert environment["HTTPS_PROXY"] == "http://proxy"
        assert "NO_PROXY" not in environment


def test_launch_command_without_a_server_says_how_to_start_one() -> None:
    done = penstock("launch", "claude", "--url", "http://127.0.0.1:9", HOME="/nowhere")
    assert done.returncode == 1
    assert "penstock serve" in done.stderr


def test_launch_command_unknown_client_lists_the_known_ones() -> None:
    done = penstock("launch", "emacs", HOME="/nowhere")
    assert done.returncode == 2
    assert all(name in done.stderr for name in CLIENTS)


def test_launch_command_passes_what_follows_two_dashes(url: str, tmp_path: Path) -> None:
    folder = str(tmp_path)
    arguments = ("launch", "claude", "--print", "--url", f"{url}/v1", "--", "-p", "a task")
    done = penstock(*arguments, XDG_STATE_HOME=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("exec claude -p 'a task'\n")
    assert f"CLAUDE_CONFIG_DIR={folder}/penstock/launch/claude" in done.stdout
