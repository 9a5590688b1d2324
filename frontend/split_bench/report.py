# SPDX-License-Identifier: Apache-2.0
"""The rows of all parts as Markdown tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvrail.frontend.split_bench.runner import Row, Settings

__all__ = ["markdown"]

_CUT = "cut: its time was over"


def markdown(rows: Sequence[Row], settings: Settings, device: str) -> str:
    """One section a part that has rows. `device`: what one of the devices is called, "GPU" or "CPU rank"."""
    sections = []
    for part, make in (
        ("load", _load),
        ("push", _push),
        ("mixed", _mixed),
        ("handover", _handover),
        ("replay", _replay),
    ):
        mine = [row for row in rows if row["part"] == part]
        if mine:
            sections.append(make(mine, settings, device))
    return "\n\n".join(sections) + "\n"


def _table(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _load(rows: Sequence[Row], settings: Settings, device: str) -> str:
    heads = ["at a time", "engine", f"tok/s per {device}", "tok/s per user", "first token, ms: p50, p99"]
    heads += ["between tokens, ms: p50, p99", "failed"]
    cells = []
    for row in rows:
        start = [str(row["concurrency"]), row["engine"]]
        if "kinds" not in row:
            cells.append([*start, _CUT, "", "", "", ""])
            continue
        short = row["kinds"]["short"]
        numbers = [f"{row['tok_per_s_device']:,.1f}", f"{row['tok_per_s_user']:,.1f}"]
        numbers += [_points(short["ttft_ms"], "p50", "p99"), _points(short["itl_ms"], "p50", "p99")]
        cells.append([*start, *numbers, _failed(row)])
    title = f"## {settings.tokens_in} tokens in, {settings.tokens_out} out"
    return f"{title}\n\n{_table(heads, cells)}"


def _mixed(rows: Sequence[Row], settings: Settings, device: str) -> str:
    heads = ["engine", "first token, ms: p50, p90, p99, max", "between tokens, ms: p50, p90, p99, max"]
    heads += ["p99 / p50 of these", "long prompts: first token p50, p99", f"tok/s per {device}", "failed"]
    cells = []
    for row in rows:
        if "kinds" not in row:
            cells.append([row["engine"], _CUT, "", "", "", "", ""])
            continue
        short, long = row["kinds"]["short"], row["kinds"].get("long", {"ttft_ms": {}})
        itl = short["itl_ms"]
        four = ("p50", "p90", "p99", "max")
        numbers = [_points(short["ttft_ms"], *four), _points(itl, *four)]
        numbers += [f"{itl['p99'] / itl['p50']:.2f}" if itl.get("p50") else "-"]
        numbers += [_points(long["ttft_ms"], "p50", "p99"), f"{row['tok_per_s_device']:,.1f}"]
        cells.append([row["engine"], *numbers, _failed(row)])
    title = (
        f"## {settings.mixed_streams} streams of {settings.mixed_in} in, {settings.mixed_out} out, and "
        f"{settings.mixed_long_in} in every {settings.mixed_every_s:g} s"
    )
    return f"{title}\n\n{_table(heads, cells)}"


def _push(rows: Sequence[Row], settings: Settings, device: str) -> str:
    heads = ["engine", f"prompt tok/s per {device} that prefills", "against the split", "failed"]
    split = next((row for row in rows if "carried" in row), None)
    whole = [row for row in rows if not row["errors"] and not row["cut"]]
    cells = []
    for row in rows:
        rate = row["prompt_tok_per_s_rank"]
        against = "-"
        if split in whole and row in whole and split is not None and row is not split:
            # Everything that the split does besides counts, not only the copies.
            against = f"the split is {100 * (split['prompt_tok_per_s_rank'] / rate - 1):+.1f} %"
        cells.append([row["engine"], f"{rate:,.0f}", against, _failed(row)])
    title = f"## Prompts of {settings.push_in} tokens, two at a time for each rank that prefills"
    text = f"{title}\n\n{_table(heads, cells)}"
    return text if split is None else f"{text}\n\n{_links(split['carried'])}"


def _by_way(link: Mapping[str, Any]) -> str:
    """Which way the bytes took, where the name of the lane does not say it."""
    whole = sum(link["by_way"].values())
    ways = {way: carried for way, carried in link["by_way"].items() if way not in link["lane"] and whole}
    shares = [f"{way} {100 * carried / whole:.0f} %" for way, carried in ways.items()]
    return f" ({', '.join(shares)})" if shares else ""


def _links(carried: Mapping[str, Any]) -> str:
    heads = ["link", "lane", "probed GB/s", "pages", "GB", "GB/s while ranks prefill", "prompts", "slow"]
    cells = [
        [
            f"PE {link['pe_rank']} → CE {link['ce_rank']}",
            f"{link['lane']}{_by_way(link)}, {link['memory']}",
            f"{link['probed_gb_per_s']:.1f}",
            f"{link['pages']:,.0f}",
            f"{link['bytes'] / 1e9:.3f}",
            f"{link['bytes'] / 1e9 / carried['seconds']:.3f}",
            f"{link['tickets']:.0f}",
            link["slow"] or "-",
        ]
        for link in carried["links"]
    ]
    fair = carried["fairness"]
    said = f"All links together: {carried['gb_per_s']:.3f} GB/s; the slowest link over the mean: " + (
        "-" if fair is None else f"{fair:.2f}"
    )
    return f"{_table(heads, cells)}\n\n{said}. {_hidden(carried)}"


def _hidden(carried: Mapping[str, Any]) -> str:
    rest, whole = carried["unhidden_ms_per_prompt"], carried["at_probed_speed_ms_per_prompt"]
    if rest is None:
        return "Nothing was pushed."
    text = f"From a computed prompt to its doorbell: {rest:.2f} ms"
    if whole is None:
        return f"{text}; the link has no probe to compare with."
    share = carried["hidden_share"]
    return f"{text}; all its pages at the probed speed: {whole:.2f} ms; hidden: {100 * share:.0f} %."


def _handover(rows: Sequence[Row], settings: Settings, device: str) -> str:
    heads = ["prompt", "engine", "first token, ms: median (p10 … p90)", "to the second, ms"]
    heads += ["split takes longer, ms", "rounds", "push", "failed"]
    cells = []
    for row in rows:
        longer = _spread(row.get("split_takes_longer_ms", {}))
        push = _hidden(row["carried"]) if "carried" in row else "-"
        numbers = [_spread(row["ttft_ms"]), _spread(row["second_ms"]), longer, str(row["rounds"]), push]
        cells.append([str(row["in"]), row["engine"], *numbers, _failed(row)])
    return f"## Hand-over: one client, engines in turns\n\n{_table(heads, cells)}"


def _replay(rows: Sequence[Row], settings: Settings, device: str) -> str:
    heads = [
        "engine",
        "routing",
        "host cache, GiB",
        "first token, ms: p50, p90, p99",
        "turn 1, last turn: p50",
    ]
    heads += ["cached", "a conversation, s: p50", "tok/s", "failed"]
    cells = []
    for row in rows:
        start = [row["engine"], row["routing"], row["host_cache_gb"]]
        if "ttft_ms" not in row:
            cells.append([*start, _CUT, "", "", "", "", ""])
            continue
        turns = row["ttft_ms_by_turn"]
        ends = ", ".join("-" if t is None else f"{t:,.1f}" for t in (turns[0], turns[-1]))
        numbers = [_points(row["ttft_ms"], "p50", "p90", "p99"), ends, f"{100 * row['cached_share']:.0f} %"]
        numbers += [f"{row['conversation_s']:.2f}", f"{row['tok_per_s']:,.1f}"]
        cells.append([*start, *numbers, _failed(row)])
    last = max((row.get("prompt_tokens_last_turn", 0) for row in rows), default=0)
    title = (
        f"## {settings.conversations} conversations of {settings.turns} turns side by side, "
        f"the last with {last} tokens of context"
    )
    return f"{title}\n\n{_table(heads, cells)}"


def _points(found: Mapping[str, float], *names: str) -> str:
    return ", ".join(f"{found[name]:,.1f}" for name in names) if found else "-"


def _spread(found: Mapping[str, float]) -> str:
    return f"{found['p50']:,.2f} ({found['p10']:,.2f} … {found['p90']:,.2f})" if found else "-"


def _failed(row: Row) -> str:
    if row.get("cut"):
        return f"{row['errors']}, {_CUT}" if row.get("errors") else _CUT
    return str(row["errors"])
