"""Token ids to text while they come: the streamed text equals the whole decoding, to the letter.

A byte-level token is a string of bytes, so an incremental UTF-8 decoder does it all. The other
families decode token by token; only a run of byte-fallback tokens waits for its end, because one
invalid byte turns the whole run into U+FFFD (tokenizers, decoders/byte_fallback.rs). Each token
is looked at once, however invalid the bytes are.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from server.tokenizer import Tokenizer


class Detokenizer:
    """Text of one sequence; `push` never returns half a character.

    The pushed and flushed texts together equal `tokenizer.decode` of all ids. With `continues`
    the ids follow a prompt, and the leading space that whole decoding strips is kept.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, continues: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._run: list[int] = []  # byte-fallback tokens that wait for the end of their run
        self._begun = continues

    def push(self, ids: Sequence[int]) -> str:
        """The text that is certain now; "" where `ids` end inside a character or a byte run."""
        token_bytes = self._tokenizer.token_bytes
        ids = [i for i in ids if i not in self._skipped]
        if self._tokenizer.byte_level:
            return self._utf8.decode(b"".join(map(token_bytes, ids)))
        text = ""
        for token_id in ids:
            if token_id in self._tokenizer.byte_values:
                self._run.append(token_id)
            elif self._begun and not self._run:
                text += token_bytes(token_id).decode()
            elif self._tokenizer.has(token_id):
                text += self._end_run() + self._segment([token_id])
        return text

    def flush(self) -> str:
        """What is left at the end; unfinished characters become U+FFFD."""
        return self._end_run() + self._utf8.decode(b"", final=True)

    def _end_run(self) -> str:
        run, self._run = self._run, []
        return self._segment(run) if run else ""

    def _segment(self, ids: list[int]) -> str:
        if self._begun:
            return self._tokenizer.continuation(ids)
        self._begun = True
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class StopMatcher:
    """Finds stop strings in a text that comes in pieces, however it is cut.

    The stop that is complete first wins, because generation ends there; of two that end together,
    the longer. With `include` the stop itself is part of the text. No stop is empty.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._held = ""

    def push(self, text: str, *, too_early: bool = False) -> tuple[str, str | None]:
        """The text that is safe to emit, and the stop that was hit or None. After a hit there is
        nothing more to push or flush. What ends in a text that is `too_early` is no hit; what only
        begins there may become one."""
        seen = len(self._held)
        text = self._held + text
        ends = [
            (at + len(stop), at, stop)
            for stop in self._stops
            if (at := text.find(stop, max(0, seen - len(stop) + 1))) >= 0
        ]
        if ends and not too_early:
            end, at, stop = min(ends)
            self._held = ""
            return text[: end if self._include else at], stop
        safe = min((self._safe_length(text, stop) for stop in self._stops), default=len(text))
        self._held = text[safe:]
        return text[:safe], None

    def flush(self) -> str:
        """The text held back at the end: no stop came of it."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _safe_length(text: str, stop: str) -> int:
        """Where the longest suffix of `text` that is a proper prefix of `stop` begins."""
        at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while at >= 0 and not stop.startswith(text[at:]):
            at = text.find(stop[0], at + 1)
        return at if at >= 0 else len(text)
