"""Requests that generate, what they ask of sampling, and how a past answer is explained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import field, structs

from engine.protocol.message import Message, Record, TokenIds


class Ablation(Record, frozen=True):
    """Attention heads and layers that add nothing to the residual stream of a request's tokens.

    A head's output is zero before the output projection, whose bias stays. A layer adds neither its
    attention nor its MLP. Layers and heads are counted from 0. An encoder stays as it is.
    """

    heads: tuple[tuple[int, int], ...] = ()  # (layer, head)
    layers: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[int, ...]:
        """Numbers that differ for different ablations, below -1 at first: no token id is."""
        heads = [number for pair in sorted(set(self.heads)) for number in pair]
        return (-2, len(heads), *heads, *sorted(set(self.layers)))


FinishReason = Literal["stop", "length", "error"]


class Grammar(Record, frozen=True):
    """Which answers are allowed: a grammar in llguidance's JSON format."""

    source: str  # `engine.protocol.thoughts` may add the limit of the thoughts
    end_token_ids: tuple[int, ...]  # the model's end tokens, allowed where an answer may end
    param: str  # the request's field that asks for it, named in errors


class SamplingParams(Record, frozen=True):
    """How one sequence is sampled and when it stops. The server has validated the values.

    How requests set the values from `temperature` to `repetition_penalty` is in
    `sampling_parameters.py`.

    Order of application: repetition, presence and frequency penalties, logit bias, the allowed
    tokens, suppression of stop tokens before `min_tokens`, the banned sequences, the grammar's
    mask, temperature, then the cuts in the order of their fields, on the distribution after
    temperature. The noise is a function of (seed, position, token) alone.
    """

    max_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_n_sigma: float = -1.0  # 0 and less keep all
    top_k: int = 0  # 0 keeps all
    typical_p: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, value added to its logit)
    allowed_token_ids: tuple[int, ...] = ()  # no other token is sampled; empty: all are allowed
    seed: int = 0  # drawn by the server if the client gave none
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # includes the model's end tokens unless ignored
    logprobs: int = -1  # -1: none; k: those of the sampled token and of the k most likely tokens
    prompt_logprobs: int = -1  # the same for each prompt token after the first
    grammar: Grammar | None = None  # the answer follows it
    # Token sequences that the answer does not contain, unless no other token could follow.
    banned_sequences: tuple[tuple[int, ...], ...] = ()
    logprob_token_ids: tuple[int, ...] = ()  # `logprobs` tokens, in place of the most likely ones
    # Logprobs are of the distribution that the token is drawn from; cut tokens have -inf.
    final_logprobs: bool = False


class Explain(Record, frozen=True):
    """A request to explain how the tokens of a past answer were drawn.

    The request's `prompt` is that of the answer and all tokens of `answer` but the last. The
    request's own `params` only end it after one token.
    """

    answer: TokenIds
    params: SamplingParams  # of the answer
    num_candidates: int  # likeliest tokens to return with each token
    max_per_step: int = 64  # tokens that a step explains: all requests wait for its end

    def first_row(self, length: int) -> int:
        """Return the index of the first token whose logits explain one.

        `length` is the number of tokens in the request's prompt.
        """
        return length - len(self.answer)


class TokenLogprobs(Record, frozen=True):
    """Log-probabilities under the model's own distribution, before penalties and temperature."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first
    rank: int | None = None  # the place of the token among all, from 1; only of prompt tokens


class Image(Record, frozen=True):
    """A picture in a prompt, resized and cut into tiles of equal size; one tile is all of it.

    Its tokens get their embeddings from the model's image encoder.
    """

    digest: bytes  # 16 bytes: BLAKE2b of all that the encoder reads; equal ones are encoded once
    runs: tuple[tuple[int, int], ...]  # its tokens: (first in the prompt, count), in order
    pixels: bytes = b""  # uint8 [tiles, height, width, 3], RGB; empty where only its place matters
    shape: tuple[int, int, int] = (0, 0, 0)  # tiles, height and width in pixels
    # Rows and columns: of the tiles without the overview, or of the embeddings of one tile.
    grid: tuple[int, int] = (0, 0)
    size: tuple[int, int] = (0, 0)  # height and width of the picture before it was resized

    @property
    def without_pixels(self) -> Image:
        return structs.replace(self, pixels=b"")

    @property
    def num_tokens(self) -> int:
        return sum([count for _, count in self.runs])

    @property
    def end(self) -> int:
        """The first token behind the image."""
        return sum(self.runs[-1])

    @property
    def position_shift(self) -> int:
        """Positions less tokens of an image on three axes, which is one grid; 0 or below."""
        return max(self.grid) - self.num_tokens

    def overlaps(self, start: int, end: int) -> bool:
        """Return whether one of the tokens [start, end) shows the image."""
        return any(first < end and start < first + count for first, count in self.runs)


class GenerateRequest(Message, frozen=True):
    """Generate tokens after `prompt` according to `params`.

    Requests with a lower `priority` value are served earlier; equal ones first come, first served.
    For an encoder-decoder, `source` is the encoder prompt and `prompt` holds the decoder's first
    tokens.
    """

    id: int
    prompt: TokenIds
    params: SamplingParams
    arrival: float  # when the HTTP request arrived
    priority: int = 0
    salt: str = ""  # only requests with an equal salt share cached prefixes
    encoder_prompt: TokenIds = field(default_factory=list)
    explain: Explain | None = None
    adapter: int = 0  # 0: none
    tenant: str = ""  # the owner of the request's API key: a limit may be a share for each tenant
    ablation: Ablation | None = None  # None: the whole model
    images: tuple[Image, ...] = ()  # in the order of the prompt

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of the answer, also of one to explain."""
        return self.params.grammar if self.explain is None else self.explain.params.grammar

    @property
    def size(self) -> int:
        """Number of tokens to compute before the first new one."""
        return len(self.prompt) + len(self.encoder_prompt)

    @property
    def pixel_bytes(self) -> int:
        """Bytes of its images' pixels."""
        return sum([len(image.pixels) for image in self.images])

    @property
    def without_pixels(self) -> GenerateRequest:
        return structs.replace(self, images=tuple(image.without_pixels for image in self.images))

    def with_pixels(self, pixels: Sequence[bytes]) -> GenerateRequest:
        """Return the request with these pixels, one for each image. Raises ValueError."""
        pairs = zip(self.images, pixels, strict=True)
        images = tuple(structs.replace(image, pixels=given) for image, given in pairs)
        return structs.replace(self, images=images)


class CacheLookup(Message, frozen=True):
    """The question how many tokens of a request's prompt and source are in the prefix cache.

    StepOutputs.lookups has the answer. The engine holds no blocks for it.
    """

    id: int  # from the same numbers as those of requests
    prompt: TokenIds
    salt: str = ""
    encoder_prompt: TokenIds = field(default_factory=list)
    adapter: int = 0
    images: tuple[Image, ...] = ()  # their pixels do not matter


class Abort(Message, frozen=True):
    """Drop the requests with these ids; unknown and finished ids are ignored."""

    ids: list[int]


# Why a token could not be drawn: Explained.cuts has indices into CUT_CODES.
KEPT, CUT_TOP_K, CUT_TOP_P, CUT_MIN_P, CUT_BAN, CUT_GRAMMAR = range(6)
CUT_CODES = ("kept", "top_k", "top_p", "min_p", "ban", "grammar", "top_n_sigma", "typical_p")


class Explained(Message, frozen=True):
    """How one token of the answer of a request with `explain` was drawn. Entropies are in bits.

    The candidates are columns of equal length: the likeliest tokens after penalties; then up to 8
    banned ones that are among the model's likeliest; then the answer's token and the one drawn now,
    unless they came before.
    """

    id: int  # of the request
    index: int  # of the token in the answer
    drawn: int  # now; the answer's token, unless logits differ in their last bits
    rank: int  # of the answer's token under the model's own distribution, from 1
    entropy: float  # of the model's own distribution
    final_entropy: float  # of the distribution that the token is drawn from
    kept: int  # tokens that can be drawn
    mass: float  # their probability after temperature
    ids: list[int]  # of the candidates
    logits: list[float]  # the model's own
    raw: list[float]  # probabilities under the model's own distribution
    adjusted: list[float]  # after penalties, biases, bans and the grammar
    tempered: list[float]  # after temperature, before the cuts
    cuts: list[int]  # KEPT, or what removed the token first
    # The noise of the draw: the greatest `tempered / luck` of the kept tokens wins. Empty at
    # temperature 0, where nothing is drawn.
    lucks: list[float]
    is_forced: bool = False  # the grammar, or the limit of the thoughts, allowed no other token
