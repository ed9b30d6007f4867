"""One engine and one server for the tests that change nothing of them."""

import pytest
from serve_support import NAME, Clock, Holding, serving
from support import tiny_model, write_model

from ppsd_rt import Engine


def loaded(folder):
    engine = Engine.from_pretrained(folder, dtype="float32", threads=1, exit_head="norm:2")
    engine.name = NAME
    return engine


@pytest.fixture(scope="session")
def engine(tmp_path_factory):
    return loaded(write_model(tmp_path_factory.mktemp("serve") / "model", tiny_model(3)))


@pytest.fixture(scope="session")
def served(engine):
    with serving(engine) as served:
        yield served


@pytest.fixture(scope="session")
def roomy(tmp_path_factory):
    """An engine whose context holds an explanation of tools."""
    return loaded(write_model(tmp_path_factory.mktemp("roomy") / "model", max_position_embeddings=4096))


@pytest.fixture(scope="session")
def roomy_served(roomy):
    with serving(roomy) as served:
        yield served


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def holding(engine):
    return Holding(engine)
