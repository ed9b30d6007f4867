"""benchmarks/sleeping_loop.py: real processes, whose answers it compares with one process's."""

import importlib
from pathlib import Path

import pytest


@pytest.mark.slow
def test_ranks_are_asked_in_turn_and_at_once(monkeypatch):
    """As fast as they can: the speeds mean nothing then."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    module = importlib.import_module("sleeping_loop")
    args = module.parser().parse_args(["-n", "6", "--clients", "3", "--token-ms", "0.3", "--head-ms", "0.1"])
    in_turn, plain, ppsd, auto = module.run(args, 3)
    assert [row["schedule"] for row in (in_turn, plain, ppsd, auto)] == ["plain", "plain", "ppsd", "auto"]
    assert in_turn["rows"] >= in_turn["rounds"] == 2 * 6
    assert plain["rows"] >= max(plain["rounds"], 3 * 6)
    assert plain["draft_rows"] == 0
    assert min(auto["rows"], ppsd["rows"]) >= 3 * 6
