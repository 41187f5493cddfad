"""Variables of the environment that look like the gateway's and are not."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence

from pixelgate.errors import ConfigError

_OURS = "PIXELGATE_"
_OTHERS = ("PIXELGATE_ISA", "PIXELGATE_CXXFLAGS")  # the library's, and those of who builds it
# What Kubernetes tells every container of services whose names begin with pixelgate, as NAME=value.
_KUBERNETES = re.compile(r"\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_[A-Z]+(_\w+)?)=.*|\w+_PORT=[a-z]+://.*", re.S)


def refuse_unknown(environment: Mapping[str, str], settings: Sequence[str]) -> None:
    """Raise ConfigError for a variable of ours that is none of ``settings``: a misspelt limit would be no limit."""
    known = [name.removeprefix(_OURS) for name in (*settings, *_OTHERS)]
    for name, value in environment.items():
        ending = name.removeprefix(_OURS)
        if ending == name or ending in known or _KUBERNETES.fullmatch(f"{name}={value}"):
            continue
        close = difflib.get_close_matches(ending, known, n=1, cutoff=0.55)
        hint = f"did you mean {_OURS}{close[0]}?" if close else "docs/gateway.md has all there are"
        raise ConfigError(f"no setting has the variable {name}; {hint}")
