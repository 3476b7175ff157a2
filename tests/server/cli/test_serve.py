"""The command line of `penstock serve`."""

from __future__ import annotations

from server.cli.serve import spread


def test_lora_modules_take_several_values_behind_one_flag() -> None:
    given = ["M", "--lora-modules", "a=/x", "b=y", "--port", "1", "c=z"]
    repeated = ["M", "--lora-modules", "a=/x", "--lora-modules", "b=y", "--port", "1", "c=z"]
    assert spread(given) == repeated
    assert spread(repeated) == repeated
    assert spread(["--lora-modules", "a=/x", "M"]) == ["--lora-modules", "a=/x", "M"]
