"""What /metrics tells Prometheus."""

from collections.abc import Callable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.process_collector import ProcessCollector

from ..generation import Completion
from .admission import Admission

_DAYS = 14
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class Metrics:
    """One registry for each server, so that several can be in one process."""

    def __init__(
        self,
        admission: Admission,
        drafts: Callable[[Completion], tuple[int, int]],
        days: Callable[[], Mapping[str, Sequence[int]]],
    ) -> None:
        """drafts: those of an answer that clients may hear of, accepted and rejected. days: of each, how many drafts of
        the exit head were judged, and how many were right."""
        self._told, self._days = drafts, days
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._requests = Counter("ppsd_requests", "HTTP requests", ["path", "status"], registry=registry)
        self._seconds = Histogram(
            "ppsd_request_seconds", "from request to end of response", ["path"], buckets=_SECONDS, registry=registry
        )
        self._answers = Counter("ppsd_answers", "answers that have ended", ["finish_reason"], registry=registry)
        self._prompt = Counter("ppsd_prompt_tokens", "tokens of prompts", registry=registry)
        self._tokens = Counter("ppsd_completion_tokens", "tokens of answers", registry=registry)
        self._drafts = Counter("ppsd_draft_tokens", "draft tokens", ["verdict"], registry=registry)
        self.first = Histogram(
            "ppsd_first_token_seconds", "from request to first token", buckets=_SECONDS, registry=registry
        )
        self.between = Histogram(
            "ppsd_round_seconds", "between arrivals of an answer's tokens", buckets=_BETWEEN, registry=registry
        )
        waiting = Gauge("ppsd_answers_waiting", "answers that wait for their first token", registry=registry)
        waiting.set_function(lambda: admission.waiting)
        running = Gauge("ppsd_answers_running", "answers that have their first token", registry=registry)
        running.set_function(lambda: admission.running)
        self._by_day = Gauge(
            "ppsd_draft_acceptance_ratio", "share of the exit head's drafts that were right", ["day"], registry=registry
        )

    def request(self, path: str, status: int, seconds: float) -> None:
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def ended(self, completion: Completion) -> None:
        accepted, rejected = self._told(completion)
        self._answers.labels(completion.finish_reason).inc()
        self._prompt.inc(len(completion.prompt_ids))
        self._tokens.inc(len(completion.ids))
        self._drafts.labels("accepted").inc(accepted)
        self._drafts.labels("rejected").inc(rejected)

    def by_day(self) -> dict[str, float]:
        """Share of the exit head's drafts that were right."""
        return {day: right / judged for day, (judged, right) in [*self._days().items()][-_DAYS:]}

    def text(self) -> bytes:
        self._by_day.clear()
        for day, share in self.by_day().items():
            self._by_day.labels(day).set(share)
        return generate_latest(self._registry)
