"""The command line as its user meets it: help, output and progress, exit codes, interruption, files."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import planner
from planner import cli
from planner.cli import _run
from planner.specs.base import parse

COMMANDS = (("plan",), ("fit",), ("simulate",), ("schema",), ("topology", "show"))
COMMANDS += (("profile",), ("profile", "lint"), ("profile", "import"), ("bench",))
PROBLEM = """\
model: opt-13b
cluster: a100-4gpu
workload: sharegpt
slo: {ttft_s: 400ms, tpot_s: 100ms}
compare: [{name: ours, prefill: {tp: 2}, decode: {tp: 1}}]
search: {requests: 300, replay_requests: 400, seeds: 3}
"""
LONG = PROBLEM.replace("300, replay_requests: 400, seeds: 3", "300000, replay_requests: 900000, seeds: 9")
# TPOT can be met, but 4 A100s need 72 ms for the prompts that 90 % must get their first token of (TP4)
HOPELESS = PROBLEM.replace("400ms", "30ms")
# case 47: the prompt alone takes 900 ms on the widest layout, six times the 150 ms that are asked for; published fit
# of one line per degree, prefill (s) = per_token * 32768: 900 ms at TP8
SLOW = """\
model: llama3.1-8b
cluster: {name: lab, nodes: [{name: n, gpu: h100-80gb, gpus: 8, links: {kind: nvswitch}}]}
workload: {source: fixed, prompt_tokens: 32768, output_tokens: 256}
rate_rps: 0.5
slo: {ttft_s: 150ms, tpot_s: 20ms}
profiles:
  name: case-47
  model: llama3.1-8b
  gpu: h100-80gb
  provenance: {method: published fit, source: a report}
  coefficients:
"""
for _tp, _ttft_s, _tpot_s in ((1, 5.2, 0.014), (2, 2.75, 0.009), (4, 1.5, 0.007), (8, 0.9, 0.006)):
    SLOW += (
        f"    - {{tp: {_tp}, prefill: {{constant_s: 0, per_token_s: {_ttft_s / 32768!r}, per_attended_s: 0}},\n"
        f"       decode: {{constant_s: {_tpot_s}, per_request_s: 0, per_context_token_s: 0}}}}\n"
    )


def started(*arguments: str, folder: Path, **more) -> subprocess.Popen:
    """Start a real process that heeds SIGINT, even where a shell put this one in the background with it ignored."""
    command = [sys.executable, "-m", "planner", *arguments]
    environment = os.environ | {"COLUMNS": "100"} | more.pop("env", {})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | more
    if os.name == "posix":
        pipes["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, cwd=folder, text=True, env=environment, **pipes)


def process(*arguments: str, folder: Path, **more) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of a real process."""
    with started(*arguments, folder=folder, **more) as running:
        out, err = running.communicate(timeout=120)
        return running.returncode, out, err


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Work in a folder with the problem in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "problem.yaml").write_text(PROBLEM)
    return tmp_path


# --- help ---


@pytest.mark.parametrize("command", [(), *COMMANDS], ids=" ".join)
def test_help_comes_without_loading_anything_heavy(command, tmp_path):
    code = (
        "import sys; from planner.cli import _run; assert _run(sys.argv[1:]) == 0; "
        "print(sorted({'numba', 'numpy', 'scipy', 'networkx', 'pulp', 'highspy'} & set(sys.modules)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, *command, "--help"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert ran.stdout.startswith("Usage: planner") and ran.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_help_of_a_command_shows_an_example(command, capsys):
    assert _run([*command, "--help"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"Examples?:", out) and f"planner {' '.join(command)} " in out.split("Example", 1)[1]


def test_an_example_of_the_help_works(folder, capsys):
    for line in ("planner schema deployment", "planner topology show h100-2x8 --from node0:0 --to node1:3"):
        assert _run(line.split()[1:]) == 0
        assert capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["topology"], ["profile"]])
def test_without_a_command_the_help_goes_to_stderr(arguments, capsys):
    assert _run(arguments) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("Usage: planner") and "Commands:" in printed.err


def test_the_names_that_the_package_promises_exist_and_no_others():
    for name in planner.__all__:
        assert getattr(planner, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'plam'"):
        planner.plam  # noqa: B018


def test_plan_is_planner_plan(monkeypatch, folder, capsys):
    monkeypatch.setattr(sys, "argv", ["plan", "problem.yaml", "-q"])
    with pytest.raises(SystemExit) as ended:
        cli.plan_main()
    assert ended.value.code == 0
    short = capsys.readouterr().out
    assert _run(["plan", "problem.yaml", "-q"]) == 0
    timeless = [re.sub(r"[\d.]+ CPU s", "", out) for out in (short, capsys.readouterr().out)]
    assert timeless[0] == timeless[1]


# --- what goes where ---


def test_json_is_one_document_on_stdout_and_progress_goes_to_stderr(folder):
    code, out, err = process("plan", "problem.yaml", "--json", "-o", "out.yaml", folder=folder)
    assert code == 0
    found = json.loads(out)  # a solver's banner before or after it would not parse
    assert found["deployment"]["version"] == 1 and found["verdict"]["mode"] in ("disaggregated", "aggregated")
    assert "ours" in found["options"]
    lines = err.splitlines()
    assert len(lines) > 5 and all(line.startswith("planner: ") for line in lines)


def test_quiet_silences_the_progress_and_not_the_report(folder, capsys):
    assert _run(["plan", "problem.yaml", "-q"]) == 0
    printed = capsys.readouterr()
    assert printed.err == "" and len(printed.out.splitlines()) > 20 and "planner: " not in printed.out


def test_json_of_every_command_is_one_document(folder, capsys):
    assert _run(["plan", "problem.yaml", "-q", "-o", "out.yaml"]) == 0
    capsys.readouterr()
    for arguments in (
        ["fit", "problem.yaml", "-q", "--json"],
        ["simulate", "out.yaml", "-w", "sharegpt", "--rate", "2", "--duration", "60", "--json"],
        ["topology", "show", "h100-2x8", "--json"],
        ["schema", "problem"],
    ):
        assert _run(arguments) == 0
        assert isinstance(json.loads(capsys.readouterr().out), dict)


@pytest.mark.parametrize("columns", ["80", "100", "junk", "0"])
def test_no_line_of_the_report_is_wider_than_the_terminal(columns, folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    assert _run(["topology", "show", "gb200-nvl72"]) == 0
    assert _run(["plan", "problem.yaml", "-q"]) == 0
    assert _run(["fit", "problem.yaml", "-q"]) == 0
    widest = max(capsys.readouterr().out.splitlines(), key=len)
    assert len(widest) <= {"80": 80, "0": 40}.get(columns, 100), widest


@pytest.mark.skipif(os.name != "posix", reason="pipes")
@pytest.mark.parametrize("arguments", [["schema", "deployment"], ["plan", "problem.yaml", "-q"]], ids=" ".join)
def test_a_reader_that_leaves_early_is_no_error(arguments, folder):
    reader, writer = os.pipe()
    os.close(reader)
    with started(*arguments, folder=folder, stdout=writer) as running:
        os.close(writer)
        err = running.stderr.read()
    assert (running.returncode, err) == (0, "")


def test_brackets_in_names_are_no_markup(folder, capsys):
    assert _run(["plan", "problem.yaml", "-q", "-o", "[red][/x].yaml"]) == 0
    assert "Deployment written to [red][/x].yaml" in capsys.readouterr().out
    assert Path("[red][/x].yaml").is_file()


def test_output_survives_an_ascii_terminal(folder):
    code, out, err = process(
        "plan", "problem.yaml", "-q", folder=folder, env={"PYTHONIOENCODING": "ascii:strict", "PYTHONUTF8": "0"}
    )
    assert (code, err) == (0, "") and out.isascii()


# --- files ---


def test_the_files_are_complete_and_nothing_else_is_left(folder, capsys):
    arguments = ["plan", "problem.yaml", "-q", "-o", "new/deep/out.yaml", "--html", "report.html"]
    assert _run(arguments) == 0
    assert parse(Path("new/deep/out.yaml").read_text(), "out.yaml").data["version"] == 1
    page = Path("report.html").read_text()
    assert page.rstrip().endswith("</html>") and "<svg" in page
    files = sorted(str(path) for path in Path().rglob("*") if path.is_file())
    assert files == ["new/deep/out.yaml", "problem.yaml", "report.html"]
    assert os.stat("report.html").st_mode & 0o777 == 0o644


def test_an_old_file_stays_until_the_new_one_is_there(folder, capsys, monkeypatch):
    Path("out.yaml").write_text("old")
    monkeypatch.setattr(os, "replace", lambda *names: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert _run(["plan", "problem.yaml", "-q", "-o", "out.yaml"]) == 1
    printed = capsys.readouterr()
    assert printed.err == "out.yaml: cannot be written: No space left on device\n" and printed.out == ""
    assert Path("out.yaml").read_text() == "old" and sorted(os.listdir()) == ["out.yaml", "problem.yaml"]


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="needs /dev/stdout")
def test_a_deployment_can_be_piped(folder):
    code, out, err = process("plan", "problem.yaml", "-q", "--json", "-o", "/dev/stderr", folder=folder)
    assert code == 0 and json.loads(out) and parse(err, "out.yaml").data["version"] == 1
    assert Path("/dev/stderr").exists()


# --- interruption ---


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_an_interrupt_ends_the_plan_with_one_line_and_no_file(folder):
    (folder / "problem.yaml").write_text(LONG)
    with started("plan", "problem.yaml", "-o", "out.yaml", "--html", "out.html", folder=folder) as running:
        for line in running.stderr:  # until it is in the middle of the search
            if "ranking" in line:
                break
        running.send_signal(signal.SIGINT)
        out, err = running.stdout.read(), running.stderr.read()
    assert (running.returncode, out) == (130, "")
    assert [line for line in err.splitlines() if not line.startswith("planner: ")] == ["interrupted"]
    assert os.listdir(folder) == ["problem.yaml"]


# --- no plan meets the SLO ---


@pytest.mark.parametrize(
    ("text", "bound", "best", "factor"),
    [(HOPELESS, "30 ms", r"7\d(\.\d)? ms", r"2\.\d+x"), (SLOW, "150 ms", "900 ms", "6x")],
)
def test_an_slo_that_nothing_meets_exits_with_2_and_says_what_is_achievable(text, bound, best, factor, folder, capsys):
    Path("problem.yaml").write_text(text)
    assert _run(["plan", "problem.yaml", "-q", "-o", "out.yaml", "--html", "out.html", "--json"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and os.listdir() == ["problem.yaml"]
    first, way_out = printed.err.splitlines()
    assert first.startswith(f"infeasible: no layout meets TTFT <= {bound}") and "TPOT" not in first
    assert re.search(rf"best achievable .* is {best} .*, {factor} the bound$", first), first
    assert "more replicas do not help" in way_out and "set ttft_s to more than" in way_out
