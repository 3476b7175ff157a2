"""Inspection: remember the prompt of a request, and compare it with that of an earlier answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from starlette.requests import Request

from server.api.openai.tokenize import cached_tokens
from server.api.prefixes.difference import Difference, RenderedPrompt, first_difference
from server.api.prefixes.record import PromptRecord, prompt_record
from server.api.tenant_store import TenantStore
from server.generation.cache_salt import cache_salt_of
from server.generation.chat_prompt import Chat, ChatPrompt, adds_special_tokens
from server.generation.off_loop import off_loop
from server.generation.options import GenerationOptions
from server.state import AppState, state_of

# Of the prompts that are remembered. One of 100,000 tokens takes 13 kB with blocks of 64.
MAX_BYTES = 8 << 20
MAX_PROMPTS = 4096
PromptLog = TenantStore[PromptRecord]
# The prompt loses no block of the compared one; so it does, but the cache holds none of them; the
# compared one is not known; the model is an encoder, or its encoder's whole source is cached.
Finding = Difference | Literal["hit", "evicted", "not_found", "unavailable"]


def new_prompt_log() -> PromptLog:
    return TenantStore(MAX_BYTES, MAX_PROMPTS)


def prompt_log_of(request: Request) -> PromptLog:
    log = request.app.state.prompt_log
    assert isinstance(log, TenantStore)
    return log


class Inspection:
    """The prompt of one request. It is the `inspect` of `answer_chat`.

    `finding` is None until then, and if there is no answer to compare with. `where` has the members
    of the answer that say where a Difference is.
    """

    def __init__(
        self,
        request: Request,
        options: GenerationOptions,
        compared: str | None,
        message: Callable[[int], str],
    ) -> None:
        """`compared` is the id of an earlier answer of the same tenant. `message` is that of
        `Difference.where`; it takes long for a long conversation."""
        self.finding: Finding | None = None
        self.where: dict[str, Any] = {}
        self._message = message
        self._state = state_of(request)
        self._log = prompt_log_of(request)
        self._tenant: str = request.state.tenant
        self._salt = cache_salt_of(request, options.cache_salt)
        adapter = self._state.adapters.find(options.model)
        self._adapter = 0 if adapter is None else adapter.id
        self._compared = compared
        self._record: PromptRecord | None = None

    async def __call__(self, chat: Chat, prompt: ChatPrompt) -> None:
        """Compare the prompt with that of the answer `compared`."""
        state = self._state
        size = state.loaded().block_size
        record = await off_loop(
            len(prompt.text),
            lambda: prompt_record(chat, prompt.ids, size, self._salt, self._adapter),
        )
        self._record = record
        if self._compared is not None:
            earlier = find_prompt(self._log, self._tenant, self._compared)
            add = adds_special_tokens(state, chat)
            rendered = RenderedPrompt(chat, prompt.text, add, record)
            found = await compare(state, rendered, prompt.ids, self._salt, earlier)
            if isinstance(found, Difference):
                self.where = await off_loop(len(prompt.text), lambda: found.where(self._message))
            self.finding = found

    def keep(self, answer_id: str) -> None:
        """Remember the prompt as that of an answer."""
        if self._record is not None and self._log.has_room_for(self._record):
            self._log.put(self._tenant, answer_id, self._record)
            self._log.make_room()


async def compare(
    state: AppState,
    prompt: RenderedPrompt,
    ids: list[int],
    salt: str,
    earlier: PromptRecord | None,
) -> Finding:
    """Return how a prompt, whose tokens are `ids`, differs from the one of `earlier`."""
    if state.task != "generate" or state.start_token is not None:
        return "unavailable"
    if earlier is None:
        return "not_found"
    difference = await first_difference(state, prompt, earlier)
    if difference is not None:
        return difference
    if min(len(earlier.blocks), prompt.record.num_skippable_blocks) == 0:
        return "hit"
    is_cached = await cached_tokens(state, ids, salt, prompt.record.adapter)
    return "hit" if is_cached else "evicted"


def find_prompt(log: PromptLog, tenant: str, answer_id: str) -> PromptRecord | None:
    """Return the prompt of an answer, which counts as used; None if it is not remembered."""
    found = log.find(tenant, answer_id)
    if found is not None:
        log.use(tenant, answer_id)
    return found
