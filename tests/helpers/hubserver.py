"""A hub of our own on 127.0.0.1: what huggingface_hub's downloads, one listing of files, and ranges need, and what can
go wrong with them."""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote, urlsplit

OLD, NEW = "a" * 40, "b" * 40


@dataclass
class Big:
    """A file of `size` bytes, zeros behind its beginning, which nobody has in memory."""

    start: bytes
    size: int

    def __len__(self) -> int:
        return self.size


@dataclass
class Repo:
    """A repository: its files at `commit`, which main is at, and at the commits of `history`.

    listed: whether the API tells the names of its files.   listing: what it tells instead.   packed: by gzip.
    refusal: what it answers to everything but HEAD.   without: a file that it does not have.
    ranges: whether Range is heeded.   gzip: a proxy's whim.
    cut: by file, after how many bytes of the body the connection breaks, one entry an answer.
    short: by file, how many bytes it has when it is fetched, whatever HEAD said.
    lies: X-Repo-Commit to give whatever was asked.   range_says: what is in Content-Range.
    cdn: bodies come from another origin.   token: what to ask for.
    """

    files: dict[str, bytes | Big]
    commit: str = NEW
    refs: dict[str, str] = field(default_factory=dict)
    history: dict[str, dict[str, bytes | Big]] = field(default_factory=dict)
    status: int = 200
    error_code: str = ""
    message: str = ""
    listed: bool = True
    ranges: bool = True
    gzip: bool = False
    cut: dict[str, list[int]] = field(default_factory=dict)
    short: dict[str, int] = field(default_factory=dict)
    lies: str = ""
    range_says: str | None = None
    listing: bytes | Big | None = None
    packed: bool = False
    refusal: Big | None = None
    without: str = ""
    cdn: bool = False
    token: str = ""

    def at(self, revision: str) -> tuple[str, dict[str, bytes | Big]] | None:
        known = {self.commit, *self.refs.values(), *self.history}
        commit = revision if revision in known else {"main": self.commit, **self.refs}.get(revision)
        return None if commit is None else (commit, self.history.get(commit, self.files))


@dataclass
class Hub:
    """The server. `asked` is its log, `sent` the bytes of bodies by file, `before` is called with each log line."""

    repos: dict[str, Repo] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)
    tokens: list[str | None] = field(default_factory=list)
    before: Callable[[str], None] = lambda line: None
    url: str = ""
    server: ThreadingHTTPServer | None = None

    def start(self) -> None:
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler(self))
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """After this, connections are refused."""
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
            self.server = None

    def fetched(self) -> list[str]:
        """The names of the files whose bodies were asked for."""
        return [line.split()[3] for line in self.asked if line.startswith("GET")]


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            """Nothing: the test's output is not the server's log."""

        def do_HEAD(self) -> None:
            path = urlsplit(self.path).path.lstrip("/")
            if path.startswith("api/models/"):
                return self.listing(*path.removeprefix("api/models/").partition("/revision/")[::2])
            if path.startswith("api/"):  # what the library asks of its own accord: no part of this
                return self.answer(404, {})
            from_cdn = path.startswith("cdn/")
            name, marker, rest = path.removeprefix("cdn/").partition("/resolve/")
            revision, _, file = rest.partition("/")
            revision, file = unquote(revision), unquote(file)
            asked = f"{'CDN' if from_cdn else self.command} {name} {revision} {file} {self.headers.get('Range') or ''}"
            hub.asked.append(asked.strip())
            hub.before(asked.strip())
            token = self.headers.get("Authorization")
            hub.tokens.append(token)
            if not marker or (name not in hub.repos and name not in hub.moved):
                return self.answer(401, {"X-Error-Message": "Invalid username or password."})
            if name in hub.moved:
                return self.answer(307, {"Location": f"/{hub.moved[name]}/resolve/{rest}"})
            repo = hub.repos[name]
            if from_cdn and token:
                return self.answer(400, {"X-Error-Message": "a token has leaked"})
            if repo.token and token != f"Bearer {repo.token}" and not from_cdn:
                return self.answer(401, {"X-Error-Message": "Invalid username or password."})
            if repo.status != 200:
                told = {"X-Error-Code": repo.error_code, "X-Error-Message": repo.message}
                return self.answer(repo.status, {key: value for key, value in told.items() if value})
            found = repo.at(revision)
            if found is None:
                return self.answer(404, {"X-Error-Code": "RevisionNotFound"})
            commit, files = repo.lies or found[0], found[1]
            if repo.refusal is not None and self.command == "GET":
                return self.answer(403, {}, repo.refusal)
            if file not in files or file == repo.without:
                return self.answer(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return self.file(repo, commit, file, files[file], from_cdn)

        do_GET = do_HEAD  # noqa: N815, http.server looks the name up

        def listing(self, name: str, revision: str) -> None:
            hub.asked.append(f"LIST {name} {revision}")
            hub.before(hub.asked[-1])
            repo = hub.repos.get(name)
            found = None if repo is None or not repo.listed else repo.at(revision)
            if found is None:
                return self.answer(404, {"X-Error-Message": "no such address"})
            siblings: list[dict[str, object]] = []
            for key, body in found[1].items():
                siblings.append({"rfilename": key, "size": len(body), "blobId": etag(body)})
                if key.endswith(".safetensors"):
                    linked = {"size": len(body), "sha256": etag(body), "pointerSize": 134}
                    siblings[-1].update(blobId="0" * 40, lfs=linked)
            if repo.refusal is not None:
                return self.answer(403, {"Content-Type": "application/json"}, repo.refusal)
            if repo.listing is not None:
                packed = {"Content-Encoding": "gzip"} if repo.packed else {}
                return self.answer(200, {"Content-Type": "application/json", **packed}, repo.listing)
            told = {"id": name, "sha": found[0], "siblings": siblings, "private": False, "downloads": 0, "tags": []}
            return self.answer(200, {"Content-Type": "application/json"}, json.dumps(told).encode())

        def file(self, repo: Repo, commit: str, name: str, body: bytes | Big, from_cdn: bool) -> None:
            headers = {"X-Repo-Commit": commit, "ETag": f'"{etag(body)}"'}
            if repo.cdn and not from_cdn and name.endswith(".safetensors"):
                port = hub.url.rpartition(":")[2]
                linked = {"X-Linked-ETag": headers["ETag"], "X-Linked-Size": str(len(body))}
                return self.answer(302, {**headers, **linked, "Location": f"http://localhost:{port}/cdn{self.path}"})
            size = repo.short.get(name, len(body)) if self.command == "GET" else len(body)
            begin, end, status = 0, size, 200
            wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            if wanted and repo.ranges and self.command == "GET":
                begin, end = int(wanted[1]), min(size, int(wanted[2] or size) + 1)
                if begin >= size:
                    return self.answer(416, {"Content-Range": f"bytes */{size}"})
                says = f"bytes {begin}-{end - 1}/{size}" if repo.range_says is None else repo.range_says
                headers["Content-Range"], status = says, 206
            if repo.gzip:
                headers["Content-Encoding"] = "gzip"
            cuts = repo.cut.get(name)
            stop = begin + cuts.pop(0) if cuts and self.command == "GET" else end
            return self.answer(status, headers, body, begin, end, min(stop, end), name)

        def answer(
            self,
            status: int,
            headers: dict[str, str],
            body: bytes | Big = b"",
            begin: int = 0,
            end: int | None = None,
            stop: int | None = None,
            name: str = "",
        ) -> None:
            end = len(body) if end is None else end
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(end - begin)}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "GET":
                return
            try:
                for at in range(begin, end if stop is None else stop, 1 << 16):
                    upto = min(at + (1 << 16), end if stop is None else stop)
                    hub.sent[name] = hub.sent.get(name, 0) + upto - at  # before whoever asked has it, and looks here
                    self.wfile.write(piece(body, at, upto))
            except ConnectionError:
                self.close_connection = True

    return Handler


def of_preset(name: str, shards: int) -> Repo:
    """A repository of a preset's checkpoint in so many files, whole headers and an index; weights that nobody has."""
    from gptkit.architectures import architecture_of
    from gptkit.architectures.presets import presets
    from gptkit.converter.write import plan

    config = dict(presets()[name].config)
    family = architecture_of(config)
    spec = family.spec(config)
    dtypes = {parameter.name: "BF16" for parameter in spec.parameters()}
    total = 2 * sum(parameter.count for parameter in spec.parameters())
    planned = next(
        made
        for step in range(100, 200)
        if len((made := plan(family.bind(spec), dtypes, {}, (), total * step // (100 * shards))).shards) == shards
    )
    weights: dict[str, bytes | Big] = {each.name: Big(each.header, each.size) for each in planned.shards}
    return Repo({"config.json": json.dumps(config).encode(), **planned.texts, **weights})


def etag(body: bytes | Big) -> str:
    return hashlib.sha1(body if isinstance(body, bytes) else body.start + str(body.size).encode()).hexdigest()


def piece(body: bytes | Big, begin: int, end: int) -> bytes:
    if isinstance(body, bytes):
        return body[begin:end]
    return body.start[begin:end].ljust(end - begin, b"\0") if begin < len(body.start) else bytes(end - begin)
