"""What texts begin with: system prompts, first words of questions, requests about passages, first words of plain text.

A chat model asks itself mostly what it was trained on most; the first words (ppsd_rt/data/starters.json) lead it to
what people ask besides: code, maths, lists, letters, other languages. What people ask about documents (summaries,
questions, translations, corrections, a second turn) has what the model wrote before as its documents.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import PpsdError
from ..models.files import read_json_object
from ..models.tokenizer import Tokenizer

STARTERS = Path(__file__).parents[1] / "data" / "starters.json"
PLAIN = "text"  # the family that has no question
SYSTEM_SHARE = 0.25  # of the conversations that have another system prompt than the template's own
LONGEST_PASSAGES = 320  # ids of all the passages of a request
LEAST_PASSAGE = 40  # ids
RECENT = 64  # answers of each family from which passages are taken
Ids = tuple[int, ...]
Encode = Callable[[str], Ids]
_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"
_PASSAGE = "{}"  # in a starter: where its passages stand


@dataclass(frozen=True)
class Beginning:
    """What a text begins with. most_question: tokens of the rest of a question, which
    the model writes first; 0: it answers at once."""

    family: str
    ids: Ids
    most_question: int


@dataclass(frozen=True)
class Family:
    """starters: its texts begin with one of these, each as likely as the others; (), where it is about nothing, behind.

    about: families whose answers are the passages, at most `passages`, between the two parts of a starter. goes_on: it
    is the next turn of a conversation of these instead.
    """

    name: str
    weight: float
    most_question: int  # ids that the model writes after the starter; 0: the request is complete
    starters: tuple[tuple[Ids, Ids], ...]
    about: tuple[str, ...] = ()
    passages: int = 1
    goes_on: bool = False

    @property
    def longest(self) -> int:
        """The most ids of the user's turn."""
        longest = max(len(before) + len(after) for before, after in self.starters)
        return longest + self.most_question + (LONGEST_PASSAGES if self.about else 0)


@dataclass
class Recent:
    """What was said of late, of which texts may begin: by family answers, and whole conversations with their answer."""

    answers: dict[str, deque[Ids]] = field(default_factory=dict)
    conversations: dict[str, deque[Ids]] = field(default_factory=dict)

    def add(self, family: str, ids: Sequence[int], answer: int) -> None:
        self.answers.setdefault(family, deque(maxlen=RECENT)).append(tuple(ids[answer:]))
        self.conversations.setdefault(family, deque(maxlen=RECENT)).append(tuple(ids))


@dataclass(frozen=True)
class Mix:
    """openings: what the template has before the user's text, the first one by default, the others with system prompts.

    between: what it has between that text and the answer; again: between the answer and the user's next text; neither
    without the ids that end an answer. A base model has no openings, and the family `text` alone.
    stops: ids that may be the last of a sentence. gap: ids between two passages.
    """

    openings: tuple[Ids, ...]
    between: Ids
    families: tuple[Family, ...]
    end_ids: frozenset[int]
    again: Ids = ()
    stops: frozenset[int] = frozenset()
    gap: Ids = ()

    @property
    def names(self) -> list[str]:
        return [family.name for family in self.families]

    def draw(self, source: random.Random, recent: Recent) -> Beginning:
        while True:
            (family,) = source.choices(self.families, [family.weight for family in self.families])
            if beginning := self._begin(family, source, recent):
                return beginning

    def _begin(self, family: Family, source: random.Random, recent: Recent) -> Beginning | None:
        """None: there is nothing yet that it could be about."""
        before, after = source.choice(family.starters)
        if family.name == PLAIN:
            return Beginning(PLAIN, before, 0)
        if family.goes_on:
            said = [ids for name in family.about for ids in recent.conversations.get(name, ())]
            said = [ids for ids in said if len(ids) <= LONGEST_PASSAGES and ids[-1] in self.end_ids]
            ids = source.choice(said)[:-1] + self.again + before if said else None
        else:
            passages = self._passages(family, source, recent) if family.about else ()
            ids = None if passages is None else self._opening(source) + before + passages + after
        if ids is None:
            return None
        whole = ids if family.most_question else ids + self.between
        return Beginning(family.name, whole, family.most_question)

    def _opening(self, source: random.Random) -> Ids:
        if len(self.openings) > 1 and source.random() < SYSTEM_SHARE:
            return source.choice(self.openings[1:])
        return self.openings[0]

    def _passages(self, family: Family, source: random.Random, recent: Recent) -> Ids | None:
        """Of one family each: passages are of a kind. None: there are none."""
        count = source.randint(1, family.passages)
        of = [name for name in family.about if len(recent.answers.get(name, ())) >= count]
        if not of:
            return None
        chosen = source.sample(recent.answers[source.choice(of)], count)
        cut = [self._whole_sentences(ids, (LONGEST_PASSAGES - (count - 1) * len(self.gap)) // count) for ids in chosen]
        if any(len(passage) < LEAST_PASSAGE for passage in cut):
            return None
        return tuple(id for place, passage in enumerate(cut) for id in (self.gap if place else ()) + passage)

    def _whole_sentences(self, ids: Ids, most: int) -> Ids:
        """The first ones of this answer, of at most so many ids."""
        end = min(most, len(ids) - (ids[-1] in self.end_ids))
        while end and ids[end - 1] not in self.stops:
            end -= 1
        return ids[:end]

    @property
    def longest(self) -> int:
        """The most tokens ahead of an answer."""
        opening = max(map(len, (*self.openings, self.again)), default=0)
        return opening + max(family.longest for family in self.families) + len(self.between)

    def within(self, most: int) -> "Mix":
        """Without the requests about passages that may take more than `most` tokens ahead of an answer."""
        fits = [family for family in self.families if replace(self, families=(family,)).longest <= most]
        return replace(self, families=tuple(family for family in self.families if family in fits or not family.about))


def mix_of(tokenizer: Tokenizer, end_ids: frozenset[int]) -> Mix:
    """The mix of this model. Raises PpsdError, one line, when its template cannot be used."""
    spec = read_json_object(STARTERS)

    def encode(text: str) -> Ids:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    plain = _family(PLAIN, spec["text"], _encode_plain(tokenizer))
    if tokenizer.chat_template is None:
        return Mix((), (), (plain,), end_ids)
    openings, between, again = _frame(tokenizer, spec["system"])
    families = [_family(name, family, encode) for name, family in (spec["families"] | spec["documents"]).items()]
    families = [family for family in families if again or not family.goes_on]
    return Mix(
        tuple(map(encode, openings)),
        encode(between),
        (*families, plain),
        end_ids,
        encode(again),
        frozenset(id for id in range(tokenizer.vocab_size) if _ends_sentence(tokenizer.token_bytes(id))),
        encode("\n\n"),
    )


def _ends_sentence(token: bytes) -> bool:
    return token.endswith(b"\n") or token.rstrip(b"\"')*`").endswith((b".", b"!", b"?"))


def _encode_plain(tokenizer: Tokenizer) -> Encode:
    """A plain text begins as the tokenizer lets it begin, and an empty one with the beginning-of-sequence id."""
    newline = tokenizer.encode("\n", add_special_tokens=False)
    empty = tuple(newline) if tokenizer.bos_id is None else (tokenizer.bos_id,)

    def encode(text: str) -> Ids:
        return tuple(tokenizer.encode(text)) or empty

    return encode


def _family(name: str, spec: dict[str, Any], encode: Encode) -> Family:
    about, passages = tuple(spec.get("about", ())), int(spec.get("passages", 1))
    cut = [text.partition(_PASSAGE) if about else (text, "", "") for text in spec["starters"]]
    starters = tuple((encode(before), encode(after) if after else ()) for before, _, after in cut)
    goes_on = bool(spec.get("goes_on", False))
    return Family(name, float(spec["weight"]), int(spec.get("most_question", 0)), starters, about, passages, goes_on)


def _frame(tokenizer: Tokenizer, systems: Sequence[str]) -> tuple[list[str], str, str]:
    """The template cut where the user's text stands: before it (plain, and with each system prompt), and after it; and
    between an answer and the user's next text, empty where the template shows neither."""
    template = tokenizer.chat_template
    assert template is not None
    user = {"role": "user", "content": _MARK}
    before, mark, between = template.render([user]).partition(_MARK)
    if not mark:
        raise PpsdError("the chat template does not show the user's text, so questions cannot be sampled after it")
    openings = [before]
    for system in systems:
        try:
            openings.append(template.render([{"role": "system", "content": system}, user]).partition(_MARK)[0])
        except PpsdError:  # some templates know no system prompt
            break
    turns = template.render([user, {"role": "assistant", "content": _MARK}, user]).split(_MARK)
    return openings, between, turns[2] if len(turns) == 4 else ""
