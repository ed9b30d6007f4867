"""`ppsd-run lab simulate`: what it sweeps, prints, draws and refuses."""

import json

import pytest
from support import tiny_head, tiny_model, write_model

from ppsd_rt._native import Costs, StageCosts
from ppsd_rt.bench.simulate import costs_of_stages, measured
from ppsd_rt.cli import main as cli
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.pipeline.schedule import MAX_ROWS


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


def test_measured_costs_of_a_layer_and_of_the_heads():
    """4 layers, exit after 1: a row through it 2 ms, its head 0.5 ms; a pass of 3 layers and LM head 8 + n ms."""
    stages = StageCosts(0.002, 0.0025, tuple((8 + n) / 1e3 for n in range(1, MAX_ROWS + 1)))
    model = measured(Costs(stages, None), 1, 4)
    assert model.layers.layers == (0.002,) * 4
    assert model.layers.head == pytest.approx(0.0005)
    assert model.layers.lm_head == pytest.approx(0.003)
    assert model.growth[3] == pytest.approx(12 / 9)
    split = model.cut(3)
    assert split.sizes == (1, 2, 1)
    costs = costs_of_stages(model.without_head(split), model.layers.head, model.growth)
    assert [costs.row_step, *(stage[0] for stage in costs.stages)] == pytest.approx([0.002, 0.004, 0.005])
    assert sum(stage[3] for stage in costs.stages) == pytest.approx(0.012)


def test_a_measured_model(rows, run, tmp_path, monkeypatch):
    monkeypatch.setenv("PPSD_CACHE", str(tmp_path / "cache"))
    folder = write_model(tmp_path / "model")
    tiny_head(tiny_model(), hash=Checkpoint(folder).hash).save(tmp_path / "head.safetensors")
    model = ("--measured", "--model", folder, "--threads", 1)
    swept, result = rows(*model, "--exit-head", tmp_path / "head.safetensors", "--stages", "2,3", "--bandwidth", 1)
    assert len(swept) == 2 * 4
    layers = Checkpoint(folder).config.num_hidden_layers
    assert len(result["model_ms"]["layers"]) == layers
    assert len({pipeline["split"][0] for pipeline in result["pipelines"]}) == 1  # the head's layer
    assert result["pipelines"][0]["link_ms_per_row"] == pytest.approx(
        4 * Checkpoint(folder).config.hidden_size * 8 / 1e9 * 1e3
    )
    status, out, err = run(*model, "--exit-head", "none")
    assert (status, out) == (1, "")
    assert "no exit head to measure" in err.splitlines()[-1]


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
        (("--token-ms", "0"), "costs of nothing"),
        (("--stage-ms", "1,2", "--stages", "2"), "do not go together"),
        (("--schedule", "auto"), "auto"),
        (("--bandwidth", "0", "--row-bytes", "4"), "--bandwidth"),
        (("--bandwidth", "1"), "--row-bytes"),
        (("--measured", "--token-ms", "2"), "do not go together"),
        (("--trace", "/nowhere/at/all"), "cannot write the trace"),
    ],
)
def test_bad_values_are_one_line_and_status_2(run, args, words):
    status, out, err = run(*args, "-n", 10) if "--tokens" not in args else run(*args)
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith("ppsd-run: ")
    assert words in err
