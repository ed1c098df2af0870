"""The OpenAI-compatible HTTP API over a `runtime.service.Service`: requests in, answers and their stream out."""
