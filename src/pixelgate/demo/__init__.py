"""What the demo needs besides the code: a small checkpoint without weights, and a picture to begin with."""

from importlib.resources import files

CHECKPOINT = files(__name__) / "checkpoint"
PICTURE = files(__name__) / "receipt.jpg"
