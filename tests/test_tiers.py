"""`make test` stays within minutes: what costs most may not grow unseen. Counted, for no test looks at a clock."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# At most so many tests of `make test` that ... Whoever needs more marks others slow, or raises this on purpose.
INTERPRETER = 600  # run kernels in Triton's interpreter
REAL_MODEL = 20  # need the default model
PROCESSES = 760  # stand in a file that starts processes


def test_costly_tests_do_not_grow_unseen(request):
    items = [item for item in request.session.items if item.get_closest_marker("slow") is None]
    starts = {path for path in {item.path for item in items} if "subprocess" in path.read_text()}
    in_interpreter = [item for item in items if {"triton_kernels", "cuda"} & set(item.path.relative_to(ROOT).parts)]
    with_model = [item for item in items if {"default_model", "default_folder"} & set(item.fixturenames)]
    with_processes = [item for item in items if item.path in starts]
    assert len(in_interpreter) <= INTERPRETER
    assert len(with_model) <= REAL_MODEL
    assert len(with_processes) <= PROCESSES


def test_lists_name_files_and_tests_that_exist():
    for line in (ROOT / "tests/quick.txt").read_text().splitlines():
        assert (ROOT / line).is_file(), line
    for line in (ROOT / "tests/slow.txt").read_text().splitlines():
        if not line.startswith("#"):
            file, _, rest = line.partition("::")
            assert f"def {rest.partition('[')[0]}(" in (ROOT / file).read_text(), line
