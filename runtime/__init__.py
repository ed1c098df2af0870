"""Serve a model: PagedAttention's KV blocks, continuous batching, tensor and pipeline parallel ranks."""

import os

# Before torch loads OpenMP: by default its threads wait for each other by spinning, and where a core has been given to
# another process they spin for whole time slices (one step took 15 times as long beside three busy processes).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
