"""What the GPU scripts share: drawn data, equality of bytes, poison, checks that go on."""

import sys
import time
import traceback
from contextlib import contextmanager

import torch

failures: list[str] = []
_GUARD = 1 << 16  # values on either side of a poisoned tensor
_POISONED_BYTES = 2 << 30  # held before their guards are looked at


def draw(*shape, dtype=torch.bfloat16, kind="normal", seed=0):
    """Random data on the GPU: normal, heavy (tailed), cancelling (in pairs) or tiny."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(*shape, generator=generator, device="cuda")
    if kind == "heavy":
        x = x * torch.randn(*shape, generator=generator, device="cuda").mul(2).exp()
        if dtype == torch.float16:
            x = x.clamp(-6e4, 6e4)
    if kind == "cancelling":
        x[..., 1::2] = -x[..., 0::2] * (1 + 1e-3)
    if kind == "tiny":
        x = x * (1e-5 if dtype == torch.float16 else 1e-20)
    return x.to(dtype)


def same(left, right, what):
    """Raise unless two tensors have the same bytes; names the first difference."""
    if left.shape != right.shape or left.dtype != right.dtype:
        raise AssertionError(f"{what}: {left.shape} {left.dtype}, {right.shape} {right.dtype}")
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[left.element_size()]
    wrong = left.contiguous().view(kind) != right.contiguous().view(kind)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} differ, first at {at}: "
            f"{left[at].item()!r} against {right[at].item()!r}"
        )


class Differences:
    """What is wrong in a check that goes on to its end, and tells it then."""

    def __init__(self):
        self._tried, self._wrong = 0, []

    def keep(self, check, *arguments):
        """Check one thing; what is raised is kept."""
        self._tried += 1
        try:
            check(*arguments)
        except Exception as error:
            torch.cuda.synchronize()  # a lost device ends the check
            self._wrong.append(str(error)[:150])

    def finish(self):
        """How many things were checked. Raises AssertionError where any was wrong."""
        if self._wrong:
            said = " || ".join(dict.fromkeys(self._wrong))
            raise AssertionError(f"{len(self._wrong)} of {self._tried}: {said}")
        return f"{self._tried} compared"


def gives(run, wanted, what):
    """`same` of what a function returns."""
    same(run(), wanted, what)


def surrounded(x):
    """A copy of x (contiguous) with NaN before and behind it in memory."""
    flat = torch.full((x.numel() + 2 * _GUARD,), torch.nan, dtype=x.dtype, device=x.device)
    inside = flat[_GUARD:-_GUARD].view(x.shape)
    inside.copy_(x)
    return inside


@contextmanager
def poisoned_workspaces(kind="cuda"):
    """`torch.empty` on a device of this kind gives NaN with NaN around it, which must stay.

    Outputs and workspaces of every kernel come from it. Not for graphs: they hold memory back.
    """
    plain, plain_like, made, held = torch.empty, torch.empty_like, [], 0

    def look():
        for flat in made:
            for guard in (flat[:_GUARD], flat[-_GUARD:]):
                if not guard.isnan().all():
                    raise AssertionError("a kernel wrote outside its output or workspace")
        made.clear()

    def empty(*size, dtype=None, device=None, **options):
        nonlocal held
        dtype = dtype or torch.get_default_dtype()
        here = torch.device(device or "cpu").type == kind
        if options or not here or not dtype.is_floating_point:
            return plain(*size, dtype=dtype, device=device, **options)
        shape = size if isinstance(size[0], int) else tuple(size[0])
        x = surrounded(torch.full(shape, torch.nan, dtype=dtype, device=device))
        made.append(x._base)
        held += x._base.nbytes
        if held > _POISONED_BYTES:
            look()
            held = 0
        return x

    def empty_like(x, dtype=None, device=None, **options):
        return empty(x.shape, dtype=dtype or x.dtype, device=device or x.device, **options)

    torch.empty, torch.empty_like = empty, empty_like
    try:
        yield
        look()
    finally:
        torch.empty, torch.empty_like = plain, plain_like


def outcome(name, check, *arguments):
    """Run one check, print how it went: a row of a results file.

    What the check returns goes into the row: values by name, or a note.
    """
    start, row = time.time(), {"case": name, "equal": True}
    try:
        found = check(*arguments) or {}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        row |= found if isinstance(found, dict) else {"note": str(found).strip()}
        said = found if isinstance(found, str) else _in_words(found)
    except Exception as error:
        lines = traceback.format_exc().splitlines()
        where = [line.strip() for line in lines if "File" in line][-1]
        row |= {"equal": False, "error": f"{type(error).__name__}: {str(error)[:600]}"}
        said = f"{str(error)[:600]} | {where}"
    row["seconds"] = round(time.time() - start, 1)
    word = "ok   " if row["equal"] else "FAIL "
    print(f"{word} {name}: {said} ({row['seconds']} s)", flush=True)
    return row


def _in_words(found):
    each = (f"{k} {v:.2e}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items())
    return ", ".join(each)


def ended():
    """The exit status of a program of attempts, 1 where one failed; names what did."""
    print(f"failed: {', '.join(failures) or 'nothing'}", flush=True)
    return 1 if failures else 0


def attempt(name, check, *arguments):
    """Run one check, report it, go on; a lost device ends the script."""
    row = outcome(name, check, *arguments)
    if not row["equal"]:
        failures.append(name)
        try:
            torch.cuda.synchronize()
        except Exception:
            print("the device is lost", flush=True)
            sys.exit(1)
    return row
