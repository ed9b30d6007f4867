"""What test_captured.py runs in a process of its own, with the fake driver: prints one JSON object."""

import ctypes
import json
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path

import torch

from ppsd_rt.backend import RunOptions
from ppsd_rt.cuda.graphs import Graphs
from ppsd_rt.engine import Engine
from ppsd_rt.errors import PpsdError
from ppsd_rt.sampling.params import SamplingParams

sys.path.append(str(Path(__file__).parents[2]))
import kernel_support  # noqa: F401  (mends the interpreter)
from device_guard import DeviceGuard

PROMPT = [72, 101, 108]
PARAMS = SamplingParams(max_tokens=5, ignore_eos=True)
RUN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)

torch.set_num_threads(1)
fake = ctypes.CDLL(os.environ["PPSD_CUDA_DRIVER"])
fake.fake_cuda_graph.restype = ctypes.c_void_p
fake.fake_cuda_graph.argtypes = [RUN, ctypes.c_void_p]
fake.fake_cuda_misuse.restype = ctypes.c_char_p
interpreter = threading.Lock()  # Triton's interprets one kernel at a time


class Call(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_char_p),
        ("stream", ctypes.c_void_p),
        ("object", ctypes.c_void_p),
    )


def punctual():
    """How many threads of this process the system wakes when they asked for it: within a microsecond."""
    tasks = os.listdir("/proc/self/task")
    return sum(Path(f"/proc/{task}/timerslack_ns").read_text().strip() == "1000" for task in tasks)


most_punctual = [0]  # threads, while a graph ran
recorded = []


def record(graphs, step, lane, device):
    def run(_):
        most_punctual[0] = max(most_punctual[0], punctual())
        try:
            with interpreter:
                step()
        except BaseException as error:
            print(error, file=sys.stderr)
            return 719
        return 0

    recorded.append(RUN(run))
    return fake.fake_cuda_graph(recorded[-1], None)


def no_room(graphs, step, device):
    raise RuntimeError("no room for a graph\nand more that nobody reads")


def engine_of(folder, warm_up=lambda *_: None, serial=False, **options):
    os.environ["PPSD_CUDA_SERIAL"] = str(int(serial))
    Graphs.warm_up, Graphs.record = warm_up, record
    options = {"exit_head": "norm:1", "device": "cpu", **options}
    engine = Engine.from_pretrained(folder, backend="cuda", **options)
    engine.backend._alone.eager = False
    return engine


def answer(engine, schedule, trace=False, params=PARAMS, prompt=PROMPT):
    fake.fake_cuda_clear_log()
    completion = engine.generate(prompt, params, schedule, RunOptions(trace=trace)).run()
    log = (Call * 10000)()
    calls = log[: fake.fake_cuda_log(log, 10000)]
    streams = {call.stream for call in calls if call.function == b"cuGraphLaunch"}
    assert fake.fake_cuda_misuse() == b"", fake.fake_cuda_misuse()
    return {
        "ids": completion.ids,
        "judged": completion.statistics.judged,
        "launches": engine.backend.facts()["launches"],
        "punctual": most_punctual[0],
        "streams": len(streams),
        "graph launches": sum(call.function == b"cuGraphLaunch" for call in calls),
        "events": sum(call.function == b"cuEventRecord" for call in calls),
        "copies": sum(call.function == b"cuMemcpyPeerAsync" for call in calls),
        "spans": engine.backend.spans(),
        "explained": engine.backend.explain(),
    }


def answers(folder):
    engine, few = engine_of(folder), replace(PARAMS, max_tokens=4)
    result = {"plain": answer(engine, "plain", params=few)}
    result["elastic"] = answer(engine, "elastic:first_chunk=1,lookup=1", trace=True, params=few)
    result["auto"] = answer(engine, "auto", params=few)
    result["elastic, serial"] = answer(engine_of(folder, serial=True), "elastic", params=few)
    return result


def rounds(folder):
    engine, prompt = engine_of(folder), [17, 17, 17]
    schedules = {"plain": "plain", "fixed": "eesd:length=2,stop_rule=fixed"}
    schedules["turns"] = "eesd:length=2,stop_rule=survival=0.001"
    schedules["copies"] = "recycle:lookup=1"
    result = {name: answer(engine, schedule, prompt=prompt) for name, schedule in schedules.items()}
    result["auto"] = answer(engine, "auto", prompt=prompt)
    return result


def devices(folder):
    """Answers of one device and of several, whose memory is parted: kernels may not touch another one's."""
    guard = DeviceGuard()
    guard.install()
    greedy = SamplingParams(max_tokens=4, ignore_eos=True)
    sampled = replace(greedy, temperature=0.9, seed=3)
    head = str(Path(folder) / "feedback.safetensors")
    cases = {
        "one, sampled": ("cpu", 1, "plain", sampled),
        "one, greedy": ("cpu", 1, "plain", greedy),
        "one in two stages, sampled": ("cpu:0,cpu:0", (2, 1), "elastic:first_chunk=1", sampled),
        "draft apart, eesd, sampled": (
            "cpu:0,cpu:1",
            (1, 2),
            "eesd:length=2,stop_rule=survival",
            sampled,
        ),
        "shared, ppsd, greedy": ("cpu:0,cpu:1", (2, 1), "ppsd", greedy),
        "shared, auto, sampled": ("cpu:0,cpu:1", (2, 1), "auto", sampled),
        "three, plain, greedy": ("cpu:0,cpu:1,cpu:2", (1, 1, 1), "plain", greedy),
        "three, ppsd, sampled, feedback": ("cpu:0,cpu:1,cpu:2", (1, 1, 1), "ppsd", sampled),
    }
    result = {}
    for name, (device, stages, schedule, params) in cases.items():
        options = {"exit_head": head} if name.endswith("feedback") else {}
        engine = engine_of(folder, device=device, stages=stages, **options)
        guard.launches.clear()
        result[name] = answer(engine, schedule, trace=schedule == "ppsd", params=params)
        result[name]["devices"] = len(guard.launches)
        engine.backend._alone.drop()
    first, second = (engine.generate(PROMPT, greedy, "plain") for _ in range(2))
    tokens = iter(first)
    said = [next(tokens).id]
    try:
        engine.generate(PROMPT, greedy, "plain").run()
    except PpsdError as error:
        result["itself"] = str(error)
    waits = threading.Thread(target=second.run)
    waits.start()
    said += [token.id for token in tokens]
    waits.join()
    return result | {"first": said, "second": second.completion.ids}


def company(folder):
    """An answer that begins alone, in captured stages, and two that come when it has said two tokens."""
    engine = engine_of(folder)
    backend, penalised = engine.backend, replace(PARAMS, max_tokens=4, repetition_penalty=1.3, logprobs=1)
    requests = (PROMPT, replace(PARAMS, temperature=0.8, seed=4)), (PROMPT, PARAMS), (PROMPT[1:], penalised)
    expected = [engine.generate(*each, "plain").run() for each in requests]
    first, *others = (engine.generate(*each, "elastic") for each in requests)
    tokens = iter(first)
    said, alone = [next(tokens).id for _ in range(2)], backend._answer is not None
    asked, decode = [], backend._answers.decode
    backend._answers.decode = lambda *which: (asked.append(which[0]), decode(*which))[1]
    begun = [next(iter(other)).id for other in others]
    beside = len(backend._beside)
    said += [token.id for token in tokens]
    found = [other.run() for other in others]
    backend._weights.embedding[expected[1].ids[1]] = torch.nan
    try:
        engine.generate(PROMPT, PARAMS, "elastic").run()
    except PpsdError as error:
        no_number = str(error)
    return {
        "expected": [answer.ids for answer in expected],
        "found": [said, *(answer.ids for answer in found)],
        "begun": begun,
        "tops": [[each.top[0][0] for each in answer.logprobs] for answer in (expected[2], found[1])],
        "alone": alone,
        "beside": (beside, len(backend._beside)),
        "handed over": [(limits.own, len(text)) for text, _, _, limits, *_ in asked if limits.own],
        "no number": no_number,
        "misuse": fake.fake_cuda_misuse().decode(),
    }


def loss(folder):
    engine = engine_of(folder)
    plain = engine.generate(PROMPT, PARAMS, "plain").run().ids
    generation = engine.generate(PROMPT, PARAMS, "eesd:length=2")
    tokens, said, again = [], "", ""
    try:
        for token in generation:
            tokens.append(token.id)
            fake.fake_cuda_lose(1, 999)
    except PpsdError as error:
        said = str(error)
    try:
        engine.generate(PROMPT, PARAMS, "plain").run()
    except PpsdError as error:
        again = str(error)
    assert list(generation.completion.ids) == tokens
    return {"plain": plain, "tokens": tokens, "error": said, "again": again}


def uncaptured(folder):
    engine = engine_of(folder, no_room)
    plain = engine.generate(PROMPT, PARAMS, "plain").run().ids
    ids = engine.generate(PROMPT, PARAMS, "elastic").run().ids
    return {"plain": plain, "ids": ids}


if __name__ == "__main__":
    result = globals()[sys.argv[1]](sys.argv[2])
    print(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # streams of a driver that is lost need not be taken down
