"""Top-k, top-p and min-p, in this order, over the scores of one row, without sorting them.

    ahead of an id: those with a higher score, and those with the same score and a lower id
    top-k  keeps the k ids that have the fewest ahead
    top-p  of those: what is ahead holds less than p of their probability
    min-p  of those: its probability is at least min_p of the best one's
    choice: of what is left, the best score / T + gumbel(seed, position, id)

The rules are those of csrc/cpu/sampler.cpp; probabilities are softmax(score / T). Few ids matter: those within
a margin of the best, and twice the margin until the filters have what they need; `gather` lists them by index. Each
filter is a cut in the order of ids, a score and an index; `search` finds it, sixteen scores at a time. Every sum has a
fixed order, and what does not count enters as zeros, so that it falls as the bar rises, in float32 too.

One program does all for a row, so a row's choice depends on its scores alone.
"""

import triton
import triton.language as tl

from .noise import gumbel

_TOGETHER = tl.constexpr(512)  # candidates that are looked at together
_TESTS = tl.constexpr(16)
_SURELY = tl.constexpr(1e6)  # a margin beyond which nothing is left to find


@triton.jit
def wanted(sampling):
    """Does the request filter?"""
    some = (tl.load(sampling + 4) > 0) | (tl.load(sampling + 5).to(tl.float32, bitcast=True) < 1.0)
    some = some | (tl.load(sampling + 6).to(tl.float32, bitcast=True) > 0.0)
    return some & (tl.load(sampling + 2).to(tl.float32, bitcast=True) > 0.0)


@triton.jit
def key_of(score):
    """int64 that are ordered as float32 scores are."""
    bits = score.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def candidates(scores, indices, first, count, cut, tie):
    """GROUP of them from `first` on: score, key, index, and which of them are before the cut."""
    place = first + tl.arange(0, _TOGETHER)
    score = tl.load(scores + place, mask=place < count, other=float("-inf"))
    index = tl.load(indices + place, mask=place < count, other=0)
    key = key_of(score)
    kept = (place < count) & ((key > cut) | ((key == cut) & (index <= tie)))
    return score, key, index, kept


@triton.jit
def search(scores, indices, count, cut, tie, low, high, goal, best, inverse, WEIGHT: tl.constexpr):
    """The place of a cut between the keys low < cut <= high.

    WEIGHT: the lowest key above which there is less than `goal` weight; else the lowest of the keys that have at least
    `goal` candidates at or above them, so that high is one too high, and low is one that has them.
    """
    while high - low > 1:
        step = (high - low + _TESTS - 1) // _TESTS
        tests = low + step * (1 + tl.arange(0, _TESTS)).to(tl.int64)
        found = tl.zeros([_TESTS], tl.float32)
        first = tl.zeros([], tl.int32)
        while first < count:
            score, key, _index, kept = candidates(scores, indices, first, count, cut, tie)
            if WEIGHT:
                weight = tl.where(kept, tl.exp((score - best) * inverse), 0.0)
                found += tl.sum(tl.where(key[:, None] > tests[None, :], weight[:, None], 0.0), axis=0)
            else:
                found += tl.sum((kept[:, None] & (key[:, None] >= tests[None, :])).to(tl.float32), axis=0)
            first += _TOGETHER
        below = found >= goal
        lower = tl.max(tl.where(below & (tests < high), tests, low), axis=0)
        high = tl.min(tl.where(below | (tests > high), high, tests), axis=0)
        low = lower
    return low, high


@triton.jit
def among(scores, indices, count, cut, tie, key, last):
    """How many kept candidates there are above `key`, and how many on it with an index up to `last`."""
    above, on = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    first = tl.zeros([], tl.int32)
    while first < count:
        _score, its, index, kept = candidates(scores, indices, first, count, cut, tie)
        above += tl.sum((kept & (its > key)).to(tl.int32), axis=0)
        on += tl.sum((kept & (its == key) & (index <= last)).to(tl.int32), axis=0)
        first += _TOGETHER
    return above, on


@triton.jit
def tie_after(scores, indices, count, cut, tie, key, number, OUTPUTS: tl.constexpr):
    """The index of that `number` of the kept candidates with this key; of the last of them, if there are fewer."""
    low, high = tl.zeros([], tl.int32) - 1, tl.zeros([], tl.int32) + OUTPUTS
    _above, on = among(scores, indices, count, cut, tie, key, high)
    if on > number:
        while high - low > 1:
            middle = (low + high) // 2
            _above, on = among(scores, indices, count, cut, tie, key, middle)
            enough = on >= number
            high = tl.where(enough, middle, high)
            low = tl.where(enough, low, middle)
    return high


@triton.jit
def gather(
    all_scores, tops, tiles, scores, indices, bar, best, inverse,
    PROGRAMS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """List the outputs whose score is at least `bar` -> how many there are, and their weight.

    tops [programs]: the best score of each BLOCK of outputs. tiles [programs]: room for a list of blocks.
    """
    GROUP: tl.constexpr = _TOGETHER // BLOCK
    blocks, first = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    while first < PROGRAMS:
        program = first + tl.arange(0, _TOGETHER)
        here = (tl.load(tops + program, mask=program < PROGRAMS, other=float("nan")) >= bar).to(tl.int32)
        tl.store(tiles + blocks + tl.cumsum(here, axis=0) - here, program, mask=here == 1)
        blocks += tl.sum(here, axis=0)
        first += _TOGETHER
    tl.debug_barrier()
    count, covered, first = tl.zeros([], tl.int32), tl.zeros([], tl.float32), tl.zeros([], tl.int32)
    while first < blocks:
        listed = first + tl.arange(0, GROUP)
        tile = tl.load(tiles + listed, mask=listed < blocks, other=PROGRAMS)
        output = (tile[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]).reshape([_TOGETHER])
        score = tl.load(all_scores + output, mask=output < OUTPUTS, other=float("nan"))
        here = (score >= bar).to(tl.int32)
        place = count + tl.cumsum(here, axis=0) - here
        tl.store(scores + place, score, mask=here == 1)
        tl.store(indices + place, output, mask=here == 1)
        covered += tl.sum(tl.where(here == 1, tl.exp((score - best) * inverse), 0.0), axis=0)
        count += tl.sum(here, axis=0)
        first += GROUP
    tl.debug_barrier()
    return count, covered


@triton.jit
def filtered_choice(
    all_scores, tops, totals, tiles, scores, indices, draft_ids, sampling, position,
    PROGRAMS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, DRAFT: tl.constexpr,
):  # fmt: skip
    """The index of the chosen output.

    tops, totals [programs]: of each block the best score, the sum of the weights.
    """
    inverse = tl.load(sampling + 2).to(tl.float32, bitcast=True)
    top_k, top_p = tl.load(sampling + 4), tl.load(sampling + 5).to(tl.float32, bitcast=True)
    min_p = tl.load(sampling + 6).to(tl.float32, bitcast=True)
    best, total = float("-inf"), 0.0
    for begin in tl.static_range(0, PROGRAMS, _TOGETHER):
        program = begin + tl.arange(0, _TOGETHER)
        top = tl.load(tops + program, mask=program < PROGRAMS, other=float("-inf"))
        its = tl.load(totals + program, mask=program < PROGRAMS, other=0.0)
        higher = tl.maximum(best, tl.max(top, axis=0))
        total = total * tl.exp((best - higher) * inverse) + tl.sum(its * tl.exp((top - higher) * inverse), axis=0)
        best = higher

    margin = 8.0
    count, covered = gather(
        all_scores, tops, tiles, scores, indices, best - margin / inverse, best, inverse, PROGRAMS, OUTPUTS, BLOCK
    )
    few = margin < _SURELY
    while few:
        enough = tl.where(
            top_k > 0, count >= top_k, tl.where(top_p < 1.0, covered >= top_p * total, tl.exp(-margin) < min_p)
        )
        few = (count < OUTPUTS) & (margin < _SURELY) & (enough == 0)
        if few:
            margin *= 2.0
            count, covered = gather(
                all_scores, tops, tiles, scores, indices, best - margin / inverse, best, inverse,
                PROGRAMS, OUTPUTS, BLOCK,
            )  # fmt: skip

    floor = key_of(tl.zeros([], tl.float32) + float("-inf")) - 1
    ceiling = key_of(tl.zeros([], tl.float32) + best) + 1
    cut, tie = floor, tl.zeros([], tl.int32) + OUTPUTS
    if (top_k > 0) & (top_k < count):
        cut, _beyond = search(
            scores, indices, count, floor, tie, floor, ceiling, top_k.to(tl.float32), best, inverse, WEIGHT=False
        )
        above, _on = among(scores, indices, count, floor, tie, cut, tie)
        tie = tie_after(scores, indices, count, floor, tie, cut, top_k - above, OUTPUTS)
    if top_p < 1.0:
        if top_k > 0:
            total, first = 0.0, tl.zeros([], tl.int32)
            while first < count:
                score, key, _index, kept = candidates(scores, indices, first, count, cut, tie)
                total += tl.sum(tl.where(kept, tl.exp((score - best) * inverse), 0.0), axis=0)
                first += _TOGETHER
        goal = top_p * total
        _beyond, low = search(scores, indices, count, cut, tie, floor, ceiling, goal, best, inverse, WEIGHT=True)
        # Of candidates with this same score, as many as what is ahead of them leaves room for.
        ahead, first = 0.0, tl.zeros([], tl.int32)
        while first < count:
            score, key, _index, kept = candidates(scores, indices, first, count, cut, tie)
            ahead += tl.sum(tl.where(kept & (key > low), tl.exp((score - best) * inverse), 0.0), axis=0)
            first += _TOGETHER
        bits = low.to(tl.int32)
        weight = tl.exp(((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True) - best) * inverse)
        room = tl.where(weight > 0.0, tl.ceil((goal - ahead) / tl.maximum(weight, 1e-37)), 1.0)
        number = tl.maximum(tl.minimum(room, 1.0 * OUTPUTS), 1.0).to(tl.int32)
        last = tie_after(scores, indices, count, cut, tie, low, number, OUTPUTS)
        tie = tl.where(low == cut, tl.minimum(tie, last), last)
        cut = low

    low_seed, high_seed = (
        tl.load(sampling).to(tl.uint32, bitcast=True),
        tl.load(sampling + 1).to(tl.uint32, bitcast=True),
    )
    chosen, winner, first = float("-inf"), tl.zeros([], tl.int32) + OUTPUTS, tl.zeros([], tl.int32)
    while first < count:
        score, _key, index, kept = candidates(scores, indices, first, count, cut, tie)
        kept = kept & ((tl.exp((score - best) * inverse) >= min_p) | (score == best))
        ids = tl.load(draft_ids + index, mask=kept, other=0) if DRAFT else index
        noisy = score * inverse + gumbel(low_seed, high_seed, position + ids * 0, ids)
        noisy = tl.where(kept, noisy, float("-inf"))
        ahead_of = tl.max(noisy, axis=0)
        nearest = tl.min(tl.where(kept & (noisy == ahead_of), index, OUTPUTS), axis=0)
        winner = tl.where(ahead_of > chosen, nearest, winner)
        chosen = tl.maximum(chosen, ahead_of)
        first += _TOGETHER
    return tl.minimum(winner, OUTPUTS - 1)
