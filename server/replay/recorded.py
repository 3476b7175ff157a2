"""RecordedAnswer: one line of a file of --record, and how the file is read.

A line is a JSON object. `params` has the fields of `engine.protocol.SamplingParams` by name. JSON
has no minus infinity: the bias of a token that the checkpoint bans is null.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from engine.protocol.generate import SamplingParams
from engine.protocol.sampling_parameters import DEFAULTS, PARAMETERS

BANNED = float("-inf")
# A request with this header repeats a recorded answer, and is not recorded itself.
REPLAY_HEADER = "x-penstock-replay"


class RecordError(Exception):
    """A file of --record cannot be used; the text names the line and the reason."""


class RecordedGrammar(msgspec.Struct, frozen=True):
    """The grammar of a request: a `server.text.wanted_grammar.WantedGrammar`."""

    kind: str
    value: Any
    whitespace: str | None = None
    around: str = ""
    thought_budget: int | None = None  # of the request, in force


class RecordedAnswer(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One finished choice of a generation, with everything that its tokens depend on.

    For an encoder-decoder, `encoder_prompt_ids` are the source and `prompt_ids` the decoder's
    first tokens. `params.max_tokens` and `params.seed` are this choice's own.
    """

    record: Literal[1] = 1  # version of this format
    id: str  # of the HTTP request
    choice: int  # index in the HTTP request, over all its prompts; with best_of, of the candidate
    created: int  # Unix seconds of the end
    model: str
    fingerprint: str  # `system_fingerprint` of the answer
    settings: dict[str, str] = {}  # that the fingerprint is made from
    version: str  # of Penstock
    prompt_ids: list[int]
    encoder_prompt_ids: list[int] = []
    params: dict[str, Any]
    bad_words: list[str] = []  # the texts that became params["banned_sequences"]
    grammar: RecordedGrammar | None = None  # as in the request; params["grammar"] is the engine's
    tokens: list[int]  # of the answer, with its end token
    finish: str  # as sent to the client
    # The server ended the answer, by a stop text or a complete tool call: the engine would go on.
    is_cut: bool = False

    @property
    def sampling(self) -> SamplingParams:
        """Return `params` as the engine's message. Raises msgspec.ValidationError."""
        return params_of(self.params)


def params_fields(params: SamplingParams) -> dict[str, Any]:
    """Return sampling parameters as a JSON object, for a RecordedAnswer."""
    fields = msgspec.structs.asdict(params)
    fields["logit_bias"] = [
        (token, None if bias == BANNED else bias) for token, bias in params.logit_bias
    ]
    if params.grammar is not None:
        fields["grammar"] = msgspec.structs.asdict(params.grammar)
    return fields


def params_of(fields: dict[str, Any]) -> SamplingParams:
    """Return the parameters that `params_fields` has written.

    An older version may have written fewer of PARAMETERS: those have no effect. Raises
    msgspec.ValidationError if another field is missing, or one is unknown or of another type.
    """
    names = SamplingParams.__struct_fields__
    strange = fields.keys() ^ set(names)
    if strange & fields.keys() or strange - PARAMETERS.keys():
        message = f"params must have exactly SamplingParams' fields: {sorted(strange)}"
        raise msgspec.ValidationError(message)
    values = {**DEFAULTS, **fields}
    if isinstance(values["logit_bias"], list):
        values["logit_bias"] = list(map(_unbanned, values["logit_bias"]))
    if isinstance(values["grammar"], dict):
        values["grammar"] = list(values["grammar"].values())
    return msgspec.convert([values[name] for name in names], SamplingParams)


def _unbanned(entry: Any) -> Any:
    """Return an entry of `logit_bias` with minus infinity in place of null."""
    is_pair = isinstance(entry, list | tuple) and len(entry) == 2
    return [entry[0], BANNED] if is_pair and entry[1] is None else entry


_decoder = msgspec.json.Decoder(RecordedAnswer)


def read_record(path: Path) -> dict[int, RecordedAnswer]:
    """Return the answers of a file by line number, from 1. Raises RecordError."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}.") from None
    found = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            answer = _decoder.decode(line)
            answer.sampling  # noqa: B018  # raises if the parameters are not valid
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RecordError(
                f"{path}, line {number} is not a line that --record has written: {error}."
            ) from None
        if not answer.tokens or not answer.prompt_ids:
            raise RecordError(f"{path}, line {number} has no tokens.")
        found[number] = answer
    if not found:
        raise RecordError(f"{path} has no recorded answers.")
    return found
