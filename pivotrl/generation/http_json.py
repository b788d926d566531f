"""JSON over HTTP with the standard library: retries for a busy server, errors that say what failed."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import Any

from pivotrl.errors import UserError

RETRIES = 4  # of a request that met a closed port, a reset connection, or status 429, 502, 503, 504
FIRST_PAUSE_SECONDS = 0.25


class HttpError(UserError):
    """A server's refusal: `status`, `path` and what it said."""

    def __init__(self, url: str, path: str, status: int, said: str) -> None:
        self.status, self.path = status, path
        super().__init__(f"{url}{path} answered {status}: {said[:500]}")


class JsonClient:
    """Requests to one server. Safe for use by several threads."""

    def __init__(self, url: str, timeout_seconds: float) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._timeout = timeout_seconds

    def get(self, path: str) -> dict[str, Any]:
        return self._request(path, None)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._request(path, json.dumps(body).encode())

    def _request(self, path: str, data: bytes | None) -> dict[str, Any]:
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        pause = FIRST_PAUSE_SECONDS
        for attempt in range(RETRIES + 1):
            try:
                with urllib.request.urlopen(request, timeout=self._timeout) as response:
                    text = response.read()
                break
            except urllib.error.HTTPError as error:
                if error.code not in (429, 502, 503, 504) or attempt == RETRIES:
                    said = error.read().decode("utf-8", "replace")
                    raise HttpError(self.url, path, error.code, said) from error
            except (urllib.error.URLError, ConnectionError) as error:
                if attempt == RETRIES:
                    raise UserError(f"{self.url}: no answer ({error}); is the server running there?") from error
            time.sleep(pause)
            pause *= 2
        answer = json.loads(text) if text.strip() else {}
        return answer if isinstance(answer, dict) else {"value": answer}
