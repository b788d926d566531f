"""When two URLs name the same page (RFC 3986 section 6.2, and what web servers and trackers add)."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, quote, unquote_to_bytes, urlsplit

_DEFAULT_PORTS = {"http": 80, "https": 443, "ftp": 21}
# Parameters that tell the site where a click came from and change nothing of what it shows.
TRACKING = re.compile(
    r"utm_\w+|gclid|gbraid|wbraid|dclid|fbclid|msclkid|yclid|twclid|ttclid|igshid|mc_cid|mc_eid|_ga|_gl|srsltid"
)
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")


def normalise_url(url: str, *, fragment: str = "routes", http_is_https: bool = False) -> str:
    """The URL in one spelling: equal results name the same page. A text that is no absolute URL is only stripped.

    Scheme and host in lower case (IDNA), default port, empty path, trailing slash, dot segments, percent-encoding,
    tracking parameters and the order of differently named parameters do not count. User, path case and everything else
    do. `fragment`: "ignore", "exact", or "routes" (kept where it selects content: `#/...` and `#!...`).
    """
    text = url.strip()
    try:
        parts = urlsplit(text)
        if not parts.scheme or not parts.hostname:
            return text
        host = _host(parts)
    except (ValueError, UnicodeError):
        return text
    scheme = "https" if http_is_https and parts.scheme == "http" else parts.scheme
    path = _dots(_percent(parts.path)).rstrip("/") or "/"
    query = _query(parts.query)
    anchor = parts.fragment
    if fragment == "ignore" or (fragment == "routes" and not anchor.startswith(("/", "!"))):
        anchor = ""
    return f"{scheme}://{host}{path}{'?' + query if query else ''}{'#' + _percent(anchor) if anchor else ''}"


def _host(parts: SplitResult) -> str:
    name = (parts.hostname or "").rstrip(".")
    if not name.isascii():
        name = name.encode("idna").decode()
    if ":" in name:  # IPv6
        name = f"[{name}]"
    port = parts.port
    user = parts.netloc.rpartition("@")[0]
    shown = "" if port is None or port == _DEFAULT_PORTS.get(parts.scheme) else f":{port}"
    return f"{user}@{name}{shown}" if user else f"{name}{shown}"


def _percent(text: str) -> str:
    """Percent-encoding in one form: unreserved characters plain, others that were encoded stay so, in capitals."""
    pieces = re.split(r"((?:%[0-9A-Fa-f]{2})+)", text)
    for i, piece in enumerate(pieces):
        if i % 2:
            raw = unquote_to_bytes(piece)
            pieces[i] = "".join(chr(b) if chr(b) in _UNRESERVED else f"%{b:02X}" for b in raw)
        else:
            pieces[i] = quote(piece.encode("utf-8", "surrogatepass"), safe="!$&'()*+,;=:@/?%#[]|")
    return "".join(pieces)


def _dots(path: str) -> str:
    out: list[str] = []
    for segment in path.split("/"):
        if segment == "..":
            if len(out) > 1:
                out.pop()
        elif segment != ".":
            out.append(segment)
    return "/".join(out)


def _query(query: str) -> str:
    """Parameters sorted by name; those of one name keep their order. A plus is a space here, and only here."""
    pairs = []
    for piece in query.split("&"):
        name, equals, value = piece.partition("=")
        if piece and not TRACKING.fullmatch(name.lower()):
            pairs.append((_percent(name.replace("+", "%20")), equals, _percent(value.replace("+", "%20"))))
    return "&".join("".join(pair) for pair in sorted(pairs, key=lambda pair: pair[0]))
