"""Messages survive encoding and decoding, and malformed messages are refused."""

from __future__ import annotations

import contextlib
import random
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol import adapters, embed, failure, generate, lens, outputs, ready, watch
from engine.protocol.generate import Abort, GenerateRequest, SamplingParams, TokenLogprobs
from engine.protocol.message import Message
from engine.protocol.outputs import EngineStats, StepOutputs, TokenOutput
from engine.protocol.wire import FromEngine, ToEngine
from tests.support.thorough import examples

DIRECTIONS = [ToEngine, FromEngine]
MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
encode = msgspec.msgpack.Encoder().encode
REQUEST = GenerateRequest(7, [1, 2, 3], SamplingParams(16, seed=-(2**63)), 12.5, -1, "tenant")


def strategy(kind: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for values of a type annotation of a message."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind)
        return st.builds(kind, **{f: strategy(hints[f]) for f in kind.__struct_fields__})
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return st.lists(strategy(arguments[0]), max_size=4)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(strategy(arguments[0]), max_size=4).map(tuple)
    if origin is dict:
        return st.dictionaries(*map(strategy, arguments), max_size=3)
    if origin is tuple:
        return st.tuples(*map(strategy, arguments))
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if arguments:  # a union
        return st.one_of(*map(strategy, arguments))
    simple: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(-(2**63), 2**63 - 1),
        float: st.floats(allow_nan=False),
        str: st.text(max_size=20),
        bytes: st.binary(max_size=16),
        bool: st.booleans(),
        type(None): st.none(),
    }
    return simple[kind]


@settings(derandomize=True, max_examples=examples(200), deadline=None)
@given(message=st.one_of(*map(strategy, DIRECTIONS)))
def test_message_encoded_and_decoded_is_equal(message: Any) -> None:
    direction = ToEngine if isinstance(message, ToEngine) else FromEngine
    assert msgspec.msgpack.decode(encode(message), type=direction) == message


def test_message_is_frozen_and_tagged_with_its_name() -> None:
    with pytest.raises(AttributeError):
        REQUEST.priority = 3  # type: ignore[misc]
    wire = msgspec.msgpack.decode(encode(REQUEST))
    assert wire[:3] == ["GenerateRequest", 7, [1, 2, 3]]


def test_messages_have_unique_names_and_one_direction_each() -> None:
    modules = (adapters, embed, failure, generate, lens, outputs, ready, watch)
    names = [value for module in modules for value in vars(module).values()]
    structs = [value for value in names if isinstance(value, type)]
    messages = {s for s in structs if issubclass(s, Message)} - {Message}
    travelling = [s for union in DIRECTIONS for s in typing.get_args(union)]
    assert set(travelling) == messages
    assert len(travelling) == len({s.__name__ for s in travelling})


def test_decode_message_of_other_direction_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(encode(Abort([1])), type=FromEngine)


@pytest.mark.parametrize(
    "wire",
    [
        ["GenerateRequest", "7", [1], [16], 0.0],
        ["GenerateRequest", 7, [1.5], [16], 0.0],
        ["GenerateRequest", 7, [1], ["many"], 0.0],
        ["GenerateRequest", 7, [1]],
        ["Abort"],
        ["Abort", None],
        ["Unknown", 1],
        ["__reduce__", "os.system"],
        [],
        {"type": "Abort", "ids": [1]},
        2**64 - 1,
        None,
    ],
    ids=str,
)
def test_decode_malformed_message_is_refused(wire: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(encode(wire), type=ToEngine)


@pytest.mark.parametrize("direction", DIRECTIONS, ids=["to engine", "from engine"])
def test_decode_random_or_damaged_frame_raises_only_decode_errors(direction: Any) -> None:
    """For any input the decoder returns a message or raises one of MALFORMED."""
    rng = random.Random(6)
    decode = msgspec.msgpack.Decoder(direction).decode
    tops = tuple((token, -0.5) for token in range(20))
    outputs = [TokenOutput(1, 2, "stop", TokenLogprobs(-0.1, tops))]
    whole = [
        encode(REQUEST),
        encode(Abort(list(range(300)))),
        encode(StepOutputs(1.0, outputs, [], EngineStats())),
    ]
    for number in range(20_000):
        frame = bytearray(rng.choice(whole))
        if number % 2:
            frame = bytearray(rng.randbytes(rng.randrange(60)))
        elif number % 4:
            del frame[rng.randrange(len(frame)) :]
        else:
            for _ in range(rng.randint(1, 4)):
                frame[rng.randrange(len(frame))] = rng.randrange(256)
        with contextlib.suppress(*MALFORMED):
            decode(bytes(frame))


@pytest.mark.parametrize("direction", DIRECTIONS, ids=["to engine", "from engine"])
@pytest.mark.parametrize(
    "frame",
    [b"\x91" * 100_000, b"\x81" * 100_000, b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"],
    ids=["nested arrays", "nested maps", "an array of 4 Gi", "4 GiB of bytes"],
)
def test_decode_frame_declaring_huge_sizes_is_refused(direction: Any, frame: bytes) -> None:
    with pytest.raises(MALFORMED):
        msgspec.msgpack.decode(frame, type=direction)
