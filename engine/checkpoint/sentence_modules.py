"""PoolerConfig: the modules behind the Transformer in sentence-transformers' modules.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Self, cast, get_args

from engine.checkpoint.bounded_json import BAD_JSON, read_any_json, read_json, read_optional
from engine.config import Pooling
from engine.errors import ConfigError, listed

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
Activation = Literal["Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU"]
MODES: tuple[PoolingMode, ...] = get_args(PoolingMode)
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
# The boolean keys that versions before 5.4 wrote in place of `pooling_mode`. Vectors of several are
# concatenated in this order.
SWITCHES: Mapping[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
POOLING_KEYS = ("embedding_dimension", "word_embedding_dimension", "include_prompt")
DENSE_KEYS = ("in_features", "out_features", "bias", "activation_function")
NORMALIZE: Literal["normalize"] = "normalize"
# The vector that a module reads and writes, and values of keys that change nothing.
VECTOR = {
    "module_input_name": (None, "sentence_embedding"),
    "module_output_name": (None, "sentence_embedding"),
    "use_residual": (False,),
}


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """A linear layer, whose weights are in `folder`, and the activation behind it."""

    folder: Path
    in_features: int
    out_features: int
    has_bias: bool
    activation: Activation


VectorModule = DenseConfig | Literal["normalize"]


@dataclass(frozen=True, slots=True)
class PoolerConfig:
    """How the hidden states of a text's tokens become a vector.

    The vectors of all `modes` are concatenated, and then pass `modules` in their order. Unless it
    `includes_prompt`, the tokens of the prompt and those before it are left out.
    """

    modes: tuple[PoolingMode, ...]
    includes_prompt: bool = True
    modules: tuple[VectorModule, ...] = ()

    @classmethod
    def of(cls, pooling: Pooling) -> Self:
        """Return the config of one pooling without further modules."""
        return cls((_mode_of(pooling),))

    def without_last(self) -> Self:
        """Return the config without its last module."""
        return replace(self, modules=self.modules[:-1])


def described(pooler: PoolerConfig) -> str:
    """Return the pooling and the modules in words."""
    words = [f"{' and '.join(pooler.modes)} pooling"]
    for module in pooler.modules:
        if isinstance(module, DenseConfig):
            words.append(f"{module.activation} of {module.in_features} to {module.out_features}")
        else:
            words.append("normalised")
    return ", ".join(words)


def read_modules(folder: Path, name: str, pooling: Pooling | None = None) -> PoolerConfig:
    """Read the file `name` of a folder and the configs that it names.

    `pooling` overrides the modes of the file. Raises ConfigError for modules and settings that are
    not supported.
    """
    path = folder / name
    entries = _entries(path)
    kinds = [kind for kind, _ in entries]
    if kinds[:2] != ["Transformer", "Pooling"] or not set(kinds[2:]) <= _BEHIND_POOLING.keys():
        raise ConfigError(
            f"{path} lists {listed(kinds)}; supported: Transformer, Pooling and then any of "
            f"{', '.join(_BEHIND_POOLING)}."
        )
    places = [_inside(folder, place, path) for _, place in entries]
    if places[0] != folder:
        raise ConfigError(
            f'{path} gives Transformer the path {entries[0][1]!r:.100}; supported: "", the '
            "model's own folder."
        )
    modes, includes_prompt = _read_pooling(places[1] / "config.json")
    if pooling is not None:
        modes = (_mode_of(pooling),)
    modules: list[VectorModule] = []
    for kind, place in zip(kinds[2:], places[2:], strict=True):
        module = _BEHIND_POOLING[kind](place)
        if module is not None:
            modules.append(module)
    return PoolerConfig(modes, includes_prompt, tuple(modules))


def expect_no_modules(folder: Path, name: str) -> None:
    """Raise ConfigError if the file `name` of a folder lists modules behind the Transformer."""
    path = folder / name
    kinds = [kind for kind, _ in _entries(path)] if path.is_file() else ["Transformer"]
    if kinds not in (["Transformer"], ["Transformer", "LogitScore"]):
        raise ConfigError(
            f"{path} lists {listed(kinds)}; supported behind a model with a head of its own: none."
        )


def folder_of_kind(folder: Path, name: str, kind: str) -> Path | None:
    """Return the folder of the module of a kind that the file `name` lists last, or None."""
    path = folder / name
    entries = _entries(path) if path.is_file() else []
    if not entries or entries[-1][0] != kind:
        return None
    return _inside(folder, entries[-1][1], path)


def _mode_of(pooling: Pooling) -> PoolingMode:
    return "lasttoken" if pooling == "last" or pooling == "logit_score" else pooling


def _entries(path: Path) -> list[tuple[str, str]]:
    """Return (class, path) of each module; classes of other packages keep their package."""
    try:
        modules = read_any_json(path)
        types = [str(module["type"]) for module in modules]
        places = [module.get("path") or "" for module in modules]
    except (OSError, TypeError, LookupError, AttributeError, *BAD_JSON) as error:
        raise ConfigError(
            f"{path} must be a list of modules with type and path: {error!r}"
        ) from error
    kinds = [t.rpartition(".")[2] if t.startswith("sentence_transformers.") else t for t in types]
    return list(zip(kinds, places, strict=True))


def _inside(folder: Path, place: Any, path: Path) -> Path:
    """Return the folder of a module. Raises ConfigError if it is outside of the checkpoint's."""
    pure = PurePosixPath(place) if isinstance(place, str) else None
    if pure is None or pure.is_absolute() or ".." in pure.parts or "\\" in place:
        raise ConfigError(f"{path} gives a module the path {place!r:.100}, outside of its folder.")
    return folder / pure


def _read_pooling(path: Path) -> tuple[tuple[PoolingMode, ...], bool]:
    """Return the pooling modes, and whether the prompt is pooled too."""
    config = read_json(path)
    known = {"pooling_mode", *SWITCHES, *POOLING_KEYS}
    if unknown := sorted(config.keys() - known):
        raise ConfigError(f"{path} has {unknown[0]!r:.100}, which is not supported.")
    includes_prompt = config.get("include_prompt", True)
    if type(includes_prompt) is not bool:
        raise ConfigError(f"{path} has include_prompt = {includes_prompt!r:.40}; true or false.")
    given = config.get("pooling_mode")
    if given is None:
        given = [mode for key, mode in SWITCHES.items() if config.get(key)] or ["mean"]
    modes = given if isinstance(given, list) else [given]
    if not modes or any(not isinstance(mode, str) or mode not in MODES for mode in modes):
        raise ConfigError(
            f"{path} sets the pooling {' and '.join(map(str, modes)):.200}; supported: "
            f"{', '.join(MODES)}."
        )
    return tuple(modes), includes_prompt


def _read_dense(folder: Path) -> DenseConfig:
    path = folder / "config.json"
    config = read_json(path)
    _expect_vector(path, config, DENSE_KEYS)
    sizes = [config.get(key) for key in ("in_features", "out_features")]
    if any(type(size) is not int or not 0 < size < 2**31 for size in sizes):
        raise ConfigError(
            f"{path} must have in_features and out_features, whole numbers above 0; it has "
            f"{' and '.join(repr(size)[:40] for size in sizes)}."
        )
    bias = config.get("bias", True)
    if type(bias) is not bool:
        raise ConfigError(f"{path} has bias = {bias!r:.40}; it must be true or false.")
    inputs, outputs = cast("list[int]", sizes)
    return DenseConfig(folder, inputs, outputs, bias, _activation(path, config))


def _activation(path: Path, config: Mapping[str, Any]) -> Activation:
    """Return the activation's class in torch. Without the key it is Tanh."""
    given = config.get("activation_function", "torch.nn.Tanh")
    for known in ACTIVATIONS:
        if isinstance(given, str) and given.startswith("torch.nn.") and given.endswith(f".{known}"):
            return known
    raise ConfigError(
        f"{path} has activation_function = {given!r:.100}; supported: "
        f"{', '.join(f'torch.nn.{name}' for name in ACTIVATIONS)}."
    )


def _read_normalize(folder: Path) -> VectorModule:
    path = folder / "config.json"
    _expect_vector(path, read_optional(path), ())
    return NORMALIZE


def _expect_vector(path: Path, config: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise ConfigError for a key that is not known, or one that needs more than the vector."""
    for key, value in config.items():
        allowed = VECTOR.get(key)
        if key in known or (allowed is not None and value in allowed):
            continue
        advice = f"; supported: {allowed[-1]!r}" if allowed else ", which is not supported"
        raise ConfigError(f"{path} has {key} = {value!r:.100}{advice}.")


def _read_dropout(folder: Path) -> None:
    """Return None: Dropout does nothing outside of training."""


_BEHIND_POOLING: Mapping[str, Callable[[Path], VectorModule | None]] = {
    "Dense": _read_dense,
    "Normalize": _read_normalize,
    "Dropout": _read_dropout,
}
