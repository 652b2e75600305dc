"""ASGI applications on real sockets, each in a thread with its own event loop."""

import contextlib
import socket
import threading
import time

import uvicorn


@contextlib.contextmanager
def served(app):
    """The URL of an application, which is stopped afterwards."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False, timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


def wait_until(condition, seconds=10.0):
    """Polls; fails when the condition does not come true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)
