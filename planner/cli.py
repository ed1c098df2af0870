"""The command line: parse, call, print. Heavy imports live in the command bodies, so that --help answers at once.

Results go to stdout or to the file given with -o, progress and errors to stderr. Exit codes: 0 planned, 1 bad input,
2 no plan meets the SLO, 3 a server falls short of what was predicted, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.errors import InfeasibleError, InputError, PlannerError

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Plan prefill/decode disaggregated serving of large language models for the most goodput.",
)
topology_app = typer.Typer(no_args_is_help=True, help="Look at a cluster as the planner sees it.")
app.add_typer(topology_app, name="topology")
profile_app = typer.Typer(no_args_is_help=True, invoke_without_command=True)
app.add_typer(profile_app, name="profile")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]
ProblemFile = Annotated[Path, typer.Argument(metavar="PROBLEM", help="The problem file (YAML).", show_default=False)]


class Mode(StrEnum):
    """What to write."""

    auto = "auto"
    disaggregated = "disaggregated"
    aggregated = "aggregated"


_PLAN_HELP = """Find the layout and placement with the most goodput, and prove it in simulation.

Examples:

  planner plan examples/llama2-70b-h100.yaml

  planner plan problem.yaml -o deployment.yaml --html report.html

  planner plan problem.yaml --json | jq .verdict
"""


@app.command("plan", help=_PLAN_HELP)
def plan_command(
    problem: ProblemFile,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the deployment YAML here.")] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write the report, with a picture of the cluster, here.")
    ] = None,
    mode: Annotated[Mode, typer.Option(help="Write this way of serving, whatever the verdict says.")] = Mode.auto,
    seed: Annotated[int | None, typer.Option(help="Use this seed instead of the problem's.", min=0, max=2**31)] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    from dataclasses import replace

    from planner.sources.problem import read_problem
    from planner.specs.base import check_output

    for path, others in ((output, [problem]), (html, [problem, *([output] if output else [])])):
        if path is not None:
            check_output(path, *others)
    question = read_problem(problem)
    if seed is not None:
        question = replace(question, seed=seed)
    with _progress(quiet) as step:
        step("loading the simulator (compiles on the first run, about 25 s)")
        from planner.pipeline import plan

        found = plan(question, step)
    if mode is not Mode.auto:
        found = found.prefer("aggregated" if mode is Mode.aggregated else "disaggregated")
    from planner.deploy import deployment_of, to_yaml
    from planner.report import render, to_json
    from planner.specs.base import dump_json, write_text

    if output is not None:
        write_text(output, to_yaml(deployment_of(found)))
    if html is not None:
        write_text(html, _html(question, render(found)))
    if json:
        print(dump_json(to_json(found)))
        return
    console = _console()
    for piece in render(found):
        console.print(piece)
    if output is not None:
        console.print(f"Deployment written to {output}", soft_wrap=True)


_FIT_HELP = """Fit cost models and show how far to trust them.

Errors on settings left out of the fit, what each term amounts to and whether the rows tell it, and the worst rows.

Examples:

  planner fit examples/llama2-70b-h100.yaml

  planner fit splitwise-llama2-70b-h100 --report fit.html --plot fit.png

  planner fit my-profile.yaml --model llama3.1-8b --gpu h200 --json | jq .fits[].worst
"""


@app.command("fit", help=_FIT_HELP)
def fit_command(
    source: Annotated[
        str, typer.Argument(metavar="PROBLEM|PROFILE", help="A problem or profile (YAML), or a profile preset's name.")
    ],
    model: Annotated[str | None, typer.Option("--model", help="The model of a profile: a preset or a file.")] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", help="The GPU of a profile: a preset or a file.")] = None,
    report: Annotated[
        Path | None, typer.Option("--report", help="Write a page (HTML) with tables and pictures here.")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write the pictures here (.svg or .png).")] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    from planner.specs.base import check_output, dump_json, write_bytes, write_text

    if plot is not None:
        _check_picture(plot)
    for path, others in ((report, [source]), (plot, [source, *([report] if report else [])])):
        if path is not None:
            check_output(path, *others)
    with _progress(quiet) as step:
        step("fitting cost models")
        from planner.fit_report import fit_reports, to_json

        found = fit_reports(source, model, gpu)
        if report is not None:
            step("drawing the page")
            from planner.fit_page import page

            write_text(report, page(source, found))
        if plot is not None:
            step("drawing the pictures")
            from planner.fit_plot import to_png, to_svg

            write_bytes(plot, to_png(found) if plot.suffix == ".png" else to_svg(found).encode())
    if json:
        print(dump_json(to_json(found)))
        return
    from planner.fit_view import render

    console = _console()
    for piece in render(found):
        console.print(piece)
    for what, path in (("Report", report), ("Pictures", plot)):
        if path is not None:
            console.print(f"{what} written to {path}", soft_wrap=True)


@app.command(
    "simulate",
    help="""Simulate a deployment under a workload and print what its users would see.

Examples:

  planner simulate deployment.yaml --workload azure-conversation --rate 8

  planner simulate deployment.yaml --workload my-trace.yaml --rate 8 --records requests.csv

  planner simulate deployment.yaml --workload sharegpt --concurrency 64

  planner simulate deployment.yaml --workload sharegpt --concurrency max
""",
)
def simulate_command(
    deployment: Annotated[Path, typer.Argument(metavar="DEPLOYMENT", help="A deployment.yaml.", show_default=False)],
    workload: Annotated[str, typer.Option("--workload", "-w", help="A preset's name or a workload file.")],
    rate: Annotated[float | None, typer.Option(help="Requests per second; by default the workload's own.")] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(
            metavar="N|max",
            help="A closed loop: so many clients, each sends its next request when its last has ended; max finds "
            "the most that keep the SLO.",
        ),
    ] = None,
    duration: Annotated[float, typer.Option(help="Simulated seconds.")] = 600.0,
    seed: Annotated[int, typer.Option(min=0, help="Luck of arrivals and lengths.")] = 0,
    records: Annotated[Path | None, typer.Option("--records", help="Write one CSV line per request here.")] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    from planner.deploy import read_deployment
    from planner.specs.base import check_output, dump_json, load, write_text

    if records is not None:
        check_output(records, deployment)
    from planner.what_if import records_csv, simulate_concurrency, simulate_deployment, summary, summary_table

    if concurrency is not None and rate is not None:
        raise InputError("--rate and --concurrency exclude each other: clients send as fast as they are answered")
    spec = read_deployment(load(deployment))
    with _progress(quiet) as step:
        if concurrency is not None:
            outcome = simulate_concurrency(spec, workload, concurrency, duration, seed, step)
        else:
            outcome = simulate_deployment(spec, workload, rate, duration, seed, step)
    if records is not None:
        write_text(records, records_csv(outcome))
    if json:
        print(dump_json(summary(outcome)))
    else:
        _console().print(summary_table(outcome))


_BENCH_HELP = """Replay a load against a running server, and set what was measured beside what was predicted.

Works with any OpenAI-compatible server. Prompts are token ids, exactly as long as the load says; answers too, if the
server heeds ignore_eos and min_tokens. With --deployment the very same requests are simulated, and workload, rate and
SLO are the deployment's unless given.

Exit code 3: of some class, all of the 95 % interval of the measured attainment lies below what is predicted of these
requests on a system that is worth no more than the lower end of the claim's interval.

Examples:

  planner bench --deployment deployment.yaml --url http://127.0.0.1:8000

  planner bench -d deployment.yaml --rate 0.5 --requests 200 --records out.csv --plot out.svg

  planner bench --workload trace.csv --slo ttft=2s,tpot=200ms --rate 4 --duration 10m

  planner bench --workload sharegpt --slo ttft=1s,tpot=50ms --concurrency 16 --json
"""


@app.command("bench", help=_BENCH_HELP)
def bench_command(
    url: Annotated[str, typer.Option("--url", help="The server's address.")] = "http://127.0.0.1:8000",
    workload: Annotated[
        str | None,
        typer.Option("--workload", "-w", help="A preset's name, a workload (YAML) or a trace (.csv, .jsonl)."),
    ] = None,
    slo: Annotated[
        str | None, typer.Option("--slo", metavar="ttft=T,tpot=T[,attainment=P]", help="Such as ttft=2s,tpot=200ms.")
    ] = None,
    deployment: Annotated[
        Path | None, typer.Option("--deployment", "-d", help="What is being served: compare with its prediction.")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second that arrive, whatever happens.")] = None,
    concurrency: Annotated[
        int | None, typer.Option(metavar="N", help="A closed loop instead: so many clients, each waits for its answer.")
    ] = None,
    think: Annotated[str | None, typer.Option(help="Pause of a client in a closed loop.", metavar="TIME")] = None,
    requests: Annotated[int | None, typer.Option(help="How many to send in all.", metavar="N")] = None,
    duration: Annotated[str | None, typer.Option(help="Or for how long: 5m by default.", metavar="TIME")] = None,
    warmup: Annotated[
        str | None, typer.Option(help="Requests before this are not counted: 15 % of the run.", metavar="TIME")
    ] = None,
    max_prompt: Annotated[int | None, typer.Option(help="Cut prompts to so many tokens.", metavar="N")] = None,
    max_output: Annotated[int | None, typer.Option(help="Cut answers to so many tokens.", metavar="N")] = None,
    model: Annotated[str | None, typer.Option(help="The model, where the server has several.")] = None,
    api_key: Annotated[str | None, typer.Option(help="The server's key.", envvar="OPENAI_API_KEY")] = None,
    timeout: Annotated[str, typer.Option(help="Longest wait for one answer.", metavar="TIME")] = "10m",
    token_ids: Annotated[
        str, typer.Option(help="Token ids that prompts are made of.", metavar="FIRST-LAST")
    ] = "1000-30999",
    prompt_seed: Annotated[
        int | None, typer.Option(min=0, help="Luck of the token ids; new each time, or a prefix cache would know them.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Luck of arrivals and lengths.")] = 0,
    records: Annotated[
        Path | None, typer.Option("--records", help="Write a line per request here (.csv or .parquet).")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Write TTFT and TPOT as curves here (.svg or .png).")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    from planner.bench.load import Question, seconds
    from planner.bench.prompts import parse_token_ids
    from planner.bench.records import check_records, write_records
    from planner.bench.run import Target, bench
    from planner.bench.view import render, to_json
    from planner.deploy import read_deployment
    from planner.specs.base import check_output, dump_json, load, write_bytes

    if records is not None:
        check_records(records)
    if plot is not None:
        _check_picture(plot)
        check_output(plot, *([records] if records is not None else []))
    question = Question(
        workload=workload,
        slo=slo,
        rate_rps=rate,
        requests=requests,
        duration_s=seconds(duration, "--duration") if duration is not None else None,
        warmup_s=seconds(warmup, "--warmup") if warmup is not None else None,
        concurrency=concurrency,
        think_s=seconds(think, "--think") if think is not None else None,
        max_prompt=max_prompt,
        max_output=max_output,
        seed=seed,
    )
    target = Target(url, model, api_key, seconds(timeout, "--timeout"), parse_token_ids(token_ids), prompt_seed)
    spec = read_deployment(load(deployment)) if deployment is not None else None
    with _progress(quiet) as step:
        outcome = bench(target, question, spec, step, every_s=0.5 if sys.stderr.isatty() else 10.0)
    result = outcome.result
    if records is not None:
        write_records(records, result)
    if plot is not None:
        from planner.bench.plot import to_png, to_svg

        write_bytes(plot, to_png(result) if plot.suffix == ".png" else to_svg(result).encode())
    if json:
        print(dump_json(to_json(result, outcome.server, outcome.prompt_seed)))
    else:
        console = _console()
        for piece in render(result, outcome.server):
            console.print(piece)
        for what, path in (("Records", records), ("Picture", plot)):
            if path is not None:
                console.print(f"{what} written to {path}", soft_wrap=True)
    if result.interrupted:
        raise typer.Exit(130)
    if result.held is False:
        raise typer.Exit(3)


def _check_picture(path: Path) -> None:
    """Raise InputError when the name of a picture does not say what kind it is."""
    if path.suffix not in (".svg", ".png"):
        raise InputError(f"--plot: expected a file that ends in .svg or .png, got {str(path)!r}")


@app.command(
    "schema",
    help="""Print the JSON Schema of a file kind, for editors and checks.

Example:

  planner schema deployment > deployment.schema.json
""",
)
def schema_command(
    kind: Annotated[
        str, typer.Argument(help="deployment, problem, cluster, model, profile, workload or slo.")
    ] = "deployment",
) -> None:
    from planner.schemas import schema_of
    from planner.specs.base import dump_json

    print(dump_json(schema_of(kind)))


@topology_app.command(
    "show",
    help="""Show a cluster: its nodes, links with nominal and effective speed, and what is assumed.

Examples:

  planner topology show h100-2x8

  planner topology show my-cluster.yaml --from node0:0 --to node1:3

  planner topology show a40-pairs --svg cluster.svg
""",
)
def topology_show(
    cluster: Annotated[str, typer.Argument(help="A preset's name or a cluster file.", show_default=False)],
    from_: Annotated[str | None, typer.Option("--from", help="Show the path from this GPU (node:index).")] = None,
    to: Annotated[str | None, typer.Option("--to", help="... to this GPU.")] = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="Write a picture here.")] = None,
    json: Json = False,
) -> None:
    from planner.specs.base import Document, dump_json, write_text
    from planner.specs.topology import read_cluster
    from planner.topology_svg import to_svg
    from planner.topology_view import describe, describe_path, parse_gpu

    if (from_ is None) != (to is None):
        raise InputError("--from and --to go together, such as --from node0:0 --to node1:3")
    topology = read_cluster(Document(cluster, "CLUSTER"))
    if svg is not None:
        write_text(svg, to_svg(topology))
    if json:
        print(dump_json(_topology_json(topology)))
        return
    console = _console()
    if from_ is not None and to is not None:
        console.print(describe_path(topology, parse_gpu(topology, from_), parse_gpu(topology, to)))
    else:
        console.print(describe(topology))


@profile_app.callback(
    help="""Measure a model on this machine: what a step of the engine takes, and how fast bytes move.

Every measurement is kept as it is made, in FILE.journal: after Ctrl-C or a crash the same command goes on. Ends with
the fit report, and the error on settings that no fit has seen.

Examples:

  planner profile --model smollm2 -o smollm2.yaml

  planner profile --model ./llama --devices 0,1 --tp 1,2 --pp 1,2 --time-budget 10m -o profile.yaml

  planner profile --model llama3.1-8b --load-format dummy --dtype bfloat16 -o llama.yaml
""",
)
def profile_command(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="smollm2, a .gguf file, a model's folder, a config.json or a preset."),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the profile (YAML) here.")] = None,
    tp: Annotated[str, typer.Option("--tp", help="Tensor-parallel degrees.", metavar="N,...")] = "1",
    pp: Annotated[str, typer.Option("--pp", help="Pipeline stages.", metavar="N,...")] = "1",
    devices: Annotated[
        str | None, typer.Option("--devices", help="GPUs, or cores of the CPU; by default all.", metavar="N,...")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, or auto: the GPUs where there are any.")] = "auto",
    dtype: Annotated[
        str, typer.Option("--dtype", help="float32, bfloat16 or float16; by default that of the weights.")
    ] = "",
    load_format: Annotated[
        str, typer.Option("--load-format", help="auto, or dummy: random weights of that size.")
    ] = "auto",
    time_budget: Annotated[str, typer.Option("--time-budget", help="How long it may take in all.")] = "10m",
    name: Annotated[str, typer.Option("--name", help="What the profile is called.")] = "",
    max_batch: Annotated[
        int, typer.Option("--max-batch", min=0, help="Most requests in a step; 0: 256, 32 on a CPU.")
    ] = 0,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=0, help="Most tokens in a step; 0: 16384, 4096 on a CPU.")
    ] = 0,
    max_context: Annotated[
        int, typer.Option("--max-context", min=0, help="Longest request that matters; 0: what the model can hold.")
    ] = 0,
    threads: Annotated[int, typer.Option("--threads", min=0, help="CPU threads of a rank; 0: its share.")] = 0,
    beside: Annotated[
        int,
        typer.Option("--beside", min=0, max=64, help="Copies of the engine to keep busy on other devices meanwhile."),
    ] = 0,
    links: Annotated[bool, typer.Option("--links/--no-links", help="Time links, copies and the disk, too.")] = True,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over, whatever was measured before.")] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**31, help="Luck of weights and settings.")] = 0,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    if context.invoked_subcommand is not None:
        return
    if model is None or output is None:
        raise InputError("expected --model and -o, such as: planner profile --model smollm2 -o smollm2.yaml")
    from profiler import cli as profiling

    options = profiling.Options(
        model=model,
        output=output,
        tps=profiling.parse_numbers(tp, "--tp", 1),
        pps=profiling.parse_numbers(pp, "--pp", 1),
        devices=profiling.parse_numbers(devices, "--devices", 0) if devices else (),
        device=device,
        dtype=profiling.parse_choice(dtype, "--dtype", ("", "float32", "bfloat16", "float16")),
        load_format=profiling.parse_load_format(load_format),
        budget_s=profiling.parse_seconds(time_budget),
        seed=seed,
        fresh=fresh,
        quiet=quiet,
        links=links,
        name=name,
        max_requests=max_batch,
        max_tokens=max_tokens,
        max_context=max_context,
        threads=threads,
        beside=beside,
    )
    outcome = profiling.run(options)
    if json:
        from planner.specs.base import dump_json

        print(dump_json(profiling.to_json(outcome)))
        return
    console = _console()
    for piece in profiling.render(outcome):
        console.print(piece)
    console.print(f"Profile written to {output}", soft_wrap=True)


@profile_app.command(
    "import",
    help="""Make a profile of what a benchmark client saw of a real server.

Takes what `vllm bench serve --save-result --save-detailed` and `python -m sglang.bench_serving --output-details` save.
Prefill comes from requests that met an idle server (run the client with --max-concurrency 1), decode from steps during
which nobody waited for a first token (several runs with a limit: 4, 16, 64; equal output lengths help).

Examples:

  planner profile import one.json sixteen.json --gpu h100-80gb --tp 1 -o profile.yaml

  planner profile import bench.jsonl --from sglang --gpu h200 -o profile.yaml
""",
)
def profile_import(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Saved runs (JSON).", show_default=False)],
    gpu: Annotated[str, typer.Option("--gpu", help="The GPU that it ran on: a preset's name.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Write the profile (YAML) here.")],
    from_: Annotated[str, typer.Option("--from", help="vllm, sglang, or auto.")] = "auto",
    model: Annotated[str | None, typer.Option("--model", help="The model, where the file does not name it.")] = None,
    tp: Annotated[int | None, typer.Option("--tp", min=1, max=1024, help="Ranks, where the file is silent.")] = None,
    pp: Annotated[int | None, typer.Option("--pp", min=1, max=1024, help="Stages, where the file is silent.")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Type of the weights.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="What the profile is called.")] = None,
    json: Json = False,
) -> None:
    from planner.sources.bench_profile import Given, import_runs
    from planner.sources.bench_runs import READERS
    from planner.sources.profiles import to_yaml
    from planner.specs.base import check_output, dump_json, suggest, write_text

    if from_ not in ("auto", *READERS):
        known = ["auto", *READERS]
        raise InputError(f"--from: expected {', '.join(known)}, got {from_!r}{suggest(from_, known)}")
    check_output(output, *files)
    profile = import_runs(files, from_, Given(gpu, model, tp, pp, dtype, name))
    write_text(output, to_yaml(profile))
    rows = list(profile.samples.each) if profile.samples else []
    counts = {phase: sum(row.phase == phase for row in rows) for phase in ("prefill", "decode")}
    if json:
        print(dump_json({"profile": profile.name, "rows": counts, "notes": list(profile.provenance.notes)}))
        return
    console = _console()
    console.print(f"{profile.name}: {counts['prefill']} prefill rows, {counts['decode']} decode rows")
    for note in profile.provenance.notes:
        console.print(f"  {note}")
    console.print(f"Profile written to {output}; look at it with: planner fit {output}", soft_wrap=True)


@profile_app.command(
    "lint",
    help="""Check a profile, or a table that others published: what is no measurement, and what a fit cannot tell.

Rejected rows are left out of every fit. Exit code 1 when any is rejected, 0 when rows are only flagged.

Examples:

  planner profile lint my-profile.yaml

  planner profile lint attention.csv --gpu rtx4090 --model llama3.1-8b

  planner profile lint perf_model.csv --json | jq .findings
""",
)
def profile_lint(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A profile (YAML), CSV or JSON.", show_default=False)],
    gpu: Annotated[str | None, typer.Option("--gpu", help="The GPU, where the file does not name one.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="The model, where the file does not name one.")] = None,
    tp: Annotated[int, typer.Option("--tp", min=1, max=1024, help="Ranks of a table that names none.")] = 1,
    json: Json = False,
) -> None:
    from planner.lint.check import lint
    from planner.lint.given import Given
    from planner.lint.view import lines, to_json
    from planner.specs.base import dump_json

    report = lint(file, Given.of(gpu, model, tp))
    if json:
        print(dump_json(to_json(report)))
    else:
        console = _console()
        for line in lines(report, console.width):
            console.print(line, soft_wrap=True)
    if report.rejects:
        raise typer.Exit(1)


_SERVE_HELP = """Serve a deployment on this machine, as it was planned, with an API like OpenAI's.

Every instance is a process on its own cores or GPUs; prompts run on prefill instances, their KV goes to decode
instances layer by layer. Prints `serving on URL` once all are ready. Ctrl-C, or SIGTERM, lets running requests end.

Examples:

  planner serve deployment.yaml

  planner serve deployment.yaml --dry-run

  planner serve deployment.yaml --model ./llama-3.1-8b --port 9000 --reject

  planner serve deployment.yaml --node n0 --listen tcp://0.0.0.0:5600 --host 0.0.0.0

  planner serve deployment.yaml --node n1 --join tcp://n0:5600

  curl http://127.0.0.1:8000/v1/completions -d '{"prompt": "The capital of France is", "max_tokens": 8}'
"""


@app.command("serve", help=_SERVE_HELP)
def serve_command(
    deployment: Annotated[Path, typer.Argument(metavar="DEPLOYMENT", help="A deployment (YAML).", show_default=False)],
    model: Annotated[str, typer.Option("--model", "-m", help="Where the weights are, if not where it says.")] = "",
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 8000,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, or auto: the GPUs where there are any.")] = "auto",
    load_format: Annotated[
        str, typer.Option("--load-format", help="auto, or dummy: random weights of that size.")
    ] = "auto",
    transport: Annotated[
        str, typer.Option(help="How KV goes to decode instances: shm, distributed or nixl. [shm; for GPUs distributed]")
    ] = "",
    checksums: Annotated[
        bool, typer.Option("--checksums", help="Compare KV with its source when it is pulled.")
    ] = False,
    reject: Annotated[
        bool, typer.Option("--reject", help="Turn requests away (429) whose first token would come too late.")
    ] = False,
    api_key: Annotated[
        str, typer.Option("--api-key", envvar="PLANNER_API_KEY", help="Key that clients have to send.")
    ] = "",
    max_requests: Annotated[int, typer.Option("--max-requests", min=1, help="Answered at a time.")] = 1024,
    max_body: Annotated[int, typer.Option("--max-body", min=1024, help="Bytes of one request's body.")] = 8 * 2**20,
    drain: Annotated[float, typer.Option("--drain", min=0, help="Seconds for running requests to end.")] = 30.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be started, and start nothing.")] = False,
    node: Annotated[str, typer.Option("--node", help="Several hosts: which node of the deployment this is.")] = "",
    listen: Annotated[
        str, typer.Option("--listen", metavar="tcp://HOST:PORT", help="Be the head: let other hosts join here.")
    ] = "",
    join: Annotated[
        str, typer.Option("--join", metavar="tcp://HOST:PORT", help="Start this node's instances for that head.")
    ] = "",
    token: Annotated[
        str, typer.Option("--token", envvar="PLANNER_TOKEN", help="Secret that all hosts share, 16 characters or more.")
    ] = "",
    advertise: Annotated[str, typer.Option("--advertise", help="This host's address, as others reach it.")] = "",
    ray: Annotated[
        str,
        typer.Option("--ray", metavar="ADDRESS", help="Start all nodes through this Ray cluster, or auto, or local."),
    ] = "",
    emit_launch: Annotated[
        Path | None,
        typer.Option("--emit-launch", metavar="DIR", help="Write a script for each node, and start nothing."),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    from planner.deploy import read_deployment
    from planner.specs.base import dump_json, load

    _needs("fastapi", "zmq", "torch", "msgspec", "prometheus_client")
    found = read_deployment(load(deployment))
    from profiler.cli import parse_choice, parse_load_format
    from runtime import cli as serving
    from runtime.api.limits import ApiLimits
    from runtime.device import device_of
    from runtime.serving import ServeOptions

    options = serving.ServerOptions(
        serve=ServeOptions(
            model=model,
            load_format=parse_load_format(load_format),
            device=device_of(parse_choice(device, "--device", ("auto", "cpu", "cuda"))),
            transport=transport,
            transfer_checksums=checksums,
            reject=reject,
        ),
        host=host,
        port=port,
        limits=ApiLimits(concurrent_requests=max_requests, body_bytes=max_body, api_key=api_key),
        drain_s=drain,
        quiet=quiet,
    )
    where = serving.Where(node, listen, join, token, advertise, ray)
    if emit_launch is not None:
        for written in serving.write_launch(found, deployment, options, emit_launch):
            print(written)
        return
    if not dry_run:
        serving.serve_where(found, options, where)
        return
    commands = serving.launch(found, deployment, options)
    if json:
        print(dump_json({**serving.plan_of(found, options), "launch": commands}))
        return
    console = _console()
    for piece in serving.render(found, options):
        console.print(piece)
    for line in serving.render_launch(commands):
        console.print(line, soft_wrap=True)


@app.command(
    "top",
    help="""Show a running server: instances, queues, KV blocks, attainment. Ctrl-C ends it.

Examples:

  planner top

  planner top --url http://127.0.0.1:9000 --once
""",
)
def top_command(
    url: Annotated[str, typer.Option(help="Where `planner serve` is.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str, typer.Option("--api-key", envvar="PLANNER_API_KEY", help="The server's key.")] = "",
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, print, and end.")] = False,
    json: Json = False,
) -> None:
    if json:
        from planner.specs.base import dump_json
        from runtime.top import Status

        print(dump_json(Status(url, api_key).read().status))
        return
    from runtime.cli import top

    top(url, api_key, every, once)


def _needs(*packages: str) -> None:
    """Raise InputError when what serving needs is not installed."""
    from importlib.util import find_spec

    if absent := [name for name in packages if find_spec(name) is None]:
        raise InputError(f"serving needs {', '.join(absent)}: pip install 'goodput-planner[serve]'")


def _topology_json(topology: Any) -> dict[str, Any]:
    return {
        "name": topology.name,
        "nodes": [
            {
                "name": n.name,
                "gpu": n.gpu.name,
                "gpus": list(n.indices),
                "rack": n.rack,
                "nvlink_domain": n.domain,
                "tp_groups": [list(g) for g in n.tp_groups],
            }
            for n in topology.nodes
        ],
        "links": [
            {
                "name": link.name,
                "kind": link.kind,
                "bytes_per_s": link.bytes_per_s,
                "nominal_bytes_per_s": link.nominal_bytes_per_s,
                "assumed": link.assumed,
                "latency_s": link.latency_s,
            }
            for link in topology.links
        ],
    }


def _html(question: Any, pieces: Iterator[Any]) -> str:
    """Return the report as one HTML page with the cluster's picture."""
    import io

    from rich.console import Console

    from planner.topology_svg import to_svg

    console = Console(record=True, width=120, file=io.StringIO(), force_terminal=True, markup=False)
    for piece in pieces:
        console.print(piece)
    page = console.export_html(inline_styles=True)
    page = page.replace("<head>", f"<head>\n<title>{question.name}: goodput plan</title>", 1)
    return page.replace("</body>", f"{to_svg(question.topology)}\n</body>")


def _console() -> Console:
    """Return the console for results: as wide as the terminal, 100 columns when piped. Brackets are plain text."""
    from rich.console import Console

    class ResultConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # `_run` knows what to do; rich would exit with 1

    columns = os.environ.get("COLUMNS", "")
    width = max(int(columns), 40) if columns.isascii() and columns.isdigit() else 100
    return ResultConsole(width=None if sys.stdout.isatty() else width, highlight=False, markup=False)


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the current step on stderr: a spinner on a terminal, lines elsewhere."""
    if quiet:
        yield lambda step: None
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, markup=False)
    if not console.is_terminal:
        yield lambda step: console.print(f"planner: {step}", soft_wrap=True)
        return
    with console.status("starting") as status:
        yield lambda step: status.update(Text(step))


def _run(arguments: list[str]) -> int:
    """Return the exit code of one command line, with every foreseen error as plain lines on stderr."""
    try:
        code = app(arguments, prog_name="planner", standalone_mode=False)
        sys.stdout.flush()  # here, where a closed pipe is no surprise
        if code == 130:  # typer has caught the interrupt
            return _interrupted()
        return code if isinstance(code, int) else 0
    except InputError as error:
        for fault in error.faults:
            print(fault, file=sys.stderr)
        return error.exit_code
    except InfeasibleError as error:
        print(f"{error}\n{error.way_out}".strip(), file=sys.stderr)
        return error.exit_code
    except PlannerError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted()
    except typer.Exit as error:
        return error.exit_code
    except (BrokenPipeError, SystemExit):  # the reader of our pipe has gone, as `head` does; typer exits then
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if (shown := _usage(error)) is not None:
            print(shown, file=sys.stderr)
            return 1
        raise


def _interrupted() -> int:
    print("interrupted", file=sys.stderr)
    return 130


def _usage(error: Exception) -> str | None:
    """Return what to say about a mistake on the command line itself, None for any other error."""
    format_message = getattr(error, "format_message", None)
    if format_message is None:
        return None
    message = str(format_message()).replace("Value error, ", "")
    if "\n" in message:  # no command was given: this is the help
        return message
    context = getattr(error, "ctx", None)
    return f"{message} (try '{context.command_path if context is not None else 'planner'} --help')"


def main() -> None:
    """Run `planner`."""
    sys.exit(_run(sys.argv[1:]))


def plan_main() -> None:
    """Run `plan`, which is `planner plan`."""
    sys.exit(_run(["plan", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
