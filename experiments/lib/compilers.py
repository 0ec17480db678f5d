"""Descriptions of accelerators, and the compilers that compile for them on any CPU.

libtpu compiles for TPUs, XLA's CUDA plugin for GPUs; neither needs a device or a driver. They report the
memory, collectives and kernels of the program that would run, but no times.
"""

import dataclasses
import importlib.util
import os
import pathlib
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

# TPU chips: https://cloud.google.com/tpu/docs/v4 (and v5e, v5p, v6e). GPUs: NVIDIA's data sheets of H100 and
# H200 (SXM: memory, bandwidth, clock). Other values are those of compute capability 9.0 in the CUDA C++
# programming guide, and in XLA's specifications (xla/backends/gpu/target_config/specs).
_GPU = """
gpu_device_info {{
  cuda_compute_capability {{ major: 9 minor: 0 }}
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  memory_bandwidth: {bandwidth}
  device_memory_size: {memory}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
device_description_str: "{name}"
"""


@dataclasses.dataclass(frozen=True)
class Slice:
    """Devices that one program runs on.

    Attributes:
      platform: "tpu" or "cuda".
      topology: its name for the compiler.
      num_devices: number of devices that a program sees.
      memory: bytes per device.
      bandwidth: bytes per second per device.
      kind: part of the `device_kind` that JAX reports.
      options: arguments of `topologies.get_topology_desc`.
    """

    platform: str
    topology: str
    num_devices: int
    memory: int
    bandwidth: float
    kind: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def usable(self) -> int:
        """Bytes per device for a program: all but 256 MiB of a TPU, 3/4 of a GPU (JAX's default)."""
        return self.memory - (256 << 20) if self.platform == "tpu" else self.memory * 3 // 4


def _gpu(name: str, memory: int, bandwidth: float) -> Slice:
    config = _GPU.format(name=f"NVIDIA {name}", memory=memory, bandwidth=int(bandwidth))
    options = dict(topology="1x1x1", target_config=config)
    return Slice("cuda", name.lower(), 1, memory, bandwidth, name, options)


# A v4 chip pairs its two cores ("megacore"), so a v4-8 has four devices.
SLICES = {
    "v4-8": Slice("tpu", "v4:2x2x1", 4, 32 << 30, 1.228e12, "TPU v4", dict(chip_config_name="megacore")),
    "v5e-1": Slice(
        "tpu", "v5e:1x1", 1, 16 << 30, 0.819e12, "TPU v5 lite", dict(chips_per_host_bounds=(1, 1, 1))
    ),
    "v5e-8": Slice("tpu", "v5e:2x4", 8, 16 << 30, 0.819e12, "TPU v5 lite"),
    "v5p-8": Slice("tpu", "v5p:2x2x1", 4, 95 << 30, 2.765e12, "TPU v5p"),
    "v6e-8": Slice("tpu", "v6e:2x4", 8, 32 << 30, 1.64e12, "TPU v6"),
    "h100": _gpu("H100", 80 * 10**9, 3.35e12),
    "h200": _gpu("H200", 141 * 10**9, 4.8e12),
}


def prepare(platforms: set[str]) -> None:
    """Sets up this process to compile for `platforms`; call it before any other use of JAX.

    Raises:
      ValueError: a compiler is not installed.
    """
    if "tpu" in platforms:
        _needs("libtpu", "TPUs", "compile-tpu")
    if "cuda" in platforms:
        _needs("jax_cuda13_plugin", "GPUs", "compile-cuda")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # no device here could load the programs
    if "tpu" in platforms:
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # otherwise it queries the metadata server
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # otherwise a second process fails at a lock
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")  # these two only silence warnings
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    if "cuda" in platforms:
        flags = f"--xla_gpu_cuda_data_dir={_cuda_tools()} --xla_gpu_autotune_level=0"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"


def _needs(package: str, devices: str, extra: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f"compiling for {devices} needs the package {package}, which is not installed; run: "
            f'pip install -e ".[{extra}]"'
        )


def _cuda_tools() -> pathlib.Path:
    """Returns the folder with ptxas and libdevice, which the extra `compile-cuda` installs."""
    found = importlib.util.find_spec("nvidia")
    for folder in [] if found is None else found.submodule_search_locations or []:
        tools = pathlib.Path(folder) / "cu13"
        if (tools / "bin" / "ptxas").exists() and (tools / "nvvm" / "libdevice").exists():
            return tools
    raise ValueError(
        "compiling for GPUs needs ptxas and libdevice (nvidia-cuda-nvcc, nvidia-nvvm), which are "
        'not installed; run: pip install -e ".[compile-cuda]"'
    )


def make_mesh(devices: Slice, num_data: int, num_model: int) -> Mesh:
    """Returns a mesh over devices that need not be here.

    Raises:
      ValueError: the mesh has more devices than the slice.
    """
    if num_data * num_model > devices.num_devices:
        raise ValueError(
            f"`--mesh` must have at most {devices.num_devices} devices for {devices.topology}, got "
            f"{num_data}x{num_model}"
        )
    found = topologies.get_topology_desc(
        platform=devices.platform, topology_name=devices.topology, **devices.options
    )
    grid = np.array(found.devices[: num_data * num_model]).reshape(num_data, num_model)
    return Mesh(grid, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
