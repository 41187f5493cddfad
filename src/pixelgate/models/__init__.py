"""First floor: what each model family does to a picture, as arithmetic on its size."""
