"""What goes into a run: prompts, base models, and what a config names, made. Nothing of a run is read here."""
