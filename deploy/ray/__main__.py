"""Run Ray and the application on this machine, loopback only: `python -m deploy.ray key=value …`.

The keys are the arguments of `deploy.ray.app.build`. SIGINT or SIGTERM stops the application and
Ray.
"""

from __future__ import annotations

import os
import signal
import sys

from engine.errors import ConfigError
from server import exit_codes
from server.cli.console import say

ON_THIS_MACHINE = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # binds Ray's ports to loopback on every system
    "RAY_worker_niceness": "0",  # Ray's default, 15, is for background work
    "RAY_USAGE_STATS_ENABLED": "0",
}


def main() -> int:
    os.environ.update(ON_THIS_MACHINE)
    try:
        import ray  # reads the variables above
        from ray import serve

        from deploy.ray.app import build
    except ModuleNotFoundError as error:
        say(f"penstock: {error.name} is not installed: pip install 'penstock[ray]'")
        return exit_codes.BAD_CONFIG
    arguments = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
    try:
        app = build(arguments)
    except ConfigError as error:
        say(f"penstock: {error}")
        return exit_codes.BAD_CONFIG
    ray.init(include_dashboard=False)  # the dashboard runs code for every client
    port = int(arguments.get("port", 8000))
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(app)
    say(f"penstock: Ray Serve listens on http://127.0.0.1:{port}")
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    serve.shutdown()
    ray.shutdown()
    return exit_codes.CLEAN


if __name__ == "__main__":
    sys.exit(main())
