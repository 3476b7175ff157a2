"""Choice: the tokens of one sequence become events."""

from __future__ import annotations

import math
from collections.abc import Sequence

from engine.protocol.outputs import TokenOutput
from server.generation.events import (
    ChoiceEvents,
    Event,
    Finish,
    FinishReason,
    PromptLogprobs,
    TextDelta,
    TokenWithLogprobs,
)
from server.generation.prepare import PreparedRequest
from server.text.answers import Parser
from server.text.deltas import CallOutcome, ContentDelta
from server.text.detokenizer import Detokenizer
from server.text.marks import NO_MARKS
from server.text.stop_strings import StopMatcher
from server.text.tokenizer import Tokenizer


class Choice:
    """One answer while it grows: tokens go in, events come out.

    Tokens pass a line of stages: Detokenizer, StopMatcher, and for chats a Parser. Each has
    `push`, which may hold back an unfinished end, and `flush`, which returns it.
    """

    def __init__(self, tokenizer: Tokenizer, prepared: PreparedRequest, index: int) -> None:
        options = prepared.options
        self.index = index
        self.prompt = prepared.prompt_of(index)
        self.num_tokens = 0  # generated, with the end token
        self.finish: FinishReason | None = None
        self._stop: str | None = None  # the stop string that was found
        # The engine generates at least one token. It is dropped if the request asks for none.
        self.drops_tokens = prepared.params[self.prompt].max_tokens == 0
        self._awaits_prompt_logprobs = prepared.computes_prompt_logprobs(index)
        self._min_tokens = options.min_tokens
        self._shows_end_token = options.include_stop
        self._last_line_after = options.last_line_after
        shows_special = not options.skip_special_tokens
        marks = NO_MARKS
        self._parser: Parser | None = None
        if prepared.parsing is not None:
            marks = prepared.parsing.marks
            self._parser = prepared.parsing.new_parser(shows_special)
        self.num_reasoning_tokens = 0
        # The closing mark behind them is no thought.
        budget = options.thought_budget
        self._most_reasoning: float = math.inf if budget is None else budget
        self._detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=options.skip_special_tokens,
            continues=prepared.start_token is None,
            marks=marks,
        )
        # A stop string may contain tokens that have become marks.
        self._stops = {marks.encode_shown(s, special=shows_special): s for s in options.stop}
        self._stops |= {stop: stop for stop in options.stop}
        self._stop_matcher = StopMatcher(list(self._stops), include=options.include_stop)
        echo = ""
        if prepared.echoes:
            echo = prepared.echoes[self.prompt].text
        self._length = len(echo)  # characters decoded so far
        self._clear()
        self._text = echo

    def _clear(self) -> None:
        """Start to collect the events of the next `take`."""
        self._prompt_logprobs: PromptLogprobs | None = None
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: list[TokenWithLogprobs] = []

    def add(self, output: TokenOutput, elapsed: float = 0.0) -> FinishReason | None:
        """Add the next token. Return why the answer ends with it, or None if it goes on.

        `elapsed` is the time since the first token in seconds.
        """
        if self._awaits_prompt_logprobs:
            self._awaits_prompt_logprobs = False
            self._prompt_logprobs = PromptLogprobs(output.prompt_logprobs)
        if self.drops_tokens:
            self.finish = "length"
            return self.finish
        self.num_tokens += 1
        if self._parser is not None and self._parser.is_reasoning:
            self.num_reasoning_tokens += self.num_reasoning_tokens < self._most_reasoning
        self._token_ids.append(output.token)
        # The engine ends with "stop" only on an end token, which is not part of the text.
        last_line_after = self._last_line_after
        shown = 0 if last_line_after is None else len(self._text)
        if output.finish != "stop" or self._shows_end_token:
            self._show(output)
        if output.finish is not None and output.finish != "error" and self.finish is None:
            self._end(output.finish)
        if last_line_after is not None and elapsed > last_line_after:
            self._end_late_line(shown)
        self._end_parsing()
        return self.finish

    def _show(self, output: TokenOutput) -> None:
        if output.logprobs is not None:
            token = TokenWithLogprobs(output.token, output.logprobs, self._length)
            self._logprobs.append(token)
        self._extend(self._detokenizer.push(output.token))

    def _extend(self, text: str) -> None:
        """Pass decoded text to the next stage."""
        self._length += len(text)
        # As in vLLM, a stop string counts if it ends after the text of `min_tokens` tokens.
        too_early = self.num_tokens <= self._min_tokens
        matched = self._stop_matcher.push(text, too_early=too_early)
        self._text += matched.text
        if matched.stop is not None:
            self.finish = "stop"
            self._stop = self._stops[matched.stop]

    def _end_late_line(self, shown: int) -> None:
        """End the answer if the text behind the first `shown` characters has a line break."""
        if self.finish is None and "\n" in self._text[shown:]:
            self._end("length")

    def _end(self, reason: FinishReason) -> None:
        """Flush the stages. Their last text may still contain a stop string."""
        self._extend(self._detokenizer.flush())
        if self.finish is None:
            self.finish = reason
            self._text += self._stop_matcher.flush()

    def _end_parsing(self) -> None:
        """Pass the text on to the parser, and the end of the answer."""
        parser = self._parser
        if parser is None:
            return
        parser.push(self._text)
        self._text = ""
        if self.finish is None and parser.is_full:
            self.finish = "stop"
        if self.finish is None:
            return
        # A stop string within a call cuts it, as the limit on tokens does.
        is_cut = self.finish == "length" or (self._stop is not None and parser.is_in_call)
        parser.flush(is_cut=is_cut)
        if self.finish == "stop" and parser.has_calls and not is_cut:
            self.finish = "tool_calls"

    @property
    def outcomes(self) -> Sequence[CallOutcome]:
        """The fate of each call that the answer has so far."""
        return self._parser.outcomes if self._parser is not None else ()

    def _deltas(self) -> list[Event]:
        """Return the text, or its parts. One TextDelta has the tokens."""
        token_ids, logprobs = self._token_ids, self._logprobs
        if self._parser is None:
            return [TextDelta(self._text, token_ids, logprobs)]
        events: list[Event] = []
        for delta in self._parser.take():
            if isinstance(delta, ContentDelta):
                events.append(TextDelta(delta.text, token_ids, logprobs))
                token_ids, logprobs = [], []
            else:
                events.append(delta)
        if token_ids:
            events.append(TextDelta("", token_ids, logprobs))
        return events

    def take(self) -> ChoiceEvents:
        """Return what `add` has produced since the last call, merged to one event of each kind."""
        events: list[Event] = []
        if self._prompt_logprobs is not None:
            events.append(self._prompt_logprobs)
        events += self._deltas()
        if self.finish is not None:
            events.append(Finish(self.finish, self._stop))
        self._clear()
        return ChoiceEvents(self.index, events)
