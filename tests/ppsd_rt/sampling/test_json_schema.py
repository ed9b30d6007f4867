"""Schemas: every answer fits, numbers and white space end, and what cannot be held is refused or told by its place."""

import json
import random

import jsonschema_rs
import pytest
from fuzz.schemas import SCHEMAS, Answers

from ppsd_rt.sampling.grammar_worker import compile_grammar, prepare

KIND = {"type": "object", "required": ["k"]}
LENIENT = {"x-guidance": {"lenient": True}}


@pytest.fixture(scope="module")
def answers():
    return Answers()


def compiled(answers, schema):
    made, unheld = prepare(answers.tokenizer, "json_schema", json.dumps(schema))
    return compile_grammar(answers.tokenizer, made), unheld


def allows(answers, schema, text):
    """May an answer be just this?"""
    matcher, _ = compiled(answers, schema)
    ids = list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_answers_fit_their_schemas(answers, schema):
    matcher, unheld = compiled(answers, schema)
    draw, fits = random.Random(1), jsonschema_rs.validator_for(schema, validate_formats=True)
    ended = [text for _ in range(20) if (text := answers.draw(matcher.deep_copy(), draw)) is not None]
    assert len(ended) > 4 and not unheld
    assert [text for text in ended if not fits.is_valid(json.loads(text))] == []


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer"}, ["0", "-999999999999999999"], ["1" + "0" * 19, "1.0"]),
        ({"type": "integer", "minimum": 1}, ["7"], ["0", "1" + "0" * 19]),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, ["-5", "1" + "0" * 18], ["1" + "0" * 19]),
        ({"type": "number", "exclusiveMinimum": 0}, ["0.000000001", "2"], ["0.0000000001", "0", "1e5000"]),
        ({"type": ["number", "null"], "multipleOf": 0.01}, ["0.07", "null"], ["0.071", "1" * 20]),
        ({"type": "integer", "enum": [10**20, 3]}, ["3"], ["4"]),
        ({"type": "integer", "x-guidance": {"whitespace_flexible": True}}, ["9" * 40], ["a"]),
        ({"type": "object", "x-guidance": {"whitespace_flexible": True}}, ["{" + " " * 99 + "}"], ["}"]),
        ({"type": "string", "format": "int32"}, ['"x"'], ["1"]),
        ({"properties": {"format": {"type": "string", "format": "color"}}}, ['{"format":"red"}'], ['{"format":1}']),
        ({"properties": {"a": {"enum": [{"format": "x"}]}}}, ['{"a":{"format":"x"}}'], ['{"a":{}}']),
        ({"$ref": "#/parts/a~1b", "parts": {"a/b": {"type": "string", "format": "path"}}}, ['"x"'], ["1"]),
        ({"oneOf": [KIND | {"properties": {"k": {"const": k}}} for k in "ab"]}, ['{"k":"b"}'], ['{"k":1}']),
        ({"type": "object", "properties": {"a": {}}}, ['{"a":1}'], ['{"a":1,"a":2}']),
        ({"anyOf": [{"type": "string"}, {"$ref": "#"}]}, ['"x"'], ["1"]),
        ({"type": "string", "minLength": 1000, "maxLength": 100_000}, [f'"{"a" * 1000}"'], ['"a"']),
        ({"type": "object"}, ['{"a":  1}', f'{{"a":\n{" " * 24}1 }}'], ['{"a":   1}', f'{{"a":\n{" " * 25}1}}', " {}"]),
    ],
    ids=str,
)
def test_what_is_held(answers, schema, good, bad):
    for text in good:
        assert allows(answers, schema, text), text
    for text in bad:
        assert not allows(answers, schema, text), text


ONE = {"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1}


@pytest.mark.parametrize(
    ("keywords", "names", "why"),
    [
        ({"not": {"format": "date"}}, ["not"], 'Unimplemented keys: ["not"]'),
        ({"uniqueItems": True, "if": {}}, ["uniqueItems", "if"], "Unimplemented keys"),
        ({"type": "string", "format": "iri"}, ["format"], "Unknown format: iri"),
        ({"type": "string", "pattern": r"(a)\1"}, ["pattern"], "backreferences are not supported"),
        ({"type": "string", "pattern": "(?=a)b"}, ["pattern"], "look-around"),
        ({"type": "string", "pattern": r"\bword"}, ["pattern"], "lookarounds not supported"),
        ({"patternProperties": {"(?!x)": {}}}, ["patternProperties"], "look-around"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ["oneOf"], "oneOf "),
        (ONE, ["maxProperties"], "min/maxProperties only supported"),
        ({"type": "object", "required": True}, ["required"], "Expected array for 'required'"),
    ],
    ids=str,
)
def test_keywords_that_are_refused_or_told(answers, keywords, names, why):
    """Beside others of the same names that are held."""
    held = {"type": "object", "required": ["x"], "properties": {"x": {"type": "string", "format": "date"}}}
    schema = {**held, "properties": {"a/b": keywords, **held["properties"]}}
    places = [f"/properties/a~1b/{name}" for name in names]
    with pytest.raises(ValueError, match="asks for what no grammar can hold, at /prop") as caught:
        compiled(answers, schema)
    assert [place for place in places if f"at {place}" not in str(caught.value)] == []
    assert why in str(caught.value) and '"strict": false' in str(caught.value)
    matcher, unheld = compiled(answers, {**schema, **LENIENT})
    assert [place for place, _ in unheld] == places
    assert all(why in said for _, said in unheld)
    assert answers.draw(matcher, random.Random(1), 2000) is not None


def test_schemas_in_a_grammar_are_told_by_their_titles(answers):
    def grammar(**options):
        wrong = {"type": "string", "pattern": "(?=a)"}
        schema = {"type": "object", "title": "f", "properties": {"a": {"not": {}}, "b": wrong}, "x-guidance": options}
        return f'start: a "!"\na: %json {json.dumps(schema)}'

    _, unheld = prepare(answers.tokenizer, "lark", grammar(lenient=True))
    assert [place for place, _ in unheld] == ["f/properties/b/pattern", "f/properties/a/not"]
    with pytest.raises(ValueError, match=r'at f/properties/a/not: Unimplemented keys: \["not"\]'):
        prepare(answers.tokenizer, "lark", grammar())


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "strin"}, "Invalid type: strin"),
        ({"type": "object", "properties": {"a": {"minLength": "x"}}}, "at /properties/a/minLength: Expected positive"),
        ({"$ref": "http://elsewhere/x"}, "is not present"),
        ({"$ref": "#"}, "no answer at all"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "incompatible types"),
        ({"type": "string", "pattern": "^a$", "minLength": 2}, "Unsatisfiable schema"),
        ({"type": "string", "x-guidance": 5}, "x-guidance must be an object"),
        ({"type": "string", "x-guidance": {"odd": 5}}, "unknown field `odd`"),
    ],
    ids=str,
)
def test_schemas_that_are_none(answers, schema, said):
    with pytest.raises(ValueError, match=said):
        compiled(answers, schema)
