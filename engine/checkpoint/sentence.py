"""SentenceConfig: the files in which sentence-transformers says how a text becomes a vector.

The rules are those of sentence-transformers 6.2. A setting that is not computed is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.bounded_json import read_json, read_optional
from engine.checkpoint.logit_score import read_logit_score
from engine.checkpoint.sentence_head import HeadConfig, has_head, read_head
from engine.checkpoint.sentence_modules import (
    NORMALIZE,
    PoolerConfig,
    described,
    expect_no_modules,
    read_modules,
)
from engine.config import Pooling
from engine.errors import ConfigError

MODULES = "modules.json"
SCORER = "CrossEncoder"  # the model_type of a folder whose settings are for scores
PROMPTS = "config_sentence_transformers.json"
# The first of these that exists has the settings of the Transformer module.
TRANSFORMER_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# The supported values of keys of these files, whose other values change what is computed.
VALUES: dict[str, tuple[Any, ...]] = {
    "query_length": (None,),
    "document_length": (None,),
    "query_expansion": (None,),
    "tokenizer_name_or_path": (None,),
}
# The same for a model that gives vectors, and for one with a head of its own.
OF_VECTORS = VALUES | {
    "transformer_task": (None, "feature-extraction"),
    "module_output_name": (None, "token_embeddings"),
    "processing_kwargs": (None, {}),
}
OF_A_HEAD = VALUES | {
    "transformer_task": (None, "sequence-classification"),
    "module_output_name": (None, "scores"),
}
OF_LOGITS = VALUES | {
    "transformer_task": (None, "text-generation"),
    "module_output_name": (None, "causal_logits"),
}
# How the model computes a text, in the key `modality_config`. With "message" there, the library
# renders every text by the chat template.
TEXT_MODALITY = {"method": "forward", "method_output_name": "last_hidden_state"}
OWN_PROMPTS = ("query", "document")  # of every folder; empty, unless the file has them


@dataclass(frozen=True)
class SentenceConfig:
    """How a checkpoint makes vectors of texts, or with a `head` of its own scores of pairs.

    `is_normalized` says whether the last module is Normalize, which `pooler` leaves out: a request
    may ask for vectors as they were before. `truncate_dim` cuts vectors after that. `longest` is
    the maximum number of tokens of a text, or None if no file sets it.
    """

    pooler: PoolerConfig
    is_normalized: bool
    longest: int | None
    lowercase: bool
    prompts: Mapping[str, str]  # by name; each is put in front of a text
    default_prompt: str | None  # the name of the prompt of texts for which none is chosen
    truncate_dim: int | None
    # The sizes of shorter vectors that the model was trained for; None: any.
    shorter_sizes: tuple[int, ...] | None
    similarity: str  # cosine, dot, euclidean or manhattan
    source: str  # "modules.json", or "no modules.json"
    head: HeadConfig | None = None

    def __str__(self) -> str:
        length = "normalised" if self.is_normalized else "not normalised"
        return f"{described(self.pooler)}, {length} ({self.source})"

    @property
    def standard_prompt(self) -> str:
        """The prompt of texts for which none is chosen, as in `encode`; perhaps empty."""
        return "" if self.default_prompt is None else self.prompts[self.default_prompt]


def has_modules(folder: Path) -> bool:
    """Return whether a checkpoint's folder is one of sentence-transformers."""
    return (folder / MODULES).is_file()


def read_sentence(
    folder: Path, *, pooling: Pooling | None = None, longest: int | None = None
) -> SentenceConfig:
    """Read modules.json and the files that it names.

    `pooling` and `longest`, if given, override those of the files. Without modules.json the pooling
    is that of the last token for a causal language model, else the mean, without normalisation.
    Raises ConfigError naming the file and the unsupported setting.
    """
    listed = has_modules(folder)
    is_causal = read_logit_score(folder, pooling) is not None
    is_scorer = is_causal or has_head(read_optional(folder / "config.json"))
    settings = read_optional(folder / PROMPTS) if listed else {}
    if is_scorer and settings.get("model_type") != SCORER:
        listed, settings = False, {}  # they are for vectors
    supported = OF_A_HEAD if is_scorer else OF_VECTORS
    transformer = _transformer(folder, OF_LOGITS if is_causal else supported) if listed else {}
    if is_scorer:
        expect_no_modules(folder, MODULES)
        pooler = PoolerConfig.of("cls")  # the model's head has its own
    elif listed:
        pooler = read_modules(folder, MODULES, pooling)
    else:
        pooler = PoolerConfig.of(pooling or _bare_pooling(folder))
    is_normalized = pooler.modules[-1:] == (NORMALIZE,)
    if is_normalized:
        pooler = pooler.without_last()
    path = folder / PROMPTS
    prompts = _prompts(settings, path)
    return SentenceConfig(
        pooler=pooler,
        is_normalized=is_normalized,
        longest=longest or _longest(folder, transformer),
        lowercase=bool(transformer.get("do_lower_case")),
        prompts=prompts,
        default_prompt=_default_prompt(settings, prompts, path),
        truncate_dim=_truncate_dim(settings, path),
        shorter_sizes=_shorter_sizes(folder, settings),
        similarity=_similarity(settings),
        source=MODULES if listed else f"no {MODULES}",
        head=read_head(folder, settings, path, transformer, is_causal=is_causal),
    )


def _bare_pooling(folder: Path) -> Pooling:
    """Return the pooling of a checkpoint without sentence-transformers' files, as there."""
    config = read_optional(folder / "config.json")
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    is_causal = isinstance(first, str) and first.endswith("ForCausalLM")
    return "lasttoken" if is_causal and config.get("is_causal", True) else "mean"


def _transformer(folder: Path, supported: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return the settings of the Transformer module, which must have `supported` values."""
    path = next((folder / n for n in TRANSFORMER_FILES if (folder / n).is_file()), None)
    if path is None:
        return {}
    settings = read_json(path)
    for key, allowed in supported.items():
        if settings.get(key) not in allowed:
            raise ConfigError(
                f"{path} has {key} = {settings[key]!r:.100}; supported: "
                f"{', '.join(repr(value) for value in allowed if value is not None) or 'null'}."
            )
    if supported is OF_VECTORS:
        _check_modality(settings.get("modality_config"), path)
    longest = settings.get("max_seq_length")
    if longest is not None and (type(longest) is not int or longest < 1):
        raise ConfigError(
            f"{path} has max_seq_length = {longest!r:.40}; it must be a whole number above 0."
        )
    return settings


def _check_modality(modalities: Any, path: Path) -> None:
    """Raise ConfigError if texts are computed in another way, such as by a chat template."""
    if modalities is None:
        return
    text = modalities.get("text") if isinstance(modalities, dict) else None
    if text != TEXT_MODALITY or "message" in modalities:
        raise ConfigError(
            f"{path} has modality_config = {modalities!r:.200}; supported: text, with "
            f"{TEXT_MODALITY}, and no message."
        )


def _longest(folder: Path, transformer: Mapping[str, Any]) -> int | None:
    """Return the longest text in tokens: the module's limit, else the tokenizer's."""
    if (longest := transformer.get("max_seq_length")) is not None:
        return int(longest)
    most = read_optional(folder / "tokenizer_config.json").get("model_max_length")
    return int(most) if isinstance(most, int | float) and most >= 1 else None


def _prompts(settings: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Return the prompts by name. Raises ConfigError if they are not texts."""
    prompts: dict[str, str] = dict.fromkeys(OWN_PROMPTS, "")
    given = settings.get("prompts")
    if given is not None and not isinstance(given, dict):
        raise ConfigError(f"{path} has prompts = {given!r:.100}; it must be texts by name.")
    for name, text in (given or {}).items():
        if not isinstance(text, str | None):
            raise ConfigError(
                f"{path} has a prompt {name!r:.100} = {text!r:.100}, which is no text."
            )
        prompts[name] = text or ""
    return prompts


def _default_prompt(
    settings: Mapping[str, Any], prompts: Mapping[str, str], path: Path
) -> str | None:
    name = settings.get("default_prompt_name")
    if name is None:
        return None
    if not isinstance(name, str) or name not in prompts:
        raise ConfigError(
            f"{path} has default_prompt_name = {name!r:.100}, which is none of its prompts: "
            f"{', '.join(prompts)}."
        )
    return name


def _truncate_dim(settings: Mapping[str, Any], path: Path) -> int | None:
    size = settings.get("truncate_dim")
    if size is not None and (type(size) is not int or size < 1):
        raise ConfigError(
            f"{path} has truncate_dim = {size!r:.40}; it must be a whole number above 0."
        )
    return size


def _shorter_sizes(folder: Path, settings: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the sizes that config.json names, as vLLM reads it, or that `truncate_dim` implies."""
    path = folder / "config.json"
    config = read_optional(path)
    sizes = config.get("matryoshka_dimensions")
    if not sizes:
        is_any = bool(config.get("is_matryoshka")) or settings.get("truncate_dim") is not None
        return None if is_any else ()
    if not isinstance(sizes, list) or any(type(size) is not int or size < 1 for size in sizes):
        raise ConfigError(
            f"{path} has matryoshka_dimensions = {sizes!r:.100}; it must be a list of whole "
            "numbers above 0."
        )
    return tuple(sizes)


def _similarity(settings: Mapping[str, Any]) -> str:
    """Return the similarity function: cosine, unless the file names another one that is known."""
    given = settings.get("similarity_fn_name")
    return given if given in ("dot", "euclidean", "manhattan") else "cosine"
