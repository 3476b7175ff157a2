"""The messages of the lens, which crosses the boundary that `engine/protocol/` documents.

A lens computes one text apart from all requests and returns what the model does inside: attention
weights, the residual stream, and predictions. Arrays are bytes of little-endian float32.
"""

from __future__ import annotations

from typing import Literal

from msgspec import field

from engine.protocol.generate import Image
from engine.protocol.message import Message, Record, TokenIds

MAX_LENS_TOKENS = 1024  # of a text
MAX_LENS_IMAGE_TOKENS = 2048  # of a text for a model that sees, as one picture may have 1,100
MAX_STATE_BYTES = 4 << 20  # the state traces of one lens
# Attention weights of one lens: 32 heads of the longest text. Weights of all layers are kept
# together up to a smaller limit; those of a longer text one layer at a time.
MAX_LENS_BYTES, MAX_TOGETHER_BYTES = 68 << 20, 40 << 20
THUMB = 32  # most rows and columns of a thumbnail
MAX_LENS_WAIT = 10.0  # seconds that a lens waits for requests before it is refused
MAX_LOGIT_POSITIONS = 64
MAX_EMBEDDINGS = 32
Stack = Literal["encoder", "decoder", "cross"]
SublayerKind = Literal["attention", "recurrent", "cross", "mlp", "per-layer input"]


class LensRequest(Message, frozen=True):
    """Look into the computation of `tokens`: at most Ready.max_lens_tokens of them.

    For an encoder-decoder, `source` is the encoder prompt and `tokens` are the decoder's. With
    `embeddings` the answer has only the cosine similarities of the token embeddings of `tokens`.
    The engine computes it in pieces between steps, while no request waits. Abort drops it.
    """

    id: int  # from the same numbers as those of requests
    tokens: TokenIds
    source: TokenIds = field(default_factory=list)
    positions: tuple[int, ...] = ()  # tokens with a logit lens, at most MAX_LOGIT_POSITIONS
    top: int = 10  # number of tokens in a prediction
    attention: bool = True  # whether the answer has AttentionWeights
    # The layers whose weights and state traces are kept, as the model numbers them. None: all
    # weights if they fit into MAX_TOGETHER_BYTES, else none. Likewise traces and MAX_STATE_BYTES.
    layers: tuple[int, ...] | None = None
    predictions: bool = True  # whether the answer has them
    states: bool = True  # whether the answer has StateTraces
    embeddings: bool = False
    images: tuple[Image, ...] = ()  # of `tokens`, in their order


class HeadSummaries(Record, frozen=True):
    """Summaries of the heads of a layer over a whole text.

    `thumbs` has a byte round(255 sqrt(w)) for the largest weight w of each cell. `flatness` is the
    mean entropy of the rows, each divided by that of equal weights.

    The others are means over queries i > 0 of a decoder, as in Elhage et al., A Mathematical
    Framework for Transformer Circuits (2021), and Olsson et al. (arXiv 2209.11895): the weight on
    token i - 1, the weight on token 0, and the weight on tokens before i that follow an earlier
    occurrence of token i. The last mean is that of tokens with such an occurrence.
    """

    thumb_rows: int
    thumb_columns: int
    thumbs: bytes  # [heads, thumb_rows, thumb_columns]
    flatness: tuple[float, ...]
    previous: tuple[float, ...] = ()
    first: tuple[float, ...] = ()
    induction: tuple[float, ...] = ()  # empty without a repeated token


class AttentionWeights(Record, frozen=True):
    """The attention weights of one layer's heads, [heads, queries, keys].

    In the stack "decoder" row i of a head has only its first i + 1 keys: later ones are not seen,
    or in Gemma 3 are the rest of the image that token i shows.
    `scores` are those before the softcap; they are empty without one. Both are empty for a layer
    whose weights are not kept.
    """

    stack: Stack
    layer: int  # its number in the stack, which may have other layers
    heads: int
    queries: int
    keys: int
    weights: bytes
    window: int | None = None
    softcap: float | None = None
    scores: bytes = b""
    summary: HeadSummaries | None = None


class Update(Record, frozen=True):
    """A sublayer's output r joins the residual stream s: sqrt(var(r) / (var(r) + var(s))).

    The variances are those of all features of all tokens, of all but the first token, and of each
    token.
    """

    stack: Stack  # never "cross": such layers are parts of the decoder
    layer: int
    kind: SublayerKind
    scale: float
    scale_after_first: float  # NaN for a single token
    scales: bytes  # [tokens]


class NormSizes(Record, frozen=True):
    """The root mean square of each token before and after a norm, [tokens] each."""

    stack: Stack
    name: str  # the module's
    before: bytes
    after: bytes


class StateTrace(Record, frozen=True):
    """The state of a recurrent layer behind each token, [heads, tokens] each.

    `norms` are those of the state of a head. `strengths` are the factors on what a token writes,
    and `decays` those on the state before it. Both are empty for a layer that keeps only the last
    inputs of a convolution, as one head. All are empty for a layer whose trace is not kept.
    """

    layer: int | None  # None: before the first layer
    heads: int
    norms: bytes
    strengths: bytes = b""
    decays: bytes = b""


class Prediction(Record, frozen=True):
    """The most likely next tokens after `position`, read from the stream after `layer` layers."""

    layer: int
    position: int
    entropy: float  # bits
    top: tuple[tuple[int, float], ...]  # (token id, probability), most likely first
    # Probability and rank (from 1) of the token that follows; None at the last position.
    actual: tuple[float, int] | None = None


class LensResult(Message, frozen=True):
    """The answer to a LensRequest.

    `error` is "busy" if requests waited for MAX_LENS_WAIT seconds, "large" if the weights of the
    wanted layers exceed MAX_LENS_BYTES or their traces MAX_STATE_BYTES, and "failed" if the
    engine's log has the reason; nothing else is set then.
    Encoders have no predictions. `logit_lens` has one prediction for each layer, from 0, and each
    position of the request; `predictions` are those of all positions after the last layer.
    """

    id: int
    attention: list[AttentionWeights] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    norms: list[NormSizes] = field(default_factory=list)
    states: list[StateTrace] = field(default_factory=list)  # of a model with recurrent layers
    predictions: list[Prediction] = field(default_factory=list)
    logit_lens: list[Prediction] = field(default_factory=list)
    cosines: bytes = b""  # [tokens, tokens]
    error: Literal["", "busy", "large", "failed"] = ""
