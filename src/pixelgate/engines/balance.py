"""How one of several engines is chosen for a request; what each does is in fleet.py."""

from typing import Literal

Balance = Literal["least-load", "round-robin", "image-affinity"]
