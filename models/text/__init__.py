"""Untrusted text in front of tokenizers: chat templates within bounds, and control tokens as plain text."""
