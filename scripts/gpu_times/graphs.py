"""Times of GPU work inside CUDA graphs, interleaved so that clocks and neighbours hit all alike."""

import torch


def interleaved_medians(runs, inputs, repeats=9):
    """Median microseconds a call, for each of `runs`, over graphs that call it on every input."""
    graphs = [_graph(run, inputs) for run in runs]
    taken = [[] for _ in runs]
    for _ in range(repeats):
        for graph, times in zip(graphs, taken, strict=True):
            times.append(replay_time(graph))
    return [sorted(times)[repeats // 2] / len(inputs) * 1e3 for times in taken]


def _graph(run, inputs):
    run(inputs[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for item in inputs:
            run(item)
    graph.replay()
    return graph


def replay_time(graph, meet=lambda: None):
    """Milliseconds of a replay, begun after `meet`."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    meet()
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def slowest_medians(carrier, runs, x, repeats):
    """Name -> median microseconds a call of the slowest rank, replays of all graphs in turn.

    runs: name -> a function of x that returns the next x; `repeats` calls are a graph.
    """
    world = carrier.world
    graphs = {name: _chain(world, run, x, repeats) for name, run in runs.items()}
    taken = {name: [] for name in runs}

    def meet():
        world.barrier()
        carrier.all_gather(x[:1])  # the GPUs leave it together

    for _ in range(7):
        for name, graph in graphs.items():
            taken[name].append(replay_time(graph, meet) / repeats * 1e3)
    medians = torch.tensor([sorted(times)[3] for times in taken.values()], device="cuda")
    slowest = world.all_gather(medians).amax(0).tolist()
    return dict(zip(taken, slowest, strict=True))


def repeated(work):
    """Work whose calls do not hang on each other, as a run of `slowest_medians`."""

    def run(x):
        work()
        return x

    return run


def _chain(world, run, x, repeats):
    run(x)
    torch.cuda.synchronize()
    world.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(repeats):
            x = run(x)
    graph.replay()
    torch.cuda.synchronize()
    return graph
