"""A web server on this machine whose answers a test scripts: good ones, and all kinds of failed downloads."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server:
    """A web server with a list of scripted answers; without one it serves the file correctly."""

    def __init__(self):
        self.files, self.answers, self.requested = {}, [], []
        self.over = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                requested = self.headers.get("Range")
                outer.requested.append((self.path, requested))
                answer = outer.answers.pop(0) if outer.answers else serve
                answer(self, outer, outer.files.get(self.path), int(requested[6:-1]) if requested else 0)

            def log_message(self, *_):
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self):
        self.over.set()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


def answer(handler, status, body=b"", length=None, **headers):
    handler.send_response(status)
    if length is not False:
        handler.send_header("Content-Length", str(len(body) if length is None else length))
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


def serve(handler, server, content, start):
    if content is None:
        answer(handler, 404)
    elif start >= len(content):
        answer(handler, 416)
    elif start:
        answer(handler, 206, content[start:], Content_Range=f"bytes {start}-{len(content) - 1}/{len(content)}")
    else:
        answer(handler, 200, content)


def cut(count):
    """Send `count` bytes of the requested range, and close the connection."""

    def order(handler, server, content, start):
        rest = content[start:]
        headers = {"Content_Range": f"bytes {start}-{len(content) - 1}/{len(content)}"} if start else {}
        answer(handler, 206 if start else 200, rest[:count], length=len(rest), **headers)

    return order


def stall(count):
    """Send `count` bytes of the requested range, and then nothing until the test ends."""

    def order(handler, server, content, start):
        cut(count)(handler, server, content, start)
        handler.wfile.flush()
        server.over.wait(600)

    return order


def ignore_range(handler, server, content, start):
    """Ignore the requested range."""
    answer(handler, 200, content)


def refuse_range(handler, server, content, start):
    answer(handler, 416)


def send_other_range(handler, server, content, start):
    """Send another range than the requested one."""
    answer(handler, 206, content[start - 5 :], Content_Range=f"bytes {start - 5}-{len(content) - 1}/{len(content)}")


def status(code):
    return lambda handler, server, content, start: answer(handler, code, b"<html>no</html>")


def redirect(handler, server, content, start):
    server.files["/moved"] = content
    answer(handler, 302, Location=f"{server.url}/moved")


def declare_gzip(handler, server, content, start):
    """Declare a gzipped file as a compressed transfer, as some servers do."""
    answer(handler, 200, content, Content_Encoding="x-gzip")


def omit_length(handler, server, content, start):
    """Send no Content-Length."""
    answer(handler, 200, content, length=False)


def body(content):
    return lambda handler, server, _, start: answer(handler, 200, content)
