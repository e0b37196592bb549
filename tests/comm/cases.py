"""Cases every world must pass; each takes a world and is run by all its ranks in this order."""

import torch

from tests.lib.bits import assert_same_bits
from tpdet.comm.exchange.fold import TWO_SHOT_ROWS, GatherExchange
from tpdet.comm.world.world import MAX_MESSAGE_BYTES, World
from tpdet.errors import IntegrityError
from tpdet.kernels import ops, order
from tpdet.kernels.partial_sums import PartialSums, relative_roots

# Quiet and signalling NaNs with payloads, both zeros, subnormals, infinities.
FLOAT32_BITS = [0x7FC00123, 0x7F800001, -0x3EDCC, 0, -0x80000000, 1, 0x7F800000, 0x3F800000]
FLOAT16_BITS = [0x7E01, 0x7C01, -0x1FF, 0, -0x8000, 1, 0x7C00, 0x3C00]


def special_values(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """[2, 4] of bit patterns that arithmetic or a conversion would not leave alone."""
    if dtype == torch.int64:
        return torch.tensor([[-(2**63), 2**63 - 1, rank, -1], [0, 1, 2**53 + 1, -rank]])
    if dtype == torch.float32:
        bits = torch.tensor(FLOAT32_BITS, dtype=torch.int32)
    else:
        bits = torch.tensor(FLOAT16_BITS, dtype=torch.int16)
    return bits.roll(rank).view(dtype).reshape(2, 4)


def gathers_every_bit(world: World) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        gathered = world.all_gather(special_values(world.rank, dtype))
        assert gathered.shape == (world.size, 2, 4) and gathered.dtype == dtype
        for rank in range(world.size):
            assert_same_bits(gathered[rank], special_values(rank, dtype))


def gathers_what_is_not_contiguous(world: World) -> None:
    matrix = torch.arange(12.0).reshape(3, 4) + world.rank
    gathered = world.all_gather(matrix.t())
    for rank in range(world.size):
        assert_same_bits(gathered[rank], (torch.arange(12.0).reshape(3, 4) + rank).t())


def gathers_scalars_and_nothing(world: World) -> None:
    assert world.all_gather(torch.tensor(float(world.rank))).tolist() == list(range(world.size))
    assert world.all_gather(torch.zeros(0, 5)).shape == (world.size, 0, 5)


def leaves_the_gathered_alone_afterwards(world: World) -> None:
    x = torch.full((1000,), float(world.rank))
    first = world.all_gather(x)
    x.fill_(-1.0)
    world.all_gather(x)
    assert first[:, 0].tolist() == list(range(world.size))


def sends_every_block_to_its_rank(world: World) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        blocks = torch.stack([special_values(world.rank + 2 * r, dtype) for r in range(world.size)])
        received = world.all_to_all(blocks)
        assert received.shape == blocks.shape and received.dtype == dtype
        for sender in range(world.size):
            assert_same_bits(received[sender], special_values(sender + 2 * world.rank, dtype))
    assert world.all_to_all(torch.zeros(world.size, 0, 3)).shape == (world.size, 0, 3)


def folds_the_bits_of_one_rank(world: World) -> None:
    """One-shot and two-shot, rows that do not divide, and fewer rows than ranks."""
    for name in order.FOLD_ORDERS:
        plan = order.fold_plan(name, 8, world.size)
        for rows in (1, 3, 64, 255, 256, 257):
            generator = torch.Generator().manual_seed(rows)
            leaves = torch.randn(8, rows, 5, generator=generator)
            whole = order.evaluate(order.fold_tree(name, 8), leaves.__getitem__, torch.add)
            mine = leaves.view(world.size, -1, rows, 5)[world.rank]
            sums = PartialSums(mine, relative_roots(plan.roots[world.rank]))
            for limit in (1, TWO_SHOT_ROWS, 10_000):
                everyones = GatherExchange(plan, world, limit).everyones(sums)
                found = ops.fold_roots(everyones, 1)[0]
                assert_same_bits(found, whole, f"{name}, {rows} rows, two-shot from {limit}")


def broadcasts_any_length(world: World) -> None:
    for length in (0, 1, 4075, 4076, 4077, 300_000):
        sent = bytes(i * 7 % 251 for i in range(length))
        assert world.broadcast_bytes(sent if world.rank == 0 else None) == sent


def gathers_bytes_of_any_length(world: World) -> None:
    for base in (0, 32, 1003, 1004, 50_000):
        lengths = [base + rank for rank in range(world.size)]
        gathered = world.gather_bytes(bytes([world.rank]) * lengths[world.rank])
        assert gathered == [bytes([rank]) * lengths[rank] for rank in range(world.size)]


def refuses_a_message_over_the_cap(world: World) -> None:
    try:
        world.gather_bytes(bytes(MAX_MESSAGE_BYTES + 1))
    except IntegrityError as error:
        assert str(MAX_MESSAGE_BYTES) in str(error)
    else:
        raise AssertionError("a message over the cap was sent")


def survives_a_refused_message(world: World) -> None:
    assert world.gather_bytes(b"on") == [b"on"] * world.size
    world.barrier()


def answers_zeros_without_peers(world: World) -> None:
    blocks = torch.ones(world.size, 3, dtype=torch.bfloat16)
    with world.without_peers():
        for _ in range(world.rank):  # the others do something else
            gathered, received = world.all_gather(blocks[0]), world.all_to_all(blocks)
            assert gathered.shape == received.shape == blocks.shape
            assert gathered.dtype == received.dtype == blocks.dtype
            if world.size > 1:
                assert not gathered.any() and not received.any()
    assert world.all_gather(blocks[0]).all() and world.all_to_all(blocks).all()


CASES = (
    answers_zeros_without_peers,
    gathers_every_bit,
    gathers_what_is_not_contiguous,
    gathers_scalars_and_nothing,
    leaves_the_gathered_alone_afterwards,
    sends_every_block_to_its_rank,
    folds_the_bits_of_one_rank,
    broadcasts_any_length,
    gathers_bytes_of_any_length,
    refuses_a_message_over_the_cap,
    survives_a_refused_message,
)
