"""What went wrong in the field, tried with every family's real template."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goldens.conversations import IMAGE, text, turn
from goldens.tokenizers_of import SPECIALS
from pixelgate.errors import RequestError
from pixelgate.prompt.template import ChatTemplate

FAMILIES = sorted(SPECIALS)
SIZES = [(84, 112), (56, 56), (112, 56)]
OTHERS = [
    "<|image_1|>",
    "<|image_2|>",
    "<|image_9|>",
    "<image>",
    "[IMG]",
    "<|image_pad|>",
    "<|im_start|>",
    "<s>",
    "</s>",
]


def expansions(model, sizes):
    return model.expansions({"sizes": sizes})


def inside(prompt):
    return [list(prompt.token_ids[offset : offset + length]) for offset, length in prompt.spans]


def around(prompt):
    covered = {i for offset, length in prompt.spans for i in range(offset, offset + length)}
    return [id_ for i, id_ in enumerate(prompt.token_ids) if i not in covered]


def shown(model, prompt):
    """The text around the pictures. Spaces differ with what the vocabulary does at the border of a token."""
    return "".join(model.text(around(prompt)).split())


def fragments(family):
    tokens = [*SPECIALS[family], *OTHERS]
    halves = [token[: len(token) // 2] for token in tokens] + [token[len(token) // 2 :] for token in tokens]
    return st.lists(st.sampled_from([*tokens, *halves, "a", " ", "\n", "<", "|", "é"]), max_size=4).map("".join)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("typed_specials", ["text", "allow"])
def test_spans_are_those_of_the_pictures_whatever_is_typed(models, family, typed_specials):
    model = models(family)

    @settings(max_examples=40)
    @given(st.lists(fragments(family) | st.none(), min_size=1, max_size=5), fragments(family), st.booleans())
    def holds(content, answered, continues):
        """None stands for a picture; the harmless twin has a word in the place of every text."""
        images = content.count(None)
        sizes = [SIZES[i % 3] for i in range(images)]
        words = [f"W{i}W" for i in range(len(content))]
        twins = []
        for texts, answer in ((content, answered), (words, "WAW")):
            parts = [IMAGE if piece is None else text(t) for piece, t in zip(content, texts, strict=True)]
            turns = [turn("user", *parts), turn("assistant", answer), turn("user", "more")]
            case = {"messages": turns if continues else turns[:1], "sizes": sizes}
            if family in ("llama4", "llava_next") and not any(piece is not None for piece in content):
                case["messages"][0]["content"].append(text(""))
            twins.append(model.prompt(case, typed_specials=typed_specials))
        prompt, twin = twins
        assert inside(prompt) == inside(twin) == expansions(model, sizes)
        if typed_specials == "text":
            assert model.specials(around(prompt)) == model.specials(around(twin))
            expected = shown(model, twin).replace("WAW", "".join(answered.split()))
            for word, piece in zip(words, content, strict=True):
                expected = expected.replace(word, "".join((piece or "").split()))
            assert shown(model, prompt) == expected

    holds()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_marker_without_a_picture_is_text(models, family):
    model = models(family)
    prompt = model.prompt({"messages": [turn("user", " ".join([*SPECIALS[family], *OTHERS]))]})
    assert prompt.spans == ()
    family_ids = {model.tokenizer.special_ids[token] for token in model.processor.family.image_tokens}
    assert family_ids.isdisjoint(prompt.token_ids)


def test_a_template_of_strings_loses_no_picture(models):
    """D46: the pictures of Phi-3's template, which adds content to a string."""
    model = models("phi3_5_vision")
    none = model.prompt({"messages": [turn("user", text("Compare."))]})
    for count in (1, 3):
        sizes = SIZES[:count]
        prompt = model.prompt({"messages": [turn("user", *[IMAGE] * count, text("Compare."))], "sizes": sizes})
        assert inside(prompt) == expansions(model, sizes)
        assert len(prompt.token_ids) > len(none.token_ids) + sum(map(len, inside(prompt)))


PART = "{% if part.type == 'image' %}<|image_pad|>{% else %}{{ part.text }}{% endif %}"
LOOP = f"{{% for part in message.content %}}{PART}{{% endfor %}}"


@pytest.mark.parametrize(
    "source",
    [
        f"{{% for message in messages %}}{LOOP}{{% endfor %}}",
        f"{{% macro show(message) %}}{LOOP}{{% endmacro %}}{{% for m in messages %}}{{{{ show(m) }}}}{{% endfor %}}",
        f"{{% set all = messages %}}{{% for m in all %}}{{% set c = m['content'] %}}{{% for part in c %}}{PART}"
        "{% endfor %}{% endfor %}",
        f"{{% for message in messages %}}{{% generation %}}{LOOP}{{% endgeneration %}}{{% endfor %}}",
        "{% for message in messages %}{{ message.content | string }}{% endfor %}",
        "{% for message in messages %}{{ message.content }}{% endfor %}",
    ],
)
def test_a_picture_stands_where_it_was_sent_in_every_kind_of_template(models, source):
    """D47, and the order of D48."""
    model = models("qwen2_vl")
    messages = [turn("user", text("one"), IMAGE, text("two"), IMAGE)]
    prompt = model.prompt({"messages": messages, "sizes": SIZES[:2]}, template=ChatTemplate(source))
    assert inside(prompt) == expansions(model, SIZES[:2])
    (first, _), (second, length) = prompt.spans
    assert "one" in model.text(prompt.token_ids[:first])
    assert "two" in model.text(prompt.token_ids[first:second])
    assert "two" not in model.text(prompt.token_ids[second + length :])


@pytest.mark.parametrize("family", FAMILIES)
def test_order_is_kept_within_a_message_and_across_turns(models, family):
    """D48: swapping two pictures changes nothing but what their spans hold."""
    model = models(family)
    turns = [
        turn("user", text("A:"), IMAGE, text("B:"), IMAGE),
        turn("assistant", "Seen."),
        turn("user", IMAGE, text("and C")),
    ]
    every = list(itertools.permutations(SIZES))
    orders = [model.prompt({"messages": turns, "sizes": sizes}) for sizes in every]
    assert all(around(prompt) == around(orders[0]) for prompt in orders)
    assert list(map(inside, orders)) == [expansions(model, sizes) for sizes in every]


PICTURES = {
    "tool": [turn("user", "Look."), turn("tool", text("Here"), IMAGE, name="f", tool_call_id="1"), turn("user", "?")],
    "tool alone": [turn("user", "Look."), turn("tool", IMAGE, name="f", tool_call_id="1"), turn("user", "?")],
    "system": [turn("system", text("See"), IMAGE), turn("user", "?")],
    "assistant": [turn("user", "Draw."), turn("assistant", text("Here"), IMAGE), turn("user", "?")],
}


EVERYWHERE = {
    "qwen2_vl",
    "qwen2_5_vl",
    "llava15_clip",
    "llava_onevision",
    "phi3_5_vision",
    "phi4_native",
    "phi4_remote",
}
PLACED = {
    *itertools.product(EVERYWHERE, PICTURES),
    *itertools.product(("qwen3_vl",), ("tool", "tool alone")),
    *itertools.product(("llama4", "mistral3"), ("assistant",)),
}


@pytest.mark.parametrize(("family", "name"), [(f, n) for f in FAMILIES for n in PICTURES])
def test_a_picture_in_any_role_is_placed_or_refused(models, family, name):
    """D49: never dropped."""
    model = models(family)
    case = {"messages": PICTURES[name], "sizes": SIZES[:1]}
    if (family, name) in PLACED:
        assert inside(model.prompt(case)) == expansions(model, SIZES[:1])
        return
    # a template that knows the role, but not with pictures, is named with it
    role = name.split()[0]
    with pytest.raises(RequestError, match=f"images in messages of role '{role}'|Only user and assistant") as caught:
        model.prompt(case)
    assert caught.value.param == "messages"
