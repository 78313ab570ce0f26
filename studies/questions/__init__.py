"""Open questions around Collage, each with its runs, its figures and its answer."""
