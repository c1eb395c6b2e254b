"""Decoder-only transformers that exercise the library."""
