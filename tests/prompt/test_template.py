import datetime
import re

import pytest

from pixelgate.errors import CheckpointError, RequestError
from pixelgate.prompt.template import ChatTemplate

USER = [{"role": "user", "content": "hi"}]


def test_demo_template(template):
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "A"}, {"type": "image"}, {"type": "text", "text": "B\n"}],
        },
        {"role": "assistant", "content": "C"},
    ]
    assert template.render(messages) == (
        "<|im_start|>system\nYou look at the pictures you are given and say what is in them.<|im_end|>\n"
        "<|im_start|>user\nA<|vision_start|><|image_pad|><|vision_end|>B\n<|im_end|>\n"
        "<|im_start|>assistant\nC<|im_end|>\n<|im_start|>assistant\n"
    )
    ours = [{"role": "system", "content": "S"}, {"role": "user", "content": ""}]
    assert template.render(ours, add_generation_prompt=False) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n<|im_end|>\n"
    )


def test_blocks_leave_no_white_space():
    source = "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\n"
    assert ChatTemplate(source).render(USER) == "hi\n"


def test_loop_controls():
    source = "{% for i in [1, 2, 3, 4] %}"
    source += "{% if i == 2 %}{% continue %}{% endif %}{% if i > 3 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert ChatTemplate(source).render(USER) == "13"


def test_tojson_neither_escapes_html_nor_unicode():
    value = {"b": "<é&'>", "a": [1, None, True]}
    render = lambda filters: ChatTemplate("{{ tools | " + filters + " }}").render(USER, tools=[value])  # noqa: E731
    assert render("tojson") == """[{"b": "<é&'>", "a": [1, null, true]}]"""
    assert render("tojson(ensure_ascii=true, sort_keys=true)") == """[{"a": [1, null, true], "b": "<\\u00e9&'>"}]"""
    assert render("tojson(separators=(',', ':'))") == """[{"b":"<é&'>","a":[1,null,true]}]"""
    assert render("tojson(indent=1)").startswith('[\n {\n  "b"')


def test_generation_tag_prints_its_body():
    source = (
        "{% set x = 1 %}{% generation %}{% set x = 2 %}[{{ messages[0].content }}{{ x }}]{% endgeneration %}{{ x }}"
    )
    assert ChatTemplate(source).render(USER) == "[hi2]1"


def test_variables_and_arguments():
    template = ChatTemplate("{{ bos_token }}{{ mood }}{{ documents is none }}{{ tools is none }}", {"bos_token": "<s>"})
    assert template.render(USER, mood="calm") == "<s>calmTrueTrue"
    assert template.render(USER, self="x", mood="y") == "<s>yTrueTrue"
    assert template.reserved >= {"messages", "tools", "documents", "add_generation_prompt", "chat_template"}
    assert template.reserved >= {"bos_token", "raise_exception", "range"}
    assert "mood" not in template.reserved


def test_strftime_now():
    year = datetime.datetime.now().year
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(USER) in {str(year), str(year + 1)}


def test_raise_exception_speaks_to_the_user():
    template = ChatTemplate("{{ raise_exception('Roles must alternate: ' ~ messages[0].role * 400) }}")
    with pytest.raises(RequestError, match="refuses the messages: Roles must alternate: user") as caught:
        template.render(USER)
    assert len(caught.value.message) < 400
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content.x }}",
        "{{ 1 // 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ range(10 ** 9) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include 'other' %}",
    ],
)
def test_failures_are_the_requests_in_our_words(source):
    with pytest.raises(RequestError, match="cannot render these messages") as caught:
        ChatTemplate(source).render(USER)
    assert not re.search("jinja|object|Error|unsupported", caught.value.message)


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ 'x' }", "{% generation %}", "\n{% unknown %}", "{{ x | nofilter }}"]
)
def test_invalid_template(source):
    with pytest.raises(CheckpointError, match=r"The chat template is not valid Jinja \(line \d\)\."):
        ChatTemplate(source)


LOOP = "{% for m in messages %}{% for p in m.content %}{{ p.text or '<img>' if p.type }}{% endfor %}{% endfor %}"
MACRO = "{% macro show(c) %}{% for x in c %}{% if x.type == 'image' %}<img>{% endif %}{% endfor %}{% endmacro %}" + (
    "{% for m in messages %}{{ m.content if m.content is string else show(m.content) }}{% endfor %}"
)
ASKS = "{% if messages[0].content is string %}{{ messages[0].content }}?{% else %}" + LOOP + "{% endif %}"


@pytest.mark.parametrize(
    ("source", "parts", "strings"),
    [
        (LOOP, True, False),
        (MACRO, True, True),
        (LOOP.replace("p.text or", "p.content or").replace("if p.type", "if p.type == 'image' or p.text"), True, False),
        (
            "{% if messages[0].content is string %}{{ messages[0].content }}?{% else %}" + LOOP + "{% endif %}",
            True,
            False,
        ),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False, True),
        ("{% for m in messages %}{{ m.content | string }}{% endfor %}", False, True),
        ("{% for m in messages %}{{ '<' + m.content }}{% endfor %}", False, True),
        ("{{ messages[0].content[0].nothing.there }}", False, False),
    ],
)
def test_the_form_of_content_is_found_by_rendering(source, parts, strings):
    template = ChatTemplate(source)
    form = template.form(["<img>"])
    assert (form.parts, form.strings) == (parts, strings)
    assert form.text_keys == (("text", "content") if "p.content or" in source else ("text",))
    assert not template.form(["<other>"]).parts
