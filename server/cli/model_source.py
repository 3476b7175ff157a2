"""Resolve MODEL to a local folder and check that it can be served, without loading weights."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from engine.checkpoint.folder import check_weight_file, is_hub_name, weight_files
from engine.config import EngineConfig
from engine.errors import ConfigError
from server import exit_codes
from server.cli.console import say
from server.cli.hub_url import HubAddress, from_url
from server.config import ServerConfig


def resolve_model(
    server_config: ServerConfig,
    engine_config: EngineConfig,
    tell: Callable[[str], None] = say,
    weights: bool = True,
    here: bool = False,
) -> tuple[ServerConfig, EngineConfig]:
    """Return both configurations with the local folder, or GGUF file, of a model named ORG/NAME.

    A model that is not in the cache is downloaded first. Its weights are skipped if `weights` is
    False or if `load_format` is "dummy". The model is served as ORG/NAME unless names are set.
    Raises ConfigError before the weights are downloaded if the model cannot be served; with `here`
    also if this machine cannot serve it.
    """
    engine_config = _resolve_draft(engine_config, tell, weights)
    name, _, file = _address(engine_config.model)
    file = server_config.gguf_file or file
    if not is_hub_name(name):
        local = str(Path(name, file)) if file else name
        return server_config, replace(engine_config, model=local)
    from server.cli.pull import locate

    names = server_config.served_model_name or (name,)
    check = partial(check_folder, engine_config) if here else check_served
    weights = weights and engine_config.load_format != "dummy"
    found = locate(name, check, tell, weights, file)
    return replace(server_config, served_model_name=names), replace(engine_config, model=str(found))


def _resolve_draft(
    config: EngineConfig, tell: Callable[[str], None], weights: bool
) -> EngineConfig:
    """Return the configuration with the local folder, or GGUF file, of the draft model."""
    if config.speculative_model is None:
        return config
    name, _, file = _address(config.speculative_model)
    if not is_hub_name(name):
        return replace(config, speculative_model=name)
    from server.cli.pull import locate

    weights = weights and config.load_format != "dummy"
    found = locate(name, check_served, tell, weights, file)
    return replace(config, speculative_model=str(found))


def _address(model: str) -> HubAddress:
    """Return what `model` names on the hub. Raises ConfigError if that is an older revision."""
    found = from_url(model)
    if found.revision not in (None, "main"):
        raise ConfigError(
            f"{model} names the revision {found.revision}. Serve the folder that "
            f"`penstock pull {found.name} --revision {found.revision}` prints."
        )
    return found


def check_folder(config: EngineConfig, folder: Path) -> None:
    """Raise the ConfigError that `serve` would raise for `folder` on this machine.

    The weights are not checked.
    """
    from server.text.load_tokenizer import load_tokenizer

    load_tokenizer(folder)
    _ask_engine(config, folder)


def check_served(folder: Path) -> None:
    """Raise ConfigError if no machine could serve the model in `folder`.

    The tokenizer is not checked, because it can be added after a `pull`.
    """
    _ask_engine(EngineConfig(device="cpu"), folder, "anywhere")


def check_weights(config: EngineConfig, folder: Path) -> None:
    """Raise ConfigError if a file of weights is damaged. The engine would find it only later."""
    for file in weight_files(folder) if config.load_format != "dummy" else ():
        check_weight_file(file)


def _ask_engine(config: EngineConfig, folder: Path, *more: str) -> None:
    """Check the model in a process that may import torch; raise ConfigError with its message."""
    from engine.client.module_command import python_module

    asked = msgspec.json.encode(replace(config, model=str(folder))).decode()
    command = [*python_module("server.cli.clean_exit"), "engine.offline.plan", asked, *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if (
        done.returncode == exit_codes.BAD_CONFIG
    ):  # any other failure is reported when serving starts
        raise ConfigError(done.stderr.strip().removeprefix("penstock: "))
