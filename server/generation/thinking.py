"""Thinking: how much the model thinks before its answer, whichever API the request came by.

Chat templates switch thoughts by different variables. A request sets each of them that its template
reads; template arguments that it gives itself come first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server.text.chat_template import ChatTemplate

SWITCHES = ("enable_thinking", "thinking")  # true or false
BUDGET = "thinking_budget"  # tokens; 0: no thoughts
EFFORT = "reasoning_effort"  # a word
# Efforts that turn the thoughts off where a template has a switch. OpenAI's "minimal" means few
# tokens or none.
OFF = ("none", "minimal")
DEFAULT_EFFORT = "medium"  # as in OpenAI's API


@dataclass(frozen=True)
class Thinking:
    """The fields of a request about thoughts. None: absent."""

    effort: str | None = None
    is_on: bool | None = None  # None: as `effort` says
    budget: int | None = None  # most tokens of the thoughts

    @property
    def turns_on(self) -> bool | None:
        """Whether the request turns thoughts on or off. None: the template's default."""
        if self.is_on is not None or self.effort is None:
            return self.is_on
        return self.effort not in OFF

    def arguments(self, template: ChatTemplate, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return `given`, the request's template arguments, with those that thoughts need."""
        found: dict[str, Any] = {}
        turns_on = self.turns_on
        if turns_on is None:
            return dict(given)
        if not any(name in given for name in (*SWITCHES, BUDGET)):
            found = {name: turns_on for name in SWITCHES if name in template.variables}
            budget = self.budget if turns_on else 0
            if BUDGET in template.variables and budget is not None:
                found[BUDGET] = budget
        word = self._word(template, has_switch=bool(found))
        if EFFORT in template.variables and word is not None:
            found[EFFORT] = word
        return found | dict(given)

    def _word(self, template: ChatTemplate, *, has_switch: bool) -> str | None:
        """Return the effort for a template that reads one; None leaves its default."""
        if self.turns_on:
            return self.effort or (None if has_switch else DEFAULT_EFFORT)
        known = [word for word in OFF if re.search(f"['\"]{word}['\"]", template.source)]
        if self.effort in known or (self.is_on is None and not known):
            return self.effort
        return known[0] if known else None

    def ignored(self, template: ChatTemplate | None, given: Mapping[str, Any]) -> list[str]:
        """Return the names of fields that the template does not follow."""
        turns_on = self.turns_on
        if turns_on is None:
            return []
        applied: dict[str, Any] = {}
        if template is not None:
            applied = self.arguments(template, given)
            applied = {name: applied[name] for name in applied.keys() & template.variables}
        is_switched = any(applied.get(name) is turns_on for name in SWITCHES)
        if template is not None and BUDGET in template.variables:
            is_switched |= (applied.get(BUDGET) != 0) is turns_on
        has_word = EFFORT in applied and given.get(EFFORT, self.effort) == self.effort
        names = []
        if self.effort is not None and not has_word and (turns_on or not is_switched):
            names.append(EFFORT)
        if self.is_on is not None and not has_word and not is_switched:
            names.append("thinking")
        if turns_on and self.budget is not None and applied.get(BUDGET) != self.budget:
            names.append("thinking.budget_tokens")
        return names


DEFAULT_THINKING = Thinking()
