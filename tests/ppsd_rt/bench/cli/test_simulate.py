"""`ppsd-run lab simulate`: what it sweeps, prints and refuses."""

import json

import pytest

from ppsd_rt.cli import main as cli


@pytest.fixture
def run(capsys):
    """-> (status, standard output, standard error)."""

    def run(*args):
        status = cli.main(["lab", "simulate", *map(str, args)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def rows(run):
    """-> (rows, the last line's object) of a run that works."""

    def rows(*args):
        status, out, err = run(*args, "-o", "json")
        assert (status, err) == (0, "")
        result = json.loads(out.splitlines()[-1])
        return result["rows"], result

    return rows


def test_sweeps_multiply(rows):
    lists = ("--stages", "2,3,4", "--acceptance", "0.5,0.9", "--link-ms", "0,1")
    swept, result = rows(*lists, "--schedule", "ppsd", "--schedule", "elastic")
    cells = [(row["stages"], row["acceptance"], row["link_ms"], row["schedule"]) for row in swept]
    assert len(set(cells)) == len(cells) == 3 * 2 * 2 * 2
    assert len(result["fastest"]) == 3 * 2 * 2
    for best in result["fastest"]:
        cell = [row for row in swept if all(row[key] == best[key] for key in ("stages", "acceptance", "link_ms"))]
        assert best["speedup"] == max(row["speedup"] for row in cell)


@pytest.mark.parametrize("output", ["table", "md", "json", "jsonl"])
def test_json_is_printed_on_request_or_into_a_file(run, output, tmp_path):
    status, out, _ = run("-n", 50, "-o", output, "--save", tmp_path / "result.json")
    assert status == 0
    assert ('"measurement"' in out) == ("json" in output)
    last = json.loads(out.splitlines()[-1] if "json" in output else (tmp_path / "result.json").read_text())
    assert last["measurement"] == "simulate"
    assert last["fastest"][0]["stages"] == 4
    if output == "md":
        assert out.splitlines()[0].startswith("| stages | link ms | acceptance | schedule |")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--stages", "1"), "at least one verification stage"),
        (("--acceptance", "1.5"), "probability"),
        (("--link-ms", "-1"), "neither 0 nor a number"),
        (("--token-ms", "1e-320"), "neither 0 nor a number"),
        (("--row-share", "1e308"), "neither 0 nor a number"),
        (("--tokens", "99999999999"), "is more than"),
        (("--stage-ms", ",".join(["1"] * 300)), "300 stages"),
        (("--token-ms", "0"), "more than 0 seconds"),
        (("--stage-ms", "1,2", "--stages", "2"), "do not go together"),
        (("--schedule", "auto"), "auto"),
        (("--schedule", "eesd"), "stop_rule=fixed"),
        (("--save", "/nowhere/at/all"), "cannot write the result"),
    ],
)
def test_bad_values_are_one_line_and_status_2(run, args, words):
    status, out, err = run(*args, "-n", 10) if "--tokens" not in args else run(*args)
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith("ppsd-run: ")
    assert words in err
