"""The training text of the translating demo: an endless, seeded stream of translated sentences.

A small grammar combines the words of translation.toml into English and Swedish. Some pairs of
words (a verb and its object, or an adjective and its noun) are held out. No training sentence
contains such a pair; every probe does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from zlib import crc32

from engine.offline.demo_training.lexicon import (
    PLURAL,
    LexiconDraws,
    Noun,
    Verb,
    adjectives,
    entries,
    lexicon,
    nouns,
)
from engine.offline.demo_training.sentence_parts import (
    NO_WORDS,
    SUBJECT_FORMS,
    SentenceParts,
    Words,
    joined,
)

FIRST_SEEN = {"love icecream", "love ice_cream"}  # always held out
# Tenses and kinds of clauses, with their relative weights.
TENSES = {
    "present": 5,
    "past": 2,
    "future": 1.5,
    "modal": 1.5,
}
CLAUSE_KINDS = {
    "statement": 6,
    "negation": 2,
    "question": 2,
}
CONTRACTIONS = {"will": "won't", "can": "can't"}


class VerbGroup(NamedTuple):
    """The verb of a clause, in two parts per language: English, then Swedish."""

    tense: str
    auxiliary: str  # in questions and negations
    plain: str  # in statements; "" if they have the auxiliary too
    finite: str
    rest: str


class Clause(NamedTuple):
    """A sentence that may lack its capital letter and its final mark."""

    english: str
    swedish: str


class Sentence(NamedTuple):
    topic: str
    english: str
    swedish: str


def held_out(pair: str) -> bool:
    """Whether a pair of words is held out of training: about one in twelve."""
    if pair in FIRST_SEEN:
        return True
    return crc32(pair.encode()) % 12 == 0


def parted(verb: str) -> tuple[str, str]:
    """Split a verb such as vill_ha in two: adverbs and subjects stand between its parts."""
    finite, _, rest = verb.partition("_")
    return finite, rest


def finished(text: str, end: str) -> str:
    """Return the text with a capital letter, and with the mark `end` unless it has one."""
    text = text.replace("_", " ")
    if text[-1] not in "?!.":
        text += end
    return text[0].upper() + text[1:]


def be_form(subject: Words, tense: str) -> str:
    """Return the form of "be" after a subject."""
    is_first = subject.english == "I"
    if tense == "past":
        return "was" if is_first or subject.person == "third" else "were"
    if is_first:
        return "am"
    return "is" if subject.person == "third" else "are"


def statement_verbs(verb: Verb, group: VerbGroup, adverb: str) -> str:
    if group.plain:
        return joined(adverb, group.plain)
    return joined(group.auxiliary, adverb, verb.base)


def swedish_predicate(group: VerbGroup, complement: Words, adverb: str) -> str:
    """Return the verb, the adverb and the complement of a statement."""
    if complement.light and not group.rest:
        return joined(group.finite, complement.swedish, adverb)
    return joined(group.finite, adverb, group.rest, complement.swedish)


def statement(*parts: Words) -> Clause:
    """Return parts of a sentence in their order, which is the same in both languages."""
    english = joined(*(part.english for part in parts))
    swedish = joined(*(part.swedish for part in parts))
    return Clause(english, swedish)


def question(*parts: Words) -> Clause:
    english, swedish = statement(*parts)
    return Clause(f"{english}?", f"{swedish}?")


class Grammar:
    """Draws sentences from one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = LexiconDraws(seed)
        self.parts = SentenceParts(self.rng)

    def sentence(self, *, probe: bool = False) -> Sentence:
        """Return the next training sentence or, as a probe, one with a pair that is held out."""
        weights = {name: topic.weight for name, topic in TOPICS.items()}
        while True:
            self.parts.pairs.clear()
            name = self.rng.weighted(weights)
            clause = TOPICS[name].draw(self)
            is_held_out = any(map(held_out, self.parts.pairs))
            if is_held_out == probe:
                end = self.rng.choice(("", "", ".", ".", ".", "!"))
                english = finished(clause.english, end)
                swedish = finished(clause.swedish, end)
                return Sentence(name, english, swedish)

    def rehearsal(self) -> Sentence:
        """Return names to repeat: the decoder's attention learns copying before anything else."""
        count = self.rng.randint(2, 8)
        names = " ".join(self.rng.name() for _ in range(count))
        return Sentence("rehearsal", names, names)

    # ---- topics ------------------------------------------------------------------------------

    def doing(self) -> Clause:
        """Return a sentence with a verb and its object, which may be a pronoun."""
        verb = Verb(*self.rng.entry("verbs"))
        subject = self.parts.people()
        if verb.kind == "-" and self.rng.chance(0.1):
            return self.clause(subject, verb, self.object_pronoun(subject))
        return self.clause(subject, verb, self.parts.thing(verb))

    def object_pronoun(self, subject: Words) -> Words:
        rows = [row for row in entries("objects") if row[2] != subject.english]
        english, swedish, _ = self.rng.choice(rows)
        return Words(english, swedish, light=True)

    def staying(self) -> Clause:
        """Return a sentence in which a person lives or works in a place."""
        *forms, preposition, swedish_preposition = self.rng.entry("stays")
        verb = Verb(*forms)
        place, swedish_place = self.rng.entry("places")
        english = f"{preposition} {place}"
        swedish = f"{swedish_preposition} {swedish_place}"
        where = Words(english, swedish)
        subject = self.parts.people()
        return self.clause(subject, verb, where)

    def being(self) -> Clause:
        """Return a sentence about the quality, the place or the job of a person or thing."""
        noun = self.rng.choice(nouns())
        subject = self.parts.people()
        kind = self.rng.random()
        if self.rng.chance(0.5):
            return self.being_thing(noun, kind)
        if kind < 0.6:
            return self.be(subject, self.quality(subject))
        if kind < 0.85:
            return self.be(subject, self.parts.place())
        return self.be(subject, self.job(subject))

    def being_thing(self, noun: Noun, kind: float) -> Clause:
        """Return a sentence about the quality or the place of a thing or living being."""
        form = self.rng.choice(SUBJECT_FORMS)
        subject = self.parts.noun_phrase(noun, form, 0.1)
        if kind >= 0.6:
            return self.be(subject, self.parts.place())
        adjective = self.rng.choice(adjectives(noun.kinds))
        self.parts.pairs.add(f"{adjective.english} {noun.one}")
        quality = Words(adjective.english, adjective.forms[subject.form])
        return self.be(subject, quality)

    def quality(self, subject: Words) -> Words:
        """Return an adjective that describes only living beings."""
        alive = adjectives(frozenset(["alive"]))
        found = [adjective for adjective in alive if adjective.kind != "-"]
        adjective = self.rng.choice(found)
        return Words(adjective.english, adjective.forms[subject.form])

    def job(self, subject: Words) -> Words:
        noun = self.rng.choice(nouns("job"))
        if subject.form == PLURAL:
            return Words(noun.many, noun.plural)
        return Words(f"a {noun.one}", noun.swedish)

    def there(self) -> Clause:
        """Return a sentence about the existence of things in a place."""
        form = self.rng.choice(("a", "a", "number"))
        noun = self.rng.choice(nouns())
        what = self.parts.noun_phrase(noun, form)
        where = self.parts.place()
        verb = "are" if what.person == "plural" else "is"
        if self.rng.chance(0.2):
            return question(Words(f"{verb} there", "finns det"), what, where)
        return statement(Words(f"there {verb}", "det finns"), what, where)

    def phrase(self) -> Clause:
        phrases = list(lexicon().phrases.items())
        english, swedish = self.rng.choice(phrases)
        name = self.rng.name()
        place, swedish_place = self.rng.entry("places")
        english = english.format(name, place=place)
        swedish = swedish.format(name, place=swedish_place)
        return Clause(english, swedish)

    # ---- clauses -----------------------------------------------------------------------------

    def clause(self, subject: Words, verb: Verb, complement: Words) -> Clause:
        """Return a statement, its negation or a question. The complement is an object or place."""
        kind = self.rng.weighted(CLAUSE_KINDS)
        group = self.verb_group(subject, verb, kind)
        when = self.parts.time(group.tense)
        if kind == "question":
            finite = Words(group.auxiliary, group.finite)
            rest = Words(verb.base, group.rest)
            return question(finite, subject, rest, complement, when)
        if kind == "negation":
            auxiliary = self.negated(group.auxiliary)
            verbs = f"{auxiliary} {verb.base}"
            adverb = Words("", "inte")
        else:
            adverb = self.adverb(group.tense)
            verbs = statement_verbs(verb, group, adverb.english)
        english = joined(verbs, complement.english)
        swedish = swedish_predicate(group, complement, adverb.swedish)
        predicate = Words(english, swedish)
        return statement(subject, predicate, when)

    def verb_group(self, subject: Words, verb: Verb, kind: str) -> VerbGroup:
        """Return a verb in a drawn tense. One such as vill_ha has a present and a past only."""
        tense = self.rng.weighted(TENSES)
        is_third = subject.person == "third"
        if tense == "past":
            return VerbGroup("past", "did", verb.past, *parted(verb.swedish_past))
        if tense == "present" or "_" in verb.infinitive:
            auxiliary = "does" if is_third else "do"
            plain = verb.third if is_third else verb.base
            return VerbGroup("present", auxiliary, plain, *parted(verb.swedish_present))
        if tense == "future":
            return VerbGroup("future", "will", "", "ska", verb.infinitive)
        english, swedish = ("can", "kan")
        if kind == "statement":
            english, swedish = self.rng.entry("modals")
        if not is_third:
            english = english.replace("wants", "want")
        return VerbGroup("modal", english, "", swedish, verb.infinitive)

    def adverb(self, tense: str) -> Words:
        """Return an adverb such as "always", or most often none."""
        if tense != "modal" and self.rng.chance(0.12):
            english, swedish = self.rng.entry("often")
            return Words(english, swedish)
        return NO_WORDS

    def negated(self, auxiliary: str) -> str:
        is_contracted = self.rng.chance(0.4)
        if not is_contracted or auxiliary == "am":
            return f"{auxiliary} not"
        return CONTRACTIONS.get(auxiliary, f"{auxiliary}n't")

    def be(self, subject: Words, complement: Words) -> Clause:
        """Return a statement with "be", its negation or a question."""
        tense = "past" if self.rng.chance(0.2) else "present"
        kind = self.rng.weighted(CLAUSE_KINDS)
        when = self.parts.time(tense)
        english = be_form(subject, tense)
        swedish = "var" if tense == "past" else "är"
        if kind == "question":
            verb = Words(english, swedish)
            return question(verb, subject, complement, when)
        if kind == "negation":
            english = self.negated(english)
            swedish += " inte"
        verb = Words(english, swedish)
        return statement(subject, verb, complement, when)


class Topic(NamedTuple):
    weight: int
    draw: Callable[[Grammar], Clause]


TOPICS = {
    "doing": Topic(60, Grammar.doing),
    "being": Topic(22, Grammar.being),
    "staying": Topic(7, Grammar.staying),
    "there": Topic(6, Grammar.there),
    "phrase": Topic(5, Grammar.phrase),
}


def probes(count: int = 200) -> list[dict[str, Any]]:
    """Return the content of translate/probes.jsonl."""
    grammar = Grammar(17)
    sentences = [Sentence("doing", "Dan loves icecream", "Dan älskar glass")]
    for _ in range(count - 1):
        sentences.append(grammar.sentence(probe=True))
    return [probe_of(sentence) for sentence in sentences]


def probe_of(sentence: Sentence) -> dict[str, Any]:
    return {
        "topic": sentence.topic,
        "messages": [{"role": "user", "content": sentence.english}],
        "expect": [sentence.swedish],
        "match": "identical",
    }
