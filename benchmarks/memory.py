"""What a large GGUF file costs: seconds and memory to load, and the speed of plain decoding beside the bandwidth.

    python benchmarks/memory.py llama-3.1-8b Q4_K --dtype int4 --limit 8 --folder /tmp

The weights are random: FOLDER gets a file of the shape that is named, which is kept for the next run. The model is
loaded by a process of its own that may have `--limit` GB of writable memory; mapped files do not count.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from export_gguf import add_shape, gguf_name
from tokenizers import pre_tokenizers

from ppsd_rt import SamplingParams, _native
from ppsd_rt.cli.info import machine
from ppsd_rt.cpu.backend import CpuBackend
from ppsd_rt.engine import Engine
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.models.config import LlamaConfig, model_shapes
from ppsd_rt.models.random_weights import SHAPES
from ppsd_rt.models.tokenizer import load_tokenizer

# float16 numbers at the beginning of a block, so that weights are around 0.02
SCALES = {"Q4_0": (4e-3,), "Q8_0": (3e-4,), "Q4_K": (1e-4, 7.5e-4)}


def main() -> None:
    args = _arguments()
    if args.load:
        print(json.dumps(load(args.load, args.dtype, args.threads, args.max_tokens, args.limit)))
        return
    path: Path = args.folder / f"{args.shape}-{args.kind}.gguf"
    if not path.exists():
        unfinished = path.with_suffix(".unfinished")
        write(unfinished, SHAPES[args.shape], args.kind)
        unfinished.replace(path)
    command = [sys.executable, __file__, args.shape, args.kind, "--dtype", args.dtype, "--load", str(path)]
    command += ["--threads", str(args.threads), "--max-tokens", str(args.max_tokens), "--limit", str(args.limit)]
    row = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    for name, value in row.items():
        print(f"{name:<24} {value:.2f}")
    print(json.dumps({"command": " ".join(["python", *sys.argv]), "rows": [row], "machine": machine()}))


def write(path: Path, config: LlamaConfig, kind: str) -> None:
    """A model of that shape, all matrices of the type `kind`, with a tokenizer that knows bytes."""
    type_ = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, "llama")
    add_shape(writer, config)
    alphabet = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*alphabet, *(f"<{number}>" for number in range(len(alphabet), config.vocab_size))])
    writer.add_token_types([3, *[1] * (config.vocab_size - 1)])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    shapes = model_shapes(config)
    for name, shape in shapes.items():
        stored = gguf.quants.quant_shape_to_byte_shape(shape, type_) if len(shape) == 2 else shape
        dtype = np.dtype(np.uint8 if len(shape) == 2 else np.float32)
        raw = type_ if len(shape) == 2 else None
        writer.add_tensor_info(gguf_name(name), stored, dtype, int(np.prod(stored)) * dtype.itemsize, raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = np.random.default_rng(0)
    for shape in shapes.values():
        writer.write_tensor_data(np.ones(shape, np.float32) if len(shape) == 1 else _blocks(random, shape, type_))
    writer.close()


def _blocks(
    random: np.random.Generator, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (shape[0] * shape[1] // values, size), np.uint8)
    scales = np.array(SCALES[kind.name], np.float16).view(np.uint8)
    blocks[:, : len(scales)] = scales
    return blocks.reshape(shape[0], -1)


def load(path: Path, dtype: str, threads: int, tokens: int, limit: float) -> dict[str, float]:
    """Of this process: seconds, GB of memory at most, tokens per second. limit: GB of writable memory; 0: none."""
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (int(limit * 1e9), resource.RLIM_INFINITY))
    row: dict[str, float] = {"file_gb": path.stat().st_size / 1e9}
    start = time.perf_counter()
    checkpoint = Checkpoint(path)
    tokenizer = load_tokenizer(path, checkpoint.config.vocab_size)
    row["open_seconds"] = time.perf_counter() - start
    start = time.perf_counter()
    backend = CpuBackend(checkpoint, dtype, "cpu", threads, kv_memory="256M")
    row["pack_seconds"] = time.perf_counter() - start
    packed = float(backend.facts()["packed_megabytes"])
    row |= {"packed_gb": packed / 1e3, "peak_gb_loaded": _peak()}
    done = Engine(checkpoint, tokenizer, backend, path.stem).generate(
        "Hello", SamplingParams(max_tokens=tokens, ignore_eos=True), "plain"
    ).run()  # fmt: skip
    bandwidth = _native.read_bandwidth(threads, 512)
    row |= {"tokens_per_second": done.statistics.decode_tokens_per_second or 0.0, "gb_per_second": bandwidth}
    row["of_bandwidth"] = row["tokens_per_second"] * row["packed_gb"] / bandwidth
    return row | {"peak_gb": _peak()}


def _peak() -> float:
    """GB of this process at most so far, the pages of mapped files included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6 * 1.024


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("kind", choices=list(SCALES))
    parser.add_argument("--folder", type=Path, default=Path("."))
    parser.add_argument("--dtype", default="int4")
    parser.add_argument("--threads", type=int, default=len(_native.usable_cores()))
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--limit", type=float, default=0.0, help="GB of writable memory [no limit]")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
