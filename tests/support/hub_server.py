"""A server on this machine that speaks what huggingface_hub asks of the hub to fetch files."""

import contextlib
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """`files` by name; `cut` is how many bytes of one body are sent before the hub goes away.

    asked: the path of each request. status: refuses all with it, and `code` as error.
    """

    def __init__(self, repo, files):
        self.repo, self.files = repo, files
        self.commit, self.license = COMMIT, "odc-by"
        self.cut, self.status, self.code = None, None, ""
        self.asked = []


def _etag(content):
    return hashlib.sha256(content).hexdigest()


def _in_tree(name, content):
    lfs = {"size": len(content), "oid": _etag(content), "pointerSize": 134}
    return {"type": "file", "path": name, "size": len(content), "oid": "0" * 40, "lfs": lfs}


def _handler(hub):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_HEAD(self):
            self.answer(body=False)

        def do_GET(self):
            self.answer(body=True)

        def answer(self, body):
            hub.asked.append(self.path)
            if hub.status:
                self.send(hub.status, b"{}", {"X-Error-Code": hub.code}, body)
            elif match := re.match(rf"/api/datasets/{hub.repo}/revision/([^?]+)", self.path):
                if match[1] not in ("main", hub.commit):
                    self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body)
                    return
                siblings = [{"rfilename": n, "size": len(c)} for n, c in hub.files.items()]
                info = {"id": hub.repo, "sha": hub.commit, "siblings": siblings,
                        "cardData": {"license": hub.license}}  # fmt: skip
                self.send(200, json.dumps(info).encode(), {}, body)
            elif re.match(rf"/api/datasets/{hub.repo}/tree/{hub.commit}", self.path):
                tree = [_in_tree(name, content) for name, content in hub.files.items()]
                self.send(200, json.dumps(tree).encode(), {}, body)
            elif match := re.match(rf"/datasets/{hub.repo}/resolve/{hub.commit}/(.+)", self.path):
                self.file(hub.files.get(match[1]), body)
            else:
                self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)

        def file(self, content, body):
            if content is None:
                self.send(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
                return
            headers = {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": hub.commit}
            self.send(200, content, headers, body)

        def send(self, status, content, headers, body):
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if body and hub.cut is not None and len(content) > hub.cut:
                self.wfile.write(content[: hub.cut])
                self.close_connection = True
                hub.cut, hub.status = None, 503
            elif body:
                self.wfile.write(content)

    return Handler


@contextlib.contextmanager
def serving(hub):
    """The address of the hub while the block runs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
