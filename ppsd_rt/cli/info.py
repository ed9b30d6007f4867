"""`ppsd-run info`: model, exit head, formats, machine."""

import argparse
import os
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from .. import __version__
from ..cpu.name import cpu_name
from ..errors import PpsdError
from ..models.cache import cache_dir
from ..models.chat_template import ChatTemplate
from ..printable import printable
from .common import load_engine, print_json


def run(args: argparse.Namespace) -> None:
    info = collect(args)
    if args.json:
        print_json(info)
        return
    for section, values in info.items():
        print(section)
        for key, value in (values or {"": "none"}).items():
            print(printable(f"  {key:<24} {value}"))


def collect(args: argparse.Namespace) -> dict[str, dict[str, Any] | None]:
    """Four sections of plain values."""
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
        "exit head": None
        if head is None
        else {
            **asdict(head),
        },
        "backend": {
            "name": engine.backend.name,
            "device": engine.backend.device,
            "dtype": engine.backend.dtype,
            "threads": engine.backend.threads,
            "answers_at_once": engine.backend.concurrency,
            **engine.backend.facts(),
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
    """None where it is not installed: the C++ backend needs no torch."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
