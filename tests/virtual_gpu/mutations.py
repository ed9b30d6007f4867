"""Faults that the virtual GPU has to find: each changes the PTX of one kernel, as a fault of the source would."""

import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Mutation:
    """rewrite: of the kernel's PTX -> the same with a fault, or None where there is nothing to change.

    schedule and prompt (its length): where it matters.
    """

    kernel: str
    rewrite: Callable[[str], str | None]
    schedule: str = "fixed"
    prompt: int = 7
    changed: int = 0

    def change(self, ptx: str) -> str:
        if not re.search(rf"\.visible \.entry {self.kernel}\(", ptx):
            return ptx
        new = self.rewrite(ptx)
        if new is None or new == ptx:
            return ptx
        self.changed += 1
        return new


def without(pattern: str, number: int = 0) -> Callable[[str], str | None]:
    """Without one of the instructions that match."""

    def rewrite(ptx: str) -> str | None:
        found = list(re.finditer(pattern, ptx))
        if len(found) <= number:
            return None
        where = found[number]
        return ptx[: where.start()] + ptx[where.end() :]

    return rewrite


def instead(pattern: str, by: str, number: int = 0) -> Callable[[str], str | None]:
    def rewrite(ptx: str) -> str | None:
        found = list(re.finditer(pattern, ptx))
        if len(found) <= number:
            return None
        where = found[number]
        return ptx[: where.start()] + where.expand(by) + ptx[where.end() :]

    return rewrite


def trigger_first(ptx: str) -> str:
    """Dependents may begin before the kernel has waited itself."""
    wait, trigger = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"
    return ptx.replace(trigger, "", 1).replace(wait, f"{trigger} {wait}", 1)


def wait_later(ptx: str) -> str | None:
    """Behind the first load of what is not weights: `state`."""
    load = re.search(r"ld\.global\.b32 \{[^;]*;", ptx)
    if load is None or ptx.find("griddepcontrol.wait;") > load.start():
        return None
    ptx = ptx[: load.end()] + " griddepcontrol.wait; griddepcontrol.launch_dependents;" + ptx[load.end() :]
    return ptx.replace("griddepcontrol.wait;", "", 1).replace("griddepcontrol.launch_dependents;", "", 1)


def swapped(first: int, second: int) -> Callable[[str], str]:
    """Two arguments of the kernel."""

    def rewrite(ptx: str) -> str:
        def other(where: re.Match[str]) -> str:
            number = int(where[2])
            return f"{where[1]}{second if number == first else first if number == second else number}]"

        return re.sub(r"(\[\w+_param_)(\d+)\]", other, ptx)

    return rewrite


def unguarded(operation: str, number: int = 0) -> Callable[[str], str | None]:
    return instead(rf"@!?%p\d+ ({operation})", r"\1", number)


def no_barrier_before(pattern: str) -> Callable[[str], str | None]:
    def rewrite(ptx: str) -> str | None:
        found = re.search(pattern, ptx)
        barrier = ptx.rfind("bar.sync", 0, found.start()) if found else -1
        return None if barrier < 0 else ptx[:barrier] + ptx[ptx.index(";", barrier) + 1 :]

    return rewrite


MUTATIONS = {
    # programmatic dependent launches
    "no wait": Mutation("swiglu_kernel", without(r"griddepcontrol\.wait;")),
    "no wait, attention": Mutation("attention_kernel", without(r"griddepcontrol\.wait;")),
    "the wait behind a load of state": Mutation("linear_kernel", wait_later),
    "the trigger before the wait": Mutation("qkv_kernel", trigger_first),
    # barriers
    "no barrier before a release": Mutation(
        "verdict_kernel", no_barrier_before(r"atom\.global\.gpu\.release"), "overlap"
    ),
    "no barrier before the record's number": Mutation("verdict_kernel", no_barrier_before(r"st\.release\.sys")),
    "no barrier, heads": Mutation("heads_kernel", without(r"bar\.sync\s+0;", 1)),
    "no barrier, linear": Mutation("linear_kernel", without(r"bar\.sync\s+0;", 1)),
    "no barrier, attention": Mutation("attention_kernel", without(r"bar\.sync\s+0;", 2)),
    "a barrier for half of the threads": Mutation(
        "swiglu_kernel", instead(r"(\s)bar\.sync(\s+0;)", r"\1@%p1 bar.sync\2", 1)
    ),
    # order
    "no acquire": Mutation(
        "begin_verification_kernel",
        instead(r"atom\.global\.acquire\.gpu\.cas", "atom.global.relaxed.gpu.cas"),
        "overlap",
    ),
    "no release": Mutation(
        "verdict_kernel", instead(r"atom\.global\.gpu\.release\.exch", "atom.global.gpu.relaxed.exch"), "overlap"
    ),
    "an arrival without order": Mutation(
        "attention_kernel", instead(r"atom\.global\.gpu\.acq_rel\.add", "atom.global.gpu.relaxed.add"), "plain", 130
    ),
    "copies that are not waited for": Mutation(
        "prompt_linear_kernel", instead(r"cp\.async\.wait_group\s+\d+;", "cp.async.wait_group 7;")
    ),
    "a lock that nobody opens": Mutation("arrived_kernel", without(r"@%p\d+ atom\.global\.gpu\.release\.exch[^;]*;")),
    # values and places
    "a mask less": Mutation("prompt_attention_kernel", unguarded(r"st\.global"), "plain"),
    "a mask less, reading": Mutation("choose_kernel", unguarded(r"ld\.global", 5), "plain"),
    "two arguments swapped": Mutation("linear_kernel", swapped(0, 3)),
    "the cache and sums swapped": Mutation("attention_kernel", swapped(1, 2)),
    "a store beside its place": Mutation(
        "linear_kernel", instead(r"(st\.global[.\w]* \[ %rd\d+ \+) 0 ", r"\1 4 "), "plain"
    ),
    "scales shifted": Mutation(
        "swiglu_kernel", instead(r"(ld\.global\.b16 \{[^}]*\}, \[ %rd\d+ \+) 0 ", r"\1 2 "), "plain"
    ),
    "a sum of other lanes": Mutation("heads_kernel", instead(r"(shfl\.sync\.bfly\.b32\s+%r\d+, %r\d+,) 8,", r"\1 7,")),
}
