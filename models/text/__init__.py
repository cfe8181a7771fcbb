"""Untrusted text before tokenization: chat templates with resource limits, and control tokens as plain text."""
