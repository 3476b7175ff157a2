"""The interface of a storage format of quantised checkpoints: one class in one file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Self

from engine.checkpoint.quantized.groups import Grouped
from engine.checkpoint.quantized.layer import OF_MODULE, Layer, Names
from engine.checkpoint.quantized.settings import Settings
from engine.ops.quantize import CodesForm


class StorageFormat(ABC):
    """How a checkpoint stores the weight [outputs, inputs] of a layer in several tensors.

    Instances are frozen and hold the settings of config.json. `formats.py` lists the classes. The
    tensors of a layer are found by the endings of their names; each has one of `endings`.
    """

    kind: ClassVar[str]  # what users see; `quant_method` of config.json
    endings: ClassVar[frozenset[str]]  # of the tensors of a layer, such as qweight and scales
    marks: ClassVar[frozenset[str]]  # endings that only quantised layers have
    unused: ClassVar[frozenset[str]] = frozenset()  # endings that are left out: of activations
    names: ClassVar[Names] = OF_MODULE
    has_kv_scales: bool = False  # whether there are scales of the KV cache, which are left out

    @classmethod
    def suffixes(cls) -> tuple[str, ...]:
        """Return what follows a layer's name in the names of its tensors: .qweight, .scales."""
        return tuple(cls.names.separator + ending for ending in sorted(cls.endings | cls.unused))

    @classmethod
    @abstractmethod
    def of(cls, settings: Settings) -> Self:
        """Read the settings. Raises ConfigError for a variant that is not served."""

    @abstractmethod
    def check(self, layer: Layer) -> None:
        """Check the names, dtypes and shapes of a layer's tensors, before any is read.

        Raises ConfigError if one is missing, or if they do not fit each other or the settings.
        """

    @abstractmethod
    def form(self, layer: Layer) -> CodesForm | None:
        """Return how the codes of a checked layer are kept in memory.

        None: there is no kernel for them, and the weight is dequantised while it is loaded.
        """

    @abstractmethod
    def read(self, layer: Layer) -> Grouped:
        """Return the weight [outputs, inputs] of a checked layer; of experts one below another.

        Codes are uint8, int8 or e4m3, scales any float. Raises ConfigError for values that the
        format does not allow.
        """
