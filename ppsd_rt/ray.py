"""ppsd-rt on Ray Serve: replicas behind the server's own routes. Needs `pip install "ppsd-rt[ray]"`.

    serve run ppsd_rt.ray:app model=smollm2-135m replicas=4

Two deployments. `Front` has the HTTP routes, the tokenizer and what is committed; `Engines` decodes. A replica of
Engines is one process, or rank 0 of a pipeline whose other ranks are actors of its placement group. Ray scales, places
and restarts them. An answer whose replica is lost goes on at another one, with the same tokens: see front/backend.py.
"""

import asyncio
import hashlib
import os
import socket
import threading
from collections.abc import AsyncIterator, Generator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

from .extras import need

need("ray", "ray", "Ray Serve")

import ray  # noqa: E402
from pydantic import BaseModel, ConfigDict, Field  # noqa: E402
from ray import serve  # noqa: E402
from ray.exceptions import RayError  # noqa: E402
from ray.serve.config import RequestRouterConfig  # noqa: E402
from ray.serve.exceptions import RayServeException, RequestCancelledError  # noqa: E402
from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica  # noqa: E402
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: E402
from starlette.types import ASGIApp, Receive, Scope, Send  # noqa: E402

from .backend import Cancellation  # noqa: E402
from .engine import Engine, open_model  # noqa: E402
from .errors import PpsdError  # noqa: E402
from .front.asks import Ask, EngineLost, Facts, facts_of, rounds_of  # noqa: E402
from .front.backend import FrontBackend  # noqa: E402
from .front.learned import Learned  # noqa: E402
from .pipeline.rounds import Drafted, Logprob, Round  # noqa: E402
from .pipeline.schedule import parse_schedule  # noqa: E402
from .ranks.launch import RankOptions, check_backend, join  # noqa: E402
from .ranks.world import World  # noqa: E402
from .serve.app import make_app  # noqa: E402
from .serve.service import Service  # noqa: E402
from .serve.settings import Settings  # noqa: E402

FIRST = 64  # ids of a prompt that decide where it goes: a block of the KV cache
_ENGINES = "Engines"
_MODEL = ("model", "exit_head", "backend", "dtype", "kv_dtype", "threads")

Event = Round | Drafted


class Options(BaseModel):
    """Of the application. The model's are those of `ppsd-run`.

    replicas: at most so many; `least` stay when nobody asks. ongoing: answers of a replica that Ray takes for enough.
    ranks: processes of a replica, each with some layers. cpus, gpus: of each process, as Ray counts them. grace:
    seconds that a replica has for its answers when it is to end. learn: the front's folder, see Engine.from_pretrained.
    """

    model_config = ConfigDict(extra="forbid")

    model: str = "smollm2-135m"
    model_name: str | None = None
    exit_head: str = "auto"
    backend: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    kv_memory: str | None = None
    threads: int | None = None
    schedule: str = "auto"
    learn: str | None = None
    api_key: str | None = None
    least: int = Field(1, ge=1)
    replicas: int = Field(1, ge=1)
    ongoing: float = Field(8.0, gt=0)
    delay: float = Field(30.0, ge=0)  # seconds of low load before a replica is given back
    ranks: int = Field(1, ge=1)
    cpus: float = Field(1.0, ge=0)
    gpus: float = Field(0.0, ge=0)
    grace: float = Field(60.0, ge=0)


class PrefixRouter(FIFOMixin, RequestRouter):
    """Prompts that begin alike go to one replica while it has room, so that their blocks of the KV cache are there.

    By rendezvous hashing: when a replica comes or goes, only the prompts move that it gets or had.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        ids = pending_request.args[0] if pending_request and pending_request.args else None
        prompt = ids.prompt if isinstance(ids, Ask) else []
        return [[replica] for replica in by_preference(prompt, candidate_replicas)]


def by_preference(prompt: list[int], replicas: list[RunningReplica]) -> list[RunningReplica]:
    begins = " ".join(map(str, prompt[:FIRST]))

    def weight(replica: RunningReplica) -> bytes:
        return hashlib.blake2b(f"{replica.replica_id.unique_id} {begins}".encode(), digest_size=8).digest()

    return sorted(replicas, key=weight)


class Engines:
    """One replica."""

    def __init__(self, options: Options) -> None:
        self._engine = _open_pipeline(options) if options.ranks > 1 else _open(options)
        self._learned, self._recalled, self._hearing = Learned(self._engine), 0, threading.Lock()

    async def facts(self) -> Facts:
        return facts_of(self._engine)

    def check_health(self) -> None:
        """Ray ends and replaces a replica of which this raises."""
        if failure := getattr(self._engine.backend, "failure", None):
            raise PpsdError(failure)

    def _hear(self, told: "LearnedState") -> None:
        """What the front has learned since it has last asked here."""
        with self._hearing:
            for texts in told.recalled[self._recalled :]:
                for ids, owner in ray.get(texts):
                    self._learned.recall(ids, owner)
            self._recalled = max(self._recalled, len(told.recalled))
        if told.head is not None:
            self._learned.use(told.hash, partial(_fetched, told.head))

    async def events(self, ask: Ask, told: "LearnedState") -> AsyncIterator[list[Event | PpsdError]]:
        """Those that have come together; an error is the last one."""
        if told.hash != self._learned.hash or len(told.recalled) > self._recalled:
            threading.Thread(target=self._hear, args=(told,), name="told", daemon=True).start()
        loop, items = asyncio.get_running_loop(), asyncio.Queue[Event | PpsdError | None]()
        cancellation = Cancellation()

        def tell(item: Event | PpsdError | None) -> None:
            loop.call_soon_threadsafe(items.put_nowait, item)

        def decode() -> None:
            engine = self._engine
            self._learned.begins()
            try:
                with closing(rounds_of(engine, ask, cancellation)) as rounds:
                    for event in rounds:
                        tell(event)
            except PpsdError as error:
                if getattr(engine.backend, "failure", None):
                    os._exit(1)  # a rank is lost: the pipeline is made anew, and the answer goes on elsewhere
                tell(error)
            finally:
                self._learned.ended()
                tell(None)

        threading.Thread(target=decode, name="answer").start()
        try:
            over = False
            while not over:
                burst = [await items.get()]
                while not items.empty():
                    burst.append(items.get_nowait())
                over = burst[-1] is None
                if some := [item for item in burst if item is not None]:
                    yield some
        finally:
            cancellation.ask()

    async def logprobs(self, ids: list[int], top: int) -> list[Logprob]:
        return await asyncio.to_thread(self._engine.backend.logprobs, ids, top)


def _open(options: Options) -> Engine:
    return Engine.from_pretrained(**options.model_dump(include={*_MODEL, "kv_memory"}))


class Rank:
    """A rank other than 0; it ends with the replica that has started it."""

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def serve(self, world: World, options: RankOptions) -> None:
        join(world, options)


def _open_pipeline(options: Options) -> Engine:
    """The other ranks get the other bundles of this replica's placement group."""
    group = ray.util.get_current_placement_group()
    others, actor = [], ray.remote(Rank)
    for bundle in range(1, options.ranks):
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        others.append(actor.options(num_cpus=options.cpus, num_gpus=options.gpus, scheduling_strategy=place).remote())
    nodes = [str(ray.get_runtime_context().get_node_id()), *ray.get([rank.node.remote() for rank in others])]
    with socket.create_server(("", 0)) as probe:
        port = probe.getsockname()[1]
    host = ray.util.get_node_ip_address()
    check_backend(options.backend, "auto")
    told = RankOptions(**options.model_dump(include={*_MODEL, "schedule", "kv_memory"} - {"backend"}))
    local = [(nodes[:rank].count(node), nodes.count(node)) for rank, node in enumerate(nodes)]
    worlds = [World(rank, options.ranks, *place, host, port) for rank, place in enumerate(local)]
    for rank, world in zip(others, worlds[1:], strict=True):
        rank.serve.remote(world, told)
    engine = join(worlds[0], told)
    assert engine is not None  # of rank 0
    engine._ray_ranks = others  # type: ignore[attr-defined]  # they live as long
    return engine


def _fetched(head: Any) -> str:
    try:
        return str(ray.get(head))
    except RayError as error:
        raise PpsdError(f"it cannot be fetched: {error}") from None


@dataclass(frozen=True)
class LearnedState:
    """Of what the front has learned, the head's hash and what fetches the rest: whoever has it fetches nothing."""

    hash: str = ""
    head: Any = None  # a text
    recalled: tuple[Any, ...] = ()  # lists of (ids, owner)


class _EngineSlots:
    """Wherever Ray's router finds a replica, when it is asked."""

    def __init__(self, handle: Any) -> None:
        self._handle, self._told = handle, LearnedState()
        self._telling, self._recalled = threading.Lock(), list[tuple[list[int], int]]()  # which nobody has asked for

    def events(self, ask: Ask, cancellation: Cancellation) -> Generator[Event, None, None]:
        asked = self._handle.options(stream=True).events.remote(ask, self.told())
        cancellation.tells(asked.cancel)
        try:
            for burst in asked:
                for item in burst:
                    if isinstance(item, PpsdError):
                        raise item
                    yield item
        except (RayError, RayServeException, RequestCancelledError) as error:
            if not cancellation.asked:
                raise _lost(error) from None
        finally:
            asked.cancel()

    def logprobs(self, ids: list[int], top: int) -> list[Logprob]:
        try:
            return list(self._handle.logprobs.remote(ids, top).result())
        except (RayError, RayServeException) as error:
            raise _lost(error) from None

    def take(self, prompt: list[int], cancellation: Cancellation) -> "_EngineSlots | None":
        return None if cancellation.asked else self

    def tell(self, kind: str, **fields: Any) -> None:
        with self._telling:
            if kind == "head":
                self._told = replace(self._told, hash=fields["hash"], head=ray.put(fields["head"]))
            else:
                self._recalled.append((fields["ids"], fields["owner"]))

    def told(self) -> LearnedState:
        with self._telling:
            if self._recalled:
                texts, self._recalled = ray.put(self._recalled), []
                self._told = replace(self._told, recalled=(*self._told.recalled, texts))
            return self._told

    def leave(self) -> None:
        """Ray counts by itself."""


def _lost(error: Exception) -> EngineLost:
    sleep(0.5)  # Ray may not have noticed it yet
    return EngineLost(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")


class _Front:
    """The server's routes as an ASGI application, made when Ray starts it."""

    _app: ASGIApp

    def __init__(self, options: Options) -> None:
        self._options = options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            return await self._app(scope, receive, send)
        await receive()
        self._app = make_app(service := await self._service())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        service.admission.stopping = True
        await send({"type": "lifespan.shutdown.complete"})
        return None

    async def _service(self) -> Service:
        options = self._options
        handle = serve.get_deployment_handle(_ENGINES)
        facts = await handle.facts.remote()
        checkpoint, tokenizer = await asyncio.to_thread(open_model, options.model, options.backend)
        engine = Engine(
            checkpoint, tokenizer, FrontBackend(facts, _EngineSlots(handle)), options.model_name or options.model
        )
        if options.learn is not None:
            await asyncio.to_thread(engine.learn, Path(options.learn), options.exit_head)
        return Service(engine, Settings(api_key=options.api_key, host=None, schedule=parse_schedule(options.schedule)))


def app(options: Options) -> serve.Application:
    """What `serve run` and a Serve config file name. UsageError for a schedule that means nothing."""
    parse_schedule(options.schedule)
    resources = {"CPU": options.cpus, "GPU": options.gpus}
    many = {"placement_group_bundles": [resources] * options.ranks, "placement_group_strategy": "PACK"}
    engines = serve.deployment(
        name=_ENGINES,
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": options.gpus},
        max_ongoing_requests=48,
        autoscaling_config={
            "min_replicas": options.least,
            "max_replicas": options.replicas,
            "target_ongoing_requests": options.ongoing,
            "downscale_delay_s": options.delay,
        },
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        graceful_shutdown_timeout_s=options.grace,
        health_check_period_s=2.0,
        **(many if options.ranks > 1 else {}),
    )(Engines)
    # Beside Serve's own controller, without which nothing is answered either.
    head = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}
    front = serve.deployment(
        name="Front", max_ongoing_requests=4096, ray_actor_options=head, graceful_shutdown_timeout_s=options.grace
    )(serve.ingress(_Front(options))(_Ingress))
    return front.bind(engines.bind(options))


class _Ingress:
    """Holds the engines' handle, which makes Ray deploy them."""

    def __init__(self, engines: Any) -> None:
        self._engines = engines
