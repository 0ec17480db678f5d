"""The flag for the compute dtype, shared by the experiments that have one."""

from absl import flags

from specjax.models import convert

_DTYPE = flags.DEFINE_enum(
    "dtype", None, convert.DTYPES, "Compute dtype; default float32 on CPU, bfloat16 elsewhere."
)


def dtype() -> str | None:
    """--dtype."""
    return _DTYPE.value
