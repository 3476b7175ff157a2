"""aider, which writes its edits as text: it calls no tools."""

from __future__ import annotations

import json

from server.cli.launch.setup import Client, Setup, Target


def setup(target: Target) -> Setup:
    model = f"openai/{target.model}"
    sizes = {
        "max_input_tokens": target.context,
        "max_output_tokens": target.output,
        "max_tokens": target.output,
    }
    free = {"input_cost_per_token": 0, "output_cost_per_token": 0}
    metadata = {model: {**sizes, **free, "litellm_provider": "openai", "mode": "chat"}}
    settings = {
        "model": model,
        "weak-model": model,
        "edit-format": "diff",
        "model-metadata-file": str(target.folder / "metadata.json"),
        "input-history-file": str(target.folder / "input.history"),
        "chat-history-file": str(target.folder / "chat.history.md"),
        "check-update": False,
        "show-release-notes": False,
        "show-model-warnings": False,
        "analytics": False,
        "gitignore": False,
    }
    return Setup(
        arguments=("--config", str(target.folder / "aider.conf.yml")),
        environment={
            "OPENAI_API_BASE": target.api,
            "OPENAI_API_KEY": target.key,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else litellm fetches prices from GitHub
        },
        # JSON is YAML, too.
        files={
            "aider.conf.yml": json.dumps(settings, indent=2),
            "metadata.json": json.dumps(metadata, indent=2),
        },
    )


AIDER = Client("aider", "aider", "pip install aider-chat", 2500, False, setup)
