"""IdleCapture: captures step graphs while the engine has nothing else to do."""

from __future__ import annotations

from engine.runner.model_runner import ModelRunner
from engine.scheduling.between import Between, Outcome


class IdleCapture(Between):
    """The part of the loop that captures one graph at a time, in the order of StepGraphs."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    @property
    def has_work(self) -> bool:
        return self._runner.can_capture

    def work(self, *, is_quiet: bool) -> Outcome | None:
        if not is_quiet or not self._runner.can_capture:
            return None
        self._runner.capture_when_idle()
        return Outcome()
