"""What the tests of the server share: a server in a thread, a clock and answers that the tests hold, the log."""

import asyncio
import json
import queue
import socket
import threading
from contextlib import contextmanager
from dataclasses import replace

import httpx2
from support import Lazily

from ppsd_rt import SamplingParams
from ppsd_rt.pipeline.schedule import parse_schedule
from ppsd_rt.serve.run import Server, listen
from ppsd_rt.serve.service import Service
from ppsd_rt.serve.settings import Settings

anthropic, openai = Lazily("anthropic"), Lazily("openai")
SCHEDULE = parse_schedule("eesd:length=3,stop_rule=fixed")
NAME = "tiny"
USER = [{"role": "user", "content": "Why is the sky blue?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Bern"]}},
    "required": ["city"],
    "additionalProperties": False,
}
# Calls, as far as they go, and some that no strict reader takes.
OPEN, SHUT = "<tool_call>", "</tool_call>"
BRIEF = '{"name": "weather", "arguments": '
UNREADABLE = [
    f"{OPEN}{BRIEF}{value}}}{SHUT}"
    for value in (
        '{"a": NaN}',
        '{"a": -Infinity}',
        '{"a": 1e999}',
        '{"a": "\\ud83d"}',
        "[1]",
        '{"a": ' * 999 + "1" + "}" * 999,
    )
] + [f'{OPEN}{{"name": "{name}", "arguments": {{}}}}{SHUT}' for name in ("\\ud83d", "a b", "")]
HANG = 120  # seconds: a guard, no test waits for it to pass


def alone(engine, prompt, **params):
    """The answer without a server."""
    return engine.generate(prompt, SamplingParams(**params), SCHEDULE).run()


class Clock:
    """Time that stands still: what sleeps wakes when the test says so."""

    def __init__(self):
        self._sleepers, self._changed = [], threading.Condition()

    async def sleep(self, seconds):
        sleeper = seconds, asyncio.get_running_loop(), asyncio.Event()
        with self._changed:
            self._sleepers.append(sleeper)
            self._changed.notify_all()
        try:
            await sleeper[2].wait()
        finally:
            with self._changed:
                self._sleepers.remove(sleeper)

    def ring(self, seconds):
        """Wake what sleeps for just so long, as soon as something does; called by a test's thread."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._due(seconds), HANG)
            for _, loop, woken in self._due(seconds):
                loop.call_soon_threadsafe(woken.set)

    def _due(self, seconds):
        return [sleeper for sleeper in self._sleepers if sleeper[0] == seconds]


class Held:
    """An engine's generation that goes on after its first event when it is released, or ends there when cancelled."""

    def __init__(self, generation, loop):
        self._generation, self._loop = generation, loop
        self._go, self._cut = asyncio.Event(), False

    def release(self):
        self._loop.call_soon_threadsafe(self._go.set)

    async def bursts(self):
        async for event in self._generation.events():
            yield [event]
            await self._go.wait()
            if self._cut:
                return

    def cancel(self):
        self._cut = self._cut or not self._go.is_set()
        self._go.set()
        self._generation.cancel()

    @property
    def completion(self):
        completion = self._generation.completion
        return replace(completion, finish_reason="cancelled") if self._cut else completion

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self._generation.aclose()


class Holding:
    """An engine whose generations are `Held` until all are released; `held` has them, and `begun` counts them."""

    def __init__(self, engine):
        self._engine, self.held, self._released = engine, [], False
        self.begun = threading.Semaphore(0)

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def agenerate(self, *args):
        self.held.append(Held(self._engine.agenerate(*args), asyncio.get_running_loop()))
        self.begun.release()
        if self._released:
            self.held[-1].release()
        return self.held[-1]

    def release(self):
        self._released = True
        for one in self.held:
            one.release()


class Log:
    """The log of one server, as it is written."""

    def __init__(self):
        self._entries = queue.Queue()

    def write(self, event, **fields):
        self._entries.put({"event": event, **fields})

    def next(self, event="request"):
        while (entry := self._entries.get(timeout=HANG))["event"] != event:
            pass
        return entry


class Served:
    """A server in a thread, and clients for it."""

    def __init__(self, engine, **settings):
        self.engine = engine
        self.log = Log()
        self.service = Service(engine, Settings(**{"schedule": SCHEDULE, "log": self.log.write, **settings}))
        self.server = Server(self.service)
        self._listener = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        key = settings.get("api_key") or "none"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=HANG)
        self.http = httpx2.Client(base_url=self.url, timeout=HANG)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self._listener]})

    def chat(self, **options):
        return self.client.chat.completions.create(**{"model": NAME, "messages": USER, "temperature": 0} | options)

    def complete(self, prompt, **options):
        return self.client.completions.create(**{"model": NAME, "prompt": prompt, "temperature": 0} | options)

    def post(self, path="/v1/chat/completions", **body):
        # A seed, or an answer would now and then end before its limit.
        return self.http.post(path, json={"messages": USER, "max_tokens": 4, "seed": 1} | body)

    def connect(self, body, sent=None):
        """A connection over which a chat is asked for, as far as `sent` bytes of the body."""
        content = json.dumps({"messages": USER, "max_tokens": 24, "temperature": 0} | body).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection = socket.create_connection(self._listener.getsockname(), timeout=HANG)
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content[:sent])
        return connection

    def raw(self, request):
        """What comes back to bytes that no client would send."""
        with socket.create_connection(self._listener.getsockname(), timeout=HANG) as connection:
            connection.sendall(request.encode())
            return b"".join(iter(lambda: connection.recv(1 << 16), b""))

    def answered(self):
        """The log's line of the next answer that has ended."""
        while "finish" not in (entry := self.log.next()):
            pass
        return entry


@contextmanager
def serving(engine, **settings):
    served = Served(engine, **settings)
    served.thread.start()
    try:
        yield served
    finally:
        served.client.close()
        served.http.close()
        served.server.should_exit = True
        served.server.force_exit = True
        served.thread.join(HANG)
        assert not served.thread.is_alive()
