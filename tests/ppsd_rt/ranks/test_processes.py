"""Real processes over gloo: exact answers, and an end with one line when a rank is another one, dies or hangs."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import openai
import pytest
from support import slow

from ppsd_rt import Engine, Grammar, SamplingParams

RANKS = 3
GUARD = 500.0  # seconds after which ranks that do not end are ended; no test is about how soon
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def answer(folder):
    """What nobody disturbs."""
    engine = Engine.from_pretrained(folder, exit_head="none", backend="cpu", dtype="int8", threads=1)
    return engine.generate(PROMPT, SamplingParams(max_tokens=400), "plain").run().text.rstrip("\n")


def options(folder):
    return ["-m", str(folder), "--exit-head", "norm:1", "--raw"]


@pytest.mark.parametrize("machine", [["--dtype", "int8"], ["--dtype", "int4"]], ids=" ".join)
@pytest.mark.slow
def test_check_over_ranks_finds_no_difference(folder, tmp_path, machine):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "prompt": "Once upon a time"}\n{"id": "b", "prompt": "Once upon a hill"}\n')
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command = [*ranks, "-m", "ppsd_rt", "check", *options(folder), "--prompts", str(prompts), "-n", "24", "--json"]
    command += [
        *(f"--schedule={name}" for name in ("eesd", "ppsd", "elastic", "auto")),
        "--sampling",
        "greedy,penalty",
        "--stages",
        "1,2,1",
        *machine,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["differences"] == []
    assert report["answers"] == 2 * 2 * 5  # plain over ranks too, against plain in one process
    assert {row["schedule"] for row in report["rows"]} >= {"plain", "plain over ranks", "ppsd", "auto"}


@pytest.mark.slow
def test_many_clients_of_ranks_that_serve(folder):
    """One is alone until the others come; all get the text of one process, those of a grammar among them."""
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "-m", "ppsd_rt"]
    machine = ["-m", str(folder), "--exit-head", "norm:1", "--dtype", "int8", "--stages", "1,2,1"]
    prompts = [PROMPT, *(f"{PROMPT} {number}" for number in range(6))]
    asked = [SamplingParams(max_tokens=60, temperature=number % 2, seed=number) for number in range(len(prompts))]
    asked[0], asked[3] = SamplingParams(max_tokens=300), replace(asked[3], grammar=Grammar.regex("([a-f]{3} )+x"))
    with subprocess.Popen([*ranks, "serve", *machine, "--port", "0"], stderr=subprocess.PIPE, text=True) as serving:
        try:
            url = next(found[0] for line in serving.stderr if (found := re.search(r"http://\S+/v1", line)))
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client, ThreadPoolExecutor(8) as pool:

                def ask(number):
                    wanted = asked[number]
                    more = {"guided_regex": wanted.grammar.text} if wanted.grammar else {}
                    return client.completions.create(
                        model="model", prompt=prompts[number], max_tokens=wanted.max_tokens, seed=wanted.seed,
                        temperature=wanted.temperature, stream=True, extra_body=more,
                    )  # fmt: skip

                def text(stream):
                    return "".join(chunk.choices[0].text for chunk in stream if chunk.choices)

                first = ask(0)
                begun = next(first).choices[0].text
                others = pool.map(lambda number: text(ask(number)), range(1, len(prompts)))
                texts = [begun + text(first), *others]
        finally:
            serving.terminate()
        assert '"event": "stopped"' in serving.stderr.read()
    engine = Engine.from_pretrained(folder, exit_head="none", backend="cpu", dtype="int8", threads=1)
    expected = [engine.generate(prompt, params, "plain").run() for prompt, params in zip(prompts, asked, strict=True)]
    assert texts == [completion.text for completion in expected]


# Each message takes a fifth of a second: the answer is far from its end when the rank dies.
LONG = ["-n", "400", "--link-ms", "200", "--schedule", "elastic"]


def kill_once(command, folder, answer, victim, by):
    """Start ranks, wait for the first text, send one the signal `by`: all others end, each with one line about it, and
    what rank 0 has printed is the beginning of the answer. Without torchrun, which would end them all -> the lines."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    outputs = [(folder / f"out{rank}", folder / f"err{rank}") for rank in range(RANKS)]
    running = []
    for rank, (out, err) in enumerate(outputs):
        world = {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": RANKS}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, **{name: str(value) for name, value in world.items()}}
        with out.open("wb") as stdout, err.open("wb") as stderr:
            words = [sys.executable, "-m", "ppsd_rt", *command]
            running.append(
                subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=environment)
            )
    others = [process for rank, process in enumerate(running) if rank != victim]
    try:
        end = time.monotonic() + GUARD
        while not outputs[0][0].stat().st_size:
            assert time.monotonic() < end and running[0].poll() is None, outputs[0][1].read_text()
            time.sleep(0.01)
        running[victim].send_signal(by)
        statuses = [process.wait(GUARD) for process in others]
    finally:
        for process in running:
            process.kill()
            process.wait()
    said, lines = outputs[0][0].read_text().rstrip("\n"), [err.read_text().strip() for _, err in outputs]
    assert answer.startswith(said) and 0 < len(said) < len(answer)
    assert min(statuses) > 0
    del lines[victim]
    assert all(f"rank {victim} " in line and "\n" not in line for line in lines), lines
    return lines


@pytest.mark.parametrize("victim", [slow(0), 1, slow(2)])
def test_a_rank_that_is_killed_is_named_by_all_others(folder, tmp_path, answer, victim):
    lines = kill_once([*options(folder), *LONG, PROMPT], tmp_path, answer, victim, signal.SIGKILL)
    assert "has died: its connection closed" in lines[victim % len(lines)]  # of the one after it: no limit has run out


@pytest.mark.slow
def test_a_rank_that_falls_silent_is_named_too(folder, tmp_path, answer):
    command = [*options(folder), *LONG, "--rank-timeout", "60", PROMPT]
    assert "silent for 60 s" in kill_once(command, tmp_path, answer, 1, signal.SIGSTOP)[0]
