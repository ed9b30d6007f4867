"""`ppsd-run serve`: an OpenAI-compatible server."""

import argparse
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ..engine import Engine
from ..errors import PpsdError, UsageError
from ..extras import need
from ..pipeline.schedule import parse_schedule
from .common import kept_prompts, load_engine
from .front import check_front, open_front
from .notes import note

# Options that are settings as they are.
_LIMITS = ("max_body", "max_prompt", "max_answer", "keep_alive", "timeout", "grace")
_SETTINGS = (*_LIMITS, "strict", "plain_contents", "cors", "memory")


_PROMPTS = 4 << 30  # bytes of --prompt-cache


@contextmanager
def _prompt_cache(engine: Engine, folder: Path) -> Iterator[None]:
    """A file for each model, and within _PROMPTS those of the models that were served last."""
    if not hasattr(engine.backend, "prompts_name"):
        raise UsageError("--prompt-cache needs the cpu backend, in the server's own process: leave it out")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--prompt-cache {folder}: {error.strerror or error}") from None
    own = folder / engine.backend.prompts_name()
    with kept_prompts(engine, own, _PROMPTS):
        yield
    kept = {path: path.stat() for path in folder.glob("*.prompts")}
    room = _PROMPTS
    for path in sorted(kept, key=lambda path: -kept[path].st_mtime):
        room -= kept[path].st_size
        if room < 0 and path != own:
            path.unlink(missing_ok=True)


def run(args: argparse.Namespace) -> int:
    for package in ("fastapi", "prometheus_client", "uvicorn"):
        need(package, "serve", "the server")
    from ..serve.run import allow_connections, listen, serve
    from ..serve.settings import DEFAULTS, Settings, default_queue

    schedule = parse_schedule(args.schedule)
    key = args.api_key or os.environ.get("PPSD_API_KEY") or None
    if not 0 <= args.port < 2**16:
        raise UsageError(f"--port must be from 0 to 65535, not {args.port}")
    if front := args.restarts is not None or args.engines is not None:
        check_front(args)
    failure: list[str] = []

    def end(line: str) -> None:  # in another thread
        failure.append(line)
        os.kill(os.getpid(), signal.SIGTERM)

    with ExitStack() as stack:
        listener = stack.enter_context(listen(args.host, args.port))  # before the model is loaded, which takes longer
        here: Callable[[], bool] = lambda: True  # noqa: E731
        if front:
            engine, engines = stack.enter_context(open_front(args, end))
            here = lambda: engines.here  # noqa: E731
        else:
            engine = load_engine(args)
        if args.prompt_cache is not None:
            stack.enter_context(_prompt_cache(engine, Path(args.prompt_cache)))
        engine.name = args.model_name or Path(engine.name).name  # clients need not know where it is
        queue = args.queue or default_queue(args.max_body)
        same = {name: getattr(args, name) for name in _SETTINGS}
        sampling = {name: getattr(args, name) for name in DEFAULTS if getattr(args, name) is not None}
        one = {"api_key": key, "host": args.host, "schedule": schedule, "queue": queue, "here": here}
        settings = Settings(**one, sampling=sampling, **same)
        allow_connections()
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        note(f"{engine.name} at http://{shown}:{port}/ (OpenAI clients: http://{shown}:{port}/v1); Ctrl-C ends it")
        serve(engine, settings, listener)
    if failure:
        raise PpsdError(failure[0])
    return 0
