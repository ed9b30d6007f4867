"""Prompts that a user gives, which the model answers beside those that it writes itself."""

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..errors import PpsdError, UsageError
from ..models.tokenizer import Tokenizer

HELD_OUT_SHARE = 0.1
LONGEST = 1024  # ids: the KV cache of every slot has room for the longest prompt
FAMILY = "prompts"
Ids = tuple[int, ...]
Messages = Sequence[dict[str, str]]


@dataclass(frozen=True)
class Prompts:
    """share: of the texts, which answer these. learned, held_out: no prompt is in both, in random order."""

    share: float
    learned: tuple[Ids, ...] = ()
    held_out: tuple[Ids, ...] = ()

    @property
    def longest(self) -> int:
        return max(map(len, (*self.learned, *self.held_out)), default=0)

    @property
    def hash(self) -> str:
        return hashlib.sha256(repr((self.learned, self.held_out)).encode()).hexdigest()[:16] if self.learned else ""

    def of_shard(self, number: int, own: int, source: random.Random) -> Iterator[tuple[Ids, bool]]:
        """The prompts of a shard in their order, and whether each comes for the first time in all shards.

        Shard 0 has those that are held out. Of the others each has `own` prompts that come nowhere before; when they
        are through, all come again, in whole passes, without end.
        """
        if number == 0:
            yield from ((ids, True) for ids in self.held_out)
            return
        yield from ((ids, True) for ids in self.learned[(number - 1) * own : number * own])
        while self.learned:
            yield from ((ids, False) for ids in source.sample(self.learned, len(self.learned)))


NO_PROMPTS = Prompts(0.0)


def prompts_of(
    given: Sequence[Messages],
    tokenizer: Tokenizer,
    leaking: Callable[[Sequence[Ids]], Iterable[bool]],
    share: float,
    longest: int,
    seed: int,
    tell: Callable[[str], None],
) -> Prompts:
    """Conversations whose last turn the model is to answer, as ids. A base model continues the last turn.

    Left out, which `tell` hears of: doubles, those of more than `longest` ids, and those that are like the prompts that
    heads are judged by: leaking (Deduplication.leaking). UsageError where less than two are left.
    """
    if not 0 < share <= 1:
        raise UsageError(f"--prompts-share must be above 0 and at most 1, not {share:g}")
    encoded = [encode(tokenizer, messages, number) for number, messages in enumerate(given, 1)]
    leaks = [*leaking(encoded)]
    fitting = [ids for ids, leak in zip(encoded, leaks, strict=True) if not leak and len(ids) <= longest]
    kept = list(dict.fromkeys(fitting))
    whys = {
        f"longer than {longest} tokens": sum(len(ids) > longest for ids in encoded),
        "like prompts of --judged-by": sum(leaks),
        "doubles": len(fitting) - len(kept),
    }
    left_out = ", ".join(f"{count} {why}" for why, count in whys.items() if count)
    if left_out:
        tell(f"of {len(encoded)} prompts {len(kept)} are used; left out: {left_out}")
    if len(kept) < 2:
        raise UsageError(f"--prompts needs two prompts at the least, one of them to judge by; {len(kept)} can be used")
    random.Random(seed).shuffle(kept)
    held_out = max(1, min(int(HELD_OUT_SHARE * len(kept)), 256))
    return Prompts(share, tuple(kept[held_out:]), tuple(kept[:held_out]))


def encode(tokenizer: Tokenizer, messages: Messages, number: int) -> Ids:
    """As the model is asked. UsageError, with its number, for one that is empty or that the template refuses."""
    if not messages[-1]["content"].strip():
        raise UsageError(f"prompt {number} of --prompts is empty")
    try:
        if tokenizer.chat_template is None:
            return tuple(tokenizer.encode(messages[-1]["content"]))
        return tuple(tokenizer.encode(tokenizer.chat_template.render(messages), add_special_tokens=False))
    except PpsdError as error:
        raise UsageError(f"prompt {number} of --prompts: {error}") from None
