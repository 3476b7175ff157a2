"""`penstock serve demo` with scripted answers: an agent's session then runs for real over HTTP.

`python scripted_engine.py FILE` reads a Script from the JSON file.

All of the server is real: template, tokenizer, grammars, parsers, streams. A double of the engine
writes the script, a token at a time. llguidance masks its tokens as it masks a model's, and the
double only writes tokens that the mask allows. If the mask allows no token that continues the
script, the answer ends with an error, and stderr has the text.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from fake_engine import INFO, FakeEngine, Running
from llguidance import LLMatcher, LLTokenizer

from engine.checkpoint.folder import model_folder
from engine.config import DEMO_MODEL, EngineConfig
from engine.protocol.generate import GenerateRequest
from engine.protocol.outputs import TokenOutput
from server.cli.clean_exit import standard_streams
from server.cli.console import say
from server.cli.lifetime import run
from server.config import ServerConfig
from server.http.listener import listen

MODEL = "tests/Scripted-1.5B"  # names of the hub have a slash
CONTEXT = 131072
SHOWN = 60  # bytes of a script in a message
VOCAB_SIZE, START, END = 2048, 1, 2  # of the demo model: <|im_start|> and <|im_end|>
REASONING = "<think>\n"  # the end of a prompt that asks for reasoning
THOUGHT = "The script says what comes next.\n</think>\n\n"
TOOLS = "You can call these tools:\n<tools>"  # in each prompt with tools


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """The answers of a session.

    An answer to a request with tools is one of `turns`: the first before any tool result, the next
    after one result, and so on. Requests without tools are answered from `plain`, by the number of
    user messages. The last one of each list is repeated. A thought comes first if the prompt asks
    for reasoning.
    """

    turns: tuple[str, ...] = ("Done.",)
    plain: tuple[str, ...] = ("Done.",)
    api_key: tuple[str, ...] = ()
    context: int = CONTEXT


class Vocabulary:
    """The demo model's tokens, as bytes."""

    def __init__(self) -> None:
        source = (model_folder(DEMO_MODEL) / "tokenizer.json").read_text()
        self.tokenizer = LLTokenizer(source, n_vocab=VOCAB_SIZE, eos_token=[END])
        ids = [id for id in range(VOCAB_SIZE) if not self.tokenizer.is_special_token(id)]
        self._ids = {self.tokenizer.decode_bytes([id]): id for id in ids}
        self._longest = max(map(len, self._ids))

    def beginnings(self, text: bytes) -> list[int]:
        """Return the tokens that a text can begin with, the longest first."""
        ends = range(min(self._longest, len(text)), 0, -1)
        return [self._ids[text[:end]] for end in ends if text[:end] in self._ids]

    def length(self, token: int) -> int:
        """Return the number of bytes of a token."""
        return len(self.tokenizer.decode_bytes([token]))

    def count(self, prompt: Sequence[int], role: str) -> int:
        """Return how many messages of a role are in a prompt."""
        opening = [START, *self.tokenizer.tokenize_str(f"{role}\n")]
        places = [place for place, token in enumerate(prompt) if token == START]
        return sum(list(prompt[place : place + len(opening)]) == opening for place in places)


@dataclass
class Writing:
    """An answer that is being written: the rest of its text, and the grammar that it follows."""

    vocabulary: Vocabulary
    rest: bytes
    matcher: LLMatcher | None
    refused: bool = field(default=False, init=False)

    def next_token(self) -> int | None:
        """Return the next token; None if the grammar allows none that continues the text."""
        candidates = self.vocabulary.beginnings(self.rest) if self.rest else [END]
        allowed = [token for token in candidates if self._allows(token)]
        if not allowed:
            return None
        [token, *_] = allowed
        if self.matcher is not None:
            self.matcher.consume_token(token)
        if token != END:
            self.rest = self.rest[self.vocabulary.length(token) :]
        return token

    def _allows(self, token: int) -> bool:
        if self.matcher is None:
            return True
        mask = self.matcher.compute_bitmask()
        return bool(mask[token // 8] >> token % 8 & 1)


class ScriptedEngine(FakeEngine):
    """An engine double that writes a script."""

    def __init__(self, script: Script) -> None:
        info = msgspec.structs.replace(INFO, vocab_size=VOCAB_SIZE, max_model_len=script.context)
        super().__init__(lambda request: [END], info=info)
        self.answers = script
        self.vocabulary = Vocabulary()
        self._writings: dict[int, Writing] = {}

    def _sample(self, running: Running) -> TokenOutput:
        request = running.request
        if request.id not in self._writings:
            self._writings[request.id] = self._begun(request)
        writing = self._writings[request.id]
        token = writing.next_token()
        if token is None:
            say(f"The grammar allows nothing that continues {writing.rest[:SHOWN]!r}.")
            return TokenOutput(request.id, -1, "error")
        running.tokens = [token]
        return super()._sample(running)

    def _begun(self, request: GenerateRequest) -> Writing:
        prompt, script, vocabulary = request.prompt, self.answers, self.vocabulary
        text = vocabulary.tokenizer.decode_str(list(prompt))
        if TOOLS in text:
            answer = chosen(script.turns, vocabulary.count(prompt, "tool"))
        else:
            answer = chosen(script.plain, vocabulary.count(prompt, "user") - 1)
        if text.endswith(REASONING):
            answer = THOUGHT + answer
        grammar = request.params.grammar
        matcher = None
        if grammar is not None:
            matcher = LLMatcher(vocabulary.tokenizer, grammar.source, log_level=0)
        return Writing(vocabulary, answer.encode(), matcher)


def chosen(answers: Sequence[str], number: int) -> str:
    return answers[max(0, min(number, len(answers) - 1))]


def main() -> int:
    script = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Script)
    config = ServerConfig(port=0, api_key=script.api_key, served_model_name=(MODEL,))
    engine = ScriptedEngine(script)
    with standard_streams(), contextlib.closing(listen(config)) as listener:
        return run(config, EngineConfig(model=DEMO_MODEL), engine, listener)


if __name__ == "__main__":
    sys.exit(main())
