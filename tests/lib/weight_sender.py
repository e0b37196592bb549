"""A sender of weights in the tests' own process, and what an update over it asks for."""

from safetensors.torch import load_file

from tpdet.control.weight_orders import TensorsInfo
from tpdet.errors import WeightUpdateError


class LocalSender:
    """Hands tensors to every rank of a world of threads; `tensors` may change between updates.

    dies_before: the number of tensors after which the sender is gone; None if it lives.
    """

    def __init__(self, tensors=None, dies_before=None) -> None:
        self.tensors = tensors
        self.dies_before = dies_before
        self.closed = 0

    def receive(self, tensors, info, take, tick) -> None:
        """As `WeightCarrier.receive`."""
        for number, tensor in enumerate(tensors):
            if number == self.dies_before:
                raise WeightUpdateError("the sender is gone", 502)
            take({tensor.name: self.tensors[tensor.name]})

    def close(self) -> None:
        """As `WeightCarrier.close`."""
        self.closed += 1

    def joined(self, engine) -> None:
        """Let an engine's rank have this sender; a `change` of the engine harness."""
        engine.runner.weights.carrier = self


def tensors_of(model):
    """The tensors of a model's directory, by name."""
    return load_file(model / "model.safetensors")


def info_of(tensors, names=None) -> TensorsInfo:
    """What announces some of the tensors, in the order of their names' list."""
    names = [*tensors] if names is None else names
    chosen = [tensors[name] for name in names]
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in chosen]
    return TensorsInfo(
        names=names, dtype_names=dtypes, shapes=[list(tensor.shape) for tensor in chosen]
    )


def update(engine, sender, tensors, names=None, version=None) -> str:
    """A whole update; the digest of the new weights."""
    sender.tensors = tensors
    sender.joined(engine)
    engine.weights.start_update()
    engine.weights.update(info_of(tensors, names))
    return engine.weights.finish_update(version)
