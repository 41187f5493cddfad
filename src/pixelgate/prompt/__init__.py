"""First floor: messages in, token ids with expanded placeholders out."""
