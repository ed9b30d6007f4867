"""Replicas in simulated time: requests arrive, wait for room, and are decoded together.

    replica = Replica(stages=(0.02,), early=0.002, head=0.0005, row_share=0.02, batch=16)
    Cluster([replica] * 4).run(poisson(rate=3.0, count=1000, shape=Shape(prompt=200, answer=150)))

A replica is a pipeline of stages, each a worker of its own; of one stage it is a process. Its answers share passes.
Over several stages as many passes are under way as there are stages, each with its share of the answers, as in
csrc/decoding/chain.h. What is assumed beside simulate.py:

- a pass over n rows takes `1 + row_share * (n - 1)` times as long as one over one row, whatever they are;
- a message takes `link`, and beside it a time with an exponential distribution, of mean `late`; none overtakes another;
- K drafts are drawn in turns, before each pass, for all answers together;
- a front gives each request to the replica with the most room, or where prompts begin alike to the same one;
- a replica has the KV cache of its last `prefixes` different beginnings, and computes only what comes after them.

An answer that has all stages to itself, decoded by the real scheduler: `simulate`.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from random import Random
from typing import Self

PASS_ROWS = 64  # of a prompt in one pass


@dataclass(frozen=True)
class Replica:
    """Seconds of one row. stages: each of them; early: of the first, the layers before the exit head; head: a draft.

    drafts: before each pass; acceptance: of each, if those before it are right. link: a message to the next stage, and
    the verdict back; late: how much later it comes on average, at random.
    """

    stages: tuple[float, ...]
    early: float = 0.0
    head: float = 0.0
    row_share: float = 0.0
    link: float = 0.0
    late: float = 0.0
    batch: int = 1
    drafts: int = 0
    acceptance: float = 0.8
    prefixes: int = 64

    def seconds(self, stage: int, answers: int, prompt_rows: int) -> float:
        """Of a pass over the rows of so many answers and of prompts; the first stage draws the drafts before it."""

        def growth(rows: int) -> float:
            return 1 + self.row_share * (rows - 1) if rows else 0.0

        rows = answers * (self.drafts + 1) + prompt_rows
        if stage:
            return self.stages[stage] * growth(rows)
        drafting = self.drafts * (self.early * growth(answers) + self.head) if answers else 0.0
        early = self.early * growth(answers + prompt_rows)
        return drafting + early + (self.stages[0] - self.early) * growth(rows)


@dataclass(frozen=True)
class Request:
    """prompt, answer: tokens. prefix: which beginning it has, of `shared` tokens. user: asks again `think` after it."""

    number: int
    arrival: float
    prompt: int
    answer: int
    prefix: int = 0
    shared: int = 0
    think: float | None = None


@dataclass(frozen=True)
class Shape:
    """Means of tokens; exact: all requests have just so many, else their lengths are geometric. prefixes: how many
    beginnings of `shared` tokens there are."""

    prompt: int = 1
    answer: int = 100
    exact: bool = False
    prefixes: int = 1
    shared: int = 0

    def request(self, number: int, arrival: float, rng: Random, think: float | None = None) -> Request:
        def length(mean: int) -> int:
            return mean if self.exact else max(1, round(rng.expovariate(1 / mean)))

        prompt = self.shared + length(max(1, self.prompt - self.shared))
        return Request(number, arrival, prompt, length(self.answer), rng.randrange(self.prefixes), self.shared, think)


def poisson(rate: float, count: int, shape: Shape, burst: int = 1, seed: int = 0) -> list[Request]:
    """`rate` requests a second, so many of them together."""
    rng, now, requests = Random(seed), 0.0, list[Request]()
    while len(requests) < count:
        now += rng.expovariate(rate / burst)
        requests += [shape.request(len(requests) + place, now, rng) for place in range(burst)]
    return requests[:count]


def users(number: int, think: float, shape: Shape, seed: int = 0) -> list[Request]:
    """The first request of each; a cluster has them ask again."""
    rng = Random(seed)
    return [shape.request(user, rng.expovariate(1 / think), rng, think) for user in range(number)]


@dataclass
class Answered:
    """Seconds. first: when its first token came."""

    request: Request
    begun: float = 0.0
    first: float = 0.0
    ended: float = 0.0
    tokens: int = 0

    @property
    def wait(self) -> float:
        return self.first - self.request.arrival

    @property
    def pace(self) -> float:
        """Seconds a token, after the first."""
        return (self.ended - self.first) / max(self.tokens - 1, 1)


@dataclass
class _Answer:
    answered: Answered
    rng: Random
    prompt_left: int  # rows
    rows: int = 0  # of its prompt, under way


class _Running:
    """A replica at work. waiting: answers that have no rows under way; passes: those that wait for each later stage."""

    def __init__(self, replica: Replica) -> None:
        stages = len(replica.stages)
        self.replica, self.answers = replica, 0
        self.flying = 0  # passes under way
        self.seconds, self.busy = [0.0] * stages, [False] * stages  # that each stage has worked; does it now?
        self.waiting = deque[_Answer]()
        self.passes: list[deque[list[_Answer]]] = [deque() for _ in replica.stages]
        self.arrival = [0.0] * stages  # of the last message of each stage
        self.known = OrderedDict[int, None]()  # beginnings


def _home(prefix: int, replicas: int) -> int:
    """Which replica requests that begin so go to: by rendezvous hashing, as ppsd_rt/ray.py does."""
    return max(range(replicas), key=lambda number: blake2b(f"{number} {prefix}".encode(), digest_size=8).digest())


class Cluster:
    """shape: of the requests that users ask next. by_prefix: requests that begin alike go to one replica while it has
    room."""

    def __init__(
        self, replicas: Sequence[Replica], shape: Shape | None = None, by_prefix: bool = False, seed: int = 0
    ) -> None:
        self._running = [_Running(replica) for replica in replicas]
        self._shape, self._by_prefix, self._seed = shape, by_prefix, seed
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order, self._queue = 0, deque[Request]()
        self._rng, self._late = Random(seed + 1), Random(seed + 2)
        self.answered: list[Answered] = []
        self.now = 0.0

    def run(self, requests: Sequence[Request], most: int | None = None) -> Self:
        """Until `most` requests have been answered, or as many as there are."""
        for request in requests:
            self._at(request.arrival, partial(self._arrive, request))
        most = len(requests) if most is None else most
        while self._events and len(self.answered) < most:
            self.now, _, happen = heapq.heappop(self._events)
            happen()
        return self

    def busy(self) -> float:
        """The share of the time in which a stage works, of all stages."""
        stages = [seconds for running in self._running for seconds in running.seconds]
        return sum(stages) / (len(stages) * self.now)

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (when, self._order, happen))

    def _arrive(self, request: Request) -> None:
        self._queue.append(request)
        self._let_in()

    def _let_in(self) -> None:
        while self._queue:
            free = [running for running in self._running if running.answers < running.replica.batch]
            if not free:
                return
            request = self._queue.popleft()
            least = min(free, key=lambda running: running.answers / running.replica.batch)
            wanted = self._running[_home(request.prefix, len(self._running))] if self._by_prefix else least
            self._begin(wanted if wanted in free else least, request)

    def _begin(self, running: _Running, request: Request) -> None:
        running.answers += 1
        shared = request.shared if request.prefix in running.known else 0
        running.known[request.prefix] = None
        running.known.move_to_end(request.prefix)
        if len(running.known) > running.replica.prefixes:
            running.known.popitem(last=False)
        rows = max(request.prompt - shared, 1)
        running.waiting.append(_Answer(Answered(request, self.now), Random(self._seed + request.number), rows))
        self._start(running)

    def _start(self, running: _Running) -> None:
        """A pass for a share of the answers, if the first stage is free and not every stage has one already."""
        waiting, replica = running.waiting, running.replica
        if running.busy[0] or not waiting or running.flying == len(replica.stages):
            return
        share = -(-running.answers // len(replica.stages))
        taken = [waiting.popleft() for _ in range(min(share, len(waiting)))]
        room = PASS_ROWS
        for answer in taken:
            answer.rows = min(answer.prompt_left, room)
            room -= answer.rows
        waiting.extend(answer for answer in taken if answer.prompt_left and not answer.rows)  # no room in this pass
        running.flying += 1
        self._work(running, 0, [answer for answer in taken if answer.rows or not answer.prompt_left])

    def _work(self, running: _Running, stage: int, taken: list[_Answer]) -> None:
        writing, rows = sum(not answer.rows for answer in taken), sum(answer.rows for answer in taken)
        seconds = running.replica.seconds(stage, writing, rows)
        running.busy[stage] = True
        running.seconds[stage] += seconds
        self._at(self.now + seconds, partial(self._done, running, stage, taken))

    def _go_on(self, running: _Running, stage: int) -> None:
        """With the next pass that waits for this stage."""
        if stage == 0:
            self._start(running)
        elif running.passes[stage] and not running.busy[stage]:
            self._work(running, stage, running.passes[stage].popleft())

    def _done(self, running: _Running, stage: int, taken: list[_Answer]) -> None:
        """The pass goes on to the next stage, or its verdict back to the first; a process has nobody to tell."""
        replica = running.replica
        running.busy[stage] = False
        link = replica.link + (self._late.expovariate(1 / replica.late) if replica.late else 0.0)
        if len(replica.stages) > 1 and link:
            running.arrival[stage] = max(running.arrival[stage], self.now + link)
            self._at(running.arrival[stage], partial(self._reach, running, stage + 1, taken))
        else:  # at once, so that what comes back takes part in this stage's next pass
            self._reach(running, stage + 1, taken)
        self._go_on(running, stage)

    def _reach(self, running: _Running, stage: int, taken: list[_Answer]) -> None:
        if stage == len(running.replica.stages):
            return self._verdict(running, taken)
        running.passes[stage].append(taken)
        return self._go_on(running, stage)

    def _verdict(self, running: _Running, taken: list[_Answer]) -> None:
        running.flying -= 1
        drafts, acceptance = running.replica.drafts, running.replica.acceptance
        for answer in taken:
            answered, request = answer.answered, answer.answered.request
            if answer.rows:
                answer.prompt_left -= answer.rows
                answer.rows = 0
                if answer.prompt_left == 0:
                    answered.first, answered.tokens = self.now, 1
            else:
                right = next((place for place in range(drafts) if answer.rng.random() >= acceptance), drafts)
                answered.tokens = min(answered.tokens + 1 + right, request.answer)
            if answer.prompt_left == 0 and answered.tokens == request.answer:
                self._end(running, answered)
            else:
                running.waiting.append(answer)
        self._start(running)

    def _end(self, running: _Running, answered: Answered) -> None:
        running.answers -= 1
        answered.ended = self.now
        self.answered.append(answered)
        think = answered.request.think
        if think is not None and self._shape is not None:
            number = len(self.answered) + len(self._queue) + 10**6
            again = self.now + self._rng.expovariate(1 / think)
            self._at(again, partial(self._arrive, self._shape.request(number, again, self._rng, think)))
        self._let_in()
