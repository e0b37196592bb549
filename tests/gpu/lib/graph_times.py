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
