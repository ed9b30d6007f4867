"""`ppsd-run serve --restarts` and `--engines`, and `ppsd-run engine`: engines whose weights are in other processes."""

import argparse
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..engine import Engine, open_model
from ..errors import UsageError
from .common import ENGINE_OPTIONS, load_engine, set_template
from .notes import note

if TYPE_CHECKING:
    from ..front.engines import Engines

LEAST_KEY = 16


def check_front(args: argparse.Namespace) -> None:
    """UsageError for options that exclude each other; before anything is opened."""
    if args.restarts is not None and args.engines is not None:
        raise UsageError("--restarts starts an engine, with --engines others do: give one of the two")
    if args.engines is not None:
        engine_key()
    if getattr(args, "engine", None) is not None:
        raise UsageError(
            "over ranks start `ppsd-run serve --engines PORT` by itself, and the ranks with engine --front"
        )


def engine_key() -> str:
    """The environment's key: whoever has it is given prompts, and chooses answers. UsageError without one."""
    key = os.environ.get("PPSD_ENGINE_KEY", "")
    if len(key) < LEAST_KEY:
        raise UsageError(
            f"PPSD_ENGINE_KEY needs {LEAST_KEY} characters or more, the same for the server and its engines: "
            "export PPSD_ENGINE_KEY=$(openssl rand -hex 16)"
        )
    return key


@contextmanager
def open_front(args: argparse.Namespace, given_up: Callable[[str], None]) -> "Iterator[tuple[Engine, Engines]]":
    """Once the first engine has come. given_up: called with a line when no engine will come any more."""
    from ..front.backend import FrontBackend
    from ..front.child import Child
    from ..front.engines import Engines
    from ..serve.run import listen

    host, port = args.engines or ("127.0.0.1", 0)
    own = args.restarts is not None
    key = secrets.token_hex(16) if own else engine_key()
    checkpoint, tokenizer = open_model(args.model, args.backend)
    child: Child | None = None
    engine: Engine | None = None

    def end(line: str) -> None:
        engines.fail(line)
        if engine is not None:  # else who waits for the first one hears of it
            given_up(line)

    with listen(host, port) as listener:
        engines = Engines(listener, key, args.engine_timeout, lambda: child.kill() if child else None)
        try:
            host, port = listener.getsockname()[:2]
            if own:
                given = {name: getattr(args, name) for name in ("model", *ENGINE_OPTIONS)}
                options = [
                    f"--{name.replace('_', '-')}={_text(value)}" for name, value in given.items() if value is not None
                ]
                call = ["--front", f"{host}:{port}", "--once", "--engine-timeout", str(args.engine_timeout)]
                child = Child(["engine", *call, *options], {"PPSD_ENGINE_KEY": key}, args.restarts, end)
            else:
                note(f"engines come to {host}:{port}: ppsd-run engine --front {host}:{port}")
            backend = FrontBackend(engines.first(), engines)
            engine = set_template(Engine(checkpoint, tokenizer, backend, args.model), args)
            if args.learn is not None:
                engine.learn(Path(args.learn), args.exit_head)
            yield engine, engines
        finally:
            engines.close()
            if child is not None:
                child.close()


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def run_engine(args: argparse.Namespace) -> int:
    """Runs `ppsd-run engine`, which decodes for `ppsd-run serve --engines`; that keeps what is committed."""
    from ..front.work import work

    key = engine_key()
    engine = load_engine(args)
    note(f"{engine.name} is loaded, for the server at {args.front[0]}:{args.front[1]}")
    work(engine, args.front, key, args.engine_timeout, args.once)
    return 0
