"""Run a batch with an engine of its own: the application in this process, without a port."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from msgspec.structs import replace

from engine.client.interface import EngineClient
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineDeadError
from server import exit_codes
from server.app import create_app
from server.batch.job import Job
from server.batch.runner import client_inside
from server.cli.banner import load_progress
from server.cli.clean_exit import run_until_stopped
from server.config import ServerConfig
from server.sender import Sender, ServerAway

AHEAD = 2  # open lines per sequence of the engine, so that it never waits for the next one
SHOW_S = 0.1


def run_with_engine(
    job: Job,
    config: ServerConfig,
    engine_config: EngineConfig,
    client: EngineClient,
    concurrency: int | None,
    say: Callable[[str], None],
) -> int:
    """Send the lines of a job to the engine; return the exit status. Raises OSError.

    `concurrency` is the number of open lines; None follows the engine.
    """
    own = replace(config, batch_dir=None, api_key=(), api_key_file=None, access_log=False)
    try:
        app = create_app(own, engine_config, client)
    except ConfigError as error:
        say(f"penstock: {error}")
        return exit_codes.BAD_CONFIG

    async def work() -> None:
        async with app.router.lifespan_context(app), client_inside(app, "") as http:
            ready = asyncio.create_task(client.wait_ready())
            with load_progress(say) as show:
                while not ready.done():
                    show(client.progress)
                    await asyncio.wait({ready}, timeout=SHOW_S)
            open_lines = concurrency or AHEAD * ready.result().max_num_seqs
            await job.run(Sender(http, patience=0), open_lines, say)

    try:
        run_until_stopped(work())
    except (EngineDeadError, ServerAway) as error:
        say(f"penstock: {error} {job.summary} have a result; the same command continues.")
        return exit_codes.BAD_CONFIG if client.config_error else exit_codes.ENGINE_DIED
    return exit_codes.CLEAN
