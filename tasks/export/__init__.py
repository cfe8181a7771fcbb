"""The export stage: what was trained as files that plain diffusers loads, and a card that says how to call it."""
