"""BlockBytes: copies blocks of the KV cache to host memory and back."""

from __future__ import annotations

import torch

from engine.attention.kv_cache import KVCache
from engine.device.transfer import HostCopy


class BlockBytes:
    """The bytes of a block: those of all layers of its group, one after the other.

    They keep the layout of the attention backend, so another one cannot use them.
    """

    def __init__(self, kv: KVCache, device: torch.device) -> None:
        self._kv, self._device = kv, device
        self.sizes = {
            group: sum(part.nbytes for part in kv.of_block(group, 0))
            for group in range(len(kv.groups))
        }

    def copy_out(self, group: int, block: int) -> HostCopy:
        """Begin to copy a block to the host, behind all steps that have been launched."""
        return HostCopy([torch.cat(self._parts(group, block))], self._device)

    def copy_in(self, group: int, block: int, payload: memoryview) -> None:
        """Fill a block before the next step with the bytes that `copy_out` has returned."""
        saved = torch.frombuffer(payload, dtype=torch.uint8)
        if self._device.type == "cuda":
            saved = saved.pin_memory().to(self._device, non_blocking=True)
        parts = self._parts(group, block)
        for part, source in zip(parts, saved.split([len(part) for part in parts]), strict=True):
            part.copy_(source)

    def _parts(self, group: int, block: int) -> list[torch.Tensor]:
        """Return views [bytes] uint8 of what a block holds."""
        return [part.view(-1).view(torch.uint8) for part in self._kv.of_block(group, block)]
