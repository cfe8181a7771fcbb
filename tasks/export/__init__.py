"""The exported model of a diffusion run and its card: files that plain diffusers loads, and how to call them."""
