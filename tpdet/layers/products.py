"""What a layer declares of its matrix products, as this rank holds them.

The one table of a model's products (`tpdet/models/products.py`) is made of these; shape table,
tuner, planner and benchmarks read it.
"""

from dataclasses import dataclass

from tpdet.kernels.inputs.product import Product


@dataclass(frozen=True)
class LayerProduct:
    """A product by its name in the layer, such as "qkv".

    biased: whether a bias [n] is added; written: values a row that the kernel after it makes of its
    outputs, 0 where an exchange follows. experts: as many such weights lie here, and a row takes
    `chosen` of all ranks'; 0 for a product that every row takes. joined: another kernel multiplies
    its dense weight on the way, by tiles of its own.
    """

    name: str
    product: Product
    biased: bool = False
    written: int = 0
    experts: int = 0
    chosen: int = 0
    joined: bool = False

    @property
    def kind(self) -> str:
        """One of `tpdet.kernels.inputs.product.KINDS`."""
        return self.product.kind

    @property
    def n(self) -> int:
        """Weight rows of this rank."""
        return self.product.n

    @property
    def k(self) -> int:
        """Inputs of this rank, of all its leaves."""
        return sum(self.product.chains)
