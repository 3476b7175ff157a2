"""Candidate: one of the models that are compared, loaded in this process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.assembly import make_core
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.inspect.lens import LensPass, reference_ops
from engine.protocol.generate import GenerateRequest, SamplingParams
from engine.protocol.lens import LensRequest
from engine.protocol.message import Message
from engine.protocol.outputs import Rejected, StepOutputs, TokenOutput
from engine.protocol.wire import ToEngine
from engine.runner.load import load_engine

ROWS = 64  # positions whose distributions are computed at once


class Candidate:
    """Answers prompts as a server would, and returns distributions along any text.

    Raises ConfigError if the model cannot be loaded, or is no decoder.
    """

    def __init__(self, config: EngineConfig) -> None:
        try:
            loaded = load_engine(config)
        except ConfigError as error:
            if "--max-model-len" not in str(error):
                raise
            raise ConfigError(
                f"{config.model} cannot take {config.max_model_len} tokens, which the longest "
                f"prompt and --max-tokens have together. ({error})"
            ) from None
        if loaded.facts.kind != "decoder":
            raise ConfigError(f"{config.model} is no decoder; only decoders can be compared.")
        self.runner = loaded.runner
        self._core = make_core(config, loaded, self)
        self._inbox: list[ToEngine] = []
        self._outputs: dict[int, list[TokenOutput]] = {}

    # The core's endpoint

    def drain(self, *, block: bool) -> list[ToEngine]:
        messages, self._inbox = self._inbox, []
        return messages

    def send(self, message: Message) -> None:
        if isinstance(message, Rejected):
            raise ConfigError(f"The model refuses a prompt: {message.message}")
        if isinstance(message, StepOutputs):
            for output in message.tokens:
                self._outputs.setdefault(output.id, []).append(output)

    # Calls

    def answers(
        self, prompts: Sequence[list[int]], params: SamplingParams
    ) -> list[tuple[list[int], str]]:
        """Return the tokens of each prompt's answer, and why it ended."""
        self._outputs = {}
        self._inbox = [
            GenerateRequest(number, prompt, params, 0.0) for number, prompt in enumerate(prompts)
        ]
        while self._inbox or self._core.scheduler.has_work or self._core.in_flight:
            self._core.turn()
        found = []
        for number in range(len(prompts)):
            outputs = self._outputs[number]
            tokens = [output.token for output in outputs if output.token >= 0]  # not an error's
            found.append((tokens, str(outputs[-1].finish)))
        return found

    @torch.inference_mode()
    def logprobs(self, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """Return the log probabilities [answer, V], fp32, before each token of `answer`.

        They are the model's own, without temperature and filters, from the torch reference of
        every op.
        """
        tokens = [*prompt, *answer]
        request = LensRequest(0, tokens, attention=False)
        with reference_ops(self.runner):
            hidden = LensPass(self.runner, request).compute()[len(prompt) - 1 : -1]
            parts = [self.runner.model.logits(rows).float() for rows in hidden.split(ROWS)]
        return torch.log_softmax(torch.cat(parts), dim=-1).cpu()
