"""A client that test_restart.py steers: a command a line, an answer a line."""

from __future__ import annotations

import sys
from typing import Any

from restart_world import SIZE, chain_of, manifest, payload, put

import kvd
from kvd.errors import KvdError


class Client:
    def __init__(self, path: str) -> None:
        self.store = kvd.connect(path, client="child")
        self.ns = self.store.namespace(manifest())
        self.leases: Any = None
        self.writes: Any = None

    def put(self, name: int, count: int) -> str:
        put(self.ns, name, count)
        return "done"

    def lease(self, name: int, count: int) -> str:
        self.leases = self.ns.acquire(chain_of(self.ns, name, count))
        return str(len(self.leases))

    def check(self, name: int) -> str:
        return str(all(bytes(lease.view) == payload(name, at) for at, lease in enumerate(self.leases)))

    def release(self) -> str:
        self.leases.release()
        self.leases = None
        return "done"

    def reserve(self, name: int, count: int) -> str:
        self.writes = self.ns.reserve(chain_of(self.ns, name, count), nbytes=SIZE)
        self.view = self.writes[0].view
        return "done"

    def scribble(self, byte: int) -> str:
        self.view[:] = bytes([byte]) * SIZE
        return "done"

    def publish(self) -> str:
        self.view.release()
        del self.view
        self.writes.publish()
        return "published"

    def drop(self) -> str:
        self.writes = None
        return "done"

    def match(self, name: int, count: int) -> str:
        return str(self.ns.match(chain_of(self.ns, name, count)))


def main() -> None:
    client = Client(sys.argv[1])
    print("attached", flush=True)
    for line in sys.stdin:
        name, *arguments = line.split()
        try:
            answer = getattr(client, name)(*map(int, arguments))
        except KvdError as error:
            answer = error.code
        print(answer, flush=True)


if __name__ == "__main__":
    main()
