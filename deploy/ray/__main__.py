"""`python -m deploy.ray key=value …`: Ray and the application on this machine, loopback only.

The keys are those of `deploy.ray.app.build`. Runs until a signal, then ends Ray too.
"""

from __future__ import annotations

import os
import signal
import sys

from engine.errors import ConfigError
from server.cli import exit_codes as exits
from server.cli.console import say

ON_THIS_MACHINE = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on any system: all of Ray's ports on loopback
    "RAY_worker_niceness": "0",  # 15 is for work beside the machine's own; here it is its own
    "RAY_USAGE_STATS_ENABLED": "0",
}


def main() -> int:
    os.environ.update(ON_THIS_MACHINE)
    try:
        import ray  # reads them
        from ray import serve

        from deploy.ray.app import build
    except ModuleNotFoundError as error:
        say(f"penstock: {error.name} is not installed: pip install 'penstock[ray]'")
        return exits.BAD_CONFIG
    arguments = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
    try:
        app = build(arguments)
    except ConfigError as error:
        say(f"penstock: {error}")
        return exits.BAD_CONFIG
    ray.init(include_dashboard=False)  # it runs code for whoever reaches it
    port = int(arguments.get("port", 8000))
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(app)
    say(f"penstock: Ray Serve listens on http://127.0.0.1:{port}")
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    serve.shutdown()
    ray.shutdown()
    return exits.CLEAN


if __name__ == "__main__":
    sys.exit(main())
