"""An HTTP server on loopback with prescribed answers that records its requests."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Loopback:
    """The next answers; the last one is repeated."""

    answers: list[tuple[int, bytes]]
    headers: dict[str, str] = field(default_factory=dict)
    delay_seconds: float = 0.0
    hung: bool = False
    """Delay the health check, too; else it is answered at once, and not recorded."""
    asked: list[tuple[str, bytes, dict[str, str]]] = field(default_factory=list)
    url: str = ""


@contextmanager
def loopback(*answers: tuple[int, bytes], **options: object) -> Iterator[Loopback]:
    told = Loopback(list(answers), **options)  # type: ignore[arg-type]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            told.asked.append((self.path, body, dict(self.headers)))
            time.sleep(told.delay_seconds)
            status, answer = told.answers.pop(0) if len(told.answers) > 1 else told.answers[0]
            self.send_response(status)
            for name, text in told.headers.items():
                self.send_header(name, text)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def do_GET(self) -> None:
            if self.path != "/healthz" or told.hung:
                self.do_POST()
                return
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    told.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield told
    finally:
        server.shutdown()
        server.server_close()
