"""Ground floor: uint8 RGB in, tensors out. Knows no model, no HTTP, no files."""

import os

from pixelgate.pixels import binding

# read once, here; everywhere else the level is an argument
binding.select_level(os.environ.get("PIXELGATE_ISA"))
