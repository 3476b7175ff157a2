"""opencode, over /v1/chat/completions."""

from __future__ import annotations

import json

from server.cli.launch.setup import KEY_VARIABLE, Client, Setup, Target

# It keeps its sessions in these folders.
FOLDERS = {
    "XDG_CONFIG_HOME": "config",
    "XDG_DATA_HOME": "data",
    "XDG_STATE_HOME": "state",
    "XDG_CACHE_HOME": "cache",
}
PLUGIN = "@opencode-ai/plugin"
# opencode installs this package from npm at each start, unless the lock file lists it.
INSTALLED = {
    "config/opencode/node_modules/.keep": "",
    "config/opencode/package-lock.json": json.dumps(
        {"packages": {"": {"dependencies": {PLUGIN: "*"}}}}
    ),
}


def setup(target: Target) -> Setup:
    model = f"penstock/{target.model}"
    limit = {"context": target.context, "output": target.output}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Penstock",
        "options": {"baseURL": target.api, "apiKey": f"{{env:{KEY_VARIABLE}}}"},
        "models": {target.model: {"name": target.model, "limit": limit}},
    }
    settings = {
        "provider": {"penstock": provider},
        "enabled_providers": ["penstock"],
        "model": model,
        "small_model": model,
        "autoupdate": False,
        "share": "disabled",
    }
    folders = {name: str(target.folder / folder) for name, folder in FOLDERS.items()}
    environment = {
        **folders,
        "OPENCODE_CONFIG_CONTENT": json.dumps(settings),
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        KEY_VARIABLE: target.key,
    }
    return Setup(environment=environment, first_files=INSTALLED)


OPENCODE = Client("opencode", "opencode", "npm install -g opencode-ai", 8000, True, setup)
