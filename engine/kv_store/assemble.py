"""Open the store of a loaded model."""

from __future__ import annotations

from pathlib import Path

from engine.config import EngineConfig
from engine.kv_store.block_bytes import BlockBytes
from engine.kv_store.files import HEAD_BYTES, BlockFiles
from engine.kv_store.folder import StoreFolder, check_settings
from engine.kv_store.identity import check_model, model_digest
from engine.kv_store.index import pages
from engine.kv_store.stored_blocks import StoredBlocks
from engine.runner.load import LoadedEngine
from engine.scheduling.scheduler import Scheduler


class OpenStore:
    """The open folder, and the files of the loaded model in it."""

    def __init__(self, config: EngineConfig, loaded: LoadedEngine) -> None:
        """Raises ConfigError if the folder cannot be used, or the model's blocks cannot be kept."""
        assert config.kv_cache_dir is not None
        check_settings(config)
        self._runner = loaded.runner
        self._blocks = BlockBytes(loaded.runner.kv, loaded.runner.device)
        check_model(loaded.plan, pages(HEAD_BYTES + max(self._blocks.sizes.values(), default=0)))
        self._folder = StoreFolder.open(Path(config.kv_cache_dir))
        model = model_digest(loaded.plan, loaded.facts)
        capacity = config.kv_cache_dir_bytes
        self._files = BlockFiles(self._folder, model, self._blocks.sizes, capacity)
        # The same in each process that uses the folder, and secret.
        self.hash_key = self._folder.key_for("hashes of blocks")

    def part(self, scheduler: Scheduler) -> StoredBlocks:
        """Return the part of the loop. The scheduler's hashes have the key `hash_key`."""
        part = StoredBlocks(scheduler, self._blocks, self._files, self._folder)
        of_process = self._runner.gauges
        self._runner.gauges = lambda: of_process() | part.gauges()
        return part
