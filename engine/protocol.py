"""Every message that crosses between the API process and the engine process.

This file is the documentation of that boundary: frozen msgspec structs, one tagged union per
direction, msgpack on the wire, no pickle. All times are CLOCK_MONOTONIC seconds, which two
processes of one host may compare. Request ids are integers the client makes and never reuses.
"""

from __future__ import annotations

import signal
from typing import Literal

import msgspec

TELL_STACKS = signal.SIGUSR1  # no message: the engine writes where its threads stand to stderr
FinishReason = Literal["stop", "length", "error"]
Pooling = Literal["cls", "mean", "last"]
ModelKind = Literal["decoder", "encoder", "encoder-decoder"]
# Why the last bits of logits depend on what shares a step: the CPU's matrix unit, an old oneDNN, or
# weights that are not prepacked. None: they do not, as far as is known.
Uneven = Literal["amx", "onednn", "unpacked"] | None
TokenIds = list[int]


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=True):
    """A tagged record; fields travel in the order they are written here."""


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A part of a message."""


class SamplingParams(Record, frozen=True):
    """How one sequence is sampled and when it stops. Already validated by the server.

    Order of application: repetition, presence and frequency penalties, logit bias, suppression of
    stop tokens before `min_tokens`, temperature, then top-k, top-p and min-p on the tempered
    distribution. Noise is a function of (seed, position, token) and of nothing else.
    """

    max_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0  # the server draws one where the client gave none
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # the model's end tokens are among them unless ignored
    logprobs: int = -1  # -1: none; k: the sampled token's and the k most likely ones'
    prompt_logprobs: int = -1  # likewise of each token of the prompt after the first


class TokenLogprobs(Record, frozen=True):
    """Log-probabilities of the model's own distribution, before penalties and temperature."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


class GenerateRequest(Message, frozen=True):
    """Continue `prompt` as `params` say. A lower `priority` is served earlier, then FCFS.

    For an encoder–decoder `source` is what its encoder reads, and `prompt` how the answer begins.
    """

    id: int
    prompt: TokenIds
    params: SamplingParams
    arrival: float  # when the HTTP request came in
    priority: int = 0
    salt: str = ""  # tenant: prefixes are shared only between requests of equal salt
    source: TokenIds = []

    @property
    def size(self) -> int:
        """Tokens to be computed before the first new one."""
        return len(self.prompt) + len(self.source)


class EmbedRequest(Message, frozen=True):
    """Encode `tokens` and pool their hidden states into one vector."""

    id: int
    tokens: TokenIds
    pooling: Pooling
    arrival: float
    priority: int = 0

    @property
    def size(self) -> int:
        """Tokens to be computed."""
        return len(self.tokens)


class Abort(Message, frozen=True):
    """The client no longer wants these; unknown or finished ids are ignored."""

    ids: list[int]


class Shutdown(Message, frozen=True):
    """End the engine now; whatever still runs is dropped."""


class Progress(Message, frozen=True):
    """Loading goes on: `stage` is a short present participle, `fraction` runs from 0 to 1."""

    stage: str
    fraction: float


class KVGroup(Record, frozen=True):
    """Layers that keep the KV of the same tokens and so share one block table per sequence.

    `window` counts the keys a query sees, its own included; blocks behind it are given back.
    """

    layers: int
    window: int | None = None  # None: all keys
    cross: bool = False  # the keys are those of the source, written once

    def first_block(self, position: int, block_size: int) -> int:
        """The first block that a query at `position`, or at any later one, sees."""
        return 0 if self.window is None else max(0, position - self.window + 1) // block_size

    def most_blocks(self, tokens: int, step_tokens: int, block_size: int) -> int:
        """Blocks held at once by a sequence of `tokens`, computed by up to `step_tokens` a step."""
        blocks = -(-tokens // block_size)
        if self.window is None:
            return blocks
        return min(blocks, -(-(self.window - 1 + step_tokens) // block_size) + 1)


class MemoryEntry(Record, frozen=True):
    """What takes memory on the device, in bytes: foreseen from shapes, and found after loading."""

    what: str
    foreseen: int
    found: int | None = None  # None: not measured on this device


class Ready(Message, frozen=True):
    """The engine serves. Facts of the loaded model, all in tokens, blocks, bytes and seconds."""

    architecture: str
    kind: ModelKind
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int  # usable blocks, each of block_size tokens of one of kv_groups
    max_num_seqs: int
    max_num_batched_tokens: int
    parameters: int
    weight_bytes: int
    kv_cache_bytes: int
    load_seconds: float
    attention_backend: str
    threads: int
    kv_groups: tuple[KVGroup, ...]
    start_token: int | None = None  # with which an encoder–decoder's answer begins
    embedding_size: int = 0  # numbers in an encoder's vectors
    uneven: Uneven = None
    emulated: bool = False  # many rows take longer than in fp32: the CPU has no such matmul
    memory: tuple[MemoryEntry, ...] = ()


class TokenOutput(Record, frozen=True):
    """One sampled token. `token` is -1 and `finish` is "error" where sampling was impossible."""

    id: int
    token: int
    finish: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    # With the first token, where asked for: of each token of the prompt after the first.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class EmbedOutput(Record, frozen=True):
    """One text's vector as little-endian float32; `finish` is "error" where it is not finite."""

    id: int
    vector: bytes
    finish: FinishReason = "stop"


class Admission(Record, frozen=True):
    """A request left the waiting queue for the first time."""

    id: int
    at: float
    cached_tokens: int  # of prompt and source, whose KV came from the prefix cache


class Prefill(Record, frozen=True):
    """A step computed tokens [start, start + count) of a request's prompt, or of what it had before
    it was preempted."""

    id: int
    start: int
    count: int


class EngineStats(Record, frozen=True):
    """The engine after one step. Counters count from the engine's start and never fall."""

    step: int = 0
    running: int = 0
    waiting: int = 0
    blocks_held: int = 0
    blocks_cached: int = 0  # free to reuse, content still known
    blocks_total: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens looked up
    prefix_hits: int = 0  # prompt tokens found
    step_seconds: float = 0.0  # wall time of this step
    step_prefill_tokens: int = 0  # of prompts, and of texts encoded
    step_decode_tokens: int = 0
    cpu_contention: float | None = None  # share of their time that threads queued for a core
    cpu_contended: bool = False  # so much that they sleep where they wait for each other


class StepOutputs(Message, frozen=True):
    """What one retired step produced; also sent without tokens when only the stats changed."""

    at: float
    tokens: list[TokenOutput]
    admitted: list[Admission]
    stats: EngineStats
    embeddings: list[EmbedOutput] = []
    prefills: list[Prefill] = []


class Rejected(Message, frozen=True):
    """The engine refuses one request; `code` is an OpenAI error code."""

    id: int
    code: str
    message: str


class Notice(Message, frozen=True):
    """A line for the server's log; `level` is one of `logging`'s."""

    level: int
    text: str


class Fatal(Message, frozen=True):
    """The engine is about to exit: `message` for the user, `detail` for the log."""

    message: str
    detail: str = ""  # a traceback
    config_error: bool = False


ToEngine = GenerateRequest | EmbedRequest | Abort | Shutdown
FromEngine = Progress | Ready | StepOutputs | Rejected | Notice | Fatal
