"""Ranks on several hosts, here network namespaces: the address that connects them, and what is said if none does."""

import os
import shutil
import socket
import subprocess
import sys

import pytest

from ppsd_rt import Engine, SamplingParams
from ppsd_rt.ranks.connect import INTERFACE, own_address
from ppsd_rt.ranks.world import World


def test_the_address_that_connects_a_host_with_rank_0(monkeypatch):
    """The loopback's for ranks of one host: gloo would listen on the address of the host's name."""
    assert own_address(World(0, 2, 0, 2, "host0")) == "127.0.0.1"
    for host in ("localhost", "no-such-host.invalid"):  # as a host may call itself
        assert not str(own_address(World(0, 2, 0, 1, host))).startswith("127.")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [])
    assert own_address(World(0, 2, 0, 1, "host0")) is None


class Hosts:
    """Two network namespaces with host names of their own, which stand for no address, and a cable between them."""

    def __init__(self, name):
        self.names = [f"{name}{number}" for number in range(2)]
        for host in self.names:
            self.ip("netns", "add", host)
            self.ip("-n", host, "link", "set", "lo", "up")
        self.ip("link", "add", self.names[0], "type", "veth", "peer", "name", self.names[1])
        for number, host in enumerate(self.names, 1):
            self.ip("link", "set", host, "netns", host)
            self.ip("-n", host, "addr", "add", f"10.77.{os.getpid() % 250}.{number}/24", "dev", host)
            self.ip("-n", host, "link", "set", host, "up")

    def ip(self, *words):
        subprocess.run(["ip", *words], check=True, capture_output=True)

    def run(self, options, **variables):
        """A rank on each -> of each its status, what it printed, and what ppsd-run said."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        torchrun += ["--master-addr", f"10.77.{os.getpid() % 250}.1", "--master-port", "29577"]
        running = []
        for number, host in enumerate(self.names):
            inside = ["ip", "netns", "exec", host, "unshare", "-u", "sh", "-c", f'hostname {host}; exec "$@"', "sh"]
            command = [*inside, *torchrun, "--node-rank", str(number), "-m", "ppsd_rt", *options]
            environment = {**os.environ, **variables}
            running.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
            )
        done = [process.communicate(timeout=500) for process in running]
        said = [[line for line in error.splitlines() if line.startswith("ppsd-run:")] for _, error in done]
        return [(p.returncode, out, lines) for p, (out, _), lines in zip(running, done, said, strict=True)]

    def close(self):
        for host in self.names:
            subprocess.run(["ip", "netns", "del", host], capture_output=True)


@pytest.fixture(scope="module")
def hosts():
    missing = [tool for tool in ("ip", "unshare", "hostname") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"two hosts are made with {', '.join(missing)}, which this machine has not")
    hosts = None
    try:
        hosts = Hosts(f"p{os.getpid() % 100000}h")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    yield hosts
    hosts.close()


def options(folder):
    return ["-m", str(folder), "--exit-head=norm:1", "--raw", "-n20", "--schedule=elastic", "hello"]


@pytest.mark.slow
def test_two_hosts_find_each_other(hosts, folder):
    (status, text, said), other = hosts.run(options(folder))
    assert (status, said, other[0], other[2]) == (0, [], 0, [])
    engine = Engine.from_pretrained(folder, exit_head="none", threads=1)
    assert text.strip() == engine.generate("hello", SamplingParams(max_tokens=20), "plain").run().text.strip()


@pytest.mark.slow
def test_hosts_that_cannot_connect_say_how_to_mend_it(hosts, folder):
    for status, text, said in hosts.run(options(folder), **{INTERFACE: "lo"}):
        assert (status, text) == (1, "")
        assert len(said) == 1
        assert "cannot connect to all other ranks through the network interface lo: " in said[0]
        assert said[0].endswith("Their ports must not be blocked")
