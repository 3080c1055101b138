"""Answer the requests of huggingface_hub's client for ``hub_server.Hub``."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

from tests.remote.hub_faults import Fault, Request
from tests.remote.hub_repos import Blob, Commit, Repo, is_large, listing

if TYPE_CHECKING:
    from tests.remote.hub_server import Hub

__all__ = ["HubHandler"]

_BLOCK_BYTES = 1 << 16
_REVISION = r"(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+)"
_REPO = r"(?P<name>[^/]+/[^/]+)"
_API = rf"/api/(?P<kind>model|dataset|space)s/{_REPO}"
_ROUTES = tuple(
    (route, methods, re.compile(pattern))
    for route, methods, pattern in (
        ("whoami", "GET", r"/api/whoami-v2"),
        ("create", "POST", r"/api/repos/create"),
        ("validate-yaml", "POST", r"/api/validate-yaml"),
        ("refs", "GET", rf"{_API}/refs"),
        ("branch", "POST", rf"{_API}/branch/(?P<branch>.+)"),
        ("tree", "GET", rf"{_API}/tree/{_REVISION}(?:/(?P<path>.+))?"),
        ("paths-info", "POST", rf"{_API}/paths-info/{_REVISION}"),
        ("preupload", "POST", rf"{_API}/preupload/{_REVISION}"),
        ("commit", "POST", rf"{_API}/commit/{_REVISION}"),
        ("info", "GET", rf"{_API}(?:/revision/{_REVISION})?"),
        ("batch", "POST", rf"/(?:(?P<kind>dataset|space)s/)?{_REPO}\.git/info/lfs/objects/batch"),
        ("resolve", "GET HEAD", rf"/(?:(?P<kind>dataset|space)s/)?{_REPO}/resolve/{_REVISION}/(?P<path>.+)"),
        ("cdn", "GET HEAD", r"/cdn/(?P<oid>[0-9a-f]{64})"),
        ("upload", "PUT", r"/upload/(?P<oid>[0-9a-f]{64})"),
        ("part", "PUT", r"/part/(?P<oid>[0-9a-f]{64})/(?P<number>\d+)"),
        ("complete", "POST", r"/complete/(?P<oid>[0-9a-f]{64})"),
        ("verify", "POST", r"/verify"),
    )
)
"""Route, methods and path, first match first; %2F in a path is decoded after its groups were told apart."""


class _Answered(Exception):
    """The request has its answer."""


class _Cut(Exception):
    """The connection is to be cut."""


class HubHandler(BaseHTTPRequestHandler):
    """One connection of one client."""

    protocol_version = "HTTP/1.1"
    server_version = "hub"
    disable_nagle_algorithm = True  # headers and content are two writes: 40 ms each time
    hub: Hub
    fault: Fault | None

    def log_message(self, *args: Any) -> None:
        pass

    def handle(self) -> None:
        self.hub = self.server.hub  # type: ignore[attr-defined]
        with suppress(ConnectionError):
            super().handle()

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET

    # -- one request

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        self.query = parse_qs(parts.query)
        self.status = self.sent = self.received = 0
        self.noted = False
        route, groups = self._route(parts.path)
        self.route = route
        self.fault = self.hub.ledger.take(route, self.command, self.path)
        try:
            if self.fault and self.fault.delay_s:
                time.sleep(self.fault.delay_s)
            if self.fault and self.fault.status is not None:
                self._body()
                self._fail(self.fault.status, self.fault.error_code, "on purpose")
            getattr(self, "_on_" + route.replace("-", "_"))(**groups)
        except _Answered:
            pass
        except _Cut:
            self.status = 0
            self._note()
            self._cut()
        except (ConnectionError, TimeoutError):
            self.status, self.close_connection = 0, True
        finally:
            self._note()

    def _note(self) -> None:
        """Note the request, once, before the client has all of the answer: it looks at the notes as soon as it has."""
        if self.noted:
            return
        self.noted = True
        self.hub.ledger.note(
            Request(
                route=self.route,
                method=self.command,
                path=self.path,
                status=self.status,
                sent_bytes=self.sent,
                received_bytes=self.received,
                authorized="Authorization" in self.headers,
                range=self.headers.get("Range"),
                headers={name.lower(): value for name, value in self.headers.items()},
            )
        )

    def _route(self, path: str) -> tuple[str, dict[str, str | None]]:
        for route, methods, pattern in _ROUTES:
            match = pattern.fullmatch(path)
            if match and self.command in methods.split():
                return route, {name: text and unquote(text) for name, text in match.groupdict().items()}
        return "unknown", {}

    def _cut(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)

    def _body(self, into: Path | None = None) -> bytes:
        """Read what the client sends, to memory or into a file."""
        left = int(self.headers.get("Content-Length") or 0)
        pieces: list[bytes] = []
        file = open(into, "wb") if into else None  # noqa: SIM115
        try:
            while left > 0:
                piece = self.rfile.read(min(left, _BLOCK_BYTES))
                if not piece:
                    raise _Cut
                left -= len(piece)
                self.received += len(piece)
                limit = self.fault.drop_after_bytes if self.fault else None
                if limit is not None and self.received >= limit:
                    raise _Cut
                if file:
                    file.write(piece)
                else:
                    pieces.append(piece)
        finally:
            if file:
                file.close()
        return b"".join(pieces)

    def _reply(self, status: int, content: bytes = b"", headers: dict[str, str] | None = None) -> NoReturn:
        if self.fault and self.fault.lose_answer:
            raise _Cut
        self.status = status
        self.sent = 0 if self.command == "HEAD" else len(content)
        self._note()
        self.send_response(status)
        headers = headers or {}
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        raise _Answered

    def _json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> NoReturn:
        self._reply(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _fail(self, status: int, code: str | None, message: str) -> NoReturn:
        headers = {"X-Error-Message": message}
        if code:
            headers["X-Error-Code"] = code
        if self.fault and self.fault.retry_after_s is not None:
            headers["Retry-After"] = str(self.fault.retry_after_s)
        self._json({"error": message}, status, headers)

    # -- who may do what

    def _user(self) -> bool:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token != self.hub.token:
            self._fail(401, None, "Invalid credentials in Authorization header")
        return bool(token)

    def _repo(self, kind: str | None, name: str | None, *, write: bool = False) -> Repo:
        kind = kind or "model"
        repo = self.hub.repos.get(name if kind == "model" else f"{kind}s/{name}")  # type: ignore[arg-type]
        known = self._user()
        if repo is None or (repo.private and not known):
            if self.command in {"POST", "PUT"}:
                self._body()
            self._fail(404 if known else 401, "RepoNotFound", "Repository not found")
        if write and (repo.read_only or not known):
            self._body()
            self._fail(403 if known else 401, None, "you have no right to write here")
        return repo

    def _commit(self, repo: Repo, revision: str | None) -> Commit:
        commit = repo.at(revision or "main")
        if commit is None:
            self._fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    # -- the account

    def _on_unknown(self) -> None:
        self._body()
        self._fail(404, None, f"this hub does not speak {self.command} {self.path}")

    def _on_whoami(self) -> None:
        if not self._user():
            self._fail(401, None, "Invalid username or password.")
        self._json({"type": "user", "name": "owner", "orgs": []})

    def _on_validate_yaml(self) -> None:
        content = json.loads(self._body())["content"]
        if not content.startswith("---\n"):
            self._json({"warnings": [{"message": "empty or missing yaml metadata in repo card"}], "errors": []})
        try:
            yaml.safe_load(content.split("---\n")[1])
        except yaml.YAMLError as error:
            self._json({"warnings": [], "errors": [{"message": str(error)}]}, 400)
        self._json({"warnings": [], "errors": []})

    def _on_create(self) -> None:
        asked = json.loads(self._body())
        if not self._user():
            self._fail(401, None, "Invalid username or password.")
        name = f"{asked.get('organization') or 'owner'}/{asked['name']}"
        private = (
            asked.get("visibility") == "private" or asked.get("private") is True
        )  # clients before 1.0 say the latter
        repo = Repo(kind=asked.get("type") or "model", name=name, private=private)
        with self.hub.lock:
            if repo.path in self.hub.repos:
                self._json({"error": "You already created this repo", "url": f"{self.hub.endpoint}/{repo.path}"}, 409)
            if name.startswith("other/"):
                self._fail(403, None, "You don't have the rights to create a model under the namespace other")
            repo.commit("main", {}, "initial commit")
            self.hub.repos[repo.path] = repo
        self._json({"url": f"{self.hub.endpoint}/{repo.path}", "name": name, "private": repo.private})

    # -- looking

    def _on_info(self, kind: str | None, name: str | None, revision: str | None) -> None:
        repo = self._repo(kind, name)
        commit = self._commit(repo, revision)
        siblings = [{"rfilename": path, "size": blob.num_bytes} for path, blob in commit.files.items()]
        gated = "manual" if repo.gated else False
        about = {"id": repo.name, "sha": commit.oid, "private": repo.private, "gated": gated, "siblings": siblings}
        self._json({**about, "modelId": repo.name, "tags": [], "downloads": 0, "likes": 0, "disabled": False})

    def _on_refs(self, kind: str | None, name: str | None) -> None:
        repo = self._repo(kind, name)
        refs = [
            {"name": name, "ref": name if name.startswith("refs/") else f"refs/heads/{name}", "targetCommit": oid}
            for name, oid in repo.branches.items()
        ]
        pulls = [one for one in refs if one["ref"].startswith("refs/pr/")]
        branches = [one for one in refs if one not in pulls]
        self._json({"branches": branches, "converts": [], "tags": [], "pullRequests": pulls})

    def _on_branch(self, kind: str | None, name: str | None, branch: str) -> None:
        repo = self._repo(kind, name, write=True)
        start = json.loads(self._body() or b"{}").get("startingPoint")
        with self.hub.lock:
            if branch in repo.branches:
                self._fail(409, None, f"Reference already exists: refs/heads/{branch}")
            repo.branches[branch] = self._commit(repo, start).oid
        self._json({})

    def _on_tree(self, kind: str | None, name: str | None, revision: str | None, path: str | None) -> None:
        commit = self._commit(self._repo(kind, name), revision)
        recursive = self.query.get("recursive", ["false"])[0].lower() in {"true", "1"}
        entries = list(listing(commit, path or "", recursive=recursive))
        if path and not entries:
            self._fail(404, "EntryNotFound", f"{path} does not exist on this revision")
        if self.query.get("expand", ["false"])[0].lower() in {"true", "1"}:
            last = {"id": commit.oid, "title": commit.message, "date": "2026-01-01T00:00:00.000Z"}
            entries = [{**entry, "lastCommit": last} for entry in entries]
        size = int(self.query.get("limit", [str(self.hub.page_size)])[0])
        start = int(self.query.get("cursor", ["0"])[0])
        headers = {}
        if start + size < len(entries):
            query = f"recursive={str(recursive).lower()}&limit={size}&cursor={start + size}"
            headers["Link"] = f'<{self.hub.endpoint}{urlsplit(self.path).path}?{query}>; rel="next"'
        self._json(entries[start : start + size], headers=headers)

    def _on_paths_info(self, kind: str | None, name: str | None, revision: str | None) -> None:
        repo = self._repo(kind, name)
        body = self._body()
        paths = json.loads(body)["paths"] if body[:1] == b"{" else parse_qs(body.decode()).get("paths", [])
        commit, found = self._commit(repo, revision), []
        last = {"id": commit.oid, "title": commit.message, "date": "2026-01-01T00:00:00.000Z"}
        for path in [paths] if isinstance(paths, str) else paths:
            if path in commit.files:
                found.append(commit.files[path].describe(path) | {"lastCommit": last})
            elif any(True for _ in listing(commit, path, recursive=False)):
                found.append({"type": "directory", "path": path, "size": 0, "oid": "0" * 40, "lastCommit": last})
        self._json(found)

    # -- files

    def _on_resolve(self, kind: str | None, name: str | None, revision: str | None, path: str) -> None:
        repo = self._repo(kind, name)
        if repo.gated:
            self._fail(403, "GatedRepo", "Access to this model is restricted")
        commit = self._commit(repo, revision)
        blob = commit.files.get(path)
        if blob is None:
            self._fail(404, "EntryNotFound", "Entry not found")
        headers = {"X-Repo-Commit": commit.oid, "Accept-Ranges": "bytes"}
        if not blob.large:
            self._content(blob.path, blob.num_bytes, {**headers, "ETag": f'"{blob.git_oid}"'})
        linked = {"X-Linked-ETag": f'"{blob.sha256}"', "X-Linked-Size": str(blob.num_bytes)}
        place = f"{self.hub.cdn}/cdn/{blob.sha256}?Signature=secret"
        self._reply(302, b"", {**headers, **linked, "Location": place, "ETag": f'"{blob.sha256}"'})

    def _on_cdn(self, oid: str) -> None:
        file = self.hub.storage.large_object(oid)
        if not file.exists():
            self._fail(404, None, "no such object")
        self._content(file, file.stat().st_size, {"ETag": f'"{oid}"', "Accept-Ranges": "bytes"})

    def _content(self, file: Path, total: int, headers: dict[str, str]) -> NoReturn:
        start, stop, status = 0, total, 200
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if wanted and (wanted[1] or wanted[2]):
            start = int(wanted[1]) if wanted[1] else max(total - int(wanted[2]), 0)
            stop = min(int(wanted[2]) + 1, total) if wanted[1] and wanted[2] else total
            if start >= total:
                self._reply(416, b"", {"Content-Range": f"bytes */{total}"})
            status = 206
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{total}"
        self.status = status
        if self.command == "HEAD" or start == stop:
            self._note()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(stop - start)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            raise _Answered
        limit = self.fault.drop_after_bytes if self.fault else None
        with open(file, "rb") as opened:
            opened.seek(start)
            while start < stop and (limit is None or limit > 0):
                piece = opened.read(min(_BLOCK_BYTES, stop - start, *(() if limit is None else (limit,))))
                if self.fault and self.fault.corrupt and self.sent == 0:
                    piece = bytes([piece[0] ^ 1]) + piece[1:]
                start += len(piece)
                self.sent += len(piece)
                limit = None if limit is None else limit - len(piece)
                if start == stop:
                    self._note()
                self.wfile.write(piece)
        if start < stop:
            raise _Cut
        raise _Answered

    # -- writing

    def _on_preupload(self, kind: str | None, name: str | None, revision: str | None) -> None:
        repo = self._repo(kind, name)
        if not self._user():
            self._fail(401, None, "Invalid username or password.")
        commit, answers = self._commit(repo, revision), []
        for file in json.loads(self._body())["files"]:
            large = is_large(file["path"], base64.b64decode(file["sample"]), file["size"])
            answer = {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            if file["path"] in commit.files:
                answer["oid"] = commit.files[file["path"]].oid
            answers.append(answer)
        self._json({"files": answers})

    def _on_batch(self, kind: str | None, name: str | None) -> None:
        self._repo(kind, name)
        asked = json.loads(self._body())
        objects = []
        for item in asked["objects"]:
            oid, size = item["oid"], item["size"]
            answer: dict[str, Any] = {"oid": oid, "size": size}
            if not self.hub.storage.large_object(oid).exists():
                verify = {"href": f"{self.hub.endpoint}/verify"}
                answer["actions"] = {"upload": self._upload(oid, size), "verify": verify}
            objects.append(answer)
        self._json({"transfer": "basic", "objects": objects})

    def _upload(self, oid: str, size: int) -> dict[str, Any]:
        part_bytes = self.hub.multipart_bytes
        if size <= part_bytes:
            return {"href": f"{self.hub.cdn}/upload/{oid}?Signature=secret"}
        parts = {
            str(number): f"{self.hub.cdn}/part/{oid}/{number}?Signature=secret"
            for number in range(1, -(-size // part_bytes) + 1)
        }
        return {"href": f"{self.hub.endpoint}/complete/{oid}", "header": {"chunk_size": str(part_bytes), **parts}}

    def _on_upload(self, oid: str) -> None:
        file = self.hub.storage.new_file()
        self._body(file)
        self._finish(file, oid)

    def _finish(self, file: Path, oid: str) -> NoReturn:
        wrong = self.hub.storage.finish(file, oid)
        if wrong:
            self._fail(400, None, wrong)
        self._json({})

    def _on_part(self, oid: str, number: str) -> None:
        file = self.hub.storage.new_file()
        self._body(file)
        with self.hub.lock:
            self.hub.parts[f"{oid}/{number}"] = file
        self._reply(200, b"", {"ETag": f'"{hashlib.md5(file.read_bytes()).hexdigest()}"'})

    def _on_complete(self, oid: str) -> None:
        asked, whole = json.loads(self._body()), self.hub.storage.new_file()
        with open(whole, "wb") as opened:
            opened.writelines(self.hub.parts[f"{oid}/{part['partNumber']}"].read_bytes() for part in asked["parts"])
        self._finish(whole, oid)

    def _on_verify(self) -> None:
        oid = json.loads(self._body())["oid"]
        if not self.hub.storage.large_object(oid).exists():
            self._fail(404, None, "no such object")
        self._json({})

    def _on_commit(self, kind: str | None, name: str | None, revision: str | None) -> None:
        repo = self._repo(kind, name)
        is_pull = self.query.get("create_pr") == ["1"]
        if not is_pull:
            self._repo(kind, name, write=True)
        lines = [json.loads(line) for line in self._body().splitlines()]
        with self.hub.lock:
            before = self._commit(repo, revision)
            header = lines[0]["value"]
            if header.get("parentCommit") not in (None, before.oid):
                self._fail(412, None, "A commit has happened since. Please refresh and try again.")
            files = dict(before.files)
            for line in lines[1:]:
                self._apply(files, line["key"], line["value"])
            number = 1 + sum(branch.startswith("refs/pr/") for branch in repo.branches)
            branch = f"refs/pr/{number}" if is_pull else revision or "main"
            made = repo.commit(branch, files, header["summary"])
        pull = f"{self.hub.endpoint}/{repo.path}/discussions/{number}" if is_pull else None
        url = f"{self.hub.endpoint}/{repo.path}/commit/{made.oid}"
        self._json({"success": True, "commitOid": made.oid, "commitUrl": url, "pullRequestUrl": pull})

    def _apply(self, files: dict[str, Blob], key: str, value: dict[str, Any]) -> None:
        path = value["path"]
        if key == "file":
            files[path] = self.hub.storage.add(path, base64.b64decode(value["content"]))
        elif key == "lfsFile":
            blob = self.hub.storage.blob_of(value["oid"])
            if blob is None:
                self._fail(400, None, f"{path}: the object {value['oid']} was not uploaded")
            files[path] = blob
        elif key == "deletedFile":
            del files[path]
        else:
            for name in [name for name in files if name.startswith(path.rstrip("/") + "/")]:
                del files[name]
