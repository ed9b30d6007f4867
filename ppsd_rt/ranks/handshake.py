"""Before ranks work they compare what they are. Rank 0 then says who has which layers."""

import hashlib
from collections.abc import Callable, Mapping, Sequence

from ..models.eagle3 import Eagle3File
from ..models.head_file import HeadFile
from .control import Control, Kind

_AS_ONE = "start all ranks with the same options, files and version"
_MENDS = {
    "kind of device": "they round differently, and the text would depend on what the split is measured to be; give it "
    "with --stages"
}


def exchange(control: Control, facts: Mapping[str, str], split: Callable[[], Sequence[int]]) -> tuple[int, ...]:
    """Layers of each rank, as rank 0's `split` gives them. PpsdError where a rank differs, the same line on all.

    However long the others take to open their models: who hangs or ends meanwhile is missed by `control`.
    """
    if not control.world.drafts:
        return tuple(control.ask(0, Kind.FACTS, facts))
    others = range(1, control.world.size)
    if line := difference([facts, *(control.next(rank, Kind.FACTS) for rank in others)]):
        control.fail(line)
    control.check()
    sizes = tuple(split())
    for rank in others:
        control.tell(rank, Kind.FACTS, sizes)
    return sizes


def difference(facts: Sequence[Mapping[str, str]]) -> str | None:
    """One line about the first rank that is not like rank 0; None: all is well."""
    for rank, its in enumerate(facts):
        for field, wanted in facts[0].items():
            if (found := its.get(field)) != wanted:
                has, mend = str(found or "none")[:200], _MENDS.get(field, _AS_ONE)
                return f"rank {rank} has {field} {has}, rank 0 has {wanted or 'none'}: {mend}"
    return None


def head_hash(head: HeadFile) -> str:
    digest = hashlib.sha256(f"{head.info.kind} {head.info.exit_layer}".encode())
    if isinstance(head, Eagle3File):  # whose settings are beside its tensors
        digest.update(repr(head.eagle).encode())
    for name, tensor in sorted(head.tensors.items()):
        digest.update(name.encode() + tensor.tobytes())
    if head.draft_ids is not None:
        digest.update(head.draft_ids.tobytes())
    return f"{head.info.kind} after layer {head.info.exit_layer}, {digest.hexdigest()[:16]}"
