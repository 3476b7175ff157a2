"""The engine process: `python -m engine.process ADDRESS`, with the EngineConfig as JSON on stdin.

It sends Progress while it loads and then Ready, and runs the loop. On a failure it sends Fatal
before it exits. The process never outlives its parent.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from engine.client.channel import EngineEndpoint, remove_sockets
from engine.client.imports import quick_imports
from engine.client.module_command import python_module
from engine.config import EngineConfig
from engine.device.parent import die_with_parent
from engine.errors import ConfigError, lacks_host_memory
from engine.parallel.followers import FollowerDiedError, Followers
from engine.protocol.failure import Fatal, Notice
from engine.protocol.ready import DUMP_STACKS, Progress

if TYPE_CHECKING:
    from engine.core import EngineCore

PARENT_DIED = 4  # exit status; no process is left to read it

NO_MEMORY = (
    "The memory was not enough to load the model. Raise the limit of the container or of "
    "`ulimit -v`, or lower --kv-cache-memory-bytes or --max-num-batched-tokens."
)


def main() -> int:
    """Run the engine; return 0 after Shutdown, 2 after a ConfigError and 3 after another error."""
    # Ctrl-C and supervisors signal the whole process group. The parent drains, then sends Shutdown.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    address = sys.argv[1]
    # A crash in native code raises no exception, so only its stack traces report it.
    faulthandler.enable()
    faulthandler.register(DUMP_STACKS)
    if not (line := sys.stdin.buffer.readline()):
        remove_sockets(address)
        return PARENT_DIED  # the parent was killed before it sent the configuration
    config = msgspec.json.decode(line, type=EngineConfig)
    threading.Thread(target=_watch_parent, args=(address,), daemon=True).start()
    endpoint = EngineEndpoint(address)
    remove_sockets(address)  # before importing torch: if the parent is killed, none remain
    die_with_parent()
    endpoint.send(Progress("starting", 0.0))
    logger = logging.getLogger("engine")
    logger.addHandler(ToServer(endpoint.send))
    logger.setLevel(logging.INFO)
    is_loaded = False
    try:
        with _followers(config) as followers:
            core = _load(config, endpoint, followers)
            is_loaded = True
            gc.freeze()  # otherwise a collection traverses torch's modules, a pause of 55 ms
            core.run()
    except ConfigError as error:
        endpoint.send(Fatal(str(error), config_error=True))
        return 2
    except Exception as error:
        if not is_loaded and lacks_host_memory(error):
            endpoint.send(Fatal(NO_MEMORY, config_error=True))
            return 2
        if isinstance(error, FollowerDiedError):
            endpoint.send(Fatal(str(error)))
            return 3
        endpoint.send(Fatal(f"The engine failed: {type(error).__name__}.", traceback.format_exc()))
        return 3
    finally:
        endpoint.close()
    return 0


def _followers(config: EngineConfig) -> contextlib.AbstractContextManager[Followers | None]:
    """Start the processes of the other ranks, if there are any; they import torch meanwhile."""
    if config.tensor_parallel_size == 1:
        return contextlib.nullcontext()
    return Followers(config, python_module("engine.parallel.follower"))


def _load(
    config: EngineConfig, endpoint: EngineEndpoint, followers: Followers | None
) -> EngineCore:
    """Load the model, and tell the server that it is ready."""
    # Imported here so that a broken torch is reported like other failures.
    with quick_imports():
        from engine.assembly import make_core
        from engine.runner.load import load_engine
        from engine.runner.ranks import refuse_ranks

    if config.kv_cache_dir is not None:
        from engine.kv_store.folder import check_folder

        check_folder(config)  # before minutes of loading
    connect = refuse_ranks
    if followers is not None:
        config, connect = followers.config, followers.connect
    loaded = load_engine(config, endpoint.send, connect=connect)
    if followers is not None:
        loaded.runner.lead(followers)
    # On a GPU the host schedules the next step while this one runs.
    depth = 1 if loaded.plan.device.type == "cuda" else 0
    core = make_core(config, loaded, endpoint, depth=depth)
    endpoint.send(core.facts)
    return core


class ToServer(logging.Handler):
    """Sends log records of this process to the server, which formats and filters them."""

    def __init__(self, send: Callable[[Notice], None]) -> None:
        super().__init__()
        self._send, self._thread = send, threading.get_ident()  # only it may use the socket

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if threading.get_ident() == self._thread:
            self._send(Notice(record.levelno, text))
        else:
            sys.stderr.write(f"{text}\n")


def _watch_parent(address: str) -> None:
    """Exit when stdin closes: the parent keeps it open while it lives."""
    while os.read(0, 1):  # not sys.stdin: a thread blocked in it breaks the interpreter's exit
        pass
    remove_sockets(address)
    os._exit(PARENT_DIED)


if __name__ == "__main__":
    sys.exit(main())
