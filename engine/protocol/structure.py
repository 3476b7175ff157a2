"""The structure of a model, as the engine finds it: boxes, what they read, and their parameters."""

from __future__ import annotations

from msgspec import field

from engine.protocol.message import Record


class AttentionFacts(Record, frozen=True):
    """The attention of one layer; see AttentionSpec."""

    kind: str  # causal, full or cross
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # None: all keys
    softcap: float | None = None
    has_relative_bias: bool = False


class ModelBox(Record, frozen=True):
    """A module that the model computes, or an operation of its own: add, norm or softcap.

    Boxes are in the order of computation; a container comes before its parts. Of blocks that are
    equal, only the first has boxes, and `layers` has the indices of all of them.
    """

    name: str  # path of the module in the model; of an operation, such as "PATH.add 3"
    kind: str  # class of the module, or the operation
    parameters: int = 0  # of the module itself, without those of its parts
    shape: tuple[int, ...] = ()  # of the output, for each token
    inputs: tuple[int, ...] = ()  # indices of the boxes whose output or parameters it reads
    layers: tuple[int, ...] = ()  # only of blocks
    detail: str = ""
    attention: AttentionFacts | None = None


class ModelStructure(Record, frozen=True):
    """All boxes of a model. Parameters, times `layers` within a block, sum to the model's."""

    boxes: tuple[ModelBox, ...] = ()
    config: dict[str, str] = field(default_factory=dict)  # the model's, as text
    attention: dict[str, AttentionFacts] = field(default_factory=dict)  # of all layers, by name
    # Tokens in which each pair of dimensions turns once, by the name of the position embedding.
    wavelengths: dict[str, tuple[float, ...]] = field(default_factory=dict)
