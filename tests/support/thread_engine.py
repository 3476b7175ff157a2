"""The engine in a thread: real sockets, scheduler and runner, but no slow process start."""

from __future__ import annotations

import tempfile
import threading
import traceback

from engine.assembly import make_core
from engine.client.channel import ClientEndpoint, EngineEndpoint
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.protocol.failure import Fatal
from engine.protocol.ready import Shutdown
from engine.runner.load import LoadedEngine


class ThreadChild:
    """Stands in for EngineChild and its `process`; ends as `engine.process` does.

    `loaded` may be reused after an earlier ThreadChild.
    """

    def __init__(self, config: EngineConfig, loaded: LoadedEngine) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-", ignore_cleanup_errors=True)
        self._address = f"ipc://{self._folder.name}"
        self.endpoint = ClientEndpoint(self._address)
        self.process, self.pid = self, 0
        self.core: EngineCore | None = None
        self.code = 0
        self.thread = threading.Thread(target=self._run, args=(config, loaded), daemon=True)
        self.thread.start()

    def waited_ns(self) -> int:
        """Unknown: this is no process of its own."""
        return -1

    def _run(self, config: EngineConfig, loaded: LoadedEngine) -> None:
        endpoint = EngineEndpoint(self._address)
        try:
            self.core = make_core(config, loaded, endpoint)
            endpoint.send(self.core.facts)
            self.core.run()
        except Exception as error:
            self.code = 3
            endpoint.send(
                Fatal(f"The engine failed: {type(error).__name__}.", traceback.format_exc())
            )
        finally:
            endpoint.close()

    def wait(self) -> int:
        self.thread.join()
        return self.code

    def kill(self) -> None:
        self.endpoint.send(Shutdown())

    def close(self) -> None:
        self.endpoint.close()
        self._folder.cleanup()
