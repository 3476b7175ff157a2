"""Convert a stream of token ids to text. The streamed text equals the text of decoding all ids.

A byte-level token is a string of bytes, so an incremental UTF-8 decoder is enough. The other
families decode token by token. Only a run of byte-fallback tokens is held until it ends, because
one invalid byte turns the whole run into U+FFFD (tokenizers, decoders/byte_fallback.rs). Each token
is processed once, even in long runs of invalid bytes.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from server.tokenizer import Tokenizer


class Detokenizer:
    """Streaming text of one sequence. `push` never returns part of a character.

    The texts returned by `push` and `flush` together equal `tokenizer.decode` of all ids. With
    `continues` the ids follow a prompt, so the leading space that `decode` strips is kept.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, continues: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._run: list[int] = []  # byte-fallback tokens of a run that has not ended
        self._begun = continues

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that later ids cannot change.

        An unfinished character or run of byte-fallback tokens at the end is held back.
        """
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
        """Return the text still held back at the end; unfinished characters become U+FFFD."""
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
    """Find stop strings in a text that arrives in pieces. The result does not depend on the cuts.

    The stop string that is complete first wins, because generation ends there. If two end at the
    same character, the longer one wins. With `include` the emitted text contains the stop string.
    Stop strings must not be empty.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._held = ""

    def push(self, text: str, *, too_early: bool = False) -> tuple[str, str | None]:
        """Return the text that is safe to emit, and the stop string that was found, or None.

        After a match the rest of the text is dropped, and nothing is left to push or flush. With
        `too_early`, a stop string that ends in this text does not match; one that only begins in
        it may match later.
        """
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
        """Return the text held back as the possible start of a stop string."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _safe_length(text: str, stop: str) -> int:
        """Return where the longest suffix of `text` that is a proper prefix of `stop` begins.

        Returns len(text) if there is no such suffix.
        """
        at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while at >= 0 and not stop.startswith(text[at:]):
            at = text.find(stop[0], at + 1)
        return at if at >= 0 else len(text)
