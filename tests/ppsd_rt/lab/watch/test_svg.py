"""The animation is one SVG that needs nothing else, and shows what was recorded, when it was."""

from xml.etree import ElementTree

from support import write_model
from watch_support import SMALL

from ppsd_rt.cli import main as cli
from ppsd_rt.lab.watch.svg import draw

SVG = "{http://www.w3.org/2000/svg}"


def texts(root):
    return ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]


def test_it_shows_what_was_recorded():
    source = draw(SMALL, "Why <so>?", 1000.0)
    root = ElementTree.fromstring(source)
    found = texts(root)
    assert any(
        text.startswith("“Why <so>?”  elastic, cpu int8: recorded, then shown 1000 times slower") for text in found
    )
    assert {*SMALL.stages, " sky", " <red>", "2 tokens", "1 token"} <= set(found)
    assert " sky is ↺ roll back" in found
    assert {"The", " sky", " is", "blue"} <= set(found)
    kinds = [rect.get("class") for rect in root.iter(f"{SVG}rect")]
    assert (kinds.count("accepted"), kinds.count("rejected"), kinds.count("dropped")) == (1, 1, 2)
    assert kinds.count("verify") == 2
    assert "\x1b" not in source


def test_the_command_writes_it(tmp_path, capsys):
    folder = write_model(tmp_path / "model", num_hidden_layers=8)
    path = tmp_path / "watch.svg"
    options = ["--model", str(folder), "--exit-head", "norm:4", "--raw", "-n", "20", "--svg", str(path)]
    assert cli.main(["watch", "one two three", *options]) == 0
    assert capsys.readouterr().out == ""
    root = ElementTree.parse(path).getroot()
    assert any("verify: layers 5-8" in text for text in texts(root))
    assert any(rect.get("class") in ("accepted", "rejected", "dropped") for rect in root.iter(f"{SVG}rect"))
