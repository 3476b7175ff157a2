"""transformers' models with gated delta nets, which compute one token after the other.

For more than one token they solve a system for each chunk instead. It takes decays as differences
of fp32 sums, and so errs by 1e-3 where logits are of the order of 10.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import pytest

from tests.support.golden import of_transformers


def single_steps(config: Any, folder: Path) -> Any:
    """Return a transformers model with random weights, saved in `folder`."""
    return in_single_steps(of_transformers(config, folder))


def in_single_steps(model: Any) -> Any:
    """Return the transformers model, which from now on computes one token after the other."""
    model.forward = MethodType(_forward, model)  # bound again in copies of the model
    return model


def _forward(self: Any, **inputs: Any) -> Any:
    with single_stepping(self):
        return type(self).forward(self, **inputs)


@contextmanager
def single_stepping(model: Any) -> Iterator[None]:
    """Let transformers' models of the same file compute one token after the other."""
    code = sys.modules[type(model).__module__]
    with pytest.MonkeyPatch.context() as patch:
        rule = code.torch_recurrent_gated_delta_rule
        patch.setattr(code, "torch_chunk_gated_delta_rule", rule)
        yield
