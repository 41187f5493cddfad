"""The conversations whose prompts are compared, in the form of OpenAI's API but for the pictures' addresses."""

from __future__ import annotations

from typing import Any

IMAGE = {"type": "image"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "zoom",
            "description": "Zoom in <closer> — déjà vu",
            "parameters": {"type": "object", "properties": {"factor": {"type": "number"}}},
        },
    }
]


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def turn(role: str, *content: Any, **fields: Any) -> dict[str, Any]:
    """A message; one string is its content, anything else are parts."""
    alone = len(content) == 1 and (isinstance(content[0], str) or content[0] is None)
    return {"role": role, "content": content[0] if alone else list(content), **fields}


def conversations(specials: list[str]) -> dict[str, dict[str, Any]]:
    """By name: messages, the pictures' sizes (height, width), and options.

    ``specials`` are the family's special tokens, which somebody types.
    """
    call = {"id": "1", "type": "function", "function": {"name": "zoom", "arguments": {"factor": 2, "why": "é<"}}}
    typed = " ".join(specials)
    glued = "".join(specials)
    half = specials[-1][: len(specials[-1]) // 2]
    return {
        "text": {"messages": [turn("user", "Which image is it?")]},
        "one": {"messages": [turn("user", IMAGE, text("What is in the picture?"))], "sizes": [(84, 112)]},
        "picture last": {"messages": [turn("user", text("Look: "), IMAGE)], "sizes": [(200, 120)]},
        "picture alone": {"messages": [turn("user", IMAGE)], "sizes": [(56, 56)]},
        "two": {"messages": [turn("user", IMAGE, IMAGE, text("Compare."))], "sizes": [(84, 112), (300, 64)]},
        "interleaved": {
            "messages": [
                turn("user", text("First:"), IMAGE, text("second: "), IMAGE, text(" third"), IMAGE, text("?"))
            ],
            "sizes": [(84, 112), (90, 60), (64, 64)],
        },
        "turns": {
            "messages": [
                turn("user", IMAGE, text("What is it?")),
                turn("assistant", "A red square."),
                turn("user", text("And this one?"), IMAGE),
                turn("assistant", "Another.  "),
                turn("user", "Thank you!"),
            ],
            "sizes": [(84, 112), (70, 140)],
        },
        "system": {
            "messages": [turn("system", "You look at pictures."), turn("user", IMAGE, text("Well?"))],
            "sizes": [(112, 84)],
        },
        "system in parts": {
            "messages": [turn("system", text("You look at pictures.")), turn("user", IMAGE, text("Well?"))],
            "sizes": [(112, 84)],
        },
        "several texts": {"messages": [turn("user", text("One."), text("Two."), IMAGE)], "sizes": [(112, 84)]},
        "empty": {"messages": [turn("user", "")]},
        "empty part": {"messages": [turn("user", text(""), IMAGE, text(""))], "sizes": [(112, 84)]},
        "unicode": {
            "messages": [turn("user", text("étrange 漢字 😀\u200d\n\n\tنص  \u00a0"), IMAGE, text("e\u0301 \ue000"))],
            "sizes": [(84, 112)],
        },
        "spaces": {
            "messages": [turn("user", text("  two before, line after\n"), IMAGE, text("\n  and  "))],
            "sizes": [(84, 84)],
        },
        "no generation prompt": {
            "messages": [turn("user", IMAGE, text("Well?")), turn("assistant", "Yes.")],
            "sizes": [(84, 112)],
            "add_generation_prompt": False,
        },
        "continued": {
            "messages": [turn("user", IMAGE, text("Well?")), turn("assistant", "It is a")],
            "sizes": [(84, 112)],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
        "tools": {
            "messages": [
                turn("user", "Zoom in."),
                turn("assistant", None, tool_calls=[call]),
                turn("tool", "done: <b>é</b>", name="zoom", tool_call_id="1"),
                turn("user", IMAGE, text("Now?")),
            ],
            "sizes": [(84, 112)],
            "tools": TOOLS,
        },
        "tool with a picture": {
            "messages": [
                turn("user", "Zoom in."),
                turn("assistant", "I do.", tool_calls=[call]),
                turn("tool", text("Here: "), IMAGE, name="zoom", tool_call_id="1"),
            ],
            "sizes": [(84, 112)],
        },
        "system with a picture": {
            "messages": [turn("system", text("You know this: "), IMAGE), turn("user", "What is it?")],
            "sizes": [(84, 112)],
        },
        "typed": {
            "messages": [
                turn("user", text(f"what do {typed} mean?"), IMAGE, text(f"{glued} and {half}")),
                turn("assistant", f"{typed} are tokens"),
                turn("user", IMAGE, text(glued)),
            ],
            "sizes": [(84, 112), (64, 64)],
            "typed": True,
        },
        "typed without pictures": {"messages": [turn("user", f"what do {typed} mean?")], "typed": True},
    }
