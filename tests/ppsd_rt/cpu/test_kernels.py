"""The C++ kernels: near the torch twin, and to the bit the same for every number of rows, thread count and chunking."""

import os
import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from noise_twin import gumbel
from support import slow, write_model

from ppsd_rt import Engine, SamplingParams, _native
from ppsd_rt.cpu.formats import FORMATS
from ppsd_rt.sampling.params import noise_key

SHAPES = {
    "grouped": {},
    "one key head": {"num_key_value_heads": 1, "tie_word_embeddings": False},
    "bias": {"attention_bias": True, "num_key_value_heads": 4},
    "narrow heads": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    "wide heads": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 80},
    "seven to a key head": {"num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 48},  # 6 go together
    "seven, and wide": {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 64, "hidden_size": 96},
    "three blocks": {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 96},
    "wide panels": {"intermediate_size": 1056},  # in tiles as soon as there are nine rows
    "odd panels": {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 160},
}
X86 = platform.machine() in ("x86_64", "AMD64")
IDS = [(7 * i * i + 3 * i) % 250 for i in range(150)]  # more than two attention blocks of 64


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    return {name: write_model(folder / name.replace(" ", "-"), **shape) for name, shape in SHAPES.items()}


def load(folder, dtype, threads=1, isa=None, monkeypatch=None):
    if isa is not None:
        monkeypatch.setenv("PPSD_ISA", isa)
    return Engine.from_pretrained(folder, exit_head="none", backend="cpu", dtype=dtype, threads=threads).backend


@pytest.fixture(params=[_native.isa(), *(slow(isa) for isa in _native.usable_isas() if isa != _native.isa())])
def isa(request):
    return request.param


@pytest.mark.parametrize("shape", SHAPES)
def test_float32_is_near_the_twin(folders, shape, isa, monkeypatch):
    ours = load(folders[shape], "float32", isa=isa, monkeypatch=monkeypatch).logits(IDS, len(IDS))
    twin = Engine.from_pretrained(folders[shape], exit_head="none", backend="torch", dtype="float32").backend
    theirs = twin.logits(IDS, len(IDS))
    assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()


@pytest.mark.parametrize(("dtype", "kl"), [("bfloat16", 1e-3), ("int8", 5e-3), ("int4", 0.25)])
@pytest.mark.parametrize("shape", SHAPES)
def test_lower_formats_are_near_float32(folders, shape, isa, dtype, kl, monkeypatch):
    exact = load(folders[shape], "float32").logits(IDS, len(IDS)).astype(np.float64)
    ours = load(folders[shape], dtype, isa=isa, monkeypatch=monkeypatch).logits(IDS, len(IDS)).astype(np.float64)
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (exact, ours))
    assert 0 < (np.exp(p) * (p - q)).sum(-1).mean() < kl


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_do_not_depend_on_their_company(folders, shape, dtype, isa, monkeypatch):
    """1 to 16 rows in a pass, at places that straddle the attention blocks; passes of 64 rows; of 17 to 63."""
    backend = load(folders[shape], dtype, isa=isa, monkeypatch=monkeypatch)
    alone = {end: backend.logits(IDS[:end], 1)[0] for end in (1, 2, 16, 63, 64, 65, 66, 80, 128, 129, 130, 150)}
    for rows in range(1, 17):
        for end in (16, 66, 130, 150):
            together = backend.logits(IDS[:end], rows)
            for place, logits in enumerate(together, end - rows + 1):
                if place in alone:
                    assert np.array_equal(logits, alone[place]), (rows, place)
    fresh = load(folders[shape], dtype, isa=isa, monkeypatch=monkeypatch).logits(IDS, len(IDS))
    for end, logits in alone.items():
        assert np.array_equal(fresh[end - 1], logits), end
    for rows in (17, 31, 32, 33, 40, 48, 49, 63):  # groups of 16, all but full and just begun
        assert np.array_equal(backend.logits(IDS, rows), fresh[-rows:]), rows


@pytest.mark.skipif("amx" not in _native.usable_isas(), reason="this processor has no tile unit")
@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_of_integers_give_the_bits_of_the_dot_instruction(folders, shape, dtype, monkeypatch):
    tiles, dots = (load(folders[shape], dtype, isa=isa, monkeypatch=monkeypatch) for isa in ("amx", "avx512"))
    for rows in (9, 10, 12, 16, 24, 27, 64):
        assert np.array_equal(tiles.logits(IDS[:rows], rows), dots.logits(IDS[:rows], rows)), rows


@pytest.mark.parametrize("schedule", ["plain", "eesd:length=3"])
@pytest.mark.parametrize("temperature", [0.003, 0.1, 1.0, 40.0])
def test_a_token_is_the_best_of_all_noisy_scores(folders, isa, temperature, schedule, monkeypatch):
    """Noise is worked out only for ids that it can lift to the top: few where it is cold, all where it is not."""
    monkeypatch.setenv("PPSD_ISA", isa)
    head = "none" if schedule == "plain" else "norm:1"
    engine = Engine.from_pretrained(folders["odd panels"], exit_head=head, backend="cpu", dtype="float32", threads=2)
    params = SamplingParams(max_tokens=200, ignore_eos=True, temperature=temperature, seed=2**40 + 7)
    answer = engine.generate(IDS[:9], params, schedule).run().ids
    scores = engine.backend.logits([*IDS[:9], *answer], len(answer) + 1)[:-1] / temperature
    ids = np.arange(scores.shape[1])
    key = noise_key(2**40 + 7, IDS[:9], 0)
    best = scores + np.stack([gumbel(key, position, ids) for position in range(9, 9 + len(answer))])
    chosen = best[np.arange(len(answer)), list(answer)]
    assert (chosen >= best.max(-1) - 1e-5 - 1e-6 * np.abs(scores).max()).all()


@pytest.mark.parametrize("dtype", FORMATS)
def test_prompts_may_be_cut_anywhere(folders, dtype):
    whole = load(folders["grouped"], dtype).logits(IDS, 8)
    for cut in (1, 31, 63, 64, 65, 100, 141):
        backend = load(folders["grouped"], dtype)
        backend.logits(IDS[:cut], 1)  # these rows are kept
        assert np.array_equal(backend.logits(IDS, 8), whole), cut


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("threads", [2, 3, 5, 8])
def test_thread_counts_give_equal_bits(folders, dtype, threads):
    for shape in ("grouped", "odd panels"):
        one = load(folders[shape], dtype).logits(IDS, 20)
        assert np.array_equal(load(folders[shape], dtype, threads).logits(IDS, 20), one)


@pytest.mark.slow
def test_no_code_for_one_machine_reaches_others(tmp_path):
    """A function that the linker shares among files must not be compiled in a file for one instruction set: it might
    take that copy for all of them."""
    name, flags = ("avx2", ["-mavx2", "-mfma", "-mf16c"]) if X86 else ("dotprod", ["-march=armv8.2-a+dotprod"])
    source = Path(__file__).parents[3] / "csrc" / "cpu" / "kernels" / f"{name}.cpp"
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if not (compiler and shutil.which("nm") and source.exists()) or not (
        X86 or platform.machine() in ("aarch64", "arm64")
    ):
        pytest.skip("there is no C++ compiler for x86 or AArch64, no nm or no source here")
    made = tmp_path / "kernels.o"
    flags += ["-O3", "-std=c++17", "-fPIC"]
    subprocess.run([compiler, *flags, "-c", str(source), "-o", str(made)], check=True)
    symbols = subprocess.run(["nm", "-C", str(made)], check=True, capture_output=True, text=True).stdout.splitlines()
    shared = [line for line in symbols if line[17:18] in ("W", "u")]  # after the address: their kind
    assert f"{name}_kernels" in "".join(symbols)
    assert shared == []
