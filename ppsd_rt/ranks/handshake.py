"""Before ranks work they compare what they are, in texts of JSON. Rank 0 then says who has which layers."""

import json
from collections.abc import Callable, Mapping, Sequence

from .control import Control, Kind, text_of

# Fields of a rank's facts, in this order.
FIELDS = (
    "version",
    "wire",
    "model",
    "exit head",
    "format",
    "KV cache",
    "schedule",
    "stages",
    "link delay",
    "kind of device",
)
_AS_ONE = "start all ranks with the same options, files and version"
_MENDS = {
    "kind of device": "they round differently, and the text would depend on what the split is measured to be; give it "
    "with --stages"
}


def unpack(text: str) -> dict[str, str]:
    """Of JSON that may be anybody's."""
    try:
        found = json.loads(text)
        return {field: str(found[field])[:200] for field in FIELDS}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {"version": "unknown"}


def difference(facts: Sequence[Mapping[str, str]]) -> str | None:
    """One line about the first rank that is not like rank 0; None: all is well."""
    for rank, its in enumerate(facts):
        for field in FIELDS:
            if its.get(field) != facts[0].get(field):
                has, rank_0 = its.get(field) or "none", facts[0].get(field) or "none"
                return f"rank {rank} has {field} {has}, rank 0 has {rank_0}: {_MENDS.get(field, _AS_ONE)}"
    return None


class Handshake:
    """Made before `control` is started, so that nothing is missed."""

    def __init__(self, control: Control) -> None:
        self._control, self._heard = control, dict[int, str]()
        for kind in (Kind.FACTS, Kind.SPLIT):
            control.on(kind, lambda rank, _, message: self._heard.update({rank: text_of(message)}))

    def exchange(self, facts: Mapping[str, str], split: Callable[[], Sequence[int]]) -> tuple[int, ...]:
        """Layers of each rank, as rank 0's `split` gives them. PpsdError where a rank differs, the same line on all.

        However long the others take to open their models: who hangs or ends meanwhile is missed by `control`.
        """
        control, world = self._control, self._control.world
        if not world.drafts:
            control.tell(0, Kind.FACTS, 0, json.dumps(dict(facts)))
            control.until(lambda: 0 in self._heard)
            return tuple(json.loads(self._heard[0]))
        control.until(lambda: len(self._heard) == world.last)
        if line := difference([facts, *(unpack(self._heard[rank]) for rank in range(1, world.size))]):
            control.fail(line)
        control.check()
        sizes = tuple(split())
        for rank in range(1, world.size):
            control.tell(rank, Kind.SPLIT, 0, json.dumps(sizes))
        return sizes
