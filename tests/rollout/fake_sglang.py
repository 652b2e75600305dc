"""Stands in for an interpreter with SGLang where a test needs faults: run as a program with SGLang's command line.

``FAKE_SGLANG`` holds JSON, and ``POST /behave`` changes it: ``exit`` (a message to end with at once), ``exits`` (how often,
counted in ``count``), ``deaf`` (never healthy), ``stubborn`` (SIGTERM is ignored), ``child`` (starts a process of its own),
``info`` (of ``/server_info``), ``answers`` (the weight version of generations), ``instead`` (of every answer to a generation),
``keeps`` (new weights are not taken), ``refuse`` (paths answered with status 400), ``deadly`` (paths on which the process is
killed). What it generates is its port.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

OPTIONS = json.loads(os.environ.get("FAKE_SGLANG", "{}"))
PORT = int(sys.argv[sys.argv.index("--port") + 1])
VERSION = ["default"]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer({})

    def do_POST(self):
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}"))

    def answer(self, body):
        if self.path in OPTIONS.get("deadly", ()):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.path in OPTIONS.get("refuse", ()):
            return self.send(400, {"success": False, "message": "as the test asks for"})
        if self.path == "/behave":
            OPTIONS.update(body)
        if self.path == "/update_weights_from_disk" and not OPTIONS.get("keeps"):
            VERSION[0] = body["weight_version"]
        answers = {
            "/server_info": {"tp_size": 1, **OPTIONS.get("info", {})},
            "/model_info": {"weight_version": VERSION[0]},
            "/generate": {"output_ids": [PORT], "meta_info": {"weight_version": OPTIONS.get("answers", VERSION[0])}},
        }
        if self.path == "/generate" and "instead" in OPTIONS:
            answers["/generate"] = OPTIONS["instead"]
        self.send(200, answers.get(self.path, {}))

    def send(self, status, answer):
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


def main():
    print("fake SGLang", *sys.argv[1:], flush=True)
    if "exit" in OPTIONS and exits():
        sys.exit(OPTIONS["exit"])
    if OPTIONS.get("stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if OPTIONS.get("child"):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    if OPTIONS.get("deaf"):
        time.sleep(1000)
    server = ThreadingHTTPServer(("127.0.0.1", PORT), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    threading.Event().wait()


def exits():
    """Whether this start is one of the first ``exits``; every one is where that is not given."""
    if "exits" not in OPTIONS:
        return True
    count = pathlib.Path(OPTIONS["count"])
    started = int(count.read_text()) if count.exists() else 0
    count.write_text(str(started + 1))
    return started < OPTIONS["exits"]


main()
