"""What a first run on an accelerator needs to know, in one command: ``python -m tools.gpu``, see ``docs/gpus.md``."""
