"""GPUs, from nvidia-smi and sysfs."""

from __future__ import annotations

from workers.preflight.facts import Gpu
from workers.preflight.gather.tree import Tree, whole
from workers.preflight.runner import Runner

_TIMEOUT_S = 15.0
"""Without persistence mode the driver initialises every GPU first."""

QUERY = (
    "nvidia-smi",
    "--query-gpu=index,name,uuid,memory.total,memory.used,driver_version,pci.bus_id",
    "--format=csv,noheader,nounits",
)


def gpus(tree: Tree, runner: Runner) -> tuple[tuple[Gpu, ...], str | None]:
    """The GPUs, or why there is no list."""
    output = runner.run(QUERY, timeout_s=_TIMEOUT_S)
    if output is None:
        return (), f"nvidia-smi is not installed, or did not answer within {_TIMEOUT_S:g} s"
    if output.status != 0:
        return (), f"nvidia-smi: {' '.join(output.text.split())[:200] or f'exit status {output.status}'}"
    found = []
    for line in output.text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 7:
            continue
        index, total_mib, used_mib = whole(cells[0]), whole(cells[3]), whole(cells[4])
        if index is None or not total_mib or used_mib is None:
            continue  # a GPU without a memory of its own is none that vLLM runs on
        # 00000000:1B:00.0 there, 0000:1b:00.0 in sysfs
        numa = tree.number(f"sys/bus/pci/devices/{cells[6].lower()[-12:]}/numa_node")
        found.append(
            Gpu(
                index=index,
                name=cells[1],
                uuid=cells[2],
                total_bytes=total_mib << 20,
                used_bytes=used_mib << 20,
                driver=cells[5],
                numa_node=numa if numa is not None and numa >= 0 else None,
            )
        )
    return tuple(found), None if found else "nvidia-smi shows no GPU"
