"""Engines that serve one trace, each a script for a process of its own: `python -m benchmarks.peers.NAME ...`.

Each prints one JSON object, its last line. They import nothing of this project but the trace, for some of them run in
an environment that has neither planner nor runtime.
"""
