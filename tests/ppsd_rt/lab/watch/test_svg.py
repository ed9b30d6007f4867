"""The animation is one SVG that needs nothing else, and shows what was recorded, when it was."""

from xml.etree import ElementTree

from watch_support import SMALL

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
