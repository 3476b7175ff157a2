"""The coding agents that `penstock launch` can start, by name."""

from __future__ import annotations

from server.cli.launch.aider import AIDER
from server.cli.launch.claude import CLAUDE
from server.cli.launch.codex import CODEX
from server.cli.launch.continue_cli import CONTINUE
from server.cli.launch.opencode import OPENCODE
from server.cli.launch.qwen_code import QWEN_CODE
from server.cli.launch.setup import Client

CLIENTS: dict[str, Client] = {
    "aider": AIDER,
    "claude": CLAUDE,
    "codex": CODEX,
    "continue": CONTINUE,
    "opencode": OPENCODE,
    "qwen-code": QWEN_CODE,
}
