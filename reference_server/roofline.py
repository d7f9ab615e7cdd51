"""What a machine can do at most: `ceilings.measure` fills it in, and the question `step_work` judges steps by it."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured rates, a second. Reading and writing KV share one."""

    flops_per_s: float
    weight_bytes_per_s: float
    kv_bytes_per_s: float
    transfer_bytes_per_s: float

    def record_fields(self) -> dict[str, float]:
        """Under the names of the journal's `engine` record."""
        return {f"ceiling_{name}": value for name, value in asdict(self).items()}
