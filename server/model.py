"""The model's folder: where it is, and whether it can be served, as far as nothing is loaded."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from engine.config import EngineConfig, is_hub_name, safetensors_header, weight_files
from engine.errors import ConfigError
from server import exits
from server.config import ServerConfig
from server.voice import say


def located(
    server_config: ServerConfig,
    engine_config: EngineConfig,
    tell: Callable[[str], None] = say,
    weights: bool = True,
    here: bool = False,
) -> tuple[ServerConfig, EngineConfig]:
    """Both with the folder of what is named ORG/NAME, pulled where it is not here, the `weights`
    only if they are wanted and read; it is served under that name. Raises ConfigError, before the
    weights are pulled, where they cannot be served, with `here` where this machine cannot."""
    name = engine_config.model
    if not is_hub_name(name):
        return server_config, engine_config
    from server.pull import locate

    names = server_config.served_model_name or (name,)
    check = partial(check_folder, engine_config) if here else check_served
    folder = str(locate(name, check, tell, weights and engine_config.load_format != "dummy"))
    return replace(server_config, served_model_name=names), replace(engine_config, model=folder)


def check_folder(config: EngineConfig, folder: Path) -> None:
    """Raises ConfigError with what `serve` with that `config` would say of a folder on this
    machine, its weights aside."""
    from server.tokenizer import Tokenizer

    Tokenizer.from_folder(folder)
    _ask_engine(config, folder)


def check_served(folder: Path) -> None:
    """Raises ConfigError where no machine could serve a folder's model; to one that is pulled only,
    a tokenizer can be added."""
    _ask_engine(EngineConfig(device="cpu"), folder, "anywhere")


def check_weights(config: EngineConfig, folder: Path) -> None:
    """Raises ConfigError where a file is damaged; the engine would tell of it too, but later."""
    for file in weight_files(folder) if config.load_format != "dummy" else ():
        safetensors_header(file)


def _ask_engine(config: EngineConfig, folder: Path, *more: str) -> None:
    from engine.child import python_module  # brings the sockets' library, which few askers need

    asked = msgspec.json.encode(replace(config, model=str(folder))).decode()
    command = [*python_module("engine.command"), "engine.plan", asked, *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == exits.BAD_CONFIG:  # whatever else ends it, serving will tell of
        raise ConfigError(done.stderr.strip().removeprefix("penstock: "))
