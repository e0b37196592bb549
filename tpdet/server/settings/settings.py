"""The server's settings: flags, the environment, a TOML file, and what they become.

Flags, variables and keys are those of the fields of EngineConfig, ServerConfig and WorldConfig, so
that each name is written once: `max_model_len` is `--max-model-len`, TPDET_MAX_MODEL_LEN and, in
TOML, either spelling.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from tpdet.arguments.command_line import Parser
from tpdet.arguments.vllm_arguments import REASONING_PARSERS, accept_habit
from tpdet.config import EngineConfig, Size, validated
from tpdet.errors import UsageError
from tpdet.requests.body.limits import limits_json
from tpdet.server.settings import flags
from tpdet.server.settings.addresses import is_loopback, split_address
from tpdet.server.settings.sources import (
    PREFIX,
    SettingsSource,
    key_digest,
    parse_text,
    read_key,
    read_toml,
    read_variables,
    unknown_key,
)
from tpdet.text.parsing.family import TOOL_PARSERS


def _refuse_template(value: object) -> None:
    """Raise ValueError for the names of a parser that a checkpoint brings itself."""
    if value in ("hf", "response_template"):
        raise ValueError(
            f"{value!r} would read a checkpoint's own response_template, whose patterns have no "
            "bound on their time: name the model's family, or take auto"
        )


def _own_parser(value: object) -> object:
    """The reasoning parser for another engine's name of one; anything else unchanged."""
    _refuse_template(value)
    return REASONING_PARSERS.get(value, value) if isinstance(value, str) else value


def _own_family(value: object) -> object:
    """The family for vLLM's or SGLang's name of its parser of calls; anything else unchanged."""
    _refuse_template(value)
    family = TOOL_PARSERS.get(value) if isinstance(value, str) else None
    return value if family is None else family.name


class ServerConfig(BaseModel):
    """Settings of a server besides those of its engine. Times in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), strict=True)

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    http_processes: int = Field(
        1,
        ge=1,
        le=8,
        description="processes that speak HTTP, on one port; more pay where one is busy all the "
        "time, at some hundred streams",
    )
    served_model_name: str | None = Field(
        None, min_length=1, max_length=256, description="name in the API; --model's by default"
    )
    reasoning_parser: Annotated[
        Literal["off", "auto", "think", "harmony", "text_think"], BeforeValidator(_own_parser)
    ] = Field(
        "off",
        description="what splits the reasoning from the content of chats; think: a block between "
        "think tags; harmony: gpt-oss's channels; text_think: think tags that are no tokens; auto: "
        "the one whose marks the tokenizer has; vLLM's and SGLang's names (qwen3, glm45, "
        "deepseek_r1, seed_oss, mistral, olmo3, openai_gptoss, gpt-oss) stand for them",
    )
    tool_call_parser: Annotated[
        Literal[
            "off",
            "auto",
            "hermes",
            "qwen3_coder",
            "llama3_json",
            "pythonic",
            "mistral",
            "glm",
            "harmony",
            "granite",
            "phi4_mini",
            "olmo3",
            "seed_oss",
        ],
        BeforeValidator(_own_family),
    ] = Field(
        "off",
        description="what reads the calls of tools in chats; auto: the one whose marks the chat "
        "template has; vLLM's and SGLang's names (qwen25, qwen3_xml, llama3, glm45, glm47, openai, "
        "gpt-oss, phi4_mini_json and others) stand for them",
    )
    api_key_file: str | None = Field(
        None, description="file (mode 0600) with one API key a line; without it all is open"
    )
    admin_key_file: str | None = Field(
        None,
        description="file (mode 0600) with one admin key a line; it opens the control routes "
        "(pauses, weights) on the port to them",
    )
    admin_listen: str | None = Field(
        None,
        description="HOST:PORT of a listener of its own that serves data and control routes to "
        "whoever reaches it, without a key: it bypasses the API keys; loopback only, another "
        "address needs --admin-key-file, which it then asks for, or --admin-insecure",
    )
    admin_insecure: bool = Field(
        False, description="let --admin-listen take an address that others reach, without a key"
    )
    weights_root: str | None = Field(
        None,
        description="directory below which weight updates may come from directories; none may "
        "without it",
    )
    weights_peers: str | None = Field(
        None,
        description="addresses of the senders that weight updates may come from, with commas "
        "between them; none may without it",
    )
    run_secret_file: str | None = Field(
        None,
        description="file (mode 0600) with the run secret, 64 hex digits; for ranks on several "
        "hosts: one host makes its own",
    )
    run_dir: str | None = Field(None, description="directory for ready.json, exit.json and sockets")
    drain_timeout: float = Field(
        20.0, ge=0.0, le=86400.0, description="seconds running requests get after a stop signal"
    )

    canary_interval: float = Field(
        60.0,
        ge=0.0,
        le=86400.0,
        description="seconds after which an idle server answers its canary again, in at most 1 % "
        "of the time; 0 for never",
    )

    answer_cache: str | None = Field(
        None,
        min_length=1,
        description="directory in which answers are kept, to give a request that is asked again "
        "the same bits without computing them; one server's alone",
    )
    answer_cache_bytes: Size = Field(
        1 << 30, ge=1, description="bytes of kept answers, at most; the least recently used leave"
    )

    batch_dir: str | None = Field(
        None,
        min_length=1,
        description="directory of files and batches, which /v1/files and /v1/batches then take; "
        "one server's alone",
    )
    batch_dir_bytes: Size = Field(
        16 << 30, ge=1, description="bytes of the files in it past which no more are taken"
    )

    batch_swing_alarm: float = Field(
        0.0,
        ge=0.0,
        le=100.0,
        description="share by which the mean batch size may change from one window of 10 s to the "
        "next before a warning is logged; 0 for never",
    )

    allow_faults: bool = Field(
        False, description="let TPDET_FAULTS break the server on purpose; for tests"
    )

    audit_dir: str | None = Field(
        None, description="directory that gets a signed receipt of every answer; none without it"
    )
    audit_key: str | None = Field(
        None,
        description="private key that signs them: a file (mode 0600) that tpdet audit keygen made, "
        "or a URI of securesystemslib",
    )
    audit_policy: Literal["required", "best-effort"] = Field(
        "required",
        description="required: an answer whose receipt cannot be made durable is an error (503); "
        "best-effort: it is given, and counted",
    )

    disable_log_stats: bool = Field(False, description="no line of statistics every 10 seconds")
    disable_uvicorn_access_log: bool = Field(False, description="no log line for each request")

    @property
    def admin_address(self) -> tuple[str, int] | None:
        """Host and port of `admin_listen`."""
        return None if self.admin_listen is None else split_address(self.admin_listen)

    @property
    def admin_asks(self) -> bool:
        """Whether the admin listener asks for the admin key, because others reach it."""
        address = self.admin_address
        far = address is not None and not is_loopback(address[0])
        return far and self.admin_key_file is not None and not self.admin_insecure

    @model_validator(mode="after")
    def _refuse_open_control(self) -> "ServerConfig":
        if self.admin_listen is None:
            return self
        try:
            host, _ = split_address(self.admin_listen)
        except ValueError as error:
            raise ValueError(f"{{admin_listen}} {error}") from None
        if not (is_loopback(host) or self.admin_key_file or self.admin_insecure):
            raise ValueError(
                f"{{admin_listen}} {host} can be reached from other machines: listen on 127.0.0.1, "
                "give --admin-key-file, or --admin-insecure if nobody else is in that network"
            )
        return self

    @model_validator(mode="after")
    def _refuse_receipts_that_cannot_be_signed(self) -> "ServerConfig":
        if (self.audit_dir is None) != (self.audit_key is None):
            names = ("dir", "key") if self.audit_dir else ("key", "dir")
            raise ValueError("{{audit_{}}} wants {{audit_{}}} too: give both".format(*names))
        return self

    @model_validator(mode="after")
    def _refuse_closed_weights(self) -> "ServerConfig":
        for name in ("weights_root", "weights_peers"):
            closed = self.admin_listen is None and self.admin_key_file is None
            if getattr(self, name) is not None and closed:
                raise ValueError(
                    f"{{{name}}} is for control routes, and none is open: give --admin-listen or "
                    "--admin-key-file, too"
                )
        if self.weights_peers is not None and not self.senders:
            raise ValueError(
                f"{{weights_peers}} {self.weights_peers!r} names no address: give one such as "
                "127.0.0.1"
            )
        return self

    @property
    def senders(self) -> tuple[str, ...]:
        """The addresses of `weights_peers`."""
        return tuple(filter(None, (self.weights_peers or "").replace(" ", "").split(",")))


class WorldConfig(BaseModel):
    """How many ranks a run has. Under torchrun, srun or mpirun the launcher says, and a file's
    figures are for the planner.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), strict=True)

    tp: int | None = Field(
        None,
        ge=1,
        le=64,
        description="tensor-parallel size: ranks that share the model (default: the tp of --config,"
        " else 1); under torchrun, srun or mpirun it must be the number of ranks started",
    )
    nodes: int = Field(1, ge=1, le=64, description="hosts that the ranks are on, equally many each")

    @model_validator(mode="after")
    def _refuse_ranks_that_cannot_be_shared_out(self) -> "WorldConfig":
        if (self.tp or 1) % self.nodes:
            raise ValueError(f"{{nodes}} {self.nodes} does not divide {{tp}} {self.tp or 1}")
        return self


MODELS = (EngineConfig, ServerConfig, WorldConfig)
SETTINGS = {name: field for model in MODELS for name, field in model.model_fields.items()}
FILE_ONLY = ("nodes",)
FLAG_ONLY = ("allow_faults", "admin_insecure")
"""A stray variable must not be able to break a server, or to open it."""


@dataclass(frozen=True)
class Settings:
    """Everything a rank is started with; `world` is what its sources say of the whole run.

    api_key_digest: SHA-256 (hex) of the API key that the environment holds, if it counts.
    notes: sentences for the log. spelled: where each setting that was given stands.
    """

    engine: EngineConfig
    server: ServerConfig
    world: WorldConfig
    api_key_digest: str | None = field(default=None, repr=False)
    notes: tuple[str, ...] = ()
    spelled: Mapping[str, str] = field(default_factory=dict)

    @property
    def served_name(self) -> str:
        """The model's name in the API."""
        return self.server.served_model_name or self.engine.model

    @property
    def batch_swing_alarm(self) -> float:
        """The alarm's share; 0 where the batch is fixed, so that its size never swings."""
        return 0.0 if self.engine.fixed_batch is not None else self.server.batch_swing_alarm

    def rank_arguments(self) -> list[str]:
        """Flags that give a rank the same engine and server, without a file or the environment."""
        arguments = []
        for config in (self.engine, self.server):
            for name in (name for name in SETTINGS if name in config.model_fields_set):
                flag, value = name.replace("_", "-"), getattr(config, name)
                if isinstance(value, bool):
                    arguments.append(f"--{flag}" if value else f"--no-{flag}")
                elif value is not None:
                    arguments.append(f"--{flag}={value}")
        return arguments

    def check_size(self, size: int) -> None:
        """Raise UsageError if a flag or the environment asks for another number of ranks."""
        where = self.spelled.get("tp", "")
        if self.world.tp not in (None, size) and where.startswith(("--", PREFIX)):
            raise UsageError(
                f"{where} {self.world.tp}, but the launcher started {size} rank{'s' * (size > 1)}: "
                f"leave it out, start {self.world.tp} (torchrun --nproc-per-node), or use tpdet "
                "serve, which starts them itself"
            )


def load_settings(
    arguments: Sequence[str] | None, program: str, environ: Mapping[str, str] | None = None
) -> Settings:
    """Settings from flags, the environment and the TOML file they may name, in this order.

    `--help` and `--print-limits` print and end the process with 0. Raises UsageError for an
    unknown flag or key and for a value that is out of range, NotFoundError without the file.
    """
    environ = os.environ if environ is None else environ
    flags = _read_flags(sys.argv[1:] if arguments is None else list(arguments), program)
    named = {name: field for name, field in SETTINGS.items() if name not in FILE_ONLY}
    variables = read_variables(environ, named, FLAG_ONLY)
    path = flags.values.pop("config", None) or environ.get("TPDET_CONFIG", "").strip()
    file = _read_file(path) if path else SettingsSource()
    key = _key_that_counts(flags, variables, file, environ)
    sources = (file, variables, flags)
    values = {name: value for source in sources for name, value in source.values.items()}
    spelled = {name: word for source in sources for name, word in source.spelled.items()}
    if "model" not in values:
        raise UsageError("no model is given: name a Hugging Face directory with --model")

    def spell(name: str) -> str:
        return spelled.get(name) or (name if name in FILE_ONLY else _flag(name))

    def part(kind: type[BaseModel]) -> dict[str, object]:
        return {name: values[name] for name in kind.model_fields if name in values}

    engine = validated(EngineConfig, part(EngineConfig), spell)
    server = validated(ServerConfig, part(ServerConfig), spell)
    world = validated(WorldConfig, part(WorldConfig), spell)
    if key is None and server.api_key_file is None and not is_loopback(server.host):
        raise UsageError(
            f"{spell('host')} {server.host} can be reached from other machines: give "
            "--api-key-file, or set TPDET_API_KEY, or listen on 127.0.0.1"
        )
    notes = tuple(note for source in reversed(sources) for note in source.notes)
    digest = None if key is None else key_digest(key)
    return Settings(engine, server, world, digest, notes, spelled)


def make_parser(program: str) -> Parser:
    """The command line: a flag for each setting, absent unless given."""
    return flags.make_parser(program, *MODELS, leave_out=FILE_ONLY)


def _read_flags(arguments: Sequence[str], program: str) -> SettingsSource:
    """The flags on the command line; `--print-limits` prints the limits and ends the process."""
    given = vars(make_parser(program).parse_args(arguments))
    if given.pop("print_limits", False):
        print(limits_json())
        sys.exit(0)
    found = SettingsSource()
    positional = given.pop("positional_model", None)
    if positional is not None and given.setdefault("model", positional) != positional:
        raise UsageError(f"two models are given, {positional} and {given['model']}: give one")
    for name, value in given.items():
        if name.startswith(flags.HABIT):
            flag = "--" + ("no-" if value is False else "") + name.removeprefix(flags.HABIT)
            note = accept_habit(name.removeprefix(flags.HABIT), value, flag)
            found.notes += [note] if note else []
            continue
        is_text = isinstance(value, str) and name in SETTINGS
        found.values[name] = parse_text(SETTINGS[name], value) if is_text else value
        found.spelled[name] = "--no-" + _flag(name)[2:] if value is False else _flag(name)
    return found


def _read_file(path: str) -> SettingsSource:
    """The file's settings; arguments of vLLM in it are noted. Raises UsageError for other keys."""
    found = read_toml(path)
    for name in [name for name in found.values if name not in SETTINGS]:
        note = accept_habit(name, found.values.pop(name), found.spelled[name])
        if note is None:
            raise unknown_key(found.spelled[name], name, SETTINGS)
        found.notes.append(note)
    return found


def _key_that_counts(
    flags: SettingsSource,
    variables: SettingsSource,
    file: SettingsSource,
    environ: Mapping[str, str],
) -> str | None:
    """The API key of the environment, unless the command line names a file of keys."""
    found = read_key(environ)
    if found is None or "api_key_file" in flags.values:
        return None
    key, variable = found
    if "api_key_file" in variables.values:
        raise UsageError(f"{variable} and {variables.spelled['api_key_file']} are set: unset one")
    file.values.pop("api_key_file", None)
    return key


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
