"""The command of Continue, over /v1/chat/completions."""

from __future__ import annotations

import json
import os

from server.cli.launch.setup import KEY_VARIABLE, Client, Setup, Target

HOOK = "no_other_host.cjs"
# At each start, Continue sends the machine's id to this host. It has no setting against that.
# Programs that Continue starts do not get the hook.
HOOK_TEXT = """\
const { fetch } = globalThis;
globalThis.fetch = async (resource, options) => {
  const url = new URL(resource.url ?? resource);
  if (url.hostname === "api.continue.dev") throw new Error("not contacted by penstock launch");
  return fetch(resource, options);
};
const hook = ` --require ${JSON.stringify(__filename)}`;
const options = ` ${process.env.NODE_OPTIONS}`.replace(hook, "").trim();
if (options) process.env.NODE_OPTIONS = options;
else delete process.env.NODE_OPTIONS;
"""


def setup(target: Target) -> Setup:
    sizes = {"contextLength": target.context, "maxTokens": target.output}
    model = {
        "name": target.model,
        "provider": "openai",
        "model": target.model,
        "apiBase": target.api,
        "apiKey": f"${{{{ secrets.{KEY_VARIABLE} }}}}",
        "roles": ["chat", "edit", "apply", "summarize"],
        "capabilities": ["tool_use"],
        "defaultCompletionOptions": sizes,
    }
    settings = {"name": "Penstock", "version": "1.0.0", "schema": "v1", "models": [model]}
    hook = f"--require {json.dumps(str(target.folder / HOOK))}"
    options = f"{os.environ.get('NODE_OPTIONS', '')} {hook}".strip()
    return Setup(
        arguments=("--config", str(target.folder / "penstock.yaml")),
        environment={
            "CONTINUE_GLOBAL_DIR": str(target.folder),
            "CONTINUE_METRICS_ENABLED": "0",
            "NODE_OPTIONS": options,
            KEY_VARIABLE: target.key,
        },
        files={
            "penstock.yaml": json.dumps(settings, indent=2),  # JSON is YAML, too
            HOOK: HOOK_TEXT,
        },
    )


CONTINUE = Client("Continue", "cn", "npm install -g @continuedev/cli", 2000, True, setup)
