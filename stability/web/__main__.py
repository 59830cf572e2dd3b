"""``python -m stability.web``: compose commands, start sweeps and follow runs in a browser."""

from __future__ import annotations

import secrets
import socket
import webbrowser
from pathlib import Path

from stability.cli.compose import read
from stability.cli.entry import run_entry
from stability.cli.words import Invocation
from stability.config.entries import LOOPBACK, WebSpec
from stability.printable import print_text

HELP = """
python -m stability.web [port=8000] [open=true] [runs_dir=FOLDER]

Serve a page for this machine's browser: a form with every key of every command, its command and YAML; check and start a
sweep; follow, stop and continue it; its runs' curves; its report. The page can be closed and this command ended at any
time: sweeps go on, and the next start shows them.

The printed address has a secret that works once, in one browser. host=0.0.0.0 token=… lets others on the network in;
what they type runs as you. Through ssh: ssh -L 8000:127.0.0.1:8000 MACHINE, then port=8000 there.
"""


def main(argv: list[str]) -> int:
    """Print the page's address and serve it until Ctrl-C."""
    spec = read(WebSpec, Invocation.of(argv))
    try:
        import uvicorn

        from stability.web.app import make_app
    except ImportError as error:
        raise RuntimeError(f"stability.web needs {error.name}: pip install 'stability-lab[web]'") from error
    listener = socket.create_server((spec.host, spec.port))
    port = listener.getsockname()[1]
    names = LOOPBACK if spec.host in LOOPBACK else (spec.host, *LOOPBACK, socket.gethostname(), socket.getfqdn())
    hosts = [f"{name}:{port}" for name in names]
    token = spec.token or secrets.token_urlsafe(32)
    app = make_app(Path(spec.runs_dir), Path(spec.reports_dir), hosts, token, once=spec.token is None)
    shown = spec.host if spec.host != "0.0.0.0" else socket.gethostname()
    address = f"http://{shown}:{port}/?token={token}"
    print_text(f"{address}\nCtrl-C ends the page; sweeps go on", flush=True)
    if spec.open:
        webbrowser.open(address)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1, lifespan="off")
    uvicorn.Server(config).run(sockets=[listener])
    return 0


if __name__ == "__main__":
    run_entry(main, "web", HELP)
