"""`planner bench`: replay a load against a running server, and set what was measured beside what was predicted.

A client of any OpenAI-compatible server. One module per step: `load` (what is sent when), `prompts` (token ids),
`server` (who answers), `answer` (one request), `replay` (all of them), `records` (files), `predict` (the same requests,
simulated), `result` (the numbers), `view` and `plot`; `run` puts them in order.
"""
