"""The real model, smollm2-135m: the numbers of transformers, and the same answer at every schedule."""

import itertools
import subprocess
import sys
from dataclasses import replace
from functools import cache

import pytest
import torch
from support import slow

from ppsd_rt import Engine, SamplingParams
from ppsd_rt.lab.cli.check import SAMPLINGS, SCHEDULES
from ppsd_rt.lab.cli.prompt_files import read_prompts
from ppsd_rt.pipeline.schedule import parse_schedule

PROMPTS = read_prompts(None)
FAMILIES = ["chat", "story", "summary", "qa", "math", "code"]
ONE_OF_EACH = [next(group) for _, group in itertools.groupby(PROMPTS, key=lambda prompt: prompt.family)]


@pytest.fixture(scope="module", params=[slow("torch"), "cpu"])
def exact(request, default_model):
    """Float32, as the peer has it."""
    return Engine.from_pretrained(default_model, dtype="float32", backend=request.param, threads=1)


@pytest.fixture(scope="module")
def fast(request, default_model):
    backend, dtype = request.param.split("-")
    return Engine.from_pretrained(default_model, dtype=dtype, backend=backend, threads=2)


@pytest.fixture(scope="module")
def peer(default_folder):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(default_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def peer_answer(peer):
    """peer_answer(ids): its greedy answer, worked out once."""

    @cache
    @torch.no_grad()
    def answer(ids):
        return peer.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()

    return answer


def chat(engine, prompt):
    return engine.encode([{"role": "user", "content": prompt.prompt}])


def test_the_prompts_are_all_there():
    assert len(PROMPTS) == 34
    assert [prompt.family for prompt in ONE_OF_EACH] == FAMILIES


def test_chat_template_equals_transformers(default_folder, exact):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(default_folder)
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi {{ there }}\n"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "¿Qué tal? 🙂"},
    ]
    for messages in (conversation, conversation[1:], conversation[3:]):
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert exact.tokenizer.chat_template.render(messages) == expected
        assert exact.encode(messages) == tokenizer(expected, add_special_tokens=False)["input_ids"]


@torch.no_grad()
def test_logits_equal_transformers(exact, peer):
    """After every prefix that the stages are asked for, cached rows and all."""
    for prompt in ONE_OF_EACH[:3]:
        ids = chat(exact, prompt)
        expected = peer(torch.tensor([ids])).logits[0]
        for length in (len(ids) - 7, len(ids) - 1, len(ids)):
            logits = torch.from_numpy(exact.backend.logits(ids[:length])[-1])
            true = expected[length - 1]
            torch.testing.assert_close(logits, true, rtol=1e-4, atol=1e-4 * float(true.abs().max()))


@pytest.mark.parametrize("family", ["chat", *map(slow, FAMILIES[1:])])
def test_greedy_answers_equal_transformers(exact, peer_answer, family):
    ids = chat(exact, ONE_OF_EACH[FAMILIES.index(family)])
    ours = exact.generate(ids, SamplingParams(max_tokens=12), "plain").run()
    assert list(ours.ids) == peer_answer(tuple(ids))


# The default format and the smallest one with a prompt each; the others are slow.
TORCH = "torch-bfloat16" if torch.cpu._is_avx512_bf16_supported() else "torch-float32"
FORMATS = [TORCH, "cpu-bfloat16", "cpu-int8", "cpu-int4"]
FAST = [("cpu-int8", "chat"), ("cpu-int4", "qa")]
CASES = [case if case in FAST else slow(*case) for case in itertools.product(FORMATS, FAMILIES)]


@pytest.mark.parametrize(("fast", "family"), CASES, indirect=["fast"])
def test_every_schedule_gives_the_plain_answer(fast, family):
    """One prompt of each family, with a sampling setting each; `ppsd-run check` does all of both.

    A prompt meets every second schedule, and the next one the others. Torch is slow: it meets every third.
    """
    assert fast.head is not None, "the default model comes with an exit head"
    number = FAMILIES.index(family)
    ids = chat(fast, ONE_OF_EACH[number])
    slow = fast.backend.name == "torch"
    params = replace(list(SAMPLINGS.values())[number % len(SAMPLINGS)], max_tokens=8 if slow else 16)
    plain = fast.generate(ids, params, "plain").run()
    accepted = 0
    step = 3 if slow else 2
    for text in SCHEDULES[number % step :: step]:
        completion = fast.generate(ids, params, parse_schedule(text)).run()
        assert completion.ids == plain.ids, text
        assert completion.text == plain.text
        accepted += completion.statistics.accepted
    assert accepted > 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_that_of_the_packed_weights(default_model):
    """The checkpoint's own pages are given back while it is packed: at no moment are both in memory."""
    code = """
import sys
from ppsd_rt import Engine, SamplingParams
from ppsd_rt.models.tokenizer import load_tokenizer
from pathlib import Path

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1000

load_tokenizer(Path(sys.argv[1]))
before = peak()
engine = Engine.from_pretrained(sys.argv[1], exit_head="norm:6", backend="cpu", threads=2)
engine.generate("Hello", SamplingParams(max_tokens=8)).run()
print(peak() - before, engine.backend.facts()["packed_megabytes"])
"""
    result = subprocess.run([sys.executable, "-c", code, default_model], capture_output=True, text=True, check=True)
    grown, packed = map(float, result.stdout.split())
    assert grown < packed + 45  # 31 of the engine and its caches; the file has 93


def test_one_schedule_in_float32(exact):
    ids = chat(exact, ONE_OF_EACH[0])
    params = SamplingParams(max_tokens=12)
    assert exact.generate(ids, params, "eesd").run().ids == exact.generate(ids, params, "plain").run().ids
