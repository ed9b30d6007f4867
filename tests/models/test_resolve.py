"""Every form in which a model can be named, and every way in which a name can be wrong.

The hub is a small HTTP server on this machine that speaks as much of the hub's protocol as a snapshot needs; it is
asked by the real `huggingface_hub`, in a process of its own, because that package reads its settings when imported.
"""

import importlib.util
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from support import small_gguf

from ppsd_rt.errors import PpsdError
from ppsd_rt.models import resolve
from ppsd_rt.models.resolve import resolve_model


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PPSD_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def refusal(name: str, **options: bool) -> str:
    with pytest.raises(PpsdError) as caught:
        resolve_model(name, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------------------------
# Local models
# ---------------------------------------------------------------------------------------------------------------------


def test_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "org" / "name"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    monkeypatch.setenv("HOME", str(tmp_path / "org"))
    assert resolve_model(str(folder)) == folder
    assert resolve_model("org/name").samefile(folder)  # what is here is not asked for on the hub
    assert resolve_model("./org/name/", offline=True).samefile(folder)
    assert resolve_model("~/name") == folder


def test_folder_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "empty holds no config.json" in refusal("empty")
    (tmp_path / "empty" / "some.gguf").touch()
    assert "name the file empty/some.gguf" in refusal("empty")


def test_gguf_is_converted_once(tmp_path: Path, empty_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ppsd_rt")
    path = small_gguf(tmp_path / "My [model] v1.GGUF")
    folder = resolve_model(str(path))
    assert folder.parent == empty_cache / "gguf"
    assert folder.name.startswith("My__model__v1-")
    assert load_file(folder / "model.safetensors")["model.norm.weight"][0] == 0.5
    (message,) = caplog.messages
    assert message.startswith("converted My [model] v1.GGUF in ")

    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(f"./{path.name}", offline=True) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert caplog.messages == [message]

    for damaged in ("[" * 100_000, "{}", '{"stamp": 1, "files": []}', "\0"):
        caplog.clear()
        (folder / "ppsd-rt-stamp.json").write_text(damaged)
        assert resolve_model(path.name) == folder
        assert caplog.messages[0].startswith("converted ")


def test_changed_gguf_is_another_model(tmp_path: Path) -> None:
    first = resolve_model(str(small_gguf(tmp_path / "m.gguf")))
    status = (tmp_path / "m.gguf").stat()
    small_gguf(tmp_path / "m.gguf", seed=1)  # of the same size
    os.utime("m.gguf", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    second = resolve_model("m.gguf")
    assert second != first
    assert load_file(second / "model.safetensors")["model.norm.weight"][0] == 1.5
    assert load_file(first / "model.safetensors")["model.norm.weight"][0] == 0.5


def test_damaged_gguf_leaves_nothing_in_the_cache(tmp_path: Path, empty_cache: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(small_gguf(tmp_path / "whole.gguf").read_bytes()[:-1])
    assert "runs past the end" in refusal("m.gguf")
    assert [path.name for path in (empty_cache / "gguf").iterdir() if not path.name.endswith(".lock")] == []


def test_other_files(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert "is a file, but not a .gguf file" in refusal("model.safetensors")
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "neither a folder nor a regular file" in refusal("pipe.gguf")
    assert "neither a folder nor a regular file" in refusal("/dev/zero")


@pytest.mark.parametrize(
    "name", ["./nowhere", "/no/where", "~/nowhere", "a/b/c", "nowhere.gguf", "org/m.gguf", "x/", "a\\b"]
)
def test_paths_that_do_not_exist(name: str) -> None:
    assert refusal(name) == f"{name} does not exist"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("smollm2-135M", "did you mean smollm2-135m?"),
        ("smollm2", "did you mean smollm2-135m?"),
        ("smollm-135m-instruct", "did you mean smollm2-135m?"),
        ("defualt", "did you mean default?"),
        ("llama-70b", "'llama-70b' is not a model: give a model folder, a .gguf file, smollm2-135m, or a hub name"),
        ("", "'' is not a model: give"),
        ("a b/c", "'a b/c' is not a model: give"),
        ("x" * 5000, "File name too long"),
        ("a\0b", "'a\\x00b' is not a model"),
    ],
)
def test_names_that_mean_nothing(name: str, expected: str) -> None:
    assert expected in refusal(name)


@pytest.mark.parametrize("name", ["smollm2-135m", "default"])
def test_default_model_wins_over_a_folder_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text("{}")
    asked = []

    def default_model(*, offline: bool) -> Path:
        asked.append(offline)
        return tmp_path / "the model"

    monkeypatch.setattr(resolve, "default_model", default_model)
    assert resolve_model(name) == resolve_model(name, offline=True) == tmp_path / "the model"
    assert asked == [False, True]
    assert resolve_model(f"./{name}").samefile(tmp_path / name)


# ---------------------------------------------------------------------------------------------------------------------
# The hub
# ---------------------------------------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORIES = {
    "org/model": {
        "config.json": b"{}",
        "model.safetensors": b"weights",
        "tokenizer.json": b"{}",
        "tokenizer.model": b"pieces",
        "chat_template.jinja": b"{{ messages }}",
        "README.md": b"# not needed",
        "pytorch_model.bin": b"the same weights",
        "consolidated.safetensors": b"the same weights",
        "onnx/config.json": b"{}",
    },
    "org/gguf-only": {"config.json": b"{}", "model.Q4_K_M.gguf": b"GGUF"},
}


class Hub(BaseHTTPRequestHandler):
    """What a snapshot asks for: the commit and its files, then each file."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self.answer_about("/".join(parts[2:4]), tree="tree" in parts)
        else:
            self.answer_with_file("/".join(parts[:2]), "/".join(parts[4:]))

    def answer_about(self, name: str, tree: bool) -> None:
        if name == "org/gated":
            return self.answer(403, b"", {"X-Error-Code": "GatedRepo"})
        if name not in REPOSITORIES:
            return self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        files = REPOSITORIES[name]
        listed = [{"type": "file", "path": file, "size": len(data), "oid": "0"} for file, data in files.items()]
        info = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}
        return self.answer(200, json.dumps(listed if tree else info).encode())

    def answer_with_file(self, name: str, file: str) -> None:
        self.answer(200, REPOSITORIES[name][file], {"X-Repo-Commit": COMMIT, "ETag": f'"{file.replace("/", "-")}"'})

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for header, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Not on the test's output."""


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    if importlib.util.find_spec("huggingface_hub") is None:
        pytest.skip("huggingface_hub is not installed")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


ASK = """
import sys
from ppsd_rt.errors import PpsdError
from ppsd_rt.models.resolve import resolve_model
for request in sys.argv[1:]:
    try:
        print("folder", resolve_model(request.removeprefix("offline:"), offline=request.startswith("offline:")))
    except PpsdError as error:
        print("error", error)
"""


def ask(tmp_path: Path, endpoint: str, *requests: str, **variables: str) -> list[str]:
    """What `resolve_model` says to each request in a new process that knows the hub at `endpoint`."""
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1", **variables}
    settings |= {"HF_HUB_ETAG_TIMEOUT": "600", "HF_HUB_DOWNLOAD_TIMEOUT": "600"}  # seconds: the machine may be busy
    command = [sys.executable, "-c", ASK, *requests]
    done = subprocess.run(command, env=os.environ | settings, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()


def test_hub_snapshot(tmp_path: Path, hub: str) -> None:
    early, fetched, late = ask(tmp_path, hub, "offline:org/model", "org/model", "offline:org/model")
    assert early == "error org/model is neither a folder here nor in the hub's cache, and nothing may be downloaded"
    assert fetched.startswith("folder ")
    assert late == fetched
    folder = Path(fetched.removeprefix("folder "))
    expected = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer.model", "chat_template.jinja"}
    assert {path.name for path in folder.iterdir()} == expected
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_hub_refusals(tmp_path: Path, hub: str) -> None:
    missing, gated, no_weights, odd = ask(tmp_path, hub, "org/none", "org/gated", "org/gguf-only", "org/o..dd")
    assert missing == "error there is no folder org/none here and no model org/none on the hub (or it is private)"
    assert gated == "error org/gated is gated: accept its terms on the hub, then log in with `hf auth login`"
    assert no_weights.startswith("error org/gguf-only on the hub lacks config.json or *.safetensors")
    assert odd.startswith("error org/o..dd could not be fetched from the hub: ")


def test_hub_out_of_reach(tmp_path: Path, hub: str) -> None:
    (answer,) = ask(tmp_path, "http://127.0.0.1:9", "org/model")
    assert answer == "error org/model is neither a folder here nor in the hub's cache, and the hub cannot be reached"


def test_hub_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert 'the hub needs huggingface_hub: pip install "ppsd-rt[hub]"' in refusal("org/model")
