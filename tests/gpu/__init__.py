"""What a first run on an accelerator needs to know, in one command: ``python -m tests.gpu``, see ``docs/gpus.md``."""
