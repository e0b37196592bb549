"""What the GPU scripts share: drawn data, equality of bytes, checks that do not stop the run."""

import sys
import time
import traceback

import torch

failures: list[str] = []


def draw(*shape, dtype=torch.bfloat16, kind="normal", seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(*shape, generator=generator, device="cuda")
    if kind == "heavy":
        x = x * torch.randn(*shape, generator=generator, device="cuda").mul(2).exp()
    if kind == "cancelling":
        x[..., 1::2] = -x[..., 0::2] * (1 + 1e-3)
    if kind == "tiny":
        x = x * 1e-20
    return x.to(dtype)


def same(left, right, what):
    """Raise unless two tensors have the same bytes; names the first difference."""
    if left.shape != right.shape or left.dtype != right.dtype:
        raise AssertionError(f"{what}: {left.shape} {left.dtype}, {right.shape} {right.dtype}")
    kind = {2: torch.int16, 4: torch.int32}[left.element_size()]
    wrong = left.contiguous().view(kind) != right.contiguous().view(kind)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} differ, first at {at}: "
            f"{left[at].item()!r} against {right[at].item()!r}"
        )


def attempt(name, check, *arguments):
    """Run one check, report it, go on."""
    start = time.time()
    try:
        note = check(*arguments)
        torch.cuda.synchronize()
        print(f"ok    {name} {note or ''} ({time.time() - start:.1f} s)", flush=True)
    except Exception as error:
        failures.append(name)
        lines = traceback.format_exc().splitlines()
        where = [line.strip() for line in lines if "File" in line][-1]
        print(f"FAIL  {name}: {str(error)[:600]} | {where}", flush=True)
        try:
            torch.cuda.synchronize()
        except Exception:
            print("the device is lost", flush=True)
            sys.exit(1)
