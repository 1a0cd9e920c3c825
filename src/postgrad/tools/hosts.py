"""The Host headers that a server on this machine accepts.

A web page can let its own name resolve to 127.0.0.1 (DNS rebinding): the browser then takes this
server for that page's, and only the Host header still shows the name that was asked for.
"""

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
HTTP_PORT = 80  # which a browser leaves out


def own_hosts(address: str, port: int) -> frozenset[str]:
    """Every Host value that names the server bound to `address` and `port`: its address and the
    loopback names, with the port.
    """
    bound = f"[{address}]" if ":" in address else address
    names = [bound.lower(), *LOOPBACK]
    with_port = [f"{name}:{port}" for name in names]
    return frozenset(with_port + (names if port == HTTP_PORT else []))


def is_own(hosts: frozenset[str], requested: list[str]) -> bool:
    """True where a request has exactly one Host header, and it names this server."""
    return len(requested) == 1 and requested[0].strip().lower() in hosts
