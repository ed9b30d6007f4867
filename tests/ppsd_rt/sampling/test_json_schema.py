"""Schemas under which every answer fits: drawn ones, each keyword, each construct of a pattern, and numbers' ends."""

import json
import random
import re

import pytest
from fuzz.schemas import Answers, Drawing, campaign, strict_json, validator

from ppsd_rt.sampling.grammar_worker import compile_grammar, prepare
from ppsd_rt.sampling.json_formats import FORMATS


@pytest.fixture(scope="module")
def answers():
    return Answers()


def compiled(answers, schema, **options):
    lark, unheld = prepare(answers.tokenizer, "json_schema", json.dumps({**schema, "x-ppsd": options}))
    return compile_grammar(answers.tokenizer, "lark", lark), unheld


def allows(answers, schema, text, **options):
    """May an answer be just this?"""
    matcher, _ = compiled(answers, schema, **options)
    ids = list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def refused(answers, schema):
    """The places that an error names."""
    with pytest.raises(ValueError, match="asks for what no grammar can hold") as caught:
        compiled(answers, schema)
    return re.findall("at (/[^:]*):", str(caught.value))


def test_answers_fit_their_schemas():
    """`python -m fuzz.schemas` draws thousands."""
    seen, wrong = campaign(150, seed=0)
    assert not wrong
    assert seen["held"] > 80 and seen["ended"] > 300


@pytest.mark.parametrize("name", FORMATS)
def test_formats(answers, name):
    fits = validator({"type": "string", "format": name})
    matcher, _ = compiled(answers, {"type": "string", "format": name})
    drawn = [answers.draw(matcher.deep_copy(), random.Random(seed)) for seed in range(25)]
    ended = [json.loads(text) for text in drawn if text is not None]
    assert len(ended) > 15
    assert [text for text in ended if not fits.is_valid(text)] == []


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer"}, ["0", "-9223372036854775808", "9223372036854775807"], ["9223372036854775808", "1.0"]),
        ({"type": "integer", "minimum": 2**70}, [str(2**70), str(2**72)], [str(2**69)]),
        ({"type": "number"}, ["-0.5", "1e-999", "1.5E+288"], ["1e289", "1e1000", "0." + "1" * 18, "1" * 20]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, ["0." + "0" * 16 + "1", "1.0"], ["0", "0.0", "1.1"]),
        ({"type": "number", "minimum": 0}, ["0", "6e23", "1.5"], ["-1", "1e300"]),
        ({"type": "integer", "multipleOf": 7, "minimum": 1}, ["7", "700"], ["0", "8"]),
        ({"type": "number", "multipleOf": 0.01}, ["0.07", "-12.5", "3"], ["0.071"]),
        ({"type": "integer", "format": "int32"}, ["2147483647"], ["2147483648"]),
        ({"enum": [1, "a", None, {"b": [1.5]}]}, ["1", '"a"', "null", '{"b": [1.5]}'], ["1.0", "true"]),
        ({"type": ["string", "null"], "maxLength": 2}, ['"é\\n"', "null"], ['"abc"', "1"]),
        ({"type": "array", "prefixItems": [{"const": 1}], "items": False}, ["[1]", "[]"], ["[2]", "[1,1]"]),
        ({"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}, ['["b","a"]', "[]"], ['["a","a"]']),
        ({"type": "array", "contains": {"const": 5}}, ["[1, 5]", "[5]"], ["[]", "[1]"]),
        ({"type": "object", "required": ["a"]}, ['{"a":1}', '{"a":[],"b":2}'], ["{}", '{"b":1}']),
        ({"type": "object", "properties": {"a": False}}, ["{}", '{"b":1}'], ['{"a":1}']),
        ({"type": "object", "maxProperties": 1}, ["{}", '{"b":1}'], ['{"a":1,"b":1}']),
        ({"type": "object", "propertyNames": {"pattern": "^x"}}, ['{"x":1}'], ['{"y":1}']),
        ({"type": "string"}, ['"\\u007f\\u001f"'], ['"\\u007F"', '"\\u0061"', '"\\/"', '"\x7f"']),
        ({"type": "object", "patternProperties": {"^n": {"type": "null"}}}, ['{"n":null,"m":1}'], ['{"n":1}']),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, ['{"a":1,"b":1}'], ['{"a":1}']),
        ({"type": "object", "dependencies": {"a": {"required": ["b"]}}}, ["{}"], ['{"a":1}']),
        ({"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}, ['{"a":1}'], ['{"b":1}']),
        ({"type": "integer", "not": {"const": 3}}, ["2", "4"], ["3"]),
        ({"type": "integer", "oneOf": [{"minimum": 3}, {"maximum": 5}]}, ["2", "6"], ["3", "5"]),
        ({"if": {"const": 1}, "then": False, "else": {"type": "integer"}}, ["0", "2"], ["1"]),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"const": 1}}}, ["1"], ["2"]),
        ({"$ref": "#here", "$defs": {"a": {"$anchor": "here", "const": 1}}}, ["1"], ["2"]),
        ({"anyOf": [{"type": "string"}, {"$ref": "#"}]}, ['"a"'], ["1"]),
    ],
    ids=str,
)  # fmt: skip
def test_keywords(answers, schema, good, bad):
    judge = validator(schema)
    for text in good:
        assert allows(answers, schema, text), text
        assert judge.is_valid(strict_json(text)), text
    for text in bad:
        assert not allows(answers, schema, text), text


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("b", ["abc"], ["a"]),
        ("^a|c$", ["ab", "bc"], ["b"]),
        ("^(?!foo)[a-z]+$", ["fo", "bar"], ["foo", "food"]),
        ("^(?=.*[0-9]).{2}$", ["a1"], ["aa", "a12"]),
        ("(?<=x)y", ["xy"], ["y", "ay"]),
        ("(?<!a)b$", ["b", "cb"], ["ab"]),
        (r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", ["1.5", "-0"], ["+", ""]),
        (r"^\d\w\s$", ["1_ "], ["٣a ", "1é "]),
        (r"^[^\s\d]$", ["a"], ["٣", "\u00a0", "1"]),
        (r"^[\]\-\\\"]{2,}?$", [']"', "-\\"], ["]"]),
        (r"^\x41\u0042\u{43}\cJ\t\/$", ["ABC\n\t/"], ["ABC"]),
        (r"^\ud83d\ude00$", ["😀"], ["x"]),
        (r"^(?:a|(?<name>b))+$", ["ab"], ["c"]),
        (r"^\p{Lu}\P{L}$", ["A1"], ["a1", "AA"]),
        ("^[a-c&&b]$", ["&", "c"], ["d"]),
        ("^.$", ["a"], ["\n", "\u2028"]),
        ("^[^]$", ["\n"], ["ab"]),
    ],
)
def test_patterns(answers, pattern, good, bad):
    for text in (*good, *bad):
        written = json.dumps(text, ensure_ascii=False)
        assert allows(answers, {"type": "string", "pattern": pattern}, written) == (text in good), text


@pytest.mark.parametrize(
    "pattern",
    [
        *(r"(a)\1", r"\bword", r"\k<a>", "a{,5}", "a**", "(", ")", "[b-a]", r"\z", r"\p{Script=Greek}"),
        *("x(?=a)*", "(a$)b", r"\ud83d"),
    ],
)
def test_patterns_that_are_refused(answers, pattern):
    assert refused(answers, {"type": "object", "properties": {"a/b": {"type": "string", "pattern": pattern}}}) == [
        "/properties/a~1b/pattern"
    ]


@pytest.mark.parametrize(
    ("schema", "places"),
    [
        ({"type": "string", "format": "phone"}, ["/format"]),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, ["/uniqueItems"]),
        ({"type": "array", "contains": {"type": "null"}, "maxContains": 2}, ["/maxContains"]),
        ({"type": "array", "contains": {"type": "null"}, "maxItems": 2}, ["/contains"]),
        ({"type": "object", "minProperties": 2}, ["/minProperties"]),
        ({"type": "string", "not": {"format": "date"}}, ["/not"]),
        ({"type": "number", "oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]}, ["/oneOf"]),
        ({"type": "number", "if": {"multipleOf": 2}, "then": {"minimum": 1}}, ["/if"]),
        ({"type": "number", "multipleOf": 0.3333333333333333}, ["/multipleOf"]),
    ],
    ids=str,
)
def test_keywords_that_are_refused(answers, schema, places):
    assert refused(answers, schema) == places
    matcher, unheld = compiled(answers, schema, lenient=True, of="tool")
    assert [place for place, _ in unheld] == [f"tool{place}" for place in places]
    assert answers.draw(matcher, random.Random(1), 2000) is not None


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "strin"}, "/type must be one or several of"),
        ({"type": "object", "properties": {"a": {"minLength": "x"}}}, "/properties/a/minLength must be"),
        ({"$ref": "http://elsewhere/x"}, "is not in the schema"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "no answer at all"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "no answer at all"),
        ({"type": "string", "pattern": "^a$", "minLength": 2}, "no answer at all: no text fits / as a whole"),
    ],
    ids=str,
)
def test_schemas_that_are_none(answers, schema, said):
    with pytest.raises(ValueError, match=said):
        compiled(answers, schema)


def test_ends_are_a_choice(answers):
    assert allows(answers, {"type": "integer"}, "9" * 40, unbounded=True)
    assert allows(answers, {"type": "number"}, "9" * 30 + "." + "9" * 30 + "e5000", unbounded=True)
    assert allows(answers, {"type": "object"}, "{" + " " * 99 + "}", unbounded=True)


def test_every_keyword_is_drawn():
    """Of the generator: one that it stops to make would go untested."""
    drawn = json.dumps([Drawing(number).root() for number in range(300)])
    wanted = "anyOf oneOf allOf not if then else $ref prefixItems contains uniqueItems patternProperties propertyNames "
    wanted += (
        "dependentRequired dependentSchemas unevaluatedProperties pattern format multipleOf enum const minProperties"
    )
    assert [name for name in wanted.split() if f'"{name}":' not in drawn] == []
