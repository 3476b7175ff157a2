"""The messages between the API process and the engine process that requests need.

A message is a frozen msgspec struct, encoded as msgpack (`engine/message.py`); nothing is pickled.
Each direction has one tagged union: `ToEngine` and `FromEngine` in `engine/wire.py`. They also have
the messages of the inspectors: `engine/watch_messages.py` and `engine/lens_messages.py`.
`engine/client/channel.py` carries the messages over zmq and numbers them, so that a lost or
repeated message is detected.

The engine sends Progress while it loads the model and Ready when it can serve. The API process
then sends GenerateRequest and EmbedRequest messages. The engine sends one StepOutputs per step. A
request gets outputs until one of them has `finish` set, or Rejected if the engine refuses it; one
with `explain` also gets Explained messages before. Abort ends requests early, Shutdown ends the
engine, and Fatal says why an engine ends by itself.

All times are CLOCK_MONOTONIC seconds, which two processes on one host can compare. Request ids are
integers that the client assigns and never reuses.
"""

from __future__ import annotations

import signal
from typing import Literal

from msgspec import field

from engine.ablation import Ablation
from engine.batch_variance import BatchVariance
from engine.message import Message, Record, TokenIds

# Not a message but a signal: the engine process writes the stacks of its threads to stderr.
DUMP_STACKS = signal.SIGUSR1
FinishReason = Literal["stop", "length", "error"]
Pooling = Literal["cls", "mean", "last"]
ModelKind = Literal["decoder", "encoder", "encoder-decoder"]


class Grammar(Record, frozen=True):
    """Which answers are allowed: a grammar in llguidance's JSON format."""

    source: str
    end_token_ids: tuple[int, ...]  # the model's end tokens, allowed where an answer may end
    param: str  # the request's field that asks for it, named in errors


class SamplingParams(Record, frozen=True):
    """How one sequence is sampled and when it stops. The server has validated the values.

    Order of application: repetition, presence and frequency penalties, logit bias, the allowed
    tokens, suppression of stop tokens before `min_tokens`, the banned sequences, the grammar's
    mask, temperature, then top-k, top-p and min-p on the distribution after temperature. The noise
    is a function of (seed, position, token) alone.
    """

    max_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
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

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of the answer, also of one to explain."""
        return self.params.grammar if self.explain is None else self.explain.params.grammar

    @property
    def size(self) -> int:
        """Number of tokens to compute before the first new one."""
        return len(self.prompt) + len(self.encoder_prompt)


class EmbedRequest(Message, frozen=True):
    """Encode `tokens` and pool their hidden states into one vector.

    `priority` orders requests as in GenerateRequest.
    """

    id: int
    tokens: TokenIds
    pooling: Pooling
    arrival: float  # when the HTTP request arrived
    priority: int = 0
    tenant: str = ""

    @property
    def size(self) -> int:
        """Number of tokens to compute."""
        return len(self.tokens)


class CacheLookup(Message, frozen=True):
    """The question how many tokens of a request's prompt and source are in the prefix cache.

    StepOutputs.lookups has the answer. The engine holds no blocks for it.
    """

    id: int  # from the same numbers as those of requests
    prompt: TokenIds
    salt: str = ""
    encoder_prompt: TokenIds = field(default_factory=list)
    adapter: int = 0


class Abort(Message, frozen=True):
    """Drop the requests with these ids; unknown and finished ids are ignored."""

    ids: list[int]


class Shutdown(Message, frozen=True):
    """End the engine now and drop all unfinished requests."""


class Progress(Message, frozen=True):
    """Progress of loading the model."""

    stage: str  # a short phrase that starts with a present participle, such as "loading weights"
    fraction: float  # from 0 to 1


class KVGroup(Record, frozen=True):
    """A group of layers that keep the KV of the same tokens and share one block table per sequence.

    A query sees the last `window` keys, including its own. Blocks before the window are released.
    """

    layers: int
    window: int | None = None  # None: a query sees all keys
    is_cross: bool = False  # cross-attention KV of the encoder prompt, written once

    def first_visible_block(self, position: int, block_size: int) -> int:
        """Index of the first block that a query at `position` or later sees."""
        return 0 if self.window is None else max(0, position - self.window + 1) // block_size

    def max_blocks(self, tokens: int, step_tokens: int, block_size: int) -> int:
        """Most blocks that a sequence of `tokens` holds at once.

        A step computes at most `step_tokens` of its tokens.
        """
        blocks = -(-tokens // block_size)
        if self.window is None:
            return blocks
        return min(blocks, -(-(self.window - 1 + step_tokens) // block_size) + 1)


class MemoryEntry(Record, frozen=True):
    """Bytes that one use of device memory takes: planned from shapes, and measured after loading.

    `name` is the use, for example "weights" or "KV cache".
    """

    name: str
    planned: int
    measured: int | None = None  # None: not measured on this device


class Ready(Message, frozen=True):
    """The engine can serve: facts about the loaded model and its limits."""

    architecture: str
    kind: ModelKind
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int  # tokens of prompt and answer together
    block_size: int  # tokens per KV block
    num_blocks: int  # usable blocks; one holds block_size tokens of one of `kv_groups`
    max_num_seqs: int
    max_num_batched_tokens: int
    parameters: int  # number of model parameters
    weight_bytes: int  # of all ranks, as is the next field
    kv_cache_bytes: int
    load_seconds: float
    attention_backend: str
    threads: int  # CPU threads of the engine
    kv_groups: tuple[KVGroup, ...]
    start_token: int | None = None  # first decoder token of an encoder-decoder
    embedding_size: int = 0  # length of an encoder's vectors; 0 for other kinds of model
    batch_variance: BatchVariance = None
    emulates_bf16: bool = False  # bf16 without bf16 instructions: many rows are slower than fp32
    max_num_encoder_tokens: int = 0  # token budget of the encoder's part of a step
    context_cost: float = 0.0  # of a prompt token, for each token of context; the rest costs 1
    memory: tuple[MemoryEntry, ...] = ()  # of rank 0
    other_ranks: tuple[tuple[MemoryEntry, ...], ...] = ()  # the memory of ranks 1, 2, ...
    max_lens_tokens: int = 0  # the longest text of a LensRequest
    # Heads of each layer that an Ablation may name; empty if the model or its ranks take none.
    ablatable_heads: tuple[int, ...] = ()
    quantization: str | None = None  # int8, int4 or fp8, if linear weights are kept so
    kv_cache_dtype: str | None = None  # int8 or fp8, if keys and values are kept so
    weights: str = ""  # their identity: engine/checkpoint/identity.py
    speculative_model: str | None = None  # the name of the model that drafts tokens
    max_loras: int = 0  # adapters in memory at once; 0: the model takes none
    compiled_kernels: int = 0  # of this CPU, which an earlier start had not left
    compile_seconds: float = 0.0  # not part of `load_seconds`

    @property
    def tensor_parallel_size(self) -> int:
        """Number of processes that compute the model together."""
        return 1 + len(self.other_ranks)


class TokenOutput(Record, frozen=True):
    """One sampled token of a request.

    If its logits or its prompt logprobs are not finite, `token` is -1 and `finish` is "error".
    """

    id: int
    token: int
    finish: FinishReason | None = None  # None: more tokens follow
    logprobs: TokenLogprobs | None = None
    # Only with the first token, if requested: one entry per prompt token after the first.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class EmbedOutput(Record, frozen=True):
    """The vector of one text; `finish` is "error" if the vector is not finite."""

    id: int
    vector: bytes  # little-endian float32
    finish: FinishReason = "stop"


class Admission(Record, frozen=True):
    """A request left the waiting queue for the first time."""

    id: int
    at: float  # launch of its first step
    cached_tokens: int  # tokens of prompt and source whose KV came from the prefix cache


class PrefillChunk(Record, frozen=True):
    """A step computed tokens [start, start + count) of a request.

    They are part of its prompt, or of the tokens it had when it was preempted.
    """

    id: int
    start: int
    count: int


# Why a token could not be drawn: values of Explained.cuts.
KEPT, CUT_TOP_K, CUT_TOP_P, CUT_MIN_P, CUT_BAN, CUT_GRAMMAR = range(6)


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


class EngineStats(Record, frozen=True):
    """State of the engine after one step.

    `step`, `preemptions`, `prefix_queries`, `prefix_hits`, `drafts`, `drafted` and `drafted_right`
    are counters: they count from the engine's start and never decrease.
    """

    step: int = 0
    running: int = 0  # requests
    waiting: int = 0  # requests
    blocks_held: int = 0
    blocks_cached: int = 0  # available for allocation, with content that can still be reused
    blocks_total: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # tokens of prompts and sources looked up in the prefix cache
    prefix_hits: int = 0  # tokens of prompts and sources found there
    drafts: int = 0  # runs of tokens assumed by speculation
    drafted: int = 0  # tokens of these runs
    drafted_right: int = 0  # those of them that the model sampled
    step_seconds: float = 0.0  # wall time of this step
    step_prefill_tokens: int = 0  # tokens of prompts and of encoded texts
    step_decode_tokens: int = 0  # without drafted ones that were wrong
    # Named measurements of the runner, exported by /metrics.
    gauges: dict[str, float] = field(default_factory=dict)


class StepOutputs(Message, frozen=True):
    """Results of one retired step. Sent without results if only the stats have changed."""

    at: float  # when the results were on the host
    tokens: list[TokenOutput]
    admitted: list[Admission]
    stats: EngineStats
    embeddings: list[EmbedOutput] = field(default_factory=list)
    prefills: list[PrefillChunk] = field(default_factory=list)
    # Tokens in the prefix cache, by the id of the CacheLookup.
    lookups: dict[int, int] = field(default_factory=dict)
    num_handled: int = 0  # messages that the engine has taken since its start


class Rejected(Message, frozen=True):
    """The engine refuses one request; `code` is an OpenAI error code."""

    id: int
    code: str
    message: str
    param: str | None = None  # the request's field at fault


class Notice(Message, frozen=True):
    """A line for the server's log; `level` is a level of the `logging` module."""

    level: int
    text: str


class Fatal(Message, frozen=True):
    """The engine is about to exit because of an error."""

    message: str  # for the user
    detail: str = ""  # a traceback for the log
    config_error: bool = False  # the configuration or the checkpoint cannot be served
