"""The TPU generations that a plan can be made for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """One chip, as its maker describes it.

    Attributes:
        hbm_bytes: of main memory, as far as a program may have it: its compiler keeps 0.25 GiB and more for itself.
        dimensions: of the tori that a slice is cut from.
        flops: bfloat16 floating-point operations a second.
        hbm_bandwidth: bytes a second to and from main memory.
        ici_bandwidth: bytes a second between chips, all links of a chip together.

    Source:
        Google Cloud's documentation of TPU v5e, v5p and v6e (system architecture).
    """

    hbm_bytes: float
    dimensions: int
    flops: float
    hbm_bandwidth: float
    ici_bandwidth: float


CHIPS = {
    "v5e": Chip(15.75 * 2**30, 2, 197e12, 819e9, 200e9),
    "v5p": Chip(95.73 * 2**30, 3, 459e12, 2765e9, 600e9),
    "v6e": Chip(31.25 * 2**30, 2, 918e12, 1640e9, 448e9),
}
