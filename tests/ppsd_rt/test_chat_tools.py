"""`Engine.chat` with tools: the calls that the server reads, by the same code."""

import json

import pydantic
import pytest
from support import write_model

from ppsd_rt import Engine, Grammar, SamplingParams, UsageError

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": PARAMETERS}}


class Weather(pydantic.BaseModel):
    """Of a city."""

    city: str = pydantic.Field(pattern="^Rome$")


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("chat") / "model", max_position_embeddings=4096)
    return Engine.from_pretrained(folder, dtype="float32", threads=1, exit_head="norm:2")


@pytest.mark.parametrize(
    ("tool", "name"),
    [(WEATHER, "weather"), (WEATHER["function"], "weather"), (Weather, "Weather")],
    ids=["tool", "function", "class"],
)
def test_a_call_that_is_required_comes_as_a_message(engine, tool, name):
    answer = engine.chat("Weather?", SamplingParams(max_tokens=3000), tools=[tool], tool_choice="required").run()
    [call] = answer.message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (name, {"city": "Rome"})
    assert answer.message["content"] is None and "<tool_call>" in answer.text
    told = [
        {"role": "user", "content": "Weather?"},
        answer.message,
        {"role": "tool", "content": "sunny", "tool_call_id": call["id"]},
    ]
    text = engine.tokenizer.decode(engine.chat(told, tools=[tool]).prompt_ids, skip_special_tokens=False)
    assert f'<tool_call>\n{{"name": "{name}", "arguments": {{"city": "Rome"}}}}\n</tool_call>' in text
    assert "<tool_response>\nsunny" in text and '"city"' in text.partition("<tools>")[2]


def test_without_tools_it_is_what_generate_answers(engine):
    messages, params = [{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=12)
    answer = engine.chat("Hi", params).run()
    assert answer.ids == engine.generate(messages, params).run().ids
    assert answer.message == {"role": "assistant", "content": answer.text}


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"tools": [3]}, "tools\\[0\\] must be a function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools\\[0\\] must be a function"),
        ({"tools": [{"name": "a", "parameters": 3}]}, "parameters must be a schema"),
        ({"tool_choice": "required"}, "a call is required"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "the role 'robot'"),
        ({"messages": [{"role": "user"}]}, "messages\\[0\\] has no content"),
        ({"messages": [{"role": "assistant", "tool_calls": [3]}]}, "tool_calls must be calls"),
        ({"messages": []}, "a text or a list of messages"),
    ],
)
def test_what_is_refused(engine, asked, why):
    with pytest.raises(UsageError, match=why):
        engine.chat(**{"messages": "Hi"} | asked)


def test_a_pydantic_class_is_a_schema():
    assert Grammar.json_schema(Weather) == Grammar.json_schema(Weather.model_json_schema())
