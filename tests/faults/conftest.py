"""Fixtures of tests/e2e: a golden checkpoint and its expected outputs."""

from tests.e2e.conftest import llama, stories

__all__ = ["llama", "stories"]
