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
    context, layers = model["max_position_embeddings"], f"{model['num_hidden_layers']} layers"
    yield f"model      {model['name']}: {_count(model['parameters'])} parameters, context {context}"
    heads = f"{model['num_attention_heads']} heads ({model['num_key_value_heads']} of keys and values)"
    yield f"           {layers}, width {model['hidden_size']}, {heads} of {model['head_dim']}"
    yield f"           vocabulary {model['vocab_size']}, chat template: {'yes' if model['chat_template'] else 'no'}"
    yield f"           stored as {', '.join(model['stored_as'])} in {model['folder']}"
    if head is None:
        yield "exit head  none: only copies from the text are drafted; `ppsd-run distill` trains one"
    else:
        right = head.get("acceptance", {}).get("held_out_greedy")
        known = "" if right is None else f", right for {right:.0%} of held-out greedy tokens"
        taps = ", ".join(map(str, head["recipe"].get("taps", [])))
        place = f", reads the hidden states after layers {taps}" if taps else f" after layer {head['exit_layer']}"
        yield f"exit head  {head['kind']}{place}{known}"
    on = "" if backend["device"] == backend["name"] else f" on {backend['device']}"
    threads, answers = counted(backend["threads"], "thread"), counted(backend["answers_at_once"], "answer")
    yield f"backend    {backend['name']}{on}, {backend['dtype']}, {threads}, {answers} at once"
    facts = []
    if "isa" in backend:
        others = [name for name in backend["usable_isas"] if name != backend["isa"]]
        facts.append(
            f"instructions {backend['isa']} ({'also ' + ', '.join(others) if others else 'this build has no others'})"
        )
    facts += [f"weights {backend['packed_megabytes']:.0f} MB"] if "packed_megabytes" in backend else []
    if "kv_megabytes" in backend:
        facts.append(f"KV caches {backend['kv_dtype']}, up to {backend['kv_megabytes']:.0f} MB")
    if facts:
        yield f"           {', '.join(facts)}"
    if backend.get("pinning", "ok") != "ok":
        yield f"           threads have no cores of their own: {backend['pinning']}"
    yield f"machine    {machine['cpu']}, {counted(machine['cores'], 'core')}; {machine['system']}"
    torch = f", torch {machine['torch']}" if machine["torch"] else ""
    yield f"           ppsd-rt {machine['ppsd_rt']}, Python {machine['python']}{torch}"
    yield f"cache      {machine['cache']}"
    if learned := info.get("learned"):
        yield from lines(learned)
    yield "all of it: ppsd-run info --json"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} billion" if parameters >= 1e9 else f"{parameters / 1e6:.0f} million"


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
