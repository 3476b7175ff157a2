"""`options` of Ollama's bodies: each is applied, harmless here, or refused by name."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import model_validator

from engine.protocol.sampling_parameters import DEFAULTS, PARAMETERS
from server.api.openai.schemas.fields import INT32, Between
from server.api.openai.schemas.sampling_fields import SAMPLING_DEFAULTS, SamplingBody
from server.http.body import failure
from server.http.errors import unsupported
from server.state import AppState

PENALTIES = [name for name, parameter in PARAMETERS.items() if parameter.kind == "penalty"]
WHOLE_ANSWER = -1  # of repeat_last_n: penalties look at all tokens


def filled(value: Any) -> Any:
    """Return an object without members that are null or "": clients send them for absent ones."""
    if not isinstance(value, dict):
        return value
    return {name: given for name, given in value.items() if given is not None and given != ""}


class Options(SamplingBody):
    """The options of Ollama that change an answer, and Penstock's other sampling parameters."""

    ACCEPTED: ClassVar[frozenset[str]] = frozenset(
        (
            # How Ollama loads a model. This one is loaded already.
            *("numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all"),
            *("vocab_only", "use_mmap", "use_mlock", "embedding_only", "num_thread"),
            "num_keep",  # a context is never shifted
            "penalize_newline",
            *("mirostat_tau", "mirostat_eta"),  # of a sampler that is refused
        )
    )
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "mirostat": (0,),
        "tfs_z": (1,),
        # Fields of the base class that belong outside `options`.
        "model": (),
        "stream": (),
    }
    DEFAULTS: ClassVar[dict[str, Any]] = SAMPLING_DEFAULTS | {"num_predict": -1}

    num_predict: Annotated[int, Between(-2, INT32)] | None = None
    """Most tokens of an answer; 0, −1 and −2: as many as the context has room for."""
    num_ctx: Annotated[int, Between(1, INT32)] | None = None
    """At most the served context, which every request may fill."""
    repeat_last_n: Annotated[int, Between(-1, INT32)] | None = None
    """Penalties look at all tokens, so that only −1 is accepted with one."""

    @model_validator(mode="after")
    def _penalties_have_no_window(self) -> Self:
        given = [getattr(self, name) for name in PENALTIES]
        neutral = [DEFAULTS[name] for name in PENALTIES]
        is_penalised = any(
            value is not None and value != none for value, none in zip(given, neutral, strict=True)
        )
        if is_penalised and self.repeat_last_n not in (None, WHOLE_ANSWER):
            message = "is not supported with a penalty, except −1: penalties look at all tokens"
            raise failure("unsupported", message, "repeat_last_n")
        return self

    @property
    def max_tokens(self) -> int | None:
        """Most tokens of an answer. None: no limit."""
        return self.num_predict if (self.num_predict or 0) > 0 else None

    def check(self, state: AppState) -> None:
        """Raise a 400 ApiError for a context that the server does not have."""
        longest = state.max_length()
        if self.num_ctx is not None and self.num_ctx > longest:
            message = (
                f"options.num_ctx is {self.num_ctx}, but the served context has {longest} tokens: "
                "send at most that, or start the server with a larger --max-model-len."
            )
            raise unsupported("options.num_ctx", message)


NO_OPTIONS = Options.model_validate({})
