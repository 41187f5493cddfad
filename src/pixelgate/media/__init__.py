"""First floor: references in, upright RGB pictures out. Knows no model."""
