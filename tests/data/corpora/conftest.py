"""A server for the files that are downloaded."""

import http.server
import threading

import pytest


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Serve the files of a folder by name, for http requests to any host.

    Yield the folder.
    """
    folder = tmp_path / "served"
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def translate_path(self, path):
            return str(folder / path.partition("?")[0].rpartition("/")[2])

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        for name in ("http_proxy", "HTTP_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{running.server_port}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield folder
        running.shutdown()
        thread.join()
