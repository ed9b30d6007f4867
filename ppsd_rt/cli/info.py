"""`ppsd-run info`: model, exit head, formats, machine."""

import argparse
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .. import __version__
from ..cpu.machine import cpu_name
from ..errors import PpsdError
from ..models.cache import cache_dir
from ..models.chat_template import ChatTemplate
from ..printable import printable
from .common import counted, load_engine, print_json
from .learn import lines, status


def run(args: argparse.Namespace) -> None:
    info = collect(args)
    if args.json:
        print_json(info)
        return
    for line in _summary(info):
        print(printable(line))


def _summary(info: dict[str, Any]) -> Iterator[str]:
    """What people ask for; `--json` has all."""
    model, head, backend, machine = info["model"], info["exit head"], info["backend"], info["machine"]
    yield f"model      {model['name']}: {model['parameters'] / 1e9:.2g} billion parameters in {model['folder']}"
    shape = f"{model['num_hidden_layers']} layers, width {model['hidden_size']}, vocabulary {model['vocab_size']}"
    yield f"           {shape}, context {model['max_position_embeddings']}, stored as {', '.join(model['stored_as'])}"
    variables = ", ".join(model["template_variables"]) or "no variables"
    yield f"           {f'chat template with {variables}' if model['chat_template'] else 'no chat template'}"
    if head is None:
        yield "exit head  none: only copies from the text are drafted; `ppsd-run distill` trains one"
    else:
        right = head.get("acceptance", {}).get("held_out_greedy")
        known = "" if right is None else f", right for {right:.0%} of held-out greedy tokens"
        heard = f", hears layer {head['tap']}" if head.get("tap") else ""
        yield f"exit head  {head['kind']} after layer {head['exit_layer']}{heard}{known}"
    on = "" if backend["device"] == backend["name"] else f" on {backend['device']}"
    threads, answers = counted(backend["threads"], "thread"), counted(backend["answers_at_once"], "answer")
    sizes = [f", weights {backend['packed_megabytes']:.0f} MB"] if "packed_megabytes" in backend else []
    sizes += [f", KV caches up to {backend['kv_megabytes']:.0f} MB"] if "kv_megabytes" in backend else []
    yield f"backend    {backend['name']}{on}, {backend['dtype']}, {threads}, {answers} at once{''.join(sizes)}"
    isa = f", instructions {backend['isa']}" if "isa" in backend else ""
    yield f"machine    {machine['cpu']}, {counted(machine['cores'], 'core')}{isa}; ppsd-rt {machine['ppsd_rt']}"
    yield f"cache      {machine['cache']}"
    if learned := info.get("learned"):
        yield from lines(learned)
    yield "all of it: ppsd-run info --json"


def collect(args: argparse.Namespace) -> dict[str, dict[str, Any] | None]:
    """Sections of plain values: four, and what was learned where --learn asks for it."""
    engine = load_engine(args)
    head, template = engine.head, engine.tokenizer.chat_template
    return {
        "model": {
            "name": engine.name,
            "folder": str(engine.checkpoint.folder),
            "hash": engine.checkpoint.hash,
            "parameters": engine.checkpoint.parameters,
            "stored_as": engine.checkpoint.stored_as,
            **asdict(engine.config),
            "ends_at": {id: engine.tokenizer.id_to_token(id) for id in engine.config.eos_token_ids},
            "chat_template": template is not None,
            "template_variables": _variables(template),
        },
        "exit head": None if head is None else asdict(head),
        "backend": {
            "name": engine.backend.name,
            "device": engine.backend.device,
            "dtype": engine.backend.dtype,
            "threads": engine.backend.threads,
            "answers_at_once": engine.backend.concurrency,
            **engine.backend.facts(),
        },
        "machine": {**machine(), "cache": str(cache_dir())},
        **({"learned": status(Path(args.learn))} if args.learn else {}),
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
    """None where it is not installed: the C++ backend needs no torch."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
