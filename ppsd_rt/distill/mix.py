"""What texts begin with: system prompts, first words of questions, first words of plain text.

A chat model asks itself mostly what it was trained on most; the first words (ppsd_rt/data/starters.json) lead it to
what people ask besides: code, maths, summaries, lists, letters, other languages.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import PpsdError
from ..models.files import read_json_object
from ..models.tokenizer import Tokenizer

STARTERS = Path(__file__).parents[1] / "data" / "starters.json"
PLAIN = "text"  # the family that has no question
SYSTEM_SHARE = 0.25  # of the conversations that have another system prompt than the template's own
Encode = Callable[[str], tuple[int, ...]]
_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Beginning:
    """What a text begins with. asks: the rest of a question comes first, of at most `most_question` tokens."""

    family: str
    ids: tuple[int, ...]
    asks: bool
    most_question: int


@dataclass(frozen=True)
class Family:
    """starters: the first words of its texts, each as likely as the others."""

    name: str
    weight: float
    most_question: int
    starters: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Mix:
    """openings: what the template has before the user's text, the first one by default, the others with system prompts.

    between: what it has between that text and the answer. A base model has no openings, and the family `text` alone.
    """

    openings: tuple[tuple[int, ...], ...]
    between: tuple[int, ...]
    families: tuple[Family, ...]
    end_ids: frozenset[int]

    def draw(self, source: random.Random) -> Beginning:
        (family,) = source.choices(self.families, [family.weight for family in self.families])
        starter = source.choice(family.starters)
        if family.name == PLAIN:
            return Beginning(PLAIN, starter, False, 0)
        opening = self.openings[0]
        if len(self.openings) > 1 and source.random() < SYSTEM_SHARE:
            opening = source.choice(self.openings[1:])
        return Beginning(family.name, opening + starter, True, family.most_question)

    @property
    def longest(self) -> int:
        """The most tokens ahead of an answer."""
        starter = max(len(starter) + family.most_question for family in self.families for starter in family.starters)
        return max((len(opening) for opening in self.openings), default=0) + starter + len(self.between)


def mix_of(tokenizer: Tokenizer, end_ids: frozenset[int], starters: Path = STARTERS) -> Mix:
    """The mix of this model and this file. Raises PpsdError, one line, when the template or the file cannot be used."""
    spec = read_json_object(starters)

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    try:
        plain = _family(PLAIN, spec["text"], _encode_plain(tokenizer))
        if tokenizer.chat_template is None:
            return Mix((), (), (plain,), end_ids)
        openings, between = _frame(tokenizer, spec["system"])
        families = tuple(_family(name, family, encode) for name, family in spec["families"].items())
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        page = "docs/reference/file-formats.md"
        raise PpsdError(f"{starters} does not hold starters as {page} describes them ({what})") from None
    return Mix(tuple(map(encode, openings)), encode(between), (*families, plain), end_ids)


def _encode_plain(tokenizer: Tokenizer) -> Encode:
    """A plain text begins as the tokenizer lets it begin, and an empty one with the beginning-of-sequence id."""
    newline = tokenizer.encode("\n", add_special_tokens=False)
    empty = tuple(newline) if tokenizer.bos_id is None else (tokenizer.bos_id,)

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text)) or empty

    return encode


def _family(name: str, spec: dict[str, Any], encode: Encode) -> Family:
    starters = tuple(encode(text) for text in spec["starters"])
    if not starters or not spec["weight"] > 0:
        raise ValueError(f"family {name} needs starters and a weight above 0")
    return Family(name, float(spec["weight"]), int(spec.get("most_question", 0)), starters)


def _frame(tokenizer: Tokenizer, systems: Sequence[str]) -> tuple[list[str], str]:
    """The template cut where the user's text stands: before it (plain, and with each system prompt), and after it."""
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
    return openings, between
