"""How a documented command is run: what it needs, and which words of it stand for a user's own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from tests.deploy.documented import Command


class Reason(StrEnum):
    """Why a command is not run."""

    CHECKOUT = "a checkout and its tools"
    INDEX = "an index that has Penstock: test_wheel.py installs the wheel instead"
    CONTAINERS = "Docker"
    CLUSTER = "a Kubernetes cluster"
    PROMETHEUS = "Prometheus' promtool"
    PROGRAM = "another program with models of its own: tests/clients runs it"
    DOWNLOAD = "a file of another project"


# The first pattern that matches the beginning of a command decides.
NOT_RUN = (
    (Reason.CHECKOUT, r"make |git |build/|source \.venv|pytest |TEST_\w+=\S+ pytest |locust "),
    (Reason.CHECKOUT, r"pip install -c constraints\.txt|python -m (deploy|loadtest|tests)\."),
    (Reason.CHECKOUT, r'python -c "[^"]*loadtest|python -m loadtest |OTEL_'),
    (Reason.INDEX, r"uvx |uv tool |python3 -m venv penstock$|penstock/bin/"),
    (Reason.CONTAINERS, r"docker "),
    (Reason.CLUSTER, r"kubectl |helm "),
    (Reason.PROMETHEUS, r"promtool "),
    (Reason.PROGRAM, r"penstock launch |lm_eval |OPENAI_API_BASE_URL=\S+ ENABLE"),
    (Reason.DOWNLOAD, r"data=https://|curl -LO|curl -Lo|penstock bench run --workload \w+\.jsonl"),
)
RUN = re.compile(r"(penstock [a-z]|curl |printf |python3 -c )")

# A word that stands for a user's own model or folder, and what is written in its place.
REPLACED = (
    (r"/path/to/Llama-3.2-1B-Instruct\b", "llama"),
    (r"/adapters/", ""),
    (r"\bBASE\b", "base"),
    (r"\bMODEL(?= --max-model-len 32768)", "long"),
    (r"\bMODEL\b", "demo"),
    (r"…/base_checkpoints/d12\b", "~/.cache/nanochat/base_checkpoints/d12"),
    (r"\bnanochat-d20\b", "nanochat-d5"),
)

# The server that a page's text says to start before its commands, where no block does. The pattern
# is searched in the command, the first that is found decides.
SERVERS = (
    ("embedding-clients.md", "InferenceClient", "minilm"),
    ("embedding-clients.md", "", "minilm reranker"),
    ("embeddings-reference.md", "/v1/classify", "classifier"),
    ("embeddings.md", "", "sentence-transformers/all-MiniLM-L6-v2 --served-model-name embedder"),
    ("images.md", "", "demo-vision"),
    ("ollama.md", "", "demo"),
    ("", "", "demo"),
)
NEEDS_SERVER = re.compile(
    r"(127\.0\.0\.1|localhost):\d|penstock (chat|bench run|top|inspect|explain|ps|stop|verify)\b"
)
INPUT = "/bye\n"  # ends a conversation
WATCHES = re.compile(r"penstock top *(#|$)")  # until Ctrl-C


@dataclass(frozen=True)
class Server:
    """A command that starts a server, and the port on which it will listen."""

    command: str
    port: int


def reason_of(command: Command) -> Reason | None:
    """Return why a command is not run; None for one that is.

    Raises ValueError for a command of a program that no rule names.
    """
    if command.language != "bash":
        return None
    for reason, pattern in NOT_RUN:
        if re.match(pattern, command.text):
            return reason
    if not RUN.match(command.text):
        raise ValueError(f"{command.page}:{command.line}: no rule for {command.text}")
    return None


def filled(command: Command) -> str:
    """Return the text with a model or folder for each word that stands for one."""
    text = command.text
    for pattern, value in REPLACED:
        text = re.sub(pattern, value, text)
    return text


def server_of(text: str) -> Server | None:
    """Return the server that a command starts; None for other commands."""
    if not re.match(r"penstock serve\b", text) or "--plan" in text:
        return None
    port = re.search(r"--port (\d+)", text)
    return Server(text.removesuffix("&").rstrip(), int(port[1]) if port else 8000)


def default_server(command: Command) -> Server:
    """Return the server that a command needs if its page has started none."""
    for page, pattern, arguments in SERVERS:
        if page in ("", command.page) and pattern in command.text:
            return Server(f"penstock serve {arguments}", 8000)
    raise AssertionError("the last rule fits every page")
