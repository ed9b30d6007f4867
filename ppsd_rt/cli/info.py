"""`ppsd-run info`: model, exit head, formats, machine."""

import argparse
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from .. import __version__
from ..cpu.machine import cpu_name
from ..errors import PpsdError
from ..models.cache import cache_dir
from ..models.chat_template import ChatTemplate
from ..printable import printable
from .common import counted, load_engine, print_json


def run(args: argparse.Namespace) -> None:
    info = collect(args)
    if args.json:
        print_json(info)
        return
    for title, said in _summary(info):
        print(printable(f"{title:<10} {said}"))
    print("all of it: ppsd-run info --json")


def _summary(info: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What people ask for; `--json` has all."""
    model, head, backend, machine = info["model"], info["exit head"], info["backend"], info["machine"]
    yield "model", f"{model['name']}: {model['parameters'] / 1e9:.2g} billion parameters in {model['folder']}"
    shape = f"{model['num_hidden_layers']} layers, width {model['hidden_size']}, vocabulary {model['vocab_size']}"
    yield "", f"{shape}, context {model['max_position_embeddings']}, stored as {', '.join(model['stored_as'])}"
    variables = ", ".join(model["template_variables"]) or "no variables"
    yield "", f"chat template with {variables}" if model["chat_template"] else "no chat template"
    if head is None:
        yield "exit head", "none: only copies from the text are drafted; `ppsd-run distill` trains one"
    else:
        right = head.get("acceptance", {}).get("held_out_greedy")
        known = "" if right is None else f", right for {right:.0%} of held-out greedy tokens"
        heard = f", hears layer {head['tap']}" if head.get("tap") else ""
        yield "exit head", f"{head['kind']} after layer {head['exit_layer']}{heard}{known}"
    sizes = {"weights": "packed_megabytes", "KV caches up to": "kv_megabytes"}
    sized = [f", {what} {backend[name]:.0f} MB" for what, name in sizes.items() if name in backend]
    threads, answers = counted(backend["threads"], "thread"), counted(backend["answers_at_once"], "answer")
    on = " on ".join(dict.fromkeys((backend["name"], backend["device"]))) + f", {backend['dtype']}"
    yield "backend", f"{on}, {threads}, {answers} at once{''.join(sized)}"
    isa = f", instructions {backend['isa']}" if "isa" in backend else ""
    yield "machine", f"{machine['cpu']}, {counted(machine['cores'], 'core')}{isa}; ppsd-rt {machine['ppsd_rt']}"
    yield "cache", machine["cache"]


def collect(args: argparse.Namespace) -> dict[str, Any]:
    """Four sections of plain values."""
    engine = load_engine(args)
    checkpoint, backend, template = engine.checkpoint, engine.backend, engine.tokenizer.chat_template
    return {
        "model": {
            "name": engine.name,
            "folder": str(checkpoint.folder),
            **{name: getattr(checkpoint, name) for name in ("hash", "parameters", "stored_as")},
            **asdict(engine.config),
            "ends_at": {id: engine.tokenizer.id_to_token(id) for id in engine.config.eos_token_ids},
            "chat_template": template is not None,
            "template_variables": _variables(template),
        },
        "exit head": None if engine.head is None else asdict(engine.head),
        "backend": {
            **{name: getattr(backend, name) for name in ("name", "device", "dtype", "threads")},
            "answers_at_once": backend.concurrency,
            **backend.facts(),
        },
        "machine": {**machine(), "cache": str(cache_dir())},
    }


def _variables(template: ChatTemplate | None) -> list[str]:
    """Those that --template-set may set; none of a template that cannot be compiled, which stops only chats."""
    try:
        return [] if template is None else [name for name in template.reads if not name.endswith("_token")]
    except PpsdError:
        return []


def machine() -> dict[str, Any]:
    """What a benchmark result must say of where it was measured."""
    return {
        "ppsd_rt": __version__,
        "torch": _version("torch"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
    }


def _version(package: str) -> str | None:
    """A package's version; None where it is not installed: the C++ backend needs no torch."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
