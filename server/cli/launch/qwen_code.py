"""qwen-code, over /v1/chat/completions."""

from __future__ import annotations

import json

from server.cli.launch.setup import Client, Setup, Target

PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")


def setup(target: Target) -> Setup:
    settings = {
        "security": {"auth": {"selectedType": "openai"}},
        "model": {
            "name": target.model,
            "generationConfig": {
                "contextWindowSize": target.context,
                "samplingParams": {"max_tokens": target.output},
            },
        },
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"enableAutoUpdate": False},
    }
    return Setup(
        environment={
            "QWEN_HOME": str(target.folder),
            "OPENAI_BASE_URL": target.api,
            "OPENAI_API_KEY": target.key,
            "OPENAI_MODEL": target.model,
        },
        files={"settings.json": json.dumps(settings, indent=2)},
        # It ignores NO_PROXY: a loopback address would go to the proxy.
        unset=PROXIES if target.is_here else (),
    )


QWEN_CODE = Client("qwen-code", "qwen", "npm install -g @qwen-code/qwen-code", 20000, True, setup)
