"""The server's settings: flags, a TOML file, and what they become. The command line wins.

Flags are generated from the fields of EngineConfig and ServerConfig, so that no name is written
twice: `max_model_len` is `--max-model-len` and, in TOML, either spelling.
"""

import argparse
import ipaddress
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from tpdet.config import EngineConfig, first_problem
from tpdet.errors import NotFoundError, UsageError
from tpdet.server.limits import limits_json


class ServerConfig(BaseModel):
    """What fixes a server, beside its engine. Times in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    served_model_name: str | None = Field(
        None, min_length=1, max_length=256, description="name in the API; --model's by default"
    )
    api_key_file: str | None = Field(
        None, description="file (mode 0600) with one API key a line; without it all is open"
    )
    run_secret_file: str | None = Field(
        None,
        description="file (mode 0600) with the run secret, 64 hex digits; for ranks on several "
        "hosts: one host makes its own",
    )
    run_dir: str | None = Field(None, description="directory for ready.json, exit.json and sockets")
    audit_dir: str | None = Field(None, description="directory for audit logs")
    drain_timeout: float = Field(
        20.0, ge=0.0, le=86400.0, description="seconds running requests get after a stop signal"
    )

    canary_interval: float = Field(
        60.0,
        ge=0.0,
        le=86400.0,
        description="seconds after which an idle server answers its canary again; 0 for never",
    )

    batch_swing_alarm: float = Field(
        0.1,
        ge=0.0,
        le=100.0,
        description="share by which the mean batch size may change from one window of 10 s to the "
        "next before a warning is logged; 0 for never",
    )

    allow_faults: bool = Field(
        False, description="let TPDET_FAULTS break the server on purpose; for tests"
    )

    disable_log_stats: bool = Field(False, description="no line of statistics every 10 seconds")
    disable_uvicorn_access_log: bool = Field(False, description="no log line for each request")

    @model_validator(mode="after")
    def _refuse_what_is_unsafe_or_missing(self) -> "ServerConfig":
        if self.audit_dir is not None:
            raise ValueError("audit_dir is not supported yet: leave it out")
        if self.api_key_file is None and not _is_loopback(self.host):
            raise ValueError(
                f"host {self.host} can be reached from other machines: set api_key_file, or "
                "listen on 127.0.0.1"
            )
        return self


class WorldConfig(BaseModel):
    """How many ranks a file's run has. In files only: on the command line it is the launcher's."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    tp: int | None = Field(None, ge=1, le=64, description="tensor-parallel size, ranks in all")
    nodes: int = Field(1, ge=1, le=64, description="hosts that the ranks are on, equally many each")

    @model_validator(mode="after")
    def _refuse_ranks_that_cannot_be_shared_out(self) -> "WorldConfig":
        if (self.tp or 1) % self.nodes:
            raise ValueError(f"nodes {self.nodes} does not divide tp {self.tp or 1}")
        return self


@dataclass(frozen=True)
class Settings:
    """Everything a rank is started with; `world` is what its file says of the whole run."""

    engine: EngineConfig
    server: ServerConfig
    world: WorldConfig

    @property
    def served_name(self) -> str:
        """The model's name in the API."""
        return self.server.served_model_name or self.engine.model

    @property
    def batch_swing_alarm(self) -> float:
        """The alarm's share; 0 where the batch is fixed, so that its size never swings."""
        return 0.0 if self.engine.fixed_batch is not None else self.server.batch_swing_alarm


def load_settings(arguments: Sequence[str] | None, program: str) -> Settings:
    """Settings from flags and the TOML file they may name.

    `--help` and `--print-limits` print and end the process with 0. Raises UsageError for an
    unknown flag or key and for a value that is out of range, NotFoundError without the file.
    """
    parser = make_parser(program)
    given = vars(parser.parse_args(sys.argv[1:] if arguments is None else list(arguments)))
    if given.pop("print_limits"):
        print(limits_json())
        sys.exit(0)
    path = given.pop("config", None)
    positional = given.pop("positional_model", None)
    if positional is not None and given.setdefault("model", positional) != positional:
        raise UsageError(f"two models are given, {positional} and {given['model']}: give one")
    values = _read_toml(path) if path is not None else {}
    world = {name: values.pop(name) for name in WorldConfig.model_fields if name in values}
    values |= given
    if "model" not in values:
        raise UsageError("no model is given: name a Hugging Face directory with --model")
    server = {name: values.pop(name) for name in ServerConfig.model_fields if name in values}
    try:
        engine = EngineConfig.from_values(**values)
        return Settings(engine, ServerConfig(**server), WorldConfig(**world))
    except ValidationError as error:
        raise UsageError(first_problem(error)) from error


def make_parser(program: str) -> argparse.ArgumentParser:
    """The command line: a flag for each field, absent unless given."""
    parser = _Parser(prog=program, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="same as --model")
    parser.add_argument("--config", metavar="FILE.toml", help="settings; the command line wins")
    parser.add_argument(
        "--print-limits", action="store_true", default=False, help="print every limit as JSON"
    )
    for title, model in (("engine", EngineConfig), ("server", ServerConfig)):
        group = parser.add_argument_group(title)
        for name, field in model.model_fields.items():
            _add_flag(group, name, field)
    return parser


class _Parser(argparse.ArgumentParser):
    """Raises instead of ending the process, so that one place prints the last line."""

    def error(self, message: str) -> NoReturn:
        """What argparse calls for every mistake. Raises UsageError."""
        raise UsageError(f"{message}: see --help")


def _add_flag(group: Any, name: str, field: FieldInfo) -> None:
    flag = "--" + name.replace("_", "-")
    kind = _plain_type(field.annotation)
    text = field.description or ""
    if field.default is not None and not field.is_required():
        text += f" (default {field.default})"
    text = text.replace("%", "%%")
    if kind is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
    elif get_origin(kind) is Literal:
        group.add_argument(flag, choices=get_args(kind), help=text)
    else:
        group.add_argument(flag, metavar=getattr(kind, "__name__", "value").upper(), help=text)


def _plain_type(annotation: Any) -> Any:
    """The type of a field, without "or None"."""
    if get_origin(annotation) in (Union, UnionType):
        return next(kind for kind in get_args(annotation) if kind is not type(None))
    return annotation


def _read_toml(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            content = tomllib.load(file)
    except FileNotFoundError as error:
        raise NotFoundError(f"--config {path} does not exist") from error
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--config {path} cannot be read: {error}") from error
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name in values:
            raise UsageError(f"--config {path} sets {name!r} twice, with - and with _")
        values[name] = value
    return values


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
