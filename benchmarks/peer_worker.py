"""One engine in a process of its own, on its own cores, that answers requests one at a time.

    python benchmarks/peer_worker.py ENGINE FORMAT MODEL THREADS CORES CONTEXT

A request and its reply are a line of JSON each, on standard input and standard output; the first reply says that the
engine is ready. `peers.py` starts the workers, all of them, and lets them take turns.

    {"prompt": [ids], "tokens": n}              -> {"ids": [...], "first": s, "rest": s}
    {"prompt": [ids], "last": n, "file": path}  -> {}, and the logits of the last n rows in the file (.npy)

Every engine decodes greedily and past any end-of-sequence id, from an empty KV cache. `first`: seconds from the prompt
to the first token. `rest`: seconds for all the others.
"""

import json
import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from llama_library import BUILT  # the one beside this file

Answer = tuple[list[int], float, float]  # ids, first, rest
LLAMA_SERVER = BUILT.with_name("llama-server")


class Peer(Protocol):
    def about(self) -> dict[str, Any]: ...
    def answer(self, prompt: list[int], tokens: int) -> Answer: ...
    def logits(self, ids: list[int], last: int) -> npt.NDArray[np.float32]: ...


class PpsdRt:
    """format: a number format of the cpu backend, or FORMAT+SCHEDULE; without a schedule it decodes plainly."""

    def __init__(self, format: str, model: str, threads: int, context: int) -> None:
        import ppsd_rt
        from ppsd_rt import Engine
        from ppsd_rt.pipeline.schedule import parse_schedule

        dtype, _, schedule = format.partition("+")
        self.schedule = parse_schedule(schedule or "plain")
        head = "auto" if self.schedule.drafts else "none"
        self.engine = Engine.from_pretrained(model, exit_head=head, backend="cpu", dtype=dtype, threads=threads)
        self.version = ppsd_rt.__version__

    def about(self) -> dict[str, Any]:
        return {"version": self.version, **self.engine.backend.facts()}

    def answer(self, prompt: list[int], tokens: int) -> Answer:
        from ppsd_rt import SamplingParams

        self.engine.backend.logits([(prompt[0] + 1) % self.engine.config.vocab_size])  # an empty KV cache, nearly
        self.engine.forget()  # what `recycle` has counted in this answer before
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        completion = self.engine.generate(prompt, params, self.schedule).run()
        statistics = completion.statistics
        return list(completion.ids), statistics.ttft_seconds, statistics.decode_seconds

    def logits(self, ids: list[int], last: int) -> npt.NDArray[np.float32]:
        return self.engine.backend.logits(ids, last)


class LlamaCpp:
    """format: whatever the file is in; model: a GGUF file."""

    def __init__(self, format: str, model: str, threads: int, context: int) -> None:
        from llama_library import Llama, find_library

        self.library = find_library()
        assert self.library is not None, "peers.py has looked for it"
        self.llama = Llama(self.library, Path(model), context, threads)

    def about(self) -> dict[str, Any]:
        here = Path(__file__).resolve().parent  # not where this machine has it
        library = self.library.relative_to(here) if self.library.is_relative_to(here) else self.library.name
        return {"library": str(library), "system_info": self.llama.system_info}

    def answer(self, prompt: list[int], tokens: int) -> Answer:
        self.llama.forget()
        begin = perf_counter()
        ids = [int(self.llama.decode(prompt).argmax())]
        first = perf_counter()
        while len(ids) < tokens:
            ids.append(int(self.llama.decode(ids[-1:]).argmax()))
        return ids, first - begin, perf_counter() - first

    def logits(self, ids: list[int], last: int) -> npt.NDArray[np.float32]:
        return self.llama.logits(ids, last)


class LlamaServer:
    """llama.cpp's server, for its speculation is there and not in the library.

    format: whatever the file is in, or FORMAT+KIND with a kind of `llama-server --spec-type`, such as `ngram-simple`;
    model: a GGUF file with its tokenizer. The kinds that count n-grams over all answers profit from repeats.
    """

    def __init__(self, format: str, model: str, threads: int, context: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        kind = format.partition("+")[2]
        command = [LLAMA_SERVER, "--model", model, "--threads", threads, "--ctx-size", context, "--parallel", 1]
        command += ["--host", "127.0.0.1", "--port", port, *(["--spec-type", kind] if kind else [])]
        self.process = subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL)
        while True:
            try:
                self._ask("/health")
                return
            except OSError:  # not there yet, or still loading
                if self.process.poll() is not None:
                    raise SystemExit(f"llama-server has ended with status {self.process.returncode}") from None
                sleep(0.1)

    def about(self) -> dict[str, Any]:
        return {"build": self._ask("/props").get("build_info")}

    def answer(self, prompt: list[int], tokens: int) -> Answer:
        reply = self._ask("/completion", {
            "prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False,
            "return_tokens": True,
        })  # fmt: skip
        ids, times = reply["tokens"], reply["timings"]
        if len(ids) != tokens:
            raise SystemExit(f"llama-server has answered with {len(ids)} tokens instead of {tokens}")
        return ids, times["prompt_ms"] / 1000, times["predicted_ms"] / 1000

    def logits(self, ids: list[int], last: int) -> npt.NDArray[np.float32]:
        raise SystemExit("llama-server gives no logits: name llama.cpp")

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as reply:
            return dict(json.load(reply))


class Transformers:
    """The model's forward pass in the tightest loop there is; `generate` would be slower."""

    def __init__(self, format: str, model: str, threads: int, context: int) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.torch, self.transformers = torch, transformers
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, format)).eval()

    def about(self) -> dict[str, Any]:
        attention = self.model.config._attn_implementation
        versions = {"version": self.transformers.__version__, "torch": self.torch.__version__}
        return {**versions, "attention": attention}

    def answer(self, prompt: list[int], tokens: int) -> Answer:
        cache = self.transformers.DynamicCache(config=self.model.config)
        begin = perf_counter()
        ids = [self._step(prompt, cache)]
        first = perf_counter()
        while len(ids) < tokens:
            ids.append(self._step(ids[-1:], cache))
        return ids, first - begin, perf_counter() - first

    def _step(self, ids: list[int], cache: Any) -> int:
        output = self.model(self.torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        return int(output.logits[0, -1].argmax())

    def logits(self, ids: list[int], last: int) -> npt.NDArray[np.float32]:
        logits = self.model(self.torch.tensor([ids]), logits_to_keep=last).logits[0]
        return np.asarray(logits.float().numpy())


PEERS = {"ppsd-rt": PpsdRt, "llama.cpp": LlamaCpp, "llama-server": LlamaServer, "transformers": Transformers}


def main() -> None:
    engine, format, model, threads, cores, context = sys.argv[1:]
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print is not a reply
    peer: Peer = PEERS[engine](format, model, int(threads), int(context))

    def reply(value: dict[str, Any]) -> None:
        replies.write(json.dumps(value) + "\n")
        replies.flush()

    reply(peer.about())
    for line in sys.stdin:
        request = json.loads(line)
        if "file" in request:
            np.save(request["file"], peer.logits(request["prompt"], request["last"]))
            reply({})
        else:
            ids, first, rest = peer.answer(request["prompt"], request["tokens"])
            reply({"ids": ids, "first": first, "rest": rest})


if __name__ == "__main__":
    main()
