"""Serve the demo in a tree that lacks a wing: `python -m tests.structure.serve_without WING`.

`tests.structure.without_wing` runs it in the copy.
"""

from __future__ import annotations

import subprocess
import sys

from tests.support import web
from tests.support.serve import serving
from tests.support.wings import PARTS


def main() -> None:
    """Check that the server answers, and that the routes and commands of the wing are gone."""
    parts = PARTS[sys.argv[1]]
    with serving("demo") as server:
        assert web.get(f"{server.base_url}/health").status_code == 200
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
        answer = web.post(f"{server.base_url}/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"]
        if parts.route:
            assert web.get(f"{server.base_url}{parts.route}").status_code == 404, parts.route
    for command in parts.commands:
        name = command.replace("_", "-")
        done = subprocess.run(
            [sys.executable, "-m", "server", name], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2, name
        assert f"No such command '{name}'" in done.stderr, done.stderr


if __name__ == "__main__":
    main()
