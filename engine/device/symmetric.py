"""Memory of a GPU that the other ranks' GPUs can write to: torch's symmetric memory.

It needs peer access between the GPUs, over NVLink or PCIe. These are functions of torch's C++ code,
which torch 2.8 to 2.13 have; only this file calls them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import torch


class SymmetricBuffer(NamedTuple):
    """A rank's buffer, and where each rank's buffer is in the address space of this process."""

    memory: torch.Tensor  # [bytes] uint8, zero
    addresses: list[int]  # by rank
    handle: Any  # keeps the mappings
    group: Any  # torch's registry does not keep it


def symmetric_buffer(
    name: str, store: Any, own: int, count: int, num_bytes: int, device: torch.device
) -> SymmetricBuffer:
    """Allocate a buffer in each of `count` ranks. This is number `own`.

    All ranks call this with equal arguments, and a name that they have not used yet. Raises
    RuntimeError if the driver cannot share the memory.
    """
    c10d = import_module("torch._C._distributed_c10d")
    distributed = import_module("torch.distributed")
    symmetric = c10d._SymmetricMemory
    own_store = distributed.PrefixStore(name, store)
    # Older versions of torch find the ranks by this call, newer ones by the group of this name.
    symmetric.set_group_info(name, own, count, own_store)
    group = distributed.ProcessGroup(own_store, own, count)
    c10d._register_process_group(name, group)
    memory = symmetric.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
    memory.zero_()
    # The others write as soon as they know the address.
    torch.cuda.synchronize(device)
    handle = symmetric.rendezvous(memory, name)
    return SymmetricBuffer(memory, list(handle.buffer_ptrs), handle, group)
