"""Grammars that tests of one process and of ranks use."""

from ppsd_rt import Grammar

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "ages": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "ages"],
    "additionalProperties": False,
}
GRAMMARS = {
    "regex": Grammar.regex("([a-f]{2,5} ){3,12}[xyz]+!"),
    "schema": Grammar.json_schema(SCHEMA),
    "lark": Grammar.lark('start: line{4,9}\nline: ("ab" | "ba")+ ";" /[0-9]/'),
}
PROMPT = "once upon a time once upon a time"
