"""AdapterRegistry: the LoRA adapters that clients may name in `model`, by name."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.client.interface import EngineClient
from engine.config import AdapterSource
from engine.errors import ConfigError
from server.http.errors import ApiError, invalid


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    id: int  # in the engine; a name that is loaded again gets another one
    name: str
    path: str
    created: int  # Unix seconds


class AdapterRegistry:
    """The adapters of one server. `names` are those of its base model.

    Raises ConfigError if two models have the same name.
    """

    def __init__(self, names: Sequence[str], sources: Sequence[AdapterSource] = ()) -> None:
        self._base_names = names
        self._served: dict[str, ServedAdapter] = {}
        self._loading: set[str] = set()
        now = int(time.time())
        for source in sources:
            if source.name in self._served or source.name in names:
                raise ConfigError(
                    f"--lora-modules: the name {source.name} is given twice; each model needs its "
                    "own."
                )
            self._served[source.name] = ServedAdapter(source.id, source.name, source.path, now)
        self._last_id = len(sources)

    def __iter__(self) -> Iterator[ServedAdapter]:
        return iter(list(self._served.values()))

    def find(self, name: str | None) -> ServedAdapter | None:
        return self._served.get(name or "")

    async def load(self, client: EngineClient, name: str, path: str) -> ServedAdapter:
        """Let the engine load an adapter.

        Raises a 400 ApiError if the name is taken or the adapter is refused, and EngineError.
        """
        if name in self._base_names or name in self._served or name in self._loading:
            message = f"The name {name!r} is taken; unload it, or choose another lora_name."
            raise invalid("lora_name", message)
        self._last_id += 1
        adapter = ServedAdapter(self._last_id, name, path, int(time.time()))
        self._loading.add(name)
        try:
            problem = await client.load_adapter(adapter.id, path)
        except BaseException:  # such as a cancelled request: nothing will name this adapter
            client.unload_adapter(adapter.id)
            raise
        finally:
            self._loading.discard(name)
        if problem:
            raise invalid("lora_path", problem, "invalid_adapter")
        self._served[name] = adapter
        return adapter

    def unload(self, client: EngineClient, name: str) -> None:
        """Refuse further requests for an adapter. Raises a 404 ApiError if there is none."""
        adapter = self._served.pop(name, None)
        if adapter is None:
            message = f"No adapter is named {name[:128]!r}."
            raise ApiError(404, "model_not_found", message, param="lora_name")
        client.unload_adapter(adapter.id)
