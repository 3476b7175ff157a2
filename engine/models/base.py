"""The Model protocol that every architecture implements, and helpers that read config.json."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import nn

from engine.attention.batch import ForwardBatch
from engine.checkpoint.sentence_modules import PoolingMode
from engine.checkpoint.weight_map import WeightMap
from engine.device.ranks import Ranks
from engine.errors import ConfigError, one_line
from engine.protocol.generate import Image

Number = TypeVar("Number", int, float)


class Facts(Protocol):
    """The values of an architecture's config that the runner reads."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden(self) -> int:
        """Width of the hidden states."""

    @property
    def max_positions(self) -> int | None:
        """Longest context of the model in tokens; None if positions are unbounded."""


class Model(Protocol):
    """A model over ragged tokens, built on the meta device from a Hugging Face config.

    Every implementation is an nn.Module with `__init__(config, *, max_positions, dtype)`.
    `max_positions` is the number of positions that will be served. A decoder has `forward` and
    `logits`, an encoder has `encode`, and an encoder–decoder has all three. The registry states
    the kind of each architecture.
    """

    config: Facts

    @staticmethod
    def read_config(config: dict[str, Any]) -> Facts:
        """Return the frozen config. Raises ConfigError if config.json is not supported."""

    def encode(self, batch: ForwardBatch) -> torch.Tensor:
        """Return hidden states [T, hidden] of whole texts; write the cross-attention KV."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return hidden states [T, hidden] of all tokens, after the final norm."""

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits [L, vocab_size] of `hidden` [L, hidden].

        They are fp32, except where oneDNN computes them (see LMHead). They are written into `out`
        [L, vocab_size] fp32 if the kernels can, and the result is another tensor if not.
        """

    def weight_map(self) -> WeightMap: ...


@runtime_checkable
class Predicts(Protocol):
    """A model whose checkpoints may have a prediction head, which drafts for it."""

    @property
    def names_head(self) -> bool:
        """Whether config.json says that there is one."""

    def prediction_head(self) -> PredictionHead:
        """Return a new head on torch's default device.

        Raises ConfigError if config.json describes one that is not supported.
        """


class PredictionHead(Protocol):
    """An nn.Module with one attending layer: its KV is that of the model's next layer."""

    def __call__(
        self, ids: torch.Tensor, hidden: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """Return hidden states [T, hidden], whose logits predict the tokens behind `ids` [T].

        `ids` are the tokens behind those of the batch, whose hidden states are `hidden`
        [T, hidden], after the final norm: of the model, or of the head for drafted tokens.
        """

    def weight_map(self) -> WeightMap: ...


class ImageEncoder(Protocol):
    """Makes the embeddings of images for a decoder whose prompts may show some."""

    dtype: torch.dtype  # of the embeddings
    width: int  # of an embedding: `hidden`, times the number of layers that get one

    def encode(
        self, pixels: torch.Tensor, image: Image
    ) -> Generator[None, int | None, torch.Tensor]:
        """Yield after each unit of work, and return the embeddings [N, width] of an image.

        `pixels` [tiles, height, width, 3] uint8 are those of `image`. N is the number of its
        tokens.
        """


def image_encoder(model: object) -> ImageEncoder | None:
    """Return the encoder of the images in a model's prompts; None if it sees none."""
    return getattr(model, "vision", None)


def image_token_bytes(encoder: ImageEncoder) -> int:
    """Return the bytes of the embedding of one token of an image."""
    return encoder.width * encoder.dtype.itemsize


@runtime_checkable
class SeesWhole(Protocol):
    """A decoder in which the tokens of an image see all of it, so that one step computes them."""

    @property
    def image_tokens(self) -> int:
        """Most tokens of an image, or of a run of its tokens; 0 if the config says otherwise."""


def whole_image_tokens(model: object) -> int:
    """Return the most tokens of an image that one step computes whole; 0 if steps may cut them."""
    return model.image_tokens if isinstance(model, SeesWhole) else 0


def has_image_axes(model: Model) -> bool:
    """Return whether tokens of images have a position for each of three axes."""
    return getattr(model.config, "sections", None) is not None


class Classifier(Protocol):
    """A Model with a head behind the pooling: texts become logits of labels."""

    head_pooling: PoolingMode  # how the states of a text become what its head reads
    num_labels: int
    passed_over: int | None  # the token that "lasttoken" does not read at the end of a text

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        """Return logits [N, num_labels] of pooled states [N, hidden], both in the model's dtype."""


def classifier_of(model: Model) -> Classifier | None:
    """Return the model as a Classifier if it has a head, else None."""
    return cast(Classifier, model) if hasattr(model, "classify") else None


def fold_sums(model: Model, ranks: Ranks) -> None:
    """Let the norms of a model add up the ranks' parts of what the layers before them compute.

    Models that do not declare how stay as they are: their layers add up.
    """
    if hasattr(model, "fold_sums"):
        model.fold_sums(ranks)


def on_meta_device(
    build: Any, config: dict[str, Any], max_positions: int, dtype: torch.dtype
) -> nn.Module:
    """Return the model of a class from `model_class`, without memory for its parameters.

    Raises ConfigError if config.json is not supported, or has sizes that no memory could hold.
    """
    try:
        with torch.device("meta"):
            module: nn.Module = build(config, max_positions=max_positions, dtype=dtype)
    except RuntimeError as error:  # more bytes than exist, or than torch can count
        raise ConfigError(
            f"config.json has sizes that cannot be laid out: {one_line(error)}"
        ) from error
    return module


def required(config: dict[str, Any], key: str) -> Any:
    """Return config[key]. Raises ConfigError if the key is missing or null."""
    if config.get(key) is None:
        raise ConfigError(f"config.json lacks {key!r}, which this architecture needs.")
    return config[key]


def positive(
    config: dict[str, Any], key: str, default: int | None = None, *, below: int = 2**31
) -> int:
    """Return config[key], or `default` if the key is missing or null.

    Raises ConfigError if there is no default, or if the value is not an integer above 0 and below
    `below`. The default limit exceeds any dimension that a tensor can have.
    """
    value = config.get(key)
    if value is None:
        value = required(config, key) if default is None else default
    if type(value) is not int or not 0 < value < below:
        raise ConfigError(
            f"config.json has {key} = {value!r}; it must be a whole number above 0 and below "
            f"{below}."
        )
    return value


def conv_width(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """Like `positive`, for a causal convolution: of one input only, it would have no state."""
    width = positive(config, key, default, below=2**16)
    if width == 1:
        raise ConfigError(
            f"config.json has {key} = 1; convolutions over 2 inputs or more are served."
        )
    return width


def layer_count(
    config: dict[str, Any], key: str = "num_hidden_layers", default: int | None = None
) -> int:
    """Like `positive`, with a limit for layers: they are built one by one in Python."""
    return positive(config, key, default, below=10_000)


def label_count(config: dict[str, Any]) -> int:
    """Return the number of labels of a head, as transformers counts them: 2 by default."""
    labels = config.get("id2label")
    if labels is None:
        return positive(config, "num_labels", 2, below=2**16)
    if not isinstance(labels, dict) or not labels:
        raise ConfigError(
            f"config.json has id2label = {labels!r:.100}; it must be names by number."
        )
    return len(labels)


def positive_float(config: dict[str, Any], key: str) -> float:
    """Return config[key] as a float. Raises ConfigError if it is not a finite number above zero."""
    value = required(config, key)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ConfigError(f"config.json has {key} = {value!r:.40}; it must be a number above 0.")
    return float(value)


def shared_by(config: dict[str, Any], key: str, heads_key: str) -> tuple[int, int]:
    """Return (config[key], number of heads). Raises ConfigError unless heads divide the size."""
    size, heads = positive(config, key), positive(config, heads_key)
    if size % heads:
        raise ConfigError(f"config.json has {key} {size}, which is not divisible by {heads} heads.")
    return size, heads


def attention_heads(config: dict[str, Any]) -> tuple[int, int, int]:
    """Return (query heads, key/value heads, head_dim). Raises ConfigError if they do not fit."""
    heads = positive(config, "num_attention_heads")
    kv_heads = positive(config, "num_key_value_heads", heads)
    one_each = max(positive(config, "hidden_size") // heads, 1)
    head_dim = positive(config, "head_dim", one_each, below=2**16)  # it sizes rotary tables
    if heads % kv_heads:
        raise ConfigError(
            f"config.json has {heads} attention heads and {kv_heads} key/value heads; the first "
            "number must be a multiple of the second."
        )
    if head_dim % 2:
        raise ConfigError(f"config.json has head_dim = {head_dim}; it must be even.")
    return heads, kv_heads, head_dim


def experts_per_token(config: dict[str, Any], count: int) -> int:
    """Return `num_experts_per_tok`. Raises ConfigError if it is above the count of experts."""
    chosen = positive(config, "num_experts_per_tok")
    if chosen > count:
        raise ConfigError(
            f"config.json has num_experts_per_tok {chosen}, but only {count} experts."
        )
    return chosen


def nullable(
    config: dict[str, Any], key: str, read: Callable[[dict[str, Any], str], Number]
) -> Number | None:
    """Return read(config, key), or None for null. Raises ConfigError if the key is missing."""
    if key not in config:
        raise ConfigError(f"config.json lacks {key!r}; add it, with null for none.")
    return None if config[key] is None else read(config, key)


def layer_kinds(
    config: dict[str, Any],
    default: Sequence[str],
    kinds: Sequence[str],
    spellings: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """Return which of `kinds` each layer is: `layer_types`, or `default` if there are none.

    `spellings` maps other names of kinds to those. Raises ConfigError if the list is malformed.
    """
    given, layers = config.get("layer_types"), layer_count(config)
    if given is None:
        return tuple(default)
    known = dict(zip(kinds, kinds, strict=True)) | dict(spellings or {})
    is_list = isinstance(given, list) and len(given) == layers
    if not is_list or any(type(kind) is not str or kind not in known for kind in given):
        raise ConfigError(
            f"config.json has layer_types = {given!r}; it must be a list of {' or '.join(kinds)} "
            f"for each of {layers} layers."
        )
    return tuple(known[kind] for kind in given)


def with_attention(kinds: tuple[str, ...], attends: str) -> tuple[str, ...]:
    """Return the kinds of layers. Raises ConfigError if no layer has the kind `attends`.

    Tokens are counted by blocks of KV, and a model without attention has none.
    """
    if attends not in kinds:
        raise ConfigError(
            "config.json has no attention layer in layer_types; Penstock serves recurrent layers "
            "together with at least one attention layer."
        )
    return kinds


def layer_windows(
    config: dict[str, Any], window: int | None, slides: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """Return the attention window of each layer; None means full attention.

    `layer_types` says which layers have a window. Older configs lack it; for them `slides(index)`
    decides. Raises ConfigError if `layer_types` is malformed or the window is missing.
    """
    kinds = ("full_attention", "sliding_attention")
    types = layer_kinds(config, [kinds[slides(i)] for i in range(layer_count(config))], kinds)
    if window is None and "sliding_attention" in types:
        raise ConfigError("config.json has sliding_attention layers without a sliding_window.")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def expect(config: dict[str, Any], key: str, *allowed: Any) -> None:
    """Raise ConfigError if config[key] is present and is none of the `allowed` values."""
    if key in config and config[key] not in allowed:
        raise ConfigError(
            f"config.json has {key} = {config[key]!r}; supported for this architecture: "
            f"{', '.join(repr(a) for a in allowed)}."
        )
