"""PromptRecord: the hashes of one prompt's blocks and parts. It holds no text and no tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from engine.protocol.generate import Image
from server.generation.chat_prompt import Chat
from server.text import exact_json
from server.text.tools import Tool

RECORD_BYTES = 1024  # of Python's objects for one record, besides its arrays
SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """The hashes of one prompt.

    They are those of Python for bytes: 64 bits, with a key that differs in each process. Blocks are
    those of the prefix cache, without the last one if it is not full.
    """

    adapter: int  # its number; 0: the base model alone
    salt: int
    thinking: int  # effort, switch and budget of the thoughts
    options: int  # arguments of the chat template
    tools: int
    system: int
    messages: array[int]  # behind the system message
    blocks: array[int]
    block_size: int
    num_tokens: int
    day: int  # when it was rendered: some templates write the date

    @property
    def size(self) -> int:
        """The bytes of memory that it takes, rounded up."""
        return RECORD_BYTES + 8 * (len(self.messages) + len(self.blocks))

    @property
    def has_no_tools(self) -> bool:
        return self.tools == _hash([])

    @property
    def has_no_system(self) -> bool:
        return self.system == _hash(None)

    @property
    def num_skippable_blocks(self) -> int:
        """The most blocks that the cache could give: the last token is always computed."""
        return max(self.num_tokens - 1, 0) // self.block_size


def prompt_record(
    chat: Chat, ids: Sequence[int], block_size: int, salt: str, adapter: int
) -> PromptRecord:
    """Return the record of a prompt; `ids` are its tokens. Takes as long as tokenising a tenth."""
    images = () if chat.images is None else chat.images.placed(ids, salt)
    system, messages = split_system(_with_digests(chat.messages, images))
    thinking = chat.thinking
    return PromptRecord(
        adapter=adapter,
        salt=hash(salt),
        thinking=hash((thinking.effort, thinking.is_on, thinking.budget)),
        options=_hash(chat.arguments),
        tools=_hash([tool.for_template for tool in shown_tools(chat)]),
        system=_hash(system),
        messages=array("q", map(_hash, messages)),
        blocks=array("q", _block_hashes(ids, block_size, images)),
        block_size=block_size,
        num_tokens=len(ids),
        day=datetime.now().toordinal(),
    )


def shown_tools(chat: Chat) -> Sequence[Tool]:
    """Return the tools that the model sees."""
    return () if chat.tool_use.mode == "none" else chat.tool_use.tools


def split_system(messages: Sequence[dict[str, Any]]) -> tuple[Any, Sequence[dict[str, Any]]]:
    """Return the content of the leading system message, or None, and the other messages."""
    if messages and messages[0]["role"] in SYSTEM_ROLES:
        return messages[0]["content"], messages[1:]
    return None, messages


def num_shared_blocks(one: PromptRecord, other: PromptRecord) -> int:
    """Return how many blocks both prompts begin with."""
    if (one.adapter, one.salt) != (other.adapter, other.salt):
        return 0
    shared = 0
    for mine, its in zip(one.blocks, other.blocks, strict=False):
        if mine != its:
            break
        shared += 1
    return shared


def _hash(value: Any) -> int:
    return hash(exact_json.text(value))


def _with_digests(
    messages: Sequence[dict[str, Any]], images: Sequence[Image]
) -> Sequence[dict[str, Any]]:
    """Return messages whose image parts name their image; otherwise all pictures would be equal."""
    if not images:
        return messages
    digests = iter([image.digest.hex() for image in images])
    return [
        {
            **message,
            "content": [
                {**part, "image": next(digests)} if part["type"] == "image" else part
                for part in message["content"]
            ],
        }
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _block_hashes(ids: Sequence[int], size: int, images: Sequence[Image]) -> Iterator[int]:
    """Yield a hash of each full block, and of the images that it shows.

    Equal prefixes have equal blocks, so none is chained.
    """
    tokens = array("i", ids)
    data = tokens.tobytes()
    width = size * tokens.itemsize
    for index in range(len(ids) // size):
        start = index * size
        shown = [image.digest for image in images if image.overlaps(start, start + size)]
        yield hash((data[index * width : (index + 1) * width], *shown))
