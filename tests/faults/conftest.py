"""The checkpoint with known answers that tests/e2e uses."""

from tests.e2e.conftest import llama, stories

__all__ = ["llama", "stories"]
