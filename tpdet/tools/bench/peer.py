"""`tpdet bench peer`: a server of ours beside any other with OpenAI's API, by the same requests.

The two are loaded in turn, so that both see the same machine in the same minutes. Every turn has
prompts of its own, so that no prefix cache holds them; both servers get the same ones.
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from tpdet.arguments.command_line import check_counts
from tpdet.client.address import Address
from tpdet.client.connection import client_key
from tpdet.errors import TpdetError, UsageError
from tpdet.tools.bench.client import get_json, run_load, stream
from tpdet.tools.bench.http_load import (
    HttpLoad,
    Target,
    accepted_drafts,
    added,
    bearer,
    load_of,
    metrics,
    our_headers,
    request_body,
    send,
    tell_of_drafts,
)
from tpdet.tools.bench.load import prompt
from tpdet.tools.measurement.rows import BenchRow, keep, print_line, wide_console
from tpdet.tools.worlds.lists import parse_sizes
from tpdet.tools.worlds.machine import machine

_LEAST_REQUESTS, _TIMES_READERS = 8, 3
_WARM_UP_TOKENS = 8
_SEEDS = 1_000_000
"""Between the seeds of two loads: more than a load has requests."""


@dataclass(frozen=True)
class Figure:
    """One line of the table for each number of readers; `rate`: more is better."""

    case: str
    key: str
    unit: str
    rate: bool = False


FIGURES = (
    Figure("HTTP output", "output_throughput", "tokens/s", rate=True),
    Figure("HTTP first token, mean", "mean_ttft_ms", "ms"),
    Figure("HTTP between tokens, P99", "p99_itl_ms", "ms"),
    Figure("HTTP a later token, mean", "mean_tpot_ms", "ms"),
)


@dataclass(frozen=True)
class _Side:
    """One of the two servers; `name` in the table and in messages."""

    name: str
    target: Target


def peer_command(options: argparse.Namespace) -> int:
    """Check both servers, load them in turn, print the table."""
    check_counts(options, "generate", "vocabulary", "turns", "requests")
    readers = parse_sizes(options.concurrency)
    rows = run_load(_compare(options, readers, load_of(options, requests=1)))
    print_table(rows)
    print_line(keep("peer", machine("auto", options.tp or 1), rows, options.output), options.json)
    return 0


async def _compare(
    options: argparse.Namespace, readers: tuple[int, ...], load: HttpLoad
) -> list[BenchRow]:
    ours, peer = _sides(options)
    for side in (ours, peer):
        await check_server(side.name, side.target, load)
    rows: list[BenchRow] = []
    for count in readers:
        requests = options.requests or max(_LEAST_REQUESTS, _TIMES_READERS * count)
        step = replace(load, requests=requests, concurrency=count, seed=load.seed + count * _SEEDS)
        found = await _in_turn((ours, peer), step, options.turns)
        rows += _rows(options, ours, peer, step, *found)
        both = " and ".join(f"{each['output_throughput']:,.0f}" for each in found)
        print(f"readers {count}: {both} tokens/s", file=sys.stderr, flush=True)
        for side, each in zip((ours, peer), found, strict=True):
            tell_of_drafts(side.name, each)
    return rows


def _sides(options: argparse.Namespace) -> tuple[_Side, _Side]:
    """Our server and the peer, which have to serve one model."""
    address = Address.parse(options.peer_url, "--peer-url", "--peer-api-key-file")
    # The key of our server, which the environment may hold, is never sent to another one.
    headers = bearer(client_key(options.peer_api_key_file, {}, "--peer-api-key-file"))
    theirs = _models(address, headers)
    peer_name = options.peer_name or _name_of(address, headers, theirs)
    our_address, our_key = Address.parse(options.url, "--url"), our_headers(options.api_key_file)
    our_models = _models(our_address, our_key)
    model = _chosen(options.model, our_models, "--model")
    other = _chosen(options.peer_model, theirs, "--peer-model")
    named = options.model is not None and options.peer_model is not None
    if not named and Path(model).name != Path(other).name:
        raise UsageError(
            f"the peer serves {other!r}, our server {model!r}: let both serve one model, or name "
            "the same model's two names by --model and --peer-model"
        )
    return (
        _Side("tpdet", Target(our_address, our_key, model)),
        _Side(peer_name, Target(address, headers, other)),
    )


def _models(address: Address, headers: Mapping[str, str]) -> list[dict[str, Any]]:
    """The models that a server lists, at least one."""
    found = get_json(address, "/v1/models", headers)
    models = found.get("data") if isinstance(found, dict) else None
    if not models or not all(isinstance(each, dict) and "id" in each for each in models):
        raise UsageError(
            f"the server at {address} lists no models at /v1/models: name one with OpenAI's API "
            f"by {address.flag}"
        )
    return list(models)


def _chosen(wanted: str | None, models: list[dict[str, Any]], flag: str) -> str:
    names = [str(each["id"]) for each in models]
    if wanted is not None and wanted not in names:
        raise UsageError(f"{flag} {wanted!r} is not served there: use {' or '.join(names)}")
    return wanted or names[0]


def _name_of(address: Address, headers: Mapping[str, str], models: list[dict[str, Any]]) -> str:
    """What the table calls a peer that has no `--peer-name`: such as "vllm 0.26.0"."""
    owner = str(models[0].get("owned_by") or address)
    try:
        found = get_json(address, "/version", headers)
    except TpdetError:  # a label is worth no refusal
        return owner
    version = found.get("version") if isinstance(found, dict) else None
    return owner if version is None else f"{owner} {version}"


async def check_server(name: str, target: Target, load: HttpLoad) -> None:
    """Ask for one whole request. Raises UsageError naming what the server does not do.

    It has to read ids as the prompt, to generate to the last token (`ignore_eos`), and to tell how
    many tokens it read and wrote (`stream_options`).
    """
    ids = prompt(load.longest, load.vocabulary, load.seed)
    body = request_body(target.model, ids, load)
    answer = await stream(target.address, "/v1/completions", target.headers, body)
    where = f"{name} at {target.address}"
    if answer.error is not None:
        raise UsageError(f"{where} refuses the load's request: {answer.error}")
    if not answer.output_tokens:
        raise UsageError(f"{where} gives no usage: it needs stream_options.include_usage")
    if answer.input_tokens != len(ids):
        raise UsageError(
            f"{where} read {answer.input_tokens} tokens of a prompt of {len(ids)} ids: it needs "
            "token ids as the prompt of /v1/completions"
        )
    if answer.output_tokens != load.generate:
        raise UsageError(
            f"{where} gave {answer.output_tokens} tokens of {load.generate}: it lacks ignore_eos, "
            "so answers would differ in length"
        )


async def _in_turn(sides: tuple[_Side, _Side], load: HttpLoad, turns: int) -> list[dict[str, Any]]:
    """The figures of each side over all its turns."""
    warm_up = replace(load, generate=min(_WARM_UP_TOKENS, load.generate))
    answers: list[list[Any]] = [[] for _ in sides]
    seconds = [0.0 for _ in sides]
    drafted: list[int | None] = [0 for _ in sides]
    for turn in range(turns + 1):
        step = replace(load if turn else warm_up, seed=load.seed + turn * load.requests)
        # Who goes first alternates: the second finds a machine that the first has warmed.
        for place in range(len(sides)) if turn % 2 else reversed(range(len(sides))):
            side = sides[place]
            before = accepted_drafts(side.target)
            found, taken = await send(side.target, step)
            _refuse_failures(side, step, found)
            after = accepted_drafts(side.target)
            if turn:
                drafted[place] = added(drafted[place], before, after)
                answers[place] += found
                seconds[place] += taken
    return [metrics(*each) for each in zip(answers, seconds, drafted, strict=True)]


def _refuse_failures(side: _Side, load: HttpLoad, answers: list[Any]) -> None:
    """Raise TpdetError where an answer failed or was cut short: its figures would not compare."""
    for answer in answers:
        if answer.error is not None:
            raise TpdetError(f"{side.name} failed at {load.concurrency} readers: {answer.error}")
        if answer.output_tokens != load.generate:
            raise TpdetError(
                f"{side.name} gave {answer.output_tokens} tokens of {load.generate} at "
                f"{load.concurrency} readers: it lacks ignore_eos"
            )


def _rows(
    options: argparse.Namespace,
    ours: _Side,
    peer: _Side,
    load: HttpLoad,
    mine: dict[str, Any],
    theirs: dict[str, Any],
) -> list[BenchRow]:
    rows = []
    for figure in FIGURES:
        value, other = mine[figure.key], theirs[figure.key]
        if not value or not other:  # one token has none after it
            continue
        first = figure is FIGURES[0]
        row = BenchRow(
            case=figure.case,
            value=value,
            unit=figure.unit,
            model=Path(ours.target.model).name,
            tp=options.tp,
            batch=load.concurrency,
            context=load.longest,
            peer=peer.name,
            peer_value=other,
            ratio=other / value if figure.rate else value / other,
            metrics={"ours": mine, "peer": theirs} if first else None,
        )
        rows.append(row)
    return rows


def print_table(rows: list[BenchRow]) -> None:
    """Our figure, the peer's, and how many times as fast ours is, by figure and readers."""
    table = Table()
    table.add_column("figure")
    table.add_column("readers", justify="right")
    table.add_column("tpdet", justify="right")
    table.add_column(str(rows[0].peer), justify="right")
    table.add_column("speed over the peer's", justify="right")
    order = [figure.case for figure in FIGURES]
    for row in sorted(rows, key=lambda row: (order.index(row.case), row.batch or 0)):
        speed = "" if row.ratio is None else f"{1 / row.ratio:.2f}"
        ours, theirs = f"{row.value:,.1f} {row.unit}", f"{row.peer_value:,.1f}"
        table.add_row(row.case, str(row.batch), ours, theirs, speed)
    wide_console(120).print(table)
