"""`tpdet certify`: the certificate of an evaluation."""

import argparse
import json
from collections.abc import Iterable, Mapping
from typing import Any

import blake3
import rfc8785

from tpdet.errors import UsageError
from tpdet.launch.host.standard_streams import print_utf8
from tpdet.tools.certify.results import read_results

_DOMAIN = b"tpdet-certificate-1\n"


def certificate(digests: Iterable[str], versions: Mapping[str, str]) -> str:
    """BLAKE3 (hex) over the sorted replay digests and the tasks' versions.

    The same for any order of the answers, any batch, concurrency and tensor-parallel size.
    """
    content: dict[str, Any] = {"replay_digests": sorted(digests), "tasks": dict(versions)}
    return blake3.blake3(_DOMAIN + rfc8785.dumps(content)).hexdigest()


def certify(options: argparse.Namespace) -> int:
    """Print the certificate of results; 1 if it is not the expected one.

    Raises what `read_results` raises, UsageError for a malformed task.
    """
    results = read_results(options.results)
    versions = _tasks(results.versions, options.task)
    digests = [answer.digest for answer in results.answers]
    value = certificate(digests, versions)
    drawn = sum(answer.drawn for answer in results.answers)
    if options.json:
        content = {"object": "certificate", "certificate": value, "answers": len(digests)}
        print_utf8([json.dumps(content | {"tasks": versions, "drawn_seeds": drawn})])
    else:
        print(f"certificate   {value}")
        print(f"answers       {len(digests)}")
        for name in sorted(versions):
            print(f"task          {name}, version {versions[name]}")
        if drawn:
            print(f"drawn seeds   {drawn}: another run draws others, so name a seed in requests")
    if options.expect in (None, value):
        return 0
    print_utf8([f"expected      {options.expect}"])
    return 1


def _tasks(known: Mapping[str, str], texts: Iterable[str]) -> dict[str, str]:
    """The results' versions, and those that were given by hand, where the results have none."""
    versions = dict(known)
    for text in texts:
        name, _, version = text.partition("=")
        if not name or not version or not text.isprintable():
            raise UsageError(f"--task {text!r}: give NAME=VERSION")
        if versions.setdefault(name, version) != version:
            raise UsageError(
                f"--task {text}: the version of {name} is {versions[name]} already: leave one out"
            )
    return versions
