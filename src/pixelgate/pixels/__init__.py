"""Ground floor: uint8 RGB in, tensors out. Knows no model, no HTTP, no files."""
