"""`penstock compare`: the answers of two or more models side by side, and where they part."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from engine.errors import ConfigError, printable
from server import exit_codes
from server.cli.clean_exit import fail
from server.cli.console import say

TEXT = 70  # characters of a text that are shown


def compare(
    models: Annotated[list[str], typer.Argument(metavar="MODEL MODEL...", show_default=False)],
    prompts: Annotated[Path, typer.Option(help="File of prompts, one a line: texts or JSON.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0: the likeliest token.")] = 0,
    seed: Annotated[int, typer.Option(min=-(2**63), max=2**63 - 1, help="Seed of the noise.")] = 0,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], typer.Option(help="Of models without one.")
    ] = "auto",
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option()] = "auto",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="JSON file for the page Compare.")
    ] = None,
) -> None:
    """Compare the answers of models, and their predictions.

    The first model is compared with each of the others, such as a merge with its parents. The
    distance at a token is the Kullback-Leibler divergence of the other model's prediction from that
    of the model that wrote it, in bits. No server is needed.

    MODEL:FORM compares a model with a form of itself: demo demo:float32 demo:int4. Forms are the
    values of --dtype and --quantization of `penstock serve`.
    """
    from server.cli.model_source import resolve_model
    from server.config import ServerConfig
    from server.replay.compare import Settings
    from server.replay.compare import compare as run
    from server.replay.compare_prompts import read_prompts
    from server.replay.forms import config_of

    try:
        if len(models) < 2:
            raise ConfigError("Give at least two models.")
        if output is not None and not output.parent.is_dir():
            raise ConfigError(f"{output}: there is no folder {output.parent}.")
        texts = read_prompts(prompts)
        configs = [resolve_model(ServerConfig(), config_of(one))[1] for one in models]
        settings = Settings(max_tokens, temperature, seed, dtype, device)
        document = run(configs, texts, settings, say)
        document["models"] = models
        if output is not None:
            output.write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
    except (ConfigError, OSError) as error:
        raise fail(error, exit_codes.BAD_CONFIG) from None
    _print(document)


def _print(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    names = document["models"]
    for number, entry in enumerate(document["prompts"]):
        title = Text(f"{number + 1}. {_short(entry['prompt'])}")
        table = Table(title=title, title_justify="left")
        for heading in ("model", "answer", "parts at token", "KL bits, mean", "largest"):
            table.add_column(heading, overflow="fold")
        for place, answer in enumerate(entry["answers"]):
            parts = "equal" if answer["parts_at"] is None else str(answer["parts_at"])
            if not place or not document["same_tokens"]:
                parts = "–"
            cells = (names[place], _short(answer["text"]), parts, *_distance(entry, place))
            table.add_row(*map(Text, cells))  # a text may look like markup
        console.print(table)
    if not document["same_tokens"]:
        console.print("The models have other tokens, so their distributions have no distance.")


def _distance(entry: dict[str, Any], place: int) -> tuple[str, str]:
    """Return the mean and the largest distance along the first model's answer."""
    for one in entry["distances"]:
        if one["model"] == place and one["writer"] == 0 and one["tokens"]:
            bits = [math.inf if token["kl"] is None else token["kl"] for token in one["tokens"]]
            worst = max(range(len(bits)), key=bits.__getitem__)
            return f"{sum(bits) / len(bits):.4f}", f"{bits[worst]:.4f} at {worst}"
    return "–", "–"


def _short(text: str) -> str:
    line = printable(" ".join(text.split()))
    return line if len(line) <= TEXT else line[: TEXT - 1] + "…"
