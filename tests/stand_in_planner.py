"""A program that answers as `planner serve` and `planner bench` do, to test what drives them. Run by test_proof alone.

It serves nothing: `serve` says that it is ready and waits for SIGTERM; `bench` makes up what it saw, from the rate.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FOLDER = Path(os.environ["STAND_IN"])
MOOD = os.environ.get("STAND_IN_MOOD", "")


class LoneAnswers(BaseHTTPRequestHandler):
    """Answers the requests that measure the machine's speed."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = json.dumps({"times": {"prefill_s": 0.2, "ttft_s": 0.2, "finish_s": 0.75}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def serve() -> int:
    if MOOD == "dies":
        print("no such deployment", file=sys.stderr)
        return 1
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    server = ThreadingHTTPServer(("127.0.0.1", 0), LoneAnswers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print("starting", flush=True)
    print(f"serving on http://127.0.0.1:{server.server_port}", flush=True)
    while not stopped:
        time.sleep(0.01)
    (FOLDER / "stopped").write_text((FOLDER / "stopped").read_text() + "x" if (FOLDER / "stopped").exists() else "x")
    return 0


def bench(arguments: list[str]) -> int:
    options = dict(zip(arguments[::2], arguments[1::2], strict=False))
    rate_rps = float(options["--rate"])
    with (FOLDER / "asked").open("a") as file:
        file.write(json.dumps(arguments) + "\n")
    if MOOD == "slow":
        time.sleep(60.0)
    if MOOD == "garbled":
        print("no document")
        return 0
    if MOOD == "refused":
        print("http://127.0.0.1:1234: connection refused", file=sys.stderr)
        return 1
    rows = [f"1,{number / rate_rps},40,5" for number in range(20)]
    Path(options["--records"]).write_text("\n".join(["counted,due_s,prompt_tokens,output_tokens", *rows]))
    attained = 1.0 if rate_rps < 2.0 else 0.9 if rate_rps < 2.5 else 0.5
    one = {"measured_s": 0.11, "predicted_s": 0.1, "low_s": 0.1, "high_s": 0.12}
    document = {
        "attainment": {
            "all": {"measured": attained, "predicted": attained + 0.02, "low": 0.1, "high": 1.0, "target": 0.9}
        },
        "ttft": {"p50": one},
        "tpot": {"p50": {**one, "measured_s": 0.13}},
        "requests": {"counted": 77},
    }
    print(json.dumps(document))
    return 3 if attained < 0.9 else 0


def profile(arguments: list[str]) -> int:
    (FOLDER / "profiled").write_text(" ".join(arguments))
    return 0


if __name__ == "__main__":
    command = {"serve": lambda arguments: serve(), "bench": bench, "profile": profile}[sys.argv[1]]
    sys.exit(command(sys.argv[2:]))
