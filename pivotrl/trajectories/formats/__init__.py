"""Registry of trajectory formats, in the order in which detection tries them (special shapes before general ones)."""

from __future__ import annotations

from pivotrl.trajectories.formats import (
    anthropic,
    atif,
    function_xml,
    hermes,
    mini_swe,
    openai_chat,
    openhands,
    rendered,
    responses,
    sharegpt,
    swe_agent,
    tau2,
    tau_bench,
    terminus,
    webdancer,
)
from pivotrl.trajectories.formats.base import Format
from pivotrl.trajectories.schema import JsonDict

FORMATS: dict[str, Format] = {
    item.name: item
    for item in (
        responses.PIVOT,
        responses.ROLLOUT,
        atif.FORMAT,
        tau_bench.FORMAT,
        tau2.FORMAT,
        swe_agent.FORMAT,
        swe_agent.TEXT,
        openhands.FORMAT,
        sharegpt.FORMAT,
        anthropic.FORMAT,
        webdancer.FORMAT,
        mini_swe.FORMAT,
        mini_swe.TEXT,
        hermes.FORMAT,
        function_xml.FORMAT,
        terminus.FORMAT,
        openai_chat.FORMAT,
        rendered.FORMAT,
    )
}


def detect(row: JsonDict) -> Format | None:
    """The first format that a decoded row matches."""
    return next((item for item in FORMATS.values() if item.detected and item.matches(row)), None)
