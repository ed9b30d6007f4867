"""A few of the requests that `python -m fuzz.combined` draws by the thousand."""

from support import tiny_model, write_model

from .combined import campaign


def test_combined_requests_have_the_answers_that_they_have_alone(tmp_path):
    model = write_model(tmp_path / "model", tiny_model(3), max_position_embeddings=2048)
    seen, wrong = campaign(model, 20, seed=0)
    assert wrong == []
    assert seen["answers"] > 13
