"""The targets: where their inputs come from, and what must hold for every input."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import msgspec
import zmq

from engine.checkpoint.bounded_json import read_json
from engine.checkpoint.folder import model_folder, safetensors_header
from engine.checkpoint.gguf.tensors import read_tensors
from engine.checkpoint.stored import stored_tensors
from engine.client.channel import NUMBER, UNREADABLE, _Inbox
from engine.errors import ConfigError
from engine.models.registry import model_class
from engine.protocol.embed import EmbedRequest
from engine.protocol.failure import Fatal
from engine.protocol.generate import Abort, GenerateRequest, SamplingParams, TokenLogprobs
from engine.protocol.outputs import Admission, EngineStats, Rejected, StepOutputs, TokenOutput
from engine.protocol.wire import FromEngine, ToEngine
from server.text.chat_template import TemplateError
from server.text.load_template import load_template
from server.text.load_tokenizer import load_tokenizer
from server.text.tokenizer_errors import TokenizerError
from tests.fuzz import (
    adapters,
    batch_files,
    batches,
    grammars,
)
from tests.fuzz.mutate import (
    MAX_VALUES,
    has_more_values,
    mutate_bytes,
    mutate_json,
    mutate_json_bytes,
)
from tests.fuzz.server import served
from tests.fuzz.target import MAX_SECONDS, Check, Target
from tests.support.prometheus import metric
from tests.support.reference_data import found

# ---- HTTP ----------------------------------------------------------------------------------------

MESSAGE = {"role": "user", "content": "Hi"}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [MESSAGE], "max_tokens": 3}),
    ("/v1/chat/completions", {"messages": [MESSAGE], "stream": True, "n": 2, "logprobs": True}),
    (
        "/v1/chat/completions",
        {
            "model": "tiny",
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                {"role": "assistant", "content": "yes", "tool_calls": None},
                MESSAGE,
            ],
            "temperature": 0.5, "top_p": 0.9, "stop": ["x", "y"], "seed": 3, "min_p": 0.1,
            "logit_bias": {"5": 1}, "frequency_penalty": 0.1, "stop_token_ids": [3],
            "stream_options": {"include_usage": True}, "chat_template_kwargs": {"a": 1},
        },
    ),
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 3, "logprobs": 2, "echo": True}),
    ("/v1/completions", {"prompt": [[1, 2], [3]], "stream": True, "prompt_logprobs": 1}),
    (
        "/v1/messages",
        {
            "max_tokens": 3,
            "messages": [
                MESSAGE,
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "1", "content": [
                        {"type": "text", "text": "b"},
                    ], "is_error": True},
                ]},
            ],
            "system": [{"type": "text", "text": "x-anthropic-billing-header: a;\nBe"}],
            "stop_sequences": ["x"], "thinking": {"type": "enabled", "budget_tokens": 5},
        },
    ),
    ("/v1/messages", {"messages": [MESSAGE], "max_tokens": 3, "stream": True}),
    (
        "/v1/messages/count_tokens",
        {
            "messages": [MESSAGE],
            "tools": [{"name": "f", "input_schema": {"type": "object"}, "strict": True}],
            "tool_choice": {"type": "tool", "name": "f"},
            "output_config": {"effort": "high", "format": None},
        },
    ),
    ("/tokenize", {"prompt": "Hi", "return_token_strs": True}),
    ("/tokenize", {"messages": [MESSAGE], "add_generation_prompt": False}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "float"}),
    ("/v1/score", {"text_1": "a", "text_2": ["b"]}),
]  # fmt: skip


def body_seeds() -> list[bytes]:
    """The path on the first line, the body behind it."""
    return [path.encode() + b"\n" + json.dumps(body).encode() for path, body in BODIES]


def mutate_body(random: Random, data: bytes) -> bytes:
    path, _, body = data.partition(b"\n")
    return path + b"\n" + mutate_json_bytes(random, body)


def check_stream(text: str) -> None:
    """Check that a stream is complete, in OpenAI's format or in Anthropic's."""
    events = [event.rpartition("data: ")[2] for event in text.strip().split("\n\n")]
    last = events.pop()
    assert last == "[DONE]" or json.loads(last) == {"type": "message_stop"}
    assert all(isinstance(json.loads(event), dict) for event in events)


@contextlib.asynccontextmanager
async def body_opened(folder: Path) -> AsyncIterator[Check]:
    async with served(folder) as (running, tracebacks):

        async def check(data: bytes) -> None:
            path, _, body = data.partition(b"\n")
            headers = {"content-type": "application/json"}
            answer = await running.http.post(path.decode(), content=body, headers=headers)
            assert answer.status_code < 500, answer.text
            kind = answer.headers["content-type"]
            if answer.status_code != 200:
                return  # `serving` checks the body of every error
            if kind.startswith("text/event-stream"):
                check_stream(answer.text)
            else:
                assert isinstance(answer.json(), dict)
            assert not tracebacks.found, tracebacks.found

        yield check
        assert await running.metric("num_requests_running") == 0


HTTP_SEEDS = [
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET http://localhost/health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    b"HEAD /version HTTP/1.0\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\nOrigin: http://a\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b'Content-Length: 15\r\n\r\n{"prompt":"Hi"}',
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b'Transfer-Encoding: chunked\r\n\r\nf\r\n{"prompt":"Hi"}\r\n0\r\n\r\n',
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b'Expect: 100-continue\r\nContent-Length: 15\r\n\r\n{"prompt":"Hi"}',
]
HTTP_WORDS = [
    *(b"\r\n", b"\r\n\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b"0\r\n\r\n", b"ffffffff\r\n"),
    *(b"Content-Length: 3\r\n", b"Content-Length: -1\r\n", b"Transfer-Encoding: chunked\r\n"),
    *(b"Transfer-Encoding: gzip\r\n", b"Host: a\r\n", b"Connection: close\r\n", b"HTTP/1.1"),
    *(b"HTTP/2.0", b"%00", b"%2e%2e", b"//", b"?", b"#", b"Authorization: Bearer \xff\r\n"),
    *(b"Upgrade: websocket\r\n", b"Connection: upgrade\r\n", b"Expect: 100-continue\r\n"),
    *(b"X-Request-Id: \x1b[31m\r\n", b"GET / HTTP/1.1\r\n\r\n", b"A: " + b"b" * 70_000 + b"\r\n"),
]
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


@contextlib.asynccontextmanager
async def http_opened(folder: Path) -> AsyncIterator[Check]:
    async with served(folder) as (running, tracebacks):

        async def check(data: bytes) -> None:
            reader, writer = await asyncio.open_connection(*running.address)
            answer = b""
            with contextlib.suppress(ConnectionError):
                writer.write(data)
                writer.write_eof()
                async with asyncio.timeout(MAX_SECONDS):
                    answer = await reader.read(-1)
            writer.close()
            statuses = [int(status) for status in STATUS.findall(answer)]
            # 505: a version of HTTP that is not served.
            assert all(status < 500 or status == 505 for status in statuses), answer[:500]
            assert not answer or STATUS.match(answer), answer[:500]
            assert not tracebacks.found, tracebacks.found

        yield check
        assert (await running.http.get("/health")).status_code == 200
        assert metric((await running.http.get("/metrics")).text, "num_requests_running") == 0


# ---- messages between the processes --------------------------------------------------------------


def channel_seeds() -> list[bytes]:
    params = SamplingParams(max_tokens=3, stop_token_ids=(1,), logit_bias={5: 1.0})
    logprobs = TokenLogprobs(-0.5, ((3, -0.1), (4, -0.2)))
    outputs = [TokenOutput(1, 5, None, logprobs), TokenOutput(2, 6, "stop")]
    messages: list[ToEngine | FromEngine] = [
        GenerateRequest(1, [1, 2, 3], params, 0.0),
        EmbedRequest(2, [1, 2], 0.0),
        Abort([1, 2]),
        StepOutputs(0.0, outputs, [Admission(1, 0.0, 0)], EngineStats()),
        Rejected(1, "context_length_exceeded", "too long"),
        Fatal("The engine failed."),
    ]
    return [NUMBER.pack(0) + msgspec.msgpack.encode(message) for message in messages]


@contextlib.asynccontextmanager
async def channel_opened(folder: Path) -> AsyncIterator[Check]:
    context: zmq.Context[Any] = zmq.Context()

    inboxes: list[_Inbox[Any]] = [_Inbox(context, kind) for kind in (ToEngine, FromEngine)]

    async def check(data: bytes) -> None:
        for inbox in inboxes:
            inbox._due = 0
            with contextlib.suppress(*UNREADABLE):
                inbox.read(data)

    yield check
    context.destroy(0)


# ---- checkpoints ---------------------------------------------------------------------------------


def header_seeds() -> list[bytes]:
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [16, 24]},
    }
    text = json.dumps(header).encode()
    return [len(text).to_bytes(8, "little") + text + bytes(24)]


def mutate_header(random: Random, data: bytes) -> bytes:
    """Change the JSON and keep its length right, or change any byte."""
    if random.random() < 0.4:
        return mutate_bytes(random, data)
    length = int.from_bytes(data[:8], "little")
    text = mutate_json_bytes(random, data[8 : 8 + length])
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


@contextlib.asynccontextmanager
async def header_opened(folder: Path) -> AsyncIterator[Check]:
    file = folder / "model.safetensors"

    async def check(data: bytes) -> None:
        file.write_bytes(data)
        try:
            header = safetensors_header(file)
        except ConfigError:
            return
        assert isinstance(header, dict)
        with contextlib.suppress(ConfigError):
            stored_tensors([file])

    yield check


def gguf_seeds() -> list[bytes]:
    """A small model with each kind of setting, and with a tensor of each encoding."""
    import tempfile

    import gguf
    import numpy as np

    from tests.support.gguf_files import add_tensor, add_tokenizer
    from tests.support.tiny_gguf import write_tiny

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "a.gguf")
        writer = gguf.GGUFWriter(file, "llama")
        writer.add_block_count(1)
        writer.add_context_length(64)
        writer.add_embedding_length(32)
        writer.add_feed_forward_length(32)
        writer.add_head_count(2)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(1e4)
        add_tokenizer(writer, 270, add_bos_token=True, bos_token_id=1, scores=[0.0] * 270)
        for kind in ("F32", "F16", "Q8_0", "Q4_0", "Q5_1"):
            add_tensor(writer, f"blk.0.attn_q.{kind}", np.ones((4, 32), np.float32), kind)
        writer.add_tensor("rope_freqs.weight", np.ones(16, np.float32))
        for step in ("header", "kv_data", "tensors"):
            getattr(writer, f"write_{step}_to_file")()
        writer.close()
        whole = write_tiny(Path(folder, "b.gguf"), "gemma3", tensors={"blk.0.attn_q.bias": (32,)})
        return [file.read_bytes(), whole.read_bytes()]


@contextlib.asynccontextmanager
async def gguf_opened(folder: Path) -> AsyncIterator[Check]:
    file = folder / "a.gguf"
    cache = folder / "cache"

    async def check(data: bytes) -> None:
        file.write_bytes(data)
        with patch("engine.checkpoint.gguf.folder.cache_folder", lambda kind: cache / kind):
            with contextlib.suppress(ConfigError):
                for tensor in read_tensors([file]).values():
                    assert tensor.read().nbytes <= 16 * len(data)  # fp32 of 4-bit numbers
            with contextlib.suppress(ConfigError):
                config = read_json(model_folder(str(file)) / "config.json")
                _, _, build = model_class(config)
                build.read_config(config)
        shutil.rmtree(cache, ignore_errors=True)

    yield check


def config_seeds() -> list[bytes]:
    return [file.read_bytes() for file in found("checkpoints/*/config.json")]


@contextlib.asynccontextmanager
async def config_opened(folder: Path) -> AsyncIterator[Check]:
    file = folder / "config.json"

    async def check(data: bytes) -> None:
        file.write_bytes(data)
        try:
            config = read_json(file)
            _, _, build = model_class(config)
            build.read_config(config)
        except ConfigError:
            pass

    yield check


def tokenizer_seeds() -> list[bytes]:
    from tests.server.conftest import byte_tokenizer

    small = byte_tokenizer().to_str().encode()
    parts = [
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}]}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"\\p{L}+|\\s"},
                           "behavior": "Isolated", "invert": False}},
        {"decoder": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always",
                     "split": True}},
    ]  # fmt: skip
    document = json.loads(small)
    return [small, *(json.dumps({**document, **part}).encode() for part in parts)]


def mutate_tokenizer(random: Random, data: bytes) -> bytes:
    """Change the programs more often than the vocabulary."""
    try:
        document = dict(json.loads(data))
    except (ValueError, TypeError, RecursionError):
        document = {}
    if random.random() < 0.3 or not document:
        return mutate_json_bytes(random, data)
    part = random.choice(("normalizer", "pre_tokenizer", "decoder", "added_tokens"))
    changed = mutate_json(random, document.get(part))
    if not has_more_values(changed, MAX_VALUES):
        document[part] = changed
    try:
        return json.dumps(document).encode("utf-8", "replace")
    except (ValueError, RecursionError):  # too deep, or an integer of too many digits
        return data


@contextlib.asynccontextmanager
async def tokenizer_opened(folder: Path) -> AsyncIterator[Check]:
    from tests.server.conftest import write_model

    model = write_model(folder / "model")
    texts = ("", "a", "Hello wörld! 123 👍\n", "a" * 60 + "b", " " * 80, "<s></s>")

    async def check(data: bytes) -> None:
        (model / "tokenizer.json").write_bytes(data)
        began = time.monotonic()
        try:
            tokenizer = load_tokenizer(model)
            for text in texts:
                tokenizer.decode(tokenizer.encode(text))
                tokenizer.offsets(text)
        except (ConfigError, TokenizerError):
            pass
        assert time.monotonic() - began < MAX_SECONDS

    yield check
    shutil.rmtree(model)


def template_seeds() -> list[bytes]:
    from tests.support.template_attacks import ATTACKS

    files = [file for file in found("chat-templates/*.jinja") if file.stat().st_size < 6000]
    sources = [file.read_bytes() for file in files]
    # Few attacks, because most take as long as they may.
    return sources + [source.encode() for _, source in ATTACKS[::20]]


JINJA = [
    *(b"{{ ", b" }}", b"{% ", b" %}", b"{%- for a in messages %}", b"{% endfor %}", b"{% if a %}"),
    *(b"{% endif %}", b"{% set a = ", b"| tojson", b"| length", b"messages", b".content", b"[0]"),
    *(b" ~ ", b" + ", b" * 9999", b" ** 99", b"namespace(", b"range(9999)", b"loop.index", b"'x'"),
    *(
        b"{% macro m() %}",
        b"{% endmacro %}",
        b"{{ m() }}",
        b"__class__",
        b"|attr('x')",
        b".format(",
    ),
    *(
        b"raise_exception('x')",
        b"strftime_now('%Y')",
        b"{# ",
        b" #}",
        b"{% raw %}",
        b"{% block a %}",
    ),
]


@contextlib.asynccontextmanager
async def template_opened(folder: Path) -> AsyncIterator[Check]:
    async def check(data: bytes) -> None:
        (folder / "chat_template.jinja").write_bytes(data)
        began = time.monotonic()
        template = None
        try:
            template = load_template(folder, None)
            assert template is not None
            text = await template.render_async([{"role": "user", "content": "x" * 1000}])
            assert isinstance(text, str)
        except (ConfigError, TemplateError):
            pass
        finally:
            if template:
                template.close()
        assert time.monotonic() - began < MAX_SECONDS

    yield check


TARGETS = [
    Target("body", body_seeds, mutate_body, body_opened),
    Target("http", lambda: HTTP_SEEDS, partial(mutate_bytes, words=HTTP_WORDS), http_opened),
    *batch_files.TARGETS,
    batches.TARGET,
    Target("channel", channel_seeds, mutate_bytes, channel_opened),
    Target("safetensors", header_seeds, mutate_header, header_opened),
    Target("gguf", gguf_seeds, mutate_bytes, gguf_opened),
    Target("config", config_seeds, mutate_json_bytes, config_opened),
    Target("tokenizer", tokenizer_seeds, mutate_tokenizer, tokenizer_opened),
    grammars.TARGET,
    adapters.TARGET,
    Target("template", template_seeds, partial(mutate_bytes, words=JINJA), template_opened),
]
BY_NAME = {target.name: target for target in TARGETS}
