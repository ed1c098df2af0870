"""Serves a model: instances with paged KV memory, and the way from one to the next."""

import os

# Before torch loads OpenMP: by default its threads wait for each other by spinning, and where a core has been given to
# another process they spin for whole time slices (one step took 15 times as long beside three busy processes).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# oneDNN and torch's layer above it keep compiled code for each number of tokens that a matrix product ever had, a
# thousand of each: half a GiB after a few hundred prompts of different lengths, half a MiB each. Room for 128 costs a
# few ms more for a length that is new again (measured: 1.5 ms of a step's 250).
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
os.environ.setdefault("LRU_CACHE_CAPACITY", "128")
