"""Bodies of /v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from server.http.body import Body

Text = Annotated[str, Field(min_length=1, max_length=4096)]


class LoadAdapterBody(Body):
    lora_name: Text
    """The name that requests use in `model`."""
    lora_path: Text
    """A PEFT folder on the server's machine."""


class UnloadAdapterBody(Body):
    lora_name: Text
    """The name of a loaded adapter."""
