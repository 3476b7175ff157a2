"""Codex, over /v1/responses.

The name of a model decides which tools Codex offers. A catalog with an entry for the served model
makes it offer apply_patch, and makes it respect the context.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from typing import Any

from server.cli.api_client import ClientError
from server.cli.launch.setup import KEY_VARIABLE, Client, Setup, Target

Value = str | int | bool | list[str]

PACKAGE = "npm install -g @openai/codex"
CATALOG_S = 30  # for Codex to print its catalog
PATIENCE_MS = 3_600_000  # a CPU may need minutes for a long prompt
# No setting keeps its screen from reading tips on GitHub. No program listens at this address.
PROXIES = ("HTTPS_PROXY", "https_proxy")
CLOSED = "http://127.0.0.1:9"
MAX_RESULT = 10_000  # tokens of a command's output
# What `--print` shows where Codex is not installed: the members that version 0.171.0 needs.
ENTRY: dict[str, Any] = {
    "slug": "",
    "display_name": "",
    "description": "",
    "supported_reasoning_levels": [],
    "shell_type": "unified_exec",
    "apply_patch_tool_type": "freeform",
    "visibility": "list",
    "supported_in_api": True,
    "priority": 0,
    "support_verbosity": False,
    "truncation_policy": {},
    "context_window": 0,
    "max_context_window": 0,
    "supports_search_tool": True,
    "experimental_supported_tools": [],
    "input_modalities": [],
    "base_instructions": "",
}
# A quarter of Codex's own instructions, with the format of patches: small models do not know it.
INSTRUCTIONS = """\
You are Codex, a coding agent in a terminal. You and the user share one workspace.

- Read what you need before you change it: use exec_command with rg, ls, sed or cat.
- Change files only with apply_patch, not with a shell command.
- Make the smallest change that solves the task, in the style of the code around it.
- Leave changes of others as they are, and do not commit unless the user wants it.
- Run the tests, or the program, after a change. Say so if you could not.
- Work until the task is done. Then answer in a few sentences: what you changed, and where.

A patch of apply_patch has this form. Paths are relative to the workspace:

*** Begin Patch
*** Update File: src/app.py
@@ def greet():
     name = read_name()
-    print("Hi", name)
+    print("Hello", name)
*** Add File: notes.txt
+one line
*** Delete File: old.txt
*** End Patch

A line of a file that stays begins with a space, a removed one with -, an added one with +. Show
three lines before and after each change. @@ names the function or class around it.
"""


def setup(target: Target) -> Setup:
    """Raises ClientError if the installed Codex has no model whose tools fit."""
    catalog = target.folder / "models.json"
    provider: dict[str, str | int] = {
        "name": "Penstock",
        "base_url": target.api,
        "wire_api": "responses",
        "env_key": KEY_VARIABLE,
        "stream_idle_timeout_ms": PATIENCE_MS,
    }
    settings: dict[str, Value] = {
        "model": target.model,
        "model_provider": "penstock",
        **{f"model_providers.penstock.{name}": value for name, value in provider.items()},
        "model_catalog_json": str(catalog),
        "web_search": "disabled",
        "check_for_update_on_startup": False,
        "analytics.enabled": False,
        "features.plugins": False,
        "features.apps": False,
    }
    environment = {"CODEX_HOME": str(target.folder), KEY_VARIABLE: target.key}
    if target.is_here and not any(name in os.environ for name in PROXIES):
        environment |= dict.fromkeys(PROXIES, CLOSED)
        settings["shell_environment_policy.exclude"] = list(PROXIES)  # for commands
    # Codex writes its own settings to config.toml. These values of JSON are TOML, too.
    pairs = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
    return Setup(
        arguments=tuple(part for pair in pairs for part in ("-c", pair)),
        environment=environment,
        files={catalog.name: json.dumps({"models": [entry_of(target)]}, indent=2)},
    )


def entry_of(target: Target) -> dict[str, Any]:
    """Return the catalog's entry of the served model. Raises ClientError."""
    entry = patching_model()
    changes = {
        "slug": target.model,
        "display_name": target.model,
        "description": "Served by Penstock.",
        "context_window": target.context,
        "max_context_window": target.context,
        "truncation_policy": {"mode": "tokens", "limit": min(MAX_RESULT, target.context // 8)},
        "base_instructions": INSTRUCTIONS,
        "model_messages": None,  # else the instructions have no effect
        "input_modalities": ["text"],
        "additional_speed_tiers": [],
        "service_tiers": [],
        "availability_nux": None,
        "upgrade": None,
    }
    return entry | {name: value for name, value in changes.items() if name in entry}


def patching_model() -> dict[str, Any]:
    """Return the entry of a model for which Codex offers apply_patch as a tool.

    It comes from the installed Codex, whose version decides which members an entry must have.
    Raises ClientError if it has no such model.
    """
    program = shutil.which("codex")
    if program is None:
        return ENTRY
    for entry in bundled_models(program):
        if entry.get("apply_patch_tool_type") == "freeform" and not entry.get("use_responses_lite"):
            return entry
    raise ClientError("This version of codex has no model that patches files by a tool.")


def bundled_models(program: str) -> list[dict[str, Any]]:
    """Return the models that a Codex knows. Raises ClientError."""
    with tempfile.TemporaryDirectory() as home:
        try:
            done = subprocess.run(
                [program, "debug", "models", "--bundled"],
                env={**os.environ, "CODEX_HOME": home},
                capture_output=True,
                check=True,
                timeout=CATALOG_S,
            )
            models: list[dict[str, Any]] = json.loads(done.stdout)["models"]
        except (OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError) as error:
            raise ClientError(f"Cannot read the models of {program}: {error}") from None
    return models


CODEX = Client("Codex", "codex", PACKAGE, 5000, True, setup)
