"""Google Cloud Storage server for tests: the JSON API that gcsfs, tensorstore and
google-cloud-storage use.

The namespace is flat and objects are whole: there are no folders and no appending. An
object appears once all of its data has arrived.
"""

import base64
import contextlib
import hashlib
import json
import os
import re
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = tuple[int, dict | bytes, dict[str, str]]  # status, body, headers


class Store:
    """Objects of all buckets: {"bucket/name": (bytes, generation)}."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.sessions: dict[str, tuple[str, bytes]] = {}
        self.generation = 1
        self.lock = threading.Lock()

    def put(self, key: str, data: bytes) -> dict:
        self.generation += 1
        self.objects[key] = data, self.generation
        return self.resource(key)

    def resource(self, key: str) -> dict:
        data, generation = self.objects[key]
        bucket, name = key.split("/", 1)
        time = "2026-01-01T00:00:00.000Z"
        return {
            "kind": "storage#object",
            "id": f"{key}/{generation}",
            "name": name,
            "bucket": bucket,
            "size": str(len(data)),
            "generation": str(generation),
            "metageneration": "1",
            "timeCreated": time,
            "updated": time,
            "storageClass": "STANDARD",
            "md5Hash": base64.b64encode(hashlib.md5(data).digest()).decode(),
            "etag": str(generation),
        }

    def names(self, bucket: str, query: dict[str, str]) -> dict:
        """Return a listing. All names fit on one page."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        start, end = query.get("startOffset", ""), query.get("endOffset")
        items, prefixes = [], set()
        for key in sorted(self.objects):
            at, name = key.split("/", 1)
            if (
                at != bucket
                or not name.startswith(prefix)
                or name < start
                or (end and name >= end)
            ):
                continue
            rest = name[len(prefix) :]
            if delimiter and delimiter in rest:
                prefixes.add(prefix + rest.split(delimiter)[0] + delimiter)
            else:
                items.append(self.resource(key))
        return {"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)}


class Refused(Exception):
    """Raised to answer a request with an HTTP error status."""


class Handler(BaseHTTPRequestHandler):
    """Handler of requests to `store`."""

    protocol_version = "HTTP/1.1"
    store: Store

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        try:
            with self.store.lock:
                status, answer, headers = self.respond(
                    self.command, self.path, self.headers, body
                )
        except Refused as refused:
            status, headers = refused.args[0], {}
            answer = {
                "error": {"code": status, "message": f"{self.command} {self.path}"}
            }
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if status != 204:
            with contextlib.suppress(BrokenPipeError):  # the client has stopped waiting
                self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_DELETE = _answer

    def respond(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes
    ) -> Answer:
        parts = urllib.parse.urlsplit(url)
        query = dict(urllib.parse.parse_qsl(parts.query))
        if parts.path.startswith("/batch/"):
            return self.batch(headers, body)
        if match := re.fullmatch(r"/upload/(?:storage/v1/)?b/([^/]+)/o", parts.path):
            return self.upload(match[1], query, headers, body)
        objects = r"(?:/download)?/storage/v1/b/([^/]+)/o/"
        if match := re.fullmatch(
            objects + "(.+?)/(rewriteTo|copyTo|moveTo)/(.+)", parts.path
        ):
            return self.copy(match, query)
        if match := re.fullmatch(objects + "(.+)", parts.path):
            return self.one(
                method, f"{match[1]}/{urllib.parse.unquote(match[2])}", query, headers
            )
        if match := re.fullmatch(r"/storage/v1/b/([^/]+)/o", parts.path):
            return 200, self.store.names(match[1], query), {}
        if match := re.fullmatch(r"/storage/v1/b/([^/]+)", parts.path):
            return (
                200,
                {
                    "kind": "storage#bucket",
                    "name": match[1],
                    "id": match[1],
                    "locationType": "region",
                },
                {},
            )
        raise Refused(501)

    def one(
        self, method: str, key: str, query: dict, headers: Mapping[str, str]
    ) -> Answer:
        if key not in self.store.objects:
            raise Refused(404)
        data, generation = self.store.objects[key]
        if method == "DELETE":
            del self.store.objects[key]
            return 204, b"", {}
        if query.get("alt") != "media":
            return 200, self.store.resource(key), {}
        told = {
            "Content-Type": "application/octet-stream",
            "x-goog-generation": str(generation),
        }
        if query.get("ifGenerationNotMatch") == str(generation):
            return 304, b"", told
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("Range", "")):
            first, last = int(match[1]), min(int(match[2] or len(data)), len(data) - 1)
            if first >= len(data):
                raise Refused(416)
            return (
                206,
                data[first : last + 1],
                {**told, "Content-Range": f"bytes {first}-{last}/{len(data)}"},
            )
        return 200, data, told

    def copy(self, match: re.Match, query: dict) -> Answer:
        source, target = (
            f"{match[1]}/{urllib.parse.unquote(match[2])}",
            urllib.parse.unquote(match[4]),
        )
        target = (
            target.replace("o/", f"{match[1]}/", 1)
            if match[3] == "moveTo"
            else target[2:].replace("/o/", "/", 1)
        )
        if source not in self.store.objects:
            raise Refused(404)
        resource = self.store.put(target, self.store.objects[source][0])
        if match[3] == "moveTo":
            del self.store.objects[source]
        size = resource["size"]
        rewritten = {
            "done": True,
            "resource": resource,
            "totalBytesRewritten": size,
            "objectSize": size,
        }
        return 200, rewritten if match[3] == "rewriteTo" else resource, {}

    def upload(
        self, bucket: str, query: dict, headers: Mapping[str, str], body: bytes
    ) -> Answer:
        if "upload_id" in query:
            key, so_far = self.store.sessions[query["upload_id"]]
            asked = re.fullmatch(
                r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)",
                headers.get("Content-Range", "bytes */*"),
            )
            data = so_far + body
            self.store.sessions[query["upload_id"]] = key, data
            if asked and asked[3] == "*" and asked[1] is not None:
                return 308, b"", {"Range": f"bytes=0-{len(data) - 1}"}
            return 200, self.store.put(key, data), {}
        if query["uploadType"] == "resumable":
            name = query.get("name") or json.loads(body)["name"]
            upload_id = str(len(self.store.sessions))
            self.store.sessions[upload_id] = f"{bucket}/{name}", b""
            session = (
                f"upload/storage/v1/b/{bucket}/o"
                f"?uploadType=resumable&upload_id={upload_id}"
            )
            return 200, {}, {"Location": f"http://{self.headers['Host']}/{session}"}
        if query["uploadType"] == "multipart":
            boundary = re.search(r'boundary="?([^";]+)', headers["Content-Type"])[
                1
            ].encode()
            _, told, data, _ = body.split(b"--" + boundary)
            name = json.loads(
                told.partition(b"\n\n")[2] or told.partition(b"\r\n\r\n")[2]
            )["name"]
            separator = b"\r\n\r\n" if b"\r\n\r\n" in data else b"\n\n"
            data = data.partition(separator)[2]
            return (
                200,
                self.store.put(
                    f"{bucket}/{name}", data.removesuffix(b"\n").removesuffix(b"\r")
                ),
                {},
            )
        generation = self.store.objects.get(f"{bucket}/{query['name']}", (b"", 0))[1]
        if query.get("ifGenerationMatch", str(generation)) != str(generation):
            raise Refused(412)
        return 200, self.store.put(f"{bucket}/{query['name']}", body), {}

    def batch(self, headers: Mapping[str, str], body: bytes) -> Answer:
        """Delete the objects of a batch request."""
        boundary = re.search(r'boundary="?([^";]+)', headers["Content-Type"])[
            1
        ].encode()
        answers = []
        for part in body.split(b"--" + boundary)[1:-1]:
            method, url = re.search(rb"(DELETE) (\S+) HTTP", part).groups()
            number = re.search(rb"(?i)content-id: <?([^\s>]+)", part)[1].decode()
            try:
                status, *_ = self.respond(method.decode(), url.decode(), {}, b"")
            except Refused as refused:
                (status,) = refused.args
            answers.append(
                "--answers\r\nContent-Type: "
                f"application/http\r\nContent-ID: <response-{number}>\r\n\r\nHTTP/1.1 "
                f"{status} X\r\nContent-Length: 0\r\n\r\n\r\n"
            )
        data = ("".join(answers) + "--answers--\r\n").encode()
        return 200, data, {"Content-Type": "multipart/mixed; boundary=answers"}


@contextlib.contextmanager
def served() -> Iterator[tuple[Store, dict[str, str]]]:
    """Yield a new store, and the environment variables that make programs use it
    instead of Google's servers.
    """
    store = Store()
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), type("OfStore", (Handler,), {"store": store})
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    found = {
        "STORAGE_EMULATOR_HOST": url,
        "TENSORSTORE_GCS_HTTP_URL": url,
        "GOOGLE_CLOUD_PROJECT": "none",
        "NO_GCE_CHECK": "true",
        "FSSPEC_GCS_TOKEN": "anon",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }
    try:
        yield store, {**os.environ, **found}
    finally:
        server.shutdown()
        server.server_close()
