"""Top floor: the only one that knows HTTP."""
