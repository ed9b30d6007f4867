"""`ppsd-run serve` itself: options, signals, what it says when it cannot begin."""

import logging
import os
import queue
import re
import signal
import socket
import sys
import threading

import pytest
from serve_support import HANG, openai
from support import write_model

from ppsd_rt.cli import main as cli


class Lines(logging.Handler):
    """What is said, as it is said."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.lines = queue.Queue()

    def emit(self, record):
        self.lines.put(record.getMessage())


@pytest.fixture
def said():
    handler = Lines()
    logging.getLogger("ppsd_rt").addHandler(handler)
    yield handler.lines
    logging.getLogger("ppsd_rt").removeHandler(handler)


@pytest.mark.parametrize(
    ("number", "backend"),
    [(signal.SIGTERM, "cpu"), (signal.SIGINT, "cpu"), (signal.SIGHUP, "torch")],
    ids=lambda value: str(value).lower(),
)
def test_it_serves_until_a_signal_and_then_ends_in_order(tmp_path, monkeypatch, said, number, backend):
    monkeypatch.setenv("PPSD_API_KEY", "secret")
    folder = write_model(tmp_path / "little")
    names = []

    def use():
        url = re.search(r"http://\S+/v1", said.get(timeout=HANG))[0]
        with openai.OpenAI(base_url=url, api_key="secret", max_retries=0) as client:
            names.extend(model.id for model in client.models.list())
        os.kill(os.getpid(), number)

    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    user = threading.Thread(target=use)
    user.start()
    options = ["--dtype", "float32", "--threads", "1", "--exit-head", "none", "--backend", backend]
    assert cli.main(["serve", "--model", str(folder), "--port", "0", *options]) == 0
    user.join(HANG)
    assert names == ["little"]
    assert {one: signal.getsignal(one) for one in before} == before
    assert '"event": "stopped"' in said.queue[-1]


def test_an_address_that_is_taken(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", "--port", str(port)]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"ppsd-run: cannot listen on 127.0.0.1 port {port}: Address already in use; choose another")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--port", "70000"], "--port must be from 0 to 65535"),
        (["--grace", "-1"], "not a number of seconds"),
        (["--queue", "0"], "not a number from 1"),
        (["--schedule", "quick"], "schedule 'quick' is unknown"),
    ],
)
def test_options_that_make_no_sense(capsys, options, said):
    assert cli.main(["serve", *options]) == 2
    assert said in capsys.readouterr().err


def test_packages_that_are_missing_are_named_with_the_command(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert cli.main(["serve"]) == 1
    assert capsys.readouterr().err == 'ppsd-run: the server needs uvicorn: pip install "ppsd-rt[serve]"\n'
