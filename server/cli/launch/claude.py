"""Claude Code, over /v1/messages."""

from __future__ import annotations

import json

from server.cli.launch.setup import Client, Setup, Target

# The names by which it uses other models, for titles and summaries.
OTHER_MODELS = (
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "CLAUDE_CODE_SUBAGENT_MODEL",
)
ELSEWHERE = (
    "ANTHROPIC_API_KEY",
    "CLAUDE_CODE_OAUTH_TOKEN",
    "CLAUDE_CODE_USE_BEDROCK",
    "CLAUDE_CODE_USE_VERTEX",
    "CLAUDE_CODE_USE_FOUNDRY",
)


def setup(target: Target) -> Setup:
    environment = {
        "CLAUDE_CONFIG_DIR": str(target.folder),
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_AUTH_TOKEN": target.key,
        "ANTHROPIC_MODEL": target.model,
        **dict.fromkeys(OTHER_MODELS, target.model),
        # It takes unknown models to have a million tokens.
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(target.context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(target.output),
        # The header changes with each question, so that the prefix cache would miss.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_DISABLE_OFFICIAL_MARKETPLACE_AUTOINSTALL": "1",
    }
    state = {"hasCompletedOnboarding": True}
    return Setup(
        environment=environment,
        first_files={".claude.json": json.dumps(state)},
        unset=ELSEWHERE,
    )


PACKAGE = "npm install -g @anthropic-ai/claude-code"
CLAUDE = Client("Claude Code", "claude", PACKAGE, 13000, True, setup)
