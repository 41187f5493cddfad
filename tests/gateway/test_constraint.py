"""What an answer must be, in OpenAI's spelling and in vLLM's."""

from __future__ import annotations

import pytest

from pixelgate.engines.engine import Constraint
from pixelgate.errors import RequestError
from pixelgate.gateway.constraint import constraint

SCHEMA = {"type": "object", "properties": {"größe": {"type": "number"}}}
WRITTEN = '{"type": "object", "properties": {"größe": {"type": "number"}}}'
TAG = {"type": "structural_tag", "structures": [], "triggers": []}


@pytest.mark.parametrize(
    ("response_format", "structured", "expected"),
    [
        (None, None, None),
        ({"type": "text"}, {}, None),
        ({"type": "json_object"}, None, Constraint("json_object")),
        (
            {"type": "json_schema", "json_schema": {"name": "size", "strict": True, "schema": SCHEMA}},
            None,
            Constraint("json_schema", WRITTEN),
        ),
        (TAG, None, Constraint("structural_tag", '{"type": "structural_tag", "structures": [], "triggers": []}')),
        (None, {"json": SCHEMA}, Constraint("json_schema", WRITTEN)),
        (None, {"json": WRITTEN}, Constraint("json_schema", WRITTEN)),
        ({"type": "text"}, {"json_object": True, "regex": None}, Constraint("json_object")),
        (None, {"json_object": False}, None),
        (None, {"regex": "a+"}, Constraint("regex", "a+")),
        (None, {"grammar": "root ::= 'a'"}, Constraint("grammar", "root ::= 'a'")),
        (None, {"structural_tag": "{}"}, Constraint("structural_tag", "{}")),
        (None, {"choice": ["yes", "no"]}, Constraint("choice", ("yes", "no"))),
    ],
)
def test_what_is_asked_for(response_format, structured, expected):
    assert constraint(response_format, structured) == expected


@pytest.mark.parametrize(
    ("response_format", "structured", "param", "words"),
    [
        ({}, None, "response_format.type", "must be one of text, json_object, json_schema, structural_tag"),
        ({"type": ["text"]}, None, "response_format.type", "must be one of"),
        ({"type": "json_schema"}, None, "response_format.json_schema.schema", "must be an object"),
        (
            {"type": "json_schema", "json_schema": {"schema": "{}"}},
            None,
            "response_format.json_schema.schema",
            "must be an object",
        ),
        ({"type": "json_object"}, {"regex": "a"}, "structured_outputs", "either response_format or"),
        (None, {"regex": "a", "json": {}}, "structured_outputs", "must have one of"),
        (None, {"whitespace_pattern": " "}, "structured_outputs.whitespace_pattern", "is not supported; there is json"),
        (None, {"json_object": 1}, "structured_outputs.json_object", "true or false"),
        (None, {"json": []}, "structured_outputs.json", "must be an object"),
        (None, {"json": ""}, "structured_outputs.json", "must be an object"),
        (None, {"regex": ""}, "structured_outputs.regex", "a string that is not empty"),
        (None, {"grammar": 5}, "structured_outputs.grammar", "a string that is not empty"),
        (None, {"choice": []}, "structured_outputs.choice", "a list of strings"),
        (None, {"choice": ["a", ""]}, "structured_outputs.choice", "a list of strings"),
        (None, {"choice": ["a"] * 257}, "structured_outputs.choice", "at most 256 strings, not 257"),
    ],
)
def test_what_cannot_be_meant(response_format, structured, param, words):
    with pytest.raises(RequestError) as caught:
        constraint(response_format, structured)
    assert caught.value.param == param
    assert words in caught.value.message
