"""Difference: the first block of a prompt that an earlier prompt does not have, and what it holds.

The parts of both prompts are compared by their hashes. A changed part is the cause if it begins in
the prompt before the end of that block: templates order the parts in many ways, and some write a
date. Where a part begins is found by rendering the prompt again with a mark in that part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from server.api.prefixes.marks import MARK, mark_begin, mark_end, mark_tool
from server.api.prefixes.record import (
    SYSTEM_ROLES,
    PromptRecord,
    num_shared_blocks,
    shown_tools,
)
from server.generation.chat_prompt import Chat, chat_text
from server.generation.off_loop import off_loop
from server.http.errors import ApiError
from server.state import AppState
from server.text.chat_template import TemplateError
from server.text.tools import Tool, ToolUse, function_tool

OTHER_TOOL = function_tool(MARK, MARK, None, strict=None)
MODEL, SALT, TEXT, TOOLS, SYSTEM = "model", "cache_salt", "text", "tools", "system"
TEMPLATE = "template"  # a date, an option, or other text that no message and no tool has
Json = dict[str, Any]
Held = str | int  # one of these, or the index of a message as the template reads them


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt as a request has it."""

    chat: Chat
    text: str
    adds_special_tokens: bool
    record: PromptRecord


@dataclass(frozen=True)
class Difference:
    """The first block that differs, and what that costs. Tokens are counted in whole blocks."""

    block: int  # its index
    held: Held
    changed_thinking: bool  # between both prompts
    reusable_tokens: int  # of the earlier prompt, before the block
    lost_tokens: int  # that the cache could give if the prompts did not differ

    def where(self, message: Callable[[int], str]) -> dict[str, Any]:
        """Return where the difference is, as the answers of all routes have it.

        `message` returns the name of a message in the request, by its index.
        """
        held = message(self.held) if isinstance(self.held, int) else self.held
        return {"first_different_block": self.block, "held": held}


async def first_difference(
    state: AppState, prompt: RenderedPrompt, earlier: PromptRecord
) -> Difference | None:
    """Return where `prompt` leaves the blocks of `earlier`, or None if it loses none of them."""
    record = prompt.record
    shared = num_shared_blocks(record, earlier)
    whole = min(len(earlier.blocks), record.num_skippable_blocks)
    if shared >= whole:
        return None
    return Difference(
        block=shared,
        held=await _held(state, prompt, earlier, shared),
        changed_thinking=record.thinking != earlier.thinking,
        reusable_tokens=shared * record.block_size,
        lost_tokens=(whole - shared) * record.block_size,
    )


async def _held(state: AppState, prompt: RenderedPrompt, earlier: PromptRecord, block: int) -> Held:
    """Return what the first different block holds."""
    record = prompt.record
    if record.adapter != earlier.adapter:
        return MODEL
    if record.salt != earlier.salt:
        return SALT
    if not prompt.chat.messages:
        return TEXT
    changed = [*_changed(prompt, earlier)]
    if not changed:
        return TEMPLATE
    begin, end = await _range(state, prompt, block)
    starts = {part: await _start(state, prompt, earlier, part) for part in changed}
    before = {part: start for part, start in starts.items() if start <= begin}
    inside = {part: start for part, start in starts.items() if begin < start < end}
    # A part that begins in an earlier block ends before those that begin in this one.
    if before:
        return max(before, key=before.__getitem__)
    if inside:
        return min(inside, key=inside.__getitem__)
    if _template_changed(record, earlier):
        return TEMPLATE
    return min(starts, key=starts.__getitem__)  # it has moved what the template writes before it


def _template_changed(new: PromptRecord, old: PromptRecord) -> bool:
    """Return whether the template may write other text by itself."""
    return (new.options, new.thinking, new.day) != (old.options, old.thinking, old.day)


def _changed(prompt: RenderedPrompt, old: PromptRecord) -> Iterator[Held]:
    """Yield the parts that differ. Messages behind those of the earlier prompt do not."""
    new = prompt.record
    if new.tools != old.tools:
        yield TOOLS
    if new.system != old.system:
        yield SYSTEM
    for index, digest in enumerate(old.messages):
        if index >= len(new.messages) or new.messages[index] != digest:
            yield index + len(prompt.chat.messages) - len(new.messages)
            return


async def _range(state: AppState, prompt: RenderedPrompt, block: int) -> tuple[int, int]:
    """Return the characters of the prompt that a block holds, as begin and end."""
    text, size = prompt.text, prompt.record.block_size
    add = prompt.adds_special_tokens
    offsets = await off_loop(
        len(text), lambda: state.tokenizer.offsets(text, add_special_tokens=add)
    )
    offsets.append(len(text))
    return offsets[block * size], offsets[min((block + 1) * size, len(offsets) - 1)]


async def _start(state: AppState, prompt: RenderedPrompt, earlier: PromptRecord, part: Held) -> int:
    """Return the character of the prompt at which a part begins; 0 if that is not known."""
    try:
        changed = await chat_text(state, _with_other(prompt.chat, earlier, part))
    except (TemplateError, ApiError):  # the template refuses such a chat
        return 0
    return _common_length(prompt.text, changed)


def _with_other(chat: Chat, earlier: PromptRecord, part: Held) -> Chat:
    """Return a chat whose text differs from where `part` begins."""
    if part == TOOLS:
        return dataclasses.replace(chat, tool_use=ToolUse(_other_tools(chat, earlier)))
    messages = list(chat.messages)
    if part == SYSTEM:
        messages = _with_other_system(messages, earlier)
    else:
        assert isinstance(part, int)
        # Text of the template between two messages belongs to the second one, which may be missing.
        # The tools may be between the system message and the first one.
        follows = part > 0 and messages[part - 1]["role"] not in SYSTEM_ROLES
        if follows or part == len(messages):
            messages[part - 1] = mark_end(messages[part - 1])
        else:
            messages[part] = mark_begin(messages[part])
    return dataclasses.replace(chat, messages=messages)


def _other_tools(chat: Chat, earlier: PromptRecord) -> Sequence[Tool]:
    """Return tools with marks: none if all of them are new, and one if none is left."""
    shown = shown_tools(chat)
    if not shown:
        return [OTHER_TOOL]
    return [] if earlier.has_no_tools else [mark_tool(tool) for tool in shown]


def _with_other_system(messages: list[Json], earlier: PromptRecord) -> list[Json]:
    """Return messages with a mark in the system message: without it if it is new."""
    if messages[0]["role"] not in SYSTEM_ROLES:
        return [{"role": "system", "content": MARK}, *messages]
    if earlier.has_no_system and len(messages) > 1:
        return messages[1:]
    return [mark_begin(messages[0]), *messages[1:]]


def _common_length(one: str, other: str) -> int:
    """Return how many characters both texts begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
