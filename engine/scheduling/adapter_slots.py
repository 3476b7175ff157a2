"""AdapterSlots: which LoRA adapter each slot holds, and how many running sequences use it.

The slots hold the adapters used last. One that a running sequence uses never leaves its slot.
"""

from __future__ import annotations

from collections import Counter


class AdapterSlots:
    """The slots 1 to `num_slots`. Adapter 0 stands for none, and needs no slot."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._resident: dict[int, int] = {}  # adapter -> slot, the one used last at the end
        self._loading: dict[int, int] = {}
        self._free = list(range(num_slots, 0, -1))
        self._users: Counter[int] = Counter()  # running sequences by adapter
        self._wanted: dict[int, int] = {}  # the part of `_loading` that was not taken yet

    def is_resident(self, adapter: int) -> bool:
        return not adapter or adapter in self._resident

    def want(self, adapter: int) -> bool:
        """Let an adapter that is not resident be loaded. Returns False if every slot is in use."""
        if adapter in self._loading:
            return True
        slot = self.take_slot()
        if not slot:
            return False
        self._loading[adapter] = slot
        self._wanted[adapter] = slot
        return True

    def take_slot(self) -> int:
        """Return a free slot, if need be of the adapter used longest ago; 0 if all are in use."""
        if self._free:
            return self._free.pop()
        for adapter in self._resident:
            if not self._users[adapter]:
                return self._resident.pop(adapter)
        return 0

    def take_wanted(self) -> dict[int, int]:
        """Return the adapters to load, with the slot of each; each is returned once."""
        wanted, self._wanted = self._wanted, {}
        return wanted

    def place(self, adapter: int, slot: int) -> None:
        """Note that a slot, which was taken for it, holds an adapter now."""
        if slot in self._free:
            self._free.remove(slot)
        self._loading.pop(adapter, None)
        self._resident[adapter] = slot

    def failed(self, adapter: int) -> None:
        """Give back the slot of an adapter that cannot be loaded."""
        self._free.append(self._loading.pop(adapter))

    def forget(self, adapter: int) -> int:
        """Free the slot of an adapter that no sequence will use again; return it, or 0."""
        assert not self._users[adapter]
        slot = self._resident.pop(adapter, 0)
        if slot:
            self._free.append(slot)
        return slot

    def hold(self, adapter: int) -> int:
        """Note that a sequence begins to run; return the slot of its adapter."""
        if not adapter:
            return 0
        slot = self._resident.pop(adapter)
        self._resident[adapter] = slot
        self._users[adapter] += 1
        return slot

    def release(self, adapter: int) -> None:
        """Note that a sequence runs no longer."""
        if adapter:
            self._users[adapter] -= 1

    def check(self, running: Counter[int]) -> None:
        """Assert the invariants, given the running sequences of each adapter."""
        taken = [*self._resident.values(), *self._loading.values(), *self._free]
        assert sorted(taken) == list(range(1, self.num_slots + 1)), "adapter slots"
        assert +self._users == running, "users of adapters"
        assert not self._resident.keys() & self._loading.keys()
