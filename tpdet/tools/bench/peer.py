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

from tpdet.arguments.command_line import check_counts
from tpdet.client.address import Address
from tpdet.client.connection import client_key
from tpdet.errors import TpdetError, UsageError
from tpdet.tools.bench.client import Answer, get_json, run_load, stream
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
from tpdet.tools.measurement.rows import BenchRow, keep, make_table, print_line, wide_console
from tpdet.tools.worlds.lists import parse_sizes
from tpdet.tools.worlds.machine import machine

_LEAST_REQUESTS, _TIMES_READERS = 8, 3
_WARM_UP_TOKENS = 8
_SEEDS = 1_000_000
"""Between the seeds of two loads: more than a load has requests."""


@dataclass(frozen=True)
class Figure:
    """One line of the table for each number of readers."""

    case: str
    key: str
    unit: str


FIGURES = (
    Figure("HTTP output", "output_throughput", "tokens/s"),
    Figure("HTTP first token, mean", "mean_ttft_ms", "ms"),
    Figure("HTTP between tokens, P99", "p99_itl_ms", "ms"),
    Figure("HTTP a later token, mean", "mean_tpot_ms", "ms"),
    Figure("HTTP whole answer, P99", "p99_e2el_ms", "ms"),
)


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
    targets = _targets(options)
    for target in targets:
        await check_server(target, load)
    rows: list[BenchRow] = []
    for count in readers:
        requests = options.requests or max(_LEAST_REQUESTS, _TIMES_READERS * count)
        step = replace(load, requests=requests, concurrency=count, seed=load.seed + count * _SEEDS)
        figures = await _in_turn(targets, step, options.turns)
        rows += _rows(options, targets, step, *figures)
        both = " and ".join(f"{one['output_throughput']:,.0f}" for one in figures)
        print(f"readers {count}: {both} tokens/s", file=sys.stderr, flush=True)
        for target, one in zip(targets, figures, strict=True):
            tell_of_drafts(target.name, one)
    return rows


def _targets(options: argparse.Namespace) -> tuple[Target, Target]:
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
    ours = Target("tpdet", our_address, our_key, model)
    return ours, Target(peer_name, address, headers, other)


def _models(address: Address, headers: Mapping[str, str]) -> list[dict[str, Any]]:
    """The models that a server lists, at least one."""
    listed = get_json(address, "/v1/models", headers)
    models = listed.get("data") if isinstance(listed, dict) else None
    if not models or not all(isinstance(model, dict) and "id" in model for model in models):
        raise UsageError(
            f"the server at {address} lists no models at /v1/models: name one with OpenAI's API "
            f"by {address.flag}"
        )
    return list(models)


def _chosen(name: str | None, models: list[dict[str, Any]], flag: str) -> str:
    names = [str(model["id"]) for model in models]
    if name is not None and name not in names:
        raise UsageError(f"{flag} {name!r} is not served there: use {' or '.join(names)}")
    return name or names[0]


def _name_of(address: Address, headers: Mapping[str, str], models: list[dict[str, Any]]) -> str:
    """What the table calls a peer that has no `--peer-name`: such as "vllm 0.26.0"."""
    owner = str(models[0].get("owned_by") or address)
    try:
        said = get_json(address, "/version", headers)
    except TpdetError:  # a label is worth no refusal
        return owner
    version = said.get("version") if isinstance(said, dict) else None
    return owner if version is None else f"{owner} {version}"


async def check_server(target: Target, load: HttpLoad) -> None:
    """Ask for one whole request. Raises UsageError naming what the server does not do.

    It has to read ids as the prompt, to generate to the last token (`ignore_eos`), and to tell how
    many tokens it read and wrote (`stream_options`).
    """
    ids = prompt(load.longest, load.vocabulary, load.seed)
    body = request_body(target.model, ids, load)
    answer = await stream(target.address, load.path, target.headers, body)
    where = f"{target.name} at {target.address}"
    if answer.error is not None:
        raise UsageError(f"{where} refuses the load's request: {answer.error}")
    if not answer.output_tokens:
        raise UsageError(f"{where} gives no usage: it needs stream_options.include_usage")
    if answer.input_tokens != len(ids) and not load.chat:
        raise UsageError(
            f"{where} read {answer.input_tokens} tokens of a prompt of {len(ids)} ids: it needs "
            "token ids as the prompt of /v1/completions"
        )
    if answer.output_tokens != load.generate:
        raise UsageError(
            f"{where} gave {answer.output_tokens} tokens of {load.generate}: it lacks ignore_eos, "
            "so answers would differ in length"
        )


async def _in_turn(
    targets: tuple[Target, Target], load: HttpLoad, turns: int
) -> list[dict[str, Any]]:
    """The figures of each server over all its turns."""
    warm_up = replace(load, generate=min(_WARM_UP_TOKENS, load.generate))
    answers: list[list[Answer]] = [[], []]
    seconds, drafted = [0.0, 0.0], list[int | None]((0, 0))
    for turn in range(turns + 1):
        step = replace(load if turn else warm_up, seed=load.seed + turn * load.requests)
        # Who goes first alternates: the second finds a machine that the first has warmed.
        for index in (0, 1) if turn % 2 else (1, 0):
            target = targets[index]
            before = accepted_drafts(target)
            answered, taken = await send(target, step)
            _refuse_failures(target, step, answered)
            after = accepted_drafts(target)
            if turn:
                drafted[index] = added(drafted[index], before, after)
                answers[index] += answered
                seconds[index] += taken
    return [metrics(*sums) for sums in zip(answers, seconds, drafted, strict=True)]


def _refuse_failures(target: Target, load: HttpLoad, answers: list[Answer]) -> None:
    """Raise TpdetError where an answer failed or was cut short: its figures would not compare."""
    for answer in answers:
        if answer.error is not None:
            raise TpdetError(f"{target.name} failed at {load.concurrency} readers: {answer.error}")
        if answer.output_tokens != load.generate:
            raise TpdetError(
                f"{target.name} gave {answer.output_tokens} tokens of {load.generate} at "
                f"{load.concurrency} readers: it lacks ignore_eos"
            )


def _rows(
    options: argparse.Namespace,
    targets: tuple[Target, Target],
    load: HttpLoad,
    ours: dict[str, Any],
    theirs: dict[str, Any],
) -> list[BenchRow]:
    rows = []
    for figure in FIGURES:
        value, other = ours[figure.key], theirs[figure.key]
        if not value or not other:  # one token has none after it
            continue
        first = figure is FIGURES[0]
        row = BenchRow(
            case=figure.case,
            value=value,
            unit=figure.unit,
            model=Path(targets[0].model).name,
            tp=options.tp,
            batch=load.concurrency,
            context=load.longest,
            metrics={"ours": ours, "peer": theirs} if first else None,
        )
        rows.append(row.beside(targets[1].name, other))
    return rows


def print_table(rows: list[BenchRow]) -> None:
    """Our figure, the peer's, and how many times as fast ours is, by figure and readers."""
    order = [figure.case for figure in FIGURES]
    columns = ("figure", "readers", "tpdet", str(rows[0].peer), "speed over the peer's")
    shown = [
        (
            row.case,
            str(row.batch),
            f"{row.value:,.1f} {row.unit}",
            f"{row.peer_value:,.1f}",
            "" if row.ratio is None else f"{1 / row.ratio:.2f}",
        )
        for row in sorted(rows, key=lambda row: (order.index(row.case), row.batch or 0))
    ]
    wide_console(120).print(make_table(columns, shown, left=("figure",)))
