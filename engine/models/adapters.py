"""ModelAdapters: the LoRA adapters that are in the memory of one model, by slot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from engine.checkpoint.adapter.weights import LowRank, StoredAdapter
from engine.checkpoint.weight_map import WeightMap
from engine.config import AdapterSource
from engine.errors import ConfigError, listed
from engine.layers.linear import Linear
from engine.layers.lora import (
    LinearAdapters,
    LinearShape,
    PackedAdapters,
    PanelAdapters,
    StackedAdapters,
    Tokens,
)
from engine.models.base import Model
from engine.ops.kernels import Kernels
from engine.ops.lora import TokenAdapters


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """`num_slots` adapters of up to `rank`; the `sources` are loaded at start."""

    num_slots: int
    rank: int
    sources: tuple[AdapterSource, ...]
    shapes: dict[str, LinearShape]  # of every linear layer, by its name in the model
    is_packed: bool  # see engine/layers/lora.py

    @property
    def num_bytes(self) -> int:
        """The bytes of full slots, if every adapter has all layers and the largest rank."""
        total = 0
        for shape in self.shapes.values():
            width = len(shape.slices) * self.rank
            up = width if self.is_packed else self.rank
            total += (width * shape.inputs + up * shape.outputs) * shape.dtype.itemsize
        return total * self.num_slots


class Place(NamedTuple):
    """A linear layer that a module of the checkpoint fills, or one of its parts."""

    layer: str  # its name in the model
    rows: Mapping[str, slice | torch.Tensor]  # of the module's outputs, by the part that they fill
    outputs: int


# Adapters of each layer, by its name, as `LinearAdapters.prepare` returns them.
PreparedAdapter = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter that was read. `slot` is the one it was written to at start, or 0."""

    path: str
    stored: StoredAdapter
    weights: PreparedAdapter
    slot: int = 0

    def without_weights(self) -> LoadedAdapter:
        return replace(self, weights={})

    def check_same_files(self, before: LoadedAdapter) -> None:
        """Raise ConfigError if it was read from other files than `before`, which requests used."""
        if self.stored.stamp != before.stored.stamp:
            raise ConfigError(
                f"The files in {self.path} have changed since the adapter was loaded. Unload it, "
                "and load it again."
            )


Exchange = Callable[[str], list[str]]  # returns the texts of all ranks for that of this one
CHANGED = "The files in {} changed while they were read; load the adapter again."


class ModelAdapters:
    """Reads adapters in a thread, and writes them to slots between two steps.

    Create it before the weights are packed: only then the weight map is complete. All ranks of a
    model must load the same adapters in the same order.
    """

    def __init__(
        self,
        model: Model,
        module: nn.Module,
        plan: AdapterPlan,
        *,
        kernels: Kernels,
        is_packed: bool,
        exchange: Exchange = lambda own: [own],
    ) -> None:
        self.plan = plan
        self._exchange = exchange
        self._reader = ThreadPoolExecutor(1, "adapters")
        self._reads: dict[int, Future[LoadedAdapter]] = {}  # by adapter
        self._tokens = Tokens()
        self._places = _places(model.weight_map(), plan)
        self.at_start: list[LoadedAdapter] = []  # of the plan's sources
        self._layers: dict[str, LinearAdapters] = {}
        for name, shape in plan.shapes.items():
            layer = module.get_submodule(name)
            assert isinstance(layer, Linear)
            if is_packed and PanelAdapters.can_compute(shape, kernels):
                layer.adapters = PanelAdapters(shape, self._tokens, plan.num_slots, plan.rank)
            elif is_packed:
                layer.adapters = PackedAdapters(shape, self._tokens, plan.num_slots)
            else:
                layer.adapters = StackedAdapters(
                    shape, self._tokens, plan.num_slots, plan.rank, kernels
                )
            self._layers[name] = layer.adapters

    @property
    def num_bytes(self) -> int:
        """Bytes that are taken whether or not slots are filled."""
        return sum(layer.nbytes for layer in self._layers.values())

    @property
    def takes_groups(self) -> bool:
        """Whether a layer reads the groups of a step's tokens."""
        return any(layer.takes_groups for layer in self._layers.values())

    def load_sources(self) -> None:
        """Read the plan's adapters, and write the first of them to the slots.

        Raises ConfigError if one cannot be used.
        """
        for source in self.plan.sources:
            try:
                loaded = self.load(source.path)
            except ConfigError as error:
                raise ConfigError(f"--lora-modules {source.name}: {error}") from error
            if source.id <= self.plan.num_slots:
                self.write(source.id, loaded.weights)
                loaded = replace(loaded, slot=source.id)
            self.at_start.append(loaded.without_weights())

    def load(self, path: str) -> LoadedAdapter:
        """Read the adapter in a folder, in all ranks.

        Raises ConfigError in each of them if one cannot use it, or has read other files.
        """
        problem = ""
        failure: Exception | None = None
        try:
            loaded = self._load(path)
        except Exception as error:  # of any kind: the other ranks wait for this one
            problem = str(error) or type(error).__name__
            failure = error
        problems = [text for text in self._exchange(problem) if text]
        if failure is not None:
            raise failure
        if problems:
            raise ConfigError(problems[0])
        stamps = self._exchange(str(loaded.stored.stamp))
        if len(set(stamps)) > 1:
            raise ConfigError(CHANGED.format(path))
        return loaded

    def _load(self, path: str) -> LoadedAdapter:
        """Read the adapter in a folder. Raises ConfigError if it cannot be used."""
        try:
            stored = StoredAdapter.open(path)
            loaded = LoadedAdapter(path, stored, self._prepare(stored))
            if not stored.is_current:
                raise ConfigError(CHANGED.format(path))
            return loaded
        except (OSError, MemoryError, RuntimeError) as error:  # torch's for memory is the last one
            raise ConfigError(f"The adapter in {path} cannot be loaded: {error}") from error

    def _prepare(self, stored: StoredAdapter) -> PreparedAdapter:
        for name in stored.modules:
            self._check(stored, name)
        parts_of: dict[str, dict[str, LowRank]] = {}
        for name, module in stored.modules.items():
            place, (a, b) = self._places[name], module.read()
            for part, rows in place.rows.items():
                parts_of.setdefault(place.layer, {})[part] = LowRank(a, b[rows])
        return {layer: self._layers[layer].prepare(parts) for layer, parts in parts_of.items()}

    def _check(self, stored: StoredAdapter, name: str) -> None:
        folder, module = stored.config.folder, stored.modules[name]
        place = self._places.get(name)
        if place is None:
            known = sorted({known.rpartition(".")[2] for known in self._places})
            raise ConfigError(
                f"The adapter in {folder} is for {name}, which is no linear layer of this model; "
                f"its layers are {listed(known, 20)}."
            )
        due = (place.outputs, self.plan.shapes[place.layer].whole[1])
        if module.shape != due:
            raise ConfigError(
                f"The adapter in {folder} is for a weight of shape {list(module.shape)} in {name}; "
                f"this model's has {list(due)}."
            )
        if module.rank > self.plan.rank:
            raise ConfigError(
                f"The adapter in {folder} has rank {module.rank} in {name}; --max-lora-rank is "
                f"{self.plan.rank}."
            )

    # ---- while the model serves --------------------------------------------------------------

    def read(self, adapter: int, path: str) -> Future[LoadedAdapter]:
        """Begin to `load` an adapter in a thread. `place` must follow, even if that fails."""
        future = self._reads[adapter] = self._reader.submit(self.load, path)
        return future

    def place(self, adapter: int, slot: int) -> None:
        """Write an adapter that was read to a slot. Slot 0 drops it; adapter 0 clears the slot."""
        weights: PreparedAdapter = {}
        if adapter:
            read = self._reads.pop(adapter)
            if not slot:
                return
            weights = read.result().weights
        self.write(slot, weights)

    def close(self) -> None:
        self._reader.shutdown(wait=False, cancel_futures=True)

    @torch.inference_mode()
    def write(self, slot: int, prepared: PreparedAdapter) -> None:
        """Put an adapter into a slot, in place of the one before. Steps launched later use it."""
        for name, layer in self._layers.items():
            layer.write(slot, prepared.get(name))

    @contextmanager
    def applied(self, tokens: TokenAdapters) -> Iterator[None]:
        """Let the layers use the adapters of these tokens."""
        self._tokens.current = tokens
        try:
            yield
        finally:
            self._tokens.current = None


def _places(weight_map: WeightMap, plan: AdapterPlan) -> dict[str, Place]:
    """Return where each module of a checkpoint is, under each of its spellings."""
    places: dict[str, Place] = {}
    for name, target in weight_map.targets.items():
        layer = target.parameter.removesuffix(".weight")
        if layer not in plan.shapes:
            continue
        slices = plan.shapes[layer].whole_slices
        count = target.count(slices, plan.shapes[layer].whole[0])
        place = Place(layer, target.rows(slices), count)
        for spelling in weight_map.spellings(name):
            for prefix in weight_map.prefixes:
                module = (prefix + spelling).removesuffix(".weight")
                places[module] = place
    return places
