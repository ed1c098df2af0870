"""Attention over a paged KV cache: one protocol, a backend for each kind of device (`runtime.attention.base`)."""
