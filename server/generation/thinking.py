"""Thinking: how much the model thinks before its answer, whichever API the request came by.

Chat templates switch thoughts by different variables. A request sets each of them that its template
reads; template arguments that it gives itself come first. A limit on the tokens of the thoughts
does what the template cannot, if the model marks its thoughts.
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
# Most tokens of the thoughts where a template has no switch, as Google's API for OpenAI's clients
# has them. Other efforts have no limit.
BUDGETS = {"low": 1024, "medium": 8192}
DEFAULT_EFFORT = "medium"  # as in OpenAI's API
VARIABLES = frozenset((*SWITCHES, BUDGET, EFFORT))


@dataclass(frozen=True)
class Thinking:
    """The fields of a request about thoughts. None: absent."""

    effort: str | None = None
    is_on: bool | None = None  # None: as `effort` says
    budget: int | None = None  # most tokens of the thoughts
    is_shown: bool | None = None  # whether the answer has their text; None: as the API does
    budget_param: str = "thinking.budget_tokens"  # the field of `budget`

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
        if not any(name in given for name in (*SWITCHES, BUDGET)):
            if turns_on is not None:
                found = {name: turns_on for name in SWITCHES if name in template.variables}
            budget = 0 if turns_on is False else self.budget
            if BUDGET in template.variables and budget is not None:
                found[BUDGET] = budget
        if turns_on is None:
            return found | dict(given)
        word = self._word(template, has_switch=bool(found))
        if EFFORT in template.variables and word is not None:
            found[EFFORT] = word
        return found | dict(given)

    def _word(self, template: ChatTemplate, *, has_switch: bool) -> str | None:
        """Return the effort for a template that reads one; None leaves its default."""
        if self.turns_on:
            return self.effort or (None if has_switch else DEFAULT_EFFORT)
        known = _words_of_off(template)
        if self.effort in known or (self.is_on is None and not known):
            return self.effort
        return known[0] if known else None

    def limit(self, template: ChatTemplate, given: Mapping[str, Any]) -> int | None:
        """Return the most tokens of the thoughts; None: no limit.

        It is the request's budget, or does what the template does not.
        """
        is_given = any(name in given for name in VARIABLES & template.variables)
        if self.turns_on is False and not is_given:
            is_unknown_word = self.effort == "none" and not _words_of_off(template)
            if self.ignored(template, given) or (is_unknown_word and not _has_switch(template)):
                return 0
        if self.budget is not None or self.effort is None or VARIABLES & template.variables:
            return self.budget
        return BUDGETS.get(self.effort)

    def ignored(
        self, template: ChatTemplate | None, given: Mapping[str, Any], *, is_limited: bool = False
    ) -> list[str]:
        """Return the names of fields that the template does not follow.

        With `is_limited`, the thoughts follow `limit`.
        """
        names = self._unfollowed(template, given)
        if self.is_shown is not None and not is_limited:  # the model shows none
            names.append("thinking.display")
        if template is None or not is_limited:
            return names
        followed = {self.budget_param}
        if self.budget is not None and self.turns_on:
            followed.add("thinking")
        if self.limit(template, given) == 0 and self.turns_on is False:
            followed |= {"thinking", EFFORT}
        elif self.effort is not None and not VARIABLES & template.variables:
            followed.add(EFFORT)
        return [name for name in names if name not in followed]

    def _unfollowed(self, template: ChatTemplate | None, given: Mapping[str, Any]) -> list[str]:
        turns_on = self.turns_on
        applied: dict[str, Any] = {}
        if template is not None:
            applied = self.arguments(template, given)
            applied = {name: applied[name] for name in applied.keys() & template.variables}
        names = []
        if turns_on is not None:
            is_switched = any(applied.get(name) is turns_on for name in SWITCHES)
            if template is not None and BUDGET in template.variables:
                is_switched |= (applied.get(BUDGET) != 0) is turns_on
            has_word = EFFORT in applied and given.get(EFFORT, self.effort) == self.effort
            if self.effort is not None and not has_word and (turns_on or not is_switched):
                names.append(EFFORT)
            if self.is_on is not None and not has_word and not is_switched:
                names.append("thinking")
        is_off = turns_on is False
        if self.budget is not None and not is_off and applied.get(BUDGET) != self.budget:
            names.append(self.budget_param)
        return names


def _words_of_off(template: ChatTemplate) -> list[str]:
    """Return the efforts without thoughts that the template knows."""
    return [word for word in OFF if re.search(f"['\"]{word}['\"]", template.source)]


def _has_switch(template: ChatTemplate) -> bool:
    return any(name in template.variables for name in (*SWITCHES, BUDGET))


DEFAULT_THINKING = Thinking()
