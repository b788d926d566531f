"""A small client of OpenAI-compatible chat endpoints: retries, deadline, machine-wide concurrency limit, disk cache.

Only the standard library. Whatever goes wrong is a JudgeError with a short reason; nothing here knows about rewards.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import random
import sqlite3
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from pivotrl.errors import UserError

_RETRIED = {408, 409, 425, 429, 500, 502, 503, 504, 529}
_MAX_ANSWER = 4 << 20  # bytes


class JudgeError(Exception):
    """No usable answer. `reason` is a short machine name; `attempts` how many requests were made."""

    def __init__(self, reason: str, detail: str = "", attempts: int = 0) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail, self.attempts = reason, detail, attempts


@dataclass(frozen=True)
class Answer:
    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    attempts: int
    tool_calls: tuple[dict[str, Any], ...] = ()  # as the endpoint gave them


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the key to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


class ChatClient:
    """Posts to `<base_url>/chat/completions`.

    Each request may take `timeout_seconds`, all attempts of one question `deadline_seconds`. Connection errors,
    time-outs and the status codes of an overloaded server are retried, `retries` times, after
    `backoff_seconds * 2**n` with jitter (or what Retry-After asks). At most `concurrency` requests are in flight from
    this machine to this endpoint, whatever the number of processes and threads.
    """

    def __init__(
        self,
        base_url: str,
        api_key_env: str | None,
        *,
        timeout_seconds: float,
        deadline_seconds: float,
        retries: int,
        backoff_seconds: float,
        concurrency: int,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise UserError(f"judge: base_url is {base_url!r}; it must start with http:// or https://.")
        self._key = ""
        if api_key_env:
            self._key = os.environ.get(api_key_env, "")
            if not self._key:
                raise UserError(f"judge: api_key_env names {api_key_env!r}, which is not set in the environment.")
        self._url = base_url.rstrip("/") + "/chat/completions"
        self._timeout, self._deadline = timeout_seconds, deadline_seconds
        self._retries, self._backoff = retries, backoff_seconds
        self._slots = _Slots(self._url, concurrency)
        self._opener = urllib.request.build_opener(_NoRedirect)

    def ask(self, body: dict[str, Any]) -> Answer:
        """The model's answer to one request body; JudgeError when there is none."""
        end = time.monotonic() + self._deadline
        attempt = 0
        while True:
            attempt += 1
            try:
                with self._slots.hold(end):
                    row = self._post(body, end)
                return _answer(row, attempt)
            except _RetryableError as error:
                wait = error.after or self._backoff * 2 ** (attempt - 1) * random.uniform(0.5, 1.0)
                if attempt > self._retries or time.monotonic() + wait >= end:
                    raise JudgeError("judge_down", str(error), attempt) from None
                time.sleep(wait)
            except JudgeError as error:
                raise JudgeError(error.reason, error.detail, attempt) from None

    def _post(self, body: dict[str, Any], end: float) -> Any:
        remaining = end - time.monotonic()
        if remaining <= 0:
            raise JudgeError("judge_down", "deadline")
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers)
        stop = min(end, time.monotonic() + self._timeout)
        try:
            with self._opener.open(request, timeout=min(self._timeout, remaining)) as response:
                parts: list[bytes] = []
                while part := response.read1(65536):
                    parts.append(part)
                    if time.monotonic() > stop or sum(map(len, parts)) > _MAX_ANSWER:
                        raise _RetryableError("the answer did not end in time")
                data = b"".join(parts)
        except urllib.error.HTTPError as error:
            raise self._status(error) from None
        except (OSError, HTTPException) as error:  # URLError and TimeoutError are OSErrors
            raise _RetryableError(self._hide(f"{type(error).__name__}: {error}")) from None
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise _RetryableError("the response is not JSON") from None

    def _status(self, error: urllib.error.HTTPError) -> Exception:
        with error:
            if error.code in _RETRIED:
                return _RetryableError(f"HTTP {error.code}", _seconds(error.headers.get("Retry-After")))
            # A refusal may quote the key it was given: its body is not for logs.
            text = "" if error.code in (401, 403) else error.read(300).decode(errors="replace")
        return JudgeError(f"judge_http_{error.code}", self._hide(text))

    def _hide(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


class _RetryableError(Exception):
    def __init__(self, message: str, after: float | None = None) -> None:
        super().__init__(message)
        self.after = after


def _seconds(header: str | None) -> float | None:
    try:
        value = float(header or "")
    except ValueError:  # a date, or nothing
        return None
    return value if 0 < value < 3600 else None


def _answer(row: Any, attempts: int) -> Answer:
    try:
        choice = row["choices"][0]
        message, finish = choice["message"], choice["finish_reason"]
        text, calls = message["content"], message.get("tool_calls")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise JudgeError("judge_unparsable", "the response has no choices[0].message.content") from None
    usage = row.get("usage") if isinstance(row.get("usage"), dict) else {}
    used = [usage.get(key) for key in ("prompt_tokens", "completion_tokens")]
    prompt, completion = (n if isinstance(n, int) else 0 for n in used)
    if not isinstance(text, str):  # a refusal, or a tool call where none was offered
        text = ""
    called = tuple(call for call in calls if isinstance(call, dict)) if isinstance(calls, list) else ()
    return Answer(text, str(finish), prompt, completion, attempts, called)


class _Slots:
    """`count` lock files for one endpoint; the kernel frees a slot whose holder was killed."""

    def __init__(self, url: str, count: int) -> None:
        digest = hashlib.sha256(f"{url} {count}".encode()).hexdigest()[:16]
        self._folder = Path(tempfile.gettempdir()) / f"pivotrl-judge-{os.getuid()}-{digest}"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._count = count

    @contextlib.contextmanager
    def hold(self, end: float) -> Iterator[None]:
        while True:
            for i in random.sample(range(self._count), self._count):
                file = os.open(self._folder / str(i), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.close(file)
                    continue
                try:
                    yield
                finally:
                    os.close(file)
                return
            if time.monotonic() >= end:
                raise JudgeError("judge_busy", f"all {self._count} slots taken until the deadline")
            time.sleep(random.uniform(0.01, 0.03))


class AnswerCache:
    """Answers by content hash in one SQLite file, shared by processes and runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._open() as db:
                db.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
        except sqlite3.DatabaseError as error:
            raise UserError(f"judge: cache_path {path} is not a usable SQLite file ({error}); delete it.") from error

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        db = sqlite3.connect(self._path, timeout=30)
        try:
            with db:
                yield db
        finally:
            db.close()

    def get(self, key: str) -> str | None:
        with self._open() as db:
            row = db.execute("SELECT value FROM answers WHERE key = ?", (key,)).fetchone()
        return row[0] if row else None

    def put(self, key: str, value: str) -> None:
        with self._open() as db:
            db.execute("INSERT OR IGNORE INTO answers VALUES (?, ?)", (key, value))
