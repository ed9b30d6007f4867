"""Text to train exit heads on that the model has not written: the documentation strings of Python's own library."""

import ast
import os
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ppsd_rt.cpu.backend import CpuBackend
from ppsd_rt.distill.samplers import NativeSampler
from ppsd_rt.distill.shards import STEPS, Plan, shard_path, states_path
from ppsd_rt.errors import PpsdError
from ppsd_rt.models.checkpoint import Checkpoint, save
from ppsd_rt.models.tokenizer import Tokenizer

PIECE = 256  # tokens that the model reads as one text
CONTEXT = 88  # of these, at the beginning, are not trained on: a third, as the questions are of self-generated text
ELSEWHERE = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


def documentation() -> list[str]:
    """Every documentation string of the library once, in an order that is the same for the same Python."""
    folder, found = Path(sysconfig.get_path("stdlib")), dict[str, None]()
    for path in sorted(folder.rglob("*.py")):
        if not ELSEWHERE & set(path.relative_to(folder).parts):
            found |= dict.fromkeys(_strings(path))
    texts = list(found)
    random.Random(0).shuffle(texts)
    return texts


def _strings(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and (text := ast.get_docstring(node)):
            yield text


def pieces(tokenizer: Tokenizer, count: int) -> np.ndarray:
    """[count, PIECE] int32. Raises PpsdError where the library has less."""
    ids = tokenizer.encode("\n\n".join(documentation()), add_special_tokens=False)
    if len(ids) < count * PIECE:
        raise PpsdError(f"this Python's documentation strings have {len(ids):,} tokens, not {count * PIECE:,}")
    return np.array(ids[: count * PIECE], dtype=np.int32).reshape(count, PIECE)


def write_given(plan: Plan, held_out: Path, checkpoint: Checkpoint, tokenizer: Tokenizer, dtype: str) -> None:
    """The shards of a plan for distillation, with this text. held_out: the folder whose shard 0 judges these heads too.

    The model reads the text in the engine that samples, so that its hidden states come as those of sampled text do.
    """
    for name in (states_path, shard_path):
        link, target = name(plan.folder, 0), name(held_out, 0)
        if not target.exists():
            raise PpsdError(f"{target} is missing: self-generated text comes first")
        if not link.exists():
            link.symlink_to(target)
    if not plan.missing():
        return
    each = plan.slots * STEPS // PIECE  # texts of a shard
    texts = pieces(tokenizer, each * (plan.shards - 1))
    backend = CpuBackend(checkpoint, dtype, "cpu", os.cpu_count() or 1)
    sampler = NativeSampler(backend, plan.slots, PIECE + 1, plan.keep, ())
    for number in plan.missing():
        mine = texts[each * (number - 1) : each * number]
        states = np.concatenate([read(sampler, mine[at : at + plan.slots]) for at in range(0, each, plan.slots)])
        metadata = {"text": "given", "slots": str(plan.slots)}
        by_layer = {
            str(layer): states[:, :, kind].reshape(-1, states.shape[-1]) for kind, layer in enumerate(plan.keep)
        }
        save(states_path(plan.folder, number), by_layer, metadata)
        alike = {"lengths": PIECE, "answers": CONTEXT, "greedy": 0, "families": 0}
        columns = {name: np.full(each, value, dtype=np.int32) for name, value in alike.items()}
        save(shard_path(plan.folder, number), {"ids": mine.reshape(-1), **columns}, metadata)  # last: all is there


def read(sampler: NativeSampler, ids: np.ndarray) -> np.ndarray:
    """Hidden states of texts side by side, [texts, PIECE, kinds, hidden] bfloat16 bits."""
    texts = [sampler.write(text.tolist(), 0.0, 0, 1) for text in ids]
    while not all(text.over for text in texts):
        sampler.step()
    return np.stack([text.states() for text in texts])
