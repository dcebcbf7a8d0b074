"""A real kube-apiserver and etcd on this machine, in a folder of their own: no kubelet, no controllers; tests play both."""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from extproc.discovery.kubernetes.access import Access
from workers.process import Child
from workers.ready import free_ports

ADMIN = "admin-token"
FILTER = "filter-token"
READY_S = 60.0

Object = dict[str, Any]


class Cluster:
    """Use as an async context manager."""

    def __init__(self, binaries: Path) -> None:
        """``binaries``: the folder with etcd and kube-apiserver."""
        self._binaries = binaries
        self.directory = Path(tempfile.mkdtemp(prefix="baton-kube-"))
        self._etcd_port, self._peer_port, self._port = free_ports(3)
        self.url = f"https://127.0.0.1:{self._port}"

    async def __aenter__(self) -> Cluster:
        async with AsyncExitStack() as parts:
            parts.callback(shutil.rmtree, self.directory, ignore_errors=True)
            self._write_files()
            self._etcd = Child("etcd", self._etcd_command(), log=self.directory / "etcd.log", grace_s=10.0)
            parts.push_async_callback(asyncio.to_thread, self._etcd.stop)
            self.start()
            parts.push_async_callback(self.stop)
            self._http = await parts.enter_async_context(
                aiohttp.ClientSession(
                    headers={"authorization": f"Bearer {ADMIN}"}, connector=aiohttp.TCPConnector(ssl=False, force_close=True)
                )
            )
            await self.ready()
            self._parts = parts.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._parts.aclose()

    def start(self) -> None:
        """The API server; it was stopped, or never ran."""
        self._server = Child("kube-apiserver", self._server_command(), log=self.directory / "server.log", grace_s=20.0)

    async def stop(self) -> None:
        """The API server; etcd keeps what there is."""
        await asyncio.to_thread(self._server.stop)

    async def ready(self) -> None:
        """Until the API server answers, with its roles and namespaces in place."""
        async with asyncio.timeout(READY_S):
            while True:
                assert self._server.poll() is None, f"kube-apiserver ended:\n{self._server.tail()}"
                try:
                    async with self._http.get(f"{self.url}/readyz") as response:
                        if response.status == 200 and await self.get("/api/v1/namespaces/default") is not None:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.1)

    async def compact(self) -> None:
        """Let etcd forget all history."""
        at = f"http://127.0.0.1:{self._etcd_port}/v3/kv"
        async with aiohttp.ClientSession() as session:  # without the token, which etcd would take for one of its own
            async with session.post(f"{at}/range", json={"key": _key("x")}) as response:
                revision = (await response.json())["header"]["revision"]
            async with session.post(f"{at}/compaction", json={"revision": revision, "physical": True}) as response:
                assert response.status == 200, await response.text()

    def access(self, token: str) -> Access:
        """As a client with this token."""
        return Access(server=self.url, namespace="default", token=token, ca_file=self.directory / "certs" / "apiserver.crt")

    # -- objects -----------------------------------------------------------------------------------------------------------

    async def get(self, path: str) -> Object | None:
        async with self._http.get(f"{self.url}{path}") as response:
            return None if response.status != 200 else await response.json()

    async def post(self, path: str, found: Object) -> Object:
        async with self._http.post(f"{self.url}{path}", json=found) as response:
            assert response.status in (200, 201), await response.text()
            return await response.json()

    async def patch(self, path: str, change: Object) -> Object:
        headers = {"content-type": "application/merge-patch+json"}
        async with self._http.patch(f"{self.url}{path}", json=change, headers=headers) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def delete(self, path: str, *, grace_s: int | None = None) -> None:
        query = {} if grace_s is None else {"gracePeriodSeconds": str(grace_s)}
        async with self._http.delete(f"{self.url}{path}", params=query) as response:
            assert response.status in (200, 202), await response.text()

    # -- files and commands ------------------------------------------------------------------------------------------------

    def _write_files(self) -> None:
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
        (self.directory / "accounts.key").write_bytes(pem)
        (self.directory / "tokens.csv").write_text(
            f"{ADMIN},admin,1,system:masters\n{FILTER},system:serviceaccount:default:baton,2,system:serviceaccounts\n"
        )

    def _etcd_command(self) -> list[str]:
        url, peer = f"http://127.0.0.1:{self._etcd_port}", f"http://127.0.0.1:{self._peer_port}"
        return [
            str(self._binaries / "etcd"),
            f"--data-dir={self.directory}/etcd",
            f"--listen-client-urls={url}",
            f"--advertise-client-urls={url}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
        ]

    def _server_command(self) -> list[str]:
        return [
            str(self._binaries / "kube-apiserver"),
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            "--etcd-compaction-interval=0",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={self._port}",
            f"--cert-dir={self.directory}/certs",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--authorization-mode=RBAC",
            f"--token-auth-file={self.directory}/tokens.csv",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self.directory}/accounts.key",
            f"--service-account-signing-key-file={self.directory}/accounts.key",
            "--disable-admission-plugins=ServiceAccount",  # nobody here makes the accounts that pods would need
        ]


def binaries() -> Path:
    """The folder with etcd and kube-apiserver: that of the variable BATON_KUBE_BIN, or the one that `make kube` fills."""
    folder = Path(os.environ.get("BATON_KUBE_BIN") or Path(sys.prefix) / "kube")
    for name in ("etcd", "kube-apiserver"):
        assert (folder / name).is_file(), f"{folder} has no {name}; `make kube` builds it, BATON_KUBE_BIN names another folder"
    return folder


def _key(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
