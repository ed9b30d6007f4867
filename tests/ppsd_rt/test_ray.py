"""Ray Serve on a cluster of several nodes in this machine: every answer is the undisturbed one, and none is lost."""

import os
import threading
import time
from contextlib import suppress

import pytest
from support import tiny_head, tiny_model

from ppsd_rt import Engine, SamplingParams
from ppsd_rt.extras import is_there
from ppsd_rt.front.learned import hash_of
from ppsd_rt.front.wire import head_text
from ppsd_rt.learning.heads import LearnedHeads, Outcome
from ppsd_rt.learning.kept import read_records
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.models.head_file import HeadFile

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_there("ray"), reason='Ray is not installed: pip install "ppsd-rt[ray]"'),
]

PATIENCE = 900.0  # seconds; a guard, no test is about how soon
PROMPTS = ["Once upon a time", "A list of planets:", "Dear sir", "The lighthouse"]
ASKED = {"max_tokens": 300, "temperature": 0.9, "seed": 3, "presence_penalty": 0.5, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def texts(folder):
    engine = Engine.from_pretrained(folder, exit_head="none", backend="cpu", dtype="int8", threads=1)
    given = {name: value for name, value in ASKED.items() if name != "extra_body"}
    params = SamplingParams(**given, ignore_eos=True)
    return {prompt: engine.generate(prompt, params, "plain").run().text for prompt in PROMPTS}


@pytest.fixture(scope="module")
def cluster():
    """A head that decodes nothing, and nodes that do."""
    # Before Ray is imported. On cores that are busy elsewhere, what Ray expects in 5 s takes a minute.
    for name in ("PROXY_READY_CHECK_TIMEOUT_S", "PROXY_HEALTH_CHECK_TIMEOUT_S"):
        os.environ[f"RAY_SERVE_{name}"] = str(PATIENCE)
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        made.add_node(wait=False, num_cpus=2)  # it would wait 30 s at most
    ray.init(address=made.address, log_to_driver=False)
    with suppress(TimeoutError):  # after a minute; deploying waits on
        serve.start(proxy_location="HeadOnly")
    yield made
    serve.shutdown()
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def deploy(cluster, folder):
    from ray import serve

    from ppsd_rt import ray as ours

    def run(**options):
        base = {"model": str(folder), "model_name": "tiny", "exit_head": "norm:1", "dtype": "int8", "threads": 1}
        serve.run(ours.app(ours.Options(**{**base, **options})))

    return run


class Load:
    """Clients that ask until they are told to end."""

    def __init__(self, texts, clients=6):
        import openai

        self._texts, self._over, self.wrong, self.answers = texts, threading.Event(), [], 0
        self._client = openai.OpenAI(
            base_url="http://127.0.0.1:8000/v1", api_key="none", max_retries=0, timeout=PATIENCE
        )
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(clients)]

    def one(self, prompt):
        chunks = self._client.completions.create(model="tiny", prompt=prompt, stream=True, **ASKED)
        return "".join(choice.text for chunk in chunks for choice in chunk.choices)

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number):
        while not self._over.is_set():
            prompt = PROMPTS[number % len(PROMPTS)]
            number += 1
            try:
                found = self.one(prompt)
            except Exception as error:
                self.wrong.append(repr(error))
                continue
            self.answers += 1
            if found != self._texts[prompt]:
                self.wrong.append(f"{prompt}: {found}")


def replicas():
    """Of Engines, those that run: their ids and nodes."""
    from ray import serve

    details = serve.status().applications["default"].deployments["Engines"]
    return details.replica_states.get("RUNNING", 0)


def wait_for(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)


def engine_nodes():
    """Of each replica of Engines; the state API of Ray would need its dashboard."""
    from ray._private.state import actors

    alive = [actor for actor in actors().values() if actor["State"] == "ALIVE"]
    return [actor["Address"]["NodeID"] for actor in alive if "Engines" in f"{actor['Name']} {actor['ActorClassName']}"]


def test_replicas_come_and_go_with_the_load(deploy, texts):
    # Any load is enough for three: answers are shorter than what is around them, so few of the clients count as load.
    deploy(replicas=3, ongoing=0.2, delay=2.0)
    with Load(texts) as load:
        wait_for(lambda: replicas() == 3)
    wait_for(lambda: replicas() == 1)
    with Load(texts, clients=2) as again:
        wait_for(lambda: again.answers > 6)
    assert load.wrong == again.wrong == []
    assert load.answers > 0


def test_a_rolling_update_loses_nothing(deploy, texts):
    deploy(least=2, replicas=2)
    with Load(texts) as load:
        wait_for(lambda: load.answers > 10)
        deploy(least=2, replicas=2, schedule="plain", grace=30.0)  # other options: every replica is replaced
        answered = load.answers
        wait_for(lambda: load.answers > answered + 10)
    assert load.wrong == []


def test_a_node_that_is_killed_takes_no_answer_with_it(deploy, cluster, texts):
    deploy(least=3, replicas=3)
    wait_for(lambda: replicas() == 3)
    with Load(texts) as load:
        wait_for(lambda: load.answers > 10)
        victim = max(cluster.worker_nodes, key=lambda node: engine_nodes().count(node.node_id))
        assert victim.node_id in engine_nodes()
        cluster.remove_node(victim, allow_graceful=False)
        answered = load.answers
        wait_for(lambda: load.answers > answered + 20)
        cluster.add_node(wait=False, num_cpus=2)
        wait_for(lambda: replicas() == 3)
    assert load.wrong == []


def test_a_replica_that_is_a_pipeline(deploy, texts):
    deploy(ranks=2)
    load = Load(texts)
    assert {prompt: load.one(prompt) for prompt in PROMPTS} == texts


@pytest.fixture
def learned(folder, tmp_path):
    """(the head to begin with, the folder of kept answers, the learned head there)"""
    checkpoint, root, kept = Checkpoint(folder), tmp_path / "root.safetensors", tmp_path / "kept"
    head = tiny_head(tiny_model(), "feedback", 2, checkpoint.hash)
    head.save(root)
    Engine.from_pretrained(folder, exit_head=root, dtype="int8", threads=1, learn=kept).close()
    found = LearnedHeads(kept, str(root), checkpoint)
    head.info.acceptance["kept_answers"] = 0.5
    head.save(path := found.new_path())
    found.trained((0, 0), Outcome(10_000, 0.4, 0.5, 0.01, 0.6, 0.6), path)
    return root, kept, path


def test_a_replica_fetches_what_it_has_not_heard(folder, learned, monkeypatch):
    from ppsd_rt import ray as ours

    fetched = []
    monkeypatch.setattr(ours.ray, "put", lambda value: value)
    monkeypatch.setattr(ours.ray, "get", lambda value: fetched.append(value) or value)
    root, _, path = learned
    replica = ours.Engines(ours.Options(model=str(folder), exit_head=str(root), dtype="int8", threads=1))
    place, text = ours._EngineSlots(None), head_text(HeadFile.load(path, Checkpoint(folder)))
    for number in range(3):
        place.tell("recall", ids=[number], owner=7)
    replica._hear(place.told())
    place.tell("head", hash=hash_of(text), head=text)
    for _ in range(2):
        replica._hear(place.told())
    assert fetched == [[([0], 7), ([1], 7), ([2], 7)], text] and "kept_answers" in replica._engine.head.acceptance


def test_the_front_keeps_and_its_replicas_get_the_learned_head(deploy, texts, learned):
    from ray import serve

    root, kept, _ = learned
    deploy(exit_head=str(root), learn=str(kept))
    engines, load = serve.get_deployment_handle("Engines", "default"), Load(texts)
    assert "kept_answers" not in engines.facts.remote().result().head.acceptance
    assert {prompt: load.one(prompt) for prompt in PROMPTS} == texts
    wait_for(lambda: "kept_answers" in engines.facts.remote().result().head.acceptance)
    assert {prompt: load.one(prompt) for prompt in PROMPTS} == texts
    wait_for(lambda: len([*read_records(kept, 259)]) == len(PROMPTS))
