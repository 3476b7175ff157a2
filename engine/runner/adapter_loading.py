"""Adapters: loads and unloads LoRA adapters for the loop, which serves meanwhile.

Files are read and weights are prepared in a thread. The loop only copies the result to a slot. All
ranks do so between the same two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.errors import ConfigError, RequestRejectedError
from engine.protocol.adapters import AdapterLoaded, LoadAdapter, UnloadAdapter
from engine.protocol.generate import GenerateRequest
from engine.protocol.message import Message
from engine.runner.model_runner import ModelRunner
from engine.scheduling.between import Between, Outcome
from engine.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from engine.models.adapters import LoadedAdapter

WAIT_S = 0.01  # how long an engine without other work waits before it looks for messages


@dataclass(frozen=True, slots=True)
class _Load:
    """An adapter that is being read: for a message, or else for the slot that waits for it."""

    adapter: int
    future: Future[LoadedAdapter]
    message: LoadAdapter | None = None
    slot: int = 0
    before: LoadedAdapter | None = None  # the adapter as it was read the last time


class Adapters(Between):
    """The adapters that requests may name."""

    def __init__(
        self, scheduler: Scheduler, runner: ModelRunner, send: Callable[[Message], None]
    ) -> None:
        self._scheduler = scheduler
        self._slots = scheduler.adapters
        self._send = send
        self._runner = runner
        self._known: dict[int, LoadedAdapter] = {}  # by adapter, without its weights
        self._unloaded: set[int] = set()  # known as long as requests use them
        self._loads: list[_Load] = []
        if (adapters := runner.adapters) is not None:
            for source, loaded in zip(adapters.plan.sources, adapters.at_start, strict=True):
                self._known[source.id] = loaded
                if slot := loaded.slot:
                    self._slots.place(source.id, slot)

    @property
    def is_waiting(self) -> bool:
        """Whether an adapter is being read."""
        return bool(self._loads)

    def wait(self) -> None:
        """Wait a moment for what is being read."""
        wait([load.future for load in self._loads], timeout=WAIT_S)

    def handle(self, message: Message) -> bool:
        match message:
            case LoadAdapter() | UnloadAdapter():
                self._load_or_unload(message)
                return True
            case GenerateRequest():
                self._check(message)
        return False

    def work(self, *, is_quiet: bool) -> Outcome | None:
        refused = self._finish_loads()
        self._start_loads()
        return Outcome(refused=refused) if refused else None

    def _check(self, request: GenerateRequest) -> None:
        """Raise RequestRejectedError if the request names an adapter that is not known."""
        adapter = request.adapter
        if adapter and (adapter not in self._known or adapter in self._unloaded):
            message = "The adapter that `model` names has been unloaded."
            raise RequestRejectedError("model_not_found", message, "model")

    def _load_or_unload(self, message: LoadAdapter | UnloadAdapter) -> None:
        if isinstance(message, UnloadAdapter):
            self._unloaded.add(message.adapter)
        elif self._runner.adapters is None:
            problem = "This server takes no adapters; start it with --max-loras or --lora-modules."
            self._send(AdapterLoaded(message.id, problem))
        else:
            future = self._runner.read_adapter(message.adapter, message.path)
            self._loads.append(_Load(message.adapter, future, message))

    def _start_loads(self) -> None:
        """Start to read the adapters that waiting requests need."""
        for adapter, slot in self._slots.take_wanted().items():
            before = self._known[adapter]
            future = self._runner.read_adapter(adapter, before.path)
            self._loads.append(_Load(adapter, future, slot=slot, before=before))

    def _finish_loads(self) -> dict[int, RequestRejectedError]:
        """Write what has been read to its slots, and forget unloaded adapters.

        Returns the requests that cannot run, because their adapter cannot be read any more.
        """
        failed: dict[int, RequestRejectedError] = {}
        for load in [load for load in self._loads if load.future.done()]:
            self._loads.remove(load)
            try:
                loaded = load.future.result()
                if load.before is not None:
                    loaded.check_same_files(load.before)
            except ConfigError as error:
                failed |= self._fail(load, error)
            else:
                self._finish(load, loaded)
        for adapter in self._unloaded & (self._known.keys() - self._in_use()):
            del self._known[adapter]
            if slot := self._slots.forget(adapter):
                self._runner.place_adapter(0, slot)
        self._unloaded &= self._known.keys() | {load.adapter for load in self._loads}
        return failed

    def _finish(self, load: _Load, loaded: LoadedAdapter) -> None:
        slot = load.slot or self._slots.take_slot()
        self._runner.place_adapter(load.adapter, slot)
        if slot:
            self._slots.place(load.adapter, slot)
        self._known[load.adapter] = loaded.without_weights()
        if load.message is not None:
            self._send(AdapterLoaded(load.message.id))

    def _fail(self, load: _Load, error: ConfigError) -> dict[int, RequestRejectedError]:
        """Answer the message of a load, or return the requests that waited for it."""
        self._runner.place_adapter(load.adapter, 0)
        if load.message is not None:
            self._send(AdapterLoaded(load.message.id, str(error)))
            return {}
        self._slots.failed(load.adapter)
        rejected = RequestRejectedError("adapter_unavailable", str(error), "model")
        waiting = [s.id for s in self._scheduler.waiting if s.adapter == load.adapter]
        return dict.fromkeys(waiting, rejected)

    def _in_use(self) -> set[int]:
        """Return the adapters of all requests, and those that are being read."""
        if not self._unloaded:
            return set()
        used = {sequence.adapter for sequence in self._scheduler.sequences.values()}
        return used | {load.adapter for load in self._loads}

    def close(self) -> None:
        if self._runner.adapters is not None:
            self._runner.adapters.close()
