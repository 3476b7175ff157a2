"""HeadConfig: how the logits of a model's own head become scores, as a CrossEncoder reads it.

The rules are those of sentence-transformers 6.2. An activation that is not computed is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from engine.checkpoint.bounded_json import read_optional
from engine.errors import ConfigError, listed

HeadActivation = Literal["Identity", "Sigmoid", "Softmax"]
ACTIVATIONS: tuple[HeadActivation, ...] = get_args(HeadActivation)
# Options of a chat template that say how its text is cut and padded.
OF_THE_TOKENIZER = {"restore_suffix", "truncation", "max_length", "padding", "return_tensors"}
ENDING = "ForSequenceClassification"


@dataclass(frozen=True)
class HeadConfig:
    """The labels of a head, and what follows its logits.

    `activation` is the one that the files name; None if they name none.
    """

    labels: tuple[str, ...]
    activation: HeadActivation | None
    is_multi_label: bool  # several labels may be right: each has its own probability
    # Whether a chat template writes a pair, if there is one, and the variables that it gets.
    reads_chats: bool = True
    chat_options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        if len(self.labels) == 1:
            return f"1, a score: {self.of_scores} of its logit"
        return f"{listed(self.labels)}: {self.of_labels} of their logits"

    @property
    def of_scores(self) -> HeadActivation:
        """The activation of a score, as in `CrossEncoder.predict`."""
        return self.activation or ("Sigmoid" if len(self.labels) == 1 else "Identity")

    @property
    def of_labels(self) -> HeadActivation:
        """The activation of labels. Probabilities, unless the files name another one."""
        if self.activation is not None:
            return self.activation
        return "Sigmoid" if len(self.labels) == 1 or self.is_multi_label else "Softmax"


def read_head(
    folder: Path,
    settings: Mapping[str, Any],
    path: Path,
    transformer: Mapping[str, Any],
    *,
    is_causal: bool = False,
) -> HeadConfig | None:
    """Return the head of a checkpoint, or None if its architecture has none.

    A causal head has the vocabulary's logits, and one label. `settings` is the content of
    config_sentence_transformers.json at `path`, if the folder is a CrossEncoder's; its activation
    precedes those of config.json. `transformer` are the settings of the Transformer module.
    Raises ConfigError for another activation than ACTIVATIONS.
    """
    source = folder / "config.json"
    config = read_optional(source)
    if not is_causal and not has_head(config):
        return None
    own = config.get("sentence_transformers")
    older = "sbert_ce_default_activation_function"
    activation = _activation(settings, "activation_fn", path)
    if activation is None and isinstance(own, Mapping) and "activation_fn" in own:
        activation = _activation(own, "activation_fn", source)
    elif activation is None:
        activation = _activation(config, older, source)
    if is_causal:
        head = HeadConfig(("LABEL_0",), activation, is_multi_label=False)
        return _with_chats(head, transformer)
    multi = config.get("problem_type") == "multi_label_classification"
    return _with_chats(HeadConfig(_labels(config, source), activation, multi), transformer)


def _with_chats(head: HeadConfig, transformer: Mapping[str, Any]) -> HeadConfig:
    """Return the head with what the Transformer module says of chat templates."""
    kinds = transformer.get("modality_config")
    given = transformer.get("processing_kwargs") or {}
    options = given.get("chat_template") if isinstance(given, Mapping) else None
    if given not in ({}, {"chat_template": options}):
        raise ConfigError(
            f"The Transformer module has processing_kwargs = {given!r:.200}; supported: "
            "chat_template, the options of a chat template."
        )
    known = {k: v for k, v in (options or {}).items() if k not in OF_THE_TOKENIZER}
    reads = not isinstance(kinds, Mapping) or "message" in kinds
    return replace(head, reads_chats=reads, chat_options=known)


def has_head(config: Mapping[str, Any]) -> bool:
    """Return whether the architecture of a config.json has a head that gives logits of labels."""
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    return isinstance(first, str) and first.endswith(ENDING)


def _activation(settings: Mapping[str, Any], key: str, path: Path) -> HeadActivation | None:
    """Return the activation whose class in torch is named; None if none is."""
    given = settings.get(key)
    if given is None:
        return None
    for known in ACTIVATIONS:
        if isinstance(given, str) and given.startswith("torch.nn.") and given.endswith(f".{known}"):
            return known
    raise ConfigError(
        f"{path} has {key} = {given!r:.100}; supported: "
        f"{', '.join(f'torch.nn.{name}' for name in ACTIVATIONS)}."
    )


def _labels(config: Mapping[str, Any], path: Path) -> tuple[str, ...]:
    """Return the names of the labels in the order of the logits."""
    given = config.get("id2label")
    if given is None:
        count = config.get("num_labels", 2)
        count = count if type(count) is int and 0 < count < 2**16 else 0  # the engine refuses it
        return tuple(f"LABEL_{number}" for number in range(count))
    numbers = [str(number) for number in range(len(given))] if isinstance(given, dict) else []
    if not numbers or given.keys() != set(numbers):
        keys = listed(sorted(given)) if isinstance(given, dict) else repr(given)[:100]
        raise ConfigError(f"{path} has id2label for {keys}; it must be names by number, from 0.")
    return tuple(str(given[number]) for number in numbers)
