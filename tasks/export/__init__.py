"""The exported model of a diffusion run and its card: files for plain diffusers, with usage instructions."""
