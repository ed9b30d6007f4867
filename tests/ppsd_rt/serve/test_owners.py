"""Nobody reads another's text: what a client gets is the same whatever others have said, but for time."""

import json

import pytest
from serve_support import serving
from support import tiny_model, write_model

from ppsd_rt import Engine
from ppsd_rt.pipeline.schedule import parse_schedule

SCHEDULE = parse_schedule("eesd:length=3,stop_rule=fixed,recycle=on")
SAID = "Dear bank, my card number is {} and my PIN is {}."
SECRET, OTHER = SAID.format(4929, 8815), SAID.format(7361, 2206)
DIGITS = [place for place, character in enumerate(SECRET) if character.isdigit()]
ANN, BOB = {"user": "Ann"}, {"user": "Bob"}
KEYS = {"api_key": "one two"}


def ask(served, body, key="none"):
    reply = served.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    assert reply.status_code == 200, reply.text
    return reply


def drafted(served, known, said, key="none"):
    """All that a stream tells of how its tokens came about, its chunks put together: how many come at once is time. The
    answer is made to begin with the end of what is known."""
    ids = served.engine.encode(known)
    body = {"prompt": ids[:-1], "logit_bias": {str(ids[-1]): 100}, "stream": True, "return_tokens": True}
    told, lines = {}, ask(served, body | {"max_tokens": 4, "temperature": 0} | said, key).text.splitlines()
    for line in lines:
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                for name, value in choice.items():
                    if isinstance(value, list | str):
                        told[name] = told.get(name, type(value)()) + value
    return told


def answered(served, known, guess, said, key="none"):
    """All of a reply whose answer is held to the guess, with log-probabilities and counts."""
    body = {"prompt": known, "max_tokens": 4, "temperature": 0, "logprobs": 2}
    reply = ask(served, body | {"structured_outputs": {"choice": [f"{guess}9"]}} | said, key).json()
    return {name: value for name, value in reply.items() if name not in ("id", "created")}


def learned(engine, guesses, victim, attacker, keys=("none", "none"), schedule=SCHEDULE, **settings):
    """-> what an attacker sees who knows all before a digit and guesses it: where the victim has said one text, and
    where he has said another."""
    for secret in (SECRET, OTHER):
        engine.forget()
        with serving(engine, schedule=schedule, **settings) as served:
            ask(served, {"prompt": secret, "max_tokens": 2, "temperature": 0} | victim, keys[0])
            seen = [served.http.get("/health").json()["acceptance_by_day"]]
            for place in guesses:
                seen.append(drafted(served, SECRET[:place], attacker, keys[1]))
                for guess in range(10):
                    seen.append(answered(served, SECRET[:place], guess, attacker, keys[1]))
                    seen.append(drafted(served, f"{SECRET[:place]}{guess}", attacker, keys[1]))
            yield seen


NEIGHBOURS = {
    "users": {"victim": ANN, "attacker": BOB},
    "a user and nobody": {"victim": ANN, "attacker": {}},
    "nobody and a user": {"victim": {}, "attacker": ANN},
    "nobody from elsewhere": {"victim": {}, "attacker": {}, "host": "0.0.0.0"},
    "keys": {"victim": {}, "attacker": {}, "keys": ("one", "two")} | KEYS,
    "keys with one user's name": {"victim": ANN, "attacker": ANN, "keys": ("one", "two")} | KEYS,
    "shared": {"victim": ANN, "attacker": BOB, "memory": "shared"},
    "off": {"victim": ANN, "attacker": ANN, "memory": "off"},
    "not stored": {"victim": {"store": False}, "attacker": {}},
}


@pytest.mark.parametrize("neighbours", NEIGHBOURS.values(), ids=NEIGHBOURS)
@pytest.mark.parametrize("guesses", [DIGITS[1:2], pytest.param(DIGITS, marks=pytest.mark.slow)], ids=["one", "all"])
def test_guesses_tell_nothing_of_what_another_has_said(engine, neighbours, guesses):
    one, other = learned(engine, guesses, **neighbours)
    assert one == other


def test_one_persons_programs_see_no_drafts_of_each_others_texts(engine):
    """Those that name no user are one person's on a machine of his own; even so they are not read like an open book."""
    said = {"victim": {}, "attacker": {}, "schedule": parse_schedule("recycle")}
    one, other = learned(engine, DIGITS[1:2], **said)
    assert one == other


def test_whose_earlier_answers_are_copied_from(engine):
    body = {"prompt": [5, 6, 7], "temperature": 1.5, "seed": 3, "max_tokens": 40, "ignore_eos": True}

    def helped(first, then, **settings):
        """Does one answer help the other? The log has all drafts, which its clients do not see."""
        engine.forget()
        with serving(engine, schedule=parse_schedule("recycle"), **settings) as served:
            counts = []
            for said in (first, then):
                ask(served, body | {name: value for name, value in said.items() if name != "key"}, said.get("key"))
                counts.append(served.answered()["accepted"])
        return counts[1] > counts[0] + 10

    one, two = {"key": "one"}, {"key": "two"}
    assert helped(ANN, ANN) and helped({}, {}) and not helped(ANN, BOB) and not helped(ANN, {})
    assert helped(ANN, BOB, memory="shared") and helped({}, ANN, memory="shared", host="0.0.0.0")
    assert not helped(ANN, ANN, memory="off")
    assert not helped({}, {}, host="0.0.0.0") and helped(ANN, ANN, host="0.0.0.0")
    assert helped(one, one, **KEYS) and not helped(one, two, **KEYS) and not helped(one | ANN, two | ANN, **KEYS)
    assert not helped({"store": False}, {}) and not helped({}, {"store": False})
    assert not helped({"return_tokens": True, "stream": True}, {})


@pytest.mark.parametrize(("before", "after"), [("shared", "own"), ("own", "shared")])
def test_what_was_kept_in_one_memory_is_not_found_in_another(tmp_path, before, after):
    folder, kept, counts = write_model(tmp_path / "model", tiny_model(3)), tmp_path / "kept", []
    body = {"prompt": [5, 6, 7], "temperature": 1.5, "seed": 3, "max_tokens": 40, "ignore_eos": True}
    for memory in (before, after, before, after):
        with (
            Engine.from_pretrained(folder, dtype="float32", threads=1, exit_head="none", learn=kept) as engine,
            serving(engine, schedule=parse_schedule("recycle"), memory=memory) as served,
        ):
            ask(served, body)
            counts.append(served.answered()["accepted"])
    assert counts[1] < counts[0] + 10 < counts[2] and counts[0] + 10 < counts[3], "each finds its own again"


def test_a_key_is_asked_for_by_the_path_that_is_routed(engine):
    with serving(engine, api_key="secret") as served:
        for host in ("a/health?", "a/?", "a/health#", "a/health?x="):
            reply = served.raw(f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")
            assert reply.startswith(b"HTTP/1.1 401 "), host


def test_without_a_key_only_this_servers_own_names_are_taken(engine):
    with serving(engine, host="gpu.example") as served:
        for host in (
            "localhost:8000",
            "LocalHost",
            "me.localhost",
            "127.0.0.1:1",
            "[::1]:80",
            "GPU.example.",
            "10.0.0.7",
        ):
            assert served.http.get("/v1/models", headers={"Host": host}).status_code == 200, host
        for host in ("evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "a/health?", "", "[::1"):
            reply = served.http.get("/v1/models", headers={"Host": host, "Origin": f"http://{host}"})
            assert (reply.status_code, reply.json()["error"]["code"]) == (403, "wrong_host"), host
    with serving(engine, api_key="k") as served:
        assert served.http.get("/v1/models", headers={"Host": "any", "x-api-key": "k"}).status_code == 200
