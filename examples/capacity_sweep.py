"""How many GPUs does a growing load need? A table of request rate against GPUs, with the planner as a library."""

from planner import InfeasibleError, parse, plan, problem_of

PROBLEM = """
model: llama3.1-8b
cluster: h100-2x8
workload: {source: fixed, prompt_tokens: 4000, output_tokens: 200}
slo: {ttft_s: 1s, tpot_s: 15ms, attainment: 90%}
search: {max_tp: 2, max_pp: 1, requests: 500, replay_requests: 2000, seeds: 3}
"""

print("requests/s   GPUs   layout")
for rate in (1, 5, 10, 20, 40, 160):
    try:
        chosen = plan(problem_of(parse(f"{PROBLEM}rate_rps: {rate}rps", "sweep.yaml"))).chosen
        print(f"{rate:10}   {chosen.gpus:4}   {chosen.placed.layout}")
    except InfeasibleError as error:
        print(f"{rate:10}      -   {error.way_out.partition(';')[0]}")
