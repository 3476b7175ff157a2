"""Architecture name (config.json's `architectures`) -> model class, imported when asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from engine.errors import ConfigError

ARCHITECTURES = {
    "LlamaForCausalLM": ("engine.models.llama", "Llama"),
    "GPT2LMHeadModel": ("engine.models.gpt2", "GPT2"),
}


def model_class(config: dict[str, Any]) -> tuple[str, Any]:
    """(architecture, class) for a config.json; ConfigError lists what is served."""
    given = config.get("architectures")
    names = [name for name in given if isinstance(name, str)] if isinstance(given, list) else []
    for name in names:
        if name in ARCHITECTURES:
            module, attribute = ARCHITECTURES[name]
            return name, getattr(import_module(module), attribute)
    raise ConfigError(
        f"Architecture {', '.join(names) or '(none given)'} is not served; "
        f"served are {', '.join(sorted(ARCHITECTURES))}."
    )
