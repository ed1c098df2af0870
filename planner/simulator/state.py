"""Everything a simulation holds, as arrays of records. `World` is what the compiled code sees and changes.

Words used below: a *lane* is one of the `pp` groups of requests that take turns in an instance's pipeline (one lane
without pipeline parallelism); a *member* of an instance holds KV blocks there. Few arrays, because the compiler hands
each of them to each function anew: with a hundred small arrays a step cost 4 us, with these it costs a twentieth.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

PREFILL, DECODE, AGGREGATED = 0, 1, 2

INSTANCE = np.dtype(
    [
        # what it is
        ("phase", "i8"),
        ("stages", "i8"),
        ("first_lane", "i8"),
        ("handoff_s", "f8"),
        ("handoff_s_per_token", "f8"),
        ("max_batch", "i8"),
        ("max_tokens", "i8"),
        ("prompts_first", "i8"),
        ("max_padding", "i8"),
        ("pipeline_tokens", "i8"),
        ("blocks", "i8"),
        ("swap_s_per_block", "f8"),
        ("entry", "f8"),
        ("reach_blocks", "i8"),  # of the roomiest instance that its requests decode on
        ("depth", "i8"),  # steps under way at a time in a lane of an aggregated instance
        # how it stands
        ("free_blocks", "i8"),
        ("members", "i8"),
        ("pulls", "i8"),
        ("waiting_blocks", "i8"),
        ("accepted_blocks", "i8"),  # of prompts that were pulled in the loop and wait for a batch
        ("queued_s", "f8"),
        ("turn", "i8"),
        ("asleep", "i8"),
        ("taken", "i8"),  # blocks off the head of the line of free ones, ever (aggregated)
        # what it has done
        ("least_free_blocks", "i8"),
        ("busy_s", "f8"),
        ("batch_s", "f8"),
        ("steps", "i8"),
        ("preemptions", "i8"),
    ]
)

LANE = np.dtype(
    [
        ("instance", "i8"),
        ("running", "i8"),
        ("context", "i8"),
        ("steps", "i8"),
        ("in_flight", "i8"),
        ("prompts_only", "i8"),  # the step in flight decodes nobody
        ("penalty_s", "f8"),
        ("newest", "i8"),
        # of the steps under way (aggregated): when the older and the younger end, and what they let go of then
        ("end_s", "f8"),
        ("leaving", "i8"),
        ("leaving_blocks", "i8"),
        ("next_end_s", "f8"),
        ("next_leaving", "i8"),
        ("next_leaving_blocks", "i8"),
    ]
)

REQUEST = np.dtype(
    [
        # the load
        ("arrival_s", "f8"),
        ("prompt", "i8"),
        ("output", "i8"),
        ("slo_class", "i8"),
        ("counted", "i8"),
        ("pause_s", "f8"),
        # when things happened to it
        ("prefill_start_s", "f8"),
        ("prefill_end_s", "f8"),
        ("pull_start_s", "f8"),
        ("pull_end_s", "f8"),
        ("first_step_s", "f8"),
        ("finish_s", "f8"),
        # where it is
        ("prefill_at", "i8"),
        ("decode_at", "i8"),
        ("generated", "i8"),
        ("prefilled", "i8"),
        ("chunk", "i8"),
        ("edge", "i8"),
        ("kept", "i8"),
        ("last_step", "i8"),
        ("key", "i8"),
        ("missed", "i8"),
        # its neighbours in the lists
        ("after", "i8"),
        ("older", "i8"),
        ("newer", "i8"),
        ("due_before", "i8"),
        ("due_after", "i8"),
    ]
)

STAGE = np.dtype([("share", "f8"), ("free_s", "f8")])

GOAL = np.dtype([("ttft_s", "f8"), ("tpot_s", "f8"), ("inclusive", "i8"), ("budget", "f8"), ("missed", "i8")])

SCALAR = np.dtype(
    [
        ("block_tokens", "i8"),
        ("first_token_at_prefill", "i8"),
        ("max_pulls", "i8"),
        ("kv_bytes_per_token", "f8"),
        ("events", "i8"),
        ("steps", "i8"),
        ("serial", "i8"),
        ("waiting_pulls", "i8"),
        ("flows", "i8"),
        ("settled_s", "f8"),
        ("last_entry", "i8"),
        ("last_decode", "i8"),
        # clients in a closed loop: requests that have a time so far, and when nobody sends any more (0: an open load)
        ("timed", "i8"),
        ("until_s", "f8"),
        ("pulls_in_loop", "i8"),
        ("pull_s", "f8"),
        ("pull_s_per_token", "f8"),
        ("pull_share", "f8"),
        ("look_again_s", "f8"),
    ]
)


class World(NamedTuple):
    """All of it."""

    instance: np.ndarray
    law: np.ndarray
    """Parameters of `cost.kernel`, one row per instance."""
    stage: np.ndarray
    """`stage[instance, s]` = (share of the iteration, when the stage is free [s])."""
    lane: np.ndarray
    residue: np.ndarray
    """`residue[lane, (context - steps) % block_tokens]` running requests: tells in O(1) how many need a block."""
    due: np.ndarray
    """`due[lane, step % width]`: the first request that ends with that step, a calendar threaded by `due_after`."""
    request: np.ndarray
    goal: np.ndarray
    queue: np.ndarray
    event: np.ndarray
    step: np.ndarray
    flow: np.ndarray
    path: np.ndarray
    hop: np.ndarray
    link: np.ndarray
    choice: np.ndarray
    """The router's scratch: `choice[0]` scores and `choice[1]` who may be picked, per instance."""
    scalar: np.ndarray
