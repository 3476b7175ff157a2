"""The environments of the clients, below build/clients: made on demand, with pinned versions."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.process import ROOT

FOLDER = ROOT / "build" / "clients"
HERE = Path(__file__).parent
INSTALL_S = 900

# The packages of each runner. Their dependencies are the newest of the index.
PYTHON: dict[str, tuple[str, ...]] = {
    "openai": ("openai==3.54.0",),
    "anthropic": ("anthropic==2.14.0",),
    "langchain": ("langchain-openai==1.7.3",),
    "llama_index": ("llama-index-llms-openai-like==0.8.1",),
    "litellm": ("litellm==1.106.2", "mcp==2.3.0"),  # it imports mcp if a request has tools
    "pydantic_ai": ("pydantic-ai-slim[openai]==2.68.0",),
    "instructor": ("instructor==1.17.0",),
    "agents": ("openai-agents==0.24.0",),
    "open_webui": ("torch==2.13.0", "open-webui==0.12.4", "playwright==1.60.0"),
}
# The packages of each runner of encoders.
VECTORS: dict[str, tuple[str, ...]] = {
    "openai": ("openai==3.57.0",),
    "cohere": ("cohere==7.3.1",),
    "langchain": ("langchain-openai==1.7.4",),
    "langchain_cohere": ("langchain-cohere==0.6.0",),
    "llama_index": (
        "llama-index-embeddings-openai-like==0.4.0",
        "llama-index-embeddings-text-embeddings-inference==0.6.0",
        "llama-index-postprocessor-tei-rerank==0.6.0",
    ),
    # These need another version of llama-index-embeddings-openai.
    "llama_index_cohere": (
        "llama-index-embeddings-openai==0.7.0",
        "llama-index-embeddings-cohere==0.9.0",
        "llama-index-postprocessor-cohere-rerank==0.10.0",
    ),
    "litellm": ("litellm==1.110.2",),
    "haystack": (
        "haystack-ai==3.4.1",
        "cohere-haystack==11.0.0",
        "huggingface-api-haystack==3.1.0",
    ),
    "huggingface_hub": ("huggingface_hub==2.4.0", "numpy==2.4.6"),
}
# The packages of each runner that sends images.
IMAGES: dict[str, tuple[str, ...]] = {
    "openai": ("openai==3.57.0",),
    "anthropic": ("anthropic==2.14.0",),
    "langchain": ("langchain-openai==1.7.4", "langchain-anthropic==1.7.10"),
    "llama_index": ("llama-index-llms-openai-like==0.8.1",),
    "litellm": ("litellm==1.110.2",),
}
# The packages of each runner of Ollama's clients.
OLLAMA: dict[str, tuple[str, ...]] = {
    "ollama": ("ollama==0.6.3",),
    "langchain": ("langchain-ollama==1.1.0",),
    "llama_index": ("llama-index-llms-ollama==0.11.0",),
    "llm": ("llm==0.36", "llm-ollama==0.19.1"),
}
OLLAMA_NODE = ("ollama@0.6.4",)
# PyPI's torch brings 3 GB of CUDA libraries. The CPU build has an index of its own.
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
NODE: dict[str, tuple[str, ...]] = {
    "openai_node": ("openai@7.57.0",),
    "ai_sdk": ("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "zod@4.6.7"),
    "ai_sdk_responses": ("ai@7.0.173", "@ai-sdk/openai@3.0.141", "zod@4.6.7"),
    "ai_sdk_anthropic": ("ai@6.0.326", "@ai-sdk/anthropic@3.0.140", "zod@4.6.7"),
    "codex": ("@openai/codex@0.171.0",),
}
IMAGES_NODE: dict[str, tuple[str, ...]] = {
    "ai_sdk": (
        *("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92"),
        *("@ai-sdk/openai@4.0.118", "@ai-sdk/anthropic@4.0.105", "zod@4.6.7"),
    ),
}

# Coding agents: the command of each, and its packages. Some need a newer Node than the machine's.
NEW_NODE = "node@22.23.3"
NODE_AGENTS: dict[str, tuple[str, ...]] = {
    "claude": (NEW_NODE, "@anthropic-ai/claude-code@2.1.332"),
    "codex": ("@openai/codex@0.171.0",),
    "cn": (NEW_NODE, "@continuedev/cli@1.5.47"),
    "opencode": ("opencode-ai@1.18.33",),
    "qwen": (NEW_NODE, "@qwen-code/qwen-code@0.24.4"),
}
PYTHON_AGENTS: dict[str, tuple[str, ...]] = {"aider": ("aider-chat==0.86.2",)}

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str | None:
    """Return the path of the machine's Chromium; None if there is none."""
    paths = [path for name in BROWSERS if (path := shutil.which(name))]
    return paths[0] if paths else None


def commands_of(agent: str) -> Path:
    """Return the folder with the command of a coding agent; install it if it has changed."""
    if agent in PYTHON_AGENTS:
        return installed(f"agent-{agent}", PYTHON_AGENTS[agent]).parent
    return node_folder(f"agent-{agent}", NODE_AGENTS[agent]) / "node_modules" / ".bin"


def python_of(name: str) -> Path:
    """Return the interpreter of a Python client."""
    return installed(name, PYTHON[name])


def vectors_python_of(name: str) -> Path:
    """Return the interpreter of a client of encoders."""
    return installed(f"vectors_{name}", VECTORS[name])


def images_python_of(name: str) -> Path:
    """Return the interpreter of a client that sends images."""
    return installed(f"images_{name}", IMAGES[name])


def ollama_python_of(name: str) -> Path:
    """Return the interpreter of a client of Ollama."""
    return installed(f"ollama_{name}", OLLAMA[name])


def installed(name: str, packages: tuple[str, ...]) -> Path:
    """Return the interpreter of an environment; install its packages if they have changed."""
    folder = FOLDER / name
    python = folder / "bin" / "python"
    stamp = folder / "packages.json"
    wanted = json.dumps([sys.version, *packages])
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    for torch in [package for package in packages if package.startswith("torch==")]:
        # If that index is out of reach, torch comes from PyPI, with the other packages.
        options = ["--retries", "1", "--no-deps", "--index-url", TORCH_INDEX]
        subprocess.run([*pip, *options, torch], check=False, timeout=INSTALL_S)
    subprocess.run([*pip, *packages], check=True, timeout=INSTALL_S)
    stamp.write_text(wanted)
    return python


def script_of(name: str) -> Path:
    """Return the script of a Node client; install its packages if they have changed."""
    return _script(name, NODE[name])


def images_script_of(name: str) -> Path:
    """Return the script of a Node client that sends images, as `script_of` does."""
    return _script(f"images_{name}", IMAGES_NODE[name])


def ollama_script() -> Path:
    """Return the script of Ollama's client for JavaScript, as `script_of` does."""
    return _script("ollama", OLLAMA_NODE)


def _script(name: str, packages: tuple[str, ...]) -> Path:
    """A script finds packages in its own folder, so it stands there as a copy."""
    folder = node_folder(name, packages)
    for script in (HERE / "node").glob("*.mjs"):
        shutil.copy(script, folder)
    return folder / f"run_{name}.mjs"


def node_folder(name: str, packages: tuple[str, ...]) -> Path:
    """Return a folder of Node packages; install them if they have changed."""
    folder = FOLDER / name
    stamp = folder / "packages.json"
    wanted = json.dumps(packages)
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "package.json").write_text('{"private": true}')
        npm = ["npm", "install", "--no-audit", "--no-fund", "--loglevel", "error", *packages]
        subprocess.run(npm, cwd=folder, check=True, timeout=INSTALL_S)
        stamp.write_text(wanted)
    return folder
