"""The inputs of a run: prompts, base models, and the objects that a config names. No module here reads a run."""
