"""Settings from outside the command line: a TOML file and TPDET_ variables.

A setting `max_model_len` is `max_model_len` or `max-model-len` in a file, and TPDET_MAX_MODEL_LEN
in the environment. Numbers in a file are numbers. Values in the environment are text, parsed as on
the command line.
"""

import hashlib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from tpdet.arguments.suggestions import did_you_mean, nearest
from tpdet.errors import NotFoundError, UsageError
from tpdet.launch.host.regular_file import NotRegularError, open_regular
from tpdet.launch.life.run_secret import SECRET_VARIABLE

PREFIX = "TPDET_"
KEY_VARIABLES = ("TPDET_API_KEY", "VLLM_API_KEY")
"""Either holds one API key."""
SECRET_VARIABLES = (*KEY_VARIABLES, SECRET_VARIABLE)
OTHER_VARIABLES = frozenset(
    {
        *SECRET_VARIABLES, "TPDET_CONFIG", "TPDET_FAULTS", "TPDET_IMAGE", "TPDET_NODE",
        "TPDET_PYTHON", "TPDET_RANKS_PER_NODE", "TPDET_SECRET_FOLDER", "TPDET_SESSION",
        "TPDET_START", "TPDET_STORE", "TPDET_URL",
    }
)  # fmt: skip
"""Variables that are no setting of a server: secrets, what launchers set, the clients' address."""
_KUBERNETES = re.compile(r"TPDET_(\w+_)?(SERVICE_(HOST|PORT\w*)|PORT_\d+_(TCP|UDP|SCTP)\w*)")
"""What Kubernetes sets in every pod beside a service named tpdet; TPDET_PORT=tcp://... too."""
ALIASES = {"tensor_parallel_size": "tp"}
"""Other names of settings, in files and in the environment."""
_KEY = re.compile(r"[!-~]+")
_MAX_TOML_BYTES = 1 << 20


@dataclass
class SettingsSource:
    """Values by setting, how each name is spelled there, and sentences for the log."""

    values: dict[str, Any] = field(default_factory=dict)
    spelled: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_variables(
    environ: Mapping[str, str], fields: Mapping[str, FieldInfo], not_read: Iterable[str] = ()
) -> SettingsSource:
    """The settings among `environ`; an empty variable counts as unset.

    Unknown TPDET_ names are noted with the nearest known one. Raises UsageError for a setting that
    may only stand on the command line (`not_read`).
    """
    found = SettingsSource()
    known = {PREFIX + name.upper(): name for name in fields}
    known |= {PREFIX + other.upper(): name for other, name in ALIASES.items() if name in fields}
    for variable in sorted(name for name in environ if name.startswith(PREFIX)):
        text = environ[variable].strip()
        if not text or _is_kubernetes(variable, text) or variable in OTHER_VARIABLES:
            continue
        name = known.get(variable)
        if name is None:
            if not variable.startswith("TPDET_TEST"):
                names = [other.removeprefix(PREFIX) for other in (*known, *OTHER_VARIABLES)]
                near = nearest(variable.removeprefix(PREFIX), names)
                found.notes.append(
                    f"{variable} in the environment is no setting"
                    + (f": did you mean {PREFIX}{near}?" if near else ": unset it")
                )
        elif name in not_read:
            raise UsageError(f"{variable} does not count: give --{name.replace('_', '-')}")
        else:
            if name in found.values:
                raise UsageError(f"{found.spelled[name]} and {variable} are set: unset one")
            found.values[name] = parse_text(fields[name], text)
            found.spelled[name] = variable
    return found


def read_toml(path: str) -> SettingsSource:
    """The file's keys, `-` as `_`. Raises NotFoundError, or UsageError for what is no TOML."""
    try:
        with open_regular(path) as file:
            content = tomllib.loads(file.read(_MAX_TOML_BYTES).decode())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFoundError(f"--config {path} does not exist: name a TOML file") from error
    except NotRegularError as error:
        raise UsageError(f"--config {path}: {error.strerror}: name a TOML file") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"--config {path} cannot be read ({error}): name a TOML file") from error
    found = SettingsSource()
    for key, value in content.items():
        name = key.replace("-", "_")
        name = ALIASES.get(name, name)
        if name in found.values:
            raise UsageError(f"--config {path} sets {found.spelled[name]!r} and {key!r}: leave one")
        if isinstance(value, dict):
            raise UsageError(f"--config {path}: settings stand without a section such as [{key}]")
        found.values[name] = value
        found.spelled[name] = key
    found.spelled = {name: f"{key} in {path}" for name, key in found.spelled.items()}
    return found


def parse_text(setting: FieldInfo, text: str) -> Any:
    """Text of the command line or the environment as the setting's type; as it is if it is none.

    What is wrong with a value is said where the values of all sources are checked.
    """
    kind = plain_type(setting.annotation)
    lowered = text.strip().lower()
    if kind is bool:
        words = {"true": True, "1": True, "yes": True, "on": True}
        return (words | dict.fromkeys(("false", "0", "no", "off"), False)).get(lowered, text)
    if kind is int and re.fullmatch(r"[+-]?[0-9]{1,30}", lowered, re.ASCII):
        return int(lowered)
    if kind is float:
        try:
            return float(lowered)
        except ValueError:
            return text
    return text


def plain_type(annotation: Any) -> Any:
    """The type of a setting, without "or None" and other annotations."""
    if get_origin(annotation) in (Union, UnionType):
        annotation = next(kind for kind in get_args(annotation) if kind is not type(None))
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def read_key(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """The API key in the environment and its variable's name; None if there is none.

    Raises UsageError for two different ones, and for one that cannot stand in a header.
    """
    given = {name: environ[name].strip() for name in KEY_VARIABLES if environ.get(name, "").strip()}
    if not given:
        return None
    if len(set(given.values())) > 1:
        raise UsageError(f"{' and '.join(given)} hold different keys: unset one")
    variable, key = next(iter(given.items()))
    if not _KEY.fullmatch(key):
        raise UsageError(f"{variable} is not printable ASCII without blanks: set another")
    return key, variable


def key_digest(key: str) -> str:
    """SHA-256 of an API key, in hex."""
    return hashlib.sha256(key.encode()).hexdigest()


def forget_settings(environ: MutableMapping[str, str] | None = None) -> None:
    """Take settings, unknown TPDET_ names and API keys out of the environment, so that no child
    reads, notes or shows them again. What is no setting of a server stays.
    """
    environ = os.environ if environ is None else environ
    kept = OTHER_VARIABLES - {*KEY_VARIABLES, "TPDET_CONFIG"}
    for variable in [name for name in environ if name.startswith(PREFIX)]:
        if variable not in kept and not variable.startswith("TPDET_TEST"):
            environ.pop(variable)
    for variable in KEY_VARIABLES:
        environ.pop(variable, None)


def unknown_key(spelled: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for a key of a file that is no setting."""
    return UsageError(f"unknown key {spelled}{did_you_mean(name, known)}")


def _is_kubernetes(variable: str, text: str) -> bool:
    if variable.endswith("_PORT") and "://" in text:
        return True
    return _KUBERNETES.fullmatch(variable) is not None
