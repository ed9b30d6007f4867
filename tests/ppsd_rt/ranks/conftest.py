import pytest
from rank_support import Pipeline


@pytest.fixture
def ranks(folder):
    """ranks(sizes): that many in this process; their threads end with the test, and none has failed."""
    made = []

    def make(sizes, folder=folder, *more, **options):
        made.append(Pipeline(folder, sizes, *more, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()
        assert not each.failures
