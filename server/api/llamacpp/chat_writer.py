"""Writer of chat.completion objects as llama.cpp's server has them."""

from __future__ import annotations

from collections.abc import Sequence

from server.api.llamacpp.progress import progress_of
from server.api.openai.chat_writer import ChatWriter
from server.api.openai.timings import timing_fields
from server.api.openai.writer import Json, Part
from server.generation.events import ChoiceEvents, Timings, Usage


class LlamaChatWriter(ChatWriter):
    """llama.cpp's first chunk has no content, its last one has the timings."""

    _timings: Timings | None = None  # the latest ones

    def chunks(self, update: ChoiceEvents) -> bytes:
        self._timings = update.timings or self._timings
        chunks = b""
        with_timings = bool(self._body.timings_per_token)
        for progress in progress_of(update, with_timings=with_timings):
            chunks += self._chunk([self._delta_entry(update.index, Part({}))], **progress)
        return chunks or super().chunks(update)

    def _role_chunk(self, index: int, *, is_null: bool = True) -> bytes:
        return super()._role_chunk(index, is_null=True)

    def _usage_fields(self, usage: Usage) -> Json:
        fields = super()._usage_fields(usage)
        if self._timings is not None:
            fields["timings"] = timing_fields(self._timings)
        return fields


class VerboseChatWriter(LlamaChatWriter):
    """Whole answers have the text of the prompt in `__verbose`."""

    def _whole_fields(self, answers: Sequence[ChoiceEvents]) -> Json:
        [prompt] = self._prepared.prompts
        text = self._tokenizer.decode(prompt, skip_special_tokens=False)
        return super()._whole_fields(answers) | {"__verbose": {"prompt": text}}
