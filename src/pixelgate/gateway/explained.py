"""What a setting is for: the text behind its field is its help, and its line in docs/gateway.md."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from itertools import pairwise


@cache
def explanations(kind: type) -> dict[str, str]:
    """The text behind each field of a class, which Python itself does not keep, as one line; read from the source."""
    definition = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, text in pairwise(definition.body):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                found[name] = " ".join(words.split())
    return found
