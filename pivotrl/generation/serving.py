"""A checkpoint served over HTTP (OpenAI-compatible) by vLLM's own server, for harnesses that drive a model that way."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from pivotrl.errors import UserError

SERVER: tuple[str, ...] = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
START_SECONDS = 1800.0  # a large model is read from a shared file system
_PARSERS = {"hermes": "hermes", "qwen3_coder": "qwen3_coder", "llama3_json": "llama3_json"}


def server_command(
    folder: Path,
    model: str,
    port: int,
    context_length: int,
    tensor_parallel: int,
    action_format: str,
    thinking_open: bool = False,
    chat_template: Path | None = None,
) -> list[str]:
    """The words that serve `folder` as `model`; tool calls are parsed as `action_format` writes them.

    `thinking_open`: the template opens the thinking in the prompt, so that what comes before </think> is no part of
    the message: a harness would show it to its user, and look for calls in it. `chat_template`: a file to use instead
    of the folder's own.
    """
    words = [*SERVER, "--model", str(folder), "--served-model-name", model, "--host", "127.0.0.1"]
    words += ["--port", str(port), "--max-model-len", str(context_length)]
    words += ["--tensor-parallel-size", str(tensor_parallel)]
    if chat_template is not None:
        words += ["--chat-template", str(chat_template)]
    if thinking_open:
        words += ["--reasoning-parser", "deepseek_r1"]  # all before </think> is thinking, with <think> or without
    if parser := _PARSERS.get(action_format):
        words += ["--enable-auto-tool-choice", "--tool-call-parser", parser]
    return words


@contextlib.contextmanager
def served(command: Sequence[str], port: int, log: Path, start_seconds: float = START_SECONDS) -> Iterator[str]:
    """Run a server for the block; gives its base URL (ends in /v1). Raises UserError if it does not come up.

    The server and all its children are ended with the block.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        _wait(process, f"http://127.0.0.1:{port}/health", log, start_seconds)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        _end(process)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise UserError(
                f"the model server ended with exit {process.returncode}; its last lines ({log}):\n{tail(log)}"
            )
        with (
            contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError),
            urllib.request.urlopen(url, timeout=5),
        ):
            return
        time.sleep(0.2)
    raise UserError(f"the model server did not answer within {seconds:.0f} s; its last lines ({log}):\n{tail(log)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)


def tail(log: Path, lines: int = 8) -> str:
    """The last lines of a log, indented."""
    text = log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
    return "\n".join(f"  {line[:300]}" for line in text)
